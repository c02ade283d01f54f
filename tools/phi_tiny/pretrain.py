"""Make phi_tiny, the base model that comes with the package, from text that a script makes.

    python tools/phi_tiny/make_corpus.py runs/phi_tiny_text
    python tools/phi_tiny/pretrain.py

Three stages, each of which starts from where the one before ended: seeded random weights, the first layers of which are
set up for copying; a short drill in copying; the corpus. About 15 minutes on two cores. The model ends as bf16
safetensors with its tokenizer in runs/phi_tiny/phi_tiny. The words after the command apply to all stages.
"""

from pathlib import Path
from typing import Any

import torch

from finetune import (
    Trainer,
    build_base_model,
    build_tokenizer,
    command,
    encode_examples,
    launch,
    load_config,
    load_examples,
    stop_ids,
)

STAGES = Path(__file__).parent


def start(words: list[str]) -> None:
    """Write the model with which the drill begins."""
    config = load_config(words, task=str(STAGES / "start.yaml"))
    torch.manual_seed(config.seed)
    model = build_base_model(config.model)
    set_up_copying(model)
    model.save_pretrained(config.output_dir)
    build_tokenizer(config.model).save_pretrained(config.output_dir)


def train(words: list[str], stage: str) -> None:
    """Train every weight on plain text, and keep the result in bf16."""
    config = load_config(words, task=str(STAGES / f"{stage}.yaml"))

    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        examples = load_examples(config.data)
        splits = encode_examples(examples, tokenizer, config.data, fallbacks=runtime.fallbacks)
        model = build_base_model(config.model)

        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, _ = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)

        if runtime.is_main_process:
            # What a chat stops at is known to the tokenizer's template; generation must know it too.
            model.generation_config.eos_token_id = stop_ids(tokenizer)
            model.generation_config.pad_token_id = tokenizer.pad_token_id
            model.config.use_cache = True  # off while training
            folder = Path(config.output_dir) / "phi_tiny"
            model.bfloat16().save_pretrained(folder)
            tokenizer.save_pretrained(folder)


@torch.no_grad()
def set_up_copying(model: Any) -> None:
    """Give random weights the two heads that copy: one that looks back by one token, one that looks that token up.

    A small model needs millions of tokens to find this pair by itself (induction heads: Olsson et al., 2022,
    arXiv:2209.11895); begun with it in outline, a few hundred steps suffice. Setting attention up by the pattern that
    training would give it is called mimetic initialisation (Trockman and Kolter, 2023, arXiv:2305.09828).

    Shapes: query and key weights (heads, head size, hidden), value weights the same, output weights (hidden, heads,
    head size). The first half of the rotated dimensions turns together with the second half.
    """
    config = model.config
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden = config.hidden_size
    rotated = int(size * config.rope_parameters["partial_rotary_factor"])
    half = rotated // 2

    # What all tokens share: a head can tell positions apart only by something that does not depend on the token.
    shared = torch.zeros(hidden)
    shared[:8] = 8**-0.5
    model.model.embed_tokens.weight[:, :8] += 0.2
    elsewhere = torch.linalg.qr(torch.randn(hidden, hidden))[0]

    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        query, key, value = attention.qkv_proj.weight.split([heads * size, groups * size, groups * size])
        query, key = query.view(heads, size, hidden), key.view(groups, size, hidden)
        output = attention.o_proj.weight.view(hidden, heads, size)
        layer.mlp.down_proj.weight.mul_(0.3)

        # Values go through attention unchanged, to be written back as they were ...
        value.copy_(torch.linalg.qr(torch.randn(hidden, hidden))[0][: groups * size])
        values = value.view(groups, size, hidden).repeat_interleave(heads // groups, dim=0)
        if number == 0:
            # ... but by the first layer in other directions, where they do not get mixed up with the token itself.
            output.copy_(0.04 * torch.einsum("ij,hsj->ihs", elsewhere, values))
            _look_back_by_one(query, key, shared, half, config.rope_parameters["rope_theta"])
            continue
        output.copy_(0.08 * values.permute(2, 0, 1))
        # Query by this token, key by the token before: they meet where this token was followed by something.
        match = 0.12 * torch.randn(groups, size, hidden)
        match[:, :rotated] *= 0.3  # position matters little here
        match -= (match @ shared).unsqueeze(-1) * shared
        query.copy_(match.repeat_interleave(heads // groups, dim=0))
        key.copy_(match @ elsewhere.T)


def _look_back_by_one(query: torch.Tensor, key: torch.Tensor, shared: torch.Tensor, half: int, theta: float) -> None:
    """Make the heads of the first group attend to the token before: their query is the key, turned on by one place."""
    key[0] *= 0.1
    key[0, :14] += 0.35 * shared
    angles = theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos().unsqueeze(-1), angles.sin().unsqueeze(-1)
    turned = key[0].clone()
    turned[:half] = cos * key[0, :half] + sin * key[0, half : 2 * half]
    turned[half : 2 * half] = cos * key[0, half : 2 * half] - sin * key[0, :half]
    query[: len(query) // len(key)] = turned


def main(words: list[str]) -> None:
    """Weights to start from, the drill, the corpus."""
    start(words)
    train(words, stage="drill")
    train(words, stage="corpus")


if __name__ == "__main__":
    command(main)
