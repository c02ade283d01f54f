"""A run compressed by the real llm-compressor: compared with the run, loaded again, and served by a real vLLM.

FINETUNE_LLMCOMPRESSOR is the Python of an environment that has it; docs/tasks/serve.md says how to make one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.errors import ConfigError
from finetune.export import compress
from finetune.export.compress import PYTHON, draw_rows, find_llm_compressor, find_quantizer
from finetune.export.compressed_folder import SCHEMES, load_compressed, scheme_of
from finetune.export.plain_reload import logits_in_fp32
from finetune.export.vectors import read_vectors
from tests.export.finished_runs import write_run
from tests.in_process import run_finetune
from tests.warm import warm_environment

pytestmark = pytest.mark.warm


def runs_llm_compressor(test):
    missing = pytest.mark.skipif(PYTHON not in os.environ, reason=f"llm-compressor: not installed; {PYTHON} names it")
    return pytest.mark.process(pytest.mark.needs("compressed_tensors")(missing(test)))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for split, count in (("train", 24), ("validation", 6)):
        said = [(f"{split} {n}: {n} crates to Porto", json.dumps({"crates": n, "to": "Porto"})) for n in range(count)]
        roles = ("system", "user", "assistant")
        chats = (zip(roles, ("Extract the order.", *texts), strict=True) for texts in said)
        rows = ({"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats)
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def run(rows, tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    words = ("model=phi_tiny", "task=finetune_lora", f"data.train={rows}/train.jsonl", "lora.r=24")
    words += (f"data.validation={rows}/validation.jsonl", "optim.learning_rate=1e-2", "optim.warmup_steps=0")
    words += ("training.max_steps=4", "training.batch_size=4", "testing.max_new_tokens=16", f"output_dir={run}")
    words += ("testing.general_prompts=none",)
    run_finetune("train", *words, code=0)
    return run


@pytest.fixture(scope="module")
def run_loss(run):
    """What the command that measures runs says about this one."""
    told = run_finetune("evaluate", run, "--split", "validation", "--json", code=0).answer.splitlines()[-1]
    return json.loads(told)["tuned"]["loss"]


@pytest.fixture(scope="module")
def warm_compressor():
    """A cold one imports torch, transformers and llm-compressor for each command; and vLLM is imported three times."""
    with warm_environment(PYTHON), warm_environment("FINETUNE_VLLM"):
        yield


@pytest.fixture(scope="module")
def exports(run, warm_compressor, tmp_path_factory):
    """Compresses the run as a scheme, once, and returns the folder and what the command printed."""
    made = {}

    def export(scheme):
        if scheme not in made:
            out = tmp_path_factory.mktemp(scheme) / "out"
            with pytest.MonkeyPatch.context() as patch:
                if scheme != "w4a16":  # one of them is served by vLLM, which takes a minute
                    patch.delenv("FINETUNE_VLLM", raising=False)
                done = run_finetune("export", "vllm", run, out, "--type", scheme, "--rows", "8", code=0)
            made[scheme] = out, done.answer
        return made[scheme]

    return export


@runs_llm_compressor
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_compressed_run_is_compared_with_the_run_and_verifies(scheme, run_loss, exports, tmp_path):
    out, printed = exports(scheme)
    before, after = map(float, re.search(r"validation loss \(6 rows\)\W+([\d.]+)\W+([\d.]+)", printed).groups())
    assert before == pytest.approx(run_loss, abs=5.1e-5)
    assert 0 < abs(after - before) < 0.5 * before
    assert re.search(r"greedy answers that changed\W+\d of 6 \(", printed)
    assert "Stored as before: lm_head, embeddings and norms." in printed
    assert "Note: vLLM needs --max-lora-rank 32 to serve this adapter. In " in printed
    assert "rows begin with the system turn 'Extract the order.', which a server does not add" in printed
    assert scheme_of(out) == SCHEMES[scheme]
    assert re.search(
        rf"\| validation loss \(6 rows\) \| {before:.4f} \| {after:.4f} \|", (out / "README.md").read_text()
    )
    assert (out / "tokenizer.json").is_file()
    verified = run_finetune("verify", out, "--out", tmp_path / "certificate.json", code=0)
    assert "the test vectors are of the compressed model" in verified.stdout


@runs_llm_compressor
def test_inputs_are_rounded_as_a_server_rounds_them(exports):
    """A model whose weights alone are rounded would have other logits than vLLM's, and than the test vectors."""
    out, _ = exports("w8a8")
    known, model = read_vectors(out), load_compressed(out)
    prompts = [vector.token_ids for vector in known.vectors]
    rounded = logits_in_fp32(model, prompts)
    for layer in model.modules():
        layer.quantization_enabled = False
    assert not torch.allclose(logits_in_fp32(model, prompts), rounded, rtol=1e-3)


