"""A run that goes on is compared with its start: what changes the curve is refused by name, or accepted on purpose."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.overrides import train_from_overrides
from finetune.config.compose import compose, load_config
from finetune.config.keys import fields, on_resume
from finetune.config.render import resolved_yaml
from finetune.config.run_paths import resolved_paths
from finetune.config.schema import OnResume
from finetune.errors import CheckpointError
from finetune.runs.durable import committed_folder
from finetune.runs.folder import RunFolder
from finetune.runs.record import read_versions, record_of_start
from finetune.runs.state import TrainerState
from finetune.training.resume import accepted_changes
from tests.replay.scene import edit_json
from tests.tiny_runs import write_base, write_rows
from tests.tiny_training import contents, curve, record

ROWS = {"data.train": "aaaa", "data.validation": "bbbb", "data.test": "cccc"}
REFUSED = {
    "": "seed",
    "model": "path revision init config tokenizer chat_template attention frozen_precision fp8_layers "
    "trust_remote_code",
    "lora": (
        "r alpha dropout target_modules layers rank_pattern alpha_pattern rslora dora init start_from quantize "
        "new_tokens modules_to_save"
    ),
    "optim": (
        "optimizer learning_rate weight_decay args schedule min_learning_rate decay_steps warmup_steps max_grad_norm "
        "lora_plus_ratio"
    ),
    "training": "method objective max_steps num_epochs drop_last precision neftune_alpha",
    "grpo": "loss_type scale_rewards epsilon epsilon_high importance_sampling_level beta num_iterations "
    "mask_truncated_completions",
    "rollout": "num_generations max_completion_length temperature top_p top_k batch_size tools tool_schemas "
    "environment max_turns max_result_tokens",
    "reward": "functions weights pattern",
    "preference": "beta gamma desirable_weight undesirable_weight",
    "validation": "drop_last by",
    "data": "keep keep_prompts",
    "early_stopping": "metric max_forgotten",
    "checkpoint": "best_metric",
}
"""Without dropout, and with rows that are the same."""
WITH_DROPOUT = {
    f"training.{key}"
    for key in ("batch_size", "max_tokens_per_microbatch", "packing", "share_prefixes", "kernels", "memory")
}
WITH_OTHER_ROWS = {
    f"data.{key}"
    for key in (
        *("path", "mixture", "name", "revision", "train", "validation", "test", "split_seed", "split_rule"),
        *("format", "columns"),
        *(
            "train_on",
            "max_length",
            "max_rows",
            "on_bad_row",
            "separator",
            "on_long_row",
            "on_no_target",
            "on_truncated_answer",
        ),
        *("on_doubled_bos", "on_untrained_end", "on_overlap", "on_ignored_key", "chat_template", "template_date"),
    )
}


class Started:
    """A run's folder as a start with some words left it, with one whole checkpoint, and later starts to compare."""

    def __init__(self, path: Path, *words: str) -> None:
        self.words = ["model=phi_tiny", "data=orders", f"output_dir={path}", *words]
        self.folder = RunFolder(path)
        self.folder.checkpoints.mkdir(parents=True)
        config = load_config(self.words)
        self.folder.config_file.write_text(resolved_yaml(config))
        record = {"status": "running", "started_with": record_of_start(config, ROWS), "fingerprints": ROWS}
        self.folder.record_file.write_text(json.dumps(record, indent=2) + "\n")
        self.save(20)

    def save(self, step: int) -> Path:
        path = self.folder.checkpoint(step)
        with committed_folder(path) as writer:
            for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"):
                writer.write(name, [name.encode()])
            writer.write("state.json", [json.dumps(TrainerState(step=step).as_record()).encode()])
        return path

    def go_on(self, *words: str, rows: dict[str, str] | None = None, **more: Any) -> list[str]:
        """The keys that were accepted."""
        config = load_config([*self.words, "resume=auto", *words])
        changes = accepted_changes(self.folder, config, rows or ROWS, **more)
        return [change["key"] for change in changes]

    def refusal(self, *words: str, rows: dict[str, str] | None = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            self.go_on(*words, rows=rows)
        return str(caught.value)


@pytest.fixture
def started(tmp_path: Path) -> Started:
    return Started(tmp_path / "run")


# --- which keys ---------------------------------------------------------------------------------------------------


def test_every_key_is_judged() -> None:
    for key, field in fields().items():
        assert [mark for mark in field.metadata if isinstance(mark, OnResume)] == [on_resume(key)], key
        assert (on_resume(key).matters == "never") == (on_resume(key).decides == ""), key


def another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 0.5
    if value == "sft":
        return "dpo"  # an objective has to be known
    return ["another"] if isinstance(value, list) else {"another": 1} if isinstance(value, dict) else "another"


def refused_alone(started: Started, rows: dict[str, str] = ROWS) -> set[str]:
    """Every key of the schema given another value, one at a time."""
    before = load_config([*started.words, "resume=auto"])
    refused = set()
    for key in fields():
        section, _, name = key.rpartition(".")
        holder = getattr(before, section) if section else before
        now = holder.model_copy(update={name: another(getattr(holder, name))})
        now = before.model_copy(update={section: now}) if section else now
        said = ""
        try:
            accepted_changes(started.folder, now, rows)
        except CheckpointError as error:
            said = str(error)
            refused.add(key)
        assert not said or f"\n  {key}: started with " in said
    return refused


@pytest.mark.slow
def test_each_key_that_changes_the_curve_is_refused_and_no_other(tmp_path: Path) -> None:
    always = {f"{section}.{key}".lstrip(".") for section, keys in REFUSED.items() for key in keys.split()}
    plain = Started(tmp_path / "plain", "training.max_steps=null")
    assert refused_alone(plain) == always
    assert refused_alone(Started(tmp_path / "dropout", "lora.dropout=0.1")) - always == WITH_DROPOUT
    plain.folder.record_file.unlink()
    assert refused_alone(plain) - always == WITH_OTHER_ROWS  # it is not known whether they are the same


@pytest.mark.parametrize(
    ("words", "change", "refused"),
    [
        ((), "training.max_steps=40", True),
        (("optim.schedule=constant", "optim.warmup_steps=0.1"), "training.max_steps=40", True),
        (("optim.schedule=constant",), "training.num_epochs=9", False),
        (("training.max_steps=30",), "training.num_epochs=9", False),
        (("training.method=full",), "lora.r=2", False),
        (("lora.dropout=0",), "training.batch_size=1", False),
        (("lora.dropout=0", "training.neftune_alpha=5"), "training.batch_size=1", True),
        ((), "validation.num_samples=8", False),
        (("validation.metrics=exact_match",), "validation.num_samples=8", True),
        (("validation.metrics=exact_match",), "validation.max_new_tokens=8", True),
    ],
)
def test_keys_that_count_only_beside_others(tmp_path: Path, words: tuple[str], change: str, refused: bool) -> None:
    run = Started(tmp_path / "run", *words)
    if refused:
        assert change.partition("=")[0] in run.refusal(change)
    else:
        assert run.go_on(change) == []


def test_answers_that_the_metrics_of_a_script_measured_count_too(started: Started) -> None:
    edit_json(started.folder.record_file, script={"metrics": {"short": "scores.short"}})
    assert "validation.num_samples: started with 64, now 8" in started.refusal("validation.num_samples=8")


# --- what is said -------------------------------------------------------------------------------------------------


def test_a_refusal_names_both_values_and_what_to_do(started: Started) -> None:
    message = started.refusal("optim.learning_rate=1e-5", "lora.alpha=9", "training.log_every=3")
    assert str(started.folder.path) in message
    rate = load_config(started.words).optim.learning_rate
    line = f"optim.learning_rate: started with {rate}, now 1e-05 (overrides): the learning rate of every step"
    assert line in [shown.strip() for shown in message.splitlines()]
    assert "add resume.allow=lora.alpha,optim.learning_rate. Nothing was changed." in message
    assert "log_every" not in message


def test_what_no_checkpoint_would_fit_is_not_offered(started: Started) -> None:
    message = started.refusal("lora.r=2", "seed=3")
    assert "start another run with output_dir=" in message
    assert "resume.allow" not in message


@pytest.mark.parametrize(
    "words",
    [
        ["resume.allow=optim.learning_rate,seed"],
        ["resume.allow=[optim, seed]"],
        ["resume_allow=[optim.learning_rate, seed]"],
    ],
)
def test_a_change_is_accepted_by_key_or_section_logged_and_handed_on(started, words, caplog) -> None:
    with caplog.at_level(logging.INFO, "finetune"):
        assert started.go_on("optim.learning_rate=1e-5", "seed=7", "training.log_every=3", *words) == [
            "seed",
            "optim.learning_rate",
        ]
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "no effect on the curve: training.log_every: started with" in line] == lines[:1]
    assert [line.partition(": started")[0] for line in lines[1:]] == [
        f"accepted by resume.allow: {key}" for key in ("seed", "optim.learning_rate")
    ]


