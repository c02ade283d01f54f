"""Files as they lie around: what is read, in which order, and what a message names."""

from __future__ import annotations

import bz2
import gzip
import json
import re
import shlex

import pytest

from finetune.config.compose import compose, config_from_dict
from finetune.config.render import resolved_yaml
from finetune.data import examples
from finetune.data.examples import check_local_rows, load_examples, missing_here
from finetune.data.row_file import encoding_key
from finetune.data.splits import files_of_splits
from finetune.errors import ConfigError, DataError
from tests.data.conftest import encode_train


def row(text: str) -> bytes:
    return json.dumps({"prompt": "q", "completion": text}).encode() + b"\n"


A, B, C = row("a"), row("b"), row("c")
TABLE = b"prompt,completion\nq,a\nq,b\n"
LATIN_1 = b"prompt,completion\n" + b"What is one?,It is one.\n" * 40_000 + b"caf\xe9,yes\nq,a\n"
DECLARED = b"---\nconfigs:\n- config_name: default\n  data_files: a/*\n---\n"
ONE_LIST = b'[\n{"prompt": "q", "completion": "a"},\n{"prompt": "q", "completion": "b"}\n]\n'


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Write files, and make their folder the current one."""
    monkeypatch.chdir(tmp_path)

    def write(files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)

    return write


def answers(examples) -> str:
    return "".join(example.contents[1] for example in examples or ())


def packed(content: bytes) -> bytes:
    """Compress with gzip, without the time of day, which would differ between the workers that collect these tests."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "keys"),
    [
        ("a.csv", b"\xef\xbb\xbfprompt,completion\r\nq,a\r\n\r\nq,b\r\n", {}),
        ("a.csv", b",prompt,completion\n0,q,a\n1,q,b\n", {}),
        ("a.csv", b"prompt,completion\nq,a,\nq,b,,\n", {}),
        ("a.csv", b'prompt,completion\n3.5" disk,a\n"q, ""r""",b\n', {}),
        ("a.csv", b"prompt;completion\nq;a\nq;b\n", {"separator": ";"}),
        ("a.csv", b"prompt\tcompletion\nq\ta\nq\tb\n", {"separator": "tab"}),
        ("a.tsv", b"prompt\tcompletion\nq\ta\nq\tb\n", {}),
        ("a.csv", b"sep=;;;\nprompt;completion\nq;a\nq;b\n", {}),
        ("a.csv", b"sep=\\t\nprompt\tcompletion\nq\ta\nq\tb\n", {}),
        ("a.csv", b"\xc3\xaf\xc2\xbb\xc2\xbf" + b'"prompt",completion\nq,a\nq,b\n', {}),  # a converted BOM
        ("a.csv", b"sep=Tab\nprompt\tcompletion\nq\ta\nq\tb\n", {}),
        ("a.csv.GZ", packed(TABLE), {}),
        ("a.jsonl.GZ", packed(A + B), {}),
        ("a.NDJSON.bz2", bz2.compress(A + B), {}),
        ("a.Json", ONE_LIST, {}),
    ],
)
def test_files_that_are_read(make_section, put, name, content, keys):
    put({name: content})
    section = make_section(path=name, **keys)
    check_local_rows(section, "answers")
    splits = load_examples(section)
    assert answers(splits.train) == "ab"
    assert splits.train[1].source == f"{name}{':2' if 'json' in name.lower() and 'Json' not in name else ' row 2'}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"prompt;completion\nq;a\n", "has one column, 'prompt;completion'. If it is several, set"),
        ("a.csv", b"sep=semicolon\np;c\n", "a.csv begins with 'sep=semicolon'; expected one sign, such as sep=;"),
        ("a.csv", b"prompt,completion,prompt\nq,a,b\n", "a.csv has the column prompt twice. Rename or remove one"),
        ("a.csv", b"prompt,completion\nq,a\nq,a,b\n", "a.csv row 2: 3 cells, but the header has 2 columns"),
        ("a.csv", b'prompt,completion\nq,"a\nq,b\n', "a.csv cannot be read as csv (line 3): unexpected end of data"),
        ("a.csv", b"prompt,completion\nq,\xe4\n", "a.csv cannot be read as csv (line 2): the byte 0xe4 is not UTF-8"),
        pytest.param("a.csv", LATIN_1, "a.csv cannot be read as csv (line 40002): the byte 0xe9 is not", id="Latin-1"),
        ("a.jsonl", (A + B).decode().encode("utf-16"), "a.jsonl is text in UTF-16; expected UTF-8"),
        ("a.jsonl", packed(A), "a.jsonl holds data that is compressed as .gz. Rename it to a.jsonl.gz."),
        ("a.parquet.gz", packed(b"PAR1"), "a Parquet file is compressed inside"),
        ("a.jsonl", json.dumps({"prompt": "q"}, indent=1).encode(), "a.jsonl:1: not JSON: the text ends before the"),
        ("a.jsonl", ONE_LIST, "a.jsonl:1: not JSON: the text ends before the value does at column 2; expected"),
        ("a.jsonl", b'{"prompt": "q", }\n', "a.jsonl:1: not JSON: a comma that nothing follows at column"),
        ("a.json", b'[{"prompt": "q"},\n]', "a.json is not JSON (a comma that nothing follows: "),
        ("a.jsonl", b"{'prompt': 'q'}\n" * 9, "a.jsonl:1: not JSON: the text of a Python object at column 2"),
        ("a.jsonl", A + b'{"prompt": "q", "completion": "a", "prompt": "r"}', "a.jsonl:2: the key prompt is given"),
        ("a.json", b'[\n{"prompt": "q"},\n{"a": {"b": 1,\n"b": 1}}]', "a.json:3: in this row, the key b is given"),
    ],
)
def test_files_that_are_refused_with_the_cause(make_section, put, name, content, message):
    put({name: content})
    with pytest.raises(DataError) as caught:
        list(load_examples(make_section(path=name)).train)
    assert message in str(caught.value)
    assert str(caught.value).count("not JSON") <= 1  # once for the file, not for each line


