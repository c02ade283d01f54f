"""A real vLLM server: answers with each step's adapter, a server that is gone meanwhile, and served models compared.

FINETUNE_VLLM is the Python of an environment that has vLLM; docs/tasks/rewards.md says how to make one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from itertools import chain

import pytest

from finetune.cli.overrides import train_from_overrides
from finetune.errors import ConfigError, RunFailedError
from finetune.export.served_comparison import CHECKS, compare
from finetune.export.vectors import read_vectors
from finetune.export.verifying import verify_run
from finetune.export.vllm_served import InVllm, served_by_vllm
from finetune.inference.vllm_server import VllmServer
from finetune.training.rewards import rollout_server
from finetune.training.rewards.conversations import parts_of
from tests.in_process import run_finetune
from tests.launches import REPOSITORY, free_port, run_launched, start_command
from tests.replay.scene import edit_json
from tests.tiny_runs import write_base
from tests.tiny_training import break_at, curve
from tests.training.rewards.test_tool_runs import TOOL, calling_rows, rollout, write
from tests.warm import warm_environment

BASE = REPOSITORY / "finetune/assets/phi_tiny"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.warm,
    pytest.mark.skipif("FINETUNE_VLLM" not in os.environ, reason="vLLM: not installed; FINETUNE_VLLM names its Python"),
]
ROUNDING = 1e-4
"""Both compute in fp32. A product of 1,000 numbers is off by 1e-6 of its size, and logits are below 30."""


class Served:
    """A vLLM server that can be killed and started again at its address."""

    def __init__(self, folder):
        self.port, self.folder = free_port(), folder
        self.url = f"http://localhost:{self.port}"
        self.start()

    def start(self):
        words = ["--model", BASE, "--port", str(self.port), "--enable-lora", "--max-lora-rank", "16"]
        words += ["--num-gpu-blocks-override", "64"]  # room for four prompts as long as the model allows
        words += ["--dtype", "float32", "--enforce-eager"]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "HF_HUB_OFFLINE": "1"}
        with (self.folder / "vllm.log").open("a") as log:
            self.process = subprocess.Popen(
                [os.environ["FINETUNE_VLLM"], "-m", "vllm.entrypoints.openai.api_server", *words],
                env={**os.environ, **settings, "PYTHONPATH": "", "VLLM_NO_USAGE_STATS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self):
        for _ in range(600):
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            assert self.process.poll() is None, (self.folder / "vllm.log").read_text()[-3000:]
            time.sleep(1)
        raise AssertionError((self.folder / "vllm.log").read_text()[-3000:])

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(autouse=True, scope="module")
def _servers_are_warm():
    """A cold one imports vLLM three times."""
    with warm_environment("FINETUNE_VLLM"):
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("vllm"))
    served.wait()
    yield served
    served.kill()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for split, count in (("train", 12), ("validation", 2)):
        text = (json.dumps({"prompt": f"{split} {n}: three crates to Porto by Friday?"}) for n in range(count))
        (folder / f"{split}.jsonl").write_text("\n".join(text))
    return folder


def words(server, rows, run, *more):
    return [
        *("model=phi_tiny", "task=finetune_grpo", f"data.train={rows}/train.jsonl", f"output_dir={run}"),
        f"data.validation={rows}/validation.jsonl",
        *("reward.functions=length", "lora.r=4", "optim.learning_rate=3e-2", "optim.warmup_steps=0"),
        *("training.global_batch_size=2", "training.max_steps=4", "checkpoint.save_every=4", "resume=auto"),
        *("rollout.num_generations=4", "rollout.max_completion_length=8", f"rollout.server={server.url}"),
        f"rollout.max_difference={ROUNDING}",
        *more,
    ]


@pytest.fixture(scope="module")
def trained(server, rows, tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    train_from_overrides(words(server, rows, run))
    return run


def test_the_server_samples_with_each_steps_adapter(server, rows, trained, tmp_path):
    more = ("rollout.temperature=0.7", "rollout.top_k=50", "rollout.top_p=0.9")
    train_from_overrides(words(server, rows, tmp_path / "filtered", *more))
    for run in (trained, tmp_path / "filtered"):
        steps = curve(run)
        assert len(steps) == 4
        assert all(step["server_difference"] < ROUNDING for step in steps if not step["equal_groups"])
        assert not (run / "rollouts/adapter").exists()


BARE_CALLS = (
    "{% if tools %}{{ '<|tool|>' + tools | tojson + '<|/tool|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}{{ c['function'] | tojson }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""An adapter of phi_tiny cannot teach it the marks of calls: it has never seen these tokens. JSON it has seen."""


