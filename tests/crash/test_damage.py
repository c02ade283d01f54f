"""A byte that was flipped or a file cut short is found, and the run still ends with the bytes of the whole one."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finetune.runs.verification import verify_checkpoint
from tests.crash import IS_FULL
from tests.crash.runs import Nursery, assert_same_end, contents, explained

pytestmark = pytest.mark.slow

PLACES = 20 if IS_FULL else 5
KEEP_ALL = ["checkpoint.save_total_limit=9"]
NEWEST = "step-000006"
FILES = [
    *("adapter_config.json", "adapter_model.safetensors", "generation_config.json"),
    *("manifest.json", "optimizer.safetensors", "state.json"),
]


@pytest.fixture(scope="module")
def kept(nursery: Nursery) -> Path:
    """The folder of an uninterrupted run that kept every checkpoint."""
    nursery.put(None)
    ended = nursery.train(*KEEP_ALL)
    assert ended.status == 0, ended.screen
    return nursery.keep("kept")


def damages(data: bytes, seed: str) -> Iterator[tuple[str, bytes]]:
    """The bytes of a file with one of them flipped, or cut short."""
    rng = random.Random(seed)
    for place in sorted({0, len(data) - 1, *rng.sample(range(1, len(data) - 1), PLACES - 2)}):
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        yield f"a bit of byte {place} flipped", bytes(flipped)
    for length in (0, 1, len(data) // 2, len(data) - 1):
        yield f"cut to {length} bytes", data[:length]


@pytest.mark.parametrize("name", FILES if IS_FULL else ["adapter_model.safetensors", "manifest.json", "state.json"])
def test_every_damage_to_a_checkpoint_is_found_and_undone(
    nursery: Nursery, kept: Path, tried: Callable[..., None], name: str
) -> None:
    file = nursery.run / "checkpoints" / NEWEST / name
    nursery.put(kept)
    assert set(FILES) == {each.name for each in file.parent.iterdir()}
    data = file.read_bytes()
    flips = restarts = 0
    for number, (what, damaged) in enumerate(damages(data, name)):
        flips += "flipped" in what
        file.write_bytes(damaged)
        assert verify_checkpoint(file.parent), what
        if IS_FULL or number % 8 == 0:
            restarts += 1
            again = nursery.train(*KEEP_ALL)
            with explained(f"{name}, {what}"):
                assert f"{file.parent} is damaged and not used" in again.screen
                assert again.resumed_from == 4
                assert_same_end(again, nursery.run, kept)
    tried(
        f"{flips} flips and 4 lengths, all found; {restarts} restarts went back to step 4 to the same bytes",
        flips=flips,
        resumes=restarts,
    )


@pytest.mark.parametrize("steps", [[6, 4], [6, 4, 2]])
def test_it_goes_back_as_far_as_it_must(nursery: Nursery, kept: Path, steps: list[int]) -> None:
    nursery.put(kept)
    for step in steps:
        (nursery.run / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors").write_bytes(b"")
    again = nursery.train(*KEEP_ALL)
    assert again.resumed_from == {2: 2, 3: 0}[len(steps)]
    assert_same_end(again, nursery.run, kept)


@pytest.fixture(scope="module")
def best_between(nursery: Nursery) -> tuple[list[str], int]:
    """The words of a run whose best step is neither its first nor its last, and that step."""
    for rate in ("1", "0.6", "2", "0.3", "4", "0.1"):
        words = [f"optim.learning_rate={rate}", "training.max_steps=10"]
        nursery.put(None)
        assert nursery.train(*KEEP_ALL, *words).status == 0
        best = json.loads((nursery.run / "checkpoints" / "step-000010" / "state.json").read_text())["best_step"]
        if 2 < best < 10:
            return words, best
    raise AssertionError("none of these learning rates makes such a run any more")


def test_a_damaged_best_checkpoint_is_trained_again(nursery: Nursery, best_between: tuple[list[str], int]) -> None:
    """The newest is whole, but what it calls the best is not: the run goes back behind that one."""
    words, best = [*KEEP_ALL, *best_between[0]], best_between[1]
    nursery.put(None)
    assert nursery.train(*words).status == 0
    whole = nursery.keep("best")
    (nursery.run / "checkpoints" / f"step-{best:06d}" / "adapter_model.safetensors").write_bytes(b"torn")
    again = nursery.train(*words)
    assert_same_end(again, nursery.run, whole)
    assert again.resumed_from == best - 2
    shutil.rmtree(whole)


TEARS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "noise": lambda file: file.write_bytes(random.Random(1).randbytes(300)),
}


@pytest.mark.parametrize("progress", ["complete", "in the middle"])
def test_any_file_of_the_folder_may_be_missing_or_torn(
    nursery: Nursery, kept: Path, tried: Callable[..., None], progress: str
) -> None:
    nursery.put(kept)
    if progress == "in the middle":
        shutil.rmtree(nursery.run / "adapter")
        shutil.rmtree(nursery.run / "checkpoints" / NEWEST)
    before = nursery.keep("before")
    files = sorted(name for name in contents(before) if not name.startswith("checkpoints"))
    assert {"run.json", "metrics.jsonl", "config.yaml", "log.txt", "base/model.safetensors"} < set(files)
    cases = [(file, tear) for file in files for tear in TEARS]
    cases += [(".lock", tear) for tear in TEARS if tear != "missing"]
    total = len(cases)
    cases = cases[:: 1 if IS_FULL else 17]
    for file, tear in cases:
        nursery.put(before)
        (nursery.run / ".lock").write_text("{}")
        TEARS[tear](nursery.run / file)
        again = nursery.train(*KEEP_ALL)
        with explained(f"{file} {tear}"):
            if file == "metrics.jsonl":  # what was lost there is not known any more; the rest is
                (nursery.run / file).write_bytes((kept / file).read_bytes())
            assert again.resumed_from == (6 if progress == "complete" else 4)
            assert_same_end(again, nursery.run, kept)
    tried(f"{len(cases)} of {total} torn files, every restart ended whole", resumes=len(cases))


@pytest.mark.parametrize("name", ["adapter", "base", "checkpoints"])
def test_a_folder_may_be_missing(nursery: Nursery, kept: Path, name: str) -> None:
    nursery.put(kept)
    shutil.rmtree(nursery.run / name)
    again = nursery.train(*KEEP_ALL)
    assert again.resumed_from == (0 if name == "checkpoints" else 6)
    assert_same_end(again, nursery.run, kept)


@pytest.mark.parametrize("progress", ["complete", "in the middle"])
def test_a_best_checkpoint_that_cannot_be_trained_again(
    nursery: Nursery, best_between: tuple[list[str], int], progress: str
) -> None:
    """Nothing older is left: a complete run keeps its whole adapter, another publishes its last step and says so."""
    words, best = ["checkpoint.save_total_limit=1", *best_between[0]], best_between[1]
    nursery.put(None)
    assert nursery.train(*words).status == 0
    assert {path.name for path in (nursery.run / "checkpoints").iterdir()} == {f"step-{best:06d}", "step-000010"}
    before = contents(nursery.run / "adapter")
    (nursery.run / "checkpoints" / f"step-{best:06d}" / "adapter_model.safetensors").write_bytes(b"torn")
    if progress == "in the middle":
        shutil.rmtree(nursery.run / "adapter")
    again = nursery.train(*words)
    assert again.status == 0, again.screen
    assert again.resumed_from == 10
    assert f"the best step, {best}, is damaged" in again.screen
    last = (nursery.run / "checkpoints" / "step-000010" / "adapter_model.safetensors").read_bytes()
    after = contents(nursery.run / "adapter")
    assert after == before if progress == "complete" else after["adapter_model.safetensors"] == last
