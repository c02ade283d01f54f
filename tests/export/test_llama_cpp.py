"""A phi3 model with a SentencePiece tokenizer in a real llama.cpp: how it reads, computes, answers and stops.

The first test builds it (tests/export/llama_cpp_build.py). With FINETUNE_WRITE_TABLES=1 the figures are written into
docs/tasks/serve.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from finetune.errors import ModelError
from finetune.export import gguf as exporting
from finetune.export.gguf import Gguf, export_model
from finetune.export.gguf_file import read_header
from finetune.export.gguf_lora import export_lora
from finetune.export.gguf_served import MODEL_FILE, gguf_bound, load_gguf
from finetune.export.gguf_tokens import TokenRules, find_rules
from finetune.export.merge import load_tuned_model, write_merged
from finetune.export.served_comparison import compare
from finetune.export.vectors import CONVERSATIONS, read_vectors
from tests.docs.pages import DOCS
from tests.export.finished_runs import write_run
from tests.export.llama_cpp_build import add_to_path, build, needs_llama_cpp
from tests.export.sentencepiece_models import Spacing, build_base, build_tokenizer, train
from tests.export.test_gguf import write_model
from tests.in_process import run_finetune
from tests.launches import free_port
from tests.tiny_models import build_tiny

pytestmark = [needs_llama_cpp, pytest.mark.slow]

LENGTH = 15
KEYS = ("model", "tokens", "token_type")
PAGE, MARK = DOCS / "tasks" / "serve.md", "<!-- figures of llama.cpp -->"
_rows: dict[str, str] = {}


@pytest.fixture(scope="module")
def llama_cpp():
    built = build()
    add_to_path(built)
    return built


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> SimpleNamespace:
    return make_model(tmp_path_factory.mktemp("phi3"))


def make_model(folder: Path, **adapter) -> SimpleNamespace:
    """A run on a phi3 base with a SentencePiece tokenizer, and its merged model."""
    train(folder / "tokenizer.model")
    tokenizer = build_tokenizer(folder / "tokenizer.model", "each piece")
    run = write_run(folder / "run", base=build_base(tokenizer), tokenizer=tokenizer, **adapter)
    base = folder / "run-base"
    shutil.copy(folder / "tokenizer.model", base)
    write_merged(run, folder / "merged", dtype=torch.float32)
    return SimpleNamespace(run=run, base=base, merged=folder / "merged", tokenizer=tokenizer)


def with_tokenizer(model: SimpleNamespace, folder: Path, spacing: Spacing, *, lstrip=False) -> SimpleNamespace:
    """The same merged model with another tokenizer of the same tokens."""
    tokenizer = build_tokenizer(model.base / "tokenizer.model", spacing, lstrip=lstrip)
    shutil.copytree(model.merged, folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    return SimpleNamespace(run=model.run, base=model.base, merged=folder / "merged", tokenizer=tokenizer)


@pytest.fixture(scope="module")
def exported(llama_cpp, model, tmp_path_factory) -> Path:
    """The folder of the merged model in fp32."""
    out = tmp_path_factory.mktemp("exported") / "out"
    export_model(model.merged, out, gguf=settings(llama_cpp, model))
    return out


def settings(llama_cpp, model, kind="f32", **more) -> Gguf:
    return Gguf(converter=llama_cpp.source / "convert_hf_to_gguf.py", weight_type=kind, base=model.base, **more)


def tuned_answers(model) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Prompts with greedy answers of base and adapter in PEFT, and the logits at each position of an answer."""
    tuned = load_tuned_model(model.run).eval()
    found = []
    for prompt in prompts(model.tokenizer):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(LENGTH):
                ids.append(int(tuned(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            logits = tuned(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        found.append((prompt, ids[len(prompt) :], logits[len(prompt) - 1 : -1]))
    return found


def prompts(tokenizer) -> list[list[int]]:
    names = ["oranges", "crates", "Porto", "Friday", "capital", "send"]
    names += ["please", "Marta", "short", "answer", "Lisbon", "boxes"]
    texts = [[{"role": "user", "content": f"Please send {name}."}] for name in names]
    rendered = [tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for turns in texts]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]


def figures(served, model) -> tuple[int, int, float, float]:
    """Positions with the same greedy token, all positions, and the difference of logits: largest, relative."""
    same, count, largest, error, norm = 0, 0, 0.0, 0.0, 0.0
    for prompt, answer, logits in tuned_answers(model):
        positions = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        there = served.logits([*prompt, *answer], positions)[:, : logits.shape[1]]
        same += int((there.argmax(-1) == torch.tensor(answer)).sum())
        count += len(answer)
        largest = max(largest, float((there - logits).abs().max()))
        error, norm = error + float((there - logits).square().sum()), norm + float(logits.square().sum())
    return same, count, largest, (error / norm) ** 0.5


def record(what: str, served, model) -> None:
    """A row of the table: token ids of chats, greedy tokens, logits, stops."""
    same, count, largest, relative = figures(served, model)
    chats = list(CONVERSATIONS.values())
    ids = sum(served.render(turns).token_ids == encode(model.tokenizer, turns) for turns in chats)
    _rows[what] = f"| {what} | {ids} of {len(chats)} | {same} of {count} | {largest:.1e} | {relative:.1e} |"


def encode(tokenizer, turns) -> list[int]:
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_a_merged_model_is_served_as_it_was_trained(llama_cpp, model, tmp_path, kind):
    exported = export_model(model.merged, tmp_path / "out", gguf=settings(llama_cpp, model, kind))
    assert exported.runtime is not None
    assert exported.runtime.startswith("llama-cpp-python 0.3.")
    served = load_gguf(tmp_path / "out")
    result = compare(served, read_vectors(tmp_path / "out"), bound=gguf_bound(tmp_path / "out"))
    assert result.mismatches == ()
    # llama.cpp stops at </s> too, whose text it knows; no run trains on it.
    assert set(served.ends) == {*read_vectors(tmp_path / "out").stop_ids, 2}
    record(f"merged, `--type {kind}`", served, model)
    served.close()
    damage(tmp_path / "out" / MODEL_FILE)
    served = load_gguf(tmp_path / "out")
    assert compare(served, read_vectors(tmp_path / "out"), bound=gguf_bound(tmp_path / "out")).mismatches
    served.close()


def damage(file: Path) -> None:
    """Set a tenth of the file to zero, in the middle of its tensors."""
    content = bytearray(file.read_bytes())
    begin = read_header(file).tensors[1] + len(content) // 2
    length = len(content) // 10
    content[begin : begin + length] = bytes(length)
    file.write_bytes(content)


def test_an_answer_ends_where_the_models_answer_ends(exported, model):
    served, ends = load_gguf(exported), read_vectors(exported).stop_ids
    stopped = 0
    for prompt, answer, _ in tuned_answers(model):
        cut = next((n + 1 for n, token_id in enumerate(answer) if token_id in ends), len(answer))
        stopped += cut < len(answer)
        assert served.answer(prompt, LENGTH) == answer[:cut]
    assert stopped, "no answer of this model ends, so nothing is shown"
    served.close()


@pytest.mark.parametrize("adapter", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
def test_an_adapter_beside_its_base_answers_like_peft(llama_cpp, model, tmp_path, adapter):
    model = make_model(tmp_path, **adapter) if adapter else model
    out = tmp_path / "out"
    exported = export_lora(model.run, out, gguf=settings(llama_cpp, model), with_base=True, with_modelfile=True)
    assert exported.runtime is not None
    served = load_gguf(out)
    result = compare(served, read_vectors(out), bound=gguf_bound(out))
    assert result.mismatches == ()
    assert compare(served, read_vectors(model.merged), bound=gguf_bound(out)).mismatches == ()
    record("base and adapter (`export lora`)" + (", rsLoRA" if adapter else ""), served, model)
    served.close()
    assert (out / "Modelfile").read_text().startswith("FROM ./base.gguf\nADAPTER ./adapter.gguf\n")
    rescale(out / "adapter.gguf", 1.05)
    wrong = load_gguf(out)
    assert compare(wrong, read_vectors(out), bound=gguf_bound(out)).mismatches, "a scale that is 5 % too large"
    wrong.close()
    out.joinpath("adapter.gguf").unlink()
    shutil.move(out / "base.gguf", out / MODEL_FILE)
    alone = load_gguf(out)
    assert compare(alone, read_vectors(model.merged), bound=gguf_bound(out)).mismatches, "the adapter changes nothing"
    alone.close()


def rescale(adapter: Path, factor: float) -> None:
    """Multiply alpha in a GGUF LoRA."""
    header, content = read_header(adapter), bytearray(adapter.read_bytes())
    _, end = header.spans["adapter.lora.alpha"]
    content[end - 4 : end] = struct.pack("<f", factor * header.keys["adapter.lora.alpha"])
    adapter.write_bytes(content)


def test_a_space_before_the_first_piece_only_is_read_so_in_llama_cpp(llama_cpp, model, tmp_path, monkeypatch):
    """The mistake that nobody sees: as llama.cpp reads a file by default, all chats are other tokens."""
    model = with_tokenizer(model, tmp_path, "first piece")
    exported = export_model(model.merged, tmp_path / "out", gguf=settings(llama_cpp, model))
    assert exported.reading is not None
    assert not exported.reading.rules.puts_space
    served = load_gguf(tmp_path / "out")
    record("merged, a space before the first piece only", served, model)
    served.close()
    by_default = replace(find_rules(model.tokenizer), rules=TokenRules(puts_space=True, strips=True))
    monkeypatch.setattr(exporting, "find_rules", lambda tokenizer: by_default)
    with pytest.raises(ModelError, match=r"is '.*' in training and '.*▁.*' in llama\.cpp, from token 1 on"):
        export_model(model.merged, tmp_path / "other", gguf=settings(llama_cpp, model))
    assert not (tmp_path / "other").exists()


def test_what_llama_cpp_cannot_be_told_is_the_difference_that_the_rules_foresee(llama_cpp, model, tmp_path):
    model = with_tokenizer(model, tmp_path, "each piece", lstrip=True)
    exported = export_model(model.merged, tmp_path / "out", gguf=settings(llama_cpp, model))
    assert exported.reading is not None
    served = load_gguf(tmp_path / "out")
    foreseen = {other.text: other.served for other in exported.reading.edges}
    assert len(foreseen) == 2
    for turns in CONVERSATIONS.values():
        text, ids = served.render(turns)
        expected = foreseen.get(text) or model.tokenizer.convert_ids_to_tokens(encode(model.tokenizer, turns))
        assert model.tokenizer.convert_ids_to_tokens(ids) == expected
    record("merged, `lstrip` in the tokenizer", served, model)
    served.close()


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_a_folder_without_tokenizer_model_is_read_as_one_that_has_it(llama_cpp, model, tmp_path, family):
    """As transformers saves it. llama.cpp's converter alone refuses phi3, and gives each token of llama one score."""
    with_tokenizer(model, tmp_path, "first piece")
    merged, gguf = tmp_path / "merged", replace(settings(llama_cpp, model), base=None)
    if family == "llama":
        tiny_llama(rows=len(model.tokenizer)).save_pretrained(merged)
    (merged / "tokenizer.model").unlink()
    assert export_model(merged, tmp_path / "made", gguf=gguf).runtime is not None
    shutil.copy(model.base / "tokenizer.model", merged)
    export_model(merged, tmp_path / "own", gguf=gguf)
    made, own = (read_header(tmp_path / name / MODEL_FILE).keys for name in ("made", "own"))
    assert [made[f"tokenizer.ggml.{name}"] for name in KEYS] == [own[f"tokenizer.ggml.{name}"] for name in KEYS]
    served = [load_gguf(tmp_path / name) for name in ("made", "own")]
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        ids = [each.encode(line) for each in served]
        assert ids[0] == ids[1]
    for each in served:
        each.close()


def tiny_llama(rows: int) -> Any:
    """A random model of the family of Llama and Mistral."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return build_tiny(LlamaConfig(vocab_size=rows, num_hidden_layers=2, **sizes))


def test_a_name_with_phi_3_needs_the_tokens_of_llama(llama_cpp, model, tmp_path, monkeypatch):
    """So phi-4 and Phi-4-mini, whose model type is phi3 too, get another name."""
    model = with_tokenizer(model, tmp_path, "each piece")
    model.base = tmp_path
    for file in ("tokenizer.json", "tokenizer_config.json"):
        path = model.merged / file
        path.write_text(path.read_text().replace("</s>", "<end>"))
    train(model.base / "tokenizer.model", end="<end>")
    allowed = settings(llama_cpp, model, allows_differences=True)
    assert not export_model(model.merged, tmp_path / "out", gguf=allowed).reading.rules.strips
    rules = replace(find_rules(model.tokenizer), rules=TokenRules(puts_space=True, strips=True))
    monkeypatch.setattr(exporting, "find_rules", lambda tokenizer: rules)
    with pytest.raises(ModelError, match=r"llama\.cpp does not load model\.gguf"):
        export_model(model.merged, tmp_path / "other", gguf=allowed)


def test_a_model_that_the_converter_refuses(llama_cpp, tmp_path):
    """A tiny byte-level tokenizer gets as far as the list of known ones: it was read as BPE, not as sentencepiece."""
    merged = write_model(tmp_path / "merged", "phi-4")
    gguf = Gguf(converter=llama_cpp.source / "convert_hf_to_gguf.py", weight_type="f16")
    with pytest.raises(ModelError, match=r"pre-tokenizer was not recognized.* The Phi models on the hub can"):
        export_model(merged, tmp_path / "out", gguf=gguf)


@pytest.fixture(scope="module")
def run_with_rows(tmp_path_factory) -> SimpleNamespace:
    """The same run, with rows on disk and short answers."""
    folder = tmp_path_factory.mktemp("with-rows")
    (folder / "rows").mkdir()
    for split, number in (("train", 200), ("validation", 6)):
        chats = [
            [("user", f"Please send {n} crates for {split}."), ("assistant", f"{n} crates")] for n in range(number)
        ]
        rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
        (folder / "rows" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = (f"data.path={folder / 'rows'}", f"data.cache_dir={folder / 'cache'}", "testing.max_new_tokens=8")
    return make_model(folder, words=words)


def export(model, out: Path, *words: str):
    return run_finetune("export", words[0], model.run.folder.path, out, "--base", model.base, *words[1:])


def test_a_quantized_model_keeps_tokens_and_stops_and_states_its_difference(
    llama_cpp, run_with_rows, tmp_path, monkeypatch
):
    monkeypatch.setenv("LLAMA_CPP_DIR", str(llama_cpp.source))
    out, quantize = tmp_path / "out", ("gguf", "--type", "q4_k_m", "--imatrix", "200")
    done = export(run_with_rows, out, *quantize)
    assert done.returncode == 0, done.stdout
    assert "using q5_0 " in done.errors
    assert "matrices are not a multiple of 256 long" in done.errors
    header = read_header(out / MODEL_FILE)
    assert header.keys["tokenizer.ggml.add_bos_token"] is False
    assert header.keys["quantize.imatrix.file"] == "imatrix.gguf", "no path of this machine"
    run_finetune("verify", out, code=0)
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["files"] == {"compared": 1, "equal": 1}
    (note,) = [
        note for note in certificate["notes"] if note.startswith("quantized as q4_k_m with an importance matrix")
    ]
    assert re.search(r"of 200 training rows \(--type: wanted q4_k_m, using q5_0 .*of the quantized model, whose", note)
    damage(out / MODEL_FILE)
    changed = run_finetune("verify", out, code=3)
    assert f"file {MODEL_FILE} is not the one that was written" in " ".join(changed.stdout.split())
    strict = export(run_with_rows, tmp_path / "strict", *quantize, "--set", "strict=true")
    assert (strict.returncode, "The run is strict" in strict.errors) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_smallest_type_that_holds_is_kept_in_llama_cpp(llama_cpp, run_with_rows, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_DIR", str(llama_cpp.source))
    done = export(run_with_rows, tmp_path / "out", "smallest")
    assert done.returncode == 0, done.stdout
    rows = re.findall(r"│ (\w+) +│ +[\d.]+ .B │ +[\d.]+ │ +[+-][\d.]+% │ +(\d) of 6 │ (no|yes)", done.answer)
    assert [name for name, _, holds in rows if holds == "yes"] == [rows[-1][0]], done.answer
    assert rows[-1][1] == "6"
    assert rows[0][0] == "q2_k"
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["verdict"] == "same"
    assert any(f"{rows[-1][0]} on 6 validation rows: loss " in note for note in certificate["notes"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_server_answers_like_base_and_adapter(llama_cpp, exported, model):
    port = free_port()
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(exported / "model.gguf")]
    environment = {**os.environ, "PYTHONPATH": str(llama_cpp.packages)}
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--n_ctx", "512"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        turns = [{"role": "user", "content": "Please send oranges."}]
        said = ask(port, {"messages": turns, "temperature": 0, "repeat_penalty": 1, "max_tokens": LENGTH})
    finally:
        server.terminate()
        server.wait(30)
    served = load_gguf(exported)
    answer = served.answer(encode(model.tokenizer, turns), LENGTH)
    kept = [token_id for token_id in answer if token_id not in read_vectors(exported).stop_ids]
    text = served._llama.detokenize(kept).decode(errors="ignore")  # as the server does; random answers break characters
    served.close()
    assert said["choices"][0]["message"]["content"].strip() == text.strip()


def ask(
    port: int, request: dict[str, object], limit_seconds: float = 120.0
) -> dict[str, list[dict[str, dict[str, str]]]]:
    """Ask until the server listens."""
    data, deadline = json.dumps(request).encode(), time.monotonic() + limit_seconds
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=limit_seconds) as reply:
                return json.load(reply)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def test_the_figures_of_the_page_are_those_of_a_run(llama_cpp):
    """The last test of the file: the others have made the rows."""
    if len(_rows) < 8:
        pytest.skip("the table needs all tests of this file")
    import llama_cpp as library

    title = "| GGUF | same token ids | same greedy tokens | largest difference of a logit | relative |"
    made = f"llama-cpp-python {library.__version__}, transformers {version('transformers')}, on a CPU"
    table = "\n".join([title, "| --- | --- | --- | --- | --- |", *_rows.values(), "", f"({made}.)"])
    before, inside, after = PAGE.read_text(encoding="utf-8").split(MARK)
    if os.environ.get("FINETUNE_WRITE_TABLES"):
        PAGE.write_text(f"{before}{MARK}\n\n{table}\n\n{MARK}{after}", encoding="utf-8")
        return
    counts = [row.split("|")[1:4] for row in inside.splitlines() if row.startswith("|")]
    assert counts == [row.split("|")[1:4] for row in table.splitlines() if row.startswith("|")]
