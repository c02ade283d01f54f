"""Every configuration key with its type, default and meaning. Other modules get the section they need.

No torch is imported here, so that a config error is reported in a fraction of a second.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo
from pydantic.functional_validators import BeforeValidator, field_validator
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from finetune.config.objectives import OBJECTIVES, ObjectiveFacts
from finetune.errors import ConfigError
from finetune.units import ceil_share


def _without_commas(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _numbers(value: object) -> object:
    """Read a number, or a text of numbers with commas, as a list."""
    with suppress(ValueError, RecursionError):
        return json.loads(f"[{value}]") if isinstance(value, str | int | float) else value
    return value


def _module_names(value: object) -> object:
    """Read a text as names with commas, or as one pattern. PEFT says all-linear for auto, and LLaMA-Factory all."""
    if value in ("all-linear", "all", ["all-linear"], ["all"]):
        return "auto"
    if not isinstance(value, str) or value == "auto":
        return value
    return _without_commas(value) if re.fullmatch(r"[\w.,\s-]+", value) else [value]


TextList = Annotated[list[str], BeforeValidator(_without_commas, json_schema_input_type=str | list[str])]
"""A list of texts, which may also be written as one text with commas: `reward.functions=length,json_valid`."""

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
TrackerList = Annotated[
    list[Tracker],
    BeforeValidator(
        lambda value: [] if value in (None, "none") else _without_commas(value),
        json_schema_input_type=Literal["none", Tracker] | list[Tracker],
    ),
]
"""A list of trackers, which may also be one name, or none."""

ModuleNames = Annotated[
    Literal["auto"] | list[str], BeforeValidator(_module_names, json_schema_input_type=str | list[str])
]
"""Names of layers, which may also be one text with commas."""

T = TypeVar("T")
Commas = Annotated[T, BeforeValidator(_without_commas)]
"""A list of names, which may also be one text with commas."""
Numbers = Annotated[T, BeforeValidator(_numbers)]
"""A list of numbers, which may also be one number, or one text with commas: `lora.layers=30,31`."""


@dataclass(frozen=True)
class OnResume:
    """The effect of changing a key on a resumed run.

    Attributes:
        matters: when the change affects what later steps compute, beyond rounding, and is refused unless
            `resume.allow` names the key: never, always, or only if an adapter is trained, if tokens are dropped or
            noise is added at random, if the rows themselves change, if the learning rate depends on the number of
            steps or epochs, or if validations generate answers.
        decides: what the key decides, for messages. Empty if it never matters.
        fits: whether a checkpoint can still be loaded after the change.
    """

    matters: Literal["never", "always", "adapter", "noise", "rows", "steps", "epochs", "answers"]
    decides: str = ""
    fits: bool = True


Free = Annotated[T, OnResume("never")]
"""A key that may change."""
BaseModelKey = Annotated[T, OnResume("always", "the model that is trained")]
TokenKey = Annotated[T, OnResume("always", "the tokens that the model is given")]
# The rows themselves are compared, so a file may be moved.
RowKey = Annotated[T, OnResume("rows", "the rows to train and validate on")]
_KEPT = OnResume("always", "the rows to train on")
AdapterKey = Annotated[T, OnResume("adapter", "the update that the adapter adds to the model")]
AdapterShape = Annotated[T, OnResume("adapter", "the weights of the adapter", fits=False)]
UpdateKey = Annotated[T, OnResume("always", "the updates of the weights")]
RateKey = Annotated[T, OnResume("always", "the learning rate of every step")]
MeasureKey = Annotated[T, OnResume("always", "the measure by which weights are the best")]
SampleKey = Annotated[T, OnResume("answers", "the answers to validate on: metrics before and after are not comparable")]
SubsetKey = Annotated[T, OnResume("always", "the rows of each loss/NAME: losses before and after are not comparable")]
# Dropout masks and noise belong to the micro-batches; without them, the cut changes only the rounding.
CutKey = Annotated[T, OnResume("noise", "the cut of a global batch, and with it the dropout masks or the noise")]


@dataclass(frozen=True)
class RunsCode:
    """Marks a key that lets code of others run. It counts only on the command line or in a recipe's own code."""

    code: str
    """A description of the code, for messages."""
    needed_by: Literal["model", "training"]
    """Every command that loads the model, or only those that train or prepare a training."""


ALLOWED_OBJECT_MODULES = ("torch.optim", "transformers.optimization", "bitsandbytes.optim", "schedulefree")
"""The only modules that a dotted name in a config may be resolved from."""


SCRIPT_PREFIX = "script:"
"""Begins the value of `optim.optimizer` in the record of a run whose optimizer a script has made."""
ALIASES = {
    "warmup_ratio": "optim.warmup_steps",
    "optim.warmup_ratio": "optim.warmup_steps",
    "report_to": "training.report_to",
    "resume.allow": "resume_allow",  # resume has a value of its own, so it has no keys below it
}
"""Other spellings that are as good as ours, and our keys. They are read without a warning."""

OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "sgd": "torch.optim.SGD",
    "muon": "torch.optim.Muon",
}
"""Short names of optimizers."""


def is_allowed_object(name: str) -> bool:
    """Return whether a dotted name is directly in one of `ALLOWED_OBJECT_MODULES`. Imports nothing."""
    module, _, attribute = name.rpartition(".")
    return module in ALLOWED_OBJECT_MODULES and attribute.isidentifier()


def refused_object(name: str) -> str:
    """Say why a dotted name is refused."""
    return f"{name} is not directly in a module that a config may name: {', '.join(ALLOWED_OBJECT_MODULES)}"


