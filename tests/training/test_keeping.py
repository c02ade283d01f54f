"""`data.keep` and `early_stopping.max_forgotten`: train without forgetting what the base could do."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest

from finetune import build_base_model, build_tokenizer, load_config
from finetune.data.row_file import map_rows
from finetune.diagnose.plan_devices import find_device
from finetune.diagnose.planner import make_plan
from finetune.errors import CheckpointError, ConfigError, DataError
from finetune.fallbacks import Fallbacks
from finetune.replay.steps import replay_losses
from finetune.runs.file_lock import file_lock
from finetune.runs.recorded_run import RecordedRun
from finetune.training import keeping
from finetune.training.train import train
from tests.launches import REPOSITORY, run_command
from tests.tiny_training import events, losses

MEASURED = ["Good morning.", "Send a chair.", "Hello.", "Where is Porto?", "Why?"]
"""More than are measured at once, so that each of two processes has some. The first is one of those below."""
PROMPTS = ["Order six pens.", "Two cups for Ida, please.", "Good morning.", "Name a colour."]
NUM_ROWS = 16
BOUND = "early_stopping.max_forgotten"
GENERAL = "shipped:general_prompts.jsonl"
TRAIN = REPOSITORY / "finetune/assets/orders/train.jsonl"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the weights of phi_tiny, and two files of prompts that share one."""
    folder, config = tmp_path_factory.mktemp("keeping"), load_config([], run="quickstart")
    build_base_model(config.model).save_pretrained(folder / "base")
    build_tokenizer(config.model).save_pretrained(folder / "base")
    for name, prompts in (("kept", PROMPTS), ("measured", MEASURED)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return folder


def run_words(base, folder, *more):
    """The overrides of a run of quickstart with few steps."""
    own = [f"model.path={base / 'base'}", "model.init=pretrained", f"data.keep_prompts={base / 'kept.jsonl'}"]
    limits = [f"data.max_rows={NUM_ROWS}", "training.max_steps=4", "training.batch_size=8", "optim.warmup_steps=0"]
    often = ["validation.validate_every=2", "checkpoint.save_every=2", "checkpoint.save_total_limit=9"]
    short = ["testing.metrics=[]", "testing.num_samples=0", f"testing.general_prompts={base / 'measured.jsonl'}"]
    return [*own, *limits, *often, *short, f"output_dir={folder}", f"data.cache_dir={base / 'cache'}", *more]


@pytest.fixture
def run(base, tmp_path):
    """Train a few steps in a folder of this name. `run.words` returns the overrides of this run."""

    def words(name, *more):
        return run_words(base, tmp_path / name, *more)

    def run(name, *more):
        train(load_config(words(name, *more), run="quickstart"))
        return tmp_path / name

    run.words = words
    return run


def test_two_runs_do_not_write_the_same_answers_to_the_cache_together(tmp_path):
    """One of them would rename the unfinished file of the other, which would then be refused by strict=true."""
    path, fallbacks = tmp_path / "base-answers-0.safetensors", Fallbacks(strict=True)
    runtime = SimpleNamespace(fallbacks=fallbacks)
    with file_lock(path.with_suffix(".lock"), waiting_for="another run"):
        keeping._write_to_cache(runtime, path, [([1, 2, 3], 1)], "key")
        assert not path.exists()
    keeping._write_to_cache(runtime, path, [([1, 2, 3], 1)], "key")
    assert keeping._read(path, "key", vocabulary=9) == [([1, 2, 3], 1)]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.slow
def test_the_answers_are_trained_on_recorded_and_never_generated_again(run, base, tmp_path, monkeypatch):
    first = run("first", "data.keep=25%")
    rows = map_rows(first / "base_answers.safetensors")
    assert len(rows.numbers) == 3, "four were asked for, but one of the four prompts is measured"
    fingerprints, kept = (RecordedRun(first).part(name) for name in ("fingerprints", "base_answers"))
    plain = run("plain")
    assert RecordedRun(plain).part("fingerprints")["data.validation"] == fingerprints["data.validation"]
    assert losses(plain)[0] != losses(first)[0]
    validation, without = events(first, "validation")[0], events(plain, "validation")[0]
    assert validation["num_targets"] == without["num_targets"], "they are not among the user's rows"
    assert 0 < validation["loss/base_answers"] != validation["loss"]
    assert kept["rows"] == 3
    assert "loss/base_answers" not in without

    # A resumed run reads its own file, another run reads the cache, and a replay the folder of the run.
    monkeypatch.setattr(keeping, "generate_answers", lambda *_, **__: pytest.fail("generated again"))
    assert losses(run("second", "data.keep=25%"))[0] == losses(first)[0]
    shutil.rmtree(base / "cache")
    files = first / "checkpoints/step-000004/adapter_model.safetensors", first / "base_answers.safetensors"
    before = [file.read_bytes() for file in files]
    shutil.rmtree(files[0].parent)
    run("first", "data.keep=25%", "resume=auto")
    assert [file.read_bytes() for file in files] == before
    replay = replay_losses(first, 4)
    assert (len(replay.steps), replay.mismatches) == (4, [])

    # A resumed run with other settings of the base also reads its own file, and does not put it into their cache.
    shutil.rmtree(tmp_path / "second/checkpoints/step-000004")
    shutil.rmtree(base / "cache")
    run("second", "data.keep=25%", "resume=auto", "training.precision=bf16", "resume.allow=training.precision")
    assert (tmp_path / "second/base_answers.safetensors").read_bytes() == before[1]
    assert not list((base / "cache").glob("base-answers-*"))

    # Without any file, other answers are refused.
    shutil.rmtree(files[0].parent)
    files[1].unlink()
    monkeypatch.setattr(keeping, "generate_answers", lambda _, prompts, *__, **___: [[5, 6]] * len(prompts))
    words = ["data.keep=25%", "resume=auto", f"data.cache_dir={tmp_path / 'other'}"]
    with pytest.raises(CheckpointError, match=r"is gone or damaged.*resume\.allow=data\.keep"):
        run("first", *words)
    run("first", *words, "resume.allow=data.keep")
    assert len(losses(first)) == 4

    # A damaged file of the cache is replaced.
    (cached,) = (tmp_path / "other").glob("base-answers-*")
    whole = cached.read_bytes()
    cached.write_bytes(whole[:-1])
    run("third", "data.keep=25%", words[-1])
    assert cached.read_bytes() == whole


@pytest.mark.parametrize("is_shipped", [True, False])
def test_prompts_that_are_too_long_are_refused_by_the_longest_and_the_length_that_is_needed(tmp_path, is_shipped):
    own = tmp_path / "prompts.jsonl"
    own.write_text("".join(json.dumps({"prompt": "pens " * count}) + "\n" for count in (30, 90, 60)))
    words = ["model=phi_tiny", "data=orders", "data.keep=500"] + ([] if is_shipped else [f"data.keep_prompts={own}"])
    tokenizer = build_tokenizer(load_config(words).model)
    with pytest.raises(DataError, match=r"the longest prompt, has .* and an answer may have 64 more") as caught:
        keeping.assumed_rows(load_config([*words, "data.max_length=64"]), tokenizer, NUM_ROWS)
    needed = re.search("Set data.max_length to at least ([0-9]+), or (.*)", str(caught.value))
    assert needed[2].startswith("name shorter prompts of your own" if is_shipped else "shorten the prompt")
    keeping.assumed_rows(load_config([*words, f"data.max_length={needed[1]}"]), tokenizer, NUM_ROWS)
    assert is_shipped or str(caught.value).startswith(f"{own}:2, the longest")


@pytest.mark.slow
def test_a_plan_counts_the_rows_and_generates_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "generate_answers", lambda *_, **__: pytest.fail("generated"))
    plan = make_plan(load_config(run.words("run", "data.keep=7"), run="quickstart"), find_device("cpu"))
    assert plan.batches.rows == NUM_ROWS + 7, "of three prompts, each is repeated"
    (finding,) = [finding.what for finding in plan.findings if "on top" in finding.what]
    assert finding == "7 rows an epoch on top of the training rows: the base's own answers (data.keep=7)"
    assert not (tmp_path / "run").exists()
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "pens " * 2048}))
    config = load_config(
        run.words("run", "data.keep=7", f"data.keep_prompts={tmp_path / 'long.jsonl'}"), run="quickstart"
    )
    with pytest.raises(DataError, match=r"an answer may have 64 more, but data\.max_length is"):
        keeping.assumed_rows(config, build_tokenizer(config.model), NUM_ROWS)


