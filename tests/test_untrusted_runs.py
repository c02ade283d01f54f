"""Folders of runs that somebody else made: their code runs only if this command says so, and nothing is fetched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from finetune import load_config
from finetune.config.compose import config_from_dict
from finetune.config.keys import code_keys, fields
from finetune.config.run_config import load_run_config
from finetune.data import rendering
from finetune.distributed.launch import launch
from finetune.errors import CheckpointError, ConfigError
from finetune.export.converters import files_of_model
from finetune.export.system_turn import usual_system
from finetune.inference.finished_run import find_run
from finetune.logs import warn_once
from finetune.model.base import build_base_model
from finetune.replay.steps import replay_config
from finetune.runs.record import read_run_record
from finetune.runs.recorded_run import RecordedRun
from finetune.training.rewards.functions import built_in_functions
from tests.in_process import run_finetune
from tests.tiny_runs import write_base, write_rows

TRUST = "model.trust_remote_code=true"
CODE = """
from pathlib import Path
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnConfig(Phi3Config):
    def __init__(self, *arguments, **keys):
        super().__init__(*arguments, **keys)
        Path({marker!r}).touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    pass


class OwnModel(Phi3ForCausalLM):
    config_class = OwnConfig
"""
GENERATE = """
from pathlib import Path
from transformers import GenerationMixin

Path({marker!r}).touch()


def generate(model, *arguments, **keys):
    return GenerationMixin.generate(model, *arguments, **keys)
