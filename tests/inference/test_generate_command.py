import io
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest

import finetune
from finetune.cli.generate import generate_command as generate
from finetune.cli.run_options import read_seed_option
from finetune.errors import CheckpointError, ConfigError, DataError, ModelError

PROMPTS = ["Please send 3 crates of oranges to Marta Ruiz in Porto by Friday", "Two pens.", "330 notebooks to Tamara"]
SHORT = {"max_new_tokens": 12}


@pytest.fixture
def asked(capsys):
    """Call the command as the command line does; what it wrote to standard output."""

    def ask(*arguments, **options):
        generate(*arguments, **{**SHORT, **options})
        return capsys.readouterr().out

    return ask


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_script_gets_what_the_command_prints(asked, adapter_run):
    found = records(asked(adapter_run, PROMPTS, compare=True, as_json=True))
    prompts = [PROMPTS[0], {"prompt": PROMPTS[1]}, PROMPTS[2]]
    answers = finetune.generate(str(adapter_run), prompts, compare=True, max_new_tokens=12)
    assert [answer._asdict() for answer in answers] == [
        {"expected": None, "reasoning": "", "tool_calls": (), **record, "base": record["base"]["answer"]}
        for record in found
    ]
    (answer,) = finetune.generate(adapter_run, PROMPTS[0], max_new_tokens=12)
    assert answer == answers[0]._replace(base=None)
    with pytest.raises(DataError, match="prompt 1"):
        finetune.generate(adapter_run, [{"question": "x"}])


def test_a_row_is_one_prompt_and_tools_may_be_a_list(adapter_run):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    row, text = (
        finetune.generate(adapter_run, prompts, tools=given, max_new_tokens=4)
        for prompts, given in (({"prompt": PROMPTS[0]}, tools), (PROMPTS[0], json.dumps(tools)))
    )
    assert row == text


class DataFrame(list):
    """Stands for the class of pandas, which iterates over names of columns."""


@pytest.mark.parametrize(
    ("prompts", "options", "why"),
    [
        (None, {}, "prompts is NoneType; expected a text, a row"),
        (DataFrame(["prompt"]), {}, "prompts is DataFrame"),
        ([b"a"], {}, "prompt 1 is bytes; expected a text, or a row as a dict"),
        (["a", {"prompt": b"a"}], {}, r"prompt 2 has bytes; expected text\. Decode it first"),
        ({"messages": [{"role": "user", "content": b"a"}]}, {}, "prompt 1 has bytes"),
        ({"prompt": "a", "score": float("nan")}, {}, "NaN is not a JSON value"),
        ({("a",): "a"}, {}, "prompt 1 cannot be read as a row: keys must be str"),
        ("a", {"max_tokens": 3}, "generate has no argument max_tokens. Its options are system, tools, max_new_tokens"),
        ("a", {"tools": "nope"}, "tools is 'nope'; expected a list of objects"),
        ("a", {"tools": 5}, "tools is 5; expected a list of objects"),
        ("a", {"system": 5}, r"--system is 5 \(int\); expected text"),
        ("a", {"max_new_tokens": 0}, "--max-new-tokens is 0; expected a whole number of at least 1"),
        ("a", {"max_new_tokens": 2.5}, "--max-new-tokens is 2.5"),
        ("a", {"max_new_tokens": None}, "--max-new-tokens is None"),
        ("a", {"top_k": 0}, "--top-k is 0; expected a whole number of at least 1"),
        ("a", {"top_p": "0.5"}, "--top-p is '0.5'; expected a number above 0, at most 1"),
        ("a", {"temperature": "0.5"}, "--temperature is '0.5'; expected a number above 0"),
        ("a", {"temperature": float("nan")}, "--temperature is nan"),
        ("a", {"temperature": float("inf")}, "--temperature is inf"),
        ("a", {"temperature": 1e-320}, "--temperature is 1e-320"),
        ("a", {"seed": "0"}, "--seed is '0'"),
    ],
)
def test_wrong_arguments_of_a_script_are_refused_before_the_run_is_read(tmp_path, prompts, options, why):
    with pytest.raises((ConfigError, DataError), match=why):
        finetune.generate(tmp_path, prompts, **options)


