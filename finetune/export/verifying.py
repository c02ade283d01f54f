"""Verify a run or a model folder: compare the answers of the runtime that serves it with test vectors."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.config.schema import TrainingSection
from finetune.data.encoded import EncodedExample
from finetune.engine.layout import PackedMicrobatch
from finetune.engine.loss import before_head
from finetune.errors import CheckpointError, ConfigError, RunFailedError
from finetune.export.certificate import Verified
from finetune.export.compressed_folder import scheme_of
from finetune.export.merge import load_tuned_model
from finetune.export.merge_effect import measure_merge
from finetune.export.plain_reload import logits_in_fp32
from finetune.export.runtimes import ServingRuntime, load_peft, load_transformers, runtime_of
from finetune.export.served_comparison import Check, ServedComparison, ServedModel, check_digests, compare
from finetune.export.system_turn import usual_system
from finetune.export.vectors import (
    Digests,
    Vectors,
    digest_files,
    digest_weight_files,
    make_vectors,
    prompts_to_ask,
    read_vectors,
)
from finetune.export.vllm_served import InVllm, limits_of_adapter, served_by_vllm
from finetune.inference.finished_run import FinishedRun, find_run, other_base
from finetune.logs import waiting
from finetune.model.from_hub import locate_model
from finetune.model.tokens import build_run_tokenizer, set_stop_and_pad_ids
from finetune.runs.durable import MANIFEST
from finetune.runs.recorded_run import RecordedRun, whole
from finetune.runs.state import STATE_FILE
from finetune.runs.verification import FULL_FILES, verify_checkpoint
from finetune.training.forward import choose_forward
from finetune.units import name_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_SHOWN = 3


def verify_folder(
    folder: Path, *, vectors: Path | None = None, bound: float | None = None, vllm: InVllm | None = None
) -> Verified:
    """Compare a model folder, in the runtime that serves it, with its test vectors.

    Args:
        folder: written by `finetune merge` or `finetune export`, or an adapter with vectors from elsewhere.
        vectors: a file or folder with the test vectors; None: those in `folder`.
        bound: the largest relative difference of a position's logits; None: what fits the runtime and the type.
        vllm: where to compare, if in vLLM.

    Raises:
        ConfigError: vLLM does not serve such files.
        CheckpointError: no runtime serves the folder, or there are no test vectors.
        RunFailedError: the runtime cannot load the folder.
    """
    folder = folder.expanduser().absolute()
    runtime, known = runtime_of(folder), read_vectors(vectors or folder)
    recorded = runtime.digests(known)
    bound = runtime.bound(known, folder) if bound is None else bound
    comparison = _compare(partial(_load, folder, runtime, known, vllm), folder, known, bound, recorded)
    notes = []
    if not any(recorded):
        notes.append(f"{runtime.name} has converted weights, so their bytes were compared with nothing")
    if known.note:
        notes.append(known.note)
    if scheme_of(folder) is not None:
        notes.append("the test vectors are of the compressed model; its README.md compares it with the run")
    if not (folder / MANIFEST).is_file():
        notes.append(f"the folder has no {MANIFEST}, so the certificate does not say of which files it is")
    is_other = vectors is not None and _trained(folder) not in (None, known.trained)
    source = str(vectors or "its test vectors")
    return Verified(
        folder=folder,
        source=source,
        vectors=known,
        comparison=comparison,
        notes=tuple(notes),
        has_other_vectors=is_other,
    )


def verify_run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    base: str | None = None,
    checkpoint: str | None = None,
    vectors: Path | None = None,
    bound: float | None = None,
    vllm: InVllm | None = None,
) -> Verified:
    """Compare a run's weights, in plain PEFT or transformers or in vLLM, with what the engine of training computes.

    Their bytes are compared with the checkpoint that they were published from.

    See `find_run` for `path`, `overrides`, `base` and `checkpoint`, and `verify_folder` for `bound` and `vllm`.
    `vectors` are test vectors that a merge of this run wrote, instead of fresh ones from the run itself.

    Raises:
        CheckpointError: the run is damaged or has no weights.
        RunFailedError: a damaged tensor, another chat template, or weights that the runtime cannot load.
    """
    try:
        run = find_run(path, overrides, base=base, checkpoint=checkpoint, is_alone=True)
    except CheckpointError as error:
        unusable = RecordedRun(path)
        adapter = unusable.folder.adapter
        recorded = _published_from(unusable) if checkpoint is None and adapter.is_dir() else Digests()
        if changed := _mismatches(check_digests(adapter, recorded)):
            raise RunFailedError(f"{path} is not what was trained: {summarize_mismatches(changed)}.") from error
        raise
    _refuse_other_template(run)
    if vectors is not None:
        known = read_vectors(vectors)
        recorded = Digests(known.trained)
    else:
        with waiting("computing answers with the forward that trained it"):  # how far this came is not said of the rest
            known = vectors_of_run(run)
        recorded = _published_from(run.recorded) if checkpoint is None else Digests()
    runtime = runtime_of(run.weights)
    bound = runtime.bound(known, run.weights) if bound is None else bound

    comparison = _compare(partial(load_served, run, known, vllm), run.weights, known, bound, recorded)
    notes = [] if run.is_full else limits_of_adapter(run.weights)
    if not recorded.tensors:
        notes.insert(
            0, "no intact checkpoint holds another copy of these weights, so their bytes were compared with nothing"
        )
    source = str(vectors or "the forward pass that trained it")
    effect = measure_merge(run) if run.config.is_quantized and vllm is None else None
    notes += [] if effect is None else effect.sentences()
    return Verified(
        folder=run.weights,
        source=source,
        vectors=known,
        comparison=comparison,
        notes=tuple(notes),
        merge_effect=effect,
        has_other_vectors=vectors is not None and bool(comparison.checks["tensors"].mismatches),
    )


def load_served(run: FinishedRun, known: Vectors, vllm: InVllm | None = None) -> AbstractContextManager[ServedModel]:
    """Load a run's weights in plain PEFT or transformers, or in vLLM, which is asked for the prompts of `known`."""
    is_checkpoint = run.weights != run.recorded.folder.adapter
    tokenizer = build_run_tokenizer(run.config) if is_checkpoint else None
    if run.is_full and tokenizer is not None:
        if vllm is not None:
            return _served_with_tokenizer(run.weights, tokenizer, known, vllm)
        return nullcontext(load_transformers(run.weights, tokenizer))
    if run.is_full:
        return _load(run.weights, runtime_of(run.weights), known, vllm)
    base_model, revision = locate_model(run.config.model), run.config.model.revision
    if vllm is not None:
        return served_by_vllm(run.weights, known, vllm, base=base_model, revision=revision)
    return nullcontext(load_peft(run.weights, base_model, revision, tokenizer))