def test_cells_longer_than_pythons_limit_and_empty_files(make_section, put):
    put({"a.csv": b"prompt,completion\nq," + b"a" * 200_000 + b"\n", "b.csv": b"", "c.csv": b"prompt,completion\n"})
    assert len(answers(load_examples(make_section(path="a.csv")).train)) == 200_000
    for name in ("b.csv", "c.csv"):
        with pytest.raises(DataError, match=f"{name} has no rows"):
            list(load_examples(make_section(path=name)).train)


def test_the_separator_decides_what_is_encoded(make_section, put):
    put({"a.csv": b"prompt,completion,x;y\nq,a,b;z\n"})
    section = make_section(path="a.csv")
    keys = [
        encoding_key(load_examples(changed).train, "tokenizer", changed)
        for changed in (section, section.model_copy(update={"separator": ";"}))
    ]
    assert keys[0] != keys[1]
    mixture = [{"path": "a.csv"}, {"path": "a.csv", "separator": ";", "columns": {"text": "y"}}]
    assert load_examples(make_section(mixture=mixture)).train[1].contents[-1] == "z"


@pytest.mark.parametrize(
    ("files", "missing", "advice"),
    [
        ({"d/a/1.jsonl": A, "d/b/2.csv": TABLE}, "b/2.csv", ("'d/**/*'", "'d/**/*.jsonl'")),
        ({"d/1.jsonl": A, "d/sub/2.jsonl": B}, "sub/2.jsonl", ("'d/**/*'", "'d/*'")),
        ({"d/train/1.jsonl": A, "d/train/2.jsonl": A, "d/train/3.csv": TABLE}, "train/3.csv", ()),
    ],
)
def test_a_new_run_refuses_a_folder_of_which_a_part_would_be_read(make_section, put, logged, files, missing, advice):
    put(files)
    section = make_section(path="d")
    with pytest.raises(DataError, match=rf"1 file in it is not read: {missing}\. The reason") as caught:
        check_local_rows(section)
    for pattern, num_files in zip(advice, (2, 1), strict=False):
        assert f"data.path={pattern}" in str(caught.value)
        checked = make_section(path=pattern.strip("'"))
        check_local_rows(checked)
        parts = load_examples(checked).train.source.parts if num_files == 2 else [None]
        assert len(parts) == num_files
    if not advice:
        assert "data.train=" in str(caught.value)
    check_local_rows(make_section(path="d", train=f"d/{next(iter(files))[2:]}"))  # names the rows
    check_local_rows(section, is_new=False)  # a run that was started with these rows
    assert answers(load_examples(section).train) in ("a", "aa")
    assert any(f"is not read: {missing}" in line for line in logged())


