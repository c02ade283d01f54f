"""Compute small micro-batches in passes that CUDA graphs replay.

A GPU computes a small micro-batch faster than its host launches the kernels. A CUDA graph launches them all at once. It
computes one shape and reads tensors that keep their places, so each micro-batch is padded and copied into them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from finetune.engine.attention import attention, dense_attention, prepared_by_the_host
from finetune.engine.attention_cuda import VarlenRuns, prepare_varlen, varlen_attention
from finetune.engine.decoder import Decoder, bare_model, layer_windows
from finetune.engine.layout import TOKENS_WITHOUT_PADDING, Layout, PackedMicrobatch, Segment, dense_mask, padding_of
from finetune.engine.loss import Choices
from finetune.engine.products import unchanged_weights
from finetune.engine.replayed import capture
from finetune.units import ceil_bucket


class Sizes(NamedTuple):
    """The shape in which a graph computes a micro-batch; for keys and runs see `VarlenRuns`."""

    tokens: int
    terms: int
    keys: int
    runs: int


def sizes_of(microbatch: Any, window: int | None) -> Sizes | None:
    """Return the shape in which a graph computes a micro-batch on the CPU; None if no graph does.

    It follows from the rows alone, so that a resumed run computes the same. Attention is prepared for this window.
    """
    if not isinstance(microbatch, PackedMicrobatch) or microbatch.num_computed >= TOKENS_WITHOUT_PADDING:
        return None
    tokens, runs = len(microbatch.input_ids), microbatch.layout.prepared(prepare_varlen, None, window)
    num_keys = tokens if runs.key_index is None else len(runs.key_index)
    keys, num_runs = ceil_bucket(num_keys), len(runs.query_edges) - 1
    # The keys of padding go to the last run, so it has to be one of padding.
    if padding_of(tokens) or (keys > num_keys and not microbatch.num_padding):
        return None
    # There is room for a quarter of the tokens as terms and for 16 runs at least, so that few graphs are needed.
    terms = ceil_bucket(max(len(microbatch.labels), tokens // 4, 1))
    return Sizes(tokens, terms, keys, max(16, 1 << (num_runs - 1).bit_length()))


class Place:
    """The tensors that a graph reads, for micro-batches of one shape. They keep their places.

    Attributes:
        rows: the micro-batch. Attention reads the edges and the index of `VarlenRuns` instead of its layout.
        divisor: the number that the loss is divided by, float64, a scalar.
        graph: the captured pass, and `loss` what it writes, if there is one.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        lengths = [sizes.tokens] * 3 + [sizes.terms] * 3 + [sizes.runs + 1] * 2 + [sizes.keys]
        self._numbers = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        ids, positions, visible, terms, labels, counts, *self.edges, self.key_index = torch.split(
            self._numbers, lengths
        )
        self.rows = PackedMicrobatch(
            input_ids=ids,
            layout=Layout(position_ids=positions, visible_until=visible, segments=(Segment(0, sizes.tokens, -1, 0),)),
            positions=torch.arange(sizes.tokens, device=device),
            term_position=terms,
            labels=labels,
            counts=counts,
            target_term=self._numbers[:0],
            target_row=self._numbers[:0],
            num_rows=1,
            num_tokens=sizes.tokens,
        )
        self.divisor = torch.ones((), dtype=torch.float64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss: torch.Tensor | None = None

    def fill(self, rows: PackedMicrobatch, runs: VarlenRuns, divisor: float) -> None:
        """Copy a micro-batch here, without waiting for the device. Padding has empty runs and counts of zero."""
        sizes, num_runs = self.sizes, len(runs.query_edges) - 1
        terms = rows.positions if rows.term_position is None else rows.positions[rows.term_position]
        keys = torch.arange(sizes.tokens) if runs.key_index is None else runs.key_index
        numbers = torch.cat(
            [
                *(rows.input_ids, rows.layout.position_ids, rows.layout.visible_until),
                *(pad(each, (0, sizes.terms - len(each))) for each in (terms, rows.labels, rows.counts)),
                pad(runs.query_edges, (0, sizes.runs - num_runs), value=sizes.tokens),
                pad(runs.key_edges[:-1], (0, sizes.runs + 1 - num_runs), value=sizes.keys),
                pad(keys, (0, sizes.keys - len(keys)), value=sizes.tokens - 1),
            ]
        )
        numbers = numbers if self._numbers.device.type == "cpu" else numbers.pin_memory()
        self._numbers.copy_(numbers, non_blocking=True)
        self.divisor.fill_(divisor)


@dataclass(eq=False)
class CapturedMicrobatches:
    """Forward and backward passes of small micro-batches, which CUDA graphs replay.

    The first micro-batch of a shape is computed kernel by kernel. The second one is captured, and from then on the
    graph is replayed. Both ways launch the same kernels on the same numbers. All graphs share one pool of memory,
    because they are replayed one after the other. Without CUDA, each pass is computed.

    Args:
        model: with LoRA, on its device, computed whole by the engine.
        loss_of: returns the function of the loss, which must not read a tensor on the host.
        parameters: the trained weights.
        device: of the model.
        autocast: makes the context of the run's precision.
        when_given_up: called with the reason when no more graphs are captured.
    """

    model: torch.nn.Module
    loss_of: Callable[[Choices], Callable[[torch.nn.Module, Any], torch.Tensor]]
    parameters: list[torch.nn.Parameter]
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    when_given_up: Callable[[str], None]

    def __post_init__(self) -> None:
        bare = bare_model(self.model)
        self._decoder, self._window = Decoder(bare, attention), layer_windows(bare)[0]
        self._like, kind = bare.get_input_embeddings().weight[:0], self.device.type
        with self.autocast():
            if torch.is_autocast_enabled(kind):
                self._like = self._like.to(torch.get_autocast_dtype(kind))
        self._is_varlen = prepared_by_the_host(self.device, self._like.dtype) is prepare_varlen
        self._gradients = [torch.zeros_like(weight) for weight in self.parameters]
        self._captures = self.device.type == "cuda"
        self._pool: Any = None
        self.places: dict[Sizes, Place] = {}

    def __call__(self, microbatch: Any, divisor: float) -> torch.Tensor | None:
        """Add the gradients of a micro-batch's loss, divided by `divisor`, and return the loss, (1,).

        Return None, and do nothing, for a micro-batch that no graph computes.
        """
        sizes = sizes_of(microbatch, self._window)
        if sizes is None:
            return None
        is_new = sizes not in self.places  # its kernels are not compiled
        place = self.places[sizes] = Place(sizes, self.device) if is_new else self.places[sizes]
        place.fill(microbatch, microbatch.layout.prepared(prepare_varlen, None, self._window), divisor)
        self._turn(place)
        self._collect_gradients()
        if self._captures and not is_new and place.graph is None:
            self._capture(place)
        if place.graph is not None and place.loss is not None:
            place.graph.replay()
            return place.loss
        try:
            return self.compute(place)
        except torch.OutOfMemoryError:
            if self._pool is None:
                raise
        self._give_up("memory ran out")
        return self.compute(place)

    def compute(self, place: Place) -> torch.Tensor:
        """Add the gradients of the micro-batch in a place, and return its loss. The host reads no tensor here."""
        query_edges, key_edges = (each.to(torch.int32) for each in place.edges)
        tokens, _, keys, _ = place.sizes  # no run is longer
        runs = VarlenRuns(query_edges, key_edges, place.key_index, tokens, keys, None, None, tokens)

        def attend(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layout: Any,
            *,
            window: int | None,
            scale: float,
            **_: Any,
        ) -> torch.Tensor:
            if self._is_varlen:
                return varlen_attention(q, k, v, runs._replace(window=window), scale)
            return dense_attention(q, k, v, dense_mask(layout, layout.tokens, window), scale)

        with unchanged_weights():  # a graph casts the weights each time, because they change from step to step
            with self.autocast():
                loss = self.loss_of(Choices(attention=attend))(self.model, place.rows)
            computed = torch.autograd.grad(loss / place.divisor, self.parameters, allow_unused=True)
        pairs = [(total, new) for total, new in zip(self._gradients, computed, strict=True) if new is not None]
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
        return loss.detach().reshape(1)

    def free(self) -> None:
        """Free all graphs and their memory. They are captured again when they are needed."""
        self._pool = None
        for place in self.places.values():
            place.graph = place.loss = None
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # some may lie in the memory of the graphs
            torch.cuda.empty_cache()

    def _give_up(self, reason: str) -> None:
        self.free()
        self._captures = False
        self.when_given_up(reason)
        torch.manual_seed(torch.initial_seed())  # the masks of dropout are drawn again

    def _turn(self, place: Place) -> None:
        """Compute the rotation outside of the graph: for LongRoPE, transformers reads the largest position."""
        angles = self._decoder.angles(place.rows.layout.position_ids, self._like)
        if place.rows.angles is None:
            place.rows = replace(place.rows, angles=angles)
            return
        for name, parts in angles.items():
            for kept, new in zip(place.rows.angles[name], parts, strict=True):
                kept.copy_(new)

    def _collect_gradients(self) -> None:
        """Make the tensors that graphs add to the gradients of the weights, with the values that those have."""
        empty = []
        for weight, total in zip(self.parameters, self._gradients, strict=True):
            if weight.grad is None:
                empty.append(total)
            elif weight.grad is not total:
                total.copy_(weight.grad)
            weight.grad = total
        if empty:
            torch._foreach_zero_(empty)

    def _capture(self, place: Place) -> None:
        """Capture the pass of a place. If this fails, for example because memory runs out, give up."""

        def compute() -> None:
            place.loss = self.compute(place)

        try:
            place.graph = capture(compute, self._pool)
            self._pool = place.graph.pool()
            return
        except RuntimeError as error:  # also of memory
            reason = f"capturing failed: {str(error).partition(chr(10))[0]}"
        self._give_up(reason)