@pytest.mark.parametrize("call", [partial(finetune.generate, prompts="a"), finetune.evaluate, finetune.merge])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"run": None}, "run is None; expected the folder of a run"),
        ({"run": b"runs"}, "run is b'runs'; expected the folder of a run"),
        ({"run": "a\0b"}, "run is 'a.*b'; expected the folder of a run"),
        ({"run": "a" * 5000}, r"'a{200}' is no folder that can be read: .*File name too long"),
        ({"base": 3}, "base is 3; expected a folder or a hub id"),
        ({"checkpoint": 2.5}, r"checkpoint is 2\.5; expected a step, or the text latest"),
        ({"overrides": 3}, "overrides has 3; expected texts such as"),
        ({"overrides": ["lora.r=8", b"a"]}, "overrides has b'a'; expected texts such as"),
    ],
)
def test_arguments_of_another_type_are_refused_by_each_function(tmp_path, call, options, why):
    with pytest.raises(ConfigError, match=why):
        call(**{"run": tmp_path, **options})


def test_a_checkpoint_may_be_a_number_and_a_base_a_path(adapter_run):
    with pytest.raises(CheckpointError, match=r"--checkpoint is 99, but .* has no such checkpoint"):
        finetune.generate(adapter_run, "a", checkpoint=99)
    with pytest.raises(ModelError, match="there is no such folder"):
        finetune.generate(adapter_run, "a", base=Path("/no/such/base"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of base, float32, bfloat16, float16"),
        ({"into": "nf4"}, "into is 'nf4'; expected one of base, nf4-dequantized"),
        ({"max_difference": "x"}, "max_difference is 'x'; expected a number of at least 0"),
        ({"out": 3}, "out is 3; expected the path of a folder"),
    ],
)
def test_wrong_arguments_of_a_merge_are_refused_before_it(tmp_path, options, why):
    with pytest.raises(ConfigError, match=why):
        finetune.merge(tmp_path, **options)


@pytest.fixture
def as_command(monkeypatch):
    """A process of the command keeps the log that it configured after the launch; a script gets its own back."""
    monkeypatch.setattr("finetune.logs._is_command", True)


@pytest.mark.usefixtures("as_command")
def test_answers_that_did_not_end_are_counted(adapter_run, capsys):
    generate(adapter_run, PROMPTS, max_new_tokens=2, compare=True)
    assert "6 of 6 answers did not end within 2 tokens. Ask with a larger --max-new-tokens." in capsys.readouterr().err


@pytest.mark.usefixtures("as_command")
def test_an_answer_that_fills_the_context_is_not_blamed_on_the_limit(adapter_run, capsys, monkeypatch):
    generate(adapter_run, PROMPTS[1:2], max_new_tokens=2, as_json=True)
    (found,) = records(capsys.readouterr().out)
    context = found["num_prompt_tokens"] + 2
    for module in ("inference.decoding", "model.base"):
        monkeypatch.setattr(f"finetune.{module}.max_context", lambda _: context)
    generate(adapter_run, PROMPTS[1:2], max_new_tokens=3)
    said = capsys.readouterr().err
    assert f"1 of 1 answer did not end within the model's context of {context} tokens, which includes" in said
    assert "--max-new-tokens" not in said


def test_one_answer_a_line_and_the_same_as_json(asked, adapter_run):
    lines = asked(adapter_run, PROMPTS).splitlines()
    found = records(asked(adapter_run, PROMPTS, as_json=True))
    assert [record["answer"] for record in found] == lines
    assert len(set(lines)) == 3
    assert [record["prompt"] for record in found] == PROMPTS
    assert [record["source"] for record in found] == ["prompt 1", "prompt 2", "prompt 3"]
    assert all(0 < record["num_tokens"] <= 12 for record in found)
    assert {record["ended_by"] for record in found} <= {"stop", "length"}
    assert all((record["num_tokens"] == 12) == (record["ended_by"] == "length") for record in found)


@pytest.mark.slow
def test_no_answer_depends_on_the_batch_size(asked, adapter_run):
    drawn = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "seed": 7}
    one_by_one = asked(adapter_run, PROMPTS, batch_size=1, compare=True, as_json=True, **drawn)
    assert asked(adapter_run, PROMPTS, batch_size=3, compare=True, as_json=True, **drawn) == one_by_one


