"""What a runtime serves is compared with what was trained: a change of any kind is named, and ends with exit code 3."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune.cli.verify import verify
from finetune.config.config_files import resolve_shipped
from finetune.errors import CheckpointError, ConfigError, RunFailedError
from finetune.export import verifying
from finetune.export.certificate import CERTIFICATE_HEAD, path_of_certificate, read_certificates
from finetune.export.push import build_package
from finetune.export.runtimes import RUNTIMES, load_peft
from finetune.export.served_comparison import Rendered, ServedComparison, check_digests, compare, rows_of_checks
from finetune.export.vectors import (
    MAX_NEW_TOKENS,
    SYSTEM_PROMPT,
    Digests,
    Vector,
    Vectors,
    digest_weight_files,
    prompts_to_ask,
    read_vectors,
    write_vectors,
)
from finetune.export.verifying import verify_folder, verify_run
from finetune.export.vllm_served import InVllm, limits_of_adapter, served_by_vllm
from finetune.runs.durable import MANIFEST, committed_folder, find_damage
from tests.export.finished_runs import words_to_train, write_run
from tests.in_process import run_finetune
from tests.replay.scene import change_tensor, edit_json
from tests.tiny import tiny_tokenizer
from tests.tiny_models import build_tiny, tiny_phi3_config

WEIGHT = "model.layers.0.mlp.down_proj.weight"
LORA = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
pytestmark = pytest.mark.warm


class Made(NamedTuple):
    """A run that was trained here, with a checkpoint that is kept, and its merged model."""

    run: Path
    merged: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    place = tmp_path_factory.mktemp("made")
    saves = ("checkpoint.save_every=2", "checkpoint.save_total_limit=2")
    words = words_to_train(place, "training.max_steps=8", "training.batch_size=4", *saves)
    for command in (["train", *words], ["merge", place / "run", place / "merged"]):
        run_finetune(*command, code=0)
    return Made(place / "run", place / "merged")


@pytest.fixture
def merged(made: Made, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(made.merged, tmp_path / "merged")


@pytest.fixture
def run(made: Made, tmp_path: Path) -> Path:
    return shutil.copytree(made.run, tmp_path / "run")


def rewrite_checksums(folder: Path) -> None:
    """What somebody does who changes a file and does not want to be found."""
    record = json.loads((folder / MANIFEST).read_text())
    for name, entry in record["files"].items():
        raw = (folder / name).read_bytes()
        entry.update(size=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    (folder / MANIFEST).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    assert find_damage(folder) == []


def nudge(file: Path, name: str) -> None:
    """Move one value of one tensor to its neighbour."""
    tensors = load_file(file)
    flat = tensors[name].view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(math.inf))
    save_file(tensors, file, {"format": "pt"})


def certificate(folder: Path) -> dict[str, object]:
    return json.loads((folder / "certificate.json").read_text())


@pytest.mark.process
def test_a_merged_model_equals_the_run_in_transformers_and_says_what_was_compared(made, merged):
    run_finetune("verify", merged, code=0)
    found = certificate(merged)
    assert (found["verdict"], found["mismatches"]) == ("same", [])
    assert found["runtime"].startswith("transformers ")
    assert found["rendered"] == found["answers"] == {"compared": 7, "equal": 7}
    assert found["tensors"] == {"compared": 14, "equal": 14}
    assert found["relative"] < 1e-5 < found["bound"]
    vectors = (made.merged / "test_vectors.json").read_bytes()
    assert found["vectors_sha256"] == hashlib.sha256(vectors).hexdigest()
    card = (merged / "README.md").read_text()
    assert found["vectors_sha256"] in card
    assert "a phi3 model of random weights (seed 0)" in card


@pytest.mark.process
def test_a_run_equals_itself_in_peft_by_its_own_engine_and_by_the_vectors_of_its_merge(made, run):
    done = run_finetune("verify", run, "--json", code=0)
    found = json.loads(done.answer)
    assert found["runtime"].startswith("peft ")
    assert (found["verdict"], found["vectors_sha256"]) == ("same", None)
    assert found["tensors"] == {"compared": 16, "equal": 16}
    assert found == certificate(run / "adapter")
    done = run_finetune("verify", run, "--vectors", made.merged, code=0)
    assert certificate(run / "adapter")["vectors_sha256"] is not None
    sound, other = certificate(run / "adapter"), shutil.copytree(made.merged, run / "other")
    trained = json.loads((other / "test_vectors.json").read_text())["trained"]
    edit_json(other / "test_vectors.json", trained=dict.fromkeys(trained, "another"))
    done = run_finetune("verify", run, "--vectors", other, code=3)
    assert "has test vectors of other weights than" in done.errors
    assert certificate(run / "adapter") == sound


@pytest.mark.process
@pytest.mark.parametrize(
    "is_hidden",
    [
        pytest.param(True, id="checksums rewritten"),
        pytest.param(False, id="checksums as they were", marks=pytest.mark.slow),
    ],
)
def test_the_smallest_change_of_one_weight_is_found_and_the_tensor_named(merged, run, is_hidden):
    nudge(merged / "model.safetensors", WEIGHT)
    nudge(run / "adapter" / "adapter_model.safetensors", LORA)
    for source, folder, tensor in ((merged, merged, WEIGHT), (run, run / "adapter", LORA)):
        if is_hidden:
            rewrite_checksums(folder)
        done = run_finetune("verify", source, code=3)
        assert f"tensor {tensor} is not the one that was written" in done.errors
        if is_hidden:
            assert certificate(folder)["verdict"] == "differs"


def test_a_damaged_checkpoint_is_not_what_an_intact_adapter_is_compared_with(run):
    best = json.loads((run / "run.json").read_text())["result"]["best_step"]
    nudge(run / "checkpoints" / f"step-{best:06d}" / "adapter_model.safetensors", LORA)
    done = run_finetune("verify", run, "--json", code=0)
    assert json.loads(done.answer)["notes"][0].startswith("no intact checkpoint holds another copy of these weights")


def test_a_tensor_that_was_not_written_is_named_and_not_counted(merged):
    file = merged / "model.safetensors"
    save_file({**load_file(file), "added": torch.zeros(1)}, file, {"format": "pt"})
    done = run_finetune("verify", merged, code=3)
    assert "tensor added was not written by finetune" in done.errors
    assert certificate(merged)["tensors"] == {"compared": 14, "equal": 14}


def spoil_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|assistant|>", "<|assistant|> "))


def spoil_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    record = json.loads(file.read_text())
    record["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(record))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda it: (it / "chat_template.jinja").write_text("{{ raise_exception('no') }}"), "refuses the conversation"),
        (lambda it: (it / "chat_template.jinja").write_text("{{ 'a' * 10**10 }}"), "template of .* needs too much"),
        (spoil_template, r'prompt "one turn": the rendered text differs from character'),
        (spoil_tokenizer, r'prompt "one turn": token \d+ of the prompt is'),
        (
            lambda it: edit_json(it / "generation_config.json", eos_token_id=[320]),
            r"it stops at \[320\], expected \[2, 320",
        ),
        (
            lambda it: edit_json(it / "config.json", rms_norm_eps=0.5),
            r'prompt "one turn": logits at position \d+ differ by',
        ),
    ],
    ids=["a template that fails", "a template without end", "template", "tokenizer", "stop ids", "configuration"],
)
def test_what_else_decides_an_answer_is_found_and_the_prompt_named(merged, spoil, expected):
    spoil(merged)
    rewrite_checksums(merged)
    done = run_finetune("verify", merged, code=3)
    found = certificate(merged)["mismatches"]
    assert any(re.search(expected, line) for line in found), found
    assert found[0].startswith("file ")
    assert "is not what was trained" in done.errors


def test_vectors_from_elsewhere_find_a_forger_who_rewrote_those_of_the_folder(made, merged):
    nudge(merged / "model.safetensors", WEIGHT)
    file = merged / "test_vectors.json"
    edit_json(file, written=digest_weight_files(merged))
    rewrite_checksums(merged)
    assert run_finetune("verify", merged).returncode == 0, "nothing in the folder says otherwise"
    done = run_finetune("verify", merged, "--vectors", made.merged, code=3)
    assert f"tensor {WEIGHT}" in done.errors
    assert certificate(merged)["verdict"] == "differs"


@pytest.mark.process
def test_vectors_of_another_run_do_not_replace_a_sound_certificate(made, merged, tmp_path):
    other = shutil.copytree(made.merged, tmp_path / "other")
    trained = json.loads((other / "test_vectors.json").read_text())["trained"]
    edit_json(other / "test_vectors.json", trained=dict.fromkeys(trained, "another"), stop_ids=[2])
    run_finetune("verify", merged, code=0)
    sound = certificate(merged)
    done = run_finetune("verify", merged, "--vectors", other, code=3)
    assert "has test vectors of other weights than" in done.errors
    assert "certificate.json was kept" in done.errors
    assert certificate(merged) == sound
    run_finetune("verify", merged, "--vectors", other, "--out", tmp_path / "c.json", code=3)
    assert json.loads((tmp_path / "c.json").read_text())["verdict"] == "differs"
    (merged / "certificate.json").unlink()
    run_finetune("verify", merged, "--vectors", other, code=3)
    assert certificate(merged)["verdict"] == "differs", "none was there"


@pytest.mark.process
def test_a_bound_of_ones_own_does_not_replace_a_sound_certificate_and_a_changed_weight_does(merged):
    run_finetune("verify", merged, code=0)
    sound = certificate(merged)
    done = run_finetune("verify", merged, "--max-difference", 0, code=3)
    assert "differs from what was trained by more than --max-difference: " in done.errors
    assert f"The bound is 0, and that of the earlier certificate {sound['bound']:.3g}. " in done.errors
    assert certificate(merged) == sound
    edit_json(merged / "certificate.json", bound=10**400)
    run_finetune("verify", merged, "--max-difference", 0, code=3)
    assert certificate(merged)["verdict"] == "differs", "the earlier one was no certificate"
    run_finetune("verify", merged, code=0)
    nudge(merged / "model.safetensors", WEIGHT)
    run_finetune("verify", merged, "--max-difference", 0, code=3)
    assert certificate(merged)["verdict"] == "differs"


@pytest.mark.process
def test_a_run_s_template_is_compared_with_the_one_that_trained_it(run):
    spoil_template(run / "adapter")
    rewrite_checksums(run / "adapter")
    done = run_finetune("verify", run, code=3)
    assert "its chat template has SHA-256" in done.errors


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda it: (it / "test_vectors.json").unlink(), "has no test vectors"),
        (lambda it: (it / "test_vectors.json").write_text("{"), "is not a file of test vectors"),
        (lambda it: (it / "test_vectors.npy").write_bytes(b""), "is not the file that test_vectors.json names"),
        (lambda it: (it / "config.json").unlink(), "is neither a run nor a model"),
        (lambda it: edit_json(it / "test_vectors.json", schema_version=2), "another schema_version"),
    ],
)
def test_what_cannot_be_compared_is_the_user_s_to_mend(made, tmp_path, spoil, reason):
    folder = shutil.copytree(made.merged, tmp_path / "folder")
    spoil(folder)
    done = run_finetune("verify", folder, code=2)
    assert reason in done.errors


@pytest.mark.parametrize("option", [{"base": "owner/base"}, {"checkpoint": "latest"}], ids=lambda it: next(iter(it)))
def test_a_replay_refuses_options_that_it_would_ignore(tmp_path, option):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=f"--replay and --{next(iter(option))} cannot be given together"):
        verify(tmp_path, replay=1, **option)


def test_the_only_runtime_to_name_is_vllm(tmp_path):
    with pytest.raises(ConfigError, match="--runtime is ollama, expected vllm"):
        verify(tmp_path, runtime="ollama")


def test_a_certificate_replaces_nothing_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "large.json").write_text(json.dumps({"verdict": "same", "more": "x" * (16 << 20)}))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    no_certificate = [(name, "is not a certificate") for name in ("notes.txt", "large.json", "deep.json", "")]
    for out, reason in (*no_certificate, ("gone/c.json", "no folder")):
        with pytest.raises(ConfigError, match=reason):
            verify(tmp_path, out=tmp_path / out)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_adapter_without_all_stop_ids_is_told_so(tmp_path):
    """Plain PEFT takes them from the folder."""
    adapter = write_run(tmp_path / "run").weights
    edit_json(adapter / "generation_config.json", eos_token_id=320)
    rewrite_checksums(adapter)
    done = run_finetune("verify", tmp_path / "run", code=3)
    assert "it stops at [320], expected [320, 321]" in done.errors


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_checkpoint_is_verified_with_the_tokenizer_of_its_run(method, made, tmp_path):
    """A checkpoint has no tokenizer of its own."""
    run = made.run
    if method == "full":
        run_finetune("train", *words_to_train(tmp_path, "training.max_steps=2", "training.method=full"), code=0)
        run = tmp_path / "run"
    run = shutil.copytree(run, tmp_path / "copy")
    checkpoint = max((run / "checkpoints").iterdir())
    files = sorted(path.name for path in checkpoint.iterdir())
    done = run_finetune("verify", run, "--checkpoint", "latest", code=0)
    assert "conversations as text and tokens" in done.stdout
    assert sorted(path.name for path in checkpoint.iterdir()) == files
    assert json.loads((run / f"certificate-{checkpoint.name}.json").read_text())["verdict"] == "same"


def test_the_certificate_of_a_checkpoint_is_written_into_the_run_s_folder(tmp_path):
    """A checkpoint keeps its files."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000012"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").touch()
    assert path_of_certificate(checkpoint, in_vllm=False) == tmp_path / "run" / "certificate-step-000012.json"
    assert path_of_certificate(checkpoint, in_vllm=True) == tmp_path / "run" / "certificate-vllm-step-000012.json"
    assert path_of_certificate(tmp_path / "merged", in_vllm=True) == tmp_path / "merged" / "certificate-vllm.json"


