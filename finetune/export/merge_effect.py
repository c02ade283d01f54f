"""Measure what merging a QLoRA run changes: on the base in 4 bits, on the base in 16 bits, and merged and rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from finetune.distributed.runtime import Runtime
from finetune.engine.adapted import holds_nf4
from finetune.engine.products import widened
from finetune.errors import ConfigError, FinetuneError, first_line
from finetune.export.compress import measure_run, refuse_rows_without_answer
from finetune.export.merge import load_tuned_model, merge_adapter
from finetune.inference.finished_run import FinishedRun, put_adapter_on
from finetune.inference.scores import Evaluation
from finetune.inference.verdict import PairedVerdict
from finetune.model.base import build_base_model
from finetune.model.quantized import load_in_4_bits
from finetune.model.tokens import build_run_tokenizer
from finetune.runs.model_files import LoadedRun
from finetune.units import counted

_MOST_ROWS = 256
IN_4_BITS, IN_16_BITS, MERGED = "on the base in 4 bits", "on the base in its own type", "merged and rounded"


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """The adapter on one of the three bases."""

    name: str
    loss: float
    equal_answers: int
    """Greedy answers that equal those on the base in 4 bits."""
    verdict: PairedVerdict | None
    """Whether its loss differs from the loss on the base in 4 bits. None for that base, and if all rows are equal."""

    def as_record(self) -> dict[str, Any]:
        """Return plain values for a certificate."""
        verdict = None if self.verdict is None else self.verdict.as_record()
        return {"model": self.name, "loss": self.loss, "equal_answers": self.equal_answers, "verdict": verdict}


@dataclass(frozen=True, kw_only=True)
class MergeEffect:
    """What merging a QLoRA run changes, or why it was not measured."""

    models: tuple[MeasuredModel, ...] = ()
    num_rows: int = 0
    num_answers: int = 0
    why_not: str = ""

    def sentences(self) -> Iterator[str]:
        """Yield what was measured, a sentence for each model without a full stop."""
        if self.why_not:
            yield f"what merging changes was not measured: {self.why_not}"
        for model in self.models:
            text = f"{model.name}: loss {model.loss:.4f} on {counted(self.num_rows, 'validation row')}"
            if model.name != IN_4_BITS:
                text += f", {model.equal_answers} of {self.num_answers} answers as {IN_4_BITS}"
            yield text if model.verdict is None else f"{text}; {model.verdict}"


def measure_merge(
    run: FinishedRun, dtype: torch.dtype | None = None, *, load: Callable[[], Any] | None = None
) -> MergeEffect:
    """Measure the three models on the first validation rows that the run was not trained on.

    `dtype` is the type to round merged weights to; None is the type of the base. `load` loads the model to merge.
    """
    if find_spec("bitsandbytes") is None:
        return MergeEffect(why_not="bitsandbytes is not installed: pip install bitsandbytes")
    load = load or (lambda: load_tuned_model(run))
    models: dict[str, Callable[[Runtime], Any]] = {
        IN_4_BITS: lambda runtime: put_adapter_on(_load_in_4_bits(run, runtime.device), run),
        IN_16_BITS: lambda _: load_tuned_model(run),
        MERGED: lambda _: merge_adapter(load(), dtype),
    }
    try:
        refuse_rows_without_answer(run)
        measured = {name: _measure(run, load_model) for name, load_model in models.items()}
    except FinetuneError as error:
        return MergeEffect(why_not=first_line(error).removesuffix("."))
    trained = measured[IN_4_BITS]
    texts = [answer.answers["tuned"] for answer in trained.answers]
    return MergeEffect(
        num_rows=trained.num_rows,
        num_answers=len(texts),
        models=tuple(
            MeasuredModel(
                name=name,
                loss=of.tuned.loss,
                equal_answers=sum(a.answers["tuned"] == text for a, text in zip(of.answers, texts, strict=True)),
                # Named "base", because only another run is refused if there are fewer than two different rows.
                verdict=None if name == IN_4_BITS else of.against(trained, "base").verdicts.get("loss"),
            )
            for name, of in measured.items()
        ),
    )


def load_on_dequantized_base(run: FinishedRun) -> Any:
    """Load the base with its 4-bit weights dequantized to the type on disk, and the adapter on it; on the CPU.

    Raises:
        ConfigError: the run was not trained on a base in 4 bits, or bitsandbytes is not installed.
    """
    if not run.config.is_quantized:
        raise ConfigError(f"--into nf4-dequantized: {run.folder.path} was not trained on 4 bits. Leave the option out.")
    if find_spec("bitsandbytes") is None:
        raise ConfigError("--into nf4-dequantized needs bitsandbytes, which is not installed: pip install bitsandbytes")
    base = build_base_model(run.config.model, dtype="auto")
    layers: dict[str, Any] = dict(_load_in_4_bits(run, torch.device("cpu")).named_modules())
    for name, module in layers.items():
        if holds_nf4(module):
            weight = base.get_parameter(f"{name}.weight")
            weight.data = widened(module.weight, weight.dtype)
    return put_adapter_on(base, run)


def _measure(run: FinishedRun, load: Callable[[Runtime], Any]) -> Evaluation:
    tokenizer = build_run_tokenizer(run.config)
    return measure_run(
        run,
        lambda examples: examples.select(range(min(len(examples), _MOST_ROWS))),
        load=lambda runtime, _: LoadedRun(load(runtime), tokenizer),
    )


def _load_in_4_bits(run: FinishedRun, device: torch.device) -> Any:
    base: Any = load_in_4_bits(run.config.model, device)
    for module in base.modules():
        # On CPUs with AVX512-BF16, bitsandbytes would repack the weights for a product of its own.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return base
