"""A merged folder is complete or not there, loads in transformers alone, and equals base and adapter."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from unittest.mock import patch

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import finetune
from finetune.cli.export import merge_command as merge
from finetune.distributed.launch import launch
from finetune.errors import CheckpointError, ConfigError, LaunchError, RunFailedError
from finetune.export import merge as merging
from finetune.export import out_folder
from finetune.export.merge import load_tuned_model, write_merged
from finetune.export.model_card import fill_card, hub_base
from finetune.export.out_folder import folder_beside, new_folder
from finetune.export.system_turn import usual_system
from finetune.export.vectors import Vector
from finetune.export.verifying import verify_folder
from finetune.inference.finished_run import find_run
from tests.export.finished_runs import write_run
from tests.in_process import run_finetune
from tests.launches import free_port, place_variables

pytestmark = [pytest.mark.process, pytest.mark.warm]

ANSWER_WITHOUT_US = """
import json, sys
sys.modules["finetune"] = sys.modules["peft"] = None  # whoever imports them fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
turns = [{"role": "user", "content": "three crates of oranges"}]
ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")["input_ids"]
answer = model.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1]:].tolist()
with torch.no_grad():
    print(json.dumps([ids[0].tolist(), answer, model(ids).logits[0, -1].tolist()]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An adapter on a bfloat16 base with tied embeddings, like Phi-4-mini's, and a tokenizer.model."""
    run = write_run(tmp_path_factory.mktemp("runs") / "orders", dtype=torch.bfloat16)
    run.folder.path.with_name("orders-base").joinpath("tokenizer.model").write_bytes(b"pieces")
    return run


@pytest.fixture(scope="module")
def merged(run):
    merged = finetune.merge(run.folder.path)
    assert merged.folder == run.folder.path.with_name("orders-merged")
    return merged


def test_a_merge_beside_a_launch_of_another_thread_is_refused(run, tmp_path):
    with ThreadPoolExecutor(1) as pool, launch(run.config, trains=False):
        merging_there = pool.submit(finetune.merge, run.folder.path, tmp_path / "merged")
        with pytest.raises(LaunchError, match="another thread of this process is in a run"):
            merging_there.result()
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
def test_it_answers_like_base_and_adapter_where_neither_we_nor_peft_are_installed(run, merged):
    done = subprocess.run([sys.executable, "-c", ANSWER_WITHOUT_US, str(merged.folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ids, answer, logits = json.loads(done.stdout)

    tuned = load_tuned_model(run).float().eval()
    with torch.no_grad():
        expected = tuned(torch.tensor([ids])).logits[0, -1]
    assert (torch.tensor(logits) - expected).norm() < 0.05 * expected.norm()
    assert 1 <= len(answer) <= 6


def test_the_folder_holds_all_that_belongs_to_a_model_and_no_path_of_this_machine(run, merged):
    names = {path.name for path in merged.folder.iterdir()}
    assert names >= {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "README.md", "manifest.json"),
    }
    for path in merged.folder.iterdir():
        if path.suffix not in (".safetensors", ".npy"):
            assert str(run.folder.path.parent) not in path.read_text(), path.name
    own, trained = (folder / "chat_template.jinja" for folder in (merged.folder, run.folder.adapter))
    assert own.read_bytes() == trained.read_bytes()
    assert (merged.folder / "tokenizer.model").read_bytes() == b"pieces", "transformers does not save it"


def test_stop_ids_type_and_tied_embeddings_are_those_of_the_base(merged):
    files = ("config.json", "generation_config.json")
    described, generation = (json.loads((merged.folder / name).read_text()) for name in files)
    assert described["eos_token_id"] == generation["eos_token_id"] == merged.stop_ids
    assert len(merged.stop_ids) == 2
    tensors = load_file(merged.folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors, "written once"
    assert (merged.is_tied, described["tie_word_embeddings"]) == (True, True)


def test_the_card_says_what_is_known_and_does_not_guess_a_licence(run, merged):
    text = (merged.folder / "README.md").read_text()
    _, header, body = text.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["finetune"],
        "datasets": ["owner/rows"],
    }
    base = run.folder.path.with_name("orders-base").name
    assert f"A LoRA adapter merged into {base}." in body
    assert "| exact_match | 0.0000 | 0.7500 |" in body
    assert "Validation loss 1.6250 (nats per target token) at step 3." in body
    assert str(merged.difference) in body
    assert f"torch {version('torch')}" in body
    assert re.search(r"learning_rate: 0\.0002\b", body)
    assert "It was not looked up" in body


@pytest.mark.slow
def test_the_system_turn_of_the_rows_travels_with_the_model(tmp_path):
    system = 'Say "yes",\n\n it\'s 🙂 {{ x }} {% y %} ~~~~ \u00e9'
    row = {"messages": [{"role": role, "content": text} for role, text in (("system", system), ("user", "a"))]}
    row["messages"].append({"role": "assistant", "content": "b"})
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    run = write_run(tmp_path / "run", words=(f"data.path={tmp_path}/rows.jsonl",))
    plain, out = tmp_path / "plain model", tmp_path / "out"
    done = run_finetune("merge", run.folder.path, plain, code=0)
    assert f"Next: finetune verify '{plain}', finetune export gguf '{plain}' GGUF_FOLDER" in done.stdout
    note = f"most training rows begin with the system turn {system!r}, which a server does not add"
    assert note in done.stdout
    (of_verify,) = verify_folder(plain).comparison.notes
    assert of_verify.startswith(f"{note}. Without it, the model gives ")
    assert (
        f"so send it with each conversation:\n\n~~~~{'~' * ('~' in system)}text\n{system}\n~~~~"
        in (plain / "README.md").read_text()
    )
    run_finetune("merge", run.folder.path, out, "--add-system", code=0)
    assert "The chat template adds it" in (out / "README.md").read_text()
    assert verify_folder(out).comparison.notes == ()

    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (plain, out))
    turns = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]
    own = [{"role": "system", "content": "Mine."}, *turns]
    opened = [{"role": "system", "content": system}, *turns]
    for given, expected in ((turns, opened), (own, own)):
        texts = [
            tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True)
            for tokenizer, each in ((after, given), (before, expected))
        ]
        assert texts[0] == texts[1]
    assert system in before.apply_chat_template(opened, tokenize=False)


def test_the_system_turn_is_the_recorded_one_if_the_rows_are_gone(tmp_path):
    run = write_run(tmp_path / "run", words=(f"data.path={tmp_path}/gone.jsonl",))
    assert usual_system(run) is None
    opening = {"system": "Be brief.", "tools": "", "num_with_system": 3, "num_with_tools": 0, "num_rows": 4}
    record = json.loads(run.folder.record_file.read_text()) | {"opening": opening}
    run.folder.record_file.write_text(json.dumps(record))
    assert usual_system(find_run(run.folder.path)) == "Be brief."
    assert usual_system(find_run(run.folder.path, [f"data.path={tmp_path}/others.jsonl"])) is None
    run.folder.record_file.write_text(json.dumps(record | {"opening": opening | {"num_with_system": 2}}))
    assert usual_system(find_run(run.folder.path)) is None, "half of the rows are not most of them"


def test_a_system_turn_that_rows_do_not_have_is_not_added(run, tmp_path):
    with pytest.raises(ConfigError, match=r"--add-system writes .* but there is no system turn"):
        write_merged(run, tmp_path / "out", adds_system=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("dpo", "preference.beta=0.25"), ["preference:\n  beta: 0.25\n"]),
        (
            ("grpo", "rollout.num_generations=4", "reward.functions=length"),
            ["rollout:\n  num_generations: 4\n", "functions:\n  - length\n"],
        ),
    ],
    ids=["dpo", "grpo"],
)
def test_a_card_has_the_settings_of_an_objective_where_it_was_used(tmp_path, words, parts):
    for objective in ("sft", words[0]):
        run = write_run(tmp_path / objective, words=(f"training.objective={objective}", *words[1:]))
        card = fill_card(run, "owner/base")
        assert [part in card for part in parts] == [objective != "sft"] * len(parts)