def test_vllm_serves_a_whole_checkpoint_with_the_tokenizer_of_its_run(tmp_path, monkeypatch):
    """vLLM would read the file of the optimizer as weights, and finds no tokenizer in a checkpoint."""
    seen = []

    @contextmanager
    def serve(folder, known, vllm):
        seen.extend(sorted(path.name for path in folder.iterdir()))
        yield None

    monkeypatch.setattr(verifying, "served_by_vllm", serve)
    run = write_run(tmp_path / "run", full=True)
    weights = tmp_path / "run" / "checkpoints" / "step-000002"
    shutil.copytree(run.weights, weights)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (weights / name).unlink(missing_ok=True)
    (weights / "optimizer.safetensors").touch()
    with verifying.load_served(dataclasses.replace(run, weights=weights), None, InVllm()):
        pass
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(seen)
    assert "optimizer.safetensors" not in seen


@pytest.mark.parametrize(("given", "loaded"), [([], "owner/base at v1"), (["other/base", "v2"], "other/base at v2")])
def test_an_adapter_is_loaded_on_the_revision_of_its_base(tmp_path, monkeypatch, given, loaded):
    def refuse(name, *, revision, **_):
        raise OSError(f"{name} at {revision}")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    adapter = write_run(tmp_path / "run").weights
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="owner/base", revision="v1")
    with pytest.raises(RunFailedError, match=loaded):
        load_peft(adapter, *given)


