"""Keep what the base could do: train on its own answers (`data.keep`), and stop a run that forgets (`max_forgotten`).

The base answers general prompts before the first step. The rows are recorded in the run's folder, so a resumed run and
a replay read them and do not generate them again. Another run with the same base and prompts reads them from the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.config_files import SHIPPED_PREFIX, local_path, resolve_shipped
from finetune.config.run_paths import recorded_paths
from finetune.data.batches import EvaluationLoader, loader_keys_on
from finetune.data.encoded import EncodedExamples, EncodedSplits, Part
from finetune.data.held_out import parse_split_size
from finetune.data.row_file import RowFacts, RowWriter, map_rows, rows_in_memory, write_rows
from finetune.data.splits import shuffled
from finetune.data.templates import AnswerTokens, TokenisedRow
from finetune.errors import CheckpointError, ConfigError, DataError
from finetune.fallbacks import Fallback
from finetune.inference.decoding import Decoding, generate_answers, group_prompts
from finetune.inference.divergence import compare_answers
from finetune.inference.forgetting import AT_ONCE, MAX_NEW_TOKENS
from finetune.inference.losses import SplitLosses, sum_losses
from finetune.inference.prompts import encode_prompts, read_general_prompts, read_prompts_file
from finetune.limits import is_own_file, open_regular
from finetune.logs import waiting
from finetune.model.base import longrope_boundary, max_context
from finetune.runs.durable import describe_os_error, disk_failures_end_the_run
from finetune.runs.file_lock import try_file_lock
from finetune.runs.folder import RunFolder
from finetune.runs.metrics import FORGOTTEN
from finetune.runs.model_files import LoadedRun, has_adapter
from finetune.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.distributed.runtime import Runtime
    from finetune.training.objective import Setup
    from finetune.training.reporting.journal import Journal

SUBSET = "base_answers"
"""The name of these rows in the losses of validations: `loss/base_answers`."""
_LONGEST_ANSWER = 64
_ANSWERED_AT_ONCE = 16
_MOST_MEASURED = 32
"""A validation measures the loss of at most so many of these rows."""
_MOST_PROMPTS = 16
"""The most general prompts on which a validation measures the divergence."""
_MOST_BYTES = 1 << 28
"""Of a file that is read."""
_Row = tuple[list[int], int]
"""The tokens of a prompt and its answer, and the number of tokens of the answer, which are the targets."""
_log = logging.getLogger(__name__)


def check_keeping(config: Config) -> None:
    """Check the keys of this module before the model is loaded.

    Raises:
        ConfigError: a value is wrong, or the base of such a run cannot be asked.
        DataError: `data.keep_prompts` cannot be read.
    """
    keep, bound, validation, saving = config.data.keep, config.early_stopping, config.validation, config.checkpoint
    every = validation.validate_every
    is_saved = saving.save_every_epochs == 1 if every is None else saving.save_every and every % saving.save_every == 0
    save = "checkpoint.save_every_epochs=1" if every is None else f"checkpoint.save_every={every}"
    problems: dict[str, dict[str, object]] = {
        "data.keep": {
            "is neither a share of the training rows nor a number of rows. Write 5% or 200": keep
            and not _is_size(keep),
        },
        "early_stopping.max_forgotten": {
            "needs an adapter, which can be switched off. Set training.method=lora": config.training.method != "lora",
            "needs lora.init=default: others move a part of the base into the adapter": config.lora.init != "default",
            "needs prompts. Name a file in testing.general_prompts": config.testing.general_prompts == "none",
            f"needs a checkpoint of each validated step. Set {save}": not is_saved,
        },
    }
    for (key, of_key), value in zip(problems.items(), (keep, bound.max_forgotten), strict=True):
        random = "needs a base that was trained, but model.init is random. Name a model in model.path"
        for problem, has_it in {random: config.model.init == "random", **of_key}.items():
            if value is not None and has_it:
                raise ConfigError(f"{key}={value} ({config.origin(key)}) {problem}, or remove {key}.")
    if keep is not None:
        _read_prompts(config)


def answer_with_base(
    runtime: Runtime,
    config: Config,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    train: EncodedExamples,
    base: str | None,
    journal: Journal | None,
) -> EncodedExamples:
    """Return the rows that an epoch has on top of the training rows, and record them in the run's folder.

    Collective: every rank, with a placed model that is not trained yet, and the fingerprint of its base.

    Raises:
        CheckpointError: the recorded rows are gone, and the base now gives other answers.
        DataError: the prompts cannot be used.
    """
    rows, is_own, end_id = None, False, AnswerTokens(tokenizer).end_id_of("messages")
    with runtime.collectives.failing_together("reading data.keep_prompts"):
        prompts = _encode_prompts(config, tokenizer, len(train))
    parts = [prompts, _LONGEST_ANSWER, base, config.data.max_length, config.lora.quantize, runtime.precision]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    cached = local_path(config.data.cache_dir) / f"base-answers-{key[:32]}.safetensors"
    with runtime.collectives.failing_together("reading the base's answers"):
        if journal is not None:
            if _is_recorded(config):
                rows = _read(Path(config.data.keep_prompts), None, model.config.vocab_size)
            else:
                rows = _read_own(config, journal, end_id, model.config.vocab_size)
                is_own = rows is not None
                # Without an adapter, no fingerprint tells bases apart.
                places = [journal.folder.base_answers, *([] if base is None else [cached])]
                found = (_read(place, key, model.config.vocab_size) for place in places)
                rows = rows or next((of_place for of_place in found if of_place), None)
    rows = runtime.collectives.broadcast_from_main(rows)
    if rows is None and _is_recorded(config):
        raise CheckpointError(f"{config.data.keep_prompts} has no answers of this base. Restore the file.")
    answered = rows or _generate(runtime, config, model, tokenizer, prompts)
    kept = _examples(answered, end_id)
    with runtime.collectives.failing_together("recording the base's answers"):
        if journal is not None:
            _record(config, journal, kept)
            if not is_own:
                with disk_failures_end_the_run("Writing", journal.folder.base_answers):
                    write_rows(journal.folder.base_answers, lambda writer: _write(answered, writer, key))
            if base is not None and rows is None:
                _write_to_cache(runtime, cached, answered, key)
    return _epoch(config, kept, len(train))


def assumed_rows(config: Config, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> EncodedExamples:
    """Return rows with the longest answers that the base could give, for a plan of a run with `num_rows` rows."""
    prompts = _encode_prompts(config, tokenizer, num_rows)
    rows = [([*ids, *ids[-1:] * _LONGEST_ANSWER], _LONGEST_ANSWER) for ids in prompts]
    return _epoch(config, _examples(rows, 0), num_rows)


def describe_rows_on_top(config: Config, rows: EncodedExamples) -> str:
    """Say what an epoch has on top of the training rows."""
    num_rows = counted(len(rows), "row")
    return f"{num_rows} an epoch on top of the training rows: the base's own answers (data.keep={config.data.keep})"


def with_rows_on_top(splits: Any, rows: EncodedExamples) -> Any:
    """Return the splits with these rows after the training rows. The other splits do not change."""
    return EncodedSplits(**vars(splits) | {"train": EncodedExamples.joined([splits.train, rows])})


class Keeper:
    """Measure what is left of the base, in each validation: the loss of its answers, and the divergence from it.

    The divergence is measured on at most 16 general prompts, which the base answers once. The base is the model with
    its adapter switched off. Collective: every rank makes one and calls `measure`.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._runtime = setup, setup.runtime
        self._tuned = LoadedRun(setup.model, setup.tokenizer)
        self._watched: list[tuple[list[list[int]], list[list[int]]]] = []
        self._num_prompts = 0
        if setup.config.early_stopping.max_forgotten is not None:
            self._ask_base()

    def measure(self, measured: SplitLosses) -> SplitLosses:
        """Add to this rank's losses of a validation what `data.keep` and `early_stopping.max_forgotten` measure."""
        setup, runtime = self._setup, self._runtime
        if setup.base_answers is not None:
            loader = EvaluationLoader(
                setup.base_answers.select(range(min(len(setup.base_answers), _MOST_MEASURED))),
                loader_keys_on(runtime.device.type, setup.config.validation),
                boundary=longrope_boundary(setup.model),
                rank=runtime.rank,
                world_size=runtime.world_size,
                collate=setup.collate,
            )
            of_base = sum_losses(runtime, setup.model, loader).whole
            measured = measured._replace(subsets={**measured.subsets, SUBSET: of_base})
        if self._num_prompts:
            with waiting("measuring what it forgot"):
                compared = (compare_answers(runtime, self._tuned, None, *both) for both in self._watched)
                total = sum(divergence for batch in compared for divergence, *_ in batch)
            share = total / self._num_prompts / (1 if self._shares_prompts else runtime.world_size)
            (divergence,) = runtime.collectives.sum([share])
            measured = measured._replace(metrics={**measured.metrics, FORGOTTEN: divergence})
        return measured

    @property
    def _shares_prompts(self) -> bool:
        """Whether each rank has its own prompts. If the weights are sharded, all ranks forward all prompts together."""
        return self._runtime.placement.shard_size is None

    def _ask_base(self) -> None:
        runtime, (model, tokenizer), config = self._runtime, self._tuned, self._setup.config
        ids = encode_measured_prompts(config, model, tokenizer)
        decoding = Decoding.greedy(model, tokenizer, MAX_NEW_TOKENS, keeps_stop=True)
        with model.disable_adapter(), waiting("answering general prompts with the base"):
            answers = generate_answers(model, ids, decoding, batch_size=AT_ONCE, runtime=runtime)
        batches = group_prompts(model, ids, batch_size=AT_ONCE, max_new_tokens=MAX_NEW_TOKENS)
        own = batches[runtime.rank :: runtime.world_size] if self._shares_prompts else batches
        self._watched = [([ids[row] for row in rows], [answers[row] for row in rows]) for rows in own]
        self._num_prompts = len(ids)