def test_a_run_that_was_saved_with_keys_of_other_names_is_compared_by_todays(started: Started) -> None:
    record = json.loads(started.folder.record_file.read_text())
    config = record["started_with"]["config"]
    config["lora"]["targets"] = config["lora"].pop("target_modules")
    config["training"]["dpo_beta"] = config.pop("preference")["beta"]
    config["training"]["trackers"] = config["training"].pop("report_to")
    config["checkpoint"]["keep"] = config["checkpoint"].pop("save_total_limit")
    values = {"config": config, "rows": ROWS}
    record["started_with"] = {
        **values,
        "sha256": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest(),
    }
    started.folder.record_file.write_text(json.dumps(record))
    started.folder.config_file.write_text("")
    assert started.go_on("checkpoint.save_total_limit=5", "training.report_to=[wandb]") == []
    assert "lora.target_modules: started with auto, now" in started.refusal("lora.target_modules=[qkv_proj]")
    assert "preference.beta: started with 0.1, now 0.5" in started.refusal("preference.beta=0.5")
    assert started.go_on("preference.beta=0.5", "resume.allow=preference.beta") == ["preference.beta"]


def test_long_values_are_shown_where_they_differ(tmp_path: Path) -> None:
    template = "{# " + "x" * 200 + " #}"
    run = Started(tmp_path / "run", f"model.chat_template={template}a", "optim.args={betas: [0.9, 0.95], eps: 1e-8}")
    message = run.refusal(f"model.chat_template={template}b", "optim.args={betas: [0.9, 0.95], eps: 1e-6}")
    assert "xx #}a, now ... " in message
    assert 'optim.args: started with {"eps": 1e-08}, now {"eps": 1e-06} (overrides)' in message
    assert "optim.args: " not in run.refusal("seed=7", "optim.args={eps: 1}", "resume.allow=optim")


