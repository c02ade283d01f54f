"""GRPO as whole runs: exact on resume, one curve, rollouts on record, and checks that say what to do."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shutil
import signal
import sys
from functools import cache

import pytest
import torch

from finetune.cli.overrides import train_from_overrides
from finetune.errors import CheckpointError, ConfigError, DataError, RunFailedError
from finetune.inference.decoding import sample_answers
from finetune.replay.steps import LOSS_BOUNDS, replay_losses
from finetune.runs import rollouts as recorded_rollouts
from finetune.runs.folder import RunFolder
from finetune.training import training_run
from finetune.training.rewards import drawn
from finetune.training.rewards import rollouts as rollouts_module
from finetune.training.rewards.groups import METRICS
from finetune.training.step import StepTooLargeError
from tests import tiny_training
from tests.in_process import run_finetune
from tests.launches import run_command, run_launched
from tests.tiny_runs import write_base
from tests.tiny_training import (
    break_at,
    contents,
    curve,
    events,
    record,
    refuse_to_differ_after_a_break,
    words_for,
)

pytestmark = pytest.mark.warm

ROLLOUT = ("reward", "reward_std", "reward_regex", "equal_groups", "answer_length", "truncated")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base")
    (folder / "rows").mkdir()
    for split, count in (("train", 12), ("validation", 3)):
        rows = [{"prompt": f"{split} {n}: three crates to Porto by Friday?", "limit": n} for n in range(count)]
        (folder / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "turns.jsonl").open("w") as file:
        for name in ("Porto", "Lagos"):
            texts = ("Hello.", "Hi.", f"{'Here is a long list. ' * 20}How many crates to {name}?", "three")
            turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
            file.write(json.dumps({"messages": turns}) + "\n")
    return folder


def words(inputs, run, *more):
    return [
        *words_for(inputs, run),
        *("task=finetune_grpo", "reward.functions=regex", "reward.pattern=[^aet]*", "lora.r=4"),
        "optim.learning_rate=3e-2",
        *("training.global_batch_size=4", "training.batch_size=6", "optim.warmup_steps=0", "training.max_steps=6"),
        *("rollout.num_generations=4", "rollout.max_completion_length=8", "rollout.batch_size=6"),
        *more,
    ]


WAYS = {"once": (), "twice": ("grpo.num_iterations=2", "grpo.beta=0.05", "lora.dropout=0.1")}


@pytest.fixture(scope="module")
def run_of(inputs, tmp_path_factory):
    """The run of a way, which is trained when it is first asked for."""

    @cache
    def train(way):
        run = tmp_path_factory.mktemp(way) / "run"
        train_from_overrides(words(inputs, run, *WAYS[way]))
        return run

    return train


@pytest.fixture(params=WAYS)
def trained(request, run_of):
    return request.param, run_of(request.param)


def rollouts(run):
    return {path.name: path.read_bytes() for path in sorted((run / "rollouts").iterdir())}


def test_a_run_learns_and_records_its_figures(trained):
    way, run = trained
    steps, validations = curve(run), events(run, "validation")
    assert {*ROLLOUT, "drawn_entropy", *METRICS[: 3 if way == "twice" else 2]} <= steps[0].keys()
    assert validations[-1]["reward"] == pytest.approx(-validations[-1]["loss"])
    assert list(rollouts(run)) == [f"step-{step:06}.json.gz" for step in ((1, 3, 5) if way == "twice" else range(1, 7))]
    if way == "twice":
        assert steps[0]["kl"] == 0, "an untrained adapter is the base"
        assert steps[0]["reward"] == steps[1]["reward"]


@pytest.mark.few(1)
def test_rollouts_are_on_record(trained):
    way, run = trained
    first = json.loads(gzip.decompress((run / "rollouts/step-000001.json.gz").read_bytes()))
    assert [len(group["answers"]) for group in first["groups"]] == [4] * 4
    answers = [answer for group in first["groups"] for answer in group["answers"]]
    assert sum(answer["rewards"]["regex"] for answer in answers) / 16 == pytest.approx(curve(run)[0]["reward"])
    assert all(("nats" in answer) == (way == "twice") for answer in answers if answer["advantage"])
    for answer in answers:
        assert len(answer["sampled_nats"]) == len(answer["ids"])
        if way == "twice" and answer["advantage"]:
            assert answer["sampled_nats"] == pytest.approx(answer["nats"], abs=1e-4), "at temperature 1, in fp32"
    again = replay_losses(run, 3)
    assert (again.mismatches, again.bound) == ([], LOSS_BOUNDS["fp32"])


@pytest.mark.few(1)
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(trained, inputs, tmp_path, monkeypatch):
    way, run = trained
    monkeypatch.setattr(tiny_training, "train", train_from_overrides)
    refuse_to_differ_after_a_break(words(inputs, tmp_path, *WAYS[way]), run, tmp_path / "broken")
    assert rollouts(tmp_path / "broken") == rollouts(run)


KILLED = """
import itertools, os, signal, sys
from finetune.cli.overrides import train_from_overrides
from finetune.inference import decoding
from finetune.training import training_run
from finetune.training.rewards import rollouts