@pytest.mark.parametrize(
    ("files", "warned"),
    [
        ({"d/2024/jan/1.jsonl": A, "d/2024/feb/2.jsonl": B}, ""),
        ({"d/train.jsonl": A, "d/old/train.jsonl": B}, "old/train.jsonl"),
        ({"d/train/1.jsonl": A, "d/more/2.jsonl": B}, "more/2.jsonl"),
        ({"d/1.jsonl": A, "d/runs/r/metrics.jsonl": b"{}", "d/runs/r/config.yaml": b""}, ""),
        ({"d/1.jsonl": A, "d/m/config.json": b"{}", "d/m/tokenizer.json": b"{}", "d/.git/2.jsonl": B}, ""),
        (
            {
                "d/README.md": b"---\nconfigs:\n- config_name: x\n  data_files: a/*\n---",
                "d/a/1.jsonl": A,
                "d/b/2.csv": B,
            },
            "",
        ),
    ],
)
def test_files_in_subfolders_that_are_read_or_are_no_rows(make_section, put, logged, files, warned):
    put(files)
    section = make_section(path="d")
    check_local_rows(section)
    load_examples(section)
    assert [line for line in logged() if "not read" in line] == (
        [f"d: in no split, and not read unless a key of data names them: {warned}"] if warned else []
    )


def test_files_of_two_formats_are_read_as_a_mixture(make_section, put):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c"}]
    chat = json.dumps({"messages": turns}).encode() + b"\n"
    put({"a.jsonl": A, "b.jsonl": B, "c.jsonl": chat, "both.jsonl": A + chat})
    with pytest.raises(DataError) as caught:
        list(load_examples(make_section(path=["a.jsonl", "c.jsonl", "b.jsonl"])).train)
    [override] = [word for word in shlex.split(str(caught.value)) if word.startswith("data.mixture=")]
    advised = compose(["model=phi_tiny", override])
    assert answers(load_examples(advised.data.model_copy(update={"validation": None})).train) == "abc"
    with pytest.raises(DataError, match=r"Write the rows of each into a file, and name both in data\.mixture\. Or"):
        list(load_examples(make_section(path="both.jsonl")).train)
    with pytest.raises(DataError, match=r"no column messages; it has prompt, completion\nCorrect or remove them"):
        list(load_examples(make_section(path="both.jsonl", format="messages")).train)
    with pytest.raises(DataError, match=r"data\.format is messages\. Set data\.format=auto"):
        list(load_examples(make_section(path="a.jsonl", format="messages")).train)


