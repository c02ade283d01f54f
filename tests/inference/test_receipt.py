"""The receipt of a finished run."""

import hashlib
import json
import math

import pytest

from finetune.errors import CheckpointError, RequirementError
from finetune.report.receipt import build_receipt, check_receipt
from finetune.runs.recorded_rows import read_row_record
from finetune.runs.recorded_run import RecordedRun
from tests.in_process import run_finetune
from tests.tiny_training import events


def changed(file, *names, value):
    """Change a value of a JSON file."""
    content = json.loads(file.read_text())
    part = content
    for name in names[:-1]:
        part = part[name]
    part[names[-1]] = value
    file.write_text(json.dumps(content))


def test_a_receipt_is_read_from_the_run_and_checked_against_it(own_copy):
    assert run_finetune("verify", "--receipt", own_copy).returncode == 2, "there is none yet"
    run_finetune("receipt", own_copy, code=0)
    receipt = json.loads((own_copy / "receipt.json").read_text())
    steps = events(own_copy, "step")
    record = json.loads((own_copy / "run.json").read_text())
    trained, total = record["parameters"]["trained"], record["parameters"]["all"]
    assert 0 < trained < total
    training = receipt["training"]
    assert (training["steps"], training["tokens"]) == (len(steps), sum(step["num_tokens"] for step in steps))
    assert training["operations"] == (4 * total + 2 * trained) * sum(step["num_computed"] for step in steps)
    assert training["share_of_pretraining"] == receipt["energy"] == receipt["certificate"] == "not known"
    assert receipt["base"]["sha256"] == record["fingerprints"]["base"]
    assert receipt["rows"]["distinct"] == 12
    assert receipt["verdict"] == {name: one["sentence"] for name, one in record["result"]["verdict"].items()}
    page = (own_copy / "receipt.html").read_text()
    assert receipt["rows"]["root_sha256"] in page
    assert "://" not in page
    assert "facts are equal" in run_finetune("verify", "--receipt", own_copy, code=0).stdout

    digest = receipt["weights"]["manifest_sha256"]
    certificate = {"runtime": "PEFT 0.19.1", "verdict": "same", "manifest_sha256": digest}
    (own_copy / "adapter/certificate.json").write_text(json.dumps(certificate))
    run_finetune("verify", "--receipt", own_copy, code=0)
    (own_copy / "adapter/certificate.json").write_text(json.dumps({**certificate, "verdict": "differs"}))
    assert "certificate.verdict is differs" in run_finetune("verify", "--receipt", own_copy, code=3).stdout
    (own_copy / "adapter/certificate.json").unlink()
    assert "cannot be given together" in run_finetune("verify", "--receipt", own_copy, "--json", code=2).stdout

    changed(own_copy / "receipt.json", "training", "tokens", value=7)
    wrong = run_finetune("verify", "--receipt", own_copy, code=3)
    assert "training.tokens is " in wrong.stdout
    assert "7 in the receipt" in wrong.stdout


def test_the_computation_is_compared_with_the_pretraining_of_a_published_base(own_copy):
    config = own_copy / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    (place,) = (at for at, line in enumerate(lines) if line.startswith("  path: ") and lines[at - 1] == "model:\n")
    lines[place] = "  path: microsoft/phi-4\n"
    config.write_text("".join(lines))
    changed(own_copy / "run.json", "parameters", value={"trained": 10, "all": 1010})
    run_finetune("receipt", own_copy, code=0)
    training = json.loads((own_copy / "receipt.json").read_text())["training"]
    assert training["operations_of_pretraining"] == 6 * 1000 * 9.8e12
    assert training["share_of_pretraining"] == 4060 * training["tokens_computed"] / (6 * 1000 * 9.8e12)
    config.write_text(config.read_text().replace("  method: lora\n", "  method: full\n"))
    assert build_receipt(RecordedRun(own_copy))["training"]["operations_of_pretraining"] == 6 * 1010 * 9.8e12


def test_a_run_that_is_not_complete_has_no_receipt(own_copy):
    changed(own_copy / "run.json", "status", value="failed")
    refused = run_finetune("receipt", own_copy, code=2)
    assert "its state is failed" in refused.stdout
    assert not (own_copy / "receipt.json").exists()


