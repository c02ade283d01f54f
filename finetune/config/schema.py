"""Every key there is, with its type, its default and its meaning. Other modules are handed a section of it.

No torch is imported here: a config error must answer in a fraction of a second.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator

from finetune.config.on_resume import (
    AdapterKey,
    AdapterShape,
    BaseModelKey,
    CutKey,
    Free,
    OnResume,
    RateKey,
    RowKey,
    TokenKey,
    UpdateKey,
)

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]

ALLOWED_OBJECT_MODULES = ("torch.optim", "transformers.optimization", "bitsandbytes.optim")
"""Modules from which a dotted name in a config may be resolved. Nothing else is imported on a config's word."""


def is_allowed_object(name: str) -> bool:
    """Whether a dotted name stands directly in one of `ALLOWED_OBJECT_MODULES`. Imports nothing."""
    module, _, attribute = name.rpartition(".")
    return module in ALLOWED_OBJECT_MODULES and attribute.isidentifier()


def refused_object(name: str) -> str:
    """Why a dotted name is refused, for messages."""
    return f"{name} is not directly in a module that a config may name: {', '.join(ALLOWED_OBJECT_MODULES)}"


class Section(BaseModel):
    """A frozen group of keys; unknown keys and values of another type are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ParallelSection(Section):
    """How many processes train together. Unset keys are read from the launcher's environment."""

    num_processes: Free[PositiveInt | None] = None
    """Start this many processes on this machine where no launcher did."""
    world_size: Free[PositiveInt | None] = None
    """Number of processes. Checked against the launcher when set."""
    rank: Free[NonNegativeInt | None] = None
    """Rank of this process. Checked against the launcher when set."""
    master_addr: Free[str | None] = None
    """Address of rank 0. Default: the launcher's."""
    master_port: Free[Annotated[int, Field(ge=1, le=65535)] | None] = None
    """Port of rank 0. Default: the launcher's."""
    backend: Free[Literal["auto", "nccl", "gloo"]] = "auto"
    """auto: nccl with CUDA, gloo without."""
    timeout_minutes: Free[PositiveFloat] = 60.0
    """How long the ranks wait for each other, at the start and in a collective. Fractions are allowed."""
    step_timeout_minutes: Free[PositiveFloat] = 30.0
    """The longest time without progress in a step, a validation or a save before all ranks end."""
    gradient_sync: Free[Literal["auto", "flat", "ddp"]] = "auto"
    """flat: one sum of all gradients per step; ddp: torch's reducer, overlapped with the backward pass; auto: flat."""
    output_device: Free[NonNegativeInt | None] = None
    """With `gradient_sync: ddp`: the index of the GPU that holds the outputs. Default: this process's own."""
    find_unused_parameters: Free[bool] = False
    """With `gradient_sync: ddp`: look for parameters that a backward pass leaves out, at a cost."""


class ModelSection(Section):
    """The base model and its tokenizer."""

    path: BaseModelKey[str | None] = None
    """A hub id (`microsoft/phi-4`), a local folder, or `shipped:phi_tiny`."""
    revision: BaseModelKey[str | None] = None
    """Branch, tag or commit of a hub id."""
    init: BaseModelKey[Literal["pretrained", "random"]] = "pretrained"
    """random: build from the configuration alone with seeded random weights."""
    config: BaseModelKey[dict[str, Any] | None] = None
    """With `init: random`: the model's configuration with its `model_type`, in place of the one at `path`."""
    tokenizer: TokenKey[str | None] = None
    """Where the tokenizer is, if not at `path`."""
    chat_template: TokenKey[str | None] = None
    """A Jinja chat template, or the path of a .jinja file. The tokenizer's own wins where it has one."""
    attention: Annotated[Literal["auto", "sdpa", "eager"], OnResume("always", "how attention is computed")] = "auto"
    """The attention implementation asked of transformers."""
    trust_remote_code: BaseModelKey[bool] = False
    """Run Python code that comes with the model. Leave it off: every Phi text model has a native class."""


