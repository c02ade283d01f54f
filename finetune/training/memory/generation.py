"""Predict the memory of generating answers, by generating two of their tokens on tensors without data (`tracing`).

The functions that generate a run's answers are called, the engine's or transformers' `generate`. So nothing here says
which tensors they make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import masking_utils

from finetune.engine.attention import prepare_blocks
from finetune.engine.decoder import bare_model, layer_windows
from finetune.engine.kv_cache import CachedDecoder, bytes_of_copies
from finetune.engine.products import unchanged_weights
from finetune.engine.quantized import widened_bytes
from finetune.engine.replayed import SteppedDecoder
from finetune.engine.supported import unsupported_reason
from finetune.inference.decoding import Decoding, sample_answers
from finetune.inference.replayed_answers import most_likely
from finetune.inference.sampling import Draw, Sampling
from finetune.model.base import evaluation_mode
from finetune.training.memory.forecast import OptimizerNeed, Shards, Weights, trace_deep
from finetune.training.memory.tracing import Allocations, Phases, fake_weights, one_rotation

_PROMPTS, _FIRST_LOGITS, _BEFORE_LAST, _LAST, _LAST_LOGITS = "prompts", "first logits", "before", "last", "last logits"
"""The pass over the prompts and the sampling of their first tokens; what is in memory before the pass over the last
tokens; this pass, and the sampling after it."""
_STOP_ID, _FILLER_TOKEN = 0, 1


class AnswerBatch(NamedTuple):
    """Answers that a process generates at once."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt, the longest last."""
    room: int
    """The most tokens of the answer to the longest prompt."""
    sampling: Sampling | None = None
    """None: the most likely token each time."""

    @property
    def tokens(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return len(self.prompts[-1]) + self.room


@dataclass(frozen=True, kw_only=True)
class Generating:
    """The memory of a process while it generates answers. Sizes are in bytes.

    Attributes:
        answers: how many are generated at once.
        tokens: of the longest prompt with its answer.
        held: weights, adapter and the state of the optimizer.
        merged: copies of a small model's weights with its adapter, which the engine makes to be fast.
        cache: keys and values of all tokens.
        logits: with the copies that sampling makes.
        prompts: what the forward pass over the prompts takes beside `cache`, before there are logits.
        step: what the forward pass over the last token takes beside `cache`.
    """

    answers: int
    tokens: int
    held: int
    merged: int
    cache: int
    logits: int
    prompts: int
    step: int

    @property
    def total(self) -> int:
        """All bytes in use."""
        return self.held + self.merged + self.cache + max(self.logits, self.prompts, self.step)


class GenerationForecast(NamedTuple):
    """What generating a batch allocates, from which its memory follows for any optimizer and number of shards."""

    batch: AnswerBatch
    peaks: Phases
    """Without the weights."""
    weights: Weights
    merged: int
    widened: int
    """Bytes of the largest weight in 4 bits in 16 bits: it is dequantized for its product."""
    replays: bool = False
    """Whether a graph keeps memory for its own step. The steps before its capture need memory of their own."""

    def with_held(self, optimizer: OptimizerNeed, shards: Shards) -> Generating:
        """Return the memory of a process that also holds the weights and the state of the optimizer."""
        weights, total = self.weights, {part: sum(sizes.values()) for part, sizes in self.peaks.items()}
        cache = total[_BEFORE_LAST] - self.peaks[_BEFORE_LAST].get("logits", 0)
        state = optimizer.state // weights.trained_shards(shards)
        # What a phase needs is its peak less the cache, which all phases hold.
        logits = max(0, total[_FIRST_LOGITS] - cache, total.get(_LAST_LOGITS, 0) - cache)
        step = max(0, total[_LAST] + self.widened - cache) if _LAST in total else 0
        return Generating(
            answers=len(self.batch.prompts),
            tokens=self.batch.tokens,
            held=weights.held(shards) + weights.adapter + weights.gathered(shards) + state,
            merged=self.merged,
            cache=cache,
            logits=logits,
            prompts=max(0, total[_PROMPTS] + self.widened - cache),
            step=2 * max(step, logits) if self.replays else step,
        )


def engine_generates(model: Any, device_type: str, shards: Shards, *, replays: bool) -> bool:
    """Return whether the engine generates the answers of a run, see `sample_answers`."""
    return (device_type == "cpu" or replays) and shards.size == 1 and unsupported_reason(model) is None


def forecast_generation(
    model: Any,
    batch: AnswerBatch,
    dtype: torch.dtype,
    *,
    by_engine: bool,
    replays: bool = False,
    quantized: Any | None = None,
) -> GenerationForecast:
    """Generate answers without data.

    Args:
        model: on the meta device, its weights in the types of the run. Most of its layers are taken out and put back.
        batch: the largest of the run.
        dtype: the type in which the run computes.
        by_engine: see `engine_generates`.
        replays: whether the engine does so in steps that graphs replay.
        quantized: the same model with weights in 4 bits, if the run has it: its forward would need data.

    Raises:
        RuntimeError: the model cannot generate without data; or one of `CANNOT_TRACE`.
    """
    stored_model = model if quantized is None else quantized
    with evaluation_mode(model):
        merged = bytes_of_copies(model, len(batch.prompts), on_cpu=not replays) if by_engine else 0
        if by_engine:
            peaks = trace_deep(model, lambda: _trace_engine(model, batch, replays=replays))
        else:
            peaks = trace_deep(model, lambda: _trace_transformers(model, batch, dtype))
    widened = max(widened_bytes(weight) for weight in stored_model.parameters())
    return GenerationForecast(batch, peaks, Weights(stored_model), merged, widened, replays and by_engine)


def _trace_engine(model: Any, batch: AnswerBatch, *, replays: bool) -> Phases:
    """Trace a pass over the prompts, and one over the last tokens, for which the cache has memory from the start."""
    draw = None if batch.sampling is None else Draw(batch.sampling, range(len(batch.prompts)))
    with _without_data(model, read=lambda _: batch.tokens - 1) as allocations, unchanged_weights():
        with unset_fake_temporarily():  # attention is prepared on real data
            choose = most_likely if draw is None else draw.choose
            kind = partial(SteppedDecoder, choose=choose) if replays else CachedDecoder
            decoder = kind(model, batch.prompts, most_tokens=batch.tokens)
            *windows, last = layer_windows(model)
            layout, ends = decoder._prompts.layout, decoder._prompts.ends
            for window in dict.fromkeys(windows):
                layout.prepared(prepare_blocks, None, window)
            layout.prepared(prepare_blocks, ends, last)
        decoder.copy_nothing()  # it is decided by all layers, see `GenerationForecast.merged`

        def choose_next(logits: torch.Tensor) -> torch.Tensor:
            return (logits if draw is None else draw(None, logits)).argmax(-1)

        next_tokens: Callable[..., Any] = choose_next
        go_on: Callable[..., torch.Tensor] = decoder.go_on
        if isinstance(decoder, SteppedDecoder):
            next_tokens, go_on = decoder.choose, lambda _: decoder.append(batch.tokens)
        with allocations:
            allocations.enter(_PROMPTS)
            logits = decoder.start()
            allocations.enter(_FIRST_LOGITS)
            tokens = next_tokens(logits)
            if replays:
                del logits  # a step keeps none for the next one
            allocations.enter(_BEFORE_LAST)
            allocations.enter(_LAST)
            logits = go_on(tokens)
            allocations.enter(_LAST_LOGITS)
            next_tokens(logits)
    return {part: allocations.peak(part) for part in allocations.phases}


def _trace_transformers(model: Any, batch: AnswerBatch, dtype: torch.dtype) -> Phases:
    """Trace the first token after the prompts, and the last one: the second after rows that lack only two tokens."""
    peaks = _trace_tokens(model, batch, dtype, [_PROMPTS, _FIRST_LOGITS])
    if batch.room > 1:
        filler = [_FILLER_TOKEN] * (batch.room - 2)
        longer = batch._replace(prompts=[[*prompt, *filler] for prompt in batch.prompts])
        peaks_of_last = _trace_tokens(model, longer, dtype, ["rows", "their logits", _LAST, _LAST_LOGITS])
        peaks |= {part: peaks_of_last[part] for part in (_BEFORE_LAST, _LAST, _LAST_LOGITS)}
    return peaks


def _trace_tokens(model: Any, batch: AnswerBatch, dtype: torch.dtype, phases: Sequence[str]) -> Phases:
    """Generate with transformers.

    `phases` has two names for each token: of its forward pass up to the head, and from the head up to the next token.
    """
    is_padded = len({len(prompt) for prompt in batch.prompts}) > 1
    decoding = Decoding(
        stop_ids=[_STOP_ID], max_new_tokens=len(phases) // 2, sampling=batch.sampling, by_transformers=True
    )
    num_passes, is_in_pass = 0, False

    def read(_: torch.Tensor) -> bool:
        """Answer whether no row is padded, which a forward pass asks, or whether all answers are complete."""
        return not is_padded if is_in_pass else num_passes >= decoding.max_new_tokens

    def begin_pass(*_: Any) -> None:
        nonlocal num_passes, is_in_pass
        num_passes, is_in_pass = num_passes + 1, True
        allocations.enter(_BEFORE_LAST)
        allocations.enter(phases[2 * num_passes - 2])

    def begin_head(*_: Any) -> None:
        allocations.enter(phases[2 * num_passes - 1])

    def end_pass(*_: Any) -> None:
        nonlocal is_in_pass
        is_in_pass = False

    with _without_data(model, read) as allocations:
        bare = bare_model(model)
        hooks = [
            bare.register_forward_pre_hook(begin_pass),
            bare.get_output_embeddings().register_forward_pre_hook(begin_head),
            bare.register_forward_hook(end_pass),
        ]
        autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
        try:
            with allocations, autocast:
                sample_answers(model, batch.prompts, decoding, batch_size=len(batch.prompts))
        finally:
            for hook in hooks:
                hook.remove()
    return {part: allocations.peak(part) for part in allocations.phases}


@contextmanager
def _without_data(model: Any, read: Callable[[torch.Tensor], int]) -> Iterator[Allocations]:
    """Give the model weights without data within the block. `read` answers code that reads a number from a tensor."""
    transformers_masks: Any = masking_utils
    is_tracing = transformers_masks.is_tracing
    with FakeTensorMode(allow_non_fake_inputs=True), one_rotation(model), fake_weights(model) as weights:
        vocabulary = bare_model(model).get_output_embeddings().weight.shape[0]
        allocations = Allocations(vocabulary, read=read)
        allocations.ignore(*weights, *model.buffers())
        # Otherwise transformers makes a mask for fake tensors that it does not make for real ones.
        transformers_masks.is_tracing = lambda *_: False
        try:
            yield allocations
        finally:
            transformers_masks.is_tracing = is_tracing