def test_a_receipt_is_checked_from_any_folder(own_copy, tmp_path, monkeypatch):
    base = tmp_path / "base"
    base.mkdir()
    config = own_copy / "config.yaml"
    config.write_text(config.read_text().replace("path: shipped:phi_tiny", "path: base"))
    changed(own_copy / "run.json", "resolved_paths", value={"model.path": str(base)})
    changed(own_copy / "run.json", "started_with", "config", "model", "path", value="base")
    monkeypatch.chdir(tmp_path)
    run_finetune("receipt", own_copy, code=0)
    assert json.loads((own_copy / "receipt.json").read_text())["base"]["name"] == "base"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "facts are equal" in run_finetune("verify", "--receipt", own_copy, code=0).stdout
    base.rmdir()
    run_finetune("verify", "--receipt", own_copy, code=0)


def test_the_facts_of_a_receipt_follow_from_the_files(own_copy):
    """An earlier version, which did not count computed tokens, ran on two GPUs. One interval lacks `cpu_joules`."""
    fallback = {"what": "training.device", "wanted": "cuda:1", "used": "cuda:0", "why": "it is busy"}
    for name, value in {"world_size": 2, "device": "cuda", "fallbacks": [fallback]}.items():
        changed(own_copy / "run.json", name, value=value)
    step = {"event": "step", "loss": 1.0, "num_tokens": 100, "tokens_per_second": 50.0}
    told = {"event": "resources", "gpu_joules": 5.25}
    lines = [step | {"step": 1}, told | {"step": 1, "cpu_joules": 1.0}, step | {"step": 2}, told | {"step": 2}]
    (own_copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RecordedRun(own_copy)
    receipt = build_receipt(run)
    assert receipt["time"]["device_seconds_of_steps"] == 2 * 2 * 100 / 50
    assert receipt["energy"] == {"gpu_joules": 10.5, "cpu_joules": "not known"}
    assert receipt["fallbacks"] == ["training.device: cuda:0 instead of cuda:1, because it is busy"]
    assert receipt["training"]["tokens_computed"] == 200
    assert receipt["training"]["config_sha256"] == run.part("fingerprints")["config"]
    manifest = (own_copy / "adapter/manifest.json").read_bytes()
    assert receipt["weights"]["manifest_sha256"] == hashlib.sha256(manifest).hexdigest()
    digests = sorted(read_row_record(run.folder).splits["train"])
    assert receipt["rows"]["root_sha256"] == hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()


def test_a_fact_that_only_the_receipt_has_is_named(own_copy):
    run_finetune("receipt", own_copy, code=0)
    changed(own_copy / "receipt.json", "training", "prizes", value=3)
    with pytest.raises(RequirementError, match=r"training\.prizes is missing in the run, and 3 in the receipt"):
        check_receipt(RecordedRun(own_copy))


def test_a_certificate_of_another_adapter_is_not_the_one_of_this_run(own_copy):
    certificate = {"runtime": "PEFT 0.19.1", "verdict": "same", "manifest_sha256": "1" * 64}
    (own_copy / "adapter/certificate.json").write_text(json.dumps(certificate))
    assert build_receipt(RecordedRun(own_copy))["certificate"] == "not known"


DEEP = "[" * 100_000


def test_files_that_no_run_writes_are_refused_in_a_sentence(own_copy):
    """A receipt is checked by whoever got the run from somebody else."""
    (own_copy / "receipt.json").write_text(DEEP)
    with pytest.raises(CheckpointError, match=r"receipt\.json cannot be read: it is not JSON"):
        check_receipt(RecordedRun(own_copy))
    (own_copy / "adapter/certificate.json").write_text(DEEP)
    assert build_receipt(RecordedRun(own_copy))["certificate"] == "not known"
    parameters = json.loads((own_copy / "run.json").read_text())["parameters"]
    for values in ({"trained": 10**400, "all": 1}, {"note": math.nan}):
        changed(own_copy / "run.json", "parameters", value=parameters | values)
        with pytest.raises(
            CheckpointError, match=r"has no receipt: run\.json or metrics\.jsonl has a value that no run"
        ):
            build_receipt(RecordedRun(own_copy))
    changed(own_copy / "run.json", "parameters", value=parameters)
    with (own_copy / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"event": "step", "step": 99, "num_tokens": "Infinity", "tokens_per_second": 1.0}\n')
    with pytest.raises(CheckpointError, match="has a value that no run writes"):
        build_receipt(RecordedRun(own_copy))
