"""The job that every engine is given: a model's shape, seeded rows, and what a step is. No torch is imported here."""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

Precision = Literal["fp32", "bf16"]
Family = Literal["phi3", "phi", "llama", "gemma3_text"]
LORA_RANK = 16
LORA_ALPHA = 32
LEARNING_RATE = 2e-4
MAX_GRAD_NORM = 1.0
FIRST_TEXT_ID = 16
"""Ids below it belong to the tokenizer's special tokens."""
SHARED_PROMPT_TOKENS = 150
LORA_TARGETS: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    **dict.fromkeys(
        ("llama", "gemma3_text"), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ),
}
_PUBLISHED = Path(__file__).resolve().parent.parent / "finetune" / "model" / "published.yaml"


class Row(NamedTuple):
    """One conversation as token ids."""

    ids: list[int]
    is_target: list[bool]
    """True for tokens that carry loss; never the first."""


class Lengths(NamedTuple):
    """What conversations are drawn from."""

    shortest: int
    longest: int
    log_mean: float
    """The mean of the logarithm of a row's tokens."""
    log_deviation: float
    target_share: float
    """The mean share of the tokens that carry loss."""
    most_turns: int

    @property
    def mean(self) -> float:
        """The mean number of tokens of a row."""
        return math.exp(self.log_mean + self.log_deviation**2 / 2)


_CHATS = Lengths(24, 512, 5.02, 0.6, 0.4, 3)
_GSM8K = Lengths(108, 570, 5.36, 0.31, 0.57, 1)
"""GSM8K's training rows as chats, in tokens of SmolLM2 and with its default system turn."""


class RowShape(NamedTuple):
    """All that the cost of a row depends on."""

    num_tokens: int
    num_targets: int


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and the rows it is given.

    Attributes:
        family: transformers' type of the model.
        real_model: the name of the real model (`tools/real_model.py`); None: the weights are random.
        head_width: width of one head; None: of all heads together, it is `hidden`.
        lengths: of chat rows.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        layers: decoder layers.
        heads: query heads.
        kv_heads: key and value heads.
        vocabulary: rows of the embedding and of the head.
        tied: whether the head is the embedding.
        partial_rotary: the part of each head that is rotated.
        context: the most positions.
        stored_as: the type of the base model's weights on disk.
        num_rows: conversations in the job.
        row_tokens: None for chat rows; else every row has so many tokens, all of them carry loss.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    partial_rotary: float = 1.0
    context: int = 4096
    stored_as: Precision = "fp32"
    num_rows: int = 600
    row_tokens: int | None = None
    family: Family = "phi3"
    real_model: str | None = None
    head_width: int | None = None
    lengths: Lengths = _CHATS

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The names of the linear layers of a decoder layer, all of which carry LoRA."""
        return LORA_TARGETS[self.family]

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_width or self.hidden // self.heads

    @property
    def linear_shapes(self) -> list[tuple[int, int]]:
        """(in, out) of the linear layers of one decoder layer, in the order of `lora_targets`."""
        attention, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = [attention + 2 * keys] if self.family == "phi3" else [attention, keys, keys]
        widened = {"phi3": [2 * self.intermediate], "phi": [self.intermediate]}
        mlp = widened.get(self.family, [self.intermediate] * 2)
        return [
            *((self.hidden, width) for width in widths),
            (attention, self.hidden),
            *((self.hidden, width) for width in mlp),
            (self.intermediate, self.hidden),
        ]

    @property
    def shapes_at_input(self) -> list[tuple[int, int]]:
        """(in, out) of the linear layers that read the input of a decoder layer. In phi the MLP is one of them."""
        shapes = self.linear_shapes
        projections = shapes[:1] if self.family == "phi3" else shapes[:3]
        return [*projections, shapes[4]] if self.family == "phi" else projections

    def model_config(self) -> dict[str, Any]:
        """The model's configuration, as transformers takes it."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
        made: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "rope_parameters": rope,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attention_dropout": 0.0,
        }
        if self.family in ("phi3", "phi"):
            rope["partial_rotary_factor"] = self.partial_rotary
            made |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
        if self.family == "phi3":
            made["original_max_position_embeddings"] = self.context
        return made