def test_a_list_in_a_mixture_is_advised_to_be_several_sources_of_it(make_section, put):
    put({"a.jsonl": A, "b.jsonl": b'{"question": "q", "answer": "b"}\n'})
    named = "{path: a.jsonl}, {path: b.jsonl, columns: {prompt: question, completion: answer}}"
    section = make_section(mixture=[{"path": ["a.jsonl", "b.jsonl"], "weight": 2}, {"path": "a.jsonl"}])
    with pytest.raises(DataError, match=re.escape(f"Set the sources {named} in place of this one")) as caught:
        list(load_examples(section).train)
    assert "data.mixture=" not in str(caught.value), "it would replace the other sources"
    section = make_section(mixture=[{"path": ["b.jsonl", "a.jsonl"]}, {"path": "a.jsonl"}])
    with pytest.raises(DataError, match=r"of each file: the sources \{path: b.* in place of this one"):
        check_local_rows(section, "answers")


def test_an_object_of_lists_of_rows_is_not_advised_to_name_its_lists_as_turns(make_section, put):
    rows = [{"prompt": "q", "completion": "a"}]
    put({"a.json": json.dumps({"train": rows, "test": rows}).encode()})
    with pytest.raises(DataError, match="the columns train, test, and each holds a list of rows") as caught:
        list(load_examples(make_section(path="a.json")).train)
    assert "data.columns" not in str(caught.value)


PARTS = {
    "p/part-9.jsonl": A,
    "p/part-10.jsonl": B,
    "p/part-11.csv": TABLE,
    "p/README.md": b"text",
    "p/._part-9.jsonl": b"\0",
}


@pytest.mark.parametrize("names", [("system_message", "system_instruction"), ("system_instruction", "system_message")])
def test_files_with_other_names_of_columns_are_read_as_a_mixture(make_section, put, names):
    tables = [(("question", "answer"), "a"), (("problem", "solution"), "b"), (("prompt", "completion"), "c")]
    files = {f"{text}.jsonl": json.dumps(dict(zip(columns, ("q", text), strict=True))) for columns, text in tables}
    files |= {f"{name}.jsonl": json.dumps({"prompt": "q", "completion": "a", name: "Be kind."}) for name in names}
    put({name: content.encode() for name, content in files.items()})

    def advised(*paths: str, **keys) -> list[tuple[str, ...]]:
        with pytest.raises(DataError) as caught:
            list(load_examples(make_section(path=[*paths], **keys)).train)
        [override] = [word for word in shlex.split(str(caught.value)) if word.startswith("data.mixture=")]
        section = compose(["model=phi_tiny", override.rstrip(".")]).data.model_copy(update={"validation": None})
        return [example.contents for example in load_examples(section).train]

    for first in ("abc", "bca", "cab"):
        assert advised(*(f"{name}.jsonl" for name in first)) == [("q", name) for name in first]
    assert advised("b.jsonl", "c.jsonl", columns={"prompt": "problem", "completion": "solution"})
    with_system = [("Be kind.", "q", "a")] * 2
    assert advised(*(f"{name}.jsonl" for name in names)) == with_system
    assert advised(*(f"{name}.jsonl" for name in names), columns={"system": names[0]}) == with_system, "not in silence"


