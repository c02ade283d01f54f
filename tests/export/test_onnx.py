"""An ONNX model in onnxruntime-genai equals base and adapter, or is refused; the runtime is the real one."""

from __future__ import annotations

import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from finetune.config.config_files import resolve_shipped
from finetune.errors import CheckpointError, RunFailedError
from finetune.export import onnx, onnx_served
from finetune.export.converters import _with_known_splits, _with_layers_and_rope
from finetune.export.merge import load_tuned_model, write_merged
from finetune.export.onnx import export_onnx
from finetune.export.onnx_served import load_onnx, type_of
from finetune.export.vectors import CERTIFICATE
from finetune.export.verifying import verify_folder
from finetune.inference.decoding import Decoding, generate_answers
from finetune.model.tokens import build_run_tokenizer
from tests.export.finished_runs import write_run
from tests.in_process import run_finetune

WINDOW = 9
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "sliding_window": WINDOW}
"""The runtime rotates multiples of 16 numbers of a head: here half of 64. All prompts are longer than the window."""
PHI3 = {"model_type": "phi3", "max_position_embeddings": 4096, "num_hidden_layers": 2}
pytestmark = pytest.mark.warm

needs_runtime = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnxruntime_genai", "onnx_ir")),
    reason='onnxruntime-genai is installed with: pip install -e ".[onnx]"',
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "orders", base_sizes=SIZES)


@pytest.fixture(scope="module")
def merged(run, tmp_path_factory):
    return write_merged(run, tmp_path_factory.mktemp("merged") / "out").folder


@pytest.fixture(scope="module")
def exported(merged, tmp_path_factory):
    out = tmp_path_factory.mktemp("onnx") / "out"
    export_onnx(merged, out)
    return out


@pytest.fixture
def built_before(exported, monkeypatch):
    """Have the files of `exported` built again, without the builder's seconds. Returns a list of what spoils them."""
    spoils = []

    def copy(model, out, kind):
        for name in ("model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(exported / name, out)
        shutil.copy(exported / "chat_template.jinja", out)
        for spoil in spoils:
            spoil(out)

    monkeypatch.setattr(onnx, "_build", copy)
    monkeypatch.setattr(onnx, "_compare_elsewhere", onnx._compare_here)
    return spoils


@needs_runtime
@pytest.mark.slow
def test_logits_answers_tokens_and_stops_are_those_of_base_and_adapter(run, merged, exported):
    """Against PEFT's own forward, beside the test vectors: with windows, partial rotary and tied embeddings."""
    served, tuned, tokenizer = load_onnx(exported), load_tuned_model(run).eval(), build_run_tokenizer(run.config)
    generator = torch.Generator().manual_seed(5)
    for length in (1, WINDOW - 1, WINDOW + 1, 40):
        ids = torch.randint(0, len(tokenizer), (length,), generator=generator).tolist()
        with torch.no_grad():
            expected = tuned(input_ids=torch.tensor([ids])).logits[0]
        assert float((served.logits(ids, range(length)) - expected).norm() / expected.norm()) < 1e-5
        decoding = Decoding(stop_ids=served.stop_ids, max_new_tokens=12, keeps_stop=True)
        assert [served.answer(ids, 12)] == generate_answers(tuned, [ids], decoding, batch_size=1)
    turns = [{"role": "user", "content": "3 crates for Marta,\n\n  and größer 東京"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert served.render(turns) == (text, tokenizer(text, add_special_tokens=False)["input_ids"])
    said = json.loads((merged / "generation_config.json").read_text())["eos_token_id"]
    assert sorted(served.stop_ids) == sorted(said)
    assert len(said) == 2
    assert type_of(exported) == "f32"


def with_options(options: dict[str, object], exported, folder):
    """Copy an exported folder, without its digests, and set options of its sessions."""
    shutil.copytree(exported, folder)
    (folder / "manifest.json").unlink()
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"] |= options
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


@needs_runtime
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"custom_ops_library": "code.so"},
        {"enable_profiling": "trace"},
        {"provider_options": [{"QNN": {"backend_path": "code.so"}}]},
    ],
    ids=["library", "trace", "provider"],
)
def test_a_configuration_that_could_run_code_or_write_files_is_refused(exported, tmp_path, options):
    folder = with_options(options, exported, tmp_path / "model")
    (folder / "code.so").write_bytes(b"not a library")
    done = run_finetune("verify", folder, code=2)
    assert f"sets session_options.{next(iter(options))}, which finetune export does not write" in done.errors
    assert "code.so" not in done.errors.replace("model_path", ""), "the runtime tried to load it"


@needs_runtime
@pytest.mark.slow
def test_a_template_without_end_and_a_damaged_graph_end_verify_with_a_sentence(exported, tmp_path):
    endless = with_options({}, exported, tmp_path / "endless")
    loop = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    (endless / "chat_template.jinja").write_text(f"{loop}{{{{ messages[0].content }}}}")
    done = run_finetune("verify", endless, code=3)
    assert f"the chat template of {endless} took longer than 5 s" in done.errors
    empty = with_options({}, exported, tmp_path / "empty")
    (empty / "model.onnx").unlink()
    done = run_finetune("verify", empty, code=3)
    assert "is damaged: it has no model.onnx" in done.errors
    (empty / "model.onnx").write_bytes(b"not a graph")
    done = run_finetune("verify", empty, code=3)
    assert "cannot be loaded by onnxruntime-genai" in done.errors


@needs_runtime
@pytest.mark.slow
def test_the_folder_is_certified_and_verifies_again(exported):
    certificate = json.loads((exported / CERTIFICATE).read_text())
    assert certificate["verdict"] == "same"
    assert certificate["runtime"].startswith("onnxruntime-genai 0.")
    verified = verify_folder(exported)
    assert verified.mismatches == []
    assert verified.comparison.checks["answers"].compared > 3
    assert "onnxruntime-genai has converted weights" in verified.notes[0]