def _published(name: str) -> Size:
    """Return the shape of a published model, with long rows, every token of which carries loss, and weights in bf16."""
    sizes = yaml.safe_load(_PUBLISHED.read_text(encoding="utf-8"))[name]["config"]
    return Size(
        hidden=sizes["hidden_size"],
        intermediate=sizes["intermediate_size"],
        layers=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        vocabulary=sizes["vocab_size"],
        tied=sizes["tie_word_embeddings"],
        partial_rotary=sizes.get("partial_rotary_factor", 1.0),
        context=sizes["max_position_embeddings"],
        stored_as="bf16",
        num_rows=160,
        row_tokens=4096,
    )


_PHI4_MINI = _published("microsoft/Phi-4-mini-instruct")

SIZES: dict[str, Size] = {
    # Phi-4-mini in small: its 8/3 of MLP, its tied head, its partial rotary, and with 8 layers its share of the head
    # among the matrix products (16.0 %). Eight heads of 64 cannot be grouped three to one: four to one, as in phi-4.
    "real": Size(
        hidden=512,
        intermediate=1368,
        layers=8,
        heads=8,
        kv_heads=2,
        vocabulary=8192,
        tied=True,
        partial_rotary=0.75,
    ),
    # Separate projections: the heads of phi-2 have a key each, and it has no gate; the MLP of Qwen2.5 is wider.
    "phi2": Size(
        hidden=512, intermediate=2048, layers=8, heads=8, kv_heads=8, vocabulary=8192, partial_rotary=0.5, family="phi"
    ),
    "qwen2": Size(
        hidden=512, intermediate=2752, layers=8, heads=8, kv_heads=2, vocabulary=8192, tied=True, family="llama"
    ),
    "smollm2": Size(
        hidden=576,
        intermediate=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        vocabulary=49152,
        tied=True,
        context=8192,
        family="llama",
        real_model="smollm2",
        lengths=_GSM8K,
    ),
    "gemma3": Size(
        hidden=640,
        intermediate=2048,
        layers=18,
        heads=4,
        kv_heads=1,
        vocabulary=262_144,
        tied=True,
        context=32_768,
        family="gemma3_text",
        real_model="gemma3",
        head_width=256,
        lengths=_GSM8K,
    ),
    # The vocabulary of Phi-3-mini, and that of phi-4, on a small body: what a head costs that is run everywhere.
    "s32k": Size(hidden=256, intermediate=688, layers=8, heads=4, kv_heads=1, vocabulary=32064),
    "s100k": Size(hidden=256, intermediate=688, layers=8, heads=4, kv_heads=1, vocabulary=100352),
    # For an accelerator: the real shapes, with long rows and with chat rows.
    "phi4-mini": _PHI4_MINI,
    "phi4-mini-chat": replace(_PHI4_MINI, num_rows=1280, row_tokens=None),
    "phi4-mini-short": replace(_PHI4_MINI, row_tokens=1024),
    "phi4": _published("microsoft/phi-4"),
    # For `benchmarks.sharding`: 197 million parameters.
    "sharded": Size(hidden=1024, intermediate=2816, layers=16, heads=16, kv_heads=8, vocabulary=8192, tied=True),
    # For tests: an eighth of its weights.
    "sharded-shallow": Size(hidden=512, intermediate=1408, layers=5, heads=8, kv_heads=4, vocabulary=8192, tied=True),
    "tiny": Size(hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, vocabulary=320),
    "tiny-long": Size(
        hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, vocabulary=320, num_rows=40, row_tokens=256
    ),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One setting in which engines are compared.

    Attributes:
        size: a key of `SIZES`.
        precision: of the frozen weights and of the matrix products.
        has_shared_prompt: whether every row begins with the same system prompt.
        processes: ranks that train together.
        device: `cpu` or `cuda`.
        steps: optimizer steps.
        warmup_steps: the first steps, of which the rates take no account.
        global_batch: rows of an optimizer step over all ranks.
        seed: of weights and rows.
        objective: `dpo`: rows 2k and 2k + 1 are the chosen and the rejected answer to one prompt.
        method: `full`: all weights train, with ours and with the plain loops of that name.
    """

    size: str
    precision: Precision = "fp32"
    has_shared_prompt: bool = False
    processes: int = 1
    device: str = "cpu"
    steps: int = 30
    warmup_steps: int = 3
    global_batch: int = 16
    seed: int = 0
    objective: Literal["sft", "dpo"] = "sft"
    method: Literal["lora", "full"] = "lora"

    @property
    def shape(self) -> Size:
        """The model and its rows."""
        return SIZES[self.size]

    @property
    def longest(self) -> int:
        """No row has more tokens."""
        return (self.shape.row_tokens or self.shape.lengths.longest) + SHARED_PROMPT_TOKENS * self.has_shared_prompt

    @property
    def name(self) -> str:
        """What a table calls this setting."""
        extras = [
            "pairs" if self.objective == "dpo" else "",
            "all weights" if self.method == "full" else "",
            "shared prompt" if self.has_shared_prompt else "",
            f"{self.processes} processes" if self.processes > 1 else "",
            self.device if self.device != "cpu" else "",
        ]
        return ", ".join(filter(None, [self.size, self.precision, *extras]))

    def rows(self) -> list[Row]:
        """The rows in the order of training: step s of an engine that keeps it has rows 16 s to 16 s + 15."""
        rng = random.Random(self.seed)
        text_ids = range(FIRST_TEXT_ID, self.shape.vocabulary)
        prompt = rng.choices(text_ids, k=SHARED_PROMPT_TOKENS)
        if self.objective == "dpo":
            return [side for _ in range(self.shape.num_rows // 2) for side in _pair(rng, text_ids, self.shape.lengths)]
        fixed = self.shape.row_tokens
        rows = [
            _chat_row(rng, text_ids, self.shape.lengths)
            if fixed is None
            else Row(rng.choices(text_ids, k=fixed), _all_but_first(fixed))
            for _ in range(self.shape.num_rows)
        ]
        if not self.has_shared_prompt:
            return rows
        return [Row(prompt + row.ids, [False] * len(prompt) + row.is_target) for row in rows]

    def fingerprint(self) -> str:
        """A digest of the job and of its model's shape: two equal ones mean the same work."""
        text = json.dumps([asdict(self), asdict(self.shape), self.shape.lora_targets, LORA_RANK], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def row_shape(row: Row) -> RowShape:
    """What the cost of a row depends on."""
    return RowShape(len(row.ids), sum(row.is_target))


def _chat_row(rng: random.Random, text_ids: range, lengths: Lengths) -> Row:
    """Turns of a user and an assistant; the assistant's tokens carry loss, and the row ends with one."""
    length = _draw_length(rng, lengths)
    turns = rng.randint(1, min(lengths.most_turns, length // lengths.shortest))
    is_target: list[bool] = []
    for turn in range(turns):
        tokens = length * (turn + 1) // turns - length * turn // turns
        answer = min(tokens - 4, max(1, round(tokens * rng.betavariate(4, 4 * (1 / lengths.target_share - 1)))))
        is_target += [False] * (tokens - answer) + [True] * answer
    return Row(rng.choices(text_ids, k=length), is_target)


def _pair(rng: random.Random, text_ids: range, lengths: Lengths) -> list[Row]:
    """Two answers to one prompt: as long as a chat, and as large a share of it carries loss."""
    length, share = _draw_length(rng, lengths), lengths.target_share
    prompt = rng.choices(text_ids, k=round(length * (1 - share)))
    most = lengths.longest - len(prompt)
    answers = [max(1, min(most, round(length * share * rng.uniform(0.5, 1.5)))) for _ in range(2)]
    return [Row(prompt + rng.choices(text_ids, k=n), [False] * len(prompt) + [True] * n) for n in answers]


def _draw_length(rng: random.Random, lengths: Lengths) -> int:
    drawn = round(rng.lognormvariate(lengths.log_mean, lengths.log_deviation))
    return min(lengths.longest, max(lengths.shortest, drawn))


def _all_but_first(length: int) -> list[bool]:
    return [False] + [True] * (length - 1)
