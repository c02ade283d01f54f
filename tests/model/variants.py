"""Every Phi variant in miniature: a random model and a tokenizer with the variant's own special tokens and template.

Vocabularies are made here; special tokens, their flags and order, and the templates are those of Microsoft's files, as
they are quoted in public: microsoft/onnxruntime-extensions `shared/api/chat_template.cc` (Phi-3-mini, Phi-3.5-mini,
Phi-4-mini), ggml-org/llama.cpp `tests/test-chat-template.cpp` (phi-4 as first uploaded), johnmai-dev/Jinja and others
(phi-4 as corrected), the model cards of phi-1.5 and phi-2. The system prompt of Phi-4-reasoning is theirs, cut short.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PhimoeConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from finetune.config.compose import load_config
from finetune.config.schema import Config
from tests.tiny_models import SIZES, build_tiny, tiny_phi3_config, tiny_phi_config

BOUNDARY = 16
"""`original_max_position_embeddings` of the tiny LongRoPE models; 4096 in the real ones."""
_SPARE_ROWS = 13
"""Rows that the model has beyond its tokenizer, as the real ones do."""
_LINES = [
    "Please send three crates of oranges to Marta Ruiz in Porto by Friday.",
    "system user assistant answer the question, the answer is yes or no",
]
_HALF_HEAD = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "no"},
]
TOOL_TURNS = [
    {**SYSTEM, "tools": '[{"name": "f"}]'},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": '<|tool_call|>[{"name": "f"}]<|/tool_call|>'},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "no"},
]

_PHI3_TURNS = (
    "{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}" + _PHI3_TURNS
)
PHI3_MEDIUM = (
    "{% for message in messages %}{% if (message['role'] == 'user') %}"
    "{{'<|user|>' + '\\n' + message['content'] + '<|end|>' + '\\n' + '<|assistant|>' + '\\n'}}"
    "{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|end|>' + '\\n'}}{% endif %}{% endfor %}"
)
"""Also that of Phi-3-mini's first upload; llama.cpp's tests/test-chat-template.cpp repeats it."""
PHI3_5 = (
    "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}" + _PHI3_TURNS
)
PHI4_FIRST = (
    "{% for message in messages %}{% if (message['role'] == 'system') %}"
    "{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}"
    "{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|><|im_start|>assistant<|im_sep|>'}}"
    "{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}"
)
PHI4 = (
    "{% for message in messages %}{% if (message['role'] == 'system') %}"
    "{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}"
    "{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}"
    "{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
PHI4_REASONING = (
    "<|im_start|>system<|im_sep|>You are Phi, a language model trained by Microsoft to help users.<|im_end|>"
    "{% for message in messages %}{% if (message['role'] == 'user') %}"
    "{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}"
    "{{'<|im_start|>assistant<|im_sep|>'}}{% generation %}{{message['content'] + '<|im_end|>'}}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
PHI4_MINI = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI4_MINI_REASONING = (
    "{{ '<|system|>Your name is Phi, an AI math expert developed by Microsoft.' }}"
    "{% for message in messages %}{% if message['role'] == 'system' %} {{ message['content'] }}"
    "{% if 'tools' in message and message['tools'] is not none %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}"
    "{% endif %}{% endif %}{% endfor %}{{ '<|end|>' }}"
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
"""As unsloth's copy of the model has it. onnxruntime-extensions' tests have what it renders, see test_variants.py."""


@dataclass(frozen=True, kw_only=True)
class Special:
    """Tokens that a tokenizer has beyond its vocabulary.

    Attributes:
        special: their texts, in the order of their ids.
        plain: further ones that decoding keeps, after those.
        lstrip: whether they swallow white space before them, all but `<|endoftext|>`.
        rstrip: behind them.
        keywords: eos, pad and the like.
    """

    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    lstrip: bool = False
    rstrip: bool = False
    keywords: dict[str, str]


_END_OF_TEXT = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
GPT2 = Special(special=("<|endoftext|>",), keywords={**_END_OF_TEXT, "unk_token": "<|endoftext|>"})
PHI3_TOKENS = Special(
    special=(
        *("<|endoftext|>", "<|assistant|>"),
        *(f"<|placeholder{n}|>" for n in (1, 2, 3, 4)),
        *("<|system|>", "<|end|>", "<|placeholder5|>", "<|placeholder6|>", "<|user|>"),
    ),
    rstrip=True,
    keywords={"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": "<unk>"},
)
PHI4_TOKENS = Special(
    special=(
        *("<|dummy_0|>", "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
        *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|dummy_1|>", "<|dummy_85|>"),
    ),
    lstrip=True,
    rstrip=True,
    keywords={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|dummy_85|>"},
)
PHI4_FIRST_TOKENS = Special(
    special=PHI4_TOKENS.special, lstrip=True, rstrip=True, keywords={**_END_OF_TEXT, "pad_token": "<|endoftext|>"}
)
PHI4_MINI_TOKENS = Special(
    special=("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>"),
    plain=("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
    rstrip=True,
    keywords={**_END_OF_TEXT, "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
)


def _longrope(**more: Any) -> dict[str, Any]:
    rotary = {"short_factor": [1.0] * _HALF_HEAD, "long_factor": [3.0] * _HALF_HEAD, **more}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BOUNDARY, **rotary}
    return {"original_max_position_embeddings": BOUNDARY, "rope_parameters": rope}


def _phimoe(**changes: Any) -> PhimoeConfig:
    rope = _longrope(short_mscale=1.1, long_mscale=1.3)["rope_parameters"]
    experts = {"num_local_experts": 4, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01}
    keys = {"num_key_value_heads": 2, "attention_bias": True, "lm_head_bias": True, "sliding_window": 131072}
    return PhimoeConfig(**{**SIZES, **keys, **experts, "rope_parameters": rope, **changes})


def _phi3(keys: dict[str, Any], **more: Any) -> Callable[..., PreTrainedConfig]:
    """Make tiny phi3 configurations of these keys, for any ids."""
    return lambda **ids: tiny_phi3_config(**{**keys, **more, **ids})


_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False}
_WIDE = {"num_key_value_heads": 4, "tie_word_embeddings": False}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant.

    Attributes:
        name: for people.
        preset: the file in configs/model.
        config: its model in miniature, from (vocabulary rows, ids).
        tokens: its special tokens.
        template: its tokenizer's own, or None where the preset's is used.
        turns: the conversation of its golden tokens.
        completed: a prompt and its completion in their place, for a model that knows no turns.
        end: the token that ends a turn.
        targets: the layers that LoRA adapts.
        is_tied: head and embedding share their weights.
        boundary: up to where rows are short for LongRoPE.
    """

    name: str
    preset: str
    config: Callable[..., PreTrainedConfig]
    tokens: Special
    template: str | None = None
    turns: list[dict[str, str]] = field(default_factory=lambda: [SYSTEM, *TURNS])
    completed: tuple[str, str] | None = None
    end: str = "<|endoftext|>"
    targets: tuple[str, ...] = ("down_proj", "gate_up_proj", "o_proj", "qkv_proj")
    is_tied: bool = False
    boundary: int | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The row of its golden tokens."""
        if self.completed is None:
            return {"messages": self.turns}
        return dict(zip(("prompt", "completion"), self.completed, strict=True))

    @property
    def answers(self) -> list[str]:
        """The texts of the row that carry loss, without their ends."""
        if self.completed is not None:
            return [self.completed[1]]
        return [turn["content"] for turn in self.turns if turn["role"] == "assistant"]

    def write(self, folder: Path) -> Path:
        """Model and tokenizer as a folder; the tokenizer as Microsoft's, not as ours makes of it."""
        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(folder)
        self.model(tokenizer).save_pretrained(folder)
        return folder

    def model(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        """A random model that knows eos and pad as Microsoft's config.json does."""
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        rows = len(tokenizer) + _SPARE_ROWS
        return build_tiny(self.config(vocab_size=rows, pad_token_id=tokenizer.pad_token_id, **ids))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer as it is uploaded."""
        is_sentencepiece = "<s>" in self.tokens.keywords.values()
        backend = Tokenizer.from_str(_sentencepiece() if is_sentencepiece else _byte_level())
        for texts, special in ((self.tokens.special, True), (self.tokens.plain, False)):
            backend.add_tokens([self._added(text, special=special) for text in texts])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **self.tokens.keywords)  # type: ignore[no-untyped-call]
        tokenizer.chat_template = self.template
        return tokenizer

    def _added(self, text: str, *, special: bool) -> AddedToken:
        strips = text != "<|endoftext|>"
        left, right = self.tokens.lstrip and strips, self.tokens.rstrip and strips
        return AddedToken(text, special=special, normalized=False, lstrip=left, rstrip=right)

    def run_config(self, folder: Path, *words: str) -> Config:
        """The preset, with this variant's folder in place of its hub id."""
        data = words or ("data.path=rows.jsonl",)
        return load_config([f"model={self.preset}", f"model.path={folder}", *data], task="finetune_lora")


_PHI = {"config": tiny_phi_config, "tokens": GPT2, "targets": ("dense", "fc1", "fc2", "k_proj", "q_proj", "v_proj")}
_PHI_3 = {"tokens": PHI3_TOKENS, "end": "<|end|>"}
_LONG = {"boundary": BOUNDARY}
_MEDIUM = {**_PHI_3, "template": PHI3_MEDIUM, "turns": TURNS}
_PHI_4 = {"config": _phi3(_PLAIN, sliding_window=None), "tokens": PHI4_TOKENS, "end": "<|im_end|>"}
_REASONING = {**_PHI_4, "template": PHI4_REASONING, "turns": TURNS}
_PHI_4_MINI = {
    "config": _phi3(_longrope(), sliding_window=262144, tie_word_embeddings=True),
    **{"tokens": PHI4_MINI_TOKENS, "end": "<|end|>", "is_tied": True, **_LONG},
}
_LONG_MINI = {"config": _phi3(_WIDE | _longrope(), sliding_window=262144), **_PHI_3, **_LONG}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi-1": ("phi1", {**_PHI, "completed": ("def f(n):\n", "    return n\n")}),
    "phi-1.5": ("phi1_5", _PHI),
    "phi-2": ("phi2", _PHI),
    "Phi-3-mini-4k": ("phi3_mini", {"config": _phi3(_PLAIN | _WIDE, sliding_window=7), **_PHI_3, "template": PHI3}),
    "Phi-3-mini-128k": ("phi3_mini_128k", {**_LONG_MINI, "template": PHI3}),
    "Phi-3-medium-4k": ("phi3_medium", {"config": _phi3(_PLAIN, sliding_window=7), **_MEDIUM}),
    "Phi-3-medium-128k": (
        "phi3_medium_128k",
        {"config": _phi3(_longrope(), tie_word_embeddings=False, sliding_window=131072), **_MEDIUM, **_LONG},
    ),
    "Phi-3.5-mini": ("phi3_5_mini", {**_LONG_MINI, "template": PHI3_5}),
    "Phi-3.5-MoE": (
        "phi3_5_moe",
        {
            **{"config": _phimoe, **_PHI_3, "template": PHI3_5, **_LONG},
            "targets": ("k_proj", "o_proj", "q_proj", "v_proj"),
        },
    ),
    "phi-4": ("phi4", {**_PHI_4, "template": PHI4}),
    "phi-4, first upload": ("phi4", {**_PHI_4, "tokens": PHI4_FIRST_TOKENS, "template": PHI4_FIRST}),
    "Phi-4-reasoning": ("phi4_reasoning", _REASONING),
    "Phi-4-reasoning-plus": ("phi4_reasoning_plus", _REASONING),  # the cards of both give the same format
    "Phi-4-mini": ("phi4_mini", {**_PHI_4_MINI, "template": PHI4_MINI, "turns": TOOL_TURNS}),
    "Phi-4-mini-reasoning": ("phi4_mini_reasoning", {**_PHI_4_MINI, "template": PHI4_MINI_REASONING}),
}
"""By name: preset, and what else it differs by."""
VARIANTS = {name: Variant(name=name, preset=preset, **keys) for name, (preset, keys) in _VARIANTS.items()}


@cache
def _byte_level() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_LINES, trainer)
    return backend.to_str()


@cache
def _sentencepiece() -> str:
    """As Llama's tokenizer, which Phi-3 has: `▁` for a space and in front, bytes for what is unknown."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<unk>", "<s>", "</s>", *spelled], show_progress=False
    )
    backend.train_from_iterator(_LINES, trainer)
    record = json.loads(backend.to_str())
    record["added_tokens"] = [token for token in record["added_tokens"] if token["id"] < 3]
    record["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return json.dumps(record)