"""


@pytest.fixture(scope="module")
def untrusted(tmp_path_factory):
    """A run whose config.yaml lets the code of its base run, which then makes a file."""
    folder = tmp_path_factory.mktemp("untrusted")
    base, run, marker = write_base(folder / "base"), folder / "run", folder / "marker"
    words = [f"model.path={base}", f"data.path={write_rows(folder / 'rows')}", f"output_dir={run}"]
    few = ["training.max_steps=2", "checkpoint.save_every=1", "training.precision=fp32", "optim.warmup_steps=0"]
    few += ["testing.general_prompts=none", "testing.max_new_tokens=4"]
    run_finetune("train", *words, *few, f"data.cache_dir={folder / 'cache'}", code=0)
    (base / "own.py").write_text(CODE.format(marker=str(marker)))
    (base / "custom_generate").mkdir()
    (base / "custom_generate" / "generate.py").write_text(GENERATE.format(marker=str(marker)))
    change_json(base / "config.json", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"})
    change_json(base / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    change_config(run, model={"trust_remote_code": True})
    return SimpleNamespace(folder=folder, run=run, marker=marker, base=base)


def change_json(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_config(run, **sections):
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    for name, values in sections.items():
        config[name] |= values
    file.write_text(yaml.safe_dump(config))


def copy_of(untrusted, tmp_path, **sections):
    run = Path(shutil.copytree(untrusted.run, tmp_path / "run"))
    change_config(run, model={"trust_remote_code": False}, **sections)
    return run


ON_FOLDER = {
    "generate": ["generate", "{run}", "Send oranges", "--max-new-tokens", "2"],
    "chat": ["chat", "{run}"],
    "evaluate": ["evaluate", "{run}", "--split", "validation"],
    "verify": ["verify", "{run}"],
    "verify a replay": ["verify", "{run}", "--replay", "1"],
    "merge": ["merge", "{run}", "{out}"],
    "compress": ["export", "vllm", "{run}", "{out}", "--type", "w8a8"],
    "bisect": ["bisect", "{run}"],
    "bisect two": ["bisect", "{run}", "{run}"],
}
ON_FILE = {
    "train": ["train", "{run}/config.yaml", "output_dir={out}"],
    "resume": ["train", "{run}/config.yaml", "output_dir={run}", "resume=auto"],
    "plan": ["plan", "{run}/config.yaml", "output_dir={out}"],
    "preview": ["preview", "{run}/config.yaml", "output_dir={out}"],
    "rehearse": ["rehearse", "{run}/config.yaml", "output_dir={out}"],
    "sweep": ["sweep", "{run}/config.yaml", "output_dir={out}", "seed=1,2", "--only", "1"],
}
ONLY_READ = {
    "report": ["report", "{run}", "--output", "{out}.html"],
    "diff": ["diff", "{run}", "{run}/../run"],
    "runs": ["runs", "{run}"],
    "checkpoints": ["checkpoints", "{run}"],
    "receipt": ["receipt", "{run}"],
    "push": ["push", "{run}", "somebody/some-model", "--dry-run"],
    "show": ["config", "show", "{run}/config.yaml"],
}


def words_of(form, untrusted, tmp_path):
    return [word.format(run=untrusted.run, out=tmp_path / "out") for word in form]


@pytest.mark.parametrize("name", [*ON_FOLDER, *ON_FILE])
def test_a_file_lets_no_code_run(untrusted, tmp_path, name):
    done = run_finetune(*words_of(ON_FOLDER.get(name) or ON_FILE[name], untrusted, tmp_path))
    option = "--set " if name in ON_FOLDER else ""
    assert done.returncode == 2
    assert "code that comes with the model would run here, so only the command line may allow it" in done.errors
    assert f"add {option}{TRUST} to the command" in done.errors
    assert "Traceback" not in done.stdout
    assert not untrusted.marker.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLY_READ)
def test_a_command_that_loads_no_model_runs_no_code(untrusted, tmp_path, name):
    done = run_finetune(*words_of(ONLY_READ[name], untrusted, tmp_path))
    assert "Traceback" not in done.stdout
    assert not untrusted.marker.exists()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("generate", 0),
        pytest.param("evaluate", 0, marks=pytest.mark.slow),
        ("merge", 2),  # a folder for transformers alone cannot have the code
        pytest.param("verify", 0, marks=pytest.mark.slow),
        pytest.param("bisect", 0, marks=pytest.mark.slow),
        pytest.param("train", 0, marks=pytest.mark.slow),
        pytest.param("plan", 0, marks=pytest.mark.slow),
        ("preview", 0),
        pytest.param("sweep", 0, marks=(pytest.mark.slow, pytest.mark.warm)),  # whose trials are processes
    ],
)
def test_the_command_itself_lets_code_run_and_names_it(untrusted, tmp_path, name, code):
    warn_once.cache_clear()
    form = [*ON_FOLDER[name], "--set", TRUST] if name in ON_FOLDER else [*ON_FILE[name], TRUST]
    try:
        done = run_finetune(*words_of(form, untrusted, tmp_path))
        assert done.returncode == code, done.stdout
        assert untrusted.marker.exists()
    finally:
        untrusted.marker.unlink(missing_ok=True)


def test_code_that_may_run_is_named_once(caplog):
    warn_once.cache_clear()
    for _ in range(2):
        load_config(["model=phi_tiny", "data=orders", TRUST])
    said = f"{TRUST} (overrides): code that comes with the model will run here"
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize("key", code_keys())
def test_each_key_counts_from_the_command_line_and_from_a_recipe_only(tmp_path, key):
    value = True if key == "model.trust_remote_code" else ["my_package.functions"]
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"model": "phi_tiny", "data": "orders", key: value}))
    own = f"{key}={'true' if value is True else value[0]}"
    with pytest.raises(ConfigError, match=rf"{key} is .*run.yaml:\d+\): .* add {own} to the command"):
        load_config([f"run={run}"])
    section, _, name = key.partition(".")
    assert getattr(getattr(load_config([f"run={run}", own]), section), name) == value
    recipe = config_from_dict({"model": "phi_tiny", "data": "orders", key: value}, "the dict given to TrainerDDP")
    assert getattr(getattr(recipe, section), name) == value


def test_no_other_key_names_code():
    """A new key that takes the name of a module, a function or a class must be marked too."""
    named = {key for key in fields() if any(part in key for part in ("_from", "remote", "code", "module", "plugin"))}
    assert named - {
        "lora.start_from",
        "lora.start_from_any_base",
        "lora.target_modules",
        "lora.modules_to_save",
    } == set(code_keys())


def test_text_in_the_argument_to_add_is_quoted(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text('reward: {functions_from: ["a; rm -rf x"]}\n')
    with pytest.raises(ConfigError, match=r"add 'reward.functions_from=a; rm -rf x' to the command"):
        load_config(["model=phi_tiny", "data=orders", f"run={run}"])


def test_a_kernel_that_a_config_names_is_not_loaded(untrusted, tmp_path):
    base = Path(shutil.copytree(untrusted.base, tmp_path / "base"))
    change_json(base / "config.json", attn_implementation="somebody/some-kernel", auto_map={})
    section = load_config([f"model.path={base}", "data=orders"]).model
    assert build_base_model(section).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("is_typed", [True, False])
def test_a_file_does_not_choose_where_compiled_kernels_are_read(tmp_path, monkeypatch, is_typed):
    # A folder that the user has set stays, and a run that an earlier test left open may have set one.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    run = tmp_path / "run.yaml"
    run.write_text("" if is_typed else f"data: {{cache_dir: {tmp_path}}}\n")
    own = [f"data.cache_dir={tmp_path}"] if is_typed else []
    config = load_config(["model=phi_tiny", "data=orders", "ddp=false", f"run={run}", *own])
    with launch(config, trains=False):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder == (tmp_path if is_typed else Path("~/.cache/finetune").expanduser()) / "kernels"


def test_a_converter_gets_no_code(untrusted):
    assert "own.py" not in [path.name for path in files_of_model(untrusted.base)]


ADDRESS = "https://127.0.0.1:9/rows.jsonl"
"""Nothing listens on this port, so a request fails with another error than the refusal."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        {"path": ADDRESS},
        {"path": "https://127.0.0.1:9/folder"},
        {"path": [ADDRESS, ADDRESS]},
        {"test": ADDRESS},
        {"validation": "s3://bucket/validation"},
        {"path": None, "mixture": [{"path": ADDRESS}, {"path": "shipped:orders"}]},
    ],
    ids=["file", "folder", "list", "test", "validation", "mixture"],
)
def test_an_address_that_only_the_folder_names_is_not_read(untrusted, tmp_path, data):
    run = copy_of(untrusted, tmp_path, data=data)
    for words in (["evaluate"], ["bisect"], ["verify", "--replay", "1"]):
        done = run_finetune(words[0], run, *words[1:], code=2)
        assert "an address that only the folder of a run names is not read" in done.errors
        assert " to the command" in done.errors
    (key, value), *_ = [item for item in data.items() if item[1]]
    given = value if isinstance(value, str) else json.dumps(value)
    section = load_run_config(run, [f"data.{key}={given}"]).data
    section.refuse_untrusted()  # refuses nothing: the command line names the address