# --- rows ---------------------------------------------------------------------------------------------------------


def test_other_rows_under_the_same_name_are_refused_until_allowed(started: Started) -> None:
    other = {**ROWS, "data.train": "dddd"}
    message = started.refusal(rows=other)
    assert "data: started with rows aaaa, now rows dddd (data.train)" in message
    assert "add resume.allow=data." in message
    assert started.go_on("resume.allow=data", rows=other) == ["data"]
    assert "now none (data.validation)" in started.refusal(rows={"data.train": "aaaa"})


# --- the base ------------------------------------------------------------------------------------------------------


def test_a_base_with_other_weights_is_refused_until_allowed(started: Started) -> None:
    """Files at the same path may be others by now. Runs of older versions did not record their base."""
    assert started.go_on(rows={**ROWS, "base": "eeee"}) == []
    record = json.loads(started.folder.record_file.read_text())
    record["fingerprints"]["base"] = "eeee"
    started.folder.record_file.write_text(json.dumps(record))
    assert started.go_on(rows={**ROWS, "base": "eeee"}) == started.go_on(rows=ROWS) == []
    other = {**ROWS, "base": "ffff"}
    message = started.refusal(rows=other)
    assert "model: started with weights eeee, now weights ffff (the base itself)" in message
    assert "add resume.allow=model." in message
    assert started.go_on("resume.allow=model", rows=other) == ["model"]


# --- folders that cannot tell -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transformers", "refused"), [("same", True), ("4.0.0", False)])
def test_a_base_with_another_config_is_refused_if_the_same_transformers_reads_it(
    started, transformers, refused
) -> None:
    record = json.loads(started.folder.record_file.read_text())
    record["fingerprints"] = {**ROWS, "model_config": "eeee"}
    record["versions"] = read_versions() | ({} if transformers == "same" else {"transformers": transformers})
    started.folder.record_file.write_text(json.dumps(record))
    now = {**ROWS, "model_config": "ffff"}
    if refused:
        message = started.refusal(rows=now)
        assert "model: started with config eeee, now config ffff (the base itself): the model that" in message
        assert started.go_on("resume.allow=model", rows=now) == ["model"]
    else:
        assert started.go_on(rows=now) == []


def test_columns_that_functions_get_are_compared(started: Started) -> None:
    record = json.loads(started.folder.record_file.read_text())
    record["fingerprints"] = {**ROWS, "columns": "eeee"}
    started.folder.record_file.write_text(json.dumps(record))
    message = started.refusal(rows={**ROWS, "columns": "ffff"})
    assert "data: started with rows eeee, now rows ffff (all columns): the columns of the rows, which reward" in message
    assert started.go_on(rows=ROWS) == []  # no function reads them now, which is a change of other keys
    assert started.go_on("resume.allow=data", rows={**ROWS, "columns": "ffff"}) == ["data"]


