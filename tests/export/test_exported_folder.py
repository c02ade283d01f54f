"""Exports: a Modelfile, a GGUF file if llama.cpp is installed, and a helpful message if it is not.

The tests that convert run llama.cpp's own script. They need LLAMA_CPP_DIR (a checkout; the source package of
llama-cpp-python on PyPI holds one in vendor/llama.cpp) and the packages sentencepiece and protobuf.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.cli import main as finetune
from finetune.errors import ModelError, RunFailedError
from finetune.export.exported_folder import export_model
from finetune.export.gguf import Gguf, copy_for_llama_cpp, find_converter
from finetune.export.gguf_file import read_header
from finetune.export.gguf_tokens import is_byte_level
from tests.export.finished_runs import write_run
from tests.export.gguf_files import write_gguf
from tests.model.variants import VARIANTS
from tests.tiny import tiny_tokenizer

READ_GGUF = """
import json, sys
sys.path.insert(0, sys.argv[1] + "/gguf-py")
from gguf import GGUFReader
reader = GGUFReader(sys.argv[2])
def value(name):
    field = reader.fields.get(name)
    return None if field is None else field.contents()
names = ["tokenizer.ggml.tokens", "tokenizer.chat_template", "tokenizer.ggml.eos_token_id", "general.architecture"]
tensors = {tensor.name: [list(map(int, tensor.shape)), tensor.data.astype("float32").reshape(-1).tolist()]
           for tensor in reader.tensors}
print(json.dumps([{name: value(name) for name in names}, tensors]))
"""


def command(*words: str | Path) -> int:
    try:
        finetune([str(word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


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


@pytest.fixture
def llama_cpp():
    folder = os.environ.get("LLAMA_CPP_DIR")
    if not folder:
        pytest.skip("LLAMA_CPP_DIR is not set: llama.cpp's converter is not here to be run")
    missing = [name for name in ("sentencepiece", "google.protobuf") if find_spec(name.partition(".")[0]) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: llama.cpp's converter needs it for Phi-3's tokenizer")
    return Path(folder)


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
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}')
    with pytest.raises(ModelError, match=r"has a tokenizer\.json but no tokenizer_config\.json"):
        copy_for_llama_cpp(tmp_path / "model", tmp_path / "scratch", None)


def write_sentencepiece(tokenizer, path: Path) -> None:
    """A tokenizer.model of the same tokens, as Phi-3's repository has one."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    kind = proto.SentencePiece.Type
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token in added and token not in ("<unk>", "<s>", "</s>"):
            continue
        special = {"<unk>": kind.UNKNOWN, "<s>": kind.CONTROL, "</s>": kind.CONTROL}
        of_byte = kind.BYTE if token.startswith("<0x") else kind.NORMAL
        proto.pieces.add(piece=token, score=float(-token_id), type=special.get(token, of_byte))
    path.write_bytes(proto.SerializeToString())


@pytest.mark.launch
def test_the_real_converter_keeps_weights_tokens_template_and_end(llama_cpp, model, tmp_path, capsys):
    tokenizer = VARIANTS["Phi-3-mini-4k"].tokenizer()
    base = tmp_path / "base"
    base.mkdir()
    write_sentencepiece(tokenizer, base / "tokenizer.model")
    words = ["export", model, tmp_path / "out", "--gguf", "--llama-cpp", llama_cpp, "--type", "f32", "--base", base]
    assert command(*words) == 0
    assert "model.gguf" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-c", READ_GGUF, str(llama_cpp), str(tmp_path / "out" / "model.gguf")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said, tensors = json.loads(done.stdout)
    ours = load_file(model / "model.safetensors")
    assert said["general.architecture"] == "phi3"
    assert said["tokenizer.chat_template"] == tokenizer.chat_template
    assert said["tokenizer.ggml.tokens"][: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert said["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
        "blk.0.attn_qkv.weight": "model.layers.0.self_attn.qkv_proj.weight",
    }
    for theirs, name in pairs.items():
        shape, values = tensors[theirs]
        assert torch.equal(torch.tensor(values).reshape(shape[::-1]), ours[name].float()), name
    assert (tmp_path / "out" / "Modelfile").read_text().startswith("FROM ./model.gguf\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "merged", "out"], "nothing else is left"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Phi-3-mini-4k", r"Missing .*tokenizer\.model\. Put the base's tokenizer\.model into the merged folder"),
        ("phi-4", r"pre-tokenizer was not recognized.* The Phi models on the hub can"),
    ],
)
def test_what_the_real_converter_refuses_is_said_in_words(llama_cpp, tmp_path, name, reason):
    """A tiny byte-level tokenizer gets as far as the list of known ones: it was read as BPE, not as sentencepiece."""
    model = write_model(tmp_path / "merged", name)
    gguf = Gguf(converter=find_converter(llama_cpp, {}), kind="f16")
    with pytest.raises(ModelError, match=reason):
        export_model(model, tmp_path / "out", gguf=gguf)
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_without_llama_cpp_it_is_said_how_to_get_it(model, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    assert command("export", model, tmp_path / "out", "--gguf") == 2
    said = capsys.readouterr().err
    assert "git clone https://github.com/ggml-org/llama.cpp" in said
    assert "vendor/llama.cpp in the source package of llama-cpp-python" in said
    assert command("export", model, tmp_path / "out", "--gguf", "--llama-cpp", tmp_path) == 2
    assert "has no convert_hf_to_gguf.py" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_folder_of_llama_cpp_comes_from_the_option_or_the_environment(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "convert_hf_to_gguf.py").touch()
    variables = {"LLAMA_CPP_DIR": str(tmp_path / "b")}
    assert find_converter(None, variables).parent.name == "b"
    assert find_converter(tmp_path / "a", variables).parent.name == "a"


@pytest.mark.process
@pytest.mark.parametrize("written", [b"", b"GGUF\3\0", b"PK\3\4" + bytes(30), b"GGUF\3\0\0\0" + bytes(16)])
def test_a_file_that_is_no_model_is_not_taken_for_one(tmp_path, written):
    """A converter can report success with a broken file, so the file is checked, not only the exit code."""
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(f"import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'wb').write({written!r})")
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

    monkeypatch.setattr("finetune.export.exported_folder.convert", convert)
    monkeypatch.setattr("finetune.export.exported_folder.installed_version", lambda: None)
    export_model(model, tmp_path / "out", gguf=Gguf(converter=tmp_path, weight_type="f32"))
    assert f"may not stop at <|assistant|> ({stops[3]}). Give their texts as `stop` in each request" in caplog.text


def test_a_modelfile_alone_names_the_merged_folder(model, tmp_path, capsys):
    assert command("export", model, tmp_path / "out") == 0
    assert "ollama create" in capsys.readouterr().out
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.startswith(f"FROM {model}\n")
    assert 'PARAMETER stop "<|end|>"\nPARAMETER stop "<|endoftext|>"\n' in text
    assert command("export", model, tmp_path / "other", "--no-modelfile") == 2


def test_a_run_is_told_to_be_merged_first(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    for folder in (run.folder.path, run.folder.adapter, tmp_path):
        assert command("export", folder, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.count("finetune merge RUN OUT") == 2
    assert "is not a model folder" in said


def test_byte_level_tokenizers_are_told_from_others():
    assert is_byte_level(json.loads(tiny_tokenizer("phi4").backend_tokenizer.to_str()))
    assert not is_byte_level(json.loads(VARIANTS["Phi-3-mini-4k"].tokenizer().backend_tokenizer.to_str()))
    assert not is_byte_level({})
