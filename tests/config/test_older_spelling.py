"""Every row of the table of older keys: what it becomes, and that it is said once."""

import logging
from pathlib import Path

import pytest
import yaml

from finetune.config.compose import compose, config_from_dict
from finetune.config.older_spelling import ADDED, REMOVED, RENAMED, TABLE
from finetune.config.render import resolved_yaml
from finetune.config.run_config import config_from_record
from finetune.config.schema import ALIASES, Config
from finetune.errors import ConfigError

SAME = "an older spelling of"

ROWS: list[tuple[str, str, str, object, str]] = [
    # the row, YAML as it was written, our key, its value, what the warning says
    (
        "training.optimizer_type",
        "training.optimizer_type: !pyobject torch.optim.SGD",
        "optim.optimizer",
        "torch.optim.SGD",
        SAME,
    ),
    ("training.optimizer_type", "training: {optimizer_type: AdamW}", "optim.optimizer", "torch.optim.AdamW", SAME),
    ("training.optimizer_args", "training.optimizer_args: []", "optim.args", {}, "left out: it is empty"),
    ("training.optimizer_args", "training.optimizer_args: null", "optim.args", {}, "left out: it is empty"),
    ("training.optimizer_args", "training.optimizer_args: [1e-4]", "optim.learning_rate", 1e-4, SAME),
    ("training.optimizer_args.lr", "training.optimizer_args: {lr: 1e-4}", "optim.learning_rate", 1e-4, SAME),
    (
        "training.optimizer_args.weight_decay",
        "training.optimizer_args: {weight_decay: 0.1}",
        "optim.weight_decay",
        0.1,
        SAME,
    ),
    ("training.optimizer_args.*", "training.optimizer_args: {eps: 1}", "optim.args", {"eps": 1}, SAME),
    ("training.optimizer_kwargs", "training.optimizer_kwargs: {}", "optim.args", {}, "left out: it is empty"),
    ("training.optimizer_kwargs.lr", "training.optimizer_kwargs: {lr: 1e-4}", "optim.learning_rate", 1e-4, SAME),
    (
        "training.optimizer_kwargs.weight_decay",
        "training.optimizer_kwargs: {weight_decay: 0.1}",
        "optim.weight_decay",
        0.1,
        SAME,
    ),
    (
        "training.optimizer_kwargs.*",
        "training.optimizer_kwargs: {betas: [0.1, 0.2]}",
        "optim.args",
        {"betas": [0.1, 0.2]},
        SAME,
    ),
    ("training.path", "training: {path: /data/runs}", "output_dir", "/data/runs", SAME),
    ("training.seed", "training: {seed: 7}", "seed", 7, SAME),
    ("training.checkpoint_at", "training: {checkpoint_at: 5}", "checkpoint.save_every_epochs", 5, SAME),
    ("training.epochs", "training: {epochs: 5}", "training.num_epochs", 5, SAME),
    ("num_epochs", "num_epochs: 5", "training.num_epochs", 5, SAME),
    ("epochs", "epochs: 5", "training.num_epochs", 5, SAME),
    ("early_stopping.type", "early_stopping.type: !pyobject their.Rule", "early_stopping.patience", None, "one rule"),
    ("early_stopping.args", "early_stopping: {args: []}", "early_stopping.patience", None, "left out: it is empty"),
    ("early_stopping.args", "early_stopping: {args: [3]}", "early_stopping.patience", 3, SAME),
    ("early_stopping.args.*", "early_stopping: {args: {patience: 3}}", "early_stopping.patience", 3, SAME),
    ("early_stopping.kwargs", "early_stopping.kwargs: null", "early_stopping.patience", None, "left out: it is empty"),
    ("early_stopping.kwargs.*", "early_stopping: {kwargs: {patience: 3}}", "early_stopping.patience", 3, SAME),
    ("validation.validator.device", "validation.validator: {device: cuda:1}", "training.device", "auto", "one device"),
    ("testing.tester.device", "testing: {tester: {device: 0}}", "training.device", "auto", "one device"),
    ("parallel.master_port", "parallel.master_port: '29500'", "parallel.master_port", 29500, "the number 29500"),
    ("model.type", "model.type: !pyobject transformers.Phi3ForCausalLM", "model.path", None, "the class follows"),
]

