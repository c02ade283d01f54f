"""A SentencePiece tokenizer trained here, and a phi3 model for it: what Phi-3 is, in miniature."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from tests.model.variants import PHI3, PHI3_TOKENS
from tests.tiny_models import build_tiny, tiny_phi3_config

Spacing = Literal["each piece", "first piece"]
"""Where the tokenizer puts a space: before each piece of text, as the file of Phi-3 does, or before the first piece
only, as transformers' LlamaTokenizer does with `legacy=False`, and as many uploads were saved by it."""
_WORDS = "please send crates of oranges to Marta Ruiz in Porto by Friday and Write What is the capital Answer one short"


def train(path: Path, *, end: str = "</s>") -> None:
    """Train a byte-fallback BPE model on seeded sentences, and write its tokenizer.model."""
    from sentencepiece import SentencePieceTrainer

    rng, words, model = random.Random(0), _WORDS.split(), io.BytesIO()
    lines = [" ".join(rng.choices(words, k=9)) + rng.choice(".?!") for _ in range(400)]
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        eos_piece=end,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


def build_tokenizer(path: Path, spacing: Spacing, *, lstrip: bool = False) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a tokenizer.model, with the special tokens and the template of Phi-3."""
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(path))
    tokens = [pieces.IdToPiece(token_id) for token_id in range(len(pieces))]
    scores = {token: pieces.GetScore(token_id) for token_id, token in enumerate(tokens)}
    special = [
        token for token_id, token in enumerate(tokens) if pieces.IsControl(token_id) or pieces.IsUnknown(token_id)
    ]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    spell = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    record: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spell]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                *({"type": "ByteFallback"}, {"type": "Fuse"}, strip),
            ],
        },
        "model": {
            **{"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True, "vocab": vocab},
            "merges": [list(pair) for pair in generate_merges(vocab, scores, skip_tokens=special)],
        },
    }
    if spacing == "first piece":
        record["normalizer"] = None
        scheme = {"replacement": "▁", "prepend_scheme": "first", "split": False}
        record["pre_tokenizer"] = {"type": "Metaspace", **scheme}
    backend = Tokenizer.from_str(json.dumps(record))
    flags = {token: {"rstrip": token == "</s>"} for token in special}
    flags |= {token: {"rstrip": token != "<|endoftext|>", "lstrip": lstrip} for token in PHI3_TOKENS.special}
    backend.add_tokens([AddedToken(token, special=True, normalized=False, **each) for token, each in flags.items()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **PHI3_TOKENS.keywords)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = PHI3
    return tokenizer


def build_base(tokenizer: PreTrainedTokenizerFast) -> Any:
    """A random phi3 model whose answers end now and then."""
    rows, ends = len(tokenizer) + 13, tokenizer.convert_tokens_to_ids("<|end|>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = build_tiny(
        tiny_phi3_config(
            **{**sizes, "vocab_size": rows, "tie_word_embeddings": False, "sliding_window": 2047},
            **{"rope_parameters": rope, "max_position_embeddings": 2048, "initializer_range": 0.1},
            **{"original_max_position_embeddings": 2048, "bos_token_id": 1, "pad_token_id": 0},
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with torch.no_grad():
        model.lm_head.weight[ends] *= 2.0
    return model