def test_the_rows_at_an_address_are_not_asked_for_a_system_turn(untrusted, tmp_path):
    run = copy_of(untrusted, tmp_path, data={"train": ADDRESS})
    change_json(run / "run.json", opening=None)
    assert usual_system(find_run(run)) is None
    done = run_finetune("generate", run, "Send oranges", "--max-new-tokens", "2", code=2)
    assert f"add --set data.train={ADDRESS} to the command" in done.errors
    run_finetune("generate", run, "Send oranges", "--max-new-tokens", "2", "--system", "", code=2)


def test_local_files_are_read_and_named_once(untrusted, tmp_path):
    run = copy_of(untrusted, tmp_path)
    done = run_finetune("evaluate", run, code=0)
    named = f"model.path={untrusted.base}, data.path={untrusted.folder / 'rows'}"
    said = [line for line in done.errors.splitlines() if "files that the configuration in" in line]
    assert len(said) == 1
    assert said[0].endswith(named)


@pytest.mark.slow
@pytest.mark.warm
def test_a_folder_decides_nowhere_to_write(untrusted, tmp_path):
    outside = tmp_path / "outside"
    run = copy_of(untrusted, tmp_path, data={"cache_dir": str(outside / "cache")})
    file = run / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"output_dir": str(outside)}))
    for words in (["generate", run, "Hi", "--max-new-tokens", "2"], ["evaluate", run], ["verify", run]):
        run_finetune(*words, code=0)
    run_finetune("merge", run, tmp_path / "merged", code=0)
    assert not outside.exists()
    config = load_run_config(run, [f"data.cache_dir={outside}"])
    assert (config.output_dir, config.data.cache_dir) == (str(run), str(outside))


