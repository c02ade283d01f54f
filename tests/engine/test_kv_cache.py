"""Rows that are continued with a cache, against the engine's forward of each whole row, which test_decoder.py tests."""

import pytest
import torch

from benchmarks.gpu import decoding_graph
from finetune.engine.decoder import Decoder, bare_model
from finetune.engine.kv_cache import CachedDecoder, _Cache
from finetune.engine.layout import pack_prompts
from finetune.engine.prefixes import MIN_SHARED
from finetune.inference import decoding
from finetune.inference.decoding import Decoding, Sampling, generate_answers
from tests.diagnose.measured import peak_of
from tests.engine.test_decoder import CONFIGS, plain_attention, some_rows, with_lora
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


def test_a_pass_that_is_replayed_gives_the_same_answers(monkeypatch):
    """On a CPU nothing is captured; the tokens and lengths keep their places, and later columns are left out."""
    monkeypatch.setattr(decoding_graph, "COLUMNS", 8)
    model = build_tiny(tiny_phi3_config(initializer_range=0.3)).eval()
    drawn = Decoding(stop_ids=[5, 6, 7], max_new_tokens=20, sampling=Sampling(temperature=1.5, seed=3))
    expected = generate_answers(model, prompts(), drawn, batch_size=8)
    monkeypatch.setattr(decoding, "CachedDecoder", decoding_graph.GraphedDecoder)
    assert generate_answers(model, prompts(), drawn, batch_size=8) == expected
    assert len({len(answer) for answer in expected}) > 2  # rows have left


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