def test_conversations_with_a_tool_come_from_the_server(server, rows, tmp_path, monkeypatch):
    """An adapter that mostly calls the tool is what the run starts from. Each request continues an earlier one."""
    (tmp_path / "template.jinja").write_text(BARE_CALLS)
    (tmp_path / "tools_of_a_run.py").write_text(TOOL)
    calling = calling_rows()
    for number, row in enumerate(calling):  # last answers of different lengths, so that rewards differ
        row["messages"][-1]["content"] = " ".join(["three crates", "to Porto", "by Friday"][: 1 + number % 3])
    write(tmp_path / "calls.jsonl", calling)
    alike = ("lora.r=4", f"data.chat_template={tmp_path / 'template.jinja'}", "data.max_length=512")
    taught = [f"data.train={tmp_path / 'calls.jsonl'}", f"output_dir={tmp_path / 'taught'}", "training.max_steps=40"]
    taught += ["model=phi_tiny", "task=finetune_lora", "optim.learning_rate=1e-2", "optim.warmup_steps=0"]
    train_from_overrides([*taught, "training.batch_size=4", "training.global_batch_size=4", *alike])

    sample, asked = VllmServer._sample, []

    def spy(self, model, prompt, *others):
        answers = sample(self, model, prompt, *others)
        asked.append((list(prompt), [answer.ids for answer in answers]))
        return answers

    monkeypatch.setattr(VllmServer, "_sample", spy)
    run, tool = tmp_path / "run", f"rollout.tools={tmp_path / 'tools_of_a_run.py'}:stock"
    more = (f"lora.start_from={tmp_path / 'taught'}", "optim.learning_rate=2e-4", "training.max_steps=3")
    more += ("rollout.max_completion_length=96", "rollout.max_turns=3")
    train_from_overrides(words(server, rows, run, *more, *alike, tool))
    steps, count = curve(run), 0
    assert len(steps) == 3
    learnt = [step for step in steps if step["equal_groups"] < 1]  # which of them are is up to the CPU's rounding
    assert learnt
    for step in learnt:
        assert step["server_difference"] < ROUNDING
        assert [step["drawn_ratio"], step["ratio"]] == pytest.approx([1, 1], abs=ROUNDING)
        assert len(step["drawn_ratio_by_turn"]) > 1
    for step in steps:
        assert step["calls"] > step["failed_calls"] * step["calls"]
        groups = rollout(run, step["step"])["groups"]
        for ids, answer in ((group["prompt"], answer) for group in groups for answer in group["answers"]):
            parts = parts_of(answer["ids"], answer["parts"])
            for place in range(0, len(parts), 2):
                head = [*ids, *chain(*parts[:place])]
                answers = [each for prompt, given in asked for each in given if prompt == head]
                assert answers, "each request is the prompt with all that was generated and appended before"
                # The last answer may be cut at max_completion_length.
                assert any(each[: len(parts[place])] == parts[place] for each in answers)
            assert len(answer["sampled_nats"]) == sum(answer["parts"][::2])
            count += len(parts) > 2
            assert {call["text"] for calls in answer["calls"] for call in calls if not call["failed"]} <= {"three"}
    assert count > 0
    done = run_finetune("verify", run, "--replay", "2")
    assert done.returncode == 0, done.stdout


def test_a_server_with_an_earlier_adapter_is_named(server, rows, tmp_path, monkeypatch):
    whole, kept = rollout_server.adapter_for_server, tmp_path / "first"

    @contextmanager
    def stale(folder, model):
        with whole(folder, model) as path:
            if not kept.exists():
                shutil.copytree(path, kept)
            yield kept

    monkeypatch.setattr(rollout_server, "adapter_for_server", stale)
    with pytest.raises(RunFailedError, match=r"step 2: the log-probabilities of .* differ .* nats per token"):
        train_from_overrides(words(server, rows, tmp_path / "run"))


def test_a_run_that_broke_learns_from_the_same_answers_again(server, rows, tmp_path, monkeypatch):
    run, more = tmp_path / "run", ("checkpoint.save_every=2",)
    with monkeypatch.context() as patch:
        break_at(patch, 4)
        with pytest.raises(RuntimeError, match="power cut"):
            train_from_overrides(words(server, rows, run, *more))
    recorded = {path.name: path.read_bytes() for path in (run / "rollouts").iterdir()}
    assert len(recorded) == 4
    third = curve(run)[2]
    train_from_overrides(words(server, rows, run, *more))
    again = {path.name: path.read_bytes() for path in (run / "rollouts").iterdir()}
    assert {name: again[name] for name in recorded} == recorded
    assert [curve(run)[2][name] for name in ("loss", "grad_norm")] == [third["loss"], third["grad_norm"]]


