"""Build the model of a plan: on the meta device, as `Trainer` prepares it."""

from __future__ import annotations

from typing import Any

import torch

from finetune.config.schema import Config
from finetune.distributed.device import DTYPES, Precision, convert_weights
from finetune.engine.host_embedding import keep_embedding_on_host
from finetune.engine.quantized import widened_bytes
from finetune.findings import Finding, warning
from finetune.model.base import build_base_model, checkpoint_gradients
from finetune.model.embedding_noise import add_embedding_noise
from finetune.model.lora import attach_adapter
from finetune.model.published import published_sizes, with_sizes_here
from finetune.model.quantized import quantize_without_data, refuse_fp8_without_engine, round_frozen_layers, wants_fp8
from finetune.model.targets import resolve_targets
from finetune.training.forward import choose_forward, wants_padding
from finetune.training.memory.forecast import WHOLE, Weights


class PlannedModel:
    """The model of a run without data, and how its forward pass is computed.

    Attributes:
        model: with its adapter, its weights in the types of the run, in training mode.
        sizes: the section of the model; if the hub does not give the model, with the sizes that are shipped.
        forward: see `choose_forward`.
        is_in_4_bits: whether the base is in 4 bits. It is not if the engine does not compute every layer.
        loading: the most bytes on the device while the base is quantized, weight by weight: all weights as they are
            kept, and the largest one in 16 bits too. None if it is not in 4 bits.
        keeps_embedding_on_host: see `keep_embedding_on_host`.
        findings: what differs from the run, or from what was asked for.
    """

    def __init__(self, config: Config, precision: Precision, device_type: str) -> None:
        self._config = config
        self._precision = precision
        self.findings: list[Finding] = []
        self.sizes, reason = with_sizes_here(config.model)
        if reason is not None:
            fix = "to plan with the model's own files, give model.path=FOLDER, or plan where the hub can be reached"
            self.findings.append(warning("Model", reason, fix))
        self.is_in_4_bits = self._is_in_fp8 = self.keeps_embedding_on_host = False
        self.loading: int | None = None
        self.model = self.build()
        published = published_sizes(self.sizes)
        for difference in () if published is None else published.differences(self.model.config):
            message = f"{self.sizes.path}: {difference}; this plan takes the former"
            self.findings.append(warning("Model", message, "without the hub a plan would differ: update finetune"))
        pads = wants_padding(config.training, device_type, DTYPES[precision])
        self.forward = choose_forward(config.training, self.model, pads=pads)
        is_computed = self.forward.why_not_engine is None and not self.forward.called_layers
        if config.training.kernels != "reference" and not is_computed:
            message = "the engine does not compute all of this model, so steps take longer: `forward` says why"
            fix = "none needed; a run with strict=true refuses it, unless training.kernels=reference asks for it"
            self.findings.append(warning("Engine", message, fix))
        if config.is_quantized:
            self.is_in_4_bits = is_computed
            if not is_computed:
                message = "4 bits are predicted only where the engine computes every layer: this plan counts 16 bits"
                fix = "the run takes less than the plan says: see `forward`"
                self.findings.append(warning("Memory", message, fix))
        if wants_fp8(config):
            refuse_fp8_without_engine(config, self.forward.why_not_engine)
            self._is_in_fp8 = True
        if self.is_in_4_bits or self._is_in_fp8:
            self.model = self.build()

    def build(self, *, checkpointed: bool = False, is_in_4_bits: bool | None = None) -> Any:
        """Build the model again, with or without gradient checkpointing; by default in 4 bits if the run's base is."""
        config = self._config
        with torch.device("meta"):
            model: Any = build_base_model(self.sizes.model_copy(update={"init": "random"}))
            if config.training.method == "lora":
                targets = resolve_targets(model, config.lora.target_modules, config.lora.layers)
                # The tokenizer knows the ids, but sizes do not depend on them. The run may add rows for them.
                num_rows = model.get_input_embeddings().weight.shape[0]
                ids = range(num_rows - len(config.lora.new_tokens), num_rows)
                model = attach_adapter(model, config.lora, targets, ids)
            if self.is_in_4_bits if is_in_4_bits is None else is_in_4_bits:
                if self.sizes is not config.model:  # shipped sizes name no type; the published files have 16 bits
                    model.to(torch.bfloat16)
                quantize_without_data(model)
                self.loading = Weights(model).held(WHOLE) + max(map(widened_bytes, model.parameters()))
        convert_weights(model, self._precision)
        if self._is_in_fp8:
            round_frozen_layers(model, config.model.fp8_layers)
        if config.training.neftune_alpha:
            add_embedding_noise(model, config.training.neftune_alpha)
        if checkpointed:
            checkpoint_gradients(model)
        if self.keeps_embedding_on_host:
            keep_embedding_on_host(model)
        return model.train()
