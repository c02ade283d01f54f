"""Output that nobody can read: closed streams, readers that leave, a full disk. And text that steers no terminal."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from tests.launches import run_command
from tests.runs.made_runs import write_run

pytestmark = pytest.mark.slow
STEERING = "a\x1b]0;title\x07b\u202ec"
AS_SHOWN = "a<U+001B>]0;title<U+0007>b<U+202E>c"


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> str:
    data = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [[{"role": "user", "content": f"hello {n}"}, {"role": "assistant", "content": "yes"}] for n in range(6)]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    return (
        f"model=phi_tiny data={data} data.test=1 data.validation=1 data.cache_dir={data.parent}/cache "
        "training.max_steps=3 training.batch_size=2 training.log_every=1 optim.warmup_steps=0 testing.num_samples=1 "
        "training.device=cpu testing.max_new_tokens=4 testing.general_prompts=none"
    )


def in_shell(command: str, **variables: str):
    finetune = f"{shlex.quote(sys.executable)} -m finetune"
    script = f'set -o pipefail; finetune() {{ {finetune} "$@"; }}; {command}'
    return run_command(["bash", "-c", script], variables=variables)


@pytest.mark.parametrize(
    ("streams", "processes", "unbuffered"),
    [
        ("<&- >&- 2>&-", 1, ""),
        pytest.param("2>&1 | head -1", 1, "1", marks=pytest.mark.warm),
        pytest.param("2>&1 | head -1", 2, "", marks=pytest.mark.warm),
        (">/dev/full 2>&1", 1, ""),
    ],
    ids=["closed", "head-unbuffered", "head-2", "full"],
)
def test_a_run_goes_on_without_anybody_who_reads(streams, processes, unbuffered, words, tmp_path):
    run = tmp_path / "run"
    command = f"finetune train {words} parallel.num_processes={processes} output_dir={run} {streams}"
    done = in_shell(command, PYTHONUNBUFFERED=unbuffered)
    log = (run / "log.txt").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{log}"
    assert json.loads((run / "run.json").read_text())["status"] == "completed"
    for part in ("/1 started" if processes == 1 else "/2 started", "step 3/3", "log.txt written; no fallbacks taken"):
        assert part in log, log


def test_other_commands_end_and_say_what_was_lost(tmp_path):
    write_run(tmp_path / "a")
    full = in_shell(f"finetune runs {tmp_path} > /dev/full")
    assert (full.returncode, full.stdout.count("No space left on device"), "Traceback" in full.stdout) == (3, 1, False)
    left = in_shell(f"finetune runs {tmp_path} | true", PYTHONUNBUFFERED="")
    assert (left.returncode, left.stdout) == (1, "")
    closed = in_shell(f"finetune runs {tmp_path} >&-")
    assert (closed.returncode, closed.stdout) == (0, "")


@pytest.mark.warm
def test_what_a_template_says_steers_no_terminal(words, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('" + STEERING + "') }}")
    run = tmp_path / "run"
    more = [f"data.chat_template={template}", f"output_dir={run}"]
    done = run_command([sys.executable, "-m", "finetune", "train", *words.split(), *more])
    assert done.returncode == 2, done.stdout
    assert AS_SHOWN in done.stdout.splitlines()[-1]
    assert not {"\x1b", "\x07", "\u202e"} & set(done.stdout)
