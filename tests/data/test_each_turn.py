"""Each turn as it will be served: what a conversation becomes, which micro-batches it is in, and what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.config.compose import load_config
from finetune.data.batches import TrainLoader
from finetune.data.encoded import EncodedExamples
from finetune.data.preferences import encode_preferences
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.errors import ConfigError, DataError
from finetune.training.loaders import log_batches, plan_batches
from tests.data.conftest import encode_train
from tests.launches import REPOSITORY
from tests.tiny import tiny_tokenizer
from tests.tiny_models import build_tiny, tiny_phi3_config
from tests.tiny_runs import conversation

TEMPLATE = REPOSITORY / "finetune/data/chat_templates/phi4_mini.jinja"


@pytest.fixture
def encode(make_section, write_jsonl):
    def encode_rows(rows, **keys):
        keys = {"train_on": "each_turn", "chat_template": "phi4_mini", **keys}
        section = make_section(path=write_jsonl(rows), **keys)
        return encode_train(section)

    return encode_rows


def rule_of(examples: Any, *, is_packed: bool = True, **words: Any) -> Any:
    said = [f"training.{key}={value}" for key, value in words.items()]
    config = load_config(["data.path=a.jsonl", "model=phi_tiny", *said], task="finetune_lora")
    size = config.training.global_batch_size or 2
    return plan_batches(config, examples, is_packed=is_packed, boundary=None, global_batch_size=size)


def test_each_answer_follows_the_turns_as_they_are_served(encode):
    rows = [conversation(3, seed=1), conversation(1, seed=2)]
    rows[1]["messages"].insert(1, {"role": "assistant", "content": "no", "weight": 0})
    examples = encode(rows)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.read_text()
    assert [list(of_one) for of_one in examples.rows_of_examples] == [[0, 1, 2], [3]]
    served = [(rows[0], 2), (rows[0], 4), (rows[0], 6), (rows[1], 3)]
    for index, (row, answer) in enumerate(served):
        turns = row["messages"][: answer + 1]
        prompt = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        ids, is_target = examples[index]
        thought = f"<think>\n{turns[-1]['reasoning_content']}\n</think>\n\n{turns[-1]['content']}<|end|>"
        assert tokenizer.decode(ids) == f"{prompt}{thought}<|endoftext|>"
        assert tokenizer.decode(ids[is_target]) == thought
        assert examples.source(index).endswith(f":{1 if index < 3 else 2}")


def test_a_conversation_is_one_example_in_shares_weights_and_steps(encode):
    rows = [conversation(turns, seed=turns) for turns in (1, 2, 3, 4)]
    assert len(encode(rows).rows_of_examples) == 4
    most = encode(rows, validation="0.25")
    assert len(most.rows_of_examples) == 3
    sizes = [len(of_one) for of_one in most.rows_of_examples]
    assert sum(sizes) == len(most)
    assert set(sizes) < {1, 2, 3, 4}
    twice = most.select_examples([0, 0, 2])
    assert [len(of_one) for of_one in twice.rows_of_examples] == [sizes[0], sizes[0], sizes[2]]
    joined = EncodedExamples.joined([twice, most])
    assert [len(of_one) for of_one in joined.rows_of_examples] == [sizes[0], sizes[0], sizes[2], *sizes]
    rule = rule_of(most, global_batch_size=2)
    assert (rule.num_examples, rule.steps_per_epoch) == (3, 2)
    seen = [row for step in range(2) for cut in rule.microbatches_of_step(0, step) for row in cut.rows]
    assert sorted(seen) == list(range(len(most)))


def losses_of(model: torch.nn.Module, examples: EncodedExamples, rule: Any) -> tuple[float, torch.Tensor]:
    """The loss and the gradient of an epoch's first step, as a run computes them."""
    loader = TrainLoader(examples, rule, DataLoaderKeys, rank=0, world_size=1, collate=pack)
    (step,) = loader.steps(0)
    model.zero_grad()
    total = 0.0
    for _, microbatch in step:
        loss = summed_cross_entropy(model, microbatch)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    return total, gradient


DataLoaderKeys = load_config(["data.path=a.jsonl", "model=phi_tiny"], task="finetune_lora").training