@pytest.mark.slow
def test_whole_layers_stay_exact_on_a_base_in_16_bits_and_another_base_is_refused(tmp_path):
    """PEFT would round the layers to the type of the base. On another base, both sides would be wrong alike."""
    words = ["quickstart", "data.max_rows=24", f"data.cache_dir={tmp_path}/cache", "training.max_steps=2"]
    words += ["testing.num_samples=0", "testing.metrics=[]", "lora.modules_to_save=[embed_tokens]"]
    run = tmp_path / "run"
    run_finetune("train", *words, "training.device=cpu", "optim.warmup_steps=0", f"output_dir={run}", code=0)
    verified = verify_run(run)
    assert verified.vectors.vectors
    assert verified.mismatches == []
    other = shutil.copytree(resolve_shipped("shipped:phi_tiny"), tmp_path / "other")
    change_tensor(other / "model.safetensors", "model.norm.weight")
    with pytest.raises(RunFailedError, match=r"other has other weights than the base .* Name that base with --set"):
        verify_run(run, base=str(other))


def test_vectors_are_whole_rows_of_the_vocabulary_that_numpy_reads(made):
    vectors = read_vectors(made.merged)
    rows = np.load(made.merged / "test_vectors.npy", allow_pickle=False)
    assert rows.dtype == np.float32
    assert rows.shape == (sum(len(it.positions) for it in vectors.vectors), 336)
    assert len(rows) <= 32
    assert all(it.positions[-1] == len(it.token_ids) - 1 for it in vectors.vectors)
    text = (made.merged / "test_vectors.json").read_text()
    assert "Olá, Zürich" in text
    assert '"stop_ids": [321, 320, 2]' in text, "one line for a list of numbers"