WRONG = {
    "opening": [[1], "text", {}, {"system": 1}, {"num_rows": "many"}, {"tools": None}],
    "fingerprints": [[1], "text", {"base": 1}],
    "result": ["text", [1], 3],
    "memory": ["text", [1]],
    "parameters": ["text", [1]],
    "global_batch": [7, [1]],
    "resolved_paths": ["text", {"model.path": 1}],
    "starts": ["text", [1], 7],
    "resume_changes": ["text", [1]],
    "fallbacks": [7, ["text"]],
    "threads": [[1]],
    "rows_read_as": [[1], {"train": 1}],
    "row_counts": [[1], {"train": 1}, {"train": [1]}],
    "num_steps": ["text", 1.5, True],
    "world_size": ["two", [2]],
    "device": [1],
    "precision": [[1]],
    "status": [1, [1]],
    "finished": [1],
    "versions": [["torch"]],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_with_values_of_another_type_is_refused_in_a_sentence(untrusted, tmp_path, name):
    run = copy_of(untrusted, tmp_path)
    recorded = json.loads((run / "run.json").read_text())
    for value in WRONG[name]:
        known = recorded[name] if isinstance(recorded[name], dict) and isinstance(value, dict) and value else {}
        change_json(run / "run.json", **{name: known | value if known else value})
        with pytest.raises(CheckpointError, match=rf"run.json: {name}.* which no run writes"):
            find_run(run)
        with pytest.raises(CheckpointError, match=rf"run.json: {name}.* which no run writes"):
            replay_config(RecordedRun(run))
    done = run_finetune("runs", tmp_path, code=0)
    assert "run" in done.answer


@pytest.mark.slow
def test_what_only_describes_runs_leaves_such_a_record_out(untrusted, tmp_path):
    run = copy_of(untrusted, tmp_path)
    change_json(run / "run.json", opening={"system": 1})
    for form in ON_FOLDER.values():
        done = run_finetune(*[word.format(run=run, out=tmp_path / "out") for word in form])
        assert (done.returncode, "opening.system is 1, which no run writes" in done.errors) == (2, True), form
    run_finetune("report", run, "--no-data", "--output", tmp_path / "page.html", code=0)
    assert "opening.system is 1, which no run writes" in (tmp_path / "page.html").read_text()
    assert read_run_record(untrusted.run / "run.json") is not None


FILES = [
    *("config.yaml", "run.json", "metrics.jsonl", "rows.safetensors", "log.txt", ".lock", "../run.ended.json"),
    *("adapter", "checkpoints", "rollouts/step-000001.json.gz", "base/manifest.json", "base/config.json"),
    *(f"adapter/{name}" for name in ("manifest.json", "adapter_config.json", "adapter_model.safetensors")),
    *(
        f"adapter/{name}"
        for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.jinja")
    ),
    *("adapter/certificate.json", "adapter/README.md", "adapter/additional_chat_templates/tool.jinja"),
    *(f"checkpoints/step-000002/{name}" for name in ("manifest.json", "state.json", "optimizer.safetensors")),
    *(f"checkpoints/step-000002/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")),
]
READ_FIRST = FILES[:3]
"""The files that every command on a run reads."""
FOLDERS = ("adapter", "checkpoints")
IN_FOLDERS = [file for file in FILES if file not in (*READ_FIRST, *FOLDERS)]
"""All others, which can all be in place at once."""
_PUBLISHED = [file for file in FILES if file.startswith("adapter") and file != "adapter/README.md"]
REFUSED_BY = {
    "checkpoints": ["rows.safetensors", "log.txt", ".lock", *FOLDERS, "adapter/additional_chat_templates/tool.jinja"],
    "push": _PUBLISHED,
    "receipt": _PUBLISHED,
}
"""Files that end these commands if they are of another type, so that no other file is read after them, and one that is
not looked at if others of its folder are of another type."""