@needs_runtime
@pytest.mark.slow
def test_a_run_is_merged_for_it(run, exported, built_before, tmp_path):
    done = run_finetune("export", "onnx", run.folder.path, tmp_path / "out", code=0)
    assert "matrices as f32" in done.answer
    assert (tmp_path / "out/test_vectors.json").read_bytes() == (exported / "test_vectors.json").read_bytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@needs_runtime
@pytest.mark.slow
def test_int4_is_compared_too_and_what_differs_can_be_kept(merged, tmp_path):
    """Weights that were drawn suffer more from rounding than trained ones: these are beyond the bound."""
    done = run_finetune("export", "onnx", merged, tmp_path / "out", "--type", "int4", "--allow-differences", code=0)
    assert "matrices as int4" in done.answer
    assert re.search(r"logits at positions .* \d\.\d+ \(bound 0\.5\)", done.answer)
    assert "Note: with a bound of 0.5, the comparison shows that the model loads and answers" in done.answer
    assert "kept though it differs: prompt" in done.errors
    assert type_of(tmp_path / "out") == "int4"
    certificate = json.loads((tmp_path / "out" / CERTIFICATE).read_text())
    assert certificate["verdict"] == "differs"
    assert verify_folder(tmp_path / "out", bound=2.0).mismatches == []


def drop_merges(folder):
    record = json.loads((folder / "tokenizer.json").read_text())
    record["model"]["merges"] = record["model"]["merges"][:3]
    (folder / "tokenizer.json").write_text(json.dumps(record))


def change_stops(folder):
    record = json.loads((folder / "genai_config.json").read_text())
    record["model"]["eos_token_id"] = record["model"]["eos_token_id"][:1]
    (folder / "genai_config.json").write_text(json.dumps(record))


def flip_weights(folder):
    data = bytearray((folder / "model.onnx.data").read_bytes())
    data[3::4] = bytes(byte ^ 0x80 for byte in data[3::4])
    (folder / "model.onnx.data").write_bytes(data)


@needs_runtime
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            drop_merges,
            r'prompt "one turn": token \d+ of the prompt is \[\d+\], expected \[\d+\].* Render and encode prompts',
        ),
        (change_stops, r"it stops at \[\d+\], expected \[\d+, \d+\]"),
        (flip_weights, r"logits at position \d+ differ by .* serve the merged folder"),
    ],
)
def test_what_answers_otherwise_is_refused_and_nothing_stays(merged, built_before, tmp_path, spoil, reason):
    built_before.append(spoil)
    with pytest.raises(RunFailedError, match=reason):
        export_onnx(merged, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_runtime_that_ends_its_process_does_not_end_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "_compare_here", _die)
    with pytest.raises(RunFailedError, match="onnxruntime-genai ended its process"):
        onnx._compare_elsewhere(tmp_path, 1e-3)


@pytest.mark.slow
def test_a_folder_without_vectors_is_told_to_be_merged_again(merged, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "refuse_missing_packages", lambda *, builds: None)
    older = shutil.copytree(merged, tmp_path / "older")
    (older / "test_vectors.json").unlink()
    with pytest.raises(CheckpointError, match="Write the model again with finetune merge RUN OUT"):
        export_onnx(older, tmp_path / "out")


def test_a_missing_package_is_said_with_the_command_that_installs_it(tmp_path, monkeypatch):
    """The builder imports onnx-ir, which is not needed to serve."""
    monkeypatch.setattr(onnx_served, "find_spec", lambda name: None if name == "onnx_ir" else object())
    onnx_served.refuse_missing_packages(builds=False)
    done = run_finetune("export", "onnx", tmp_path, tmp_path / "out", code=2)
    assert "needs onnx-ir, not installed here" in done.errors
    assert "pip install 'phi-finetune[onnx]'" in done.errors


def test_a_pattern_that_the_runtime_knows_splits_like_phi_tinys():
    text = Path(resolve_shipped("shipped:phi_tiny"), "tokenizer.json").read_text(encoding="utf-8")
    rewritten = json.dumps(_with_known_splits(json.loads(text)))
    assert (r"[^\\p{L}\\p{N}]+" in text, r"[^\\p{L}\\p{N}]+" in rewritten) == (True, False)
    ours, theirs = Tokenizer.from_str(text), Tokenizer.from_str(rewritten)
    for line in (
        "3 crates, 12 boxes!\n\n  Olá, Zürich: 3 € für 价格 🙂",
        '{"a1": 0.25}\tdon\'t ½ ② ٣',
        "<|end|>\n<|user|> x ",
    ):
        assert ours.encode(line).ids == theirs.encode(line).ids


def test_the_builder_is_told_which_phi3_has_longrope():
    long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = {**PHI3, "original_max_position_embeddings": 1024}
    read = _with_layers_and_rope({**config, "rope_parameters": long})
    assert read["rope_parameters"]["type"] == "longrope"
    assert read["original_max_position_embeddings"] == 1024
    read = _with_layers_and_rope({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert read["original_max_position_embeddings"] == 4096


def _die(folder, bound):
    os._exit(134)


def test_the_builder_is_told_which_layers_have_a_window():
    """Without layer_types it builds all layers without one, and answers differ beyond the window."""
    assert _with_layers_and_rope({**PHI3, "sliding_window": 2047})["layer_types"] == ["sliding_attention"] * 2
    for other in ({"sliding_window": None}, {"sliding_window": 262144}, {"sliding_window": 9, "model_type": "llama"}):
        assert "layer_types" not in _with_layers_and_rope({**PHI3, **other})