@pytest.mark.slow
def test_a_run_that_forgets_too_much_ends_and_keeps_the_best_weights_within_the_bound(run, tmp_path):
    words = ["optim.schedule=constant", "training.max_steps=8", "early_stopping.max_forgotten=100"]
    loose = run("loose", *words, "training.max_steps=4")
    forgotten = [event["forgotten"] for event in events(loose, "validation")]
    assert len(forgotten) == 2
    assert forgotten[0] < forgotten[1]
    bound = (forgotten[0] + forgotten[1]) / 2
    words[-1] = f"early_stopping.max_forgotten={bound}"
    tight = run("tight", *words)
    assert [event["forgotten"] for event in events(tight, "validation")] == forgotten[:2]
    result = RecordedRun(tight).part("result")
    assert (result["step"], result["best_step"]) == (4, 2), "step 4 has a lower loss, but is beyond the bound"
    assert (tight / "adapter/adapter_model.safetensors").read_bytes() == (
        (tight / "checkpoints/step-000002/adapter_model.safetensors").read_bytes()
    )
    before, said = losses(tight), result["ended_early"]
    assert said["sentence"].startswith("training ended after step 4 of 8: the model diverges from its base by ")
    run("tight", *words, "resume=auto")  # is over
    assert "no step was trained: training had ended after step 4 of 8" in (tight / "log.txt").read_text()
    assert losses(tight) == before
    shutil.rmtree(tight / "checkpoints/step-000004")
    run("tight", *words, "resume=auto")
    assert losses(tight) == before
    assert [event["forgotten"] for event in events(tight, "validation")] == forgotten[:2]
    none = run("none", *words[:-1], f"early_stopping.max_forgotten={forgotten[0] / 2}")
    assert len(losses(none)) == 2
    assert "since no validation was within it" in (none / "log.txt").read_text()


