"""Exports: a Modelfile, and a GGUF file by a script in place of the converter. test_llama_cpp.py runs the real one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from finetune.errors import ModelError, RunFailedError
from finetune.export.gguf import Gguf, copy_for_llama_cpp, export_model, find_converter
from finetune.export.gguf_file import read_header
from tests.export.finished_runs import write_run
from tests.export.gguf_files import write_gguf
from tests.in_process import run_finetune
from tests.launches import wait_until
from tests.model.variants import VARIANTS
from tests.tiny import tiny_tokenizer


@pytest.fixture
def model(tmp_path):
    """Write the files of a merged folder that an export reads."""
    return write_model(tmp_path / "merged", "Phi-3-mini-4k")


def write_model(folder: Path, name: str) -> Path:
    tokenizer = VARIANTS[name].tokenizer()
    tokenizer.save_pretrained(folder)
    model = VARIANTS[name].model(tokenizer)
    ids = tokenizer.convert_tokens_to_ids([VARIANTS[name].end, "<|endoftext|>"])
    model.generation_config.eos_token_id = model.config.eos_token_id = ids
    model.save_pretrained(folder)
    return folder


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "has_sentencepiece", "expected"),
    [("phi-4", False, "GPT2Tokenizer"), ("Phi-3-mini-4k", True, "the model's own")],
)
def test_the_converter_gets_the_tokenizer_in_the_form_that_it_reads(tmp_path, name, has_sentencepiece, expected):
    """By a copy: the merged folder stays as it was. The script refuses with what it found in the copy."""
    model = write_model(tmp_path / "merged", name)
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    own = json.loads((model / "tokenizer_config.json").read_text())["tokenizer_class"]
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(
        "import json, os, sys; folder = sys.argv[1]; names = set(os.listdir(folder));"
        "described = json.load(open(folder + '/tokenizer_config.json'))['tokenizer_class'];"
        "sys.exit(f'{described} {\"tokenizer.model\" in names} {sorted(names - set(sys.argv[2:]))}')"
    )
    base = tmp_path if has_sentencepiece else None
    with pytest.raises(ModelError) as refused:
        export_model(model, tmp_path / "out", gguf=Gguf(converter=script, weight_type="f16", base=base))
    expected = own if expected == "the model's own" else expected
    assert f"refused the model: {expected} {has_sentencepiece} " in str(refused.value)
    assert all(f"'{name}'" in str(refused.value) for name in before)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_a_tokenizer_that_is_not_described_is_refused_by_name(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "scratch").mkdir()
    with pytest.raises(ModelError, match=r"has no tokenizer_config\.json"):
        copy_for_llama_cpp(tmp_path / "model", tmp_path / "scratch", None, {})


def test_without_llama_cpp_it_is_said_how_to_get_it(model, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    done = run_finetune("export", "gguf", model, tmp_path / "out", code=2)
    assert "git clone https://github.com/ggml-org/llama.cpp" in done.errors
    assert "vendor/llama.cpp in the source package of llama-cpp-python" in done.errors
    done = run_finetune("export", "gguf", model, tmp_path / "out", "--llama-cpp", tmp_path, code=2)
    assert "has no convert_hf_to_gguf.py" in done.errors
    assert not (tmp_path / "out").exists()


def test_the_folder_of_llama_cpp_comes_from_the_option_or_the_environment(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "convert_hf_to_gguf.py").touch()
    variables = {"LLAMA_CPP_DIR": str(tmp_path / "b")}
    assert find_converter(None, variables).parent.name == "b"
    assert find_converter(tmp_path / "a", variables).parent.name == "a"


@pytest.mark.process
@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("BPE pre-tokenizer was not recognized - update", "The Phi models on the hub can be converted"),
        ("Model Phi9ForCausalLM is not supported", "update llama.cpp"),
    ],
)
def test_a_refusal_of_the_converter_is_repeated_with_what_to_do(model, tmp_path, said, hint):
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(f"import sys; print(); sys.exit({said!r})")
    with pytest.raises(ModelError, match=re.escape(f"llama.cpp's converter refused the model: {said}. ") + f".*{hint}"):
        export_model(model, tmp_path / "out", gguf=Gguf(converter=script, weight_type="f16"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["convert_hf_to_gguf.py", "merged"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.warm
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_of_an_export_behind(model, tmp_path, number):
    script, began = tmp_path / "convert_hf_to_gguf.py", tmp_path / "began"
    script.write_text(f"import os, time; open({str(began)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    before = {path.name for path in tmp_path.iterdir()}
    words = [sys.executable, "-m", "finetune", "export", "gguf", model, tmp_path / "out", "--llama-cpp", tmp_path]
    with subprocess.Popen(list(map(str, words)), stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: began.exists() and began.read_text(), "the converter", 120)
        assert {path.name for path in tmp_path.iterdir()} > {*before, began.name}
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert f"ended by {number.name}" in errors
    assert {path.name for path in tmp_path.iterdir()} == {*before, began.name}
    wait_until(lambda: not psutil.pid_exists(int(began.read_text())), "the converter's end", 60)


@pytest.mark.process
@pytest.mark.parametrize("written", [b"PK\3\4" + bytes(30), b"GGUF\3\0\0\0" + bytes(16)])
def test_a_file_that_is_no_model_is_not_taken_for_one(tmp_path, written):
    """A converter can report success with a broken file, so the file is checked, not only the exit code."""
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(
        "import sys; given = dict(zip(sys.argv, sys.argv[1:]))\n"
        "assert given['--model-name'] == 'phi', 'llama.cpp strips spaces in a file with the name phi3'\n"
        f"open(given['--outfile'], 'wb').write({written!r})"
    )
    model = write_model(tmp_path / "merged", "phi-4")
    with pytest.raises(RunFailedError, match=r"the converter reported success, but model\.gguf"):
        export_model(model, tmp_path / "out", gguf=Gguf(converter=script, weight_type="f16"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["convert_hf_to_gguf.py", "merged"]


def test_a_stop_id_that_the_file_cannot_name_is_said(model, tmp_path, caplog, monkeypatch):
    """The file has keys for eos and two more, and llama.cpp is not here to be asked whether it knows the fourth."""
    tokenizer = VARIANTS["Phi-3-mini-4k"].tokenizer()
    stops = tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>"])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))

    def convert(_model, out, _gguf, _rules):
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id}
        return read_header(write_gguf(out, keys))

    monkeypatch.setattr("finetune.export.gguf.convert", convert)
    monkeypatch.setattr("finetune.export.gguf.installed_version", lambda: None)
    export_model(model, tmp_path / "out", gguf=Gguf(converter=tmp_path, weight_type="f32"))
    assert f"may not stop at <|assistant|> ({stops[3]}). Give their texts as `stop` in each request" in caplog.text


def test_a_modelfile_alone_names_a_merged_folder_that_ollama_can_import(model, tmp_path):
    out = tmp_path / "my out"
    refused = run_finetune("export", "ollama", model, out, code=2)
    assert "has no tokenizer.model, without which Ollama takes its tokenizer for another kind" in refused.errors
    (model / "tokenizer.model").touch()
    done = run_finetune("export", "ollama", model, out, code=0)
    assert f"cd '{out}' && ollama create" in done.answer
    text = (out / "Modelfile").read_text()
    assert text.startswith(f"FROM {model}\n")
    assert 'PARAMETER stop "<|end|>"\nPARAMETER stop "<|endoftext|>"\n' in text
    (model / "generation_config.json").write_text("[]")
    damaged = run_finetune("export", "ollama", model, tmp_path / "other", code=2)
    assert "generation_config.json cannot be read: 'list' object has no attribute 'get'" in damaged.errors


def test_a_template_that_no_modelfile_can_have_is_refused_before_the_run_is_merged(tmp_path):
    """As Gemma's, which trims the text of a turn. The base is gone, so a merge would fail otherwise."""
    tokenizer = tiny_tokenizer("phi4_mini")
    assert "message['content']" in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'] | trim")
    run = write_run(tmp_path / "run", tokenizer=tokenizer)
    for file in (tmp_path / "run-base").glob("*.safetensors"):
        file.unlink()
    (tmp_path / "convert_hf_to_gguf.py").touch()
    done = run_finetune("export", "gguf", run.folder.path, tmp_path / "out", "--llama-cpp", tmp_path, code=2)
    assert "cannot be written as a Modelfile" in done.errors
    assert "--no-modelfile" in done.errors