def test_relative_paths_of_the_training_are_no_hub_ids_elsewhere_and_others_are_left_out_of_the_card(tmp_path):
    sources = f"data.mixture=[{{path: {tmp_path}/rows.jsonl, weight: 2}}, {{path: owner/chats}}]"
    card = fill_card(write_run(tmp_path / "mixture", words=("data.path=null", sources)), "owner/base")
    assert str(tmp_path) not in card
    assert "| data | rows.jsonl, owner/chats |" in card
    assert "  mixture:\n  - weight: 2\n  - path: owner/chats\n" in card
    run = write_run(tmp_path / "run", words=("model.path=models/phi", "data.path=data/train.jsonl.gz"))
    assert hub_base(run) is None
    card = fill_card(run, "owner/base")
    assert "datasets:" not in card
    assert "| data | train.jsonl.gz |" in card


@pytest.mark.slow
def test_the_command_prints_the_difference_and_writes_a_large_model_in_parts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "MAX_SHARD_BYTES", 12_000)
    done = run_finetune("merge", run.folder.path, tmp_path / "out", "--dtype", "float32")
    printed = done.stdout
    assert done.returncode == 0, printed
    assert "as float32, embeddings tied, stop ids [" in printed
    found = re.search(r"relative (\S+), same greedy token (\S+)% of (\d+) positions, (\S+)% of the adapter's", printed)
    assert found, printed
    relative, same, positions, lost = map(float, found.groups())
    assert relative < 1e-5
    assert same == 100
    assert positions > 100
    assert lost < 0.01
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_nothing_is_overwritten(run, tmp_path):
    file, folder, link = (tmp_path / name for name in ("file", "folder", "link"))
    file.write_text("mine")
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    link.symlink_to(folder)
    before = sorted(tmp_path.rglob("*"))
    done = run_finetune("merge", run.folder.path, file, code=2)
    assert "already exists and is not an empty folder" in done.stdout
    for out, reason in ((folder, "not an empty folder"), (link, "not an empty folder"), (file / "out", "can write to")):
        with pytest.raises(CheckpointError, match=reason):
            write_merged(run, out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_was_filled_meanwhile_stays(tmp_path):
    out = tmp_path / "out"

    def write_meanwhile() -> None:
        with new_folder(out, 0):
            out.mkdir()
            (out / "theirs.txt").write_text("theirs")

    with pytest.raises(CheckpointError, match="already exists and is not an empty folder"):
        write_meanwhile()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs.txt"]


def test_a_second_writer_of_the_folder_is_refused_and_the_first_one_goes_on(tmp_path):
    out = tmp_path / "out"
    with new_folder(out, 0) as writer:
        writer.write("a", [b"first"])
        with pytest.raises(CheckpointError, match=rf"out is being written by process {os.getpid()} on .* Wait for it"):
            new_folder(out, 0).__enter__()
        writer.write("b", [b"first"])
    assert sorted(path.name for path in out.iterdir()) == ["a", "b", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_beside_another_has_one_writer_and_nothing_of_a_killed_one(tmp_path):
    out = tmp_path / "new" / "out"
    with patch.object(out_folder, "remove"), folder_beside(out) as aside:  # as a killed process, which removes nothing
        (aside / "model.safetensors").write_bytes(b"weights")
    with folder_beside(out) as aside:
        assert [*aside.iterdir()] == []
        with pytest.raises(CheckpointError, match=rf"out is being written by process {os.getpid()} on .* Wait for it"):
            folder_beside(out).__enter__()
        with new_folder(out, 0) as writer:
            writer.write("a", [b"first"])
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_full_disk_and_a_missing_source_are_told_apart(tmp_path):
    def failure(error: OSError) -> str:
        with pytest.raises(RunFailedError) as raised, new_folder(tmp_path / "out", 0):
            raise error
        return str(raised.value)

    full = failure(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert full.endswith("make room or mend the disk, then run the command again.")
    missing = failure(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/base/tokenizer.json"))
    assert "/base/tokenizer.json: No such file or directory (ENOENT). Nothing was written." in missing
    assert "make room" not in missing


@pytest.mark.slow
def test_weights_that_change_on_the_way_to_the_disk_are_found_and_nothing_stays(run, tmp_path, monkeypatch):
    """The other process answers from the files: a tensor written wrongly shows in its logits."""
    (tmp_path / "out").mkdir()
    reload = merging.reload_plainly

    def spoilt(folder, *rest):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.mlp.down_proj.weight"] *= -1
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return reload(folder, *rest)

    monkeypatch.setattr(merging, "reload_plainly", spoilt)
    done = run_finetune("merge", run.folder.path, tmp_path / "out", code=3)
    assert "does not answer like base and adapter" in done.stdout
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"], "the empty folder that was there"


@pytest.mark.slow
def test_a_folder_that_transformers_cannot_load_is_said(merged, tmp_path):
    torn = shutil.copytree(merged.folder, tmp_path / "torn")
    os.truncate(torn / "model.safetensors", 100)
    with pytest.raises(RunFailedError, match=r"transformers alone cannot load it: .+ It was removed again"):
        merging.reload_plainly(torn, [Vector(name="random tokens", token_ids=[1, 2], positions=[1])])


def test_too_small_a_disk_is_said_before_anything_is_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr(out_folder, "SPARE_BYTES", 10**14)
    with pytest.raises(RunFailedError, match=r"needs 100 TB, but only .* are free at .* Nothing was written"):
        write_merged(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_fully_tuned_model_is_copied_and_compared(tmp_path):
    run = write_run(tmp_path / "full", kind="phi", full=True)
    merged = write_merged(run, tmp_path / "out")
    own, trained = (load_file(folder / "model.safetensors") for folder in (merged.folder, run.folder.adapter))
    assert own.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in own.items())
    assert merged.difference.lost is None
    assert merged.difference.relative < 1e-6
    assert not merged.is_tied
    assert "Full fine-tuning of full-base." in (merged.folder / "README.md").read_text()


@pytest.mark.slow
def test_trained_tokens_come_along_and_embeddings_stay_tied(tmp_path):
    """The trained rows are in fp32; what is stored has the base's type all the same."""
    settings = {"target_modules": ["o_proj"], "trainable_token_indices": {"embed_tokens": [330, 331]}}
    run = write_run(tmp_path / "tokens", dtype=torch.bfloat16, **settings)
    merged = write_merged(run, tmp_path / "out")
    assert (merged.is_tied, merged.dtype) == (True, "bfloat16")
    own, base = (load_file(folder / "model.safetensors") for folder in (merged.folder, tmp_path / "tokens-base"))
    changed = (own["model.embed_tokens.weight"] != base["model.embed_tokens.weight"]).any(dim=1).nonzero()[:, 0]
    assert changed.tolist() == [330, 331]


def test_it_is_for_one_process(run, tmp_path):
    with (
        patch.dict(os.environ, place_variables(0, 2, free_port())),
        pytest.raises(ConfigError, match=r"finetune merge needs one process, but 2 were started\."),
    ):
        merge(run.folder.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_temporary_folder_is_not_taken_for_a_broken_model(tmp_path):
    full = subprocess.CompletedProcess([], 1, "", "SafetensorError: I/O error: No space left on device (os error 28)")
    with patch("subprocess.run", return_value=full), pytest.raises(RunFailedError, match="or set TMPDIR to a folder"):
        merging.reload_plainly(tmp_path, [Vector(name="random tokens", token_ids=[1, 2], positions=[1])])
