"""TrainerDDP as the earlier guides use it: from a dict, in one process and in several, closed or not."""

import json
from pathlib import Path

import pytest
import torch

from finetune import TrainerDDP, cleanup_ddp, initialize_ddp, load_config
from finetune.errors import ConfigError, LaunchError, RunFailedError
from finetune.runs.file_lock import try_file_lock
from finetune.training import training_run
from tests.launches import free_port, run_launched
from tests.tiny_training import events

pytestmark = pytest.mark.warm

SCRIPTS = Path(__file__).with_name("guide_scripts.py")


@pytest.fixture
def config(inputs, tmp_path):
    """18 rows in global batches of 8 make 3 steps an epoch."""
    return {
        "output_dir": str(tmp_path / "run"),
        "parallel": {"timeout_minutes": 1},
        "model": {"path": str(inputs / "base")},
        "data": {"path": str(inputs / "rows"), "cache_dir": str(inputs / "cache")},
        "lora": {"r": 2},
        "optim.learning_rate": 1e-2,
        "training": {"device": "cpu", "precision": "fp32", "global_batch_size": 8, "batch_size": 4, "max_steps": 5},
        "testing": {"num_samples": 1, "max_new_tokens": 3, "general_prompts": "none"},
    }


def train(trainer):
    train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
    return trainer.run_training(train_loader, val_loader), test_loader


def record(config):
    return json.loads(Path(config["output_dir"], "run.json").read_text())