def make_fifo(path):
    os.mkfifo(path)


def make_device_link(path):
    path.symlink_to("/dev/zero")


def make_socket(path):
    (path.parent / "s").unlink(missing_ok=True)
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def make_sparse(path):
    with path.open("wb") as file:
        file.truncate(3 << 30)


MAKE = {
    "FIFO": make_fifo,
    "device": make_device_link,
    "socket": make_socket,
    "folder": Path.mkdir,
    "empty": Path.touch,
    "3 GB": make_sparse,
}
IRREGULAR = ("FIFO", "device", "socket", "folder")
QUICK = {
    **{name: ONLY_READ[name] for name in ("diff", "runs", "checkpoints", "show")},
    "push": [*ONLY_READ["push"], "--base", "somebody/some-base"],
    "report": ["report", "{run}", "--no-data", "--output", "{out}.html"],
    "receipt": ["receipt", "{run}"],
    "watch": ["watch", "{run}", "--once"],
    "lists": ["runs", "{run}/.."],
}
LOADS = {
    **{name: ON_FOLDER[name] for name in ("generate", "evaluate", "verify", "verify a replay", "merge", "bisect")},
    "generate from a checkpoint": [*ON_FOLDER["generate"], "--checkpoint", "latest"],
    "resume": ["train", "{run}/config.yaml", "output_dir={run}", "resume=auto"],
    "plan": ON_FILE["plan"],
}
LOADED = [
    *(([file], LOADS) for file in READ_FIRST),
    *(([file], ["resume"]) for file in (".lock", "log.txt", "checkpoints")),
    *(([file], ["generate", "verify", "merge"]) for file in FILES if file.startswith("adapter/")),
    *(([file], ["generate from a checkpoint"]) for file in FILES if file.startswith("checkpoints/")),
    ([file for file in FILES if file.startswith(("rows", "..", "rollouts", "base", "adapter/cert"))], LOADS),
]
"""Files, each set of them put in place at once, and the commands that read them or could."""


@contextmanager
def within(seconds):
    """Fail what waits or computes for longer, also inside of the kernel or of a regular expression."""

    def end(*_):
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def put_in(run, file, make):
    """Put something of another type in the place of a run's file."""
    place = run / file
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    make(place)


def run_each(forms, run, out):
    """Run commands on a run. Each ends in time, with a code and without a traceback."""
    ended = {}
    for name, form in forms.items():
        with within(120):
            ended[name] = run_finetune(*[word.format(run=run, out=out) for word in form])
        assert "Traceback" not in ended[name].stdout, (name, ended[name].stdout)
        assert ended[name].returncode in (0, 1, 2, 3), name
    return ended


def run_each_beside(untrusted, folder, files, kind, forms):
    """Run commands on a run in whose files' place there is something else. A sound run is in the same folder."""
    folder.mkdir(exist_ok=True)
    run = copy_of(untrusted, folder)
    shutil.copytree(run, folder / "sound")
    for file in files:
        put_in(run, file, MAKE[kind])
    return run_each(forms, run, folder / "out")


@pytest.mark.process
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("file", READ_FIRST)
def test_a_command_that_reads_runs_waits_for_no_file_of_any_type(untrusted, tmp_path, file, kind):
    ended = run_each_beside(untrusted, tmp_path, [file], kind, QUICK)
    listed = ended["lists"].answer
    assert "sound" in listed
    if kind in IRREGULAR:
        assert re.search(r"run\s.*unreadable", listed)
        for name in set(QUICK) - {"lists", "runs", "show"}:
            assert ended[name].returncode == 2
            assert re.search(rf"{file}.*(only regular files are read|is a )", ended[name].errors.replace("\n", " "))