def test_the_base_is_compared_without_a_second_model(asked, adapter_run):
    found = records(asked(adapter_run, PROMPTS, compare=True, as_json=True))
    alone = records(asked(adapter_run, PROMPTS, as_json=True))
    assert [record["answer"] for record in found] == [record["answer"] for record in alone]
    assert any(record["base"]["answer"] != record["answer"] for record in found)
    table = asked(adapter_run, PROMPTS[:1], compare=True)
    assert PROMPTS[0] in table
    assert "base" in table
    assert "tuned" in table


def test_a_fully_tuned_run_has_no_base_to_compare_with(asked, full_run):
    assert asked(full_run, PROMPTS[:1]).strip()
    with pytest.raises(ConfigError, match="--compare switches the adapter off"):
        asked(full_run, PROMPTS[:1], compare=True)


def test_rows_of_a_file_are_asked_as_they_stand(asked, adapter_run, tmp_path):
    path = tmp_path / "asked.jsonl"
    system = {"role": "system", "content": "Extract the order as JSON."}
    user, answer = {"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": "{}"}
    rows = [{"messages": [system, user, answer]}, {"prompt": PROMPTS[0]}, {"messages": [user]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, short, bare = records(asked(adapter_run, from_file=str(path), as_json=True))
    assert whole["expected"] == "{}"
    assert whole["source"] == f"{path}:1"
    # A prompt alone gets the system turn of the training rows; turns that are given stand as they are.
    assert short["num_prompt_tokens"] == whole["num_prompt_tokens"] > bare["num_prompt_tokens"]
    assert short["answer"] == whole["answer"]
    (without,) = records(asked(adapter_run, PROMPTS[:1], system="", as_json=True))
    assert without["num_prompt_tokens"] == bare["num_prompt_tokens"]


def test_options_replace_the_system_turn_and_the_tools_of_rows(asked, adapter_run, tmp_path):
    def lengths(**options):
        found = records(asked(adapter_run, from_file=str(path), max_new_tokens=1, as_json=True, **options))
        return [record["num_prompt_tokens"] for record in found]

    path = tmp_path / "asked.jsonl"
    system, user = {"role": "system", "content": "Extract."}, {"role": "user", "content": PROMPTS[0]}
    rows = [{"messages": [user]}, {"messages": [system, user]}, {"messages": [user], "tools": [{"name": "weather"}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare, opened, offered = lengths()
    assert bare < opened
    assert bare < offered
    assert lengths(system="") == [bare, bare, offered]
    assert lengths(tools="") == [bare, opened, bare]
    first, second, _ = lengths(system="Extract the order as JSON.")
    assert first == second > opened


def test_a_text_through_a_pipe_is_one_prompt_and_json_lines_are_several(asked, adapter_run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPTS[1] + "\r\n"))
    assert asked(adapter_run) == asked(adapter_run, [PROMPTS[1]])
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    with pytest.raises(DataError, match="standard input is blank"):
        asked(adapter_run)
    monkeypatch.setattr(sys, "stdin", io.StringIO("caf\udce9"))
    with pytest.raises(DataError, match="standard input: it has half a surrogate pair, or a byte that is no text, at"):
        asked(adapter_run)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "Two pens."}\n"330 notebooks to Tamara"\n'))
    assert asked(adapter_run, from_file="-") == asked(adapter_run, PROMPTS[1:])


def test_raw_text_is_continued_without_a_template(asked, adapter_run):
    (found,) = records(asked(adapter_run, ["<|user|>Two"], raw=True, as_json=True))
    (templated,) = records(asked(adapter_run, ["Two"], as_json=True))
    assert found["num_prompt_tokens"] < templated["num_prompt_tokens"]


def test_a_key_of_the_runs_config_can_be_set(asked, adapter_run):
    alone = asked(adapter_run, PROMPTS)
    assert asked(adapter_run, PROMPTS, settings=["testing.batch_size=2"]) == alone
    with pytest.raises(ConfigError, match="devise"):
        asked(adapter_run, PROMPTS, settings=["training.devise=cpu"])


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"temperature": 0.0}, ConfigError, "--temperature is 0"),
        ({"prompts": ["a"], "raw": True, "system": "b"}, ConfigError, "--raw and --system cannot be given together"),
        ({"from_file": "x.jsonl", "prompts": ["a"]}, DataError, "PROMPT and --from are both given. Drop one."),
        ({"prompts": ["a <|end|> b"]}, DataError, "special token"),
        ({"prompts": ["a", " "]}, DataError, "prompt 2 is blank: there is nothing to answer"),
        ({"top_p": 0.0}, ConfigError, "--top-p is 0"),
        ({"prompts": ["\udcff"]}, DataError, "prompt 1"),
        ({"settings": ["parallel.sharding=fsdp2"]}, DataError, "do not share a pipe. Give PROMPT or --from FILE"),
    ],
)
def test_mistakes_are_told(asked, adapter_run, options, error, why):
    with pytest.raises(error, match=why):
        asked(adapter_run, **options)


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("max_new_tokens=4", "--max-new-tokens=4"),
        ("seed=3", "--seed=3"),
        ("testing.batch_size=2", "--set testing.batch_size=2"),
        ("strict=true", "--set strict=true"),
    ],
)
def test_a_setting_is_not_asked_as_a_prompt(asked, adapter_run, argument, instead):
    for options in ({}, {"from_file": "x.csv"}):
        with pytest.raises(DataError, match=f"prompt 1 is {argument}, which is a setting .* Write {instead}. If it is"):
            asked(adapter_run, [argument], **options)
    assert asked(adapter_run, ["x=5, y=6; x+y?"]).strip()