@pytest.fixture(scope="module")
def alone(base):
    """The run of one process that those of several processes are compared with."""
    words = ["data.keep=25%", "training.global_batch_size=8", "early_stopping.max_forgotten=100"]
    train(load_config(run_words(base, base / "alone", *words), run="quickstart"))
    return base / "alone", words


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.process
@pytest.mark.parametrize("more", [[], ["parallel.sharding=fsdp2"]], ids=["whole", "sharded"])
def test_two_processes_share_the_prompts_and_give_one_curve(run, alone, tmp_path, more):
    alone, words = alone
    words = [*words, f"data.cache_dir={tmp_path / 'cache'}", "training.device=cpu", "parallel.num_processes=2", *more]
    done = run_command([sys.executable, "-m", "finetune", "train", "quickstart", *run.words("two", *words)])
    assert done.returncode == 0, done.stdout
    assert losses(tmp_path / "two") == pytest.approx(losses(alone), rel=1e-6)
    answers = [map_rows(folder / "base_answers.safetensors").token_ids for folder in (alone, tmp_path / "two")]
    assert answers[0].equal(answers[1])
    for name in ("forgotten", "loss/base_answers"):
        one, two = ([event[name] for event in events(folder, "validation")] for folder in (alone, tmp_path / "two"))
        assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.keep=0"], r"data\.keep=0 .*is neither a share of the training rows nor a number of rows"),
        (["data.keep=100%"], r"data\.keep=100% .*is neither a share"),
        (["data.keep=5%", "model.init=random"], r"data\.keep=5% .*but model\.init is random"),
        (["data.keep=5%", "training.objective=dpo"], r"data\.keep is 5%.*does not read it: it belongs to sft"),
        (
            ["data.keep=5%", "data.keep_prompts=gone.jsonl"],
            r"data\.keep_prompts is gone\.jsonl, but that file does not",
        ),
        (
            ["data.keep=5%", f"data.keep_prompts={GENERAL}", f"testing.general_prompts={GENERAL}"],
            r"testing.general_prompts has all its",
        ),
        ([f"{BOUND}=1", "training.method=full"], r"max_forgotten=1\.0 .*needs an adapter"),
        ([f"{BOUND}=1", "lora.init=pissa"], r"needs lora\.init=default"),
        ([f"{BOUND}=1", "testing.general_prompts=none"], r"needs prompts"),
        ([f"{BOUND}=1", "checkpoint.save_every=3"], r"validated step\. Set checkpoint\.save_every=2"),
        ([f"{BOUND}=1", f"data.path={TRAIN}", "data.validation=null"], r"no validation split that could stop it"),
    ],
)
def test_wrong_values_are_refused(run, tmp_path, words, message):
    with pytest.raises((ConfigError, DataError), match=message):
        run("refused", *words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("what is <|end|> for?", r"general\.jsonl:2: .* contains <\|end\|>, a special token"),
        ("pens " * 3000, r"general\.jsonl:2 has [\d,]+ tokens, and the model's context of 2,048 leaves no room"),
    ],
)
def test_a_general_prompt_that_the_model_cannot_take_is_refused_before_the_run(run, tmp_path, text, message):
    prompts = tmp_path / "general.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("Hello.", text)))
    with pytest.raises(DataError, match=message):
        run("refused", f"{BOUND}=1", f"testing.general_prompts={prompts}")
    assert not (tmp_path / "refused").exists()