@contextmanager
def _served_with_tokenizer(
    checkpoint: Path, tokenizer: PreTrainedTokenizerBase, known: Vectors, vllm: InVllm
) -> Iterator[ServedModel]:
    """Serve the whole model of a checkpoint, which has no tokenizer, from a temporary folder with links to its files.

    The optimizer's file is left out, because vLLM reads every safetensors file as weights.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in FULL_FILES:
            if (checkpoint / file).is_file():
                (folder / file).symlink_to(checkpoint / file)
        tokenizer.save_pretrained(folder)
        with served_by_vllm(folder, known, vllm) as served:
            yield served


def vectors_of_run(run: FinishedRun) -> Vectors:
    """Make test vectors of a run by the engine that trained it, in fp32.

    Raises:
        ModelError: the base cannot be loaded, or the adapter does not fit it.
        RunFailedError: the adapter was trained on another base.
    """
    tokenizer, model = build_run_tokenizer(run.config), load_tuned_model(run)
    if not run.is_full and (other := other_base(model, run)):
        raise RunFailedError(f"{other}, so this is not what was trained. Name that base with --set model.path=FOLDER.")
    system = usual_system(run)
    prompts = prompts_to_ask(tokenizer, model, system)
    stops = set_stop_and_pad_ids(model, tokenizer)
    logits = engine_logits(run.config.training, model.float(), [vector.token_ids for vector in prompts])
    vectors = make_vectors(model, prompts, logits, stop_ids=stops, has_template=tokenizer.chat_template is not None)
    return replace(vectors, system=system)


def engine_logits(section: TrainingSection, model: Any, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Compute logits at every position with the forward that a run uses: the engine's, or else the model's own.

    The model is in fp32 on the CPU. The shape of the logits is (tokens of all prompts, vocabulary).
    """
    collate = choose_forward(section, model).collate
    rows = []
    for ids in prompts:
        # One more token, so that each token of the prompt predicts one.
        longer = torch.tensor([*ids, 0])
        microbatch = collate([EncodedExample(longer, torch.arange(len(longer)) > 0)])
        if not isinstance(microbatch, PackedMicrobatch):
            rows.append(logits_in_fp32(model, [ids]))
            continue
        with torch.no_grad():
            hidden, head = before_head(model.eval(), microbatch)
            rows.append(torch.nn.functional.linear(hidden, head.weight, head.bias)[microbatch.target_term])
    return torch.cat(rows)


