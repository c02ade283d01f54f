"""Rows that are continued with a cache, against the engine's forward of each whole row, which test_decoder.py tests."""

import gc
import weakref
from functools import partial
from itertools import chain

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.config.schema import Config
from finetune.distributed.launch import launch
from finetune.engine import replayed
from finetune.engine.decoder import Decoder, bare_model
from finetune.engine.fused import replayed_or_not, replays_answers
from finetune.engine.kv_cache import CachedDecoder, _Cache, pack_prompts
from finetune.engine.prefixes import MIN_SHARED
from finetune.engine.products import FP8, unchanged_weights
from finetune.engine.replayed import STEPS_OF_BLOCK, SteppedDecoder, has_rounded_weights
from finetune.inference.answer_graphs import agree_on_replays
from finetune.inference.decoding import Decoding, generate_answers, sample_answers, stream_answer
from finetune.inference.replayed_answers import most_likely, why_not_replayed
from finetune.inference.sampling import Draw, Sampling
from finetune.units import ceil_bucket
from tests.diagnose.measured import peak_of
from tests.engine.fake_device import move
from tests.engine.test_decoder import CONFIGS, plain_attention, some_rows, with_lora
from tests.inference.test_decoding import BOUNDARY, LONGROPE
from tests.tiny_models import VOCABULARY, build_tiny, tiny_gemma2_config, tiny_phi3_config

NUM_NEW = 6
IN_FLOAT64 = 1e-9
"""Relative: roundings in float64 are far below, and a wrong key or position is far above."""


def prompts():
    """Rows of several lengths. Three begin with the same tokens; of these, one ends there and two are equal."""
    shared, *others = some_rows((MIN_SHARED, 5, 2, 9))
    return [row.tolist() for row in (shared, torch.cat([shared, others[0]]), torch.cat([shared, others[0]]), *others)]


def last_logits(model, rows):
    """In float64, which the norms of transformers are not."""
    decoder, head = Decoder(model, plain_attention), bare_model(model).get_output_embeddings()
    hidden = [decoder.hidden_states(torch.tensor(row), torch.arange(len(row)), [len(row)])[-1] for row in rows]
    return head(torch.stack(hidden))