class LoaderKeys(Section):
    """What every data loader can be told."""

    batch_size: Free[PositiveInt] = 8
    """The most examples a process handles at once (one micro-batch)."""
    num_workers: Free[NonNegativeInt] = 0
    """Worker processes that put batches together; 0: the training process does it."""
    pin_memory: Free[bool] = False
    """Page-locked host memory, for faster copies to a GPU."""
    prefetch_factor: Free[PositiveInt | None] = None
    """Batches each worker holds ready. Needs `num_workers` above 0."""
    drop_last: Free[bool] = False
    """Leave out a last batch that is not full. Off, so that no row is lost."""

    @field_validator("prefetch_factor")
    @classmethod
    def _prefetch_needs_workers(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("num_workers") == 0:
            raise ValueError(f"{value} needs num_workers of at least 1 in the same section, which is 0")
        return value


OnRow = Literal["refuse", "drop", "warn"]
"""What a gate does with rows it finds: end the run before step 1, leave them out, or name them and go on."""

ROW_COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output"),
    *("system", "history", "tools", "text", "label"),
)
"""The columns that rows are read from, and so the keys of `data.columns`."""

SOURCE_KEYS = ("path", "name", "revision", "train", "validation", "test", "format", "columns", "max_rows", "stream")
"""The keys of a data section that each source of `data.mixture` may have for itself, besides its `weight`."""