@pytest.mark.process
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("files", [FOLDERS, IN_FOLDERS], ids=["folders", "files"])
def test_such_a_command_goes_past_the_files_that_others_read(untrusted, tmp_path, files, kind, monkeypatch):
    """All of them at once: as the command goes on to its end, none keeps it from reaching another one."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    forms_by_files = {}
    for name, form in QUICK.items():
        passed = tuple(file for file in files if file not in REFUSED_BY.get(name, ()))
        forms_by_files.setdefault(passed, {})[name] = form
    for number, (passed, forms) in enumerate(forms_by_files.items()):
        for name, ended in run_each_beside(untrusted, tmp_path / str(number), passed, kind, forms).items():
            is_at_its_end = "there is no token for the hub" in ended.errors if name == "push" else not ended.returncode
            assert is_at_its_end, (name, ended.stdout)


@pytest.mark.process
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("names", [("checkpoints",), ("push", "receipt")], ids="-".join)
def test_such_a_command_waits_for_none_that_it_may_refuse(untrusted, tmp_path, names, kind):
    for number, file in enumerate(REFUSED_BY[names[0]]):
        run_each_beside(untrusted, tmp_path / str(number), [file], kind, {name: QUICK[name] for name in names})


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.parametrize(("files", "names"), LOADED, ids=lambda value: next(iter(value)))
def test_a_command_that_loads_a_run_waits_for_no_fifo(untrusted, tmp_path, files, names):
    run = copy_of(untrusted, tmp_path)
    for file in files:
        put_in(run, file, make_fifo)
    ended = run_each({name: LOADS[name] for name in names}, run, tmp_path / "out")
    if not files[0].startswith(("checkpoints/", "adapter/certificate", "adapter/README")) and len(names) < len(LOADS):
        assert {each.returncode for each in ended.values()} <= {2, 3}


def test_nobody_else_opens_the_files_of_a_run():
    """`finetune.limits` opens them. What else opens a path here creates a file, or has asked `open_regular` before."""
    package = Path(rendering.__file__).parents[1]
    opens = re.compile(r"\b(read_bytes|read_text|(?<!def )open|safe_open)\(")
    others = ('"x+b")', '"/proc/locks"', '"xb")', "os.O_", "Path(scratch)", "safe_open(path,", "RunFolder(", "packed")
    files = [*(package / "runs").glob("*.py"), package / "config/run_paths.py", package / "config/yaml_reader.py"]
    lines = [(file.name, line.strip()) for file in files for line in file.read_text().splitlines()]
    assert [line for line in lines if opens.search(line[1]) and not any(each in line[1] for each in others)] == []
    assert len(files) > 15


NEVER_ENDS = r"(\w+\.?)+!"
"""For a name of some thirty characters, `re` would try more ways than it can before the sun burns out."""
SLOW = r"adapter_config\.json in .* is .* which takes longer than 0\.2 s to match"
ADAPTERS = {
    "rank": ({"r": 10**9}, r"describes [\d,]+ parameters \(rank 1,000,000,000\), but adapter_model.safetensors holds"),
    "rank of a layer": ({"rank_pattern": {"qkv_proj": 10**9}}, r"describes [\d,]+ parameters \(rank 1,000,000,000\)"),
    "token": ({"trainable_token_indices": {"embed_tokens": [10**9]}}, "trains row 1,000,000,000 of the embedding"),
    "layers": ({"layer_replication": [[0, 10**9]]}, r"has layer_replication=\[\[0, 1000000000\]\]"),
    "start": ({"init_lora_weights": "pissa_niter_1000000000"}, "init_lora_weights.*='pissa_niter_1000000000'"),
    "type": ({"target_modules": 3}, "has target_modules.*=3"),
    "kind": ({"peft_type": "VERA"}, "has peft_type='VERA'"),
    "text": ({"target_modules": NEVER_ENDS}, SLOW),
    "modules": ({"modules_to_save": [NEVER_ENDS]}, SLOW),
    "excluded": ({"exclude_modules": NEVER_ENDS}, SLOW),
    "place of layers": ({"layers_pattern": [NEVER_ENDS], "layers_to_transform": [0]}, SLOW),
    "ranks": ({"rank_pattern": {NEVER_ENDS: 8}}, SLOW),
    "scales": ({"alpha_pattern": {NEVER_ENDS: 8}}, SLOW),
}


def change_adapter(run, **values):
    """Change the adapter's configuration, and its digest with it, as whoever made the folder can."""
    file, manifest = run / "adapter/adapter_config.json", run / "adapter/manifest.json"
    change_json(file, **values)
    content, record = file.read_bytes(), json.loads(manifest.read_text())
    record["files"][file.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


@pytest.fixture(scope="module")
def merged(untrusted):
    out = untrusted.folder / "merged"
    run_finetune("merge", untrusted.run, out, "--set", "model.trust_remote_code=false", code=0)
    return out


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_command_refuses_an_adapter_before_it_builds_it(untrusted, merged, tmp_path, monkeypatch, name):
    monkeypatch.setattr(rendering, "MATCH_SECONDS", 0.2)
    values, said = ADAPTERS[name]
    run = copy_of(untrusted, tmp_path)
    change_adapter(run, **values)
    names = ("generate", "evaluate", "merge", "verify") if said != SLOW else ("generate",) if name == "text" else ()
    forms = {"verify adapter": ["verify", "{run}/adapter", "--vectors", str(merged)]}
    for form, done in run_each(forms | {name: ON_FOLDER[name] for name in names}, run, tmp_path / "out").items():
        assert done.returncode == 2 or (form, done.returncode) == ("verify", 3), form
        assert re.search(said, " ".join(done.errors.split())) or form == "verify", (form, done.errors)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["target_modules", "rank_pattern", "alpha_pattern"])