@pytest.mark.few(9)
@pytest.mark.parametrize("adapter", ["lora", "dora", "none"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_whole_rows(kind, adapter):
    model = build_tiny(CONFIGS[kind])
    if adapter != "none":
        model = with_lora(model, use_dora=adapter == "dora")
    model = model.double().eval()
    rows = prompts()
    new = torch.randint(3, VOCABULARY, (NUM_NEW, len(rows)), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        decoder = CachedDecoder(model, rows, most_tokens=max(map(len, rows)) + NUM_NEW)
        logits, alive = decoder.start(), list(range(len(rows)))
        for step, tokens in enumerate(new):
            torch.testing.assert_close(logits, last_logits(model, rows), rtol=IN_FLOAT64, atol=IN_FLOAT64)
            if step == NUM_NEW // 2:
                kept = [0, 2, 4]
                decoder.keep(torch.tensor(kept))
                alive, rows = [alive[place] for place in kept], [rows[place] for place in kept]
            tokens = tokens[alive]
            rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
            logits = decoder.go_on(tokens)
    torch.testing.assert_close(logits, last_logits(model, rows), rtol=IN_FLOAT64, atol=IN_FLOAT64)


@pytest.fixture
def in_steps(monkeypatch):
    """Answer as on CUDA with `training.graphs=true`, with short blocks and few columns. A CPU captures nothing."""
    monkeypatch.setattr(replayed, "COLUMNS_OF_STEP", 8)
    with replayed_or_not(True):
        yield


def answers_in_steps_and_without(model, asked, settings):
    """Both ways, each with the sizes of the batches after which the host looked at the tokens."""
    steps, advance = [], SteppedDecoder.advance

    def watched(decoder, num_steps, levels):
        block = advance(decoder, num_steps, levels)
        steps.append(tuple(block.tokens.shape))
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SteppedDecoder, "advance", watched)
        mine = sample_answers(model, asked, settings, batch_size=8)
    with replayed_or_not(False):
        theirs = sample_answers(model, asked, settings, batch_size=8)
    return mine, theirs, steps


WAYS = {
    "greedy": None,
    "drawn": Sampling(temperature=1.5, seed=3),
    "filtered": Sampling(temperature=1.2, top_k=20, top_p=0.9, seed=4),
}


@pytest.mark.few(3)
@pytest.mark.usefixtures("in_steps")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_answers_in_steps_are_those_of_the_engine(kind, way):
    """Rows that have ended are padding until few are left, and attention looks at later, empty columns."""
    model = with_lora(build_tiny(CONFIGS[kind])).eval()
    asked = [row.tolist() for row in some_rows((3, 8, 5, 9, 4, 12, 6, 7))]
    settings = Decoding(stop_ids=[*range(5, 12)], max_new_tokens=40, sampling=WAYS[way], keeps_stop=True)
    mine, theirs, steps = answers_in_steps_and_without(model, asked, settings)
    assert [answer.ids for answer in mine] == [answer.ids for answer in theirs]
    for answer, other in zip(mine, theirs, strict=True):
        assert answer.nats == pytest.approx(other.nats, abs=1e-5)
    assert max(num_steps for _, num_steps in steps) == STEPS_OF_BLOCK


@pytest.mark.usefixtures("in_steps")
def test_rows_that_have_ended_are_padding_until_fewer_rows_hold_the_others():
    model = build_tiny(tiny_phi3_config(initializer_range=0.3)).eval()
    asked = [row.tolist() for row in some_rows((3, 8, 5, 9, 4, 12, 6, 7))]
    settings = Decoding(stop_ids=[5], max_new_tokens=90, sampling=WAYS["drawn"], keeps_stop=True)
    mine, theirs, steps = answers_in_steps_and_without(model, asked, settings)
    assert [answer.ids for answer in mine] == [answer.ids for answer in theirs]
    assert len({rows for rows, _ in steps}) > 2
    going = [sum(len(answer.ids) > 1 + STEPS_OF_BLOCK * block for answer in mine) for block in range(len(steps))]
    assert [rows for rows, _ in steps] == [ceil_bucket(number) for number in going]
    assert [rows for rows, _ in steps] != going, "some rows were padding"


def streamed(model, prompt, settings):
    given = []
    stream_answer(model, prompt, settings, given.append)
    return given


@pytest.mark.slow
@pytest.mark.usefixtures("in_steps")
@pytest.mark.parametrize("sampling", [None, WAYS["drawn"]], ids=["greedy", "drawn"])
def test_an_answer_in_steps_crosses_the_boundary_of_longrope_and_is_streamed(sampling):
    config = tiny_phi3_config(
        rope_parameters=LONGROPE, original_max_position_embeddings=BOUNDARY, sliding_window=None, initializer_range=0.5
    )
    model = build_tiny(config).eval()
    # The answer begins before the boundary, at it, and after it.
    for length in (BOUNDARY - 5, BOUNDARY - 1, BOUNDARY, BOUNDARY + 2):
        prompt = some_rows((length,))[0].tolist()
        settings = Decoding(stop_ids=[-1], max_new_tokens=40, sampling=sampling)
        (mine,), (theirs,), _ = answers_in_steps_and_without(model, [prompt], settings)
        assert mine.ids == theirs.ids
        assert streamed(model, prompt, settings) == mine.ids
        stop = mine.ids[20]
        settings = Decoding(stop_ids=[stop], max_new_tokens=40, sampling=sampling)
        assert streamed(model, prompt, settings) == mine.ids[: mine.ids.index(stop)]


class Outside(TorchDispatchMode):
    """Notes where every tensor lies that an operation reads and no operation inside has made."""

    def __init__(self):
        super().__init__()
        self.read = []
        self._made = {}  # kept, so that nothing else lies there later

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # A packed weight is a constant of its own kind, which only CPUs have.
        storages = [tensor.untyped_storage() for tensor in tensors if not tensor.is_mkldnn]
        if function is torch.ops.aten.lift_fresh.default:  # a number that Python passes, which a graph keeps itself
            self._made |= {storage.data_ptr(): storage for storage in storages}
        outside = [storage.data_ptr() for storage in storages if storage.data_ptr() not in self._made]
        self.read += [(str(function), place) for place in outside]
        result = function(*args, **(kwargs or {}))
        known = {storage.data_ptr() for storage in storages}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self._made[tensor.untyped_storage().data_ptr()] = tensor
        return result


@pytest.mark.parametrize("kind", ["phi3", "longrope"])
def test_a_step_reads_the_same_tensors_each_time_and_leaves_nothing_when_it_is_undone(kind):
    """So a graph of it, which knows addresses alone, computes each later step."""
    model, draw = with_lora(build_tiny(CONFIGS[kind])).to(torch.bfloat16).eval(), Draw(WAYS["filtered"], range(6))
    reads = []
    with torch.no_grad(), unchanged_weights():
        decoder = SteppedDecoder(model, prompts(), most_tokens=40, choose=draw.choose)
        decoder.begin(draw.levels(1))
        decoder._try(partial(decoder.step, 40))  # as before a capture
        for _ in range(3):
            decoder._begin_block(draw.levels(1))
            with Outside() as outside:
                decoder.step(40)
            reads.append(outside.read)
    assert reads[0] == reads[1] == reads[2]
    own = [decoder._last, decoder._place, decoder._levels, decoder._tokens, decoder._nats, decoder._cache.lengths]
    own += [*chain.from_iterable(decoder._angles.values()), *decoder._cache.layers[0]]
    assert {tensor.untyped_storage().data_ptr() for tensor in own} <= {place for _, place in reads[0]}

    def tokens_of(tries):
        draw = Draw(WAYS["filtered"], range(6))
        decoder = SteppedDecoder(model, prompts(), most_tokens=40, choose=draw.choose)
        blocks = [decoder.begin(draw.levels(1)).tokens.tolist()]
        for num_steps in (3, 5):
            if tries:
                decoder._try(partial(decoder.step, 40))
            blocks.append(decoder.advance(num_steps, draw.levels(num_steps)).tokens.tolist())
        return blocks

    with torch.no_grad():
        assert tokens_of(tries=True) == tokens_of(tries=False)


def test_graphs_of_rows_that_have_left_are_not_replayed():
    with torch.no_grad():
        decoder = SteppedDecoder(build_tiny(CONFIGS["phi3"]).eval(), prompts(), most_tokens=40, choose=most_likely)
        decoder.begin(None)
        decoder._graphs[40], decoder._pool = object(), object()
        decoder.keep(torch.tensor([0, 2]))
    assert (decoder._graphs, decoder._pool) == ({}, None)


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["phi3", "longrope", "qwen3", "gemma3_text", "ministral3"])
def test_the_host_does_not_wait_for_the_device_in_a_step(device, kind, way):
    draw = None if WAYS[way] is None else Draw(WAYS[way], range(6))
    model = with_lora(build_tiny(CONFIGS[kind])).eval()
    with torch.no_grad():
        model(torch.tensor([[5]]))  # makes the long factors of LongRoPE, which this device cannot
        model = move(model)
    with torch.no_grad(), unchanged_weights():
        choose = most_likely if draw is None else draw.choose
        decoder = SteppedDecoder(model, prompts(), most_tokens=40, choose=choose)
        decoder.begin(None if draw is None else draw.levels(1))
        decoder._begin_block(None if draw is None else draw.levels(16))
        device.waits.clear()
        for _ in range(16):
            decoder.step(40)
        assert not device.waits
        decoder._last.tolist()
        assert device.waits


@pytest.mark.usefixtures("in_steps")
def test_a_batch_frees_all_that_its_steps_read():
    decoders = []
    begin = SteppedDecoder.begin

    def watched(decoder, levels):
        decoders.append(weakref.ref(decoder))
        return begin(decoder, levels)

    model = build_tiny(tiny_phi3_config()).eval()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SteppedDecoder, "begin", watched)
            generate_answers(model, prompts(), Decoding(stop_ids=[-1], max_new_tokens=4), batch_size=8)
        assert [decoder() for decoder in decoders] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("wish", ["auto", False, True])