def encode_measured_prompts(config: Config, model: Any, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Encode the general prompts on which validations measure the divergence.

    Raises:
        DataError: the model cannot take one of them.
    """
    key, context = "testing.general_prompts", max_context(model) or math.inf
    recorded = recorded_paths(RunFolder(config.output_dir).path)
    prompts = read_general_prompts(recorded.get(key, config.testing.general_prompts))
    few = [prompts[row] for row in sorted(shuffled(len(prompts), 0)[:_MOST_PROMPTS])]
    encoded = encode_prompts(AnswerTokens(tokenizer), few)
    for prompt, ids in zip(few, encoded, strict=True):
        if len(ids) >= context:
            raise DataError(
                f"{prompt.source} has {len(ids):,} tokens, and the model's context of {context:,} leaves no room for "
                f"an answer. Shorten it, or name other prompts in {key}."
            )
    return encoded


def _is_size(text: str) -> bool:
    try:
        return parse_split_size(text, "keep") is not None
    except DataError:
        return False


def _is_recorded(config: Config) -> bool:
    """Return whether the rows are recorded in the file that `data.keep_prompts` names, as in a replay."""
    return config.data.keep_prompts.endswith(".safetensors")


def _num_rows(config: Config, num_rows: int) -> int:
    size = parse_split_size(config.data.keep or "", "keep")
    assert size is not None  # `check_keeping` has refused others
    return size.of(num_rows)


def _read_prompts(config: Config) -> list[Any]:
    """Read the prompts of `data.keep_prompts` that `testing.general_prompts` does not have."""
    if _is_recorded(config):
        return []
    path = local_path(resolve_shipped(config.data.keep_prompts))
    read, measured = read_prompts_file(path, named_by="data.keep_prompts"), config.testing.general_prompts
    general = {prompt.shown for prompt in read_general_prompts(measured)}
    prompts = [prompt for prompt in read if prompt.shown not in general]
    if not prompts:
        raise DataError(
            f"data.keep_prompts is {config.data.keep_prompts}, and testing.general_prompts has all its "
            f"{counted(len(read), 'prompt')} too. What is trained on cannot show what was forgotten: use others."
        )
    if len(prompts) < len(read):
        _log.info("%d of data.keep_prompts left out, which testing.general_prompts has too", len(read) - len(prompts))
    return prompts


def _encode_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> list[list[int]]:
    """Encode as many prompts as an epoch has rows on top, or all if there are fewer."""
    prompts = _read_prompts(config)
    chosen = sorted(shuffled(len(prompts), config.data.split_seed)[: _num_rows(config, num_rows)])
    encoded = encode_prompts(AnswerTokens(tokenizer), [prompts[row] for row in chosen])
    longest, row = max(zip(map(len, encoded), chosen, strict=True), default=(0, 0))
    if encoded and longest + _LONGEST_ANSWER > config.data.max_length:
        is_shipped = config.data.keep_prompts.startswith(SHIPPED_PREFIX)
        shorten = "name shorter prompts of your own in data.keep_prompts" if is_shipped else "shorten the prompt"
        raise DataError(
            f"{prompts[row].source}, the longest prompt, has {longest:,} tokens, and an answer may have "
            f"{_LONGEST_ANSWER} more, but data.max_length is {config.data.max_length:,}. Set data.max_length to at "
            f"least {longest + _LONGEST_ANSWER}, or {shorten}."
        )
    return encoded


def _epoch(config: Config, kept: EncodedExamples, num_rows: int) -> EncodedExamples:
    """Repeat rows so that an epoch has as many as `data.keep` says."""
    part = Part((kept,), f"data.keep={config.data.keep}", weight=_num_rows(config, num_rows) / len(kept))
    rows = kept.select(part.epoch(config.data.split_seed))
    _log.info("train: %s, to %s", describe_rows_on_top(config, rows), counted(len(kept), "prompt"))
    return rows


def _generate(
    runtime: Runtime, config: Config, model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]]
) -> list[_Row]:
    """Answer the prompts greedily, by the base without an adapter that the run starts from. Collective."""
    # PiSSA moves a part of the base into the adapter, so that only both together are the base.
    as_base = model.disable_adapter if has_adapter(model) and config.lora.init == "default" else nullcontext
    decoding = Decoding.greedy(model, tokenizer, _LONGEST_ANSWER, keeps_stop=True)
    with as_base(), waiting(f"answering {counted(len(prompts), 'prompt')} with the base (data.keep)"):
        answers = generate_answers(model, prompts, decoding, batch_size=_ANSWERED_AT_ONCE, runtime=runtime)
    rows = [([*prompt, *answer], len(answer)) for prompt, answer in zip(prompts, answers, strict=True) if answer]
    if not rows:
        raise DataError("the base answers none of data.keep_prompts. Remove data.keep.")
    return rows


def _write(rows: Sequence[_Row], writer: RowWriter, key: str) -> RowFacts:
    """Write rows. `key` stands for everything that they depend on."""
    for number, (ids, num_targets) in enumerate(rows, start=1):
        is_target = bytes(len(ids) - num_targets) + b"\1" * num_targets
        writer.add(number, TokenisedRow(ids, bytearray(is_target)), max_length=len(ids))
    return RowFacts("messages", read_as=key)


def _examples(rows: Sequence[_Row], end_id: int) -> EncodedExamples:
    encoded = rows_in_memory(lambda writer: _write(rows, writer, ""))
    return EncodedExamples.of(encoded, end_id, "the base's answer {}".format)


def _read(path: Path, key: str | None, vocabulary: int) -> list[_Row] | None:
    """Read recorded rows; None if there is no whole file, or if it has the rows of another key."""
    if not is_own_file(path, "the base's answers are generated again"):
        return None
    try:
        open_regular(path, most=_MOST_BYTES).close()
        rows = map_rows(path)
    except (ValueError, OSError) as error:
        _log.warning("%s is damaged: %s", path, error)
        return None
    if key not in (None, rows.facts.read_as) or int(rows.token_ids.max()) >= vocabulary:
        return None
    _log.info("the base's answers are read from %s", path)
    examples = EncodedExamples.of(rows, 0)
    return [(ids.tolist(), int(is_target.sum())) for ids, is_target in (examples[row] for row in range(len(examples)))]


def _read_own(config: Config, journal: Journal, end_id: int, vocabulary: int) -> list[_Row] | None:
    """Read the rows of a resumed run. None if it has none, has lost them, or if `resume.allow` accepts others.

    The base may give other answers now, because `resume.allow` accepts another precision for example. The run goes on
    with the rows that it was trained on, which their fingerprint tells.
    """
    recorded = (journal.recorded("base_answers") or {}).get("fingerprint")
    if recorded is None or _accepts_others(config):
        return None
    rows = _read(journal.folder.base_answers, None, vocabulary)
    return rows if rows and _examples(rows, end_id).fingerprint == recorded else None


def _accepts_others(config: Config) -> bool:
    return bool({"data", "data.keep", "data.keep_prompts"} & set(config.resume_allow))


def _record(config: Config, journal: Journal, kept: EncodedExamples) -> None:
    """Record the rows in run.json. Refuse other rows than a resumed run had, unless `resume.allow` accepts them."""
    recorded = (journal.recorded("base_answers") or {}).get("fingerprint", kept.fingerprint)
    if recorded != kept.fingerprint and not _accepts_others(config):
        raise CheckpointError(
            f"{journal.folder.base_answers} is gone or damaged, and the base now gives other answers than those that "
            "the run was trained on. Restore the file, or accept the new answers with resume.allow=data.keep."
        )
    journal.record(base_answers={"rows": len(kept), "fingerprint": kept.fingerprint})


def _write_to_cache(runtime: Runtime, path: Path, rows: Sequence[_Row], key: str) -> None:
    """Write the rows to the cache, unless another run is writing the same rows there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if (lock := try_file_lock(path.with_suffix(".lock"))) is not None:
            with lock:
                write_rows(path, lambda writer: _write(rows, writer, key))
    except OSError as error:
        used, why = "no cache: another run generates the base's answers again", describe_os_error(error)
        runtime.fallbacks.take(Fallback(what="data.cache_dir", wanted=str(path.parent), used=used, why=why))