def run_script(name, config, folder, launcher="python"):
    """Start a script of guide_scripts.py; what came out of it, and what each rank reported."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    done = run_launched(launcher, [SCRIPTS, name, path], cwd=folder)
    return done, [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]


def with_port(config, **parallel):
    return {**config, "parallel": {**config["parallel"], "master_port": str(free_port()), **parallel}}


def test_one_process_trains_and_tests_from_a_dict(config, tmp_path):
    trainer = TrainerDDP(0, config)
    assert trainer.epoch == 0
    assert trainer.device == torch.device("cpu")
    (train_results, val_results), test_loader = train(trainer)
    assert (train_results.state.step, trainer.epoch) == (5, 1)
    assert train_results.state.best_loss == val_results.loss
    assert val_results.num_examples == 5
    assert record(config)["status"] == "running"

    comparison = trainer.run_test(test_loader)
    assert comparison.num_rows == len(test_loader.dataset) == 4
    assert record(config)["status"] == "completed"
    lock = try_file_lock(tmp_path / "run" / ".lock")
    assert lock is not None, "the folder is still locked"
    lock.release()

    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = trainer.run_test(test_loader)
    assert (again.tuned, again.base) == (comparison.tuned, comparison.base)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    trainer.close()
    assert record(config)["status"] == "completed"


def test_the_guides_log_lines_are_there_and_a_validation_has_its_standard_error(config, tmp_path):
    with TrainerDDP(0, config) as trainer:
        (_, val_results), test_loader = train(trainer)
        trainer.run_test(test_loader)
    log = (tmp_path / "run" / "log.txt").read_text()
    lines = [
        "Preparing data loaders...",
        "Training set size: 18, Validation set size: 5, Test set size: 4",
        "Starting training...",
        "Saving checkpoint step-000003 at epoch 0",
        "Saving checkpoint step-000005 at epoch 1",
        "checkpoint committed step=5",
        "Starting testing phase...",
        "Training and testing completed successfully!",
    ]
    assert [log.index(line) for line in lines] == sorted(log.index(line) for line in lines)
    assert log.index(lines[3]) < log.index("checkpoint committed step=3")  # written while training goes on
    assert f"Validation: loss={val_results.loss:.3f} ± {val_results.standard_error:.3f}" in log
    assert val_results.standard_error > 0
    last = events(tmp_path / "run", "validation")[-1]
    assert (last["loss"], last["standard_error"]) == (val_results.loss, val_results.standard_error)


def test_a_config_without_a_section_parallel_is_refused(config):
    del config["parallel"]
    with pytest.raises(ConfigError, match="no section `parallel`"):
        TrainerDDP(0, config)


@pytest.mark.parametrize(
    ("section", "key", "origin"),
    [
        ({"parallel": "single"}, "ddp", "configs/parallel/single.yaml"),
        ({"parallel.backend": "gloo"}, "parallel.backend", "the dict given to TrainerDDP"),
        ({"parallel": {}}, "parallel.timeout_minutes", "default"),
    ],
)
def test_a_section_parallel_is_a_group_a_key_or_a_dict(config, section, key, origin):
    del config["parallel"]
    with TrainerDDP(0, {**config, **section}) as trainer:
        assert trainer.runtime.world_size == 1
        assert trainer.config.origin(key).startswith(origin)


def test_a_config_of_load_config_will_do(config, tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(config))  # JSON is YAML
    with TrainerDDP(0, load_config(["parallel.world_size=1"], run=str(run))) as trainer:
        assert trainer.config.parallel.world_size == 1


def test_all_mistakes_in_a_dict_are_told_at_once(config):
    config |= {"training": {"max_step": 3, "batch_size": "many"}, "optim": {"optimizer": dict}, "lora.r": 3}
    with pytest.raises(ConfigError) as caught:
        TrainerDDP(0, config)
    text = str(caught.value)
    assert "the configuration has 4 problems" in text
    origin = "the dict given to TrainerDDP"
    assert f"{origin}: training.max_step: there is no such key. Did you mean training.max_steps?" in text
    assert f"{origin}: training.batch_size: expected a whole number above 0, got 'many'" in text
    assert f"{origin}: optim.optimizer: builtins.dict is not directly in a module that a config may name" in text
    assert f"{origin}: lora.r: given twice. Keep one of the two." in text
    assert not Path(config["output_dir"]).exists()


def test_something_that_is_no_config_is_refused_by_its_type():
    with pytest.raises(ConfigError, match="config is str; expected a dict"):
        TrainerDDP(0, "train_ddp")


def test_a_dict_of_the_guides_is_understood(config):
    config["training"] |= {"optimizer_type": torch.optim.SGD, "optimizer_args": (0.5,), "epochs": 2, "device": 0}
    config |= {"parallel": {"master_addr": "localhost", "master_port": "12355"}, "data": {**config["data"]}}
    config |= {"training.seed": 5, "early_stopping": {"kwargs": {"patience": 2}}}
    config["data"]["path"] = Path(config["data"]["path"])
    del config["optim.learning_rate"]
    with TrainerDDP(0, config) as trainer:
        checked = trainer.config
    assert checked.optim.optimizer == "torch.optim.SGD"
    assert checked.optim.learning_rate == 0.5
    assert (checked.training.num_epochs, checked.training.device, checked.seed) == (2, "cuda:0", 5)
    assert (checked.parallel.master_port, checked.early_stopping.patience) == (12355, 2)
    assert checked.origin("optim.learning_rate") == "the dict given to TrainerDDP"


def test_another_rank_than_the_world_gave_is_refused(config):
    with pytest.raises(LaunchError, match=r"given rank 1, but this process is rank 0 of 1\."):
        TrainerDDP(1, config)
    TrainerDDP(0, config).close()


def test_a_run_that_breaks_is_failed_and_gives_everything_back(config, monkeypatch):
    trainer = TrainerDDP(0, config)
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "train_step", lambda *_, **__: (_ for _ in ()).throw(RunFailedError("nan")))
        with pytest.raises(RunFailedError, match="nan"):
            train(trainer)
    assert record(config)["status"] == "failed"
    assert record(config)["result"]["error"] == "RunFailedError: nan"
    trainer.close()
    assert record(config)["status"] == "failed"
    with TrainerDDP(0, {**config, "resume": "auto"}) as trainer:
        train(trainer)
    assert record(config)["status"] == "completed"


def test_the_next_trainer_closes_the_one_before(config, tmp_path):
    first = TrainerDDP(0, config)
    _, expected = train(first)[0]
    second = TrainerDDP(0, {**config, "output_dir": str(tmp_path / "second")})
    assert record(config)["status"] == "completed"
    (_, val_results), _ = train(second)
    second.close()
    assert val_results == expected


def test_a_second_training_is_refused_and_leaves_the_run_completed(config):
    with TrainerDDP(0, config) as trainer:
        train(trainer)
        with pytest.raises(ConfigError, match="trained it already"):
            trainer.run_training(trainer.prepare_dataloaders()[0])
    assert record(config)["status"] == "completed"


def test_cleaning_up_before_closing(config):
    initialize_ddp(rank=0, worldsize=1, master_addr="localhost", master_port="12355")
    trainer = TrainerDDP(0, config)
    train(trainer)
    for act in (cleanup_ddp, trainer.close):
        act()
        act()
    assert record(config)["status"] == "completed"


def test_closing_before_training_is_no_completed_run(config):
    with TrainerDDP(0, config) as trainer:
        trainer.prepare_dataloaders()
    assert record(config)["status"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "status", "error"),
    [
        ("leaves_untested", 0, "completed", None),
        ("breaks_before_training", 1, "failed", "ZeroDivisionError: a mistake in the script"),
    ],
)
def test_a_script_that_never_closes_leaves_a_true_record(config, tmp_path, name, code, status, error):
    done, _ = run_script(name, config, tmp_path)
    assert done.returncode == code, done.stdout
    assert record(config)["status"] == status
    assert record(config)["result"].get("error") == error
    assert not (tmp_path / "run" / ".lock").exists()


def assert_both_ranks_trained(done, ranks, config, launcher):
    assert done.returncode == 0, done.stdout
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    assert [(rank["epoch"], rank["device"], rank["rows"]) for rank in ranks] == [(0, "cpu", [18, 5, 4])] * 2
    assert ranks[0]["loss"] == ranks[1]["loss"]
    assert ranks[0]["val_loss"] == ranks[1]["val_loss"]
    assert ranks[0]["num_tested"] == 4
    written = record(config)
    assert (written["status"], written["world_size"], written["launcher"]) == ("completed", 2, launcher)
    assert written["processes_started"] == 2
    assert done.stdout.count("Written to run:") == 1, done.stdout
    assert not Path(config["output_dir"], ".lock").exists()


@pytest.mark.slow
def test_two_spawned_processes_train_as_one_world(config, tmp_path):
    config = with_port(config, master_addr="localhost")
    done, ranks = run_script("guide", config, tmp_path)
    assert_both_ranks_trained(done, ranks, config, "spawn")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Starting distributed training..." in log
    assert "Training and testing completed successfully!" in log


@pytest.mark.slow
def test_where_the_world_never_came_one_goes_on_keeps_the_global_batch_and_says_so(config, tmp_path):
    del config["training"]["global_batch_size"]
    config = with_port(config, timeout_minutes=0.04, master_addr="localhost")
    done, ranks = run_script("comes_alone", config, tmp_path)
    assert done.returncode == 0, done.stdout
    assert [rank["world_size"] for rank in ranks] == [1]
    written = record(config)
    assert [(taken["what"], taken["wanted"]) for taken in written["fallbacks"]] == [("ddp", "2 processes")]
    assert written["global_batch"] == {"global_batch_size": 8, "batch_size": 4, "world_size_asked": 2}


@pytest.mark.slow
def test_early_stopping_is_decided_on_rank_0_and_every_rank_leaves_at_the_same_step(config, tmp_path):
    config |= {"optim.learning_rate": 0.0, "early_stopping.patience": 1, "validation.validate_every": 1}
    done, ranks = run_script("stops_early", config, tmp_path, launcher="torchrun")
    assert_both_ranks_trained(done, ranks, config, "torchrun")
    # At a learning rate of zero the second validation cannot be better than the first.
    assert [rank["step"] for rank in ranks] == [2, 2]