class Recorded(SimpleNamespace):
    """A runtime that answers as the vectors say, but for what a test changes. It computes nothing."""

    runtime, most_tokens, tie, replies, factor = "recorded 1", None, 5.0, None, 1.0

    def render(self, turns):
        vector = next(it for it in self.vectors.vectors if it.turns == list(turns))
        return Rendered(vector.text, vector.token_ids)

    def logits(self, token_ids, positions):
        logits = self.factor * self.vectors.logits[:1].repeat(len(positions), 1)
        if len(token_ids) > 4:  # of the answer
            logits[-1, 7] = logits[-1, 6] + self.tie
        if self.most_tokens is not None:
            given, tokens = logits.log_softmax(-1).topk(self.most_tokens)
            logits = torch.full_like(logits, -math.inf).scatter(-1, tokens, given)
        return logits

    def answer(self, token_ids, max_new_tokens):
        return self.replies or self.vectors.vectors[0].answer


def answered_vectors(**changes: object) -> Vectors:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    turns = [{"role": "user", "content": "a"}]
    vector = Vector(name="a", turns=turns, text="<a>", token_ids=[1, 2, 3, 4], positions=[3], answer=[5, 6, 2])
    return dataclasses.replace(Vectors(vectors=(vector,), logits=logits, stop_ids=[2], has_template=True), **changes)


