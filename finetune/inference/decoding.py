"""Generate answers, greedily or by sampling. They do not depend on how prompts are batched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.data.templates import stop_ids
from finetune.engine.fused import replays_answers
from finetune.engine.kv_cache import CachedDecoder
from finetune.engine.products import is_in_4_bits, unchanged_weights
from finetune.engine.supported import unsupported_reason
from finetune.errors import DataError
from finetune.logs import report_progress
from finetune.model.base import evaluation_mode, longrope_boundary, max_context
from finetune.units import ceil_div

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.distributed.runtime import Runtime
    from finetune.inference.sampling import Draw, Sampling

_GOES_ON_WITH = 0.75
"""Ended rows leave the batch once at most this fraction of its rows goes on, because leaving copies the cache."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The end of an answer, and the choice of its tokens."""

    stop_ids: Sequence[int]
    """An answer ends before the first of these tokens."""
    max_new_tokens: int
    sampling: Sampling | None = None
    """None: the most likely token each time."""
    keeps_stop: bool = False
    """Whether an answer ends with the stop token where it came, instead of before it."""
    by_transformers: bool = False
    """Whether transformers' `generate` computes the answers even if the engine could."""

    @classmethod
    def greedy(
        cls, model: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, *, keeps_stop: bool = False
    ) -> Decoding:
        """Choose the most likely token each time, up to where the model ends its turn."""
        stops = stop_ids(tokenizer, model.generation_config.eos_token_id)
        return cls(stop_ids=stops, max_new_tokens=max_new_tokens, keeps_stop=keeps_stop)


class SampledAnswer(NamedTuple):
    """An answer, and how likely the model took it to be."""

    ids: list[int]
    """Its tokens."""
    nats: list[float]
    """-log p of each token, before temperature and filters; empty unless the answer was sampled."""


def generate_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    batch_size: int,
    runtime: Runtime | None = None,
    is_to_stop: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Continue each prompt, token by token, up to a stop id, which is not part of the answer.

    Prompts of similar lengths are decoded together, `batch_size` at once. `is_to_stop` is called before each batch;
    True leaves the answers of this rank's other prompts empty. Returns token ids in the order of the prompts, on every
    rank.

    Collective with a runtime: every rank, with the same prompts.

    Raises:
        DataError: a prompt leaves no room for an answer in the model's context.
    """
    answers = sample_answers(model, prompts, decoding, batch_size=batch_size, runtime=runtime, is_to_stop=is_to_stop)
    return [answer.ids for answer in answers]


def sample_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    batch_size: int,
    runtime: Runtime | None = None,
    is_to_stop: Callable[[], bool] = lambda: False,
) -> list[SampledAnswer]:
    """Continue each prompt like `generate_answers`, and measure -log p of each sampled token. Collective like it."""
    answers, num_begun = [SampledAnswer([], []) for _ in prompts], 0
    batches = group_prompts(model, prompts, batch_size=batch_size, max_new_tokens=decoding.max_new_tokens)
    for rows, is_mine in _in_even_rounds(runtime, batches):
        if is_to_stop():
            break
        report_progress(f"answers {num_begun + 1:,} to {num_begun + len(rows):,}")
        num_begun += len(rows)
        tokens = _generate(model, prompts, rows, decoding, runtime=runtime)
        if is_mine:
            for row, answer in zip(rows, tokens, strict=True):
                answers[row] = _until_stop(answer, decoding)
    return answers if runtime is None else _share_answers(runtime, answers, decoding.max_new_tokens)


def _in_even_rounds(runtime: Runtime | None, batches: Sequence[list[int]]) -> Iterator[tuple[list[int], bool]]:
    """Yield this rank's batches. If weights are sharded, repeat batches until all ranks have had as many."""
    if runtime is None:
        yield from ((rows, True) for rows in batches)
        return
    world_size = runtime.world_size
    own_batches = batches[runtime.rank :: world_size]
    yield from ((rows, True) for rows in own_batches)
    if runtime.placement.shard_size is not None:
        num_rounds = ceil_div(len(batches), world_size)
        yield from ((rows, False) for rows in batches[: num_rounds - len(own_batches)])