def test_two_processes_ask_one_server(server, rows, tmp_path):
    done = run_launched("torchrun", ["-m", "finetune", "train", *words(server, rows, tmp_path / "run")])
    assert done.returncode == 0, done.stdout
    assert len(curve(tmp_path / "run")) == 4


def test_a_server_that_does_not_fit_is_refused(server, rows, tmp_path):
    from transformers import AutoTokenizer

    write_base(tmp_path / "base")
    asked = VllmServer(server.url, patience_seconds=60)
    with pytest.raises(ConfigError, match="reads a prompt of this run as other tokens"):
        asked.check(AutoTokenizer.from_pretrained(tmp_path / "base"), "three crates", most_tokens=10)
    with pytest.raises(ConfigError, match=r"serves at most [\d,]+ tokens .*--max-model-len 1000000"):
        asked.check(AutoTokenizer.from_pretrained(BASE), "three crates", most_tokens=10**6)
    with pytest.raises(RunFailedError, match="does not answer"):
        VllmServer(f"http://localhost:{free_port()}", patience_seconds=60).post("/version")
    with pytest.raises(RunFailedError, match="LoRA rank 32 is greater than max_lora_rank 16"):
        train_from_overrides(words(server, rows, tmp_path / "wide", "lora.r=32"))
    with pytest.raises(ConfigError, match="gets the step's weights as a LoRA adapter"):
        train_from_overrides(words(server, rows, tmp_path / "full", "training.method=full"))


def test_what_vllm_serves_is_compared_with_what_was_trained(server, trained, tmp_path):
    found = verify_run(trained, vllm=InVllm(server.url))
    assert found.mismatches == []
    assert found.comparison.most_tokens == 20, "the default of a server"
    assert found.comparison.runtime.startswith("vLLM ")
    assert found.comparison.logits.most_relative < ROUNDING
    checks = found.comparison.checks
    assert {name: check.compared > 0 for name, check in checks.items()} == dict.fromkeys(CHECKS, True)

    assert run_finetune("merge", trained, tmp_path / "merged", "--dtype", "float32").returncode == 0
    done = run_finetune("verify", tmp_path / "merged", "--runtime", "vllm", "--json")  # starts a server of its own
    assert done.returncode == 0, done.stdout
    assert "tokens were compared" not in done.answer, "that server gives the log-probabilities of all tokens"


def test_another_adapter_in_vllm_is_not_what_was_trained(server, trained, tmp_path):
    run_finetune("merge", trained, tmp_path / "merged", "--dtype", "float32")
    known = tmp_path / "merged"
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    config = run / "adapter/adapter_config.json"
    edit_json(config, lora_alpha=1.05 * json.loads(config.read_text())["lora_alpha"])
    with served_by_vllm(run / "adapter", read_vectors(known), InVllm(server.url), base=BASE) as served:
        found = compare(served, read_vectors(known), bound=ROUNDING)
    assert found.checks["positions"].equal < found.checks["positions"].compared
    assert found.checks["rendered"].equal == found.checks["rendered"].compared


def test_a_lost_server_is_waited_for_and_no_step_is_lost(server, rows, tmp_path):
    run = tmp_path / "run"
    more = ("training.max_steps=200", "checkpoint.save_every=200", "validation.validate_every=200")
    more += ("optim.schedule=constant",)  # so that another number of steps changes nothing

    def start(*settings):
        return start_command([sys.executable, "-m", "finetune", "train", *words(server, rows, run, *more, *settings)])

    impatient = start("rollout.server_timeout_minutes=0.1")
    while not (run / "metrics.jsonl").exists() or len(curve(run)) < 3:
        assert impatient.poll() is None, impatient.communicate()[0]
        time.sleep(0.1)
    server.kill()
    output, _ = impatient.communicate(timeout=120)
    assert impatient.returncode == 3, output
    assert "ServerLostError" in output, output
    done = len(curve(run))
    assert (run / f"checkpoints/step-{done:06}").is_dir(), "what was learned is saved before the run ends"

    stopped = start()
    log = run / "log.txt"
    while "waiting for it, at most 10 min" not in log.read_text():
        assert stopped.poll() is None, stopped.communicate()[0]
        time.sleep(0.1)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 75, output

    server.start()  # the run waits until it is there
    last = start(f"training.max_steps={done + 2}")
    output, _ = last.communicate(timeout=600)
    assert last.returncode == 0, output
    assert f"resumed from step={done}" in output
    assert [step["step"] for step in curve(run)] == list(range(1, done + 3))