def split_server_address(url: str) -> SplitResult:
    """Split the address of a server. Messages, logs and run.json repeat it, so it may hold no credentials.

    Raises:
        ValueError: the text is not the address of a server. The message does not repeat the text.
    """
    with suppress(ValueError):  # urlsplit, the port and IDNA raise it
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.port
        is_plain = url.isascii() and url.isprintable() and not set(url) & set(" ?#@")
        if is_plain and host and parts.scheme in ("http", "https"):
            return parts
    raise ValueError(
        "not the address of a vLLM server. Expected something like http://localhost:8000, without a user name, a "
        "password or anything after a ? or #. If the server needs a key, set VLLM_API_KEY."
    )


class Section(BaseModel):
    """A frozen group of keys; unknown keys and values of another type are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ParallelSection(Section):
    """The processes that train together. The launcher's environment sets the keys that are left out."""

    num_processes: Free[PositiveInt | None] = None
    """Start this many processes on this machine, if no launcher started them."""
    world_size: Free[PositiveInt | None] = None
    """Number of processes. If set, it must be what the launcher says."""
    rank: Free[NonNegativeInt | None] = None
    """Rank of this process. If set, it must be what the launcher says."""
    master_addr: Free[str | None] = None
    """Address of rank 0. Default: the launcher's value."""
    master_port: Free[Annotated[int, Field(ge=1, le=65535)] | None] = None
    """Port of rank 0. Default: the launcher's value, or a free port if `num_processes` starts the processes."""
    backend: Free[Literal["auto", "nccl", "gloo"]] = "auto"
    """auto: nccl on GPUs, gloo on CPUs and on shared GPUs."""
    share_gpus: Free[bool] = False
    """Let processes share a GPU, to try a launch for more GPUs than there are. It is slow."""
    timeout_minutes: Free[PositiveFloat] = 60.0
    """Minutes that ranks wait for each other, at the start and in each collective. Fractions are allowed."""
    step_timeout_minutes: Free[PositiveFloat] = 30.0
    """End all ranks after this time without progress in a step, a validation or a save."""
    gradient_sync: Free[Literal["auto", "flat", "ddp"]] = "auto"
    """flat: sum gradients once a step; ddp: torch's DDP, without a retry if memory runs out in step 1; auto: flat."""
    output_device: Free[NonNegativeInt | None] = None
    """With `gradient_sync: ddp`: index of the GPU that holds the outputs. Default: the GPU of this process."""
    find_unused_parameters: Free[bool] = False
    """With `gradient_sync: ddp`: look for parameters that get no gradient. This takes time in every step."""
    sharding: Free[Literal["none", "fsdp2"]] = "none"
    """fsdp2: shard the weights across the processes with torch's FSDP2. none: each process has all weights."""
    shard_size: Free[Annotated[int, Field(ge=2)] | None] = None
    """With `sharding: fsdp2`: processes that share one copy of the model, for example those of a node. Default: all."""
    reshard_after_forward: Free[bool] = True
    """With `sharding: fsdp2`: reshard a layer after its forward pass and all-gather it again in the backward pass."""

    @field_validator("shard_size")
    @classmethod
    def _shard_size_needs_sharding(cls, size: int | None, info: ValidationInfo) -> int | None:
        if size is not None and info.data.get("sharding", "fsdp2") == "none":
            raise ValueError(f"{size} needs parallel.sharding=fsdp2, which is none")
        return size


class ModelSection(Section):
    """The base model and its tokenizer."""

    path: BaseModelKey[str | None] = None
    """A hub id (`microsoft/phi-4`), a local folder, or `shipped:phi_tiny`."""
    revision: BaseModelKey[str | None] = None
    """Branch, tag or commit of a hub id: of `path`, and of `tokenizer` where that is one."""
    init: BaseModelKey[Literal["pretrained", "random"]] = "pretrained"
    """random: build the model from its configuration alone, with random weights that follow from `seed`."""
    config: BaseModelKey[dict[str, Any] | None] = None
    """With `init: random`: the model's configuration, including `model_type`, instead of the one at `path`."""
    tokenizer: TokenKey[str | None] = None
    """A hub id or local folder with the tokenizer. Default: `path`."""
    chat_template: TokenKey[str | None] = None
    """A Jinja chat template, or the path of a .jinja file. Used only if the tokenizer has no template of its own."""
    attention: Annotated[Literal["auto", "sdpa", "eager"], OnResume("always", "the computation of attention")] = "auto"
    """The attention of transformers, in its forward and where it generates answers; the engine has its own."""
    frozen_precision: Annotated[Literal["auto", "fp8"], OnResume("adapter", "the precision of the base")] = "auto"
    """auto: as `training.precision`; fp8: 8 bits and faster products on Hopper and later, measured before step 1."""
    fp8_layers: Annotated[Literal["all", "upper_half"], OnResume("adapter", "the precision of the base")] = "all"
    """With `frozen_precision: fp8`, the decoder layers in fp8; upper_half: fewer errors, and half of what fp8 saves."""
    trust_remote_code: BaseModelKey[Annotated[bool, RunsCode("code that comes with the model", "model")]] = False
    """Run Python code that comes with the model. No Phi text model needs it: transformers has a class for each."""


class LoaderKeys(Section):
    """Keys of every data loader."""

    batch_size: Free[PositiveInt] = 8
    """Maximum number of examples that a process handles at once (one micro-batch)."""
    num_workers: Free[NonNegativeInt | None] = None
    """Worker processes that prepare batches; 0: the training process prepares them. Default: 2 on CUDA, otherwise 0."""
    pin_memory: Free[bool | None] = None
    """Use page-locked host memory, for faster copies to a GPU. Default: true on CUDA."""
    prefetch_factor: Free[PositiveInt | None] = None
    """Batches that each worker keeps ready. Needs `num_workers` above 0."""
    drop_last: Free[bool] = False
    """Leave out the last batch if it is not full. By default no row is left out."""

    @field_validator("prefetch_factor")
    @classmethod
    def _prefetch_needs_workers(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("num_workers", 1):
            number = json.dumps(info.data["num_workers"])
            raise ValueError(f"{value} needs num_workers of at least 1 in the same section, which is {number}")
        return value


AUTO_VALIDATION, NO_ROWS = "auto", "none"
"""The default of `data.validation`, and the value that leaves out a split which is there. With null, a single file is
all for training."""

OnRow = Literal["refuse", "drop", "warn"]
"""The action for rows that fail a check: end the run before step 1, drop them, or warn and go on."""

ROW_COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output"),
    *("system", "history", "tools", "text", "label", "chosen", "rejected"),
)
"""The columns that rows are read from, which are the keys of `data.columns`."""