def _until_stop(answer: SampledAnswer, decoding: Decoding) -> SampledAnswer:
    """Cut an answer off at its first stop token, which stays if the decoding keeps it."""
    num_before = sum(1 for _ in takewhile(lambda token: token not in decoding.stop_ids, answer.ids))
    end = num_before + decoding.keeps_stop
    return SampledAnswer(answer.ids[:end], answer.nats[:end])


def _share_answers(runtime: Runtime, answers: Sequence[SampledAnswer], limit: int) -> list[SampledAnswer]:
    """Return the answers of all ranks. Collective.

    Only one rank answers a prompt, so the sum over ranks is its answer. An answer is sent as `limit` token ids plus 1,
    with 0 after its end, followed by as many -log p.
    """
    if runtime.world_size == 1 or not answers:
        return list(answers)
    padded = (
        [*(token + 1 for token in ids), *[0] * (limit - len(ids)), *nats, *[0] * (limit - len(nats))]
        for ids, nats in answers
    )
    sums = runtime.collectives.sum(float(number) for numbers in padded for number in numbers)
    shared = []
    for start in range(0, len(sums), 2 * limit):
        ids = [int(token) - 1 for token in sums[start : start + limit] if token]
        shared.append(SampledAnswer(ids, sums[start + limit : start + limit + len(ids)]))
    return shared


def group_prompts(
    model: Any, prompts: Sequence[Sequence[int]], *, batch_size: int, max_new_tokens: int
) -> list[list[int]]:
    """Group prompts of similar length into batches, as indices.

    A LongRoPE model chooses its factors for a whole batch by its longest position, so prompts on the two sides of the
    boundary are kept apart. A prompt whose answer may cross it, or reach the end of the context, is decoded alone.

    Raises:
        DataError: a prompt leaves no room for an answer in the model's context.
    """
    _refuse_too_long(model, prompts)
    boundary, context = longrope_boundary(model), max_context(model)
    limits = [limit for limit in (boundary, context) if limit is not None]
    batches: list[list[int]] = []
    last_group: object = None
    for row in sorted(range(len(prompts)), key=lambda row: len(prompts[row])):
        length = len(prompts[row])
        is_alone = any(length <= limit < length + max_new_tokens for limit in limits)
        group = ("alone", row) if is_alone else ("beyond", boundary is not None and length > boundary)
        if group != last_group or len(batches[-1]) == batch_size:
            batches.append([])
        batches[-1].append(row)
        last_group = group
    return batches


def room_for_answer(model: Any, prompt: Sequence[int], max_new_tokens: int) -> int:
    """Return the most tokens that an answer to this prompt can have: `max_new_tokens`, or fewer if the context ends."""
    context = max_context(model)
    return max_new_tokens if context is None else min(max_new_tokens, context - len(prompt))


def count_unended(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], max_new_tokens: int
) -> int:
    """Count the answers that the limit of tokens or the end of the context cut off. Answers are without stop tokens."""
    pairs = zip(prompts, answers, strict=True)
    return sum(len(answer) >= room_for_answer(model, prompt, max_new_tokens) for prompt, answer in pairs)


def stream_answer(model: Any, prompt: Sequence[int], decoding: Decoding, on_token: Callable[[int], object]) -> None:
    """Answer one prompt as `generate_answers` does, and pass on each token as soon as it is generated.

    `on_token` is called with each token of the answer; an exception in it ends the answer.

    Raises:
        DataError: the prompt leaves no room for an answer in the model's context.
    """
    _refuse_too_long(model, [prompt])

    def show(token: int) -> None:
        if token not in decoding.stop_ids:
            on_token(token)

    _generate(model, [prompt], [0], decoding, on_token=show)