@pytest.mark.parametrize("max_tokens", [None, 400, 40])
def test_losses_and_gradients_are_those_of_each_turn_alone(encode, max_tokens):
    examples = encode([conversation(turns, seed=turns, thinking=8) for turns in (3, 5)])
    model = build_tiny(tiny_phi3_config(vocab_size=400, pad_token_id=0, bos_token_id=1, eos_token_id=1))
    alone = 0.0
    model.zero_grad()
    for row in range(len(examples)):
        loss = summed_cross_entropy(model, pack([examples[row]]))
        loss.backward()  # type: ignore[no-untyped-call]
        alone += loss.item()
    expected = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    limit = {} if max_tokens is None else {"max_tokens_per_microbatch": max_tokens}
    rule = rule_of(examples, global_batch_size=2, **limit)
    assert len(rule.microbatches_of_step(0, 0)) > (1 if max_tokens else 0)
    total, gradient = losses_of(model, examples, rule)
    assert abs(total - alone) <= 1e-6 * alone
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_ten_turns_compute_at_most_half_as_much_again_as_the_conversation_once(encode, tmp_path):
    keeps = TEMPLATE.read_text().replace(" and loop.index0 > last.question", "")
    (tmp_path / "keeps.jinja").write_text(keeps)
    for seed in range(5):
        row = conversation(10, seed=seed)
        examples = encode([row], max_length=8192)
        once = encode([row], train_on="all", chat_template=str(tmp_path / "keeps.jinja"), max_length=8192)
        computed = pack([examples[row] for row in range(10)]).num_computed
        assert computed <= 1.5 * len(once[0].input_ids)
        assert sum(examples.lengths.tolist()) > 2.5 * len(once[0].input_ids), "rows of their own would do as well"


def test_answers_stay_together_until_they_are_too_many_and_the_log_says_what_that_costs(encode, logged):
    examples = encode([conversation(4, seed=7), conversation(2, seed=8)], max_length=8192)
    config = load_config(["data.path=a.jsonl", "model=phi_tiny"], task="finetune_lora")
    together = rule_of(examples, global_batch_size=2, batch_size=1)
    assert sorted(cut.rows for cut in together.microbatches_of_step(0, 0)) == [[0, 1, 2, 3], [4, 5]]
    log_batches(config, together, num_steps=1, world_size=1)
    assert not any("exceed" in line for line in logged())
    most = max(cut.num_tokens for cut in together.microbatches_of_step(0, 0)) - 1
    apart = rule_of(examples, global_batch_size=2, max_tokens_per_microbatch=most)
    assert [sorted(unit) for unit in apart.units(0)] == [[0, 1, 2], [3]]
    assert apart.units(1) == [[4, 5]]
    log_batches(config, apart, num_steps=1, world_size=1)
    shared = sum(len(apart.tokens(row)) for row in (3,)) - (most + 1 - len(apart._tokens_of([0, 1, 2])))
    (line,) = [line for line in logged() if "exceed" in line]
    assert line.startswith(f"1 of 2 conversations exceed training.max_tokens_per_microbatch={most}: ")
    assert f"computes {shared:,} tokens of an epoch again" in line


def test_the_answers_of_a_conversation_are_packed_or_refused(encode):
    examples = encode([conversation(3, seed=0)])
    with pytest.raises(ConfigError, match=r"training\.packing is false, but data\.train_on=each_turn packs"):
        rule_of(examples, packing="false")
    assert rule_of(encode([conversation(1, seed=0)]), packing="false").num_examples == 1


def test_a_bad_conversation_counts_once(encode):
    rows = [conversation(3, seed=1), conversation(1, seed=2)]
    rows[0]["messages"][0]["content"] = "<|end|>"
    with pytest.raises(DataError, match="1 of 2 rows cannot be used"):
        encode(rows)


def test_rows_of_preferences_have_no_turns(make_section, write_jsonl):
    path = write_jsonl([{"prompt": f"{number}?", "chosen": "yes", "rejected": "no"} for number in range(3)])
    with pytest.raises(ConfigError, match=r"data.train_on is each_turn, but a row of preferences has one answer"):
        encode_preferences(make_section(path=path, train_on="each_turn"), tiny_tokenizer())