def test_both_sides_of_changed_pairs_are_shown(started: Started) -> None:
    record = json.loads(started.folder.record_file.read_text())
    rows = {**ROWS, "data.train": f"{'a' * 64}/{'b' * 64}"}
    record["started_with"] = record_of_start(load_config(started.words), rows)
    started.folder.record_file.write_text(json.dumps(record))
    message = started.refusal(rows={**rows, "data.train": f"{'a' * 64}/{'c' * 64}"})
    assert f"started with rows {'a' * 12}/{'b' * 12}, now rows {'a' * 12}/{'c' * 12} (data.train)" in message


def test_the_precision_that_a_device_computes_in_is_compared(started: Started) -> None:
    record = json.loads(started.folder.record_file.read_text()) | {"precision": "bf16"}
    started.folder.record_file.write_text(json.dumps(record))
    with pytest.raises(
        CheckpointError, match=r"training\.precision: started with bf16, now fp32 \(auto on this device\)"
    ):
        started.go_on(precision="fp32")
    assert started.go_on("training.precision=bf16", precision="bf16") == []
    assert started.go_on("resume.allow=training.precision", precision="fp32") == ["training.precision"]


def test_another_adapter_is_not_taken_for_another_base(started: Started) -> None:
    record = json.loads(started.folder.record_file.read_text())
    record["fingerprints"] = {**ROWS, "base": "eeee"}
    started.folder.record_file.write_text(json.dumps(record))
    change, other = "lora.layers=0", {**ROWS, "base": "ffff"}
    assert "weights" not in started.refusal(change, rows=other).replace("the weights of the adapter", "")

    def refuse(checkpoint: Path) -> None:
        raise CheckpointError("other names")

    with pytest.raises(CheckpointError, match="no checkpoint can be loaded then: other names"):
        started.go_on(change, "resume.allow=lora", rows=other, refuse_misfit=refuse)
    assert "weights eeee, now weights ffff" in started.refusal(change, "resume.allow=lora", rows=other)


def test_nothing_is_compared_where_no_checkpoint_is_whole(started: Started) -> None:
    (started.folder.checkpoint(20) / "optimizer.safetensors").write_bytes(b"torn")
    assert started.go_on("seed=9") == []  # the run starts from its beginning
    started.save(30)
    assert "seed" in started.refusal("seed=9")


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", b"- a\n- b\n", b"seed: {a: 1}\n", b"gone_key: 3\n"])
def test_where_no_file_tells_the_config_nothing_is_compared_and_that_is_said(started, content, caplog) -> None:
    for file in (started.folder.config_file, started.folder.record_file):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
    assert started.go_on("seed=9", rows={"data.train": "dddd"}) == []
    assert "could not be compared: " in caplog.text or "nothing in it could be compared" in caplog.text
    assert "the rows of the start, so they could not be compared" in caplog.text


def test_a_config_file_alone_is_compared_and_one_of_an_older_version_as_far_as_it_goes(started, caplog) -> None:
    started.folder.record_file.unlink()
    assert "seed: started with 0, now 9" in started.refusal("seed=9")
    lines = started.folder.config_file.read_text().splitlines(keepends=True)
    started.folder.config_file.write_text("".join(line for line in lines if "max_grad_norm" not in line))
    assert started.go_on("optim.max_grad_norm=3") == []
    assert "could not be compared: optim.max_grad_norm" in caplog.text
    assert "seed" in started.refusal("seed=9")


def test_an_edited_config_file_does_not_pass_for_the_start(started: Started) -> None:
    """`finetune train RUN/config.yaml resume=auto`, after a look and a change."""
    file = started.folder.config_file
    file.write_text(file.read_text().replace("seed: 0\n", "seed: 9\n"))
    config = compose(["resume=auto"], run=str(file))
    with pytest.raises(CheckpointError, match=r"seed: started with 0, now 9 \(\S+config\.yaml:2\)"):
        accepted_changes(started.folder, config, ROWS)


@pytest.mark.parametrize("content", [b'{"started', b"[]", b'{"started_with": {}}'])
def test_a_record_that_tells_nothing_leaves_the_config_file(started, content, caplog) -> None:
    started.folder.record_file.write_bytes(content)
    assert started.go_on(rows={"data.train": "dddd"}) == []
    assert "the rows of the start, so they could not be compared" in caplog.text
    assert "seed" in started.refusal("seed=9")


