"""Choose gradient checkpointing and the size of micro-batches by the memory that is free.

Training and `finetune plan` call the same function, `choose`: training with the free memory of its device, the plan
with the memory of the device that it is asked about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import psutil
import torch

from finetune.data.encoded import filler_rows
from finetune.engine.decoder import bare_model
from finetune.engine.products import full_shape
from finetune.fallbacks import Fallback
from finetune.logs import waiting
from finetune.main_memory import read_main_memory
from finetune.training.loaders import global_batch_size, log_cut_examples
from finetune.training.step import StepTooLargeError
from finetune.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.distributed.runtime import Runtime
    from finetune.training.forward import Computation
    from finetune.training.loaders import TrainRows
    from finetune.training.step import StepResult

MakeRows: TypeAlias = Callable[[int, int], Any]
_log = logging.getLogger(__name__)

MOST_TOKENS = 16_384
"""The limit of tokens in a micro-batch on CUDA. An estimate: larger matrix products would not be faster."""
_AS_CONFIGURED = "as configured"
_USED_SHARE = 0.9
"""The usable share of free memory. The rest is for fragmentation and the error of the prediction (docs/plan.md)."""


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """The choice of a run, which run.json records.

    Attributes:
        gradient_checkpointing: whether activations are computed again in the backward pass.
        max_rows: the most rows of a micro-batch.
        max_tokens: the most tokens that a micro-batch computes; None: no limit.
        offloads: the inputs of checkpointed layers are kept in main memory.
        embedding_on_host: the embedding is kept in main memory.
        why: the reason, with the bytes that decided.
        asked: the configured values, by key.
    """

    gradient_checkpointing: bool
    max_rows: int
    max_tokens: int | None
    why: str
    asked: Mapping[str, Any]
    offloads: bool = False
    embedding_on_host: bool = False

    @property
    def is_chosen(self) -> bool:
        """Whether the configuration left anything to choose."""
        return self.why != _AS_CONFIGURED

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for run.json."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], config: Config) -> MemoryChoice | None:
        """Read what `as_record` made; None if there is nothing, or the configuration now asks for something else."""
        record = {"offloads": False, "embedding_on_host": False, **record}  # which older records lack
        is_whole = set(record) == {field.name for field in fields(cls)}
        return cls(**record) if is_whole and record["asked"] == _requested_keys(config) else None

    def resolve(self, config: Config) -> Config:
        """Return the configuration with the chosen values for the keys that it leaves open."""
        resolved = {
            "gradient_checkpointing": self.gradient_checkpointing,
            "batch_size": self.max_rows,
            "max_tokens_per_microbatch": self.max_tokens,
        }
        return config.model_copy(update={"training": config.training.model_copy(update=resolved)})

    def __str__(self) -> str:
        limit = "" if self.max_tokens is None else f", micro-batches compute up to {self.max_tokens:,} tokens"
        kept = {"the inputs of layers": self.offloads, "the embedding": self.embedding_on_host}
        names = " and ".join(name for name, is_kept in kept.items() if is_kept)
        on_host = f", main memory keeps {names}" if names else ""
        return f"gradient checkpointing is {'on' if self.gradient_checkpointing else 'off'}{limit}{on_host}: {self.why}"


@waiting("predicting the memory of a step")
def choose(
    config: Config,
    model: Any,
    how: Computation,
    *,
    longest: int,
    rows_of: MakeRows = filler_rows,
    collate: Callable[[Any], Any],
    room: int,
    world_size: int,
    keeps_microbatches: bool = False,
) -> MemoryChoice:
    """Choose for this process alone, without communication.

    Args:
        config: the whole run.
        model: in training mode, its weights in the types of the run, gradient checkpointing off; on any device. It is
            not changed, and its weights are not read.
        how: how the run computes a step. There is no forecast for device types other than cpu and cuda.
        longest: tokens of the longest row.
        rows_of: makes rows, or pairs, given their number and the tokens of each.
        collate: makes a micro-batch of rows, or of pairs.
        room: bytes that are free on the device beside the weights.
        world_size: the number of processes.
        keeps_microbatches: leave the size of micro-batches as it is configured.
    """
    limits_tokens = (
        how.device_type == "cuda" and config.training.max_tokens_per_microbatch is None and not keeps_microbatches
    )
    configured = MemoryChoice(
        gradient_checkpointing=config.training.gradient_checkpointing is True,
        max_rows=_row_limit(config, world_size) if limits_tokens else config.training.batch_size,
        max_tokens=config.training.max_tokens_per_microbatch,
        why=_AS_CONFIGURED,
        asked=_requested_keys(config),
    )
    row_tokens = longest * config.objective.sides
    usable = round(_USED_SHARE * max(0, room))
    shape: dict[str, Any] = {"longest": longest, "rows_of": rows_of, "collate": collate, "world_size": world_size}
    if config.training.memory == "least":
        from finetune.training.memory.least import least_memory

        tokens = configured.max_tokens or (None if keeps_microbatches else row_tokens)
        rows = configured.max_rows if tokens is None else max(1, min(configured.max_rows, tokens // row_tokens))
        found = least_memory(config, model, how, num_rows=rows, room=room, usable=usable, **shape)
        return replace(configured, max_tokens=tokens, **found)
    if config.training.gradient_checkpointing != "auto" and not limits_tokens:
        return configured
    if how.device_type not in ("cpu", "cuda"):
        return replace(configured, why=f"the memory of {how.device_type} is not known")
    token_limit = configured.max_tokens or (MOST_TOKENS if limits_tokens else None)
    per_example = config.rollout.num_generations if config.objective.generates_answers else 1
    most = min(configured.max_rows, per_example * global_batch_size(config, world_size))
    most = most if token_limit is None else max(1, min(most, token_limit // row_tokens))
    free = f"{format_bytes(max(0, room))} that are free"
    bound = _bound(model, rows=most * row_tokens // longest, length=longest)
    if how.device_type == "cpu" and bound <= usable:  # to trace a step would take seconds, in runs that take seconds
        return replace(configured, why=f"a step needs less than {format_bytes(bound)}, of {free}")
    from finetune.training.memory.decision import decide_by_forecast  # which a run that fits does not need

    found = decide_by_forecast(
        config,
        model,
        how,
        examples=(1 if limits_tokens else most, most),
        row_tokens=row_tokens,
        most_tokens=MOST_TOKENS if limits_tokens else None,
        usable=usable,
        free=free,
        **shape,
    )
    return replace(configured, **found)


def agree_on_memory(
    runtime: Runtime,
    config: Config,
    model: Any,
    how: Computation,
    *,
    longest: int,
    rows_of: MakeRows,
    collate: Callable[[Any], Any],
    recorded: Mapping[str, Any] | None,
) -> MemoryChoice:
    """Make one choice for all ranks, by the least memory that any has; a resumed run keeps the recorded one.

    Collective: every rank. See `choose` for the arguments. The model is on this rank's device. On the main
    process of a resumed run, `recorded` is the choice in run.json, empty if it has none.
    """
    fraction = config.training.memory_fraction
    has_own = runtime.device.type == "cuda" and not config.parallel.share_gpus
    num_sharing = 1 if has_own else runtime.environment.local_world_size
    free = free_memory(runtime.device, num_sharing=num_sharing, fraction=fraction)
    room = int(min(runtime.collectives.by_rank(free - runtime.placement.gathered_bytes)))
    choice: MemoryChoice | None = None
    with runtime.collectives.failing_together("choosing by memory"):
        if runtime.is_main_process:
            choice = None if recorded is None else MemoryChoice.from_record(recorded, config)
            if choice is not None and choice.embedding_on_host:
                from finetune.training.memory.least import may_keep_embedding_on_host

                may_keep = may_keep_embedding_on_host(config, model, how.device_type, runtime.world_size)
                choice = replace(choice, embedding_on_host=may_keep)
            if choice is not None:
                _log.info("%s, when the run began; run.json has kept it", choice)
            else:
                choice = choose(
                    config,
                    model,
                    how,
                    longest=longest,
                    rows_of=rows_of,
                    collate=collate,
                    room=room,
                    world_size=runtime.world_size,
                    keeps_microbatches=recorded is not None and config.masks_follow_microbatches,
                )
                _log.info("%s", choice)
    agreed = runtime.collectives.broadcast_from_main(choice)
    assert agreed is not None
    return agreed


def free_memory(device: torch.device, *, num_sharing: int, fraction: float = 1.0) -> int:
    """Return the bytes that this process can still take on its device.

    `num_sharing` processes share its memory, and `fraction` is `training.memory_fraction`.
    """
    num_sharing = max(1, num_sharing)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        # An equal part of the free memory, and the memory that torch has reserved for this process and does not use.
        available = free // num_sharing + torch.cuda.memory_reserved(device) - allocated
        return available if fraction == 1 else min(available, int(fraction * total) // num_sharing - allocated)
    memory, process = read_main_memory(), psutil.Process()
    available = memory.available // num_sharing
    if psutil.LINUX and (addresses := process.rlimit(psutil.RLIMIT_AS)[0]) != psutil.RLIM_INFINITY:  # ulimit -v
        available = min(available, addresses - process.memory_info().vms)
    if fraction == 1:
        return available
    return min(available, int(fraction * memory.total) // num_sharing - process.memory_info().rss)


@dataclass(kw_only=True)
class FirstStep:
    """Takes the first step of a start with ever smaller micro-batches, until memory suffices on all ranks.

    Attributes:
        memory: the choice so far.
        take_step: takes a step; `may_be_too_large` lets it raise StepTooLargeError.
        read_again: returns this rank's micro-batches of a step, given its epoch and its place in the epoch.
        record: is given the new choice. Collective.
    """

    runtime: Runtime
    config: Config
    memory: MemoryChoice
    loader: TrainRows
    take_step: Callable[..., StepResult]
    read_again: Callable[[int, int], list[Any]]
    record: Callable[[MemoryChoice], None]

    def take(self, step: int, microbatches: list[Any]) -> StepResult:
        """Take the step. Collective.

        If the micro-batches cannot be smaller, all ranks raise the error of a rank that ran out of memory.
        """
        while True:
            try:
                return self.take_step(step, microbatches, may_be_too_large=True)
            except StepTooLargeError as too_large:
                error = too_large.error
            # From here on nothing refers to the exception. Its traceback refers to the frame of the step.
            epoch, place = divmod(step - 1, self.loader.rule.steps_per_epoch)
            max_tokens = self.loader.halve(epoch, place)
            if max_tokens is None:
                self.runtime.collectives.agree(error, f"training, step {step}")
                raise AssertionError("a rank ran out of memory")
            why = f"memory ran out in step {step} with larger ones"
            self.memory = replace(self.memory, max_tokens=max_tokens, why=why)
            self._announce(step, max_tokens)
            microbatches = self.read_again(epoch, place)

    def _announce(self, step: int, max_tokens: int) -> None:
        """Log and record the smaller micro-batches. They are a fallback if the result depends on their size."""
        if self.config.masks_follow_microbatches:
            used = f"at most {max_tokens} tokens, so that other tokens are dropped"
            why = f"memory ran out in step {step}"
            fallback = Fallback(what="training.max_tokens_per_microbatch", wanted="larger", used=used, why=why)
            self.runtime.fallbacks.take(fallback)
        else:
            _log.warning("out of memory in step %d, which is tried again: %s", step, self.memory)
        self.record(self.memory)
        log_cut_examples(self.loader.rule)


def _requested_keys(config: Config) -> dict[str, Any]:
    keys = ["gradient_checkpointing", "batch_size", "max_tokens_per_microbatch"]
    keys += [key for key in ("memory", "memory_fraction") if config.origin(f"training.{key}") != "default"]
    return {key: getattr(config.training, key) for key in keys}


def _row_limit(config: Config, world_size: int) -> int:
    """Return `training.batch_size`, or every rank's even share of a global batch if only tokens are to limit it."""
    if config.origin("training.batch_size") != "default":
        return config.training.batch_size
    num_processes = config.parallel.world_size or world_size
    return ceil_div(global_batch_size(config, world_size), num_processes)


def _bound(model: Any, *, rows: int, length: int) -> int:
    """Return an upper bound of a step's memory in bytes, without running it.

    The bound is 4 * (8 * tokens * (features + scores) + 6 * trained + 8 * square). Features are the widths of all
    products' inputs and outputs, scores the attention scores of a token, trained the number of trained weights.
    """
    config = bare_model(model).config
    weights = list(model.parameters())
    # A token passes through some experts of a layer, whose weights are one tensor of three dimensions.
    times = {2: 1, 3: getattr(config, "num_experts_per_tok", 1)}
    shapes = [shape for shape in map(full_shape, weights) if len(shape) > 1]
    features = sum(times.get(len(shape), 1) * sum(shape[-2:]) for shape in shapes)
    scores = getattr(config, "num_attention_heads", 0) * config.num_hidden_layers * length
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    # DoRA makes a square matrix for a layer, even for few tokens.
    adapted = (module for module in model.modules() if getattr(module, "lora_variant", None))
    square = max((max(module.in_features, module.out_features) ** 2 for module in adapted), default=0)
    return 4 * int(8 * rows * length * (features + scores) + 6 * trained + 8 * square)