@pytest.mark.parametrize(
    ("name", "content", "advice"),
    [
        ("a.txt", b"prompt\tcompletion\nq\ta\n", "rename it to a.tsv"),
        ("a.txt", A, "rename it to a.jsonl"),
        ("a.txt", b"Some words.\n", 'Texts are rows of a .jsonl file: {"text"'),
        ("a.xlsx", b"PK\3\4", "Save the sheet as CSV"),
        ("a.csv", LATIN_1, "iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"),
        ("a.jsonl", b'{"prompt": "q", "completion": "\xe4"}\n', "iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"),
        ("a.csv", TABLE.decode().encode("utf-16"), "iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    ],
)
def test_a_file_that_no_reader_is_for_is_refused_with_what_helps(make_section, put, name, content, advice):
    put({name: content})
    with pytest.raises(DataError) as caught:
        list(load_examples(make_section(path=name)).train)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("files", "keys", "train", "validation", "test"),
    [
        (PARTS, {"path": "p"}, "abab", "", ""),
        (PARTS, {"path": "p", "train": "part-10"}, "b", "", ""),
        (PARTS, {"path": "p/*"}, "abab", "", ""),
        (PARTS, {"path": "p/*.jsonl"}, "ab", "", ""),
        (PARTS, {"path": "**/*.jsonl"}, "ab", "", ""),
        (PARTS, {"path": ["p/part-10.jsonl", "p/part-9.jsonl"]}, "ba", "", ""),
        (PARTS, {"path": ["p/part-11.csv", "p/*.jsonl"], "validation": "p/*.csv"}, "abab", "ab", ""),
        (PARTS, {"train": "p/part-1*", "validation": ["p/part-9.jsonl"], "test": "p/*9.jsonl"}, "bab", "a", "a"),
        (PARTS, {"path": "p/*", "validation": "1"}, 3, 1, ""),
        (PARTS, {"mixture": [{"path": "p"}, {"path": ["p/part-9.jsonl"]}]}, "ababa", "", ""),
        ({"p/[1].jsonl": A, "p/x*.jsonl": B, "p/xy.jsonl": C}, {"path": "p/x*.jsonl"}, "b", "", ""),
        ({"p/train.jsonl": A, "p/eval.jsonl": B}, {"path": "p"}, "a", "b", ""),
        ({"p/train.jsonl": A, "p/val.jsonl": B, "p/test.jsonl": C}, {"path": "p"}, "a", "b", "c"),
        ({"p/Train.jsonl": A, "p/EVALUATION.JSONL": B, "p/testing.ndjson": C}, {"path": "p"}, "a", "b", "c"),
        ({"p/train-2.jsonl": A, "p/train-10.jsonl": B, "p/test-1.jsonl": C}, {"path": "p"}, "ab", "", "c"),
        ({"p/chats_train.jsonl": A, "p/chats_dev.jsonl": B}, {"path": "p"}, "a", "b", ""),
        (
            {"p/latest.jsonl": A, "p/device.jsonl": B},
            {"path": "p"},
            "ba",
            "",
            "",
        ),  # test and dev are not words of these
    ],
)
def test_the_files_of_each_split(make_section, put, files, keys, train, validation, test):
    put(files)
    section = make_section(**keys)
    assert missing_here(section) == []
    check_local_rows(section, "answers")
    splits = load_examples(section)
    found = [answers(split) for split in (splits.train, splits.validation, splits.test)]
    assert found == [train, validation, test] or list(map(len, found[:2])) == [train, validation]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "p/*.csv"}, "data.path is p/*.csv, but no file that ends in .jsonl, .ndjson, .json, .csv,"),
        ({"path": ["p/a.jsonl", "p/gone.jsonl"]}, "data.path is p/gone.jsonl, but there is no such file"),
        ({"path": "p/*"}, "data.path is p/*, which has test files. Give their folder, or name the files of each"),
        ({"path": ["p/a.jsonl", "p/test.jsonl"]}, "data.path is p/a.jsonl and 1 more, which has test files"),
        ({"path": "p"}, "data.path is p: a folder with a, test, but no train. Name the split to train on"),
    ],
)
def test_lists_and_globs_that_are_refused(make_section, put, keys, message):
    put({"p/a.jsonl": A, "p/test.jsonl": B})
    with pytest.raises(DataError) as caught:
        load_examples(make_section(**keys))
    assert message in str(caught.value)


def test_a_glob_that_never_ends_is_refused(make_section, put, tmp_path, monkeypatch):
    """Two links to their own folder make more paths than anything could look at."""
    put({"p/a.jsonl": A})
    links = [tmp_path / "p" / name for name in ("one", "two")]
    for link in links:
        link.symlink_to(".")
    monkeypatch.setattr(examples, "SEARCH_SECONDS", 1)
    with pytest.raises(DataError, match="1 s are not enough to look into them"):
        load_examples(make_section(path="p/**/*.jsonl"))
    for link in links:
        link.unlink()  # which ends the search


