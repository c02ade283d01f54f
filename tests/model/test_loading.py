"""The memory of a process while it loads a model, and what becomes of the model if its files change then."""

import json
import queue
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, PhiConfig

from tests.launches import start_command
from tests.tiny_models import build_tiny, tiny_phi3_config

WORKER = Path(__file__).with_name("loading_process.py")
WIDE = {
    **{"vocab_size": 12000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
SLACK = 12 * 2**20
"""The adapter, and what Python and torch take beside the weights."""
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="only Linux counts the memory that has no file behind it"
)
pytestmark = [pytest.mark.slow, needs_proc]


class Held(NamedTuple):
    """Bytes of a process."""

    anonymous: int
    resident: int


class Worker:
    """A process of loading_process.py."""

    def __init__(self, cwd):
        # The C library gives large blocks back at once, so that what is counted is what is held.
        command = [sys.executable, WORKER]
        variables = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        self.process = start_command(command, cwd=cwd, variables=variables, is_asked=True)
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        self.unloaded = Held(0, 0)
        self.most_resident = 0

    def read(self):
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(line)
        self.lines.put("")

    def end(self):
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.reader.join()

    def ask(self, *words):
        """Return the answer, and the most anonymous memory that was held meanwhile beyond that without a model.

        `most_resident` is the same for all resident memory, mapped files included.
        """
        peak = resident = 0
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        said = None
        while said is None or not said.startswith("ANSWER "):
            held = self.held_bytes()
            peak, resident = max(peak, held.anonymous), max(resident, held.resident)
            with suppress(queue.Empty):
                said = self.lines.get(timeout=0.002)
                assert said, f"the process ended with {self.process.wait()}"
        self.most_resident = resident - self.unloaded.resident
        return json.loads(said.removeprefix("ANSWER ")), peak - self.unloaded.anonymous

    def load(self, folder, precision, *words):
        self.ask("unload")  # or the former model would count
        paths = [f"model.path={folder}", "data=orders", f"output_dir={folder}/run"]
        return self.ask(*paths, f"training.precision={precision}", *words)

    def held_bytes(self):
        try:
            text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            return Held(0, 0)
        fields = (re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for name in ("Anonymous", "Rss"))
        return Held(*(1024 * int(field[1]) for field in fields))


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A worker that has imported all that loading needs."""
    folder = tmp_path_factory.mktemp("worker")
    build_tiny(tiny_phi3_config()).save_pretrained(folder / "small")
    worker = Worker(folder)
    worker.load(folder / "small", "fp32")
    worker.ask("unload")
    worker.unloaded = worker.held_bytes()
    yield worker
    worker.end()


def save(folder, config, stored, *, named=None, shard_size="1GB"):
    """A model folder whose weights are in one type, and whose config.json may name another."""
    model = AutoModelForCausalLM.from_config(config, dtype=stored)
    model.save_pretrained(folder, max_shard_size=shard_size)
    if named is not None:
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**keys, "dtype": named}))
    return folder


@pytest.mark.parametrize(
    ("config", "stored", "options", "words"),
    [
        (Phi3Config(**WIDE, tie_word_embeddings=True), torch.float32, {}, ["bf16"]),
        (Phi3Config(**WIDE), torch.float16, {"named": "float32", "shard_size": "20MB"}, ["bf16"]),
        (PhiConfig(**WIDE), torch.float32, {}, ["fp32", "training.method=full"]),
    ],
    ids=["tied-narrowed", "shards-named-wider", "full"],
)
def test_at_most_one_copy_of_the_weights_is_in_memory_and_in_the_type_of_the_run(
    worker, tmp_path, config, stored, options, words
):
    loaded, peak = worker.load(save(tmp_path, config, stored, **options), *words)
    sizes, trained = loaded["sizes"], "torch.float32"
    assert loaded["types"] == sorted({trained, "torch.bfloat16" if words[0] == "bf16" else trained})
    assert sum(sizes) > 2**25
    assert peak < sum(sizes) + max(sizes) + SLACK
    width = 4 if words[0] == "fp32" else 2
    mapped = max(sizes) // width * stored.itemsize
    print(f"{sum(sizes) / 1e6:.0f} MB of weights, {worker.most_resident / 1e6:.0f} MB resident, file included")
    assert worker.most_resident < sum(sizes) + max(sizes) + mapped + SLACK, "one weight of the file"
    if stored is torch.float32 and words[0] == "bf16":
        assert peak < sum(sizes) + SLACK, "weights are mapped, so not even one is in memory twice"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_file_that_changes_under_a_run_changes_no_weight(worker, tmp_path, precision):
    stored = torch.float32 if precision == "fp32" else torch.bfloat16
    folder = save(tmp_path, tiny_phi3_config(hidden_size=64), stored)
    worker.load(folder, precision)
    sums, _ = worker.ask("sums")
    file = folder / "model.safetensors"
    other = save(tmp_path / "other", tiny_phi3_config(hidden_size=64), stored)
    with file.open("r+b") as writer:  # the same file on the disk, as `cp` and `rsync --inplace` write it
        writer.write((other / "model.safetensors").read_bytes())
    assert worker.ask("sums")[0] == sums
    with file.open("r+b") as writer:
        writer.truncate(0)
    assert worker.ask("sums")[0] == sums