def refuse_differences(verified: Verified, file: Path, *, kept: str = "") -> None:
    """Refuse a model other than the trained one. `kept` says why `file` is an earlier certificate, see `why_kept`.

    Raises:
        RunFailedError: names the first differences, and the certificate that lists all of them.
    """
    if kept:
        what = f"{verified.source} has test vectors of other weights than {verified.folder}"
        if not verified.has_other_vectors:
            what = f"{verified.folder} differs from what was trained by more than --max-difference"
        raise RunFailedError(
            f"{what}: {summarize_mismatches(verified.mismatches)}. {kept}. {file} was kept, which says that these "
            "weights are those of the run. --out FILE writes this comparison."
        )
    if verified.mismatches:
        raise RunFailedError(
            f"{verified.folder} is not what was trained: {summarize_mismatches(verified.mismatches)}. {file} lists all "
            "differences."
        )


def summarize_mismatches(mismatches: Sequence[str]) -> str:
    """Join the first differences into one sentence without a full stop."""
    return name_first(mismatches, _MOST_SHOWN, separator="; ")


def _load(
    folder: Path, runtime: ServingRuntime, known: Vectors, vllm: InVllm | None
) -> AbstractContextManager[ServedModel]:
    """Load a model folder in its runtime or in vLLM."""
    if vllm is None:
        return nullcontext(runtime.load(folder))
    if runtime.load is not load_transformers:
        raise ConfigError(
            f"this folder is for {runtime.name}, and vLLM serves runs and the folders that finetune merge wrote. Name "
            "one of those, or leave out --runtime and --server."
        )
    return served_by_vllm(folder, known, vllm)


def _compare(
    load: Callable[[], AbstractContextManager[ServedModel]],
    folder: Path,
    known: Vectors,
    bound: float,
    recorded: Digests,
) -> ServedComparison:
    """Compare bytes, then load and compare answers. If the folder cannot be loaded, the error names changed bytes."""
    checks = check_digests(folder, recorded)
    with ExitStack() as loaded:
        try:
            served = loaded.enter_context(load())
        except RunFailedError as error:
            raise RunFailedError("; ".join([str(error), *_mismatches(checks)[:_MOST_SHOWN]])) from error
        comparison = compare(served, known, bound=bound)
    return replace(comparison, checks={**checks, **comparison.checks})


def _trained(folder: Path) -> Mapping[str, str] | None:
    """Return the digests of the run's weights that a model folder was made from; None if it has no test vectors."""
    try:
        return read_vectors(folder).trained
    except CheckpointError:
        return None


def _mismatches(checks: Mapping[str, Check]) -> list[str]:
    return [line for check in checks.values() for line in check.mismatches]


def _refuse_other_template(run: FinishedRun) -> None:
    """Compare the chat template beside the weights, which the run's own vectors are rendered with, with run.json."""
    recorded = run.fingerprints.get("chat_template")
    digest = hashlib.sha256(str(build_run_tokenizer(run.config).chat_template).encode()).hexdigest()
    if recorded is not None and recorded != digest:
        raise RunFailedError(
            f"{run.weights} is not what was trained: its chat template has SHA-256 {digest[:12]}, and run.json has "
            f"{str(recorded)[:12]} of the training."
        )


def _published_from(run: RecordedRun) -> Digests:
    """Digest the checkpoint that `adapter/` was published from, if that checkpoint is kept and intact."""
    best = whole(run.result.get("best_step"))
    if best is None or best not in run.folder.checkpoint_steps():
        return Digests()
    checkpoint = run.folder.checkpoint(best)
    if verify_checkpoint(checkpoint):
        return Digests()
    files = {name: digest for name, digest in digest_files(checkpoint).items() if name != STATE_FILE}
    return Digests(digest_weight_files(checkpoint), files)