def test_graphs_are_off_unless_asked_for_and_without_cuda_that_is_a_fallback(wish):
    model = build_tiny(tiny_phi3_config())
    config = Config.model_validate({"training": {"device": "cpu", "graphs": wish}})
    with launch(config) as runtime:
        agree_on_replays(runtime, config.training, model)
        taken = runtime.fallbacks.as_records()
        assert not replays_answers()
    assert [(fallback["what"], fallback["used"]) for fallback in taken] == [
        ("training.graphs", "the engine without graphs")
    ] * (wish is True)


def test_weights_in_4_bits_or_fp8_are_rounded(monkeypatch):
    layer = torch.nn.Linear(2, 2).requires_grad_(False)
    assert not has_rounded_weights(layer)
    with monkeypatch.context() as patch:
        patch.setattr(replayed, "is_in_4_bits", lambda weight: weight is layer.bias)
        assert has_rounded_weights(layer)
    layer.weight.data = layer.weight.data.to(FP8)
    assert has_rounded_weights(layer)


def test_models_that_are_not_replayed():
    model = build_tiny(tiny_phi3_config())
    assert why_not_replayed(model) is None
    assert "calls some linear layers" in why_not_replayed(with_lora(model, use_dora=True))
    assert "its attention scores are capped" in why_not_replayed(build_tiny(tiny_gemma2_config()))
    quantized = build_tiny(tiny_phi3_config())
    layer = quantized.model.layers[0].self_attn.qkv_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(FP8), requires_grad=False)
    assert "fp8" in why_not_replayed(quantized)


