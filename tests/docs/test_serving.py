"""The server of docs/tasks/serve.md answers a request of the page as `finetune generate` answers the run."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from transformers import AutoTokenizer

from finetune.export.merge import write_merged
from tests.docs.pages import DOCS
from tests.export.finished_runs import write_run
from tests.in_process import run_finetune
from tests.launches import free_port, run_command, start_command

PAGE = (DOCS / "tasks" / "serve.md").read_text(encoding="utf-8")
_LONGEST_SECONDS = 300


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")),
    reason='the server is installed with: pip install "transformers[serving]"',
)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_transformers_serve_answers_like_the_run(tmp_path):
    turns = [("system", "Extract the order as JSON."), ("user", "a"), ("assistant", "b")]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    sizes = {"max_position_embeddings": 512}  # room for the page's 256 tokens
    run = write_run(tmp_path / "orders", base_sizes=sizes, words=(f"data.path={rows}",))
    write_merged(run, tmp_path / "served", adds_system=True)
    serve, ask = (_block(first) for first in ("transformers serve ", "curl "))
    port = str(free_port())
    variables = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    server = start_command(serve.replace("8000", port).split(), cwd=tmp_path, variables=variables)
    try:
        _wait_for(f"http://localhost:{port}/health", server)
        done = run_command(["bash", "-c", ask.replace("8000", port)], cwd=tmp_path)
    finally:
        server.terminate()
        server.communicate(timeout=30)
    response = json.loads(done.stdout)
    answered = response["choices"][0]["message"]["content"]
    prompt = json.loads(re.search(r"'(\{.*\})'", ask, re.DOTALL)[1])["messages"][0]["content"]
    ours = run_finetune("generate", run.folder.path, prompt, "--json")
    assert ours.returncode == 0, ours.stdout
    assert answered == json.loads(ours.answer.splitlines()[-1])["answer"]
    assert len(answered) > 20
    # An untrained model answers alike with and without the system turn, but the prompt is longer with it.
    read = AutoTokenizer.from_pretrained(run.weights)
    opened = [{"role": "system", "content": turns[0][1]}, {"role": "user", "content": prompt}]
    num_tokens = len(read.apply_chat_template(opened, add_generation_prompt=True, return_dict=False))
    assert response["usage"]["prompt_tokens"] == num_tokens


def _block(first_words: str) -> str:
    """The block of the page that begins so."""
    found = re.findall(rf"^```bash\n({re.escape(first_words)}.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} blocks of docs/tasks/serve.md begin with {first_words!r}"
    return found[0].strip()


def _wait_for(address: str, server) -> None:
    end = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            pytest.fail(f"the server ended: {server.communicate()[0]}")
        try:
            with urlopen(address, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the server does not answer after {_LONGEST_SECONDS} seconds")
