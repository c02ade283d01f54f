"""Compute small micro-batches in passes that CUDA graphs replay.

A GPU takes less time for a small micro-batch than its host takes to launch the kernels. A CUDA graph launches all of
them at once. It computes one shape and reads tensors that keep their places, so each micro-batch is copied into them
and padded: its tokens as `padding_of` says, and its terms, keys and runs to a few numbers each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from finetune.engine.attention import dense_attention, prepared_by_the_host
from finetune.engine.attention_cuda import VarlenRuns, prepare_varlen, varlen_attention
from finetune.engine.decoder import Decoder, bare_model, layer_windows
from finetune.engine.layout import TOKENS_WITHOUT_PADDING, Layout, PackedMicrobatch, Segment, dense_mask, padding_of
from finetune.engine.loss import Choices
from finetune.engine.products import unchanged_weights
from finetune.engine.replayed import capture
from finetune.units import ceil_bucket

FEWEST_RUNS = 16
"""A graph has room for at least this number of runs of queries."""
FEWEST_TERMS = 4
"""A graph has room for at least one term of the loss for each group of this many tokens."""


class Sizes(NamedTuple):
    """The shape of a micro-batch as a graph computes it. Micro-batches of one shape share a graph."""

    tokens: int
    terms: int
    keys: int
    """Gathered keys, see `VarlenRuns`."""
    runs: int


def sizes_of(microbatch: Any, window: int | None) -> Sizes | None:
    """Return the shape in which a graph computes a micro-batch; None if no graph does.

    The shape follows from the rows alone, so a resumed run computes each micro-batch as the uninterrupted run does.

    Args:
        microbatch: packed or not, on the CPU.
        window: of the first layer. The collation has prepared attention for it.
    """
    if not isinstance(microbatch, PackedMicrobatch) or microbatch.num_computed >= TOKENS_WITHOUT_PADDING:
        return None
    tokens, runs = len(microbatch.input_ids), _runs_of(microbatch, window)
    num_keys = tokens if runs.key_index is None else len(runs.key_index)
    sizes = Sizes(
        tokens=tokens,
        terms=ceil_bucket(max(len(microbatch.labels), tokens // FEWEST_TERMS, 1)),
        keys=ceil_bucket(num_keys),
        runs=max(FEWEST_RUNS, 1 << (len(runs.query_edges) - 2).bit_length()),
    )
    # Further keys go to the last run, which therefore has to be one of padding.
    is_padded = padding_of(tokens) == 0 and (microbatch.num_padding > 0 or sizes.keys == num_keys)
    return sizes if is_padded else None


def _runs_of(microbatch: PackedMicrobatch, window: int | None) -> VarlenRuns:
    """Return the runs of queries at all tokens; the runs of other windows differ in the window alone."""
    return microbatch.layout.prepared(prepare_varlen, None, window)


class Place:
    """The tensors that a graph reads, for micro-batches of one shape. They keep their places.

    Attributes:
        rows: the micro-batch. Attention reads `query_edges`, `key_edges` and `key_index` instead of its layout.
        divisor: the number that the loss is divided by, float64, a scalar.
        was_computed: whether a micro-batch of this shape has been computed, so that all kernels are compiled.
        graph: the captured pass, if there is one.
        loss: where the graph writes the loss.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        lengths = [sizes.tokens] * 3 + [sizes.terms] * 3 + [sizes.runs + 1] * 2 + [sizes.keys]
        self._numbers = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        ids, positions, visible, terms, labels, counts, *edges, self.key_index = torch.split(self._numbers, lengths)
        self.query_edges, self.key_edges = edges
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
        self.was_computed = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss: torch.Tensor | None = None

    def fill(self, rows: PackedMicrobatch, runs: VarlenRuns, divisor: float) -> None:
        """Copy a micro-batch here, without waiting for the device. Padding has counts of zero and empty runs."""
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

    def runs(self, window: int | None) -> VarlenRuns:
        """Return the runs of all queries. The longest has the length of the micro-batch, because none is longer."""
        return VarlenRuns(
            query_edges=self.query_edges.to(torch.int32),
            key_edges=self.key_edges.to(torch.int32),
            key_index=self.key_index,
            most_queries=self.sizes.tokens,
            most_keys=self.sizes.keys,
            window=None if window is None or window >= self.sizes.tokens else window,
            slots=None,
            num_slots=self.sizes.tokens,
        )