def answered(bound: float = 1e-2, **changes: object) -> ServedComparison:
    vectors = answered_vectors()
    return compare(Recorded(**{"vectors": vectors, "stop_ids": [2], **changes}), vectors, bound=bound)


def test_an_answer_may_part_at_a_near_tie_and_nowhere_else():
    assert answered().mismatches == ()
    parted = answered(replies=[5, 7, 7], tie=1e-3)
    assert (parted.mismatches, parted.near_ties, parted.checks["answers"].equal) == ((), 1, 1)
    rows = {title: rest for title, *rest in rows_of_checks({**parted.as_record(), "replay": None})}
    assert rows["greedy answers"] == ["0 of 1", "1 differ at a near tie"]
    (parted,) = answered(replies=[5, 7, 7]).mismatches
    assert parted.startswith('prompt "a": token 1 of the answer is 7, expected 6; their logits are 5 apart')
    assert answered(replies=[5, 6, 2, 9]).mismatches == ('prompt "a": the answer has 4 tokens, expected 3',)
    assert answered(replies=[5, 7, 7], tie=-5.0).mismatches, "it is far less likely"
    assert "differ by inf of their norm" in answered(factor=math.nan).mismatches[0]
    assert (answered().checks["positions"].equal, answered(factor=1.5).checks["positions"].equal) == (1, 0)


@pytest.mark.parametrize("stops", [[], [2, 5], [5]])
def test_a_runtime_stops_at_the_ends_of_an_answer_and_nowhere_else(stops):
    assert answered(stop_ids=stops).mismatches == (f"it stops at {stops}, expected [2]",)
    assert answered(stop_ids=[2, 2]).mismatches == ()


def test_another_vocabulary_is_a_difference():
    class Larger(Recorded):
        def logits(self, token_ids, positions):
            return torch.zeros(len(positions), 51)

    vectors = answered_vectors()
    found = compare(Larger(vectors=vectors, stop_ids=[2]), vectors, bound=0.1)
    assert found.mismatches == ('prompt "a": logits are [1, 51], expected [1, 50]',)


def test_a_bound_at_which_most_answers_are_near_ties_is_said_to_show_little():
    assert answered(bound=0.08).notes == ()
    (note,) = answered(bound=0.5).notes
    assert note.startswith("with a bound of 0.5, the comparison shows that the model loads and answers, and not that")


def test_log_probabilities_of_a_few_tokens_are_compared_by_these_tokens():
    found = answered(most_tokens=20)
    assert found.mismatches == ()
    assert found.logits.most_relative < 1e-6
    assert found.notes[0].startswith("at each position only the 20 most likely tokens were compared")
    (said,) = answered(most_tokens=20, factor=1.5).mismatches
    token = int(re.search(r"the most at token (\d+): (\S+), expected", said)[1])
    known = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    assert token in known.topk(20).indices[0, [0, -1]], "the likeliest or the least likely of them moved most"