def test_a_pattern_of_a_run_that_never_ends_is_stopped(untrusted, tmp_path, monkeypatch, key):
    monkeypatch.setattr(rendering, "MATCH_SECONDS", 0.2)
    run = copy_of(untrusted, tmp_path, lora={key: [NEVER_ENDS] if key == "target_modules" else {NEVER_ENDS: 8}})
    # One function matches the patterns of all three keys: that a replay comes to it too, one key shows.
    names = ("plan", "verify a replay") if key == "target_modules" else ("plan",)
    forms = {name: {**ON_FILE, **ON_FOLDER}[name] for name in names}
    for done in run_each(forms, run, tmp_path / "out").values():
        assert done.returncode == 2
        assert f"lora.{key} is {NEVER_ENDS}, which takes longer than 0.2 s to match" in done.errors


@pytest.mark.slow
def test_a_pattern_of_rewards_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(rendering, "MATCH_SECONDS", 0.2)
    section = load_config(["model=phi_tiny", "data=orders", f"reward.pattern={NEVER_ENDS}"]).reward
    answer = SimpleNamespace(text="a" * 40)
    with (
        within(120),
        pytest.raises(ConfigError, match=r"reward\.pattern is .*, which takes longer than 0\.2 s to match"),
    ):
        built_in_functions(section, longest=1)["regex"](answer)
    assert built_in_functions(section, longest=1)["regex"](SimpleNamespace(text="a.b!")) == 1.0


def test_a_password_in_the_address_of_a_server_is_refused_before_anything_is_computed(untrusted, tmp_path):
    run = copy_of(untrusted, tmp_path)
    shutil.rmtree(untrusted.folder / "nothing", ignore_errors=True)
    change_config(run, model={"path": str(untrusted.folder / "nothing")})  # whose base could not be loaded
    done = run_finetune("verify", run, "--server", "http://me:s3cret@localhost:1", code=2)
    assert "--server: not the address of a vLLM server" in done.errors
    assert "s3cret" not in done.stdout
