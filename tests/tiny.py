"""Tiny stand-ins for the real things, made in a fraction of a second and equal in every run."""

from __future__ import annotations

from functools import cache
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

Style = Literal["phi4_mini", "phi3", "phi4", "none"]

CHAT_TEMPLATES: dict[Style, str] = {
    "phi4_mini": (
        "{% for message in messages %}"
        "{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
        "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' "
        "+ '<|end|>' }}"
        "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "phi3": (
        "{% for message in messages %}{% if message['role'] in ('system', 'user', 'assistant') %}"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "phi4": (
        "{% for message in messages %}{% if message['role'] in ('system', 'user', 'assistant') %}"
        "{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
    ),
}
_SPECIAL_TOKENS: dict[Style, list[str]] = {
    "phi4_mini": [
        "<|endoftext|>",
        "<|end|>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|tool|>",
        "<|/tool|>",
    ],
    "phi3": ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
    "phi4": ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|im_sep|>"],
    "none": ["<|endoftext|>"],
}
_TRAINING_LINES = [
    "Please send three crates of oranges to Marta Ruiz in Porto by Friday.",
    '{"item": "oranges", "quantity": 3, "unit": "crate", "customer": "Marta Ruiz", "city": "Porto"}',
    "system user assistant answer the question, the answer is yes or no",
]


def tiny_tokenizer(style: Style = "phi4_mini") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the special tokens and chat template of a Phi family; pad equals eos.

    `phi3`'s special tokens swallow the white space behind them, as the real ones do.
    """
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(_backend_json(style)),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATES.get(style)
    return tokenizer


def add_default_bos(tokenizer: PreTrainedTokenizerFast, bos: str = "<s>") -> None:
    """Let the tokenizer put a beginning-of-sequence token before each text by default, as those of Llama and Gemma."""
    tokenizer.add_special_tokens({"bos_token": bos})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )


@cache
def _backend_json(style: Style) -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_TRAINING_LINES, trainer)
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=style == "phi3") for token in _SPECIAL_TOKENS[style]]
    )
    return backend.to_str()