def _generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    decoding: Decoding,
    *,
    runtime: Runtime | None = None,
    on_token: Callable[[int], object] | None = None,
) -> list[SampledAnswer]:
    """Answer the prompts of a batch, given as indices, up to a stop id or the last token that has room.

    What follows a stop id has no meaning. If the batch has one prompt, `on_token` is called with each of its tokens.
    """
    is_sharded = runtime is not None and runtime.placement.shard_size is not None
    may_use_engine = not (decoding.by_transformers or is_sharded)
    continue_ = _way_of_engine(model) if may_use_engine else None
    batch = [prompts[row] for row in rows]
    draw = None
    if decoding.sampling is not None:
        from finetune.inference.sampling import Draw

        draw = Draw(decoding.sampling, rows)
    room = room_for_answer(model, max(batch, key=len), decoding.max_new_tokens)
    with evaluation_mode(model):
        if continue_ is not None:
            tokens = continue_(model, batch, room, decoding.stop_ids, draw, on_token)
        else:
            from finetune.inference.transformers_answers import continue_by_transformers

            generate = partial(continue_by_transformers, batch, room, decoding.stop_ids, draw, on_token, is_sharded)
            tokens = generate(model) if runtime is None else runtime.placement.apply(generate, model)
    nats = [[] for _ in rows] if draw is None else draw.nats()
    return [SampledAnswer(*both) for both in zip(tokens, nats, strict=True)]


def _way_of_engine(model: Any) -> Callable[..., list[list[int]]] | None:
    """Return the function by which the engine answers a batch; None if transformers does."""
    if replays_answers():
        from finetune.inference.replayed_answers import continue_in_steps, why_not_replayed  # for training.graphs alone

        if why_not_replayed(model) is None:
            return continue_in_steps
    return _continue_by_engine if engine_continues(model) else None


def engine_continues(model: Any) -> bool:
    """Return whether the engine generates a model's answers: on a CPU, where it was measured, and not in 4 bits."""
    is_plain = all(weight.device.type == "cpu" and not is_in_4_bits(weight) for weight in model.parameters())
    return is_plain and unsupported_reason(model) is None


def _continue_by_engine(
    model: Any,
    batch: Sequence[Sequence[int]],
    room: int,
    stop_ids: Sequence[int],
    draw: Draw | None,
    on_token: Callable[[int], object] | None,
) -> list[list[int]]:
    """Answer a batch with the engine. Rows leave the batch a few at a time when their answers have ended."""
    boundary = longrope_boundary(model)
    answers: list[list[int]] = [[] for _ in batch]
    alive, ended = list(range(len(batch))), set[int]()
    with unchanged_weights():
        decoder = CachedDecoder(model, batch, most_tokens=max(map(len, batch)) + room)
        logits = decoder.start()
        while True:
            tokens = (logits if draw is None else draw(None, logits)).argmax(-1)
            for row, token in zip(alive, tokens.tolist(), strict=True):
                answers[row].append(token)
                if token in stop_ids:
                    ended.add(row)
                if on_token is not None:
                    on_token(token)
            going = [place for place, row in enumerate(alive) if row not in ended]
            if not going or len(answers[alive[0]]) == room:
                return answers
            if len(going) <= _GOES_ON_WITH * len(alive):
                remaining = torch.tensor(going, device=tokens.device)
                decoder.keep(remaining)
                tokens, alive = tokens[remaining], [alive[place] for place in going]
                if draw is not None:
                    draw.keep(going)
            if len(batch[alive[0]]) + len(answers[alive[0]]) - 1 == boundary:
                # The token is the first that takes the long factors, and the cache is computed with the short ones.
                prefix = [*batch[alive[0]], *answers[alive[0]]]
                decoder = CachedDecoder(model, [prefix], most_tokens=len(batch[alive[0]]) + room)
                logits = decoder.start()
            else:
                logits = decoder.go_on(tokens)


def _refuse_too_long(model: Any, prompts: Sequence[Sequence[int]]) -> None:
    context = max_context(model)
    for place, prompt in enumerate(prompts, start=1):
        if context is not None and len(prompt) >= context:
            raise DataError(
                f"prompt {place} of {len(prompts)} has {len(prompt):,} tokens, and the model's context of {context:,} "
                "leaves no room for an answer. Shorten it."
            )