def test_rows_leave_the_cache_layer_by_layer():
    layers, half = 10, (8, 2, 64, 8)

    def leave():
        cache = _Cache(torch.ones(half[0], dtype=torch.int64), half[2])
        cache.layers = [(torch.zeros(half), torch.zeros(half)) for _ in range(layers)]
        cache.keep(torch.arange(6))

    whole = layers * 2 * torch.zeros(half).nbytes
    assert whole < peak_of(leave) < whole * (1 + 1 / layers)


def test_what_rows_share_is_computed_once():
    rows = prompts()
    packed = pack_prompts(rows)
    assert len(packed.input_ids) == len(rows[1]) + sum(map(len, rows[3:]))
    for row, tokens in zip(rows, packed.token_of, strict=True):
        assert packed.input_ids[tokens[: len(row)]].tolist() == row


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.5, top_k=20, seed=3)], ids=["greedy", "drawn"])
def test_answers_are_those_of_transformers_though_rows_leave_the_batch(sampling):
    model = build_tiny(tiny_phi3_config(initializer_range=0.3)).eval()
    asked = [row.tolist() for row in some_rows((3, 8, 5, 9, 4, 12, 6, 7))]
    settings = {"stop_ids": [7, 8, 9, 10, 11], "max_new_tokens": 24, "sampling": sampling, "keeps_stop": True}
    expected = generate_answers(model, asked, Decoding(**settings, by_transformers=True), batch_size=8)
    assert len(set(map(len, expected))) > 3, "answers end at different places"
    model.generate = None  # the engine does without
    assert generate_answers(model, asked, Decoding(**settings), batch_size=8) == expected


def test_a_model_that_the_engine_does_not_know_is_continued_by_transformers():
    model = build_tiny(tiny_gemma2_config()).eval()
    assert generate_answers(model, [[5, 6, 7]], Decoding(stop_ids=[1], max_new_tokens=3), batch_size=1)
