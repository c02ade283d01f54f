"""GRPO with tools as whole runs: what is on record, exact resume, replay without the tools, and one curve."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import sys
from collections import Counter

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from finetune.cli.overrides import train_from_overrides
from finetune.errors import CheckpointError, ConfigError
from finetune.replay.steps import LOSS_BOUNDS, replay_losses
from tests import tiny_training
from tests.launches import run_command, run_launched
from tests.tiny_runs import write_base
from tests.tiny_training import contents, curve, record, refuse_to_differ_after_a_break, words_for
from tests.training.rewards.test_reward_runs import KILLED

pytestmark = [pytest.mark.warm, pytest.mark.process]

TOOL = '''
def stock(item: str) -> str:
    """Say how many there are.

    Args:
        item: The item.
    """
    if item != "crates":
        raise KeyError(item)
    return "three"
'''


def calling_rows():
    """Conversations in which the tool is called, with its description."""
    names: dict = {}
    exec(TOOL, names)
    call = {"type": "function", "function": {"name": "stock", "arguments": {"item": "crates"}}}
    answers = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "three"}]
    answers.append({"role": "assistant", "content": "three crates"})
    tools = [get_json_schema(names["stock"])]
    return [
        {"messages": [{"role": "user", "content": text}, *answers], "tools": tools} for text in questions("train", 12)
    ]


def questions(split, count):
    return [f"{split} {n}: crates to Porto?" for n in range(count)]


def write(file, rows):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A base that has learned to call the tool, though not always, and rows to learn from rewards."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "tools_of_a_run.py").write_text(TOOL)
    (folder / "random").mkdir()
    write_base(folder / "random/base", max_position_embeddings=512, sliding_window=None)
    write(folder / "random/rows/train.jsonl", calling_rows())
    for split, count in (("train", 12), ("validation", 3)):
        write(
            folder / f"rows/{split}.jsonl",
            [{"prompt": text, "completion": "three"} for text in questions(split, count)],
        )
    taught = folder / "taught"
    more = ["training.method=full", "training.max_steps=60", "optim.learning_rate=3e-2", "optim.warmup_steps=0"]
    more += ["data.chat_template=phi4_mini", "data.max_length=512", "checkpoint.save_every=60", "training.batch_size=8"]
    train_from_overrides([*words_for(folder / "random", taught), "task=finetune_lora", *more])
    shutil.copytree(taught / "adapter", folder / "base")
    return folder


def words(inputs, run, *more):
    return [
        *words_for(inputs, run),
        *("task=finetune_grpo", "reward.functions=token_f1,length", "lora.r=4", "data.chat_template=phi4_mini"),
        *("optim.learning_rate=1e-2", "data.max_length=512", f"rollout.tools={inputs / 'tools_of_a_run.py'}:stock"),
        *("training.global_batch_size=4", "training.batch_size=6", "optim.warmup_steps=0", "training.max_steps=4"),
        *("rollout.num_generations=4", "rollout.max_completion_length=160", "rollout.batch_size=8"),
        *("rollout.max_turns=3", "grpo.num_iterations=2"),
        *more,
    ]


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    train_from_overrides(words(inputs, run))
    return run


def rollout(run, step=1):
    return json.loads(gzip.decompress((run / f"rollouts/step-{step:06}.json.gz").read_bytes()))


def answers(run, step=1):
    return [answer for group in rollout(run, step)["groups"] for answer in group["answers"]]


def without_times(rollout):
    """A rollout without the seconds that calls took."""
    if isinstance(rollout, dict):
        return {key: without_times(value) for key, value in rollout.items() if key != "seconds"}
    return [without_times(value) for value in rollout] if isinstance(rollout, list) else rollout


def test_a_run_records_who_wrote_each_token_and_what_was_called(run):
    steps, first = curve(run), answers(run)
    calls = [call for answer in first for calls in answer["calls"] for call in calls]
    assert {call["text"] for call in calls if not call["failed"]} == {"three"}
    assert steps[0]["calls"] == len(calls) / 16 > 0
    assert steps[0]["failed_calls"] == sum(call["failed"] for call in calls) / len(calls) > 0
    assert steps[0]["turns"] == sum(len(answer["parts"][::2]) for answer in first) / 16 > 1
    assert steps[0]["truncated"] == sum(not answer["has_end"] for answer in first) / 16
    assert steps[0]["reward"] == steps[1]["reward"]
    assert (steps[0]["ratio"], steps[0]["clipped_ratio"]) == pytest.approx((1, 1), abs=1e-6)
    assert abs(steps[1]["clipped_ratio"] - 1) <= 0.2
    assert steps[1]["ratio"] != steps[1]["clipped_ratio"]
    for step in steps:
        assert step["drawn_ratio"] == pytest.approx(1, abs=1e-4)
        assert step["drawn_ratio"] <= step["largest_drawn_ratio"] == pytest.approx(1, abs=1e-3)
        for name in ("ratio", "largest_ratio", "clipped_ratio", "clipped", "drawn_ratio", "largest_drawn_ratio"):
            assert len(step[f"{name}_by_turn"]) in (2, 3)
        assert max(step["largest_ratio_by_turn"]) == step["largest_ratio"] >= step["ratio"]
        assert max(step["largest_drawn_ratio_by_turn"]) == step["largest_drawn_ratio"]
    assert steps[1]["largest_ratio"] > steps[1]["ratio"] + 1e-3, "it is the largest of this step"
    generated = [Counter(), Counter()]
    for answer in first:
        for turn, length in enumerate(answer["parts"][::2]):
            generated[bool(answer["advantage"])][turn] += length
    weighed = sum(mean * generated[1][turn] for turn, mean in enumerate(steps[1]["ratio_by_turn"]))
    assert weighed / generated[1].total() == pytest.approx(steps[1]["ratio"])
    ends = Counter(len(answer["parts"][::2]) for answer in first)
    of_ends = zip(steps[0]["reward_by_turn"], steps[0]["truncated_by_turn"], strict=True)
    rewards = {turn: both for turn, both in enumerate(of_ends, 1) if both != (None, None)}
    assert {*rewards} == {*ends}
    assert sum(rewards[turn][0] * ends[turn] for turn in ends) / 16 == pytest.approx(steps[0]["reward"])
    assert sum(rewards[turn][1] * ends[turn] for turn in ends) / 16 == pytest.approx(steps[0]["truncated"])
    several = [answer for answer in first if len(answer["parts"]) > 2]
    for answer in first:
        assert sum(answer["parts"]) == len(answer["ids"]) <= 160
        assert len(answer["texts"]) == len(answer["parts"])
        assert len(answer["sampled_nats"]) == sum(answer["parts"][::2])
        if answer["advantage"]:
            assert answer["sampled_nats"] == pytest.approx(answer["nats"], abs=1e-4), "at temperature 1, in fp32"
    assert any("<|tool_response|>three<|end|><|assistant|>" in answer["text"] for answer in several)
    assert steps[0]["num_targets"] == sum(sum(answer["parts"][::2]) for answer in first)


@pytest.mark.slow
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(run, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_training, "train", train_from_overrides)
    refuse_to_differ_after_a_break(words(inputs, tmp_path), run, tmp_path / "broken")
    for step in (1, 3):
        assert without_times(rollout(tmp_path / "broken", step)) == without_times(rollout(run, step))


@pytest.mark.slow
def test_the_shipped_example_is_killed_in_a_rollout_and_ends_with_the_bytes_of_the_whole_one(tmp_path):
    """It is killed while it generates the answers of the second rollout, to which no checkpoint belongs yet."""
    taught = ["training.method=full", "optim.learning_rate=2e-3", "training.max_steps=60", "testing.num_samples=0"]
    train_from_overrides(["quickstart", "data=shipped:calls.jsonl", *taught, f"output_dir={tmp_path / 'calls'}"])
    few = ["training.max_steps=5", "validation.validate_every=100", "checkpoint.save_every=4", "resume=auto"]
    few += ["training.global_batch_size=8", "rollout.num_generations=8"]
    given = ["grpo_tools_quickstart", f"model={tmp_path / 'calls/adapter'}", *few]
    train_from_overrides([*given, f"output_dir={tmp_path / 'whole'}"])
    assert curve(tmp_path / "whole")[4]["calls"] > 0
    killed = [*given, f"output_dir={tmp_path / 'killed'}"]
    script = tmp_path / "killed.py"  # a script: only scripts and modules start warm
    script.write_text(KILLED)
    first = sum(len(answer["parts"][::2]) for answer in answers(tmp_path / "whole"))
    done = run_command([sys.executable, script, "_until_stop", str(first + 30), *killed])
    assert done.returncode == -signal.SIGKILL, done.stdout
    assert [path.name for path in sorted((tmp_path / "killed/rollouts").iterdir())] == ["step-000001.json.gz"]
    train_from_overrides(killed)
    assert contents(tmp_path / "killed/adapter") == contents(tmp_path / "whole/adapter")
    for step in (1, 5):
        assert without_times(rollout(tmp_path / "killed", step)) == without_times(rollout(tmp_path / "whole", step))


@pytest.mark.slow
def test_a_replay_needs_no_tool_and_other_tools_are_refused_on_resume(run, inputs, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    file = inputs / "tools_of_a_run.py"
    file.write_text(TOOL.replace("Say how", "Tell how"))
    with pytest.raises(CheckpointError, match=r"rollout\.tool_schemas: started with"):
        train_from_overrides(words(inputs, copied, "training.max_steps=6", "resume.allow=training.max_steps"))
    file.unlink()
    try:
        again = replay_losses(run, 3)
    finally:
        file.write_text(TOOL)
    assert (again.mismatches, again.bound) == ([], LOSS_BOUNDS["fp32"])


@pytest.mark.slow
def test_one_curve_over_processes_and_cuts(run, inputs, tmp_path):
    done = run_launched("torchrun", ["-m", "finetune", "train", *words(inputs, tmp_path / "two")])
    assert done.returncode == 0, done.stdout
    assert record(tmp_path / "two")["world_size"] == 2
    train_from_overrides(words(inputs, tmp_path / "cut", "training.batch_size=1", "training.packing=false"))
    for other in ("two", "cut"):
        for mine, theirs in zip(curve(run), curve(tmp_path / other), strict=True):
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5, abs=1e-6)
            assert (theirs["reward"], theirs["calls"]) == (mine["reward"], mine["calls"])


def test_files_cannot_name_tools(inputs, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"rollout:\n  tools: ['{inputs / 'tools_of_a_run.py'}:stock']\n")
    given = [each for each in words(inputs, tmp_path / "run") if "rollout.tools" not in each]
    with pytest.raises(ConfigError, match="tools would run here, so only the command line may allow it"):
        train_from_overrides([str(file), *given])


GAME = """
class Order:
    def reset(self, row):
        self.answers = 0
        return [{"role": "user", "content": "Look."}] if "train" in row["prompt"] else None

    def step(self, answer):
        self.answers += 1
        return "crates?" if self.answers == 1 else None

    def score(self):
        return self.answers
"""


@pytest.mark.slow
def test_an_environment_opens_a_conversation_and_answers_it_and_the_steps_replay(inputs, tmp_path):
    (tmp_path / "order.py").write_text(GAME)
    run, game = tmp_path / "run", f"rollout.environment={tmp_path / 'order.py'}:Order"
    more = [game, "reward.functions=environment,length", "training.max_steps=2", "validation.validate_every=2"]
    train_from_overrides(words(inputs, run, *more))
    first = answers(run)
    played = [answer for answer in first if "<|user|>crates?<|end|><|assistant|>" in answer["text"]]
    assert played, [answer["text"] for answer in first]
    for answer in first:
        assert answer["rewards"]["environment"] in (0, 1, 2)
        assert len(answer["sampled_nats"]) == sum(answer["parts"][::2])
        if answer["advantage"]:
            assert answer["sampled_nats"] == pytest.approx(answer["nats"], abs=1e-4), "its own prompt is computed"
    group = rollout(run)["groups"][0]
    assert len(group["answers"][0]["prompt"]) > len(group["prompt"])
    (tmp_path / "order.py").unlink()
    assert replay_losses(run, 2).mismatches == []
    assert [each["what"] for each in record(run)["fallbacks"]] == ["rollout.environment"]