def test_a_run_is_told_to_be_merged_first(tmp_path):
    run = write_run(tmp_path / "run").folder
    for folder, said in (
        (run.path, f"finetune merge {run.path} OUT"),
        (run.adapter, f"finetune merge {run.adapter} OUT"),
        (tmp_path, "is not a model folder"),
        (tmp_path / "gone", "gone does not exist"),
    ):
        done = run_finetune("export", "ollama", folder, tmp_path / "out", code=2)
        assert said in done.errors


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--gguf", "--onnx"), "--gguf and --onnx cannot be given together: a folder has one format"),
        (("--onnx", "--type", "q8_0"), "'q8_0' is not one of"),
        (("--allow-differences",), "name a format before its options: finetune export gguf|lora|ollama"),
        (("--gguf", "--adapter-only"), "No such option: --adapter-only"),
        (("gguf",), "the format comes first: finetune export gguf {run}. For an Ollama Modelfile in a folder gguf:"),
    ],
)
def test_a_folder_has_one_format_and_a_type_that_it_knows(tmp_path, words, reason):
    out = () if words == ("gguf",) else (tmp_path / "out",)
    done = run_finetune("export", tmp_path, *out, *words, code=2)
    assert reason.replace("{run}", str(tmp_path)) in " ".join(done.errors.replace("│", "").split())


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("--gguf . out --type f32", "gguf . out --type f32"),
        (". out --gguf --lora --adapter-only", "lora . out --adapter-only"),
        (". --onnx", "onnx ."),
        (". out --compress=w4a16 --rows 8", "vllm . out --type w4a16 --rows 8"),
        (". out --compress w4a16", "vllm . out --type w4a16"),
        (". out --smallest --keep 0.9", "smallest . out --keep 0.9"),
        (". out", "ollama . out"),
    ],
)
def test_flags_choose_the_format_as_before_and_the_form_of_now_is_said(former, now, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    done, present = (run_finetune("export", *words.split(), code=2) for words in (former, now))
    said, _, error = done.errors.partition("\n")
    assert said == f"finetune: the format comes first now: finetune export {now}"
    assert error == present.errors
