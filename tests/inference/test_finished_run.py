import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from finetune.config.config_files import resolve_shipped
from finetune.distributed.launch import launch
from finetune.errors import CheckpointError, ConfigError, ModelError
from finetune.inference.finished_run import find_run, load_finished_run
from finetune.runs.checkpoints import publish_adapter
from finetune.runs.file_lock import file_lock
from finetune.runs.folder import RunFolder
from finetune.runs.verification import verify_checkpoint
from tests.replay.scene import change_tensor
from tests.tiny_models import build_tiny, tiny_phi3_config

IDS = torch.arange(5, 25).reshape(1, -1)


def load(path, words=(), **keys):
    run = find_run(path, words, **keys)
    with launch(run.config, trains=False) as runtime:
        return run, load_finished_run(runtime, run)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_an_adapter_is_loaded_on_its_base_with_the_runs_own_tokenizer(adapter_run):
    run, (model, tokenizer) = load(adapter_run)
    saved = load_file(adapter_run / "adapter/adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name.replace(".weight", ".default.weight")], saved[name]) for name in saved)
    assert any(tensor.abs().sum() > 0 for name, tensor in saved.items() if "lora_B" in name)
    assert tokenizer.name_or_path == str(adapter_run / "adapter")
    assert run.weights_name == "adapter"
    with model.disable_adapter():
        assert not torch.allclose(logits(model), tuned := logits(load(adapter_run)[1].model))
    assert torch.equal(logits(model), tuned)


def test_a_checkpoint_is_named_by_its_step_or_as_the_latest(adapter_run):
    two, four = (load(adapter_run, checkpoint=step) for step in ("2", "step-000004"))
    assert (two[0].weights_name, four[0].weights_name) == ("checkpoints/step-000002", "checkpoints/step-000004")
    assert not torch.equal(logits(two[1].model), logits(four[1].model))
    assert find_run(adapter_run, checkpoint="latest").weights_name == "checkpoints/step-000004"


def test_a_run_that_did_not_end_has_its_checkpoints(own_copy):
    shutil.rmtree(own_copy / "adapter")
    with pytest.raises(
        CheckpointError, match=r"no adapter/ yet.*add --checkpoint 4 to generate, chat, evaluate or merge\.$"
    ):
        find_run(own_copy)
    _, (model, tokenizer) = load(own_copy, checkpoint="2")
    assert hasattr(model, "peft_config")
    assert tokenizer.chat_template


def test_a_run_that_still_trains_is_waited_for_and_only_its_newest_checkpoint_is_named(own_copy):
    shutil.rmtree(own_copy / "adapter")
    waits = r"no adapter/ yet: it still trains\. Wait for its end\. Or add --checkpoint latest to .*merge\.$"
    with file_lock(own_copy / ".lock", waiting_for="the run"), pytest.raises(CheckpointError, match=waits):
        find_run(own_copy)


def test_a_checkpoint_that_a_run_removes_meanwhile_is_not_called_damaged(own_copy):
    run = find_run(own_copy, checkpoint="latest")
    shutil.rmtree(run.weights)
    removed = r"step-000004 was removed while the model was loaded.*Run the command again"
    with launch(run.config, trains=False) as runtime, pytest.raises(CheckpointError, match=removed):
        load_finished_run(runtime, run)


def test_the_weights_of_an_earlier_end_are_said_to_be_that(own_copy, caplog):
    record = own_copy / "run.json"
    record.write_text(record.read_text().replace('"status": "completed"', '"status": "running"'))
    find_run(own_copy)
    assert not caplog.messages
    folder = RunFolder(own_copy)
    publish_adapter(folder, folder.checkpoint(2))
    find_run(own_copy, checkpoint="2")
    assert not caplog.messages
    find_run(own_copy)
    (said,) = caplog.messages
    assert "weights of an earlier end of the run, which has trained on to step 4 since" in said
    assert "(stopped). --checkpoint latest" in said


def test_a_checkpoint_of_another_run_is_not_taken_for_one_of_this_run(own_copy, adapter_run):
    for wish in ("checkpoints/step-000004", own_copy / "checkpoints/step-000004"):
        assert find_run(own_copy, checkpoint=str(wish)).weights_name == "checkpoints/step-000004"
    for other in (adapter_run / "checkpoints/step-000004", own_copy / "step-000004"):
        with pytest.raises(CheckpointError, match="has no such checkpoint"):
            find_run(own_copy, checkpoint=str(other))


@pytest.mark.parametrize(
    ("wish", "why"), [("3", r"steps 2, 4\)"), ("step-x", r"steps 4, 2\). Choose one, or say latest")]
)
def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(adapter_run, wish, why):
    with pytest.raises(CheckpointError, match=why):
        find_run(adapter_run, checkpoint=wish)


def test_of_many_checkpoints_the_nearest_are_named(own_copy):
    for step in range(10, 300, 10):
        (own_copy / f"checkpoints/step-{step:06}").mkdir()
    with pytest.raises(CheckpointError, match=r"there: steps 70, 80, 60, 90, 50, 100 and 25 more\)"):
        find_run(own_copy, checkpoint="71")


def test_what_is_damaged_is_refused(own_copy):
    for folder in (own_copy / "adapter", own_copy / "checkpoints/step-000004"):
        file = folder / "adapter_model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert verify_checkpoint(own_copy / "checkpoints/step-000004")
    with pytest.raises(CheckpointError, match=r"adapter is damaged.*adapter_model"):
        find_run(own_copy)
    with pytest.raises(CheckpointError, match="step-000004 is damaged"):
        find_run(own_copy, checkpoint="4")
    assert find_run(own_copy, checkpoint="latest").weights_name == "checkpoints/step-000002"


def test_a_linked_adapter_is_not_said_to_be_repaired_by_a_resumed_run(own_copy, tmp_path):
    (own_copy / "adapter").rename(tmp_path / "elsewhere")
    (own_copy / "adapter").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"adapter is a symbolic link.* Put the file or folder itself there"):
        find_run(own_copy)


