"""A process that loads and places a model for each line of words, and answers with what it holds.

`unload` lets go of the model, `sums` asks for the sums of its weights.
"""

from __future__ import annotations

import gc
import json
import sys

from finetune.config.compose import load_config
from finetune.distributed.launch import launch
from finetune.model.base import build_base_model
from finetune.model.lora import add_lora


def load(words):
    config = load_config(words, task="finetune_lora")
    with launch(config) as runtime:
        model = build_base_model(config.model)
        if config.training.method == "lora":
            model = add_lora(model, config.lora)
        runtime.placement.place(model)
    return model


model = None
for line in sys.stdin:
    match line.split():
        case ["unload"]:
            model = None
            said = gc.collect()  # a model refers to itself
        case ["sums"]:
            said = [float(parameter.double().sum()) for parameter in model.parameters()]
        case words:
            model = load(words)
            sizes = [parameter.nbytes for parameter in model.parameters()]
            said = {"types": sorted({str(parameter.dtype) for parameter in model.parameters()}), "sizes": sizes}
    print("ANSWER", json.dumps(said), flush=True)