UNREAD_COLUMNS = ("mask", "chat_template_kwargs", "images", "split")
"""Columns that no format reads. In `data.columns`, `none` says that this is meant."""

SOURCE_KEYS = ("path", "name", "revision", "train", "validation", "test", "format", "separator", "columns", "max_rows")
"""The keys of the data section that each source of `data.mixture` may set, besides its `weight`."""


class DataSection(Section):
    """The rows to train, validate and test on, and how they become tokens."""

    path: RowKey[str | list[str] | None] = None
    """A JSONL, JSON, CSV or Parquet file, a list or glob of them, a folder, an address, a hub id, `shipped:orders`."""
    mixture: RowKey[list[dict[str, Any]]] = Field(default_factory=list)
    """Several sources instead of `path`: `[{path: a.jsonl, weight: 2}, {path: b.jsonl}]`; weight 2: twice an epoch."""
    name: RowKey[str | None] = None
    """The configuration of a hub data set that has more than one."""
    revision: RowKey[str | None] = None
    """Branch, tag or commit of a hub data set."""
    train: RowKey[str | list[str] | None] = None
    """Files, or the name of a split at `path`. Default: the split `train`, or all rows of a single file."""
    validation: RowKey[str | list[str] | None] = AUTO_VALIDATION
    """Files, a split at `path`, how many rows (`5%`, `200`), none; auto: the split of that name, or 5% of one file."""
    test: RowKey[str | list[str] | None] = None
    """Files, a split at `path`, how many training rows, or none. Default: the split of that name, if there is one."""
    keep: Annotated[str | None, _KEPT] = None
    """Also train on this many of the base's own answers an epoch: `5%` of the training rows, or `200`; null: none."""
    keep_prompts: Annotated[str, _KEPT] = "shipped:keep_prompts.jsonl"
    """With `keep`: a file of prompts for the base to answer. Prompts of `testing.general_prompts` are left out."""
    split_seed: RowKey[Annotated[int, Field(ge=0, lt=2**63)]] = 0
    """Chooses the rows that are held out. Runs that differ in `seed` are therefore tested on the same rows."""
    split_rule: RowKey[Literal["content", "position"]] = "content"
    """Rank rows to hold out by their content, or by their position, as runs of earlier versions did."""
    format: RowKey[Literal["auto", "messages", "conversations", "prompt_completion", "instruction", "text"]] = "auto"
    """The format of a row; auto: recognise it by the columns."""
    separator: RowKey[Literal[",", ";", "|", "tab"] | None] = None
    """What separates the cells of CSV files. Default: a comma, and in .tsv files a tab."""
    columns: RowKey[dict[str, str]] = Field(default_factory=dict)
    """The names of the columns in these rows: `{prompt: question, completion: answer}`; none: not to be read."""
    train_on: RowKey[Literal["all", "last", "each_turn"]] = "all"
    """The answers of a conversation that carry loss: all, the last, or each one after the turns as they are served."""
    chat_template: RowKey[str | None] = None
    """In place of the tokenizer's own: alpaca, chatml, gemma, llama3, mistral, phi4_mini, plain, or a .jinja file."""
    template_date: RowKey[str | None] = None
    """The date for a chat template that asks for today's (SmolLM3, Llama 3.2): 2026-11-27. Default: today's."""
    max_length: RowKey[PositiveInt] = 2048
    """Maximum number of tokens in a row; longer rows are cut on the right."""
    max_rows: RowKey[PositiveInt | None] = None
    """Use only this many rows of each split, from the first on. Of a hub data set, only these are downloaded."""
    on_bad_row: RowKey[Literal["refuse", "drop"]] = "refuse"
    """Rows that cannot be used, for example because an answer is blank or a role is unknown."""
    on_long_row: RowKey[OnRow] = "warn"
    """Rows longer than `max_length`: refuse them, drop them, or cut them and warn."""
    on_no_target: RowKey[OnRow] = "refuse"
    """Rows without a token that carries loss, for example because the whole answer is cut off."""
    on_truncated_answer: RowKey[OnRow] = "refuse"
    """Rows that are cut within an answer, so that the model does not see its end."""
    on_doubled_bos: RowKey[OnRow] = "refuse"
    """Rows that begin with the beginning-of-sequence token twice."""
    on_untrained_end: RowKey[Literal["refuse", "warn"]] = "refuse"
    """No training row contains the end of a turn, so the model would not learn to stop."""
    on_overlap: RowKey[OnRow] = "refuse"
    """Validation or test rows that are also training rows; drop removes them from training."""
    on_ignored_key: RowKey[Literal["refuse", "warn"]] = "refuse"
    """Keys of turns, and tools, that the chat template does not render, so that the model would not see them."""
    num_processes: Free[PositiveInt | None] = None
    """Processes that encode rows. Default: one, or one per core if there are many rows."""
    cache_dir: Free[str] = "~/.cache/finetune"
    """Folder for encoded data, one per node."""

    _untrusted: dict[str, str] = PrivateAttr(default_factory=dict)

    def mark_untrusted(self, address: str, message: str) -> None:
        """Note that only the folder of a run names an address. `message` says how to allow it."""
        self._untrusted[address] = message

    def refuse_untrusted(self, address: str | None = None) -> None:
        """Refuse to read an address that only the folder of a run names. None: refuse if there is any.

        Raises:
            ConfigError: says how to allow it.
        """
        for untrusted, message in self._untrusted.items():
            if address in (None, untrusted):
                raise ConfigError(message)

    @field_validator("train", "validation", "test", "keep", "columns", mode="before")
    @classmethod
    def _read_number_as_text(cls, value: object) -> object:
        if isinstance(value, dict):  # a table without names of its own has the columns 0, 1, …
            return {key: cls._read_number_as_text(name) for key, name in value.items()}
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @field_validator("template_date")
    @classmethod
    def _check_date(cls, value: str | None) -> str | None:
        with suppress(ValueError):
            if value is None or date.fromisoformat(value).isoformat() == value:
                return value
        raise ValueError(f"{value} is not a date; write it as 2026-11-27")

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        unread = {column for column in UNREAD_COLUMNS if value.get(column) == "none"}
        unknown = ", ".join(sorted(set(value) - set(ROW_COLUMNS) - unread))
        if unknown:
            others = " or ".join(f"{column}: none" for column in UNREAD_COLUMNS)
            raise ValueError(f"there is no column {unknown} to rename; expected {', '.join(ROW_COLUMNS)}, or {others}")
        return value

    @field_validator("mixture")
    @classmethod
    def _usable_sources(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, source in enumerate(value):
            _check_source(source, f"[{number}]")
        return value

    @property
    def label(self) -> str:
        """Return the name of the rows for messages. Empty if no key names them."""
        return "mixture" if self.mixture else name_files(self.path or self.train)


def as_list(files: str | list[str] | None) -> list[str]:
    """Return the paths of a key that takes one or several."""
    return files if isinstance(files, list) else [files] if files else []


def name_files(files: str | list[str] | None) -> str:
    """Name a file, or the first of a list and the number of the others, in messages."""
    first, *others = as_list(files) or [""]
    return f"{first} and {len(others)} more" if others else first


def _check_source(source: dict[str, Any], place: str) -> None:
    """Refuse a source of a mixture with keys or values that a data section would refuse."""
    unknown = ", ".join(str(key) for key in source if key not in (*SOURCE_KEYS, "weight"))
    if unknown:
        raise ValueError(f"{place} has the key {unknown}; expected {', '.join(SOURCE_KEYS)} or weight")
    if not source.get("path"):
        raise ValueError(f"{place} has no path; expected a file, a folder or a hub id")
    weight = source.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ValueError(f"{place}.weight is {weight!r}; expected a number above 0")
    try:
        DataSection(**{key: value for key, value in source.items() if key != "weight"})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([place, *(str(part) for part in first["loc"])])
        raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}, got {first['input']!r}") from None