place, call, *words = sys.argv[1:]
module = {"_until_stop": decoding, "write_rollout": rollouts}.get(place, training_run)
whole, calls = getattr(module, place), itertools.count(1)

def dying(*given, **named):
    found = whole(*given, **named)
    if next(calls) == int(call):
        os.kill(os.getpid(), signal.SIGKILL)
    return found

setattr(module, place, dying)
train_from_overrides(words)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "place", "call"),
    [("once", "_until_stop", 40), ("twice", "write_rollout", 2), ("twice", "train_step", 3)],
    indirect=["trained"],
)
def test_a_killed_run_ends_with_the_bytes_of_the_whole_one(trained, inputs, tmp_path, place, call):
    """While it generates answers, with a rollout that no step has learned from, and in an update."""
    way, run = trained
    given = words(inputs, tmp_path / "killed", *WAYS[way])
    script = tmp_path / "killed.py"  # a script: only scripts and modules start warm
    script.write_text(KILLED)
    done = run_command([sys.executable, script, place, str(call), *given])
    assert done.returncode == -signal.SIGKILL, done.stdout
    train_from_overrides(given)
    assert contents(tmp_path / "killed/adapter") == contents(run / "adapter")
    assert rollouts(tmp_path / "killed") == rollouts(run)


@pytest.mark.slow
def test_rewards_rise(inputs, tmp_path):
    """Four tenths of the answers are rewarded at first. The mean of 64 rewards has a standard error of 0.06."""
    more = ["training.max_steps=24", "rollout.num_generations=16", "training.batch_size=64", "rollout.batch_size=64"]
    more += ["training.method=full", "optim.learning_rate=1e-2"]  # the random base has a head that no adapter moves
    train_from_overrides(words(inputs, tmp_path / "run", *more, "checkpoint.save_every=24"))
    rewards = [step["reward"] for step in curve(tmp_path / "run")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2, rewards


@pytest.mark.slow
def test_a_run_has_one_curve_however_it_is_cut_and_computed(inputs, tmp_path):
    for name, more in {"one": (), "other": ("training.batch_size=1", "training.kernels=reference")}.items():
        train_from_overrides(words(inputs, tmp_path / name, "grpo.num_iterations=2", *more))
    refuse_to_differ(tmp_path / "one", tmp_path / "other")


@pytest.mark.slow
def test_answers_that_are_too_many_for_memory_are_cut_and_not_generated_again(run_of, inputs, tmp_path, monkeypatch):
    run = run_of("once")
    whole, attempts = training_run.train_step, itertools.count(1)

    def too_large(*given, **named):
        if named["may_be_too_large"] and next(attempts) == 1:
            raise StepTooLargeError(None)
        return whole(*given, **named)

    monkeypatch.setattr(training_run, "train_step", too_large)
    train_from_overrides(words(inputs, tmp_path / "cut"))
    assert next(attempts) == 3
    assert "out of memory in step 1, which is tried again" in (tmp_path / "cut/log.txt").read_text()
    refuse_to_differ(run, tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "launcher", "way"),
    [
        ("twice", "torchrun", "parallel.sharding=fsdp2"),
        ("once", "torchrun_4", "parallel.gradient_sync=flat"),
    ],
    indirect=["trained"],
)
def test_several_processes_have_the_curve_of_one(trained, inputs, tmp_path, launcher, way):
    name, run = trained
    two = tmp_path / "several"
    done = run_launched(launcher, ["-m", "finetune", "train", *words(inputs, two, *WAYS[name]), way])
    assert done.returncode == 0, done.stdout
    assert record(two)["world_size"] == (4 if launcher == "torchrun_4" else 2)
    refuse_to_differ(run, two)
    assert sampled_nats(two) == pytest.approx(sampled_nats(run), abs=1e-4)


