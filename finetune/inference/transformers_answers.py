"""Generate answers with transformers' `generate`, where the engine does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from finetune.model.base import longrope_boundary

if TYPE_CHECKING:
    from finetune.inference.sampling import Draw


def continue_by_transformers(
    batch: Sequence[Sequence[int]],
    room: int,
    stop_ids: Sequence[int],
    draw: Draw | None,
    on_token: Callable[[int], object] | None,
    is_sharded: bool,
    model: Any,
) -> list[list[int]]:
    """Answer a batch with transformers' `generate`.

    The first token that takes the long factors of LongRoPE begins a new call, since the cache is computed with the
    short ones. A prompt whose answer may come so far is the only one of its batch.
    """
    boundary, longest = longrope_boundary(model), max(map(len, batch))
    room_before = room if boundary is None or longest > boundary else min(room, boundary + 1 - longest)
    call = partial(_generate, model, stop_ids=stop_ids, is_sharded=is_sharded)
    answers = call(batch, room_before, draw=draw, on_token=on_token)
    if room_before < room and answers[0][-1] not in stop_ids:
        (rest,) = call([[*batch[0], *answers[0]]], room - room_before, draw=draw, on_token=on_token)
        return [[*answers[0], *rest]]
    if is_sharded and boundary is not None:
        call(batch, 1, draw=None, on_token=None)  # the answer of another rank may go on, which needs all ranks
    return answers


def _generate(
    model: Any,
    batch: Sequence[Sequence[int]],
    room: int,
    *,
    stop_ids: Sequence[int],
    is_sharded: bool,
    draw: Draw | None,
    on_token: Callable[[int], object] | None,
) -> list[list[int]]:
    """Call `generate` for at most `room` tokens."""

    def pass_on(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if on_token is not None:
            on_token(int(input_ids[0, -1]))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # stops no row

    rows = [torch.tensor(prompt) for prompt in batch]
    # Padded on the left: every answer starts in the same column.
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    input_ids, mask = padded(rows), padded([torch.ones_like(row) for row in rows])
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,  # `Draw` samples row by row
        max_new_tokens=room,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
        use_cache=True,
    )
    device = next(model.parameters()).device
    with _only_our_settings(model), _in_one_type(model):
        generated: torch.Tensor = model.generate(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([] if draw is None else [draw]),
            synced_gpus=is_sharded,  # a rank whose answers have ended still takes part in the steps of the others
            stopping_criteria=StoppingCriteriaList([] if on_token is None else [pass_on]),
        )
    answers: list[list[int]] = generated[:, input_ids.shape[1] :].tolist()
    return answers


def _in_one_type(model: Any) -> AbstractContextManager[Any]:
    """Return an autocast to the type of the frozen weights if layers of `lora.modules_to_save` are beside them.

    These layers are trained whole, in fp32. Without autocast, a layer in 16 bits would refuse their output.
    """
    from peft.utils.other import ModulesToSaveWrapper

    saved = (module for module in model.modules() if isinstance(module, ModulesToSaveWrapper))
    dtypes = {weight.dtype for weight in model.parameters()} & {torch.bfloat16, torch.float16}
    if not dtypes or all(module.disable_adapters for module in saved):
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=dtypes.pop())


@contextmanager
def _only_our_settings(model: Any) -> Iterator[None]:
    """Replace the model's generation_config, from which transformers takes every setting that a call does not give.

    Otherwise a repetition penalty or a minimal length of the base would change greedy decoding.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    config_of_base = base.generation_config
    base.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        base.generation_config = config_of_base
