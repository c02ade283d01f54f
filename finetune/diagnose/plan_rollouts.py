"""Plan the answers that a run generates, above all those that it learns from (`training.objective=grpo`).

Every answer is assumed to have as many tokens as it may have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from finetune.config.keys import values
from finetune.data.batches import packer, pad
from finetune.data.encoded import EncodedExample
from finetune.diagnose.plan_devices import Device
from finetune.diagnose.plan_time import REPETITIONS, at_full_depth
from finetune.engine.decoder import bare_model, bytes_of_merged
from finetune.engine.four_bits import widened_bytes
from finetune.engine.kv_cache import CachedDecoder
from finetune.engine.prefixes import Tokens
from finetune.engine.products import unchanged_weights
from finetune.engine.supported import unsupported_reason
from finetune.inference.decoding import Draw, Sampling, group_prompts, room_for_answer
from finetune.model.base import evaluation_mode, max_context
from finetune.training.memory.forecast import OptimizerNeed, Shards, StepForecast, Weights
from finetune.training.memory.tracing import FORWARD
from finetune.units import ceil_div

if TYPE_CHECKING:
    from finetune.config.schema import Config

_FILLER_TOKEN = 1


class AssumedAnswers:
    """The rows of a rollout before it is generated: each prompt with answers that begin differently.

    Like encoded rows, without their memory: a row is made when it is asked for. The answers to a prompt follow each
    other, prompt after prompt.

    Args:
        prompts: token ids of each prompt.
        limits: the most tokens of an answer to each prompt.
        per_prompt: answers to each prompt.
        global_batch_size: prompts of a step.

    Attributes:
        per_step: the most answers of a step.
        lengths: tokens of each row, int64, shape (rows,).
        num_targets: tokens of each answer, int64, shape (rows,).
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], *, per_prompt: int, global_batch_size: int
    ) -> None:
        self.prompts, self.per_prompt = prompts, per_prompt
        self._ids = [numpy.array(prompt, dtype=numpy.int32) for prompt in prompts]
        self.per_step = per_prompt * min(len(prompts), global_batch_size)
        self.num_targets = torch.tensor(limits).repeat_interleave(per_prompt)
        lengths = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
        self.lengths = torch.tensor(lengths).repeat_interleave(per_prompt)

    @classmethod
    def of(
        cls, config: Config, model: Any, prompts: Sequence[Sequence[int]] | None, global_batch_size: int
    ) -> AssumedAnswers:
        """Assume the answers of a run.

        Args:
            config: the whole run.
            model: on any device.
            prompts: of the training split; None: assume those of a step, as long as possible, with nothing in common.
            global_batch_size: prompts of a step.
        """
        longest, context = config.rollout.max_completion_length, max_context(model)
        if prompts is None:
            length = config.data.max_length
            length = length if context is None else max(1, min(length, context - longest))
            prompts = [[row, *[_FILLER_TOKEN] * (length - 1)] for row in range(global_batch_size)]
        limits = [max(1, room_for_answer(model, prompt, longest)) for prompt in prompts]
        return cls(prompts, limits, per_prompt=config.rollout.num_generations, global_batch_size=global_batch_size)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> EncodedExample:
        ids = torch.from_numpy(self.tokens(index)).long()
        return EncodedExample(ids, torch.arange(len(ids)) >= len(ids) - self.num_targets[index])

    @property
    def sides(self) -> tuple[AssumedAnswers, ...]:
        """See `EncodedExamples.sides`."""
        return (self,)

    def tokens(self, index: int) -> Tokens:
        """Return the token ids of a row, shape (time,)."""
        prompt, answer = self._ids[index // self.per_prompt], index % self.per_prompt
        ids = numpy.full(int(self.lengths[index]), _FILLER_TOKEN, dtype=numpy.int32)
        ids[: len(prompt)] = prompt
        ids[len(prompt)] = answer
        return ids

    def longest_prompts(self, number: int) -> list[Sequence[int]]:
        """Return the prompts of so many answers of a step, if they are the longest ones. The longest is last."""
        ordered = sorted(self.prompts, key=len, reverse=True)
        repeated = (prompt for prompt in ordered for _ in range(self.per_prompt))
        return list(islice(repeated, min(number, self.per_step)))[::-1]

    def rows_of(self, prompts: Sequence[int]) -> list[int]:
        """Return the rows with these prompts."""
        return [self.per_prompt * prompt + answer for prompt in prompts for answer in range(self.per_prompt)]


class AnswerBatch(NamedTuple):
    """Answers that a process generates at once."""

    answers: int
    tokens: int
    """Of the longest prompt with its answer."""
    room: int
    """Tokens of the answer to the longest prompt."""
    sampling: Sampling | None
    """None: the most likely token each time."""
    prompts: int
    """Bytes of the tensors in the forward pass over the prompts, without a mask; 0 if they are not known."""
    is_padded: bool
    """Whether the prompts differ in length, so that transformers makes a mask."""

    @classmethod
    def of(
        cls,
        model: Any,
        prompts: Sequence[Sequence[int]],
        *,
        limit: int,
        forecast: Callable[[Any], StepForecast | None],
        by_engine: bool,
        sampling: Sampling | None = None,
    ) -> AnswerBatch:
        """Return the answers to a batch of prompts, each as long as it may be.

        Args:
            model: on any device.
            prompts: token ids of each prompt, the longest last. The engine computes equal prompts once.
            limit: the most tokens of an answer.
            forecast: traces the forward pass over a micro-batch; None if it cannot be traced.
            by_engine: see `engine_generates`.
            sampling: of the answers.
        """
        collate = packer(share_prefixes=True) if by_engine else pad
        found = forecast(collate([_asking(prompt) for prompt in prompts]))
        of_prompts = 0 if found is None else sum(found.moments[FORWARD].values())
        room = room_for_answer(model, prompts[-1], limit)
        return cls(
            answers=len(prompts),
            tokens=len(prompts[-1]) + room,
            room=room,
            sampling=sampling,
            prompts=of_prompts,
            is_padded=len({len(prompt) for prompt in prompts}) > 1,
        )


@dataclass(frozen=True, kw_only=True)
class Generating:
    """The memory of a process while it generates answers. Sizes are in bytes.

    Attributes:
        answers: how many are generated at once.
        tokens: of the longest prompt with its answer.
        held: weights, adapter and the state of the optimizer.
        merged: weights with the adapter added, which the engine makes for small models.
        cache: keys and values of all tokens.
        logits: with the copies that sampling makes.
        prompts: what the forward pass over the prompts takes beside `cache`, before there are logits.
        step: what the forward pass over a later token takes beside `cache`. 0 in the engine, which copies nothing.
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


def engine_generates(model: Any, device_type: str, shards: Shards) -> bool:
    """Return whether the engine generates the answers of a run, see `sample_answers`."""
    return device_type == "cpu" and shards.size == 1 and unsupported_reason(model) is None


def forecast_generating(
    model: Any, batch: AnswerBatch, state: OptimizerNeed, shards: Shards, device_type: str
) -> Generating:
    """Predict the memory of a process that generates a batch of answers.

    The model is on the meta device, with weights in the types of the run.
    """
    bare, weights, by_engine = bare_model(model), Weights(model), engine_generates(model, device_type, shards)
    sizes, head = bare.config, bare.get_output_embeddings().weight
    kv_heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    in_a_layer = 2 * kv_heads * head_dim * bare.get_input_embeddings().weight.dtype.itemsize
    per_logit = head.dtype.itemsize
    if batch.sampling is not None:  # divided by the temperature, then in float64 as probabilities and sums (`Draw`)
        per_logit += 4 + 2 * 8
        per_logit += 6 * (batch.sampling.top_p is not None)  # sorted, with their places
    elif by_engine:
        per_logit += head.dtype.itemsize  # of the token before
    per_logit += 8 * (not by_engine)  # transformers copies them to float32, and keeps the scores of the token before
    with evaluation_mode(model):
        merged = bytes_of_merged(model) if by_engine else 0
    cache = batch.answers * batch.tokens * sizes.num_hidden_layers * in_a_layer
    prompts, step = (batch.prompts, 0) if by_engine else _passes_of_transformers(bare, batch, cache)
    kept = weights.held(shards) + weights.adapter + weights.gathered(shards)
    return Generating(
        answers=batch.answers,
        tokens=batch.tokens,
        held=kept + state.state // weights.trained_shards(shards),
        merged=merged,
        cache=cache,
        logits=batch.answers * head.shape[0] * per_logit,
        prompts=prompts,
        step=step,
    )


def _passes_of_transformers(model: Any, batch: AnswerBatch, cache: int) -> tuple[int, int]:
    """Return the bytes that the passes over the prompts and over a later token take beside `cache`.

    In transformers 5.23, a layer copies its keys to append to them, and then its values. `eager` attention repeats both
    for all heads and makes scores; `sdpa` repeats them if it has a mask and several tokens. The logits of the token
    before are there in float32. A weight in 4 bits is dequantized for its product.
    """
    sizes, head = model.config, model.get_output_embeddings().weight
    heads = sizes.num_attention_heads
    of_layer = cache // sizes.num_hidden_layers
    repeated = of_layer * heads // (getattr(sizes, "num_key_value_heads", None) or heads)
    of_prompts = 1 - batch.room / batch.tokens
    is_eager = sizes._attn_implementation == "eager"
    per_score = 2 * 4 + head.dtype.itemsize  # softmax computes in float32
    scores = batch.answers * heads * batch.tokens * per_score
    widened = max(widened_bytes(weight) for weight in model.parameters())
    first = batch.prompts + widened - cache * (1 - of_prompts)  # the cache has no answers yet
    if batch.is_padded and not is_eager and repeated > of_layer:
        first += repeated * of_prompts
    later = 4 * batch.answers * head.shape[0] + widened + (repeated + scores if is_eager else of_layer // 2)
    return max(0, round(first)), later


def _asking(prompt: Sequence[int]) -> EncodedExample:
    """Return a row whose forward pass predicts the first token of an answer."""
    ids = torch.tensor([*prompt, prompt[-1]])
    return EncodedExample(ids, torch.arange(len(ids)) == len(prompt))


def ways_to_generate(
    generating: Generating, device: Device, config: Config, batch_key: str, length_key: str
) -> Iterator[str]:
    """Yield what takes less memory than generating so many answers at once.

    The two keys limit how many answers are generated at once, and the tokens of an answer.
    """
    room = device.memory - device.reserve - generating.held - generating.merged
    fit = room * generating.answers // (generating.total - generating.held - generating.merged)
    if 0 < fit < generating.answers:
        yield f"a lower {batch_key}: {fit} answers at once fit"
    yield f"a lower {length_key} (it is {values(config)[length_key]})"


def sampling_of(config: Config) -> Sampling:
    """Return how a run samples the answers that it learns from."""
    rollout = config.rollout
    top_p = None if rollout.top_p == 1 else rollout.top_p
    return Sampling(temperature=rollout.temperature, top_k=rollout.top_k or None, top_p=top_p)


def measure_generating(
    config: Config, model: Any, answers: AssumedAnswers, *, order: Sequence[int], world_size: int
) -> float:
    """Measure here how long a process generates for an optimizer step, in seconds for the model's whole depth.

    The engine generates, on the CPU. `order` has the prompts of the rollout to measure. For the model, see
    `at_full_depth`.
    """
    rollout = config.rollout
    prompts = [answers.prompts[prompt] for prompt in order for _ in range(answers.per_prompt)]
    limit = rollout.max_completion_length
    batches = group_prompts(model, prompts, batch_size=rollout.batch_size, max_new_tokens=limit)
    batch = [prompts[row] for row in batches[len(batches) // 2]]
    room = room_for_answer(model, batch[-1], limit)
    # At half the length, a token takes as long as on average.
    halves = [[*prompt, *[_FILLER_TOKEN] * (room // 2)] for prompt in batch]

    def measure() -> float:
        draw = Draw(sampling_of(config), range(len(batch)))
        seconds = []
        with evaluation_mode(model), unchanged_weights():
            CachedDecoder(model, batch, most_tokens=len(batch[-1]) + room).start()  # allocates memory
            begun = time.perf_counter()
            CachedDecoder(model, batch, most_tokens=len(batch[-1]) + room).start()
            started = time.perf_counter() - begun
            decoder = CachedDecoder(model, halves, most_tokens=len(batch[-1]) + room + REPETITIONS)
            logits = decoder.start()
            for _ in range(1 + REPETITIONS):
                begun = time.perf_counter()
                logits = decoder.go_on(draw(None, logits).argmax(-1))
                seconds.append(time.perf_counter() - begun)
        return started + room * median(seconds[1:])

    rounds = ceil_div(len(batches), world_size)
    return rounds * at_full_depth(model, torch.device("cpu"), measure) / config.grpo.num_iterations