RENAMED_VALUES = {
    "lora.targets": ["qkv_proj"],
    "training.trackers": ["wandb"],
    "training.dpo_beta": 0.5,
    "checkpoint.keep": 5,
}

REFUSED = [
    ("criterion", "criterion: !pyobject torch.nn.MSELoss", "the loss is always next-token cross-entropy"),
    ("criterion.*", "criterion: {type: !pyobject torch.nn.MSELoss, args: [1]}", "the loss is always"),
    ("training.criterion", "training: {criterion: mse}", "the loss is always"),
    ("training.criterion.*", "training: {criterion: {type: mse, weight: 2}}", "the loss is always"),
    ("model.type", "model: {type: !pyobject os.system}", "only causal language models are trained"),
]


def composed(tmp_path: Path, text: str, *words: str) -> Config:
    path = tmp_path / "old.yaml"
    path.write_text(text)
    return compose(words, run=str(path), complete=False)


def test_every_row_is_tested():
    assert {row for row, *_ in ROWS + REFUSED} | {*REMOVED, *ALIASES} == set(TABLE)


@pytest.mark.parametrize(("row", "text", "key", "value", "warning"), ROWS)
def test_what_a_row_becomes(tmp_path, caplog, row, text, key, value, warning):
    with caplog.at_level(logging.WARNING, "finetune"):
        found: object = composed(tmp_path, text)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/old.yaml:1: {row.removesuffix('.*')}")
    assert warning in message
    if warning == SAME:
        assert key in message


@pytest.mark.parametrize(("row", "text", "reason"), REFUSED)
def test_what_is_refused(tmp_path, row, text, reason):
    with pytest.raises(ConfigError) as caught:
        composed(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/old.yaml:1: {row.removesuffix('.*')}: refused: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("phi", "phi2", "phi3", "phi-3.5", "phi3_5", "phi4", "Phi4", "phi_tiny", "microsoft/phi-4", "null"),
        *("causal_lm", "CausalLM", "transformers.AutoModelForCausalLM"),
    ],
)
def test_names_of_causal_models_are_left_out(tmp_path, caplog, name):
    with caplog.at_level(logging.WARNING, "finetune"):
        composed(tmp_path, f"model.type: {name}")
    (message,) = caplog.messages
    assert message.endswith(":1: model.type is left out: the class follows from the model's own config.json")


@pytest.mark.parametrize(
    "name", ["bert", "resnet50", "phishing", "t5", "transformers.BertForMaskedLM", "phi.Classifier"]
)
def test_names_of_other_models(tmp_path, name):
    with pytest.raises(ConfigError, match="only causal language models"):
        composed(tmp_path, f"model.type: {name}")


def test_our_own_spelling_warns_of_nothing(tmp_path, caplog):
    text = "parallel: {rank: null, master_port: 29500}\ntraining: {device: 'cuda:0', num_epochs: 3}\nseed: 1\n"
    config = composed(tmp_path, text)
    assert (config.parallel.rank, config.parallel.master_port, config.training.device) == (None, 29500, "cuda:0")
    assert caplog.messages == []


def renamed_values(config: Config) -> list[object]:
    return [
        config.lora.target_modules,
        config.training.report_to,
        config.preference.beta,
        config.checkpoint.save_total_limit,
    ]