def test_a_folder_without_a_run_is_told_as_such(tmp_path):
    with pytest.raises(CheckpointError, match=r"not the folder of a run: it has no config.yaml"):
        find_run(tmp_path)
    for name in ("a/config.yaml", "a/adapter/x", "a/checkpoints/step-000002/x", "a-merged/x", "-/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("a/adapter", "a/checkpoints/step-000002", "a-merged"):
        with pytest.raises(CheckpointError, match=re.escape(f"Give one, for example {tmp_path / 'a'}.")):
            find_run(tmp_path / name)
    for name in ("-", "gone", "."):
        with pytest.raises(CheckpointError, match="for example runs/quickstart"):
            find_run(tmp_path / name)
    (tmp_path / "sweep.json").touch()
    with pytest.raises(
        CheckpointError, match=f"It holds a sweep: give one of its trials, such as {tmp_path}/trial-001"
    ):
        find_run(tmp_path)


def test_a_base_that_moved_is_named_on_the_command_line(own_copy, tmp_path):
    moved = shutil.copytree(resolve_shipped("shipped:phi_tiny"), tmp_path / "moved")
    lost = "model.path=/nowhere/base"
    with pytest.raises(ModelError, match="no such folder"):
        load(own_copy, [lost])
    _, (model, _) = load(own_copy, [lost], base=str(moved))
    assert torch.equal(logits(model), logits(load(own_copy)[1].model))


def test_a_base_whose_weights_have_changed_is_named(own_copy, tmp_path, capsys):
    base = shutil.copytree(resolve_shipped("shipped:phi_tiny"), tmp_path / "base")
    load(own_copy, base=str(base))
    said = f"{base} has other weights than the base that {own_copy} was trained on"
    assert said not in capsys.readouterr().err
    change_tensor(base / "model.safetensors", "model.norm.weight")
    load(own_copy, base=str(base))
    assert said in capsys.readouterr().err


def test_a_base_that_the_adapter_does_not_fit_is_refused(adapter_run, tmp_path):
    build_tiny(tiny_phi3_config()).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"adapter in .* does not fit the base .*other: .*--set model.path"):
        load(adapter_run, base=str(tmp_path / "other"))


def test_a_fully_tuned_model_is_loaded_from_the_run_alone(full_run, tmp_path):
    run = shutil.copytree(full_run, tmp_path / "run")
    config = run / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("shipped:phi_tiny", "/nowhere/base"))
    assert config.read_text() != text
    _, (model, tokenizer) = load(run)
    saved = load_file(full_run / "adapter/model.safetensors")
    assert torch.equal(model.state_dict()["model.norm.weight"], saved["model.norm.weight"].float())
    assert not hasattr(model, "peft_config")
    assert tokenizer.chat_template
    for given in ({"base": "shipped:phi_tiny"}, {"overrides": ["model.path=shipped:phi_tiny"]}):
        with pytest.raises(ConfigError, match=r"shipped:phi_tiny: .* trained every weight"):
            find_run(full_run, **given)


def test_what_the_adapter_decides_is_not_asked_for(adapter_run):
    with pytest.raises(ConfigError, match=r"lora\.alpha=512: the adapter of .* keeps its own settings"):
        find_run(adapter_run, ["lora.alpha=512"])


def test_a_run_that_has_not_ended_keeps_the_template_of_its_config(own_copy, tmp_path):
    """Its tokenizer is saved with `adapter/`, and until then only the config names the template."""
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    config = own_copy / "config.yaml"
    config.write_text(config.read_text().replace("chat_template: null", f"chat_template: {template}"))
    assert find_run(own_copy, checkpoint="4").config.data.chat_template is None, "the saved tokenizer has it"
    shutil.rmtree(own_copy / "adapter")
    run, (_, tokenizer) = load(own_copy, checkpoint="4")
    assert run.config.data.chat_template == str(template)
    assert tokenizer.chat_template == template.read_text()


def test_the_world_of_training_is_not_asked_for_again(own_copy):
    file = own_copy / "config.yaml"
    text = file.read_text().replace("world_size: null", "world_size: 4").replace("ddp: null", "ddp: true")
    assert text.count("world_size: 4") == text.count("ddp: true") == 1
    file.write_text(text)
    run = find_run(own_copy)
    assert (run.config.parallel.world_size, run.config.ddp) == (None, None)
    assert find_run(own_copy, is_alone=True).config.ddp is False
    assert find_run(own_copy, ["parallel.num_processes=2"]).config.parallel.num_processes == 2


def test_a_run_of_conversations_says_that_no_tool_is_called(own_copy, capsys):
    load(own_copy)
    assert "conversations" not in capsys.readouterr().err
    file = own_copy / "config.yaml"
    file.write_text(file.read_text().replace("  tools: []", "  tools: [calculator]", 1))
    load(own_copy)
    assert "the run learned in conversations with tools or an environment. Nothing" in capsys.readouterr().err


def test_a_run_that_was_quantized_says_where_it_is_not(own_copy, caplog):
    run = find_run(own_copy, ["lora.quantize=nf4"])
    with launch(run.config, trains=False) as runtime:
        load_finished_run(runtime, run)
        (record,) = runtime.fallbacks.as_records()
    assert (record["what"], record["wanted"]) == ("lora.quantize", "nf4")