def sampled_nats(run):
    first = json.loads(gzip.decompress((run / "rollouts/step-000001.json.gz").read_bytes()))
    return [nat for group in first["groups"] for answer in group["answers"] for nat in answer["sampled_nats"]]


def refuse_to_differ(one, other):
    for mine, theirs in zip(curve(one), curve(other), strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5, abs=1e-6)
        assert [theirs[name] for name in ROLLOUT] == [mine[name] for name in ROLLOUT]
    for mine, theirs in zip(events(one, "validation"), events(other, "validation"), strict=True):
        assert theirs["loss"] == mine["loss"]


@pytest.mark.slow
def test_a_function_of_ones_own_gets_columns_and_is_not_called_by_a_replay(inputs, tmp_path, monkeypatch):
    (tmp_path / "rewards_of_a_test.py").write_text(
        "def solves(prompts, completions, completion_ids, limit, expected, **columns):\n"
        "    assert expected == [''] * len(limit) and columns == {} and prompts[0].endswith('Friday?')\n"
        "    return [float((n + sum(ids)) % 2) for n, ids in zip(limit, completion_ids)]\n"
    )
    run, own = tmp_path / "run", ["reward.functions=rewards_of_a_test.solves", "reward.pattern=null"]
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        train_from_overrides(words(inputs, run, *own, "reward.functions_from=rewards_of_a_test"))
    del sys.modules["rewards_of_a_test"]
    assert {"reward", "reward_solves"} <= curve(run)[0].keys()
    assert record(run)["fingerprints"]["reward.functions"].startswith("rewards_of_a_test.py ")
    log = (run / "log.txt").read_text()  # the rows are read once more for their columns, which is not told again
    assert log.count("columns for reward functions: limit") == 2, "one line for each split"
    again = replay_losses(run, 2)
    assert (again.mismatches, again.bound) == ([], LOSS_BOUNDS["fp32"])
    assert "rewards_of_a_test" not in sys.modules


@pytest.mark.slow
def test_a_function_in_a_file_is_found_when_the_run_resumes_and_not_needed_afterwards(inputs, tmp_path, monkeypatch):
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text("def sums(completion_ids, **columns): return [float(sum(ids) % 7) for ids in completion_ids]\n")
    (tmp_path / "elsewhere").mkdir()
    own = ["reward.pattern=null", "optim.schedule=constant"]
    for folder, path, steps in ((tmp_path, "mine.py", 2), (tmp_path / "elsewhere", "../mine.py", 4)):
        monkeypatch.chdir(folder)
        more = [f"reward.functions={path}:sums", f"training.max_steps={steps}", "resume=auto"]
        train_from_overrides(words(inputs, run, *own, *more))
    assert [step["step"] for step in curve(run)] == [1, 2, 3, 4]
    assert {"reward", "reward_sums"} <= curve(run)[-1].keys()
    assert f"functions_from: [{file}]" in (run / "config.yaml").read_text()
    rows = shutil.copytree(inputs / "rows", tmp_path / "rows")
    text = (rows / "train.jsonl").read_text()
    (rows / "train.jsonl").write_text(text.replace('"limit": 3', '"limit": 4'))
    with pytest.raises(CheckpointError, match=r"data: started with rows .*\(all columns\): .*which reward functions"):
        train_from_overrides(words(inputs, run, *own, *more, f"data.path={rows}"))
    digest = record(run)["fingerprints"]["reward.functions"]
    file.write_text(f"{file.read_text()}\nCHANGED = True\n")
    changed = rf"started with {digest}, now mine\.py .* \(digests of whole files, comments included\): the rewards"
    with pytest.raises(CheckpointError, match=rf"reward\.functions: {changed}\n.*resume\.allow=reward\.functions"):
        train_from_overrides(words(inputs, run, *own, *more))
    accepted = shutil.copytree(run, tmp_path / "accepted")
    for allowed in (["resume.allow=reward.functions"], []):  # the second start is compared with the accepted code
        train_from_overrides(words(inputs, accepted, *own, *more, *allowed))
    file.unlink()
    assert replay_losses(run, 2).mismatches == []
    run_finetune("generate", run, "Hello", "--max-new-tokens", "1", code=0)