@dataclass(kw_only=True, eq=False)
class CapturedMicrobatches:
    """Forward and backward passes of small micro-batches, which CUDA graphs replay.

    The first micro-batch of a shape is computed kernel by kernel. The second one is captured, and from then on the
    graph is replayed. Both ways launch the same kernels on the same numbers. All graphs share one pool of memory,
    because they are replayed one after the other. Gradients are added to tensors that this object keeps; they are the
    `grad` of the weights during a step. Without CUDA there are no graphs, and each pass is computed.

    Args:
        model: placed, with LoRA, and computed whole by the engine.
        loss_of: returns the function of the loss, which must not read a tensor on the host.
        parameters: the trained weights.
        device: of the model.
        autocast: returns the context of the run's precision.
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
        self._decoder, self._window = Decoder(bare, dense_attention_of), layer_windows(bare)[0]
        with self.autocast():
            kind, embedding = self.device.type, bare.get_input_embeddings().weight
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else embedding.dtype
        self._like = torch.empty(0, dtype=dtype, device=self.device)
        self._is_varlen = prepared_by_the_host(self.device, dtype) is prepare_varlen
        self._gradients = [torch.zeros_like(weight) for weight in self.parameters]
        self._captures = self.device.type == "cuda"
        self._pool: Any = None
        self.places: dict[Sizes, Place] = {}

    def __call__(
        self,
        divisor: float,
        otherwise: Callable[[Any, bool], torch.Tensor],
        microbatch: Any,
        is_last: bool,
    ) -> torch.Tensor:
        """Add the gradients of a micro-batch's loss, divided by `divisor`, and return the loss.

        `otherwise` does the same for a micro-batch that no graph computes.
        """
        sizes = sizes_of(microbatch, self._window)
        if sizes is None:
            return otherwise(microbatch, is_last)
        if sizes not in self.places:
            self.places[sizes] = Place(sizes, self.device)
        place = self.places[sizes]
        place.fill(microbatch, _runs_of(microbatch, self._window), divisor)
        self._turn(place)
        self._collect_gradients()
        if self._captures and place.was_computed and place.graph is None:
            self._capture(place)
        if place.graph is not None and place.loss is not None:
            place.graph.replay()
            return place.loss
        place.was_computed = True
        try:
            return self.compute(place)
        except torch.OutOfMemoryError:
            if self._pool is None:
                raise
        self._give_up("memory ran out")
        torch.manual_seed(torch.initial_seed())  # the masks of dropout are drawn again
        return self.compute(place)

    def compute(self, place: Place) -> torch.Tensor:
        """Add the gradients of the micro-batch in a place, and return its loss. The host reads no tensor here."""

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Any, *, window: int | None, **options: Any
        ) -> torch.Tensor:
            if not self._is_varlen:
                return dense_attention_of(q, k, v, layout, window=window, **options)
            return varlen_attention(q, k, v, runs[window], options["scale"])

        runs = {window: place.runs(window) for window in dict.fromkeys(layer_windows(self.model))}
        with unchanged_weights():  # a graph casts the weights each time, because they change from step to step
            with self.autocast():
                loss = self.loss_of(Choices(attention=attend))(self.model, place.rows)
            computed = torch.autograd.grad(loss / place.divisor, self.parameters, allow_unused=True)
        pairs = [(total, new) for total, new in zip(self._gradients, computed, strict=True) if new is not None]
        torch._foreach_add_([total for total, _ in pairs], [new for _, new in pairs])
        return loss.detach()

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
        """Make the kept tensors the gradients of the weights, with the values that these have."""
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


def dense_attention_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Any, *, window: int | None, scale: float, **_: Any
) -> torch.Tensor:
    """Attend from all tokens with a mask that is made of the layout's tensors each time."""
    return dense_attention(q, k, v, dense_mask(layout, layout.tokens, window), scale)