@pytest.mark.parametrize("options", [{}, {"compare": True}])
def test_a_seed_without_sampling_is_refused(asked, adapter_run, options):
    with pytest.raises(ConfigError, match="--seed needs --temperature or --top-p or --top-k, which was not given"):
        asked(adapter_run, ["a"], seed=0, **options)
    assert read_seed_option(None, None, None, None) == 0
    assert read_seed_option(3, None, None, 1) == 3


def test_the_separator_of_a_table_of_prompts_can_be_set(asked, adapter_run, tmp_path):
    path = tmp_path / "asked.csv"
    path.write_text("prompt\tcompletion\nTwo pens.\tx\n")
    with pytest.raises(DataError, match=r"set data\.separator=tab"):
        asked(adapter_run, from_file=str(path))
    (found,) = records(asked(adapter_run, from_file=str(path), settings=["data.separator=tab"], as_json=True))
    assert (found["prompt"], found["expected"]) == ("Two pens.", "x")


def test_control_characters_of_an_answer_do_not_reach_the_screen(asked, adapter_run, monkeypatch):
    from finetune.inference.answers import Answer, AnswerReader

    monkeypatch.setattr(AnswerReader, "read", lambda self, ids: Answer("\x1b[2J\x9bgone\u202e\nnext"))
    assert asked(adapter_run, PROMPTS[:1]) == "<U+001B>[2J<U+009B>gone<U+202E>\nnext\n"
    assert "<U+001B>[2J" in asked(adapter_run, PROMPTS[:1], compare=True)
    assert "\x1b" not in asked(adapter_run, PROMPTS[:1], compare=True)
    line = asked(adapter_run, PROMPTS[:1], as_json=True)
    assert "\x1b" not in line
    assert "\x9b" not in line
    assert json.loads(line)["answer"] == "\x1b[2J\x9bgone\u202e\nnext"


def test_the_white_space_around_an_answer_is_in_json_and_not_on_the_screen(asked, adapter_run, monkeypatch):
    from finetune.inference.generator import Generator

    def answer(self, name, prompts, *, batch_size):
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"]] * len(prompts)

    monkeypatch.setattr(Generator, "batch", answer)
    for text, shown in (("\n yes \n", "yes"), (" \n", "(empty)")):
        assert asked(adapter_run, PROMPTS[:1]) == f"{shown}\n"
        assert f"│ {shown} │ {shown} │" in re.sub(" +", " ", asked(adapter_run, PROMPTS[:1], compare=True))
        (found,) = records(asked(adapter_run, PROMPTS[:1], compare=True, as_json=True))
        assert found["answer"] == found["base"]["answer"] == text