@pytest.mark.parametrize(("served_as", "name"), [("orders", "orders"), (None, "adapter")])
def test_an_adapter_that_vllm_has_is_compared_as_it_is_and_not_loaded_anew(monkeypatch, served_as, name):
    server = Mock(name_of=lambda folder: folder.name)
    monkeypatch.setattr("finetune.export.vllm_served.VllmServer", lambda *_, **__: server)
    monkeypatch.setattr("finetune.export.vllm_served.ServedByVllm", lambda server, name, known: name)
    with served_by_vllm(Path("run/adapter"), None, InVllm("http://localhost:8000", served_as), base="base") as found:
        assert found == name
    server.loaded.assert_not_called()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"r": 16, "use_dora": False, "modules_to_save": None}, []),
        ({"r": 16, "use_dora": True}, ["because it has DoRA: finetune merge writes"]),
        ({"r": 8, "trainable_token_indices": {"embed_tokens": [7]}}, ["because it has new tokens: "]),
        ({"r": 8, "modules_to_save": ["norm"]}, ["because it has layers that are trained whole: "]),
        ({"r": 24}, ["vLLM needs --max-lora-rank 32 to serve this adapter"]),
        ({"r": 8, "rank_pattern": {"o_proj": 64}}, ["vLLM needs --max-lora-rank 64 to serve this adapter"]),
    ],
)
def test_what_vllm_does_not_serve_of_an_adapter_is_named(tmp_path, config, said):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8, **config}))
    found = limits_of_adapter(tmp_path)
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


def test_a_certificate_of_other_files_or_of_a_difference_is_refused(made, merged):
    run_finetune("verify", merged)
    assert "## Certificate" in read_certificates(merged)
    sound = certificate(merged)["bound"]
    edit_json(merged / "certificate.json", bound=10**400)
    with pytest.raises(CheckpointError, match="is not a certificate: int too large"):
        read_certificates(merged)
    edit_json(merged / "certificate.json", bound=sound)
    edit_json(merged / "config.json", note="changed since")
    rewrite_checksums(merged)
    done = run_finetune("push", merged, "me/orders", code=2)
    assert "is of other files than those in the folder" in done.errors
    run_finetune("verify", merged, code=3)
    done = run_finetune("push", merged, "me/orders")
    assert "says that this model is not the trained one: file config.json" in done.errors


def test_a_certificate_in_a_folder_without_checksums_is_of_no_known_files(tmp_path):
    """As after a download from the hub, where no manifest.json is sent."""
    (tmp_path / "certificate.json").write_text(json.dumps({"verdict": "same", "manifest_sha256": None}))
    with pytest.raises(CheckpointError, match="cannot be compared with the files in the folder, which has no manifest"):
        read_certificates(tmp_path)


def test_a_card_loses_the_section_of_a_certificate_that_is_gone(made, merged, caplog):
    card = (merged / "README.md").read_text()
    section = f"{CERTIFICATE_HEAD}\n| | |\n|---|---|\n| tensors | 14 of 14 |\n"
    mine = "\n## Mine\n\nWritten by hand.\n"
    (merged / "README.md").write_text(f"{card}\n{section}{mine}")
    assert build_package(merged).files["README.md"].decode() == card + mine
    assert "has a section about a certificate that the folder does not have" in caplog.text
    (merged / "README.md").write_text(f"{card}\n{section}")
    assert build_package(merged).files["README.md"].decode() == card


