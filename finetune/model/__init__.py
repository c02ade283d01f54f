"""Base models, their tokenizers and LoRA adapters."""
