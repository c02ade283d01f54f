"""Check a run before anything is written (settings, paths, hub, model, rows), and its adapter after the first steps.

This module imports no torch, so that `finetune init` can check settings at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune.config.keys import fields, values
from finetune.data.examples import check_local_rows, missing_here
from finetune.errors import NO_GRADIENT, ConfigError, DataError, ModelError, RunFailedError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.model.from_hub import locate, repository_of
from finetune.runs.folder import RunFolder
from finetune.runs.state import TrainerState
from finetune.units import counted

if TYPE_CHECKING:
    import torch

    from finetune.config.hub import Repository
    from finetune.config.schema import Config, ModelSection
    from finetune.distributed.runtime import Runtime
    from finetune.model.local_files import Part
    from finetune.training.step import StepResult
SOMETIMES_READ = (
    *("preference.", "grpo.", "rollout.", "reward.", "data.keep", "data.name", "data.revision", "lora.", "parallel."),
    *("early_stopping.m", "validation.", "model.revision", "model.fp8", "resume_allow"),
    *("training.fused", "training.packing", "training.share_prefixes", "training.max_skipped_steps"),
)
"""How the keys begin that some runs do not read, because of their other keys or the number of processes."""
NUM_STEPS = 3
"""The step of a run after which adapters are checked. B matrices have a gradient from the first step on."""


def check_settings(config: Config, runtime: Runtime | None = None) -> None:
    """Raise the errors of `check_config` that do not need the functions of the objective.

    Without a runtime, the device is not looked at, and a precision of `auto` is taken for bf16.
    torch is imported only for settings that need it. The optimizer of `torch.optim.AdamW` without `optim.args` can
    always be built.

    Raises:
        ConfigError: no run can have this configuration.
    """
    check_objective(config)
    if not config.objective.learns_answers and config.data.train_on == "each_turn":
        from finetune.data.preferences import refuse_each_turn

        refuse_each_turn(config.data)
    if config.parallel.sharding != "none":
        from finetune.distributed.sharding import refuse_what_is_not_sharded

        refuse_what_is_not_sharded(config, trains=True)
    if config.model.frozen_precision == "fp8":
        from finetune.model.quantized import refuse_where_fp8_is_impossible

        asked = config.training.precision if runtime is None else runtime.precision
        device = None if runtime is None else runtime.device
        refuse_where_fp8_is_impossible(config, precision="bf16" if asked == "auto" else asked, device=device)
    optim, starts = config.optim, config.lora.init
    is_adamw = optim.factory is None and optim.optimizer == "torch.optim.AdamW" and not optim.args
    if not is_adamw or optim.lora_plus_ratio != 1 or (optim.weight_decay and starts != "default"):
        from finetune.training.optim import check_optimizer

        check_optimizer(config)


def check_objective(config: Config) -> None:
    """Raise ConfigError for a key that the objective does not read, or for a run that lacks what it needs."""
    chosen = sometimes_read(config)
    if chosen or config.has_reference:
        from finetune.training.unread_keys import refuse_keys_of_others

        refuse_keys_of_others(config, chosen)


def sometimes_read(config: Config, names: tuple[str, ...] = SOMETIMES_READ) -> dict[str, Any]:
    """Return the keys of these names that are set to another value than their default, with their values."""
    given, of_names = values(config), {key: field for key, field in fields().items() if key.startswith(names)}
    set_here = [key for key in of_names if config.origin(key) != "default"]
    # A run's config.yaml names every key, and a key that was not set has its default there.
    return {key: given[key] for key in set_here if given[key] != of_names[key].get_default(call_default_factory=True)}


def check_paths(config: Config) -> None:
    """Raise DataError or ModelError for files and folders that do not exist, all in one. The hub is not asked."""
    problems = missing_here(config.data)
    if config.origin("testing.general_prompts") != "default":
        from finetune.inference.prompts import read_general_prompts

        try:
            read_general_prompts(config.testing.general_prompts)
        except DataError as error:
            problems.append(str(error))
    try:
        list(_parts_at_hub(config.model, needs_weights=True))
    except ModelError as error:
        from finetune.config.earlier_commands import how_to_make

        problems.append(f"{error}{how_to_make(config)}")
        if len(problems) == 1:
            raise ModelError(problems[0]) from None
    if len(problems) > 1:
        raise DataError("\n  ".join([f"the run has {len(problems)} problems:", *problems]))
    if problems:
        raise DataError(problems[0])


def check_inputs(config: Config, *, needs_weights: bool) -> None:
    """Refuse a model or rows that a run could not use, before anything is downloaded or encoded.

    Rows are read only if the model is not on this machine yet. Otherwise training reads them at once anyway. With
    `needs_weights`, the run reads the model's weights, if they are not random.

    Raises:
        DataError: rows are missing, cannot be read or have no known format.
        ModelError: a folder is missing, or the hub does not give the model and its cache does not have all of it.
    """
    check_paths(config)
    is_new = config.resume == "never" or not RunFolder(config.output_dir).holds_run()
    at_hub = list(_parts_at_hub(config.model, needs_weights=needs_weights))
    if not at_hub:
        check_local_rows(config.data, None, is_new=is_new)
        return
    from finetune.model.local_files import has_to_use_cache, missing_from_cache

    is_to_download = any(missing_from_cache(repository, part) for repository, part, _ in at_hub)
    check_local_rows(config.data, config.objective.reads if is_to_download else None, is_new=is_new)
    for repository, part, key in at_hub:
        has_to_use_cache(repository, part, key)


def named_splits(splits: Any) -> dict[str, Any]:
    """Return the splits that exist, by name: `train`, `validation`, `test`."""
    return {name: split for name, split in vars(splits).items() if split is not None}


def raw_digests(splits: Any) -> dict[str, list[str]]:
    """Return the `digest_row` of each row, by split. Both sides of a pair are from one row."""
    return {name: split.sides[0].raw_digests() for name, split in named_splits(splits).items()}


def check_fit(config: Config, model: Any, splits: Any) -> None:
    """Raise ConfigError for a model that contradicts the configuration, and for rows beyond its context."""
    from finetune.model.base import max_context
    from finetune.training.optim import build_optimizer

    has_adapter = hasattr(model, "peft_config")
    if has_adapter and not hasattr(model, "get_base_model"):
        from finetune.training.given import describe_given_model

        describe_given_model(model)  # raises: the adapter is in the layers of a model without PEFT's class around it
    if has_adapter != (config.training.method == "lora"):
        raise ConfigError(
            f"training.method is {config.training.method} ({config.origin('training.method')}) but the model "
            f"that was built {'carries an adapter' if has_adapter else 'has no adapter'}. Use the recipe "
            f"for this method, or set training.method={'lora' if has_adapter else 'full'}."
        )
    build_optimizer(model, config.optim)  # raises its errors before the run's folder is opened
    context = max_context(model)
    if context is None:
        return
    advice = f"Set data.max_length={context} (it is {config.data.max_length}, {config.origin('data.max_length')})."
    for name, split in named_splits(splits).items():
        longest = int(split.lengths.max()) if len(split) else 0
        if longest > context:
            raise ConfigError(
                f"the {name} split has a row of {longest} tokens, but the model's context ends at {context}. {advice}"
            )


def _parts_at_hub(section: ModelSection, *, needs_weights: bool) -> Iterator[tuple[Repository, Part, str]]:
    """Yield what a run reads from the hub, and the key that names it."""
    model: Part = "weights" if needs_weights and section.init != "random" else "config"
    parts: list[tuple[str | None, Part, str]] = [
        (None if section.config is not None else section.path, model, "model.path"),
        (section.tokenizer or section.path, "tokenizer", "model.tokenizer" if section.tokenizer else "model.path"),
    ]
    for path, part, key in parts:
        repository = None if path is None else repository_of(locate(path, key), section.revision)
        if repository is not None:
            yield repository, part, key


def refuse_no_update(state: TrainerState, config: Config, no_gradient: str) -> None:
    """Raise RunFailedError if no step of the run has updated the weights, unless optim.learning_rate is 0.

    `no_gradient` is the objective's.
    """
    if not state.has_no_update or not config.optim.learning_rate:
        return
    cause = no_gradient if state.num_without_gradient else "Lower optim.learning_rate, or look at the rows"
    raise RunFailedError(
        f"the run has learned nothing: {NO_GRADIENT} in {state.num_without_gradient} of its "
        f"{counted(state.step, 'step')}, and not finite in {state.num_skipped_steps}. {cause}. Checkpoints and "
        "metrics.jsonl are kept, but adapter/ is not written. Start again with another output_dir."
    )


class UpdateWatch:
    """Warns of a run that begins without an update, and checks after step 3 that the B matrix of every adapter changed.

    It looks at B because A has no gradient as long as B is zero. Weights are the same on all ranks, so all ranks find
    the same. Models without adapters are only checked for updates. Weight decay also changes a B that did not start at
    zero.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        fallbacks: Fallbacks,
        no_gradient: str,
        *,
        may_lack_gradient: bool = False,
    ) -> None:
        self._config = config
        self._fallbacks = fallbacks
        self._no_gradient, self._may_lack_gradient = no_gradient, may_lack_gradient
        self._is_reported = False
        self._b_matrices = {
            name.removeprefix("base_model.model."): [part.weight for part in module.lora_B.values()]
            for name, module in model.named_modules()
            if any(part.weight.requires_grad for part in getattr(module, "lora_B", {}).values())
        }
        self._highest_rate = 0.0
        self._checked_step = NUM_STEPS
        starts_at_zero = config.lora.init == "default" and config.lora.start_from is None
        # On the CPU, so that memory on the device is as forecast.
        self._at_start = {
            name: [None if starts_at_zero else b.detach().cpu().clone() for b in of_layer]
            for name, of_layer in self._b_matrices.items()
        }

    def after_step(self, state: TrainerState, result: StepResult, *, is_silent: bool = False) -> None:
        """Check the step that led to `state`. All ranks raise the same error.

        After a silent step, in which the optimizer updates nothing yet, adapters are checked three steps later.

        Raises:
            ConfigError: the run is strict, it has made no update yet, and the step has no gradient.
            RunFailedError: after step 3 of the run, adapters do not train, or nothing does. With
                `may_lack_gradient`, three steps may have no gradient.
        """
        step = state.step
        if result.grad_norm == 0 and state.has_no_update and self._config.optim.learning_rate:
            if not self._is_reported:
                why = f"{NO_GRADIENT}. {self._no_gradient}"
                self._fallbacks.take(Fallback(what=f"step {step}", wanted="an update", used="none", why=why))
            self._is_reported = True
            if step == NUM_STEPS and not self._may_lack_gradient:
                refuse_no_update(state, self._config, self._no_gradient)
        if is_silent:
            self._checked_step = step + NUM_STEPS
        elif not result.is_skipped and result.grad_norm != 0:
            self._highest_rate = max(self._highest_rate, result.learning_rate)
        if step < self._checked_step or not self._at_start:
            return
        if step == self._checked_step and self._highest_rate > 0:
            self._refuse_unchanged()
        self._at_start = {}

    def _refuse_unchanged(self) -> None:
        unchanged = [
            name
            for name, of_layer in self._b_matrices.items()
            if not any(  # what has no values at the start was zero
                (b.detach() if was is None else b.detach().cpu() != was).any()
                for b, was in zip(of_layer, self._at_start[name], strict=True)
            )
        ]
        if unchanged:
            from finetune.training.unchanged_adapters import refuse_unchanged

            refuse_unchanged(unchanged, self._b_matrices, step=self._checked_step, highest_rate=self._highest_rate)
