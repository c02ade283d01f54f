import copy
import hashlib
import json
import logging
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Phi3Config, PhiConfig
from transformers.optimization import Adafactor

from finetune.errors import CheckpointError
from finetune.runs.checkpoint_loading import load_checkpoint
from finetune.runs.checkpoints import commit_snapshot, prune, publish_adapter, save_base, take_snapshot
from finetune.runs.folder import RunFolder
from finetune.runs.model_files import encode_model, encode_tokenizer, load_model
from finetune.runs.state import TrainerState
from finetune.runs.tensors import TensorFile, read_tensors, shard_like
from finetune.runs.verification import newest_valid, verify_checkpoint, verify_published

SIZES = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "phi3": Phi3Config(**SIZES),
    "phi3 tied": Phi3Config(**SIZES, tie_word_embeddings=True),
    "phi": PhiConfig(**SIZES),
}
TOKENS = torch.arange(1, 25).reshape(2, 12)
LORA = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj"], "phi": ["q_proj", "dense", "fc1"]}


def build_base(kind="phi3", seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def build_lora(kind="phi3", seed=0, r=2):
    base = build_base(kind)
    torch.manual_seed(seed)
    config = LoraConfig(r=r, lora_alpha=8, target_modules=LORA[kind.split()[0]], task_type="CAUSAL_LM")
    return get_peft_model(base, config).eval()


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def take_steps(model, optimizer, count=2):
    for _ in range(count):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def read_all(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


STATE = TrainerState(
    step=12, epoch=1, steps_in_epoch=4, best_loss=0.1 + 0.2, best_step=8, num_targets=9, num_tokens=10, world_size=2,
    global_batch_size=16, validations_without_improvement=1,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run").open() as folder:
        yield folder


@pytest.fixture
def package_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    caplog.set_level(logging.INFO, "finetune")
    return caplog


@pytest.fixture(scope="module")
def lora():
    """A LoRA model and its optimizer after two steps; not changed by the tests that share it."""
    model = build_lora()
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    take_steps(model, optimizer)
    return model, optimizer


def save_checkpoint(folder, **parts):
    return commit_snapshot(folder, take_snapshot(folder, **parts))


def save(folder, lora, step=12):
    model, optimizer = lora
    if not folder.base.exists():
        save_base(folder, build_base())
    return save_checkpoint(folder, model=model, optimizer=optimizer, state=replace(STATE, step=step))


@pytest.mark.parametrize("kind", ["phi3", "phi3 tied", "phi"])
def test_plain_peft_and_transformers_load_it_with_the_same_logits(folder, kind):
    save_base(folder, build_base(kind))
    model = build_lora(kind)
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    take_steps(model, optimizer)
    path = save_checkpoint(folder, model=model, optimizer=optimizer, state=STATE)
    assert {file.name for file in path.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json", "manifest.json",
        "generation_config.json",
    }  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(folder.base)
    assert torch.equal(logits(base), logits(build_base(kind)))
    assert torch.equal(logits(PeftModel.from_pretrained(base, path).eval()), logits(model))
    # The adapter leads to its base by itself: an absolute folder, and no revision.
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (str(folder.base.resolve()), None)
    assert config["inference_mode"] is True
    assert model.peft_config["default"].inference_mode is False
    by_itself = AutoModelForCausalLM.from_pretrained(path).eval()
    assert torch.equal(logits(by_itself), logits(model))


@pytest.mark.parametrize("kind", ["phi3", "phi3 tied", "phi"])
def test_a_full_model_loads_in_plain_transformers_and_goes_on_training(folder, kind):
    model = build_base(kind)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    take_steps(model, optimizer)
    path = save_checkpoint(folder, model=model, optimizer=optimizer, state=STATE)
    model.save_pretrained(folder.path / "theirs")
    theirs = load_file(folder.path / "theirs" / "model.safetensors")
    ours = load_file(path / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    plain, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values())
    assert plain.config.use_cache
    assert not model.config.use_cache
    assert torch.equal(logits(plain.eval()), logits(model))
    other = build_base(kind, seed=1)
    again = torch.optim.AdamW(other.parameters(), lr=0.01)
    assert load_checkpoint(path, model=other, optimizer=again) == STATE
    take_steps(other, again)
    take_steps(model, optimizer)
    assert torch.equal(logits(other), logits(model))


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "transformers Adafactor": lambda params: Adafactor(params, beta1=0.9),
    "two groups": lambda params: torch.optim.AdamW([{"params": params[3:], "lr": 0.1}, {"params": params[:3]}]),
}
IN_LOW_PRECISION = ("AdamW", "transformers Adafactor")
"""Optimizers whose states follow the type of the weights, and optimizers whose states stay in fp32."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in OPTIMIZERS), *((name, torch.bfloat16) for name in IN_LOW_PRECISION)],
)
def test_any_optimizer_goes_on_bit_by_bit(folder, name, dtype):
    save_base(folder, build_base())
    model = build_lora().to(dtype)
    optimizer = OPTIMIZERS[name](trained(model))
    take_steps(model, optimizer, 3)
    path = save_checkpoint(folder, model=model, optimizer=optimizer, state=STATE)
    other = build_lora(seed=5).to(dtype)
    again = OPTIMIZERS[name](trained(other))
    assert load_checkpoint(path, model=other, optimizer=again) == STATE
    second = save_checkpoint(folder, model=other, optimizer=again, state=replace(STATE, step=13))
    for file in ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"):
        assert (path / file).read_bytes() == (second / file).read_bytes()
    take_steps(model, optimizer, 3)
    take_steps(other, again, 3)
    for ours, theirs in zip(trained(model), trained(other), strict=True):
        assert torch.equal(ours, theirs)
        assert optimizer.state[ours].keys() == again.state[theirs].keys()
        for key, value in optimizer.state[ours].items():
            held = again.state[theirs][key]
            assert type(held) is type(value)
            assert torch.equal(held, value) and held.dtype == value.dtype if torch.is_tensor(value) else held == value


def test_a_base_without_a_name_and_an_optimizer_that_keeps_lists_are_refused_before_anything_is_written(folder, lora):
    with pytest.raises(CheckpointError, match="nothing to name"):
        save_checkpoint(folder, model=lora[0], optimizer=lora[1], state=STATE)
    model = build_base()
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.state[optimizer.param_groups[0]["params"][0]]["old_dirs"] = [torch.ones(1)]
    with pytest.raises(CheckpointError, match=r"LBFGS keeps old_dirs as list.*optim\.optimizer"):
        save_checkpoint(folder, model=model, optimizer=optimizer, state=STATE)
    assert list(folder.path.iterdir()) == [folder.lock_file]


def test_a_model_with_several_adapters_is_not_saved_in_part():
    model = build_lora()
    model.add_adapter("second", LoraConfig(target_modules=LORA["phi3"]))
    with pytest.raises(CheckpointError, match=r"holds one adapter, the model carries 2: \['default', 'second'\]"):
        encode_model(model)


@pytest.mark.parametrize(
    ("build", "make", "match"),
    [
        (lambda: build_lora(r=4), torch.optim.AdamW, "of another shape"),
        (lambda: build_lora("phi"), torch.optim.AdamW, "missing there.*unknown here"),
        (build_base, torch.optim.AdamW, r"no model.safetensors.*training\.method"),
        (build_lora, torch.optim.NAdam, r"state of AdamW, but the run uses NAdam"),
        (build_lora, lambda params: torch.optim.AdamW(params[1:]), "1 unknown here"),
    ],
)
def test_what_does_not_fit_is_refused(folder, lora, build, make, match):
    path = save(folder, lora)
    model = build()
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path, model=model, optimizer=make(trained(model)))


def test_an_adapter_that_does_not_arrive_is_an_error(folder, lora, monkeypatch):
    path = save(folder, lora)
    monkeypatch.setattr("peft.set_peft_model_state_dict", lambda model, tensors, adapter_name: None)
    with pytest.raises(CheckpointError, match="did not arrive in the model"):
        load_model(build_lora(seed=5), path)


@pytest.mark.parametrize("change", [{"step": "12"}, {"step": -1}, {"epoch": True}, {"best_loss": "low"}, {"more": 1}])
def test_a_state_is_read_strictly(change):
    record = STATE.as_record()
    assert TrainerState.from_record(record, source="here") == STATE
    with pytest.raises(CheckpointError, match="here"):
        TrainerState.from_record(record | change, source="here")
    with pytest.raises(CheckpointError, match="schema_version 2"):
        TrainerState.from_record(record | {"schema_version": 2}, source="here")


def test_tensors_of_every_kind_come_back_and_the_library_agrees(tmp_path):
    dtypes = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    )  # fmt: skip
    tensors = {f"x/{dtype}": (torch.randn(3, 5) * 3).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "turned": torch.randn(4, 3).T}
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"".join(bytes(chunk) for chunk in TensorFile(tensors, ("format", "pt"))))
    found, metadata = read_tensors(file)
    assert metadata == {"format": "pt"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


@pytest.mark.parametrize("num_rows", [3, 5, 8])
def test_a_rank_reads_its_own_rows_of_a_weight_and_none_where_there_are_more_ranks_than_rows(num_rows):
    from torch.distributed.tensor import Replicate, Shard

    full, ranks = torch.arange(2.0 * num_rows).reshape(num_rows, 2), range(4)

    def like(rank, placement):
        mesh = SimpleNamespace(size=lambda axis: len(ranks), get_local_rank=lambda axis: rank)
        return SimpleNamespace(to_local=None, placements=[placement], device_mesh=mesh)

    shards = [shard_like(full, like(rank, Shard(0))) for rank in ranks]
    assert torch.equal(torch.cat(shards), full)
    expected = [min(num_rows, -(-num_rows // 4) * (rank + 1)) for rank in ranks]  # as torch.chunk and FSDP2 divide
    assert [sum(map(len, shards[: rank + 1])) for rank in ranks] == expected
    assert torch.equal(torch.cat([shard_like(full.T, like(rank, Shard(1))) for rank in ranks], dim=1), full.T)
    assert shard_like(full, like(1, Replicate())) is full


def test_a_damaged_checkpoint_is_named_and_the_older_one_used(folder, lora, package_log):
    """Any flip and any cut of a file is found: tests/runs/test_durable.py, tests/runs/test_checkpoints_command.py."""
    older, path = save(folder, lora, 8), save(folder, lora, 12)
    assert newest_valid(folder) == path
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        package_log.clear()
        assert newest_valid(folder) == older
        assert file.name in package_log.text
        assert "step-000012 is damaged and not used" in package_log.text
        file.write_bytes(content)
    shutil.rmtree(older)
    path.rename(folder.checkpoint(16))
    assert verify_checkpoint(folder.checkpoint(16)) == ["state.json: is of step 12, not of step-000016"]
    assert newest_valid(folder) is None


def test_an_older_checkpoint_is_preferred_only_if_it_can_still_have_the_best(tmp_path):
    folder = RunFolder(tmp_path)
    for step, best in ((2, 2), (4, 3), (6, 4), (8, 4)):
        folder.checkpoint(step).mkdir(parents=True)
        state = TrainerState(step=step, best_step=best)
        (folder.checkpoint(step) / "state.json").write_text(json.dumps(state.as_record()))

    def newest(*damaged):
        torn = {folder.checkpoint(step) for step in damaged}
        path = newest_valid(folder, lambda path: ["torn"] if path in torn or not path.exists() else [])
        return path and int(path.name.removeprefix("step-"))

    assert newest() == 8
    assert newest(8, 6) == 4, "the best, step 3, was never saved"
    assert newest(4) == 2
    assert newest(2, 4) == 8, "no checkpoint is left from which the best could be trained again"


def test_pruning_keeps_the_newest_and_the_best(folder, lora):
    for step in (4, 8, 12, 16, 20):
        save(folder, lora, step)
    assert prune(folder, keep=2, best=8) == [4, 12]
    assert folder.checkpoint_steps() == [8, 16, 20]
    assert prune(folder, keep=2, best=8) == []
    assert prune(folder, keep=5, best=None) == []
    # With the newest damaged, the newest valid one is what is left to go on from, and stays.
    (folder.checkpoint(20) / "state.json").write_text("{}")
    assert prune(folder, keep=1, best=None) == [8]
    assert folder.checkpoint_steps() == [16, 20]
    (folder.checkpoint(16) / "state.json").unlink()
    assert prune(folder, keep=1, best=None) == []
    # Steps are compared as numbers.
    for step in (999_000, 1_000_000):
        save(folder, lora, step)
    (folder.checkpoint(1_000_000) / "state.json").write_text("{}")
    assert prune(folder, keep=1, best=None) == [16, 20]


def test_saving_a_step_again_replaces_it_whole(folder, lora):
    path = save(folder, lora)
    (path / "optimizer.safetensors").write_bytes(b"torn")
    (path / "extra").write_text("x")
    assert save(folder, lora) == path
    assert verify_checkpoint(path) == []
    assert not (path / "extra").exists()
    assert [entry.name for entry in folder.checkpoints.iterdir()] == ["step-000012"]


def test_publishing_replaces_the_adapter_in_one_go(folder, lora, tokenizer):
    first, second = save(folder, lora, 8), save(folder, lora, 12)
    publish_adapter(folder, first)
    assert verify_published(folder.adapter) == []
    (folder.adapter / "adapter_config.json").write_text("torn")
    assert verify_published(folder.adapter) != []
    assert publish_adapter(folder, second, tokenizer) == folder.adapter
    published = read_all(folder.adapter)
    assert verify_published(folder.adapter) == []
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < published.keys()
    assert "optimizer.safetensors" not in published
    assert published["adapter_model.safetensors"] == (second / "adapter_model.safetensors").read_bytes()
    (second / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        publish_adapter(folder, second)
    assert read_all(folder.adapter) == published
    assert not any(entry.name.startswith(".tmp") or entry.name.startswith(".old") for entry in folder.path.iterdir())


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    words.chat_template = "{{ messages[0].content }}"
    return words


def test_a_tokenizer_travels_with_checkpoint_and_base(folder, lora, tokenizer):
    from transformers import AutoTokenizer

    model, optimizer = lora
    base = save_base(folder, build_base(), tokenizer)
    snapshot = take_snapshot(folder, model=model, optimizer=optimizer, state=STATE)
    path = commit_snapshot(folder, replace(snapshot, files={**snapshot.files, **encode_tokenizer(tokenizer)}))
    assert verify_checkpoint(path) == verify_published(base) == []
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages }}"
    for place in (path, base, publish_adapter(folder, path, other)):  # a checkpoint's own comes first
        again = AutoTokenizer.from_pretrained(place)
        assert again.chat_template == tokenizer.chat_template
        assert again("a b").input_ids == tokenizer("a b").input_ids


def test_a_base_is_saved_once_and_mended_when_torn(folder):
    save_base(folder, build_base())
    before = read_all(folder.base)
    save_base(folder, build_base(seed=1))
    assert read_all(folder.base) == before
    (folder.base / "model.safetensors").write_bytes(b"torn")
    save_base(folder, build_base())
    assert read_all(folder.base) == before


def test_a_hub_base_is_named_with_its_revision(folder, lora, monkeypatch):
    model, optimizer = lora
    monkeypatch.setattr(model.peft_config["default"], "base_model_name_or_path", "microsoft/phi-4")
    monkeypatch.setattr(model.peft_config["default"], "revision", "main")
    path = save_checkpoint(folder, model=model, optimizer=optimizer, state=STATE)
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("microsoft/phi-4", "main")
    assert config["target_modules"] == sorted(config["target_modules"])
    with safe_open(path / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


PICKLE = b"cos\nsystem\n(S'touch executed'\ntR."


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_pickle_under_any_name_is_never_run(folder, lora, file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = save(folder, lora)
    (path / file).write_bytes(PICKLE)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][file] = {"size": len(PICKLE), "sha256": hashlib.sha256(PICKLE).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    model = build_lora()
    with pytest.raises(CheckpointError, match=file):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(trained(model)))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../../run.json"])
def test_a_manifest_with_names_of_its_own_is_refused(folder, lora, name):
    path = save(folder, lora)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    assert any(name in problem for problem in verify_checkpoint(path))
    assert newest_valid(folder) is None
    with pytest.raises(CheckpointError, match=r"damaged: .*(not a file that|plain file name)"):
        publish_adapter(folder, path)
    assert not folder.adapter.exists()


def test_a_checkpoint_behind_a_link_is_refused_and_its_target_left_alone(folder, lora, tmp_path):
    path = save(folder, lora)
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = read_all(outside)
    assert newest_valid(folder) is None
    assert "symbolic link" in verify_checkpoint(path)[0]
    assert read_all(save(folder, lora)) == before
    assert not path.is_symlink()
    assert read_all(outside) == before
