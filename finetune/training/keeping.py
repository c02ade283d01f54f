"""Add the base's own answers to general prompts to the training rows (`data.keep`), so that a run forgets less.

The base answers before the first step. The rows are recorded in the run's folder, so a resumed run and a replay read
them and do not generate them again. Another run with the same base and prompts reads them from the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from finetune.config.config_files import resolve_shipped
from finetune.data.batches import EvaluationLoader, loader_keys_on
from finetune.data.encoded import EncodedExamples, EncodedSplits, Part
from finetune.data.row_file import RowFacts, RowWriter, map_rows, rows_in_memory, write_rows
from finetune.data.splits import parse_split_size, shuffled
from finetune.data.templates import AnswerTokens, TokenisedRow, stop_ids
from finetune.data.values import quote
from finetune.errors import CheckpointError, DataError
from finetune.fallbacks import Fallback
from finetune.inference.decoding import Decoding, generate_answers
from finetune.inference.losses import LossSums, sum_losses
from finetune.inference.prompts import encode_prompt, read_general_prompts, read_prompts_file
from finetune.limits import is_own_file, open_regular
from finetune.logs import waiting
from finetune.model.base import longrope_boundary
from finetune.runs.durable import describe_os_error, disk_failures_end_the_run
from finetune.runs.model_files import has_adapter
from finetune.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.data.row_file import Encode
    from finetune.distributed.runtime import Runtime
    from finetune.training.objective import Setup
    from finetune.training.reporting.journal import Journal

SUBSET = "base_answers"
"""The name of these rows in the losses of validations: `loss/base_answers`."""
_MAX_NEW_TOKENS = 64
_AT_ONCE = 16
_MOST_MEASURED = 32
"""The most rows whose loss a validation measures."""
_MOST_BYTES = 1 << 28
"""Of a file that is read."""
_Row = tuple[list[int], list[bool]]
"""The tokens of a prompt and its answer, and which of them are targets: those of the answer."""
_Splits = TypeVar("_Splits")
_log = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """The rows that `data.keep` asks for."""

    prompts: list[list[int]]
    """Token ids of the prompts to answer; empty if the rows are recorded in the file that `data.keep_prompts` names."""
    num_rows: int
    """Rows of an epoch. If there are fewer prompts, their rows are repeated."""


def base_answers(
    runtime: Runtime,
    config: Config,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    train: EncodedExamples,
    *,
    journal: Journal | None,
    base: str | None,
) -> EncodedExamples:
    """Return the rows that an epoch has on top of the training rows, and record them in the run's folder.

    Collective: every rank, with a placed model that is not trained yet. `base` is the fingerprint of the base. Without
    it, the cache is not used.

    Raises:
        CheckpointError: a resumed run recorded other rows, and they are gone.
        DataError: the prompts cannot be used.
    """
    rows = None
    with runtime.collectives.failing_together("reading the prompts of data.keep_prompts"):
        wanted = _read_wanted(config, tokenizer, len(train))
    parts = [wanted.prompts, _MAX_NEW_TOKENS, base, config.data.max_length, config.lora.quantize, runtime.precision]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    cached = Path(config.data.cache_dir).expanduser() / f"base-answers-{key[:32]}.safetensors"
    with runtime.collectives.failing_together("reading the base's answers"):
        if journal is not None:
            given = Path(resolve_shipped(config.data.keep_prompts)).expanduser()
            places = [journal.folder.base_answers, *([] if base is None else [cached])] if wanted.prompts else [given]
            rows = next((found for place in places if (found := _read(place, key if wanted.prompts else ""))), None)
            largest = max((token for ids, _ in rows or () for token in ids), default=0)
            if not wanted.prompts and (rows is None or largest >= model.config.vocab_size):
                raise CheckpointError(
                    f"{given}, the recorded answers of the base, cannot be read, or are of another model. Restore it."
                )
    rows = runtime.collectives.broadcast_from_main(rows)
    if rows is None:
        rows = _generate(runtime, config, model, tokenizer, wanted.prompts)
    encode = _encode(rows, key, config.data.max_length)
    kept = EncodedExamples.of(rows_in_memory(encode), AnswerTokens(tokenizer).end_id_of("messages"), _name_row)
    with runtime.collectives.failing_together("recording the base's answers"):
        if journal is not None:
            _record(runtime, config, journal, kept, encode, cached if base is not None and wanted.prompts else None)
    return _epoch(config, kept, wanted.num_rows)


def assumed_rows(config: Config, tokenizer: PreTrainedTokenizerBase, train: EncodedExamples) -> EncodedExamples:
    """Return rows like those of `base_answers`, for a plan. Each has the longest answer possible, none is generated."""
    wanted = _read_wanted(config, tokenizer, len(train))
    rows = [(prompt + prompt[-1:] * _MAX_NEW_TOKENS, _targets(prompt, _MAX_NEW_TOKENS)) for prompt in wanted.prompts]
    encode = _encode(rows, "", config.data.max_length)
    return _epoch(config, EncodedExamples.of(rows_in_memory(encode), 0, _name_row), wanted.num_rows)


def describe_rows_on_top(config: Config, rows: EncodedExamples) -> str:
    """Say what an epoch has on top of the training rows."""
    num_rows = counted(len(rows), "row")
    return f"{num_rows} an epoch on top of the training rows: the base's own answers (data.keep={config.data.keep})"


def with_rows_on_top(splits: _Splits, rows: EncodedExamples | None) -> _Splits:
    """Return the splits with these rows after the training rows. The other splits do not change."""
    if rows is None or not isinstance(splits, EncodedSplits):
        return splits
    return replace(splits, train=EncodedExamples.joined([splits.train, rows]))


def measure_base_answers(setup: Setup, rows: EncodedExamples) -> LossSums:
    """Add up the losses of this rank's share of the base's answers, at most 32 of them. Collective."""
    runtime = setup.runtime
    loader = EvaluationLoader(
        rows.select(range(min(len(rows), _MOST_MEASURED))),
        loader_keys_on(runtime.device.type, setup.config.validation),
        boundary=longrope_boundary(setup.model),
        rank=runtime.rank,
        world_size=runtime.world_size,
        collate=setup.collate,
    )
    return sum_losses(runtime, setup.model, loader).whole


def _read_wanted(config: Config, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> _Wanted:
    """Read and encode the prompts to answer, and count the rows of an epoch."""
    section = config.data
    size = parse_split_size(section.keep or "", "keep")
    assert size is not None  # the schema has checked it
    path = Path(resolve_shipped(section.keep_prompts)).expanduser()
    if path.suffix == ".safetensors":
        return _Wanted([], size.of(num_rows))
    measured = {prompt.shown for prompt in read_general_prompts(config.testing.general_prompts)}
    read = read_prompts_file(path, named_by="data.keep_prompts")
    prompts = [prompt for prompt in read if prompt.shown not in measured]
    if len(prompts) < len(read):
        _log.info("%s of data.keep_prompts left out: testing.general_prompts measures them", len(read) - len(prompts))
    if not prompts:
        raise DataError(
            f"data.keep_prompts is {section.keep_prompts}, whose {counted(len(read), 'prompt')} are all in "
            "testing.general_prompts too. What is trained on cannot show what was forgotten: give other prompts."
        )
    chosen = sorted(shuffled(len(prompts), section.split_seed)[: size.of(num_rows)])
    encoded = [encode_prompt(AnswerTokens(tokenizer), prompts[row]) for row in chosen]
    for row, ids in zip(chosen, encoded, strict=True):
        if len(ids) >= section.max_length:
            raise DataError(
                f"{prompts[row].source} has {len(ids):,} tokens, but data.max_length is {section.max_length:,}, which "
                "leaves no room for an answer. Shorten the prompt in data.keep_prompts, or raise data.max_length."
            )
    return _Wanted(encoded, size.of(num_rows))


def _epoch(config: Config, kept: EncodedExamples, num_rows: int) -> EncodedExamples:
    """Repeat rows so that an epoch has `num_rows` of them."""
    part = Part((kept,), f"data.keep={config.data.keep}", weight=num_rows / len(kept))
    rows = kept.select(part.epoch(config.data.split_seed))
    _log.info("train: %s, to %s", describe_rows_on_top(config, rows), counted(len(kept), "prompt"))
    return rows


def _generate(
    runtime: Runtime, config: Config, model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]]
) -> list[_Row]:
    """Answer the prompts greedily, by the base without the adapter that the run starts from. Collective."""
    # PiSSA moves a part of the base into the adapter, so that only both together are the base.
    as_base = model.disable_adapter if has_adapter(model) and config.lora.init == "default" else nullcontext
    decoding = Decoding(
        stop_ids=stop_ids(tokenizer, model.generation_config.eos_token_id),
        max_new_tokens=_MAX_NEW_TOKENS,
        keeps_stop=True,
    )
    with as_base(), waiting(f"answering {counted(len(prompts), 'prompt')} with the base (data.keep)"):
        together = runtime if runtime.world_size > 1 else None
        answers = generate_answers(model, prompts, decoding, batch_size=_AT_ONCE, runtime=together)
    answered = [row for row in zip(prompts, answers, strict=True) if row[1]]
    if not answered:
        raise DataError("the base answers none of data.keep_prompts with a single token. Remove data.keep.")
    first = tokenizer.decode(answered[0][1], skip_special_tokens=True)
    _log.info("the base's first answer for data.keep: %s", quote(first))
    return [([*prompt, *answer], _targets(prompt, len(answer))) for prompt, answer in answered]


def _targets(prompt: Sequence[int], num_answer: int) -> list[bool]:
    return [False] * len(prompt) + [True] * num_answer


def _encode(rows: Sequence[_Row], key: str, max_length: int) -> Encode:
    """Return a function that writes these rows. `key` stands for everything that they depend on."""

    def encode(writer: RowWriter) -> RowFacts:
        for number, (ids, is_target) in enumerate(rows, start=1):
            writer.add(number, TokenisedRow(ids, bytearray(is_target)), max_length=max_length)
        return RowFacts("messages", read_as=key)

    return encode


def _name_row(number: int) -> str:
    return f"the base's answer {number}"


def _read(path: Path, key: str) -> list[_Row] | None:
    """Read recorded rows; None if there is no whole file, or if it has the rows of another key."""
    if not is_own_file(path, "the base's answers are generated again"):
        return None
    try:
        open_regular(path, most=_MOST_BYTES).close()
        rows = map_rows(path)
    except (ValueError, OSError) as error:
        _log.warning("%s is damaged: %s", path, error)
        return None
    if key and rows.facts.read_as != key:
        return None
    _log.info("the base's answers are read from %s", path)
    examples = EncodedExamples.of(rows, 0)
    return [(ids.tolist(), is_target.tolist()) for ids, is_target in map(examples.__getitem__, range(len(examples)))]


def _record(
    runtime: Runtime, config: Config, journal: Journal, kept: EncodedExamples, encode: Encode, cached: Path | None
) -> None:
    """Write the rows into the run's folder and the cache, unless they are there. The main process calls this."""
    recorded = (journal.recorded("base_answers") or {}).get("fingerprint", kept.fingerprint)
    if recorded != kept.fingerprint and not {"data", "data.keep", "data.keep_prompts"} & set(config.resume_allow):
        raise CheckpointError(
            f"{journal.folder.base_answers} is gone or damaged, and the base now gives other answers than those that "
            "the run was trained on. Restore the file, or accept the new answers with resume.allow=data.keep."
        )
    journal.record(base_answers={"rows": len(kept), "fingerprint": kept.fingerprint})
    with disk_failures_end_the_run("Writing", journal.folder.base_answers):
        write_rows(journal.folder.base_answers, encode)
    if cached is None or cached.exists():
        return
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_rows(cached, encode)
    except OSError as error:
        used, why = "no cache: another run generates the base's answers again", describe_os_error(error)
        runtime.fallbacks.take(Fallback(what="data.cache_dir", wanted=str(cached.parent), used=used, why=why))
