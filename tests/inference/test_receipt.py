"""The receipt of a finished run."""

import json

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

    certificate = {"runtime": "PEFT 0.19.1", "verdict": "same"}
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