def test_another_spelling_of_the_same_path_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("project/models/x", "elsewhere/models/x"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    started = Started(tmp_path / "run", "model.path=models/x")
    record = json.loads(started.folder.record_file.read_text())
    record["resolved_paths"] = resolved_paths(load_config(started.words))
    started.folder.record_file.write_text(json.dumps(record))
    assert started.go_on("strict=true") == []
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in ("models/x", "../project/models/x", str(tmp_path / "project" / "models" / "x")):
        assert started.go_on(f"model.path={path}") == []
    assert "model.path: started with models/x, now ./models/x" in started.refusal("model.path=./models/x")


# --- whole runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base")
    write_rows(folder / "rows", test=0)
    return folder


@pytest.fixture
def words(inputs: Path, tmp_path: Path) -> list[str]:
    """18 rows in global batches of 3: six steps an epoch. A constant rate, so that a run may be given more steps."""
    return [
        *(f"model.path={inputs / 'base'}", f"data.path={inputs / 'rows'}", f"data.cache_dir={inputs / 'cache'}"),
        *(f"output_dir={tmp_path / 'run'}", "lora.r=2", "training.device=cpu", "training.batch_size=3"),
        *("optim.schedule=constant", "training.max_steps=4", "checkpoint.save_total_limit=9", "resume=auto"),
    ]


def test_a_run_is_compared_with_what_was_last_accepted(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_from_overrides([*words, "optim.learning_rate=1e-3"])
    assert record(run)["resume_changes"] == []
    changed = [*words, "training.max_steps=6", "optim.learning_rate=1e-4"]

    before = contents(run)
    with pytest.raises(CheckpointError, match=r"optim\.learning_rate: started with 0\.001, now 0\.0001"):
        train_from_overrides(changed)
    assert contents(run) == before

    train_from_overrides([*changed, "resume.allow=optim.learning_rate"])
    assert [step["learning_rate"] for step in curve(run)] == [1e-3] * 4 + [1e-4] * 2
    (accepted,) = record(run)["resume_changes"]
    assert accepted == {
        "at": record(run)["starts"][1],
        "step": 4,
        "key": "optim.learning_rate",
        "before": "0.001",
        "now": "0.0001",
    }
    # What was allowed once is not allowed for ever.
    assert load_config([f"run={run / 'config.yaml'}"]).resume_allow == []

    train_from_overrides([*changed, "training.max_steps=7"])
    assert record(run)["resume_changes"] == [accepted]
    with pytest.raises(CheckpointError, match=r"started with 0\.0001, now 0\.001"):
        train_from_overrides([*changed, "optim.learning_rate=1e-3"])


def test_no_change_is_accepted_with_which_no_checkpoint_can_be_loaded(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_from_overrides(words)
    before = contents(run)
    for change, reason in {
        "lora.r=4": "of another shape",
        "optim.optimizer=torch.optim.SGD": "is the state of AdamW, but the run uses SGD",
        "training.method=full": "holds no model.safetensors",
    }.items():
        key = change.partition("=")[0]
        with pytest.raises(
            CheckpointError, match=rf"(?s){key}: started with .*no checkpoint .*{reason}.*Nothing was ch"
        ):
            train_from_overrides([*words, change, "optim.weight_decay=0", "resume.allow=lora,optim,training"])
        assert contents(run) == before
    # These keys decide the shape of the adapter. With these values it is the same.
    fitting = [*words, "training.max_steps=6", "lora.layers=[0,1]", "lora.rank_pattern={o_proj: 2}"]
    train_from_overrides([*fitting, "resume.allow=lora"])
    assert [change["key"] for change in record(run)["resume_changes"]] == ["lora.layers", "lora.rank_pattern"]
    assert len(curve(run)) == 6


def test_fewer_rows_once_allowed_make_shorter_epochs(words: list[str], tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", train=18, test=0)
    words = [*words, f"data.path={rows}"]
    train_from_overrides([*words, "training.max_steps=5"])
    kept = (rows / "train.jsonl").read_text().splitlines(keepends=True)[:9]
    (rows / "train.jsonl").write_text("".join(kept))
    with pytest.raises(CheckpointError, match=r"(?s)rows .*\(data\.train\).*resume\.allow=data\."):
        train_from_overrides([*words, "training.max_steps=8"])
    train_from_overrides([*words, "training.max_steps=8", "resume.allow=data"])
    epochs = [step["epoch"] for step in curve(tmp_path / "run")]
    assert epochs == [0, 0, 0, 0, 0, 1, 2, 2]  # six steps an epoch, then three: step 6 is the last of the second