@runs_llm_compressor
@pytest.mark.slow
@pytest.mark.skipif("FINETUNE_VLLM" not in os.environ, reason="vLLM: not installed; FINETUNE_VLLM names its Python")
def test_vllm_serves_the_compressed_model(exports):
    out, printed = exports("w4a16")
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        assert re.search(r"certificate in vLLM\W+not run here", printed), printed
        assert "cpu_gemm_wna16" in printed
        pytest.skip("vLLM multiplies weights in 4 bits on CPUs with AVX-512 alone")
    assert re.search(r"certificate in vLLM\W+same", printed), printed
    certificate = json.loads((out / "certificate-vllm.json").read_text())
    assert certificate["runtime"].startswith("vLLM ")
    assert certificate["verdict"] == "same"
    assert certificate["answers"]["compared"] == 7


@runs_llm_compressor
def test_without_vllm_the_table_says_not_run_here(exports):
    _, printed = exports("fp8")
    assert re.search(r"certificate in vLLM\W+not run here", printed), printed
    assert "Note: not run in vLLM: vLLM is not installed here." in printed


@runs_llm_compressor
def test_what_cannot_be_compressed_leaves_nothing(rows, run, warm_compressor, tmp_path):
    narrow = write_run(tmp_path / "narrow", words=(f"data.path={rows}/train.jsonl",))
    done = run_finetune("export", "vllm", narrow.folder.path, tmp_path / "out", "--type", "w4a16", code=2)
    assert "w4a16 needs multiples of 32" in done.stdout

    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    config = moved / "config.yaml"
    config.write_text(config.read_text().replace(f"{rows}/train.jsonl", f"{tmp_path}/gone.jsonl"))
    done = run_finetune("export", "vllm", moved, tmp_path / "out", "--type", "fp8", code=2)
    assert f"{tmp_path}/gone.jsonl" in done.stdout
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.*/"))


@pytest.mark.process
def test_llm_compressor_is_asked_for(tmp_path):
    run = write_run(tmp_path / "run").folder.path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PYTHON, sys.executable)
        with pytest.raises(ConfigError, match=r"is not in the environment of .*pip install torch llmcompressor"):
            find_llm_compressor()
        patch.delenv(PYTHON, raising=False)
        done = run_finetune("export", "vllm", run, tmp_path / "out", code=2)
    assert "llm-compressor is not installed here" in done.stdout


def test_options_that_do_not_fit_are_refused(tmp_path):
    run = write_run(tmp_path / "run").folder.path
    (tmp_path / "taken").write_text("")
    for words, message in (
        (("vllm", run, tmp_path / "out", "--type", "int3"), "'int3' is not one of"),
        ((run, tmp_path / "out", "--rows", "8"), "name a format before its options"),
        ((run, tmp_path / "out", "--compress", "fp8", "--gguf"), "cannot be given together"),
        (("vllm", run, tmp_path / "taken"), "already exists"),
        (("vllm", tmp_path / "run-base", tmp_path / "out"), "is not the folder of a run"),
    ):
        done = run_finetune("export", *words, code=2)
        assert message in " ".join(done.stdout.split()), done.stdout


def test_runs_that_cannot_be_measured_or_were_not_tried_are_refused(tmp_path):
    pairs, experts = write_run(tmp_path / "pairs", words=("training.objective=dpo",)), write_run(tmp_path / "experts")
    (tmp_path / "experts-base/config.json").write_text(json.dumps({"model_type": "phimoe"}))
    for run, message in (
        (pairs, "was trained with training.objective=dpo"),
        (experts, "a mixture of experts, whose compressed form was not tried"),
    ):
        done = run_finetune("export", "vllm", run.folder.path, tmp_path / "out", code=2)
        assert message in " ".join(done.stdout.split()), done.stdout


def test_too_few_tokens_for_an_importance_matrix_are_refused_before_the_merge(tmp_path, monkeypatch):
    run, train = write_run(tmp_path / "run"), EncodedExamples.from_rows([(range(256), [True] * 256)] * 5, end_id=0)
    monkeypatch.setattr(compress, "find_program", lambda name, folder: folder / name)
    monkeypatch.setattr(compress, "load_examples", lambda section: None)
    monkeypatch.setattr(compress, "build_run_tokenizer", lambda config: SimpleNamespace(decode=lambda ids: "text"))
    monkeypatch.setattr(compress, "encode_examples", lambda *_: EncodedSplits(train=train))
    assert find_quantizer(tmp_path, run, 4).rows == ("text",) * 4
    with pytest.raises(ConfigError, match=r"--imatrix 3 draws rows of 768 tokens .* needs 1,024: name more rows"):
        find_quantizer(tmp_path, run, 3)
    monkeypatch.setattr(compress, "encode_examples", lambda *_: EncodedSplits(train=train.select([0, 1])))
    with pytest.raises(ConfigError, match=r"512 tokens .*: leave it out, because the run has no more rows"):
        find_quantizer(tmp_path, run, 200)


def test_calibration_rows_are_drawn_with_a_seed():
    train = EncodedExamples.from_rows([([n, n + 1], [False, True]) for n in range(50)], end_id=0)
    drawn = draw_rows(EncodedSplits(train=train), 8, 3)
    assert drawn == draw_rows(EncodedSplits(train=train), 8, 3) != draw_rows(EncodedSplits(train=train), 8, 4)
    assert len(drawn) == 8
    assert all(row == [row[0], row[0] + 1] for row in drawn)
    assert sorted(draw_rows(EncodedSplits(train=train), 99, 3)) == [[n, n + 1] for n in range(50)]
