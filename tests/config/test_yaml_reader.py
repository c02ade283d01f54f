"""Read YAML text into settings, and refuse untrusted or broken text with a message."""

from pathlib import Path

import pytest

from finetune.config.yaml_reader import DottedName, read_settings, read_value


def read(tmp_path: Path, text: str | bytes) -> tuple[dict[str, object], list[str]]:
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems: list[str] = []
    return {s.dotted: s.value for s in read_settings(path, "c.yaml", problems)}, problems


def one_problem(tmp_path: Path, text: str | bytes) -> str:
    _, problems = read(tmp_path, text)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        (".inf", float("inf")),
        ("1_000", 1000),
        ("010", "010"),
        ("2025-01-15", "2025-01-15"),
        ("true", True),
        ("null", None),
        ("", None),
        ("'1e-4'", "1e-4"),
        ("!!str 5", "5"),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
    ],
)
def test_values(tmp_path, text, value):
    settings, problems = read(tmp_path, f"seed: {text}\n")
    assert problems == []
    assert settings == {"seed": value}
    assert type(settings["seed"]) is type(value)


def test_each_setting_knows_its_line_and_its_text(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("# about\noptim:\n\n  args:\n    eps: 1e-8\n  optimizer: 'x'\ndata.max_length: 512\n")
    settings = read_settings(path, "shown.yaml", [])
    assert [(s.dotted, s.origin, s.text) for s in settings] == [
        ("optim.args.eps", "shown.yaml:5", "1e-8"),
        ("optim.optimizer", "shown.yaml:6", None),
        ("data.max_length", "shown.yaml:7", "512"),
    ]


@pytest.mark.parametrize("text", ["", "{}", "null", "# nothing\n"])
def test_a_file_without_a_key_has_no_settings(tmp_path, text):
    assert read(tmp_path, text) == ({}, [])


def test_a_key_below_another_one_may_be_an_empty_text(tmp_path):
    assert read(tmp_path, 'device_map: {"": 0}\n') == ({"device_map.": 0}, [])


def test_keys_are_text_as_written(tmp_path):
    settings, problems = read(tmp_path, "model: {config: {id2label: {0: a, on: b, 1e3: c}}}")
    assert problems == []
    assert settings == {
        "model.config.id2label.0": "a",
        "model.config.id2label.on": "b",
        "model.config.id2label.1e3": "c",
    }


def test_pyobject_reads_as_a_dotted_name(tmp_path):
    settings, problems = read(tmp_path, "optim: {optimizer: !pyobject torch.optim.AdamW}")
    assert problems == []
    name = settings["optim.optimizer"]
    assert name == "torch.optim.AdamW"
    assert isinstance(name, DottedName)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("seed: 1\nddp: true\nseed: 2\n", "c.yaml:3: seed", "first on line 1, again on line 3"),
        ("optim:\n  args: {a: 1, a: 2}\n", "c.yaml:2: optim.args.a", "given twice"),
        ("data: {path: x}\ndata.path: y\n", "c.yaml:2: data.path", "first on line 1"),
        ("optim:\n  args:\n    a: [{b: 1,\n      b: 2}]\n", "c.yaml:4: optim.args.a.b", "twice"),
        ("seed: !!python/object/apply:os.system ['x']\n", "c.yaml:1: seed", "!!python/object/apply:os.system"),
        ("o: !pyobject os system\n", "c.yaml:1: o", "expected !pyobject package.Name, got 'os system'"),
        ("o: " + "9" * 5000 + "\n", "c.yaml:1: o", "not a number"),
        ("? [a, b]\n: 1\n", "c.yaml:1", "a key must be text"),
        ("'': 1\n", "c.yaml:1", "a key must be text"),
        ("d: 1\ne: {<<: {a: 1}}\n", "c.yaml:2: e", "merge keys"),
        ("d: &d {a: 1}\ne: *d\n", "c.yaml:2", "aliases (*name) are not read. Write the value out."),
        ("a: 1\n---\nb: 2\n", "c.yaml:2", "single document"),
        ("a: 1\nb: c: d\n", "c.yaml:2", "not valid YAML: mapping values are not allowed here"),
        ("a: 1\nb: \x07\n", "c.yaml:2", "YAML forbids"),
        (b"a: 1\nb: \xff\n", "c.yaml:2", "not UTF-8"),
        ("a: " + "[" * 1200, "c.yaml", "nested too deeply"),
        ("a: " + "x" * 1_000_001, "c.yaml", "at most 1,000,000 are read"),
    ],
)
def test_broken_and_untrusted_text(tmp_path, text, where, what):
    problem = one_problem(tmp_path, text)
    assert problem.startswith(f"{where}:")
    assert what in problem


def test_what_is_no_file(tmp_path):
    problems: list[str] = []
    assert read_settings(tmp_path, "folder", problems) == []
    assert read_settings(tmp_path / "none.yaml", "none.yaml", problems) == []
    assert "folder: cannot be read (it is a folder, and only regular files are read)" in problems[0]
    assert "none.yaml: cannot be read (No such file or directory)" in problems[1]


def value_of(text: str, *, as_text: bool = False) -> tuple[object, list[str]]:
    problems: list[str] = []
    settings = read_value(("a", "b"), text, problems, as_text=as_text)
    return ({s.dotted: s.value for s in settings}, problems)


@pytest.mark.parametrize(
    "text", ["*.jsonl", "{{ x }}", "{% if a %}", "a: b", "# a", "@x", "%y", "[draft", "{a: b}", "a #1", "a\nb"]
)
def test_a_key_of_text_takes_what_is_no_yaml(text):
    assert value_of(text, as_text=True) == ({"a.b": text}, [])
    settings, problems = value_of(text)
    assert settings != {"a.b": text}
    assert problems or text in ("a: b", "{a: b}", "a #1", "a\nb")


@pytest.mark.parametrize("as_text", [True, False])
def test_a_tag_in_a_word_is_never_text(as_text):
    settings, problems = value_of("!!python/object/apply:os.system [x]", as_text=as_text)
    assert settings != {"a.b": "!!python/object/apply:os.system [x]"}
    assert len(problems) == 1
    assert problems[0].startswith("command line: a.b: the tag !!python/object/apply:os.system is refused")