class DataSection(Section):
    """Where the rows come from and how they are cut."""

    path: RowKey[str | None] = None
    """A JSONL, JSON, CSV or Parquet file, a folder of such, a `datasets` directory, a hub id, `shipped:orders`."""
    mixture: RowKey[list[dict[str, Any]]] = Field(default_factory=list)
    """In place of `path`: `[{path: a.jsonl, weight: 2}, {path: b.jsonl}]`; each row `weight` times an epoch."""
    name: RowKey[str | None] = None
    """The configuration of a hub data set that has several."""
    revision: RowKey[str | None] = None
    """Branch, tag or commit of a hub data set."""
    train: RowKey[str | None] = None
    """A file, or the name of a split at `path`. Default: `train`, or all of a single file."""
    validation: RowKey[str | None] = None
    """A file, a split at `path`, or a share of the training rows (`0.05`, `5%`, `200`). Default: as it is named."""
    test: RowKey[str | None] = None
    """A file, a split at `path`, or a share of the training rows. Default: the split named `test`, or none."""
    split_seed: RowKey[Annotated[int, Field(ge=0, lt=2**63)]] = 0
    """Chooses the rows of a share, apart from the run's own `seed`: runs with other seeds are tested on the same."""
    format: RowKey[Literal["auto", "messages", "conversations", "prompt_completion", "instruction", "text"]] = "auto"
    """What a row is; auto looks at the columns."""
    columns: RowKey[dict[str, str]] = Field(default_factory=dict)
    """What columns are called here: `{prompt: question, completion: answer}`."""
    train_on: RowKey[Literal["all", "last"]] = "all"
    """Which answers of a conversation carry loss: all of the assistant's turns, or the last alone."""
    max_length: RowKey[PositiveInt] = 2048
    """The most tokens a row may have; what is longer is cut on the right."""
    max_rows: RowKey[PositiveInt | None] = None
    """Use only the first rows of each split."""
    stream: RowKey[bool] = False
    """Read the first `max_rows` rows as a stream, without a download of the whole, and keep them in `cache_dir`."""
    on_long_row: RowKey[OnRow] = "warn"
    """Rows over `max_length`: warn cuts them, drop leaves them out."""
    on_no_target: RowKey[OnRow] = "refuse"
    """Rows without a token that carries loss, as where all of the answer is cut off."""
    on_truncated_answer: RowKey[OnRow] = "refuse"
    """Rows cut within an answer: its end of turn is never seen."""
    on_doubled_bos: RowKey[OnRow] = "refuse"
    """Rows that begin with the beginning-of-sequence token twice."""
    on_untrained_end: RowKey[Literal["refuse", "warn"]] = "refuse"
    """Training rows of which none teaches the end of turn: the model would not learn to stop."""
    on_overlap: RowKey[OnRow] = "refuse"
    """Rows to validate or test on that are training rows too; drop takes them out of training."""
    num_processes: Free[PositiveInt | None] = None
    """Processes that encode. Default: one, or all cores where the rows are so many that it pays."""
    cache_dir: Free[str] = "~/.cache/finetune"
    """Where encoded data is kept, once per node."""

    @field_validator("train", "validation", "test", mode="before")
    @classmethod
    def _number_is_text(cls, value: object) -> object:
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = ", ".join(sorted(set(value) - set(ROW_COLUMNS)))
        if unknown:
            raise ValueError(f"there is no column {unknown} to rename; expected {', '.join(ROW_COLUMNS)}")
        return value

    @field_validator("mixture")
    @classmethod
    def _usable_sources(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, source in enumerate(value):
            _check_source(source, f"[{number}]")
        return value

    @field_validator("stream")
    @classmethod
    def _stream_has_an_end(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("max_rows") is None:
            raise ValueError("true needs data.max_rows: how many rows of the stream to read and keep")
        return value


def _check_source(source: dict[str, Any], place: str) -> None:
    """Refuse a source of a mixture that has keys or values which a data section would refuse."""
    unknown = ", ".join(str(key) for key in source if key not in (*SOURCE_KEYS, "weight"))
    if unknown:
        raise ValueError(f"{place} has the key {unknown}; expected {', '.join(SOURCE_KEYS)} or weight")
    if not source.get("path"):
        raise ValueError(f"{place} has no path; expected a file, a folder or a hub id")
    weight = source.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight <= 0:
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
    """Dropout on each adapter's input."""
    target_modules: AdapterKey[Literal["auto"] | list[str]] = "auto"
    """Names or regular expressions of the layers to adapt; auto: all linear layers but the head."""
    rslora: AdapterKey[bool] = False
    """Scale the update by alpha / sqrt(r) in place of alpha / r (Kalajdzievski, 2023, arXiv:2312.03732)."""
    dora: AdapterShape[bool] = False
    """Train a magnitude for each output beside the low-rank direction (DoRA: Liu et al., 2024, arXiv:2402.09353)."""
    init: AdapterShape[Literal["default", "pissa", "pissa_fast"]] = "default"
    """default: no update; pissa: each layer's largest singular values (arXiv:2404.02948); pissa_fast: about these."""
    start_from: Annotated[str | None, OnResume("adapter", "the adapter's first weights")] = None
    """The folder of an adapter, or of a run, to go on from: its weights are read into the adapter given here."""
    start_from_any_base: Free[bool] = False
    """Accept a `start_from` that was trained on a base of another name: the same model at another place."""
    quantize: Annotated[Literal["none", "nf4"], OnResume("adapter", "in which numbers the base is kept")] = "none"
    """nf4: keep the base in 4 bits (QLoRA: Dettmers et al., 2023, arXiv:2305.14314); CUDA and bitsandbytes only."""
    new_tokens: AdapterShape[list[str]] = Field(default_factory=list)
    """Tokens to add to the tokenizer; their rows of the embedding train beside the adapter."""

    @field_validator("init")
    @classmethod
    def _init_fits(cls, init: str, info: ValidationInfo) -> str:
        if init != "default" and info.data.get("dora"):
            raise ValueError(f"{init} cannot be combined with lora.dora=true: each decides what the update starts as")
        if init != "default" and info.data.get("dropout"):
            raise ValueError(
                f"{init} needs lora.dropout=0, which is {info.data['dropout']}: it would drop what was moved out of "
                "the base"
            )
        return init

    @field_validator("start_from")
    @classmethod
    def _start_fits(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.data.get("init", "default") != "default":
            raise ValueError(f"an adapter that starts from {path} is not initialised by lora.init; remove one of them")
        return path

    @field_validator("quantize")
    @classmethod
    def _quantize_fits(cls, kind: str, info: ValidationInfo) -> str:
        if kind != "none" and info.data.get("init", "default") != "default":
            raise ValueError(
                f"{kind} cannot be combined with lora.init={info.data.get('init')}, which needs the base's own weights"
            )
        return kind

    @field_validator("new_tokens")
    @classmethod
    def _tokens_are_different_texts(cls, tokens: list[str]) -> list[str]:
        bad = [token for token in tokens if not token.strip() or tokens.count(token) > 1]
        if bad:
            raise ValueError(f"expected different tokens that are not empty, got {bad[0]!r} among them")
        return tokens


class OptimSection(Section):
    """The optimizer and its learning rate."""

    optimizer: Annotated[str, OnResume("always", "how gradients become updates", fits=False)] = "torch.optim.AdamW"
    """Dotted name of an optimizer class from torch.optim, transformers.optimization or bitsandbytes.optim."""
    learning_rate: RateKey[NonNegativeFloat] = 2e-4
    """The highest learning rate of the schedule."""
    weight_decay: UpdateKey[NonNegativeFloat] = 0.0
    """Decay of the trained weights (matrices only; biases, norms and other vectors are left out)."""
    args: UpdateKey[dict[str, Any]] = Field(default_factory=dict)
    """Further arguments of the optimizer, for example `{betas: [0.9, 0.95]}`."""
    schedule: RateKey[Literal["linear", "cosine", "constant"]] = "linear"
    """How the learning rate falls after the warm-up: in a line to zero, along a cosine to zero, or not."""
    warmup_steps: RateKey[NonNegativeInt] = 0
    """Optimizer steps in which the learning rate rises in a line from zero."""
    lora_plus_ratio: RateKey[Annotated[float, Field(ge=1)]] = 1.0
    """The adapter's second matrices (B) learn this many times as fast (LoRA+: Hayou et al., 2024, arXiv:2402.12354)."""
    max_grad_norm: UpdateKey[PositiveFloat | None] = 1.0
    """Gradients are scaled down to this norm when theirs is larger; null: never."""

    @field_validator("optimizer")
    @classmethod
    def _allowed_module(cls, name: str) -> str:
        if not is_allowed_object(name):
            raise ValueError(refused_object(name))
        return name


class TrainingSection(LoaderKeys):
    """The training loop."""

    batch_size: CutKey[PositiveInt] = 8
    """The most examples a process handles at once (one micro-batch)."""
    drop_last: Annotated[bool, OnResume("always", "which rows are trained on")] = False
    """Leave out a last batch that is not full. Off, so that no row is lost."""
    method: Annotated[Literal["lora", "full"], OnResume("always", "what is trained", fits=False)] = "lora"
    """What is trained: a LoRA adapter, or every weight."""
    objective: Annotated[Literal["sft", "dpo"], OnResume("always", "which loss is minimised")] = "sft"
    """sft: learn the answers of the rows; dpo: prefer the chosen answer of each pair to the rejected one."""
    max_steps: Annotated[PositiveInt | None, OnResume("steps", "the steps over which the learning rate falls")] = None
    """Stop after this many optimizer steps, whatever `num_epochs` says."""
    num_epochs: Annotated[PositiveInt, OnResume("epochs", "the steps over which the learning rate falls")] = 1
    """Passes over the training rows."""
    global_batch_size: Free[PositiveInt | None] = None
    """Examples per optimizer step over all processes. Default: batch_size x the world size asked for."""
    max_tokens_per_microbatch: CutKey[PositiveInt | None] = None
    """A second limit on a micro-batch: the tokens it computes, padding or shared beginnings as they are."""
    packing: CutKey[bool] = True
    """Lay the rows of a micro-batch end to end without padding, each seeing itself alone; fill micro-batches evenly."""
    share_prefixes: CutKey[bool] = True
    """With `packing`: what rows of a micro-batch begin with alike is computed once, and such rows are put together."""
    kernels: CutKey[Literal["auto", "reference"]] = "auto"
    """auto: the engine's own forward and backward where it knows the model; reference: transformers' on padded rows."""
    precision: Annotated[Literal["auto", "fp32", "bf16"], OnResume("always", "the numbers a step is computed in")] = (
        "auto"
    )
    """auto: bf16 where the accelerator has it, fp32 elsewhere. fp16 is refused: its range is too small."""
    neftune_alpha: Annotated[NonNegativeFloat, OnResume("always", "the noise on the embedded tokens")] = 0.0
    """Size of the noise on embedded tokens while training (NEFTune: Jain et al., 2023, arXiv:2310.05914); 0: none."""
    gradient_checkpointing: Free[bool] = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    device: Free[str] = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1` or `mps`. A whole number n is read as `cuda:n`, null as `auto`."""
    deterministic: Free[bool] = False
    """Ask torch for deterministic algorithms everywhere; an operation without one is then an error."""
    debug: Free[bool] = False
    """Log shapes and devices of the first batches and show full tracebacks."""
    log_every: Free[PositiveInt] = 10
    """Optimizer steps between two lines of the log without a terminal. metrics.jsonl has every step."""
    report_to: Free[list[Literal["tensorboard", "wandb", "trackio", "mlflow"]]] = Field(default_factory=list)
    """Where the figures of metrics.jsonl go besides, each by its own package: `[tensorboard]`."""
    on_nonfinite: Free[Literal["stop", "skip"]] = "stop"
    """A step whose loss or gradient is NaN or infinite ends the run, or is left out; weights stay as before it."""
    max_skipped_steps: Free[PositiveInt] = 5
    """With `on_nonfinite: skip`: the most steps left out over the whole run, restarts included; one more ends it."""

    @field_validator("device", mode="before")
    @classmethod
    def _device_name(cls, value: object) -> object:
        if value is None:
            return "auto"
        name = f"cuda:{value}" if re.fullmatch("[0-9]+", str(value)) else str(value).strip().lower()
        if not re.fullmatch("auto|cpu|mps|cuda(:[0-9]+)?", name):
            raise ValueError(f"expected auto, cpu, cuda, cuda:N, mps or a whole number, got '{value}'")
        return name

    @field_validator("precision", mode="before")
    @classmethod
    def _no_fp16(cls, value: object) -> object:
        if value in ("fp16", "float16", "half"):
            raise ValueError(
                "fp16 is not supported: gradients underflow and activations of Phi models overflow its range of "
                "65504 without notice. Use bf16 (same memory, range of fp32) or fp32"
            )
        return value


class PreferenceSection(Section):
    """Direct preference optimization (DPO: Rafailov et al., 2023, arXiv:2305.18290)."""

    beta: Annotated[PositiveFloat, OnResume("always", "how much a preferred answer counts")] = 0.1
    """How closely the trained model stays to the base model; a larger value allows smaller changes."""


class ValidationSection(LoaderKeys):
    """Loss on the validation split while training."""

    drop_last: Annotated[
        bool, OnResume("always", "the rows to validate on: losses before and after do not compare")
    ] = False
    """Leave out a last batch that is not full. Off, so that no row is lost."""
    validate_every: Free[PositiveInt | None] = None
    """Optimizer steps between two validations. Default: at the end of each epoch."""


class TestingSection(LoaderKeys):
    """The test phase after training: loss and generated answers, base against tuned."""

    batch_size: Free[PositiveInt] = 32
    """The most examples a process handles at once."""
    metrics: Free[list[Literal["exact_match", "json_valid"]]] = Field(default_factory=list)
    """Measures on generated answers. Empty: only the loss is taken."""
    compare_base: Free[bool] = True
    """Measure the base model too, where switching the adapter off gives it."""
    max_new_tokens: Free[PositiveInt] = 256
    """The most tokens of a generated answer."""
    num_samples: Free[NonNegativeInt] = 3
    """Prompts printed with both answers."""


class EarlyStoppingSection(Section):
    """Stop when the validation loss no longer falls."""

    patience: Free[PositiveInt | None] = None
    """Validations in a row without improvement after which training stops; null: never."""
    min_delta: Free[NonNegativeFloat] = 0.0
    """The least fall that counts as improvement, in nats per target token."""


class CheckpointSection(Section):
    """When to save and what to keep. The last step is always saved."""

    save_every: Free[PositiveInt | None] = None
    """Optimizer steps between two checkpoints; null: by epochs alone."""
    save_every_epochs: Free[PositiveInt | None] = 1
    """Epochs between two checkpoints; null: by steps alone."""
    save_total_limit: Free[PositiveInt] = 2
    """Newest checkpoints kept; the best one is kept besides."""
    background: Free[bool] = True
    """Write while training goes on, from a copy in the main process's memory; false: training waits."""
    on_disk_failure: Free[Literal["stop", "continue"]] = "stop"
    """A checkpoint that cannot be written ends the run; continue: it is recorded, and the next one is tried."""


class Config(Section):
    """A whole run: what `config.yaml` in a run's folder holds."""

    ddp: Free[bool | None] = None
    """true: train with the other processes of the launch; false: alone; null: as the launcher started us."""
    seed: Annotated[int, Field(ge=0, lt=2**63), OnResume("always", "the order of rows, dropout, the first weights")] = 0
    """Seeds initial weights, the order of rows and dropout."""
    output_dir: Free[str] = "runs/run"
    """The run's folder."""
    resume: Free[Literal["never", "auto"]] = "never"
    """auto: go on from the newest valid checkpoint in `output_dir`, or start where there is none."""
    resume_allow: Free[list[str]] = Field(default_factory=list)
    """Keys or sections that may differ from the run's start though they change its curve: `resume.allow=seed,data`."""
    strict: Free[bool] = False
    """Refuse every fallback in place of taking and recording it."""
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    preference: PreferenceSection = Field(default_factory=PreferenceSection)
    validation: ValidationSection = Field(default_factory=ValidationSection)
    testing: TestingSection = Field(default_factory=TestingSection)
    early_stopping: EarlyStoppingSection = Field(default_factory=EarlyStoppingSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("resume_allow", mode="before")
    @classmethod
    def _one_word_is_a_list(cls, value: object) -> object:
        return [word.strip() for word in value.split(",")] if isinstance(value, str) else value

    def origin(self, key: str) -> str:
        """Where a dotted key's value came from: `configs/task/debug.yaml:4`, `command line`, or `default`."""
        below = (origin for inner, origin in self._origins.items() if inner.startswith(f"{key}."))
        return self._origins.get(key) or next(below, "default")

    def __eq__(self, other: object) -> bool:
        """Equal values; where they came from does not matter."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()