@pytest.mark.slow
def test_a_function_that_fails_loses_no_step(inputs, tmp_path):
    file, run = tmp_path / "brittle.py", tmp_path / "run"
    source = "calls = []\ndef solves(completion_ids, **columns):\n    calls.append(1)\n"
    source += "    return [sum(ids) % 7 / DIVISOR for ids in completion_ids]\n"
    file.write_text(source.replace("DIVISOR", "(4 - len(calls))"))
    asked = words(inputs, run, f"reward.functions={file}:solves", "reward.pattern=null", "resume=auto")
    with pytest.raises(DataError, match=r"the reward function brittle\.solves failed on .*: ZeroDivisionError"):
        train_from_overrides(asked)
    assert (run / "checkpoints" / "step-000003").is_dir(), "training.save_every is 2"
    file.write_text(source.replace("DIVISOR", "3"))
    with pytest.raises(CheckpointError, match=r"resume\.allow=\[?reward\.functions"):
        train_from_overrides(asked)
    train_from_overrides([*asked, "resume.allow=reward.functions"])
    assert [row["step"] for row in curve(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_function_that_holds_the_interpreters_lock_is_ended_in_time(inputs, tmp_path):
    """No thread of the process runs meanwhile: neither a deadline in Python nor SIGTERM would end it."""
    # It waits for a lock of C that it has already, which no signal but SIGKILL ends, and takes no processor time.
    waits = (
        "lock, both = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock; both(lock); both(lock)"
    )
    holds = waits if sys.platform == "linux" else "sum(range(10**15))"
    (tmp_path / "rewards_of_a_test.py").write_text(
        f"import ctypes\ndef counts(completions, **columns):\n    {holds}\n    return [0.0] * len(completions)\n"
    )
    function = "rewards_of_a_test.counts"
    own = ["reward.functions_from=rewards_of_a_test", "reward.pattern=null"]
    given = words(inputs, tmp_path / "run", f"reward.functions={function}", *own)
    command = [sys.executable, "-m", "finetune", "train", *given, "reward.timeout_seconds=1"]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = run_command([*command, "rollout.max_completion_length=40"], variables={"PYTHONPATH": path}, limit_seconds=60)
    assert done.returncode == 3, done.stdout
    sentence = f"the reward function {function} has not returned after 1 s for 16 answers, the first to "
    assert f"finetune stops: {sentence}" in done.stdout
    assert sentence in record(tmp_path / "run")["result"]["error"]
    assert record(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_a_run_that_made_no_update_over_all_its_starts_is_no_success(inputs, tmp_path, monkeypatch):
    run, equal = tmp_path / "run", ["reward.pattern=never", "checkpoint.save_every=2"]
    nothing = (
        r"has learned nothing: the gradient was zero in 3 of its 3 steps, and not finite in 0. No answer had a reward"
    )
    with monkeypatch.context() as patch:
        break_at(patch, 3)
        with pytest.raises(RuntimeError, match="power cut"):
            train_from_overrides(words(inputs, run, *equal, "training.max_steps=3"))
    for _ in ("trains step 3", "trains nothing"):
        with pytest.raises(RunFailedError, match=nothing):
            train_from_overrides(words(inputs, run, *equal, "training.max_steps=3"))
    steps, log = curve(run), (run / "log.txt").read_text()
    assert [(step["equal_groups"], step["grad_norm"]) for step in steps] == [(1, 0)] * 3
    assert "entropy" not in steps[0], "no token was computed"
    assert steps[0]["drawn_entropy"] > 0, "that of all answers, whatever their rewards"
    assert log.count("wanted an update, using none: the gradient was zero") == 2, "once for each start"
    assert record(run)["status"] == "failed"
    assert RunFolder(run).checkpoint_steps() == [2, 3]
    assert not RunFolder(run).adapter.exists()

    allowed = ["resume.allow=training.max_steps,reward", "reward.pattern=[^aet]*"]
    train_from_overrides(words(inputs, run, *allowed, "checkpoint.save_every=2"))
    assert record(run)["status"] == "completed", "later steps have made an update"


@pytest.mark.slow
def test_a_learning_rate_of_0_asks_for_no_update_and_strict_refuses_a_step_without_one(inputs, tmp_path):
    more = ["reward.pattern=never", "training.max_steps=1"]
    train_from_overrides(words(inputs, tmp_path / "run", *more, "optim.learning_rate=0"))
    assert record(tmp_path / "run")["fallbacks"] == []
    with pytest.raises(ConfigError, match=r"step 1: wanted an update, using none: .* The run is strict"):
        train_from_overrides(words(inputs, tmp_path / "strict", *more, "strict=true"))


def as_in_0_2_0(answer):
    """Before 0.3.0, answers that are not in the loss had zeros."""
    return {"nats": [0.0] * len(answer["ids"])} | answer


REWRITTEN = {"grpo": as_in_0_2_0, "grpo.epsilon": lambda answer: answer | {"parts": [1, 1, len(answer["ids"]) - 2]}}
"""Answers as an earlier version recorded them, and those of an environment, by the change that is made."""


def rewrite_rollout(file, change):
    rollout = json.loads(gzip.decompress(file.read_bytes()))
    for group in rollout["groups"]:
        group["answers"] = list(map(change, group["answers"]))
    if change is as_in_0_2_0:
        del rollout["temperature"]
    file.write_bytes(gzip.compress(json.dumps(rollout).encode()))


@pytest.mark.slow
def test_a_lost_rollout_or_one_of_other_prompts_ends_a_resume_that_needs_it(inputs, tmp_path):
    more = ["grpo.num_iterations=2", "checkpoint.save_every=3"]
    train_from_overrides(words(inputs, tmp_path / "run", *more, "training.max_steps=3"))
    for change, key, problem in (
        ("seed=7", "seed", "has answers to other prompts than this configuration asks for"),
        ("reward.functions=regex,length", "reward", "has no rewards of length, which reward.functions names"),
        ("rollout.num_generations=2", "rollout", "does not have 2 answers to each prompt"),
        (
            "rollout.temperature=0.5",
            "rollout.temperature",
            r"has log-probabilities at rollout\.temperature=1, not 0\.5",
        ),
        ("grpo.beta=0.1", "grpo.beta", r"has no log-probabilities of \d+ answers that this configuration learns from"),
        ("grpo.beta=0.1", "grpo", r"has no log-probabilities of \d+ answers that this configuration learns from"),
        ("grpo.epsilon=0.3", "grpo.epsilon", r"has answers of 2 turns, more than this configuration allows"),
    ):
        changed = shutil.copytree(tmp_path / "run", tmp_path / key)
        allowed = [change, f"resume.allow={key},training.max_steps"]
        rewrite_rollout(changed / "rollouts/step-000003.json.gz", REWRITTEN.get(key, dict))
        with pytest.raises(CheckpointError, match=rf"step-000003\.json\.gz {problem}.* Step 3 learns from it\. To gen"):
            train_from_overrides(words(inputs, changed, *more, *allowed))
        assert [step["step"] for step in curve(changed)] == [1, 2, 3]
    (tmp_path / "run/rollouts/step-000003.json.gz").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"step-000003\.json\.gz cannot be read"):
        train_from_overrides(words(inputs, tmp_path / "run", *more, "resume.allow=training.max_steps"))


def test_a_rollout_s_file_is_not_unpacked_without_a_limit(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    recorded_rollouts.write_rollout(folder, {"step": 1, "groups": []})
    assert recorded_rollouts.read_rollout(folder, 1) == {"step": 1, "groups": []}
    monkeypatch.setattr(recorded_rollouts, "MOST_UNPACKED_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"unpacks to more than 10 B\. Step 1 learns from it"):
        recorded_rollouts.read_rollout(folder, 1)


def test_a_rollout_of_a_file_whose_name_is_not_utf_8_is_recorded(tmp_path):
    rollout = {"step": 1, "groups": [{"source": "s\udcff.jsonl:1", "text": "C:\\é"}]}
    recorded_rollouts.write_rollout(RunFolder(tmp_path), rollout)
    assert recorded_rollouts.read_rollout(RunFolder(tmp_path), 1) == rollout


def test_a_rollout_that_is_generated_again_removes_later_ones(tmp_path):
    """They were drawn with weights that learned from the answers that are gone."""
    folder = RunFolder(tmp_path)
    for step in (1, 3, 5):
        recorded_rollouts.write_rollout(folder, {"step": step, "groups": []})
    assert folder.rollout_steps() == [1, 3, 5]
    recorded_rollouts.write_rollout(folder, {"step": 3, "groups": [{}]})
    assert folder.rollout_steps() == [1, 3]
    assert recorded_rollouts.read_rollout(folder, 3)["groups"] == [{}]


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (["reward.functions=[]", "reward.pattern=null"], ConfigError, "reward.functions is empty"),
        (["reward.functions=exact_match", "reward.pattern=null"], DataError, "12 rows have none; the first is"),
        (["data.max_length=4"], DataError, "data.max_length"),
        (
            ["data.path={inputs}/turns.jsonl", "data.max_length=64"],
            DataError,
            r"cuts the prompt or the expected answer of 2 rows: .*turns\.jsonl:1 \(\d+ tokens\)",
        ),
        (["training.objective=sft"], ConfigError, "but training.objective is sft, which does not read it"),
        (["validation.metrics=exact_match"], ConfigError, "have no expected answer"),
        (["checkpoint.best_metric=reward_margin"], ConfigError, "measures loss, reward"),
        (["grpo.beta=0.1", "training.method=full"], ConfigError, "Set training.method=lora or grpo.beta=0"),
    ],
)
def test_a_run_that_cannot_learn_from_rewards_is_refused(inputs, tmp_path, more, error, message):
    more = [override.format(inputs=inputs) if "{inputs}" in override else override for override in more]
    with pytest.raises(error, match=message):
        train_from_overrides(words(inputs, tmp_path / "run", *more))


TOP_K = 5


def with_nats(answer, prompt, model, temperature=1.0, top_k=None):
    """The answer with log p by transformers' own forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer.ids]])).logits[0, len(prompt) - 1 : -1]
    if top_k is not None:
        logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
    nats = -(logits / temperature).log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    return answer._replace(nats=nats.tolist())


def colder(answers, prompts, model):
    """The sampler reports log p at a temperature of 0.7."""
    return (with_nats(*pair, model, 0.7) for pair in zip(answers, prompts, strict=True))


def filtered(answers, prompts, model):
    """The sampler reports log p among the tokens that a filter left."""
    return (with_nats(*pair, model, top_k=TOP_K) for pair in zip(answers, prompts, strict=True))


def other_weights(answers, prompts, model):
    """The sampler has other weights."""
    return (answer._replace(nats=[nats + 0.4 * (-1) ** n for n, nats in enumerate(answer.nats)]) for answer in answers)


DRAWN = {
    "precision": (None, "Cause: the precision. .* those drawn are further from fp32"),
    "temperature": (colder, "Cause: the temperature. They are those at a temperature of about 0.7"),
    "filter": (filtered, "Cause: probably top_p or top_k"),
    "weights": (other_weights, "the sampler has other weights, or reads other tokens"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", DRAWN)
def test_log_probabilities_that_are_not_the_runs_own_are_explained(name, inputs, tmp_path, monkeypatch):
    change, cause = DRAWN[name]

    def sample(model, prompts, decoding, **others):
        with torch.autocast("cpu", torch.bfloat16, enabled=change is None):
            answers = sample_answers(model, prompts, decoding, **others)
        return answers if change is None else list(change(answers, prompts, model))

    monkeypatch.setattr(rollouts_module, "sample_answers", sample)
    if change is None:
        monkeypatch.setitem(drawn.LARGEST_DIFFERENCES, "fp32", 1e-3)
    run = tmp_path / "run"
    more = (
        "training.max_steps=1",
        "reward.functions=regex,length",
        "data.validation=null",
        "rollout.max_completion_length=16",
        f"rollout.top_k={TOP_K if change is filtered else 0}",
    )
    train_from_overrides(words(inputs, run, "model=phi_tiny", *more))
    (warning,) = (event["text"] for event in events(run, "warning") if event["kind"] == "drawn")
    assert re.search(cause, warning), warning
    first = re.search(r"in fp32: '.*?' ([\d.]+), ([\d.]+), ([\d.]+);", warning)
    told, own, exact = map(float, first.groups())
    assert own == pytest.approx(exact, abs=1e-3)
    assert abs(told - own) > 1e-3