def test_a_push_sends_the_certificate_and_puts_it_into_the_card_once(merged, run):
    run_finetune("verify", merged, code=0)
    package = build_package(merged)
    assert {"certificate.json", "test_vectors.json", "test_vectors.npy"} <= package.files.keys()
    card = package.files["README.md"]
    assert isinstance(card, bytes)
    assert card.startswith((merged / "README.md").read_bytes().rstrip())
    assert "| other files | 5 of 5 |" in card.decode()
    (merged / "README.md").write_text(card.decode().replace("5 of 5", "old") + "\n## Mine\n\nWritten by hand.\n")
    again = build_package(merged).files["README.md"].decode()
    assert again == card.decode() + "\n## Mine\n\nWritten by hand.\n"

    older = {name: value for name, value in certificate(merged).items() if name != "stop_ids"}
    (merged / "certificate.json").write_text(json.dumps(older))
    _, head, rows = card.decode().partition(CERTIFICATE_HEAD)
    assert read_certificates(merged) == (head + rows).replace("| stop ids | 1 of 1 |\n", ""), (
        "as earlier versions wrote it"
    )

    in_vllm = {**older, "runtime": "vLLM 0.32.0", "notes": ["one | two"]}
    (merged / "certificate-vllm.json").write_text(json.dumps(in_vllm))
    both = build_package(merged)
    assert "certificate-vllm.json" in both.files
    card = both.files["README.md"].decode()
    assert card.count(CERTIFICATE_HEAD) == 1
    assert "| runtime | transformers" in card
    assert "| runtime | vLLM 0.32.0 |" in card
    assert "| note | one &#124; two |" in card

    run_finetune("verify", run, code=0)
    package = build_package(run, base="owner/base")
    assert "certificate.json" in package.files
    assert "| test vectors | made by the run |" in package.files["README.md"].decode()


def test_an_export_has_the_vectors_of_the_merge_or_says_that_there_are_none(made, tmp_path, merged, caplog):
    done = run_finetune("export", "ollama", made.merged, tmp_path / "out", code=0)
    for name in ("test_vectors.json", "test_vectors.npy"):
        assert (tmp_path / "out" / name).read_bytes() == (made.merged / name).read_bytes()
    (merged / "test_vectors.json").unlink()
    done = run_finetune("export", "ollama", merged, tmp_path / "without", code=0)
    assert "has no test vectors, so what is exported cannot be verified. Merge the run again" in done.errors
    assert not (tmp_path / "without" / "test_vectors.npy").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"kind": "phi", "dtype": torch.bfloat16, "style": "phi3"}, {"full": True}],
    ids=lambda it: next(iter(it)),
)
def test_other_adapters_templates_and_methods_are_verified_too(tmp_path, settings):
    """DoRA, which the engine leaves to PEFT; a family without fused layers, in 16 bits and with another template."""
    write_run(tmp_path / "run", **settings)
    for command in (["verify", tmp_path / "run"], ["merge", tmp_path / "run", tmp_path / "merged"]):
        run_finetune(*command)
    found = certificate(tmp_path / "run" / "adapter")
    assert found["mismatches"] == []
    assert found["runtime"].startswith("transformers " if "full" in settings else "peft ")
    assert ("vLLM does not serve" in " ".join(found["notes"])) == ("use_dora" in settings)
    run_finetune("verify", tmp_path / "merged", code=0)


def test_what_the_model_answers_without_the_system_turn_is_said():
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]

    class Asked(Recorded):
        def render(self, turns):
            return Rendered("<a>", [1, 2, 3, len(turns)])

        def answer(self, token_ids, max_new_tokens):
            return [5, 6, 2] if token_ids[-1] == self.briefest else [7]

    vectors = answered_vectors(system="Be brief.")
    vector = dataclasses.replace(vectors.vectors[0], name=SYSTEM_PROMPT, turns=turns)
    vectors = dataclasses.replace(vectors, vectors=(vector,))
    for briefest, same in ((1, "the same answer"), (2, "another answer")):
        found = compare(Asked(vectors=vectors, stop_ids=[2], briefest=briefest), vectors, bound=0.1)
        assert found.without_system.endswith(f"Without it, the model gives {same} to 'a'"), found.without_system