def test_the_folder_of_an_earlier_run_is_read_with_its_keys(tmp_path, caplog):
    assert RENAMED.keys() == RENAMED_VALUES.keys()
    saved = Config().model_dump(mode="json")
    for (older, value), key in zip(RENAMED_VALUES.items(), RENAMED.values(), strict=True):
        (section, name), (new_section, new_name) = older.split("."), key.split(".")
        del saved[new_section][new_name]
        saved[section][name] = value
    del saved["preference"]
    saved["data"] |= {"stream": True, "mixture": [{"path": "a.jsonl", "stream": True}]}
    saved["resume_allow"] = ["training.dpo_beta", "seed"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    for config in (config_from_record(saved), compose([], run=str(tmp_path / "config.yaml"), complete=False)):
        assert renamed_values(config) == list(RENAMED_VALUES.values())
        assert config.data.mixture == [{"path": "a.jsonl"}]
        assert config.resume_allow == ["preference.beta", "seed"]
    assert caplog.messages == []


@pytest.mark.parametrize(("older", "key"), RENAMED.items())
def test_a_renamed_key_is_refused_elsewhere_with_its_name_of_today(tmp_path, older, key):
    said = f"{older}: there is no such key. Did you mean {key}?"
    with pytest.raises(ConfigError) as caught:
        composed(tmp_path, f"{older}: {RENAMED_VALUES[older]}\n")
    assert str(caught.value) == f"{tmp_path}/old.yaml:1: {said}"
    with pytest.raises(ConfigError) as caught:
        compose([f"{older}={RENAMED_VALUES[older]}", f"resume.allow={older}"], complete=False)
    assert f"command line: {said}" in str(caught.value)


def test_a_key_of_ours_that_was_removed_is_left_out(tmp_path, caplog):
    file = "data.max_rows: 8\ndata.mixture: [{path: a.jsonl, stream: true}]\n"
    config = composed(tmp_path, file)
    assert (config.data.max_rows, config.data.mixture) == (8, [{"path": "a.jsonl"}])
    assert caplog.messages == []
    compose(["data.stream=true"], complete=False)
    assert caplog.messages == [
        "command line: data.stream is left out: data.max_rows alone reads the first rows of a hub data set"
    ]


def test_a_key_in_both_spellings_names_both(tmp_path):
    text = "seed: 1\ntraining:\n  seed: 1\n  epochs: 2\nnum_epochs: 2\n"
    with pytest.raises(ConfigError) as caught:
        composed(tmp_path, text)
    file = f"{tmp_path}/old.yaml"
    assert f"{file}:3: training.seed: means the same as seed ({file}:1)" in str(caught.value)
    assert f"{file}:5: num_epochs: means the same as training.epochs ({file}:4)" in str(caught.value)


def test_a_run_from_before_the_rule_of_splits_holds_out_rows_by_position(tmp_path):
    assert ADDED == {"data.split_rule": "position"}
    file, again = tmp_path / "config.yaml", {"model": "phi_tiny", "data": "orders", "output_dir": str(tmp_path)}
    words = [f"{key}={value}" for key, value in again.items()]
    saved = resolved_yaml(compose(words))

    def rules() -> set[str]:
        configs = (
            compose([], run=str(file)),
            compose([*words, "resume=auto"]),
            config_from_dict({**again, "resume": "auto"}, "a dict"),
            config_from_record(yaml.safe_load(file.read_text())),
        )
        return {config.data.split_rule for config in configs}

    file.write_text(saved)
    assert rules() == {"content"}
    file.write_text(saved.replace("  split_rule: content\n", ""))
    assert rules() == {"position"}
    # A command may say otherwise. A new run and a file that no run wrote have the default.
    assert compose([*words, "resume=auto", "data.split_rule=content"]).data.split_rule == "content"
    assert compose(words).data.split_rule == "content"
    file.write_text("data: {split_seed: 3}\n")
    assert compose([], run=str(file), complete=False).data.split_rule == "content"


def test_an_alias_is_read_without_a_warning_and_loses_to_a_later_file(tmp_path, caplog):
    config = composed(tmp_path, "report_to: wandb\noptim: {warmup_ratio: 0.1}\n", "optim.warmup_steps=3")
    assert (config.training.report_to, config.optim.warmup_steps) == (["wandb"], 3)
    assert not caplog.records
