"""llama.cpp's quantizer: found, refused and asked; and the smallest type that holds. test_llama_cpp.py runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from finetune.errors import ConfigError, ModelError, RequirementError
from finetune.export import quantizing
from finetune.export.gguf_served import QUANTIZED, gguf_bound
from finetune.export.quantizing import Quantizer, find_program, types_of
from finetune.export.smallest import FORMATS, expected_sizes
from finetune.fallbacks import Fallback
from tests.export.finished_runs import write_run
from tests.export.gguf_files import write_gguf
from tests.in_process import run_finetune

Q5_0, Q8_0, Q4_K = 6, 8, 12


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport os, shutil, sys\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_quantizer_is_found_in_the_checkout_its_build_and_on_path(tmp_path, monkeypatch):
    monkeypatch.setattr(quantizing, "installed_version", lambda: "0.3")
    monkeypatch.setenv("PATH", str(tmp_path / "on-path"))
    with pytest.raises(ConfigError, match=r"cmake -B build && cmake --build build --target llama-quantize"):
        find_program("llama-quantize", tmp_path)
    for folder in ("on-path", "build/bin", "."):
        program = write_program(tmp_path / folder / "llama-quantize", "")
        assert find_program("llama-quantize", tmp_path) == program
    monkeypatch.setattr(quantizing, "installed_version", lambda: None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        find_program("llama-quantize", tmp_path)


def test_what_does_not_fit_the_type_is_said_and_refused_if_strict(tmp_path, caplog):
    source = write_gguf(tmp_path / "source.gguf", {}, matrices={"q": (576, Q5_0), "k": (576, Q8_0), "v": (512, Q4_K)})
    program = write_program(tmp_path / "llama-quantize", "shutil.copy(*sys.argv[1:3])")
    assert Quantizer(program=program).quantize(source, "q4_k_m").name == "quantized.gguf"
    stored = "q5_0 (1), q8_0 (1), q4_k (1): the rows of 2 of 3 matrices are not a multiple of 256 long"
    assert f"--type: wanted q4_k_m, using {stored}" in caplog.text
    with pytest.raises(ConfigError, match="The run is strict"):
        Quantizer(program=program, is_strict=True).quantize(source, "q4_k_m")
    assert isinstance(types_of(source, "q4_k_m"), Fallback)
    assert types_of(source, "q4_0") == "q5_0 (1), q8_0 (1), q4_k (1)", "576 is a multiple of its 32"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("sys.exit('main: failed to quantize')", r"llama\.cpp's quantizer refused the model: main: failed to quantize"),
        (None, r"llama\.cpp's quantizer does not start: .*llama-quantize"),
    ],
    ids=["fails", "is no program"],
)
def test_a_quantizer_that_fails(tmp_path, program, reason):
    source = write_gguf(tmp_path / "source.gguf", {})
    path = write_program(tmp_path / "llama-quantize", program or "")
    if program is None:
        path.write_bytes(b"\x7fELF")
    with pytest.raises(ModelError, match=reason):
        Quantizer(program=path).quantize(source, "q4_k_m")


def test_an_importance_matrix_is_made_once_of_the_rows(tmp_path):
    source = write_gguf(tmp_path / "source.gguf", {})
    made = "text = sys.argv[sys.argv.index('-f') + 1]; out = sys.argv[sys.argv.index('-o') + 1]\n"
    made += "assert '--parse-special' in sys.argv; os.link(text, out)"
    imatrix = write_program(tmp_path / "llama-imatrix", made)
    used = (
        "assert open(sys.argv[sys.argv.index('--imatrix') + 1]).read() == '<|a|>b<|a|>c'; shutil.copy(*sys.argv[3:5])"
    )
    program = write_program(tmp_path / "llama-quantize", used)
    quantizer = Quantizer(program=program, imatrix_program=imatrix, rows=("<|a|>b", "<|a|>c"))
    quantizer.quantize(source, "q4_k_m")
    quantizer.quantize(source, "q6_k")  # os.link would fail if the matrix were made again
    assert (tmp_path / "imatrix.gguf").read_text() == "<|a|>b<|a|>c"


def test_a_quantized_file_has_a_bound_of_its_own(tmp_path):
    for number in QUANTIZED.values():
        write_gguf(tmp_path / "model.gguf", {"general.file_type": number})
        assert gguf_bound(tmp_path) == 0.125


def test_types_are_tried_from_small_to_large(tmp_path):
    config = {"model_type": "gpt2", "vocab_size": 8, "n_embd": 8, "tie_word_embeddings": True, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(100_000))
    names = list(expected_sizes(tmp_path))
    assert (
        set(names)
        == {*QUANTIZED, "q8_0", "f16", "w4a16", "int4 ONNX"}
        == {name for each in FORMATS for name in each.types}
    )
    assert names == ["q2_k", "q3_k_m", "w4a16", "int4 ONNX", "q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0", "f16"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 3000}))
    assert list(expected_sizes(tmp_path))[-2:] == ["w4a16", "f16"], "w4a16 keeps embeddings in 16 bits"


def test_options_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run").folder.path
    (tmp_path / "convert_hf_to_gguf.py").touch()
    monkeypatch.setenv("LLAMA_CPP_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for words, message in (
        (("gguf", run, "--type", "q4_k_m"), "cmake --build build --target llama-quantize"),
        (("gguf", tmp_path / "run-base", "--type", "q4_k_m", "--imatrix", "8"), "is not the folder of a run"),
        (("smallest", tmp_path / "run-base"), "is not the folder of a run"),
        (("smallest", run), "llama-imatrix. Or use finetune export gguf --type q8_0, which"),
        (("gguf", run, "--type", "q8_0", "--imatrix", "8"), "--imatrix needs --type q2_k or"),
        (("--smallest", run, "--gguf"), "cannot be given together"),
        (("gguf", run, "--keep", "0.9"), "No such option: --keep"),
        (("lora", run, "--type", "q4_k_m"), "'q4_k_m' is not one of"),
    ):
        done = run_finetune("export", *words[:2], tmp_path / "out", *words[2:], code=2)
        assert message in " ".join(done.stdout.split()), done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.warm
@pytest.mark.needs("onnxruntime_genai", "onnx_ir")
def test_a_type_that_holds_is_kept_and_otherwise_nothing(tmp_path, monkeypatch):
    """The converter refuses this tokenizer, so int4 ONNX is the only type that is measured, in its own runtime."""
    for split, count in (("train", 8), ("validation", 4)):
        turns = [[("user", f"{split} {n}"), ("assistant", f"{n} crates")] for n in range(count)]
        rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["task=finetune_lora", "model=phi_tiny", f"data.train={tmp_path}/train.jsonl", "training.max_steps=2"]
    words += [f"data.validation={tmp_path}/validation.jsonl", "testing.max_new_tokens=8", f"output_dir={tmp_path}/run"]
    run_finetune("train", *words, "training.batch_size=4", code=0)
    (tmp_path / "convert_hf_to_gguf.py").write_text("import sys; sys.exit('no such tokenizer')")
    write_program(tmp_path / "llama-quantize", "")
    monkeypatch.setattr(quantizing, "installed_version", lambda: "0.3")
    monkeypatch.delenv("FINETUNE_LLMCOMPRESSOR", raising=False)
    monkeypatch.setattr("finetune.export.smallest.MOST_LOSS", 0.0)
    before = {path.name for path in tmp_path.iterdir()}
    command = ("export", "smallest", tmp_path / "run", tmp_path / "out", "--llama-cpp", tmp_path)
    done = run_finetune(*command, "--keep", "0")
    assert done.returncode == RequirementError.exit_code == 3, done.stdout
    assert "nothing was written to" in " ".join(done.stdout.split())
    assert {path.name for path in tmp_path.iterdir()} == before

    monkeypatch.setattr("finetune.export.smallest.MOST_LOSS", 2.0)
    done = run_finetune(*command, "--keep", "0", code=0)
    assert "q4_k_m was not measured: llama.cpp's converter refused the model" in done.errors
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["verdict"] == "same"
    assert certificate["notes"][1].startswith("int4 ONNX on 4 validation rows: loss ")
    told = json.loads(
        run_finetune("evaluate", tmp_path / "run", "--split", "validation", "--json").answer.splitlines()[-1]
    )
    assert f"(the run's: {told['tuned']['loss']:.4f})" in certificate["notes"][1]
    assert {path.name for path in tmp_path.iterdir()} == {*before, "out"}