def test_each_row_keeps_its_own_place_and_number(make_section, put):
    put({"p/part-9.jsonl": A + B, "p/part-10.jsonl": b"\n" + C, "p/part-11.csv": TABLE})
    encoded = encode_train(make_section(path="p"))
    places = ["p/part-9.jsonl:1", "p/part-9.jsonl:2", "p/part-10.jsonl:2", "p/part-11.csv row 1", "p/part-11.csv row 2"]
    assert [encoded.source(index) for index in range(5)] == places
    assert encoded.numbers.diff().min() > 0
    assert len(encoded) == 5
    put({"p/part-10.jsonl": A + b"{"})
    with pytest.raises(DataError, match=r"p: 1 of 6 rows cannot be used:\n  p/part-10\.jsonl:2: not JSON"):
        encode_train(make_section(path="p"))


def test_turns_in_the_cells_of_several_tables_are_turns_as_in_one(make_section, put):
    cell = json.dumps([{"role": "user", "content": "q"}]).replace('"', '""')
    table = f'prompt,completion\n"{cell}",a\n'.encode()
    put({"a.csv": table, "b.csv": table})
    one, several = (encode_train(make_section(path=path)) for path in ("a.csv", ["a.csv", "b.csv"]))
    assert several.tokens(0).tolist() == several.tokens(1).tolist() == one.tokens(0).tolist()


def test_the_digest_covers_all_parts_in_their_order(make_section, put):
    put({"a.jsonl": A, "b.jsonl": B})

    def digest(paths):
        return load_examples(make_section(path=paths)).train.source.digest()

    first = digest(["a.jsonl", "b.jsonl"])
    assert digest("*.jsonl") == first != digest(["b.jsonl", "a.jsonl"])
    put({"b.jsonl": C})
    assert digest("*.jsonl") != first


def test_the_log_names_the_order_and_what_is_not_read(make_section, put, logged):
    put({"p/train-2.jsonl": A, "p/train-10.jsonl": B, "p/eval.jsonl": C, "p/dev.jsonl": C, "p/notes.jsonl": A})
    load_examples(make_section(path="p"))
    assert "train: the files in this order: p/train-2.jsonl, p/train-10.jsonl" in logged()
    assert "p: in no split, and not read unless a key of data names them: eval.jsonl, notes.jsonl" in logged()


@pytest.mark.parametrize(
    "overrides",
    [
        ["data=[b.jsonl, a.jsonl]"],
        ["[b.jsonl, a.jsonl]"],
        ["b.jsonl", "a.jsonl"],  # as a shell writes *.jsonl
        ["run=run.yaml"],
    ],
)
def test_every_way_to_write_a_list(put, overrides):
    put({"a.jsonl": A, "b.jsonl": B})
    put({"run.yaml": b"data: [b.jsonl, a.jsonl]\n", "dotted.yaml": b"data.path:\n- b.jsonl\n- a.jsonl\n"})
    config = compose([*overrides, "model=phi_tiny"])
    assert config.data.path == ["b.jsonl", "a.jsonl"]
    put({"config.yaml": resolved_yaml(config).encode()})
    assert compose(["run=config.yaml"]) == config == config_from_dict(config.model_dump(), "record")


def test_another_separator_is_refused_by_name(put):
    put({"a.csv": TABLE})
    assert compose(["a.csv", "data.separator=;", "model=phi_tiny"]).data.separator == ";"
    with pytest.raises(ConfigError, match=r"data\.separator: expected .*tab.*, got ';;'"):
        compose(["a.csv", "data.separator=;;", "model=phi_tiny"])


def test_a_file_named_after_two_splits_is_of_neither():
    names = ["train_and_test.jsonl", "more.jsonl"]
    assert files_of_splits(names) == {"train": names}
    assert files_of_splits([*names, "dev.jsonl"]) == {"validation": ["dev.jsonl"]}