class LoraSection(Section):
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685)."""

    r: Annotated[PositiveInt, OnResume("adapter", "the shape of the adapter", fits=False)] = 16
    """Rank of each update."""
    alpha: AdapterKey[PositiveFloat] = 32.0
    """The update is scaled by alpha / r."""
    dropout: AdapterKey[Annotated[float, Field(ge=0, lt=1)]] = 0.0
    """Dropout on the input of each adapted layer."""
    target_modules: AdapterKey[ModuleNames] = "auto"
    """Names or regular expressions of the linear layers to adapt; auto or all-linear: all except the head."""
    layers: AdapterShape[Numbers[list[NonNegativeInt] | None]] = None
    """The decoder layers to adapt, counted from 0; null: all."""
    rank_pattern: AdapterShape[dict[str, PositiveInt]] = Field(default_factory=dict)
    """Other ranks for some layers, by name or by a regular expression for the end of it: `{o_proj: 8}`."""
    alpha_pattern: AdapterKey[dict[str, PositiveFloat]] = Field(default_factory=dict)
    """Other values of alpha for some layers. A layer's update is scaled by its own alpha / its own rank."""
    rslora: AdapterKey[bool] = False
    """Scale the update by alpha / sqrt(r) instead of alpha / r (Kalajdzievski, 2023, arXiv:2312.03732)."""
    dora: AdapterShape[bool] = False
    """Train a magnitude for each output besides the low-rank direction (DoRA: Liu et al., 2024, arXiv:2402.09353)."""
    init: AdapterShape[Literal["default", "pissa", "pissa_fast"]] = "default"
    """default: start at zero; pissa: at the largest singular values (arXiv:2404.02948); pissa_fast: at estimates."""
    start_from: Annotated[str | None, OnResume("adapter", "the adapter's first weights")] = None
    """Folder of an adapter or of a run whose adapter weights the new adapter starts with."""
    start_from_any_base: Free[bool] = False
    """Accept a `start_from` whose base has another name: the same model in another place."""
    quantize: Annotated[Literal["none", "nf4"], OnResume("adapter", "the precision of the base")] = "none"
    """nf4: keep the base in 4 bits (QLoRA: Dettmers et al., 2023, arXiv:2305.14314). Needs CUDA and bitsandbytes."""
    new_tokens: AdapterShape[list[str]] = Field(default_factory=list)
    """Tokens to add to the tokenizer. Their embeddings are trained with the adapter."""
    modules_to_save: AdapterShape[TextList] = Field(default_factory=list)
    """Names of layers to train whole and to save with the adapter: `[lm_head]`, `[embed_tokens, norm]`."""

    @field_validator("init")
    @classmethod
    def _init_fits(cls, init: str, info: ValidationInfo) -> str:
        if init != "default" and info.data.get("dora"):
            raise ValueError(f"{init} cannot be combined with lora.dora=true: each sets the start of the update")
        if init != "default" and info.data.get("dropout"):
            raise ValueError(
                f"{init} needs lora.dropout=0, which is {info.data['dropout']}: it would drop values that were "
                "moved out of the base"
            )
        if init != "default" and (info.data.get("rank_pattern") or info.data.get("alpha_pattern")):
            raise ValueError(f"{init} has one rank and one alpha: remove lora.rank_pattern and lora.alpha_pattern")
        return init

    @field_validator("start_from")
    @classmethod
    def _start_fits(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.data.get("init", "default") != "default":
            raise ValueError(f"an adapter that starts from {path} is not initialised by lora.init; remove one of them")
        return path

    @field_validator("quantize")
    @classmethod
    def _quantize_fits(cls, quantize: str, info: ValidationInfo) -> str:
        if quantize != "none" and info.data.get("init", "default") != "default":
            raise ValueError(
                f"{quantize} cannot be combined with lora.init={info.data.get('init')}, "
                "which needs the base's own weights"
            )
        return quantize

    @field_validator("new_tokens")
    @classmethod
    def _refuse_repeated_tokens(cls, tokens: list[str]) -> list[str]:
        bad = [token for token in tokens if not token.strip() or tokens.count(token) > 1]
        if bad:
            raise ValueError(f"expected different tokens that are not empty, got {bad[0]!r} among them")
        return tokens

    @field_validator("modules_to_save")
    @classmethod
    def _modules_fit(cls, names: list[str], info: ValidationInfo) -> list[str]:
        if names and info.data.get("new_tokens"):
            raise ValueError("cannot be combined with lora.new_tokens, which trains rows of the embeddings; remove one")
        return names


class OptimSection(Section):
    """The optimizer and its learning rate."""

    optimizer: Annotated[str, OnResume("always", "the updates of the weights", fits=False)] = "torch.optim.AdamW"
    """adamw, adamw_8bit, adafactor, sgd, muon, or a class of torch, transformers, bitsandbytes or schedulefree."""
    learning_rate: RateKey[NonNegativeFloat] = 2e-4
    """The highest learning rate of the schedule."""
    weight_decay: UpdateKey[NonNegativeFloat] = 0.0
    """Weight decay. It applies to matrices only, not to biases, norms and other vectors."""
    args: UpdateKey[dict[str, Any]] = Field(default_factory=dict)
    """Further arguments of the optimizer, for example `{betas: [0.9, 0.95]}`."""
    schedule: RateKey[Literal["linear", "cosine", "constant", "wsd"]] = "linear"
    """The rate after the warm-up: falls linearly, along a cosine, not at all, or linearly in the last steps (wsd)."""
    min_learning_rate: RateKey[NonNegativeFloat] = 0.0
    """Where the learning rate ends, if it falls."""
    decay_steps: RateKey[PositiveInt | None] = None
    """The steps at the end in which schedule=wsd falls. Default: a tenth of all (Hu et al., 2024, arXiv:2404.06395)."""
    warmup_steps: RateKey[NonNegativeInt | Annotated[float, Field(ge=0, lt=1)]] = 0
    """Optimizer steps in which the learning rate rises linearly from zero; below 1: a share of the run's steps."""
    lora_plus_ratio: RateKey[Annotated[float, Field(ge=1)]] = 1.0
    """Learning rate of the B matrices, relative to `learning_rate` (LoRA+: Hayou et al., 2024, arXiv:2402.12354)."""
    max_grad_norm: UpdateKey[PositiveFloat | None] = 1.0
    """Scale gradients down to this norm if their norm is larger; null: never."""

    _factory: Callable[..., Any] | None = PrivateAttr(default=None)

    @property
    def factory(self) -> Callable[..., Any] | None:
        """Return the function of a script that makes the optimizer; None if `optimizer` names a class."""
        return self._factory

    def with_factory(self, factory: Callable[..., Any], name: str) -> OptimSection:
        """Return a copy whose optimizer a script's function makes."""
        changed = self.model_copy(update={"optimizer": f"{SCRIPT_PREFIX}{name}"})
        changed._factory = factory
        return changed

    @field_validator("min_learning_rate")
    @classmethod
    def _is_reached(cls, rate: float, info: ValidationInfo) -> float:
        if rate and info.data.get("schedule") == "constant":
            raise ValueError(f"it is {rate:g}, but with optim.schedule=constant the rate does not fall")
        highest = info.data.get("learning_rate", math.inf)
        if rate > highest:
            raise ValueError(f"{rate:g} is above optim.learning_rate={highest:g}, from which the rate falls")
        return rate

    @field_validator("decay_steps")
    @classmethod
    def _is_of_wsd(cls, steps: int | None, info: ValidationInfo) -> int | None:
        if steps is not None and info.data.get("schedule", "wsd") != "wsd":
            raise ValueError(f"only optim.schedule=wsd has such steps, and it is {info.data['schedule']}")
        return steps

    @field_validator("optimizer")
    @classmethod
    def _allowed_module(cls, name: str) -> str:
        name = OPTIMIZERS.get(name.lower(), name)
        if not (is_allowed_object(name) or name.startswith(SCRIPT_PREFIX)):
            raise ValueError(f"{refused_object(name)}. It may also be one of {', '.join(OPTIMIZERS)}")
        return name

    def warmup_in(self, num_steps: int) -> int:
        """Return the optimizer steps of the warm-up in a run of so many steps."""
        share = self.warmup_steps
        return ceil_share(share, num_steps) if isinstance(share, float) else share


class TrainingSection(LoaderKeys):
    """The training loop."""

    batch_size: CutKey[PositiveInt] = 8
    """Maximum number of examples that a process handles at once (one micro-batch)."""
    drop_last: Annotated[bool, OnResume("always", "the rows to train on")] = False
    """Leave out the last batch if it is not full. By default no row is left out."""
    method: Annotated[Literal["lora", "full"], OnResume("always", "the weights that are trained", fits=False)] = "lora"
    """Train a LoRA adapter, or every weight."""
    objective: Annotated[
        Literal["sft", "dpo", "kto", "orpo", "simpo", "grpo"], OnResume("always", "the loss that is minimised")
    ] = "sft"
    """sft: learn answers; dpo, orpo, simpo: prefer a pair's chosen one; kto: from good and bad ones; grpo: rewards."""
    max_steps: Annotated[PositiveInt | None, OnResume("steps", "the steps over which the learning rate falls")] = None
    """Stop after this many optimizer steps, whatever `num_epochs` says."""
    num_epochs: Annotated[
        PositiveInt | PositiveFloat, OnResume("epochs", "the steps over which the learning rate falls")
    ] = 1
    """Passes over the training rows; 0.5: half of the steps of one pass, rounded up."""
    global_batch_size: Free[PositiveInt | None] = None
    """Examples per optimizer step over all processes. Default: batch_size x the world size asked for."""
    max_tokens_per_microbatch: CutKey[PositiveInt | None] = None
    """The most tokens that a micro-batch computes, padding included. Default: from memory on CUDA, else no limit."""
    packing: CutKey[bool] = True
    """Join the rows of a micro-batch without padding; no row sees another one. Micro-batches are filled evenly."""
    share_prefixes: CutKey[bool] = True
    """With `packing`: put rows that begin alike into the same micro-batch, and compute what they share once."""
    kernels: CutKey[Literal["auto", "reference"]] = "auto"
    """auto: the engine's own forward and backward if it supports the model; reference: transformers' on padded rows."""
    fused: Free[bool | Literal["auto"]] = "auto"
    """Fuse the engine's norms, activations and rotations into few kernels with torch.compile. auto: on CUDA alone."""
    graphs: Free[bool | Literal["auto"]] = "auto"
    """On CUDA, replay generated tokens and small micro-batches as CUDA graphs. auto is off: no GPU has run it."""
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], OnResume("always", "the precision of a step")] = (
        "auto"
    )
    """auto: bf16 on GPUs that compute in it (NVIDIA from Ampere on, AMD), fp16 on other NVIDIA GPUs, otherwise fp32."""
    neftune_alpha: Annotated[NonNegativeFloat, OnResume("always", "the noise on the embedded tokens")] = 0.0
    """Size of the noise that training adds to embeddings (NEFTune: Jain et al., 2023, arXiv:2310.05914); 0: none."""
    gradient_checkpointing: Free[bool | Literal["auto"]] = "auto"
    """Recompute activations in the backward pass: less memory, more time. auto: only if a step does not fit without."""
    memory: CutKey[Literal["fastest", "least"]] = "fastest"
    """What `auto` values take of the free memory: as much as makes a step faster, or as little as possible."""
    memory_fraction: Free[Annotated[float, Field(gt=0, le=1)]] = 1.0
    """The share of a device's whole memory that the run may use, for a device that others use too."""
    device: Free[str] = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1` or `mps` (Apple). A whole number n is read as `cuda:n`, null as `auto`."""
    deterministic: Free[bool] = False
    """Make a GPU's results the same in every run, with slower algorithms; an operation that has none is an error."""
    debug: Free[bool] = False
    """Log shapes and devices of the first batches and show full tracebacks."""
    log_every: Free[PositiveInt] = 10
    """Optimizer steps between two log lines, if there is no terminal. metrics.jsonl has every step."""
    profile: Free[Annotated[int, Field(ge=0, le=100)]] = 0
    """Number of steps, after two of each start, to record with torch's profiler into the run's `profile/`; 0: none."""
    report_to: Free[TrackerList] = Field(default_factory=list)
    """Trackers that also get the metrics of metrics.jsonl: `wandb`, `none`, a list. Each needs its own package."""
    on_nonfinite: Free[Literal["stop", "skip"]] = "stop"
    """If a loss or a gradient is NaN or infinite: end the run, or skip the step. The weights stay as they were."""
    max_skipped_steps: Free[PositiveInt] = 5
    """With `on_nonfinite: skip`: end the run after more skipped steps than this, counted across restarts."""

    @field_validator("device", mode="before")
    @classmethod
    def _device_name(cls, value: object) -> object:
        if value is None:
            return "auto"
        name = f"cuda:{value}" if re.fullmatch("[0-9]+", str(value)) else str(value).strip().lower()
        device_type = name.partition(":")[0]
        if device_type in ("xpu", "hpu", "npu", "mlu", "musa", "mtia", "tpu", "xla", "vulkan", "privateuseone"):
            raise ValueError(
                f"finetune does not compute on {device_type}. Use cuda (NVIDIA, or AMD with torch's build for ROCm), "
                "mps (one Apple GPU) or cpu"
            )
        if not re.fullmatch("auto|cpu|mps|cuda(:[0-9]+)?", name):
            raise ValueError(f"expected auto, cpu, cuda, cuda:N, mps or a whole number, got '{value}'")
        return name


class PreferenceSection(Section):
    """The losses that prefer one answer to another (`training.objective`); docs/methods.md has their formulas."""

    beta: Annotated[PositiveFloat, OnResume("always", "the weight of a preferred answer")] = 0.1
    """dpo, kto: strength of the tie to the base model; orpo: weight of the odds ratio; simpo: scale of the rewards."""
    gamma: Annotated[NonNegativeFloat, OnResume("always", "the margin between the rewards of a pair")] = 0.5
    """simpo: the reward of a chosen answer should be higher by this much."""
    desirable_weight: Annotated[NonNegativeFloat, OnResume("always", "the weight of a good answer")] = 1.0
    """kto: the weight of the loss of a good answer."""
    undesirable_weight: Annotated[NonNegativeFloat, OnResume("always", "the weight of a bad answer")] = 1.0
    """kto: the weight of the loss of a bad answer."""


class GrpoSection(Section):
    """Learning from rewards (`training.objective=grpo`); docs/methods.md has the formulas. The keys are TRL's."""

    loss_type: UpdateKey[Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo"]] = "dapo"
    """Tokens count alike (dapo, bnpo, cispo), answers do (grpo), or tokens count as in the longest answer (dr_grpo)."""
    scale_rewards: UpdateKey[Literal["group", "batch", "none"]] = "group"
    """Divide advantages by the standard deviation of the group's rewards, of the whole batch's, or not at all."""
    epsilon: UpdateKey[PositiveFloat] = 0.2
    """The ratio of new to old probability has no gradient below 1 - epsilon where it should fall further."""
    epsilon_high: UpdateKey[PositiveFloat | None] = None
    """The same above 1 + epsilon_high where it should rise further (cispo: it keeps this weight); null: `epsilon`."""
    importance_sampling_level: UpdateKey[Literal["token", "sequence"]] = "token"
    """A ratio for each token, or one for each answer (GSPO)."""
    beta: UpdateKey[NonNegativeFloat] = 0.0
    """Weight of the divergence from the base model; 0: the base is not computed."""
    num_iterations: UpdateKey[PositiveInt] = 1
    """Optimizer steps on the answers of each rollout."""
    mask_truncated_completions: UpdateKey[bool] = False
    """Leave answers without an end out of the loss."""


class RolloutSection(Section):
    """The answers that a model generates to learn from (`training.objective=grpo`)."""

    num_generations: UpdateKey[Annotated[int, Field(ge=2)]] = 8
    """Answers to each prompt, which are compared with each other."""
    max_completion_length: UpdateKey[PositiveInt] = 256
    """Maximum number of tokens in an answer; with tools in all that follows a prompt, results included."""
    temperature: UpdateKey[PositiveFloat] = 1.0
    """Logits are divided by it, for sampling and in the loss."""
    top_p: UpdateKey[Annotated[float, Field(gt=0, le=1)]] = 1.0
    """Sample only from the most likely tokens that together have this probability."""
    top_k: UpdateKey[NonNegativeInt] = 0
    """Sample only from this many of the most likely tokens; 0: from all."""
    batch_size: UpdateKey[PositiveInt] = 64
    """Maximum number of answers that a process, or the server, generates at once."""
    server: Free[str | None] = None
    """Address of a vLLM server that generates the answers, for example http://localhost:8000; null: this run does."""
    max_difference: Free[PositiveFloat] = 0.05
    """server: end the run if its log-probabilities differ from the run's own by more nats per token, on average."""
    server_timeout_minutes: Free[PositiveFloat] = 10.0
    """server: how long to wait if it is gone, and for each answer, before the run saves a checkpoint and ends."""
    tools: UpdateKey[TextList] = Field(default_factory=list)
    """Functions that the model may call: calculator, or your own: `./tools.py:lookup`. See docs/tasks/tools.md."""
    tools_from: Free[Annotated[TextList, RunsCode("tools", "training")]] = Field(default_factory=list)
    """Installed modules that `tools` may name. Only the command line may set it, because a tool is code."""
    tool_schemas: Annotated[str | None, OnResume("always", "the prompts")] = None
    """The tools as prompts describe them, as JSON. A run writes this into its config.yaml; do not set it."""
    environment: UpdateKey[TextList] = Field(default_factory=list)
    """A class of your own that answers the model: `./game.py:Game`. See docs/tasks/tools.md."""
    environment_from: Free[Annotated[TextList, RunsCode("an environment", "training")]] = Field(default_factory=list)
    """The installed module that `environment` may name. Only the command line may set it, because it is code."""
    max_turns: UpdateKey[PositiveInt] = 8
    """tools, environment: the most answers in a conversation. The last one may call no tool; an environment gets it."""
    tool_timeout_seconds: Free[PositiveFloat] = 10.0
    """The longest that a call of a tool or an environment may take. Then its process is killed."""
    max_result_tokens: UpdateKey[PositiveInt] = 256
    """tools: the most tokens of a result. The rest is cut off, and the model reads a note that says so."""

    @field_validator("server")
    @classmethod
    def _check_address_of_server(cls, server: str | None) -> str | None:
        if server is not None:
            split_server_address(server)
        return server


class RewardSection(Section):
    """What answers are rewarded for (`training.objective=grpo`); docs/tasks/rewards.md shows how to write functions."""

    functions: UpdateKey[TextList] = Field(default_factory=list)
    """exact_match, json_equal, json_valid, token_f1, regex, format_think, length, environment or `./reward.py:mine`."""
    functions_from: Free[Annotated[TextList, RunsCode("reward functions", "training")]] = Field(default_factory=list)
    """Installed modules that `functions` may name. Only the command line may set it, because a function is code."""
    weights: UpdateKey[Numbers[list[float] | None]] = None
    """The weight of each function in the sum; null: 1 for each. One of weight 0 is only measured."""
    pattern: UpdateKey[str | None] = None
    """regex: the regular expression that a whole answer should match."""
    timeout_seconds: Free[PositiveFloat] = 600.0
    """The longest that a function may take for all answers of a rollout."""


class ValidationSection(LoaderKeys):
    """Measuring the loss, and perhaps generated answers, on the validation split during training."""

    drop_last: Annotated[
        bool, OnResume("always", "the rows to validate on: losses before and after are not comparable")
    ] = False
    """Leave out the last batch if it is not full. By default no row is left out."""
    validate_every: Free[PositiveInt | None] = None
    """Optimizer steps between two validations. Default: validate at the end of each epoch."""
    by: SubsetKey[str | None] = None
    """A column of the rows: also report the loss of the rows of each of its values. Default: of each mixture source."""
    metrics: Free[TextList] = Field(default_factory=list)
    """Metrics of generated answers: exact_match, json_valid, json_equal, token_f1, or your own: `./scores.py:bleu`."""
    metrics_from: Free[Annotated[TextList, RunsCode("metrics", "training")]] = Field(default_factory=list)
    """Installed modules whose functions `metrics` may name. Only the command line may set it: a metric is code."""
    num_samples: SampleKey[PositiveInt] = 64
    """With `metrics`: the most rows to answer, chosen by `data.split_seed`, the same in every validation."""
    max_new_tokens: SampleKey[PositiveInt] = 256
    """With `metrics`: maximum number of tokens in a generated answer."""


class TestingSection(LoaderKeys):
    """The test phase after training: loss and generated answers, base against tuned."""

    batch_size: Free[PositiveInt] = 32
    """Maximum number of examples that a process handles at once."""
    metrics: Free[Commas[list[Literal["exact_match", "json_valid", "json_equal", "token_f1"]]]] = Field(
        default_factory=list
    )
    """Metrics of generated answers. Empty: measure only the loss."""
    compare_base: Free[bool] = True
    """Also measure the base model; of a run that trains every weight, only `finetune evaluate` does so."""
    max_new_tokens: Free[PositiveInt] = 256
    """Maximum number of tokens in a generated answer."""
    num_samples: Free[NonNegativeInt] = 3
    """Number of prompts to print with the answers of both models; rows that got worse come first."""
    general_prompts: Free[str] = "shipped:general_prompts.jsonl"
    """A file of prompts on which to measure what the model forgot (docs/verdict.md); none: do not measure it."""


class EarlyStoppingSection(Section):
    """Stopping when validations no longer improve."""

    patience: Free[PositiveInt | None] = None
    """Stop after this many validations in a row without improvement; null: never."""
    min_delta: Free[NonNegativeFloat] = 0.0
    """The smallest change of `metric` that counts for `patience`; of the loss, in nats per target token."""
    max_forgotten: MeasureKey[PositiveFloat | None] = None
    """Stop when the model diverges further from its base on general prompts, in nats per token (docs/tasks/keep.md)."""
    metric: MeasureKey[str] = "loss"
    """What should improve: loss, loss/NAME of a source, one of `validation.metrics`, or a reward (docs/methods.md)."""


class CheckpointSection(Section):
    """When to save checkpoints and which to keep. The last step is always saved."""

    save_every: Free[PositiveInt | None] = None
    """Optimizer steps between two checkpoints; null: save by epochs only."""
    save_every_epochs: Free[PositiveInt | None] = 1
    """Epochs between two checkpoints; null: save by steps only."""
    save_total_limit: Free[PositiveInt] = 2
    """Number of checkpoints to keep: the newest ones, and the best one in addition."""
    best_metric: MeasureKey[str] = "loss"
    """What chooses the best checkpoint, which `adapter/` holds in the end: see `early_stopping.metric`."""
    background: Free[bool] = True
    """Write checkpoints while training goes on, from a copy in the main process's memory; false: training waits."""
    on_disk_failure: Free[Literal["stop", "continue"]] = "stop"
    """If a checkpoint cannot be written: end the run, or record the failure and go on to the next one."""


class Config(Section):
    """The configuration of a run, as `config.yaml` in its folder holds it."""

    ddp: Free[bool | None] = None
    """true: train with the other processes of the launch; false: train alone; null: as the launcher says."""
    seed: Annotated[int, Field(ge=0, lt=2**63), OnResume("always", "the order of rows, dropout, the first weights")] = 0
    """Seed of the initial weights, the order of rows and dropout."""
    output_dir: Free[str] = "runs/run"
    """The run's folder. Default: `runs/DATA-MODEL`, or `runs/NAME` of a run file, with a number if it exists."""
    resume: Free[Literal["never", "auto"]] = "never"
    """auto: go on from the newest valid checkpoint in `output_dir`; if that is not set, in the newest run like this."""
    resume_allow: Free[TextList] = Field(default_factory=list)
    """Keys or sections that may change in this start although they change the curve: `resume.allow=seed,data`."""
    strict: Free[bool] = False
    """Refuse every fallback, instead of taking and recording it."""
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    preference: PreferenceSection = Field(default_factory=PreferenceSection)
    grpo: GrpoSection = Field(default_factory=GrpoSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    validation: ValidationSection = Field(default_factory=ValidationSection)
    testing: TestingSection = Field(default_factory=TestingSection)
    early_stopping: EarlyStoppingSection = Field(default_factory=EarlyStoppingSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def objective(self) -> ObjectiveFacts:
        """What is known about the value of `training.objective`."""
        return OBJECTIVES[self.training.objective]

    @property
    def has_reference(self) -> bool:
        """Whether a step also computes the log-probabilities of the base."""
        return self.objective.has_reference or (self.objective.generates_answers and self.grpo.beta > 0)

    @property
    def is_quantized(self) -> bool:
        """Whether an adapter is trained on a base in 4 bits."""
        return self.training.method == "lora" and self.lora.quantize != "none"

    @property
    def masks_follow_microbatches(self) -> bool:
        """Whether random masks or noise depend on the micro-batches, so that their size changes the result."""
        has_dropout = self.training.method == "lora" and self.lora.dropout > 0
        return has_dropout or self.training.neftune_alpha > 0

    def origin(self, key: str) -> str:
        """Return the origin of a key's value: `configs/task/debug.yaml:4`, `command line` or `default`.

        A path in place of a group is named too: `command line: data=chats.jsonl`.
        """
        below = (origin for inner, origin in self._origins.items() if inner.startswith(f"{key}."))
        return self._origins.get(key) or next(below, "default")

    def with_values(self, values: Mapping[str, tuple[object, str]]) -> Config:
        """Return a copy with other values, each with its origin: `{"section.key": (value, origin)}`."""
        sections: dict[str, Any] = {}
        for key, (value, _) in values.items():
            section, _, name = key.partition(".")
            if not name:
                sections[section] = value
                continue
            sections[section] = sections.get(section, getattr(self, section)).model_copy(update={name: value})
        changed = self.model_copy(update=sections)
        changed._origins = self._origins | {key: origin for key, (_, origin) in values.items()}
        return changed

    def __eq__(self, other: object) -> bool:
        """Return whether the values are equal, wherever they came from."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()