def test_a_file_that_is_missing_is_a_difference(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    digests = {"config.json": hashlib.sha256(b"{}").hexdigest(), "chat_template.jinja": "1" * 64}
    found = check_digests(tmp_path, Digests(files=digests))["files"]
    assert (found.compared, found.equal, found.mismatches) == (2, 1, ("file chat_template.jinja is missing",))


def test_a_model_that_cannot_be_loaded_is_named_with_its_changed_files(tmp_path):
    def load():
        raise RunFailedError("it cannot be loaded")

    (tmp_path / "config.json").write_text("{")
    recorded = Digests(files={"config.json": "1" * 64})
    with pytest.raises(
        RunFailedError, match=r"^it cannot be loaded; file config\.json is not the one that was written"
    ):
        verifying._compare(load, tmp_path, answered_vectors(), 0.1, recorded)


def test_only_merged_weights_may_differ_by_what_a_merge_rounds(tmp_path):
    bounds = {runtime.name: runtime for runtime in RUNTIMES}
    vectors = answered_vectors(rounding=0.25)
    assert bounds["PEFT"].bound(vectors, tmp_path) == 1e-4
    assert bounds["transformers"].bound(vectors, tmp_path) == 0.5001


def test_a_prompt_that_a_model_has_no_room_or_no_embedding_for_is_not_asked():
    tokenizer = tiny_tokenizer("phi4_mini")

    def asked(num_rows, room):
        model = build_tiny(tiny_phi3_config(vocab_size=num_rows, max_position_embeddings=room))
        return {vector.name: vector for vector in prompts_to_ask(tokenizer, model, None) if vector.turns}

    everything = asked(len(tokenizer), 512)
    longest = max(everything.values(), key=lambda vector: len(vector.token_ids))
    room = len(longest.token_ids) + MAX_NEW_TOKENS
    assert asked(len(tokenizer), room).keys() == everything.keys()
    assert longest.name not in asked(len(tokenizer), room - 1)
    last = max(max(vector.token_ids) for vector in everything.values())
    assert {name for name, vector in everything.items() if max(vector.token_ids) < last} == asked(last, 512).keys()


def test_a_certificate_says_what_could_not_be_compared(tmp_path, monkeypatch):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(verifying, "_compare", lambda *_: answered())
    converted = "transformers has converted weights, so their bytes were compared with nothing"
    of_no_files = "the folder has no manifest.json, so the certificate does not say of which files it is"
    for written, notes in (({"a": "1"}, []), ({}, [converted])):
        vectors = answered_vectors(written=written, note="mine")
        monkeypatch.setattr(verifying, "read_vectors", lambda _, vectors=vectors: vectors)
        assert verify_folder(tmp_path).notes == (*notes, "mine", of_no_files)


@pytest.fixture
def made_vectors(tmp_path):
    """The folder with the test vectors of `answered_vectors`."""
    with committed_folder(tmp_path / "made") as writer:
        write_vectors(writer, answered_vectors(rounding=0.5, system="Be brief."))
    return tmp_path / "made"


def test_test_vectors_are_read_as_they_were_written_and_unknown_fields_are_left_out(made_vectors):
    file, written = made_vectors / "test_vectors.json", answered_vectors(rounding=0.5, system="Be brief.")
    (vector,) = json.loads(file.read_text())["vectors"]
    edit_json(file, vectors=[{**vector, "of_a_later_version": 1}], of_a_later_version=1)
    read = read_vectors(made_vectors)
    for item in dataclasses.fields(read):
        if item.name not in ("logits", "sha256"):
            assert getattr(read, item.name) == getattr(written, item.name), item.name
    assert torch.equal(read.logits, written.logits)
    edit_json(file, vectors=[])
    with pytest.raises(CheckpointError, match="do not belong together: their positions differ"):
        read_vectors(made_vectors)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stop_ids": 7}, r"stop_ids: Input should be a valid"),
        ({"stop_ids": ["a"]}, r"stop_ids\.0: Input should be a valid integer"),
        ({"max_new_tokens": "x"}, r"max_new_tokens: Input should be a valid integer"),
        ({"written": [1]}, r"written: Input should be"),
        ({"vectors": [{"name": "a"}]}, r"vectors\.0\.token_ids: Field required"),
        ({"positions": [4]}, "'a' has unknown tokens or positions"),
        ({"positions": [-1]}, "'a' has unknown tokens or positions"),
        ({"token_ids": [1, 50]}, "'a' has unknown tokens or positions"),
        ({"answer": [50]}, "'a' has unknown tokens or positions"),
        ({"answer": ["x"]}, r"vectors\.0\.answer\.0: Input should be a valid integer"),
        ({"turns": "hello"}, r"vectors\.0\.turns: Input should be"),
    ],
)
def test_test_vectors_of_others_are_refused_in_a_sentence(made_vectors, changes, reason):
    file = made_vectors / "test_vectors.json"
    (vector,) = json.loads(file.read_text())["vectors"]
    edit_json(file, **(changes if not changes.keys() <= vector.keys() else {"vectors": [vector | changes]}))
    with pytest.raises(CheckpointError, match=rf"test_vectors\.json is not a file of test vectors: {reason}"):
        read_vectors(made_vectors)
