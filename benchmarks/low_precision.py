"""Train the same adapter on a base in fp32, bf16, fp8 and NF4, on a CPU, and print the losses as a table.

    python -m benchmarks.low_precision MODEL TRAIN.jsonl VALIDATION.jsonl [PRECISION ...]

100 steps of 4 rows of at most 160 tokens, with rank 16. Every run takes the same rows in the same order. NF4 needs
the extra qlora. Results of fp8 and NF4 on a CPU are those of a GPU but for rounding; the speed says nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SHOWN = (1, 10, 30, 100)
PRECISIONS = {
    "fp32": ["training.precision=fp32"],
    "bf16": ["training.precision=bf16"],
    "fp8": ["training.precision=bf16", "model.frozen_precision=fp8"],
    "fp8, upper half": ["training.precision=bf16", "model.frozen_precision=fp8", "model.fp8_layers=upper_half"],
    "nf4": ["training.precision=bf16", "lora.quantize=nf4"],
}
_SETTINGS = [
    *(
        "training.device=cpu",
        "training.global_batch_size=4",
        "training.batch_size=4",
        f"training.max_steps={SHOWN[-1]}",
    ),
    *("data.max_length=160", "data.on_long_row=drop", "lora.r=16", f"validation.validate_every={SHOWN[-1]}"),
    *("testing.num_samples=0", "checkpoint.save_every_epochs=null"),
]


def train(overrides: list[str]) -> float:
    """Train as the recipes do, and return the adapter's validation loss on the base in fp32.

    The recipe for NF4 would ask for a GPU.
    """
    import torch

    from finetune import (
        Trainer,
        add_lora,
        build_base_model,
        build_tokenizer,
        encode_examples,
        launch,
        load_config,
        load_examples,
    )
    from finetune.engine.layout import pack
    from finetune.engine.loss import summed_cross_entropy
    from finetune.model.quantized import load_in_4_bits
    from finetune.model.saved_adapter import load_adapter

    config = load_config(overrides, task="finetune_lora")
    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
        if config.lora.quantize == "none":
            base = build_base_model(config.model)
        else:
            base = load_in_4_bits(config.model, runtime.device)
            for module in base.modules():  # a validation would pack the weights for a product without a gradient
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    module.support_avx512bf16_for_cpu = False
        trainer = Trainer(runtime, config, add_lora(base, config.lora), tokenizer, splits)
        train_loader, val_loader, _ = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
    rows: Any = splits.validation
    microbatch = pack([rows[index] for index in range(len(rows))])
    model = load_adapter(build_base_model(config.model).float(), Path(config.output_dir) / "adapter").eval()
    with torch.no_grad():
        return summed_cross_entropy(model, microbatch).item() / microbatch.num_targets


def row_of_table(precision: str, run: Path, on_base: float) -> str:
    """Return what was measured before step 1, the losses of the steps shown, and the validation losses."""
    events: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    validation = next(event["loss"] for event in reversed(events) if event["event"] == "validation")
    measured = json.loads((run / "run.json").read_text())["low_precision"]
    cells = ["", ""]
    if measured is not None:
        cells = [f"{measured['loss'] - measured['base_loss']:+.2f}", f"{measured['gradient_error']:.0%}"]
    cells += [f"{loss:.3f}" for loss in (*(losses[step] for step in SHOWN), validation, on_base)]
    return f"| {precision} | {' | '.join(cells)} |"


def main(model: str, train_rows: str, validation_rows: str, *precisions: str) -> None:
    """Train once for each precision and print the table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    steps = " | ".join(f"step {step}" for step in SHOWN)
    sys.stdout.write(f"| base | loss | gradient | {steps} | validation | on the base in fp32 |\n")
    sys.stdout.write("| --- " * (len(SHOWN) + 5) + "|\n")
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"model.path={model}", f"data.train={train_rows}", f"data.validation={validation_rows}"]
        paths.append(f"data.cache_dir={folder}/cache")
        for precision in precisions or PRECISIONS:
            run = Path(folder) / precision.replace(", ", "-").replace(" ", "-")
            on_base = train([*_SETTINGS, *paths, *PRECISIONS[precision], f"output_dir={run}"])
            sys.stdout.write(row_of_table(precision, run, on_base) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
