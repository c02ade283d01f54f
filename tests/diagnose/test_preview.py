"""What `finetune preview` finds in rows that went through the real encoding path."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from finetune.cli.preview import preview_from_overrides
from finetune.config.compose import load_config
from finetune.data.chat_template import ChatTemplate
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.preferences import encode_preferences
from finetune.diagnose.preview import Preview, preview_data, unopened_header
from finetune.diagnose.preview_splits import histogram, summarize_split
from finetune.errors import ConfigError
from finetune.model.tokens import build_tokenizer
from tests.launches import place_variables
from tests.model.variants import BOUNDARY, VARIANTS
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny_phi3_config
from tests.tiny_runs import MODEL_VOCABULARY


def chat(question: str, answer: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model's folder without its weights: a preview must not ask for them."""
    tiny_phi3_config(vocab_size=MODEL_VOCABULARY, max_position_embeddings=128).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def run_over(tmp_path: Path, base: Path, **splits: list[str]) -> list[str]:
    """Write the lines of each split, and return the arguments of a run over them."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, lines in splits.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [f"model.path={base}", f"data.path={folder}", f"data.cache_dir={tmp_path / 'cache'}", "data.max_length=64"]


@pytest.fixture
def words(tmp_path: Path, base: Path) -> list[str]:
    """A run over three splits: a row that comes twice, one that is cut, one of training in the test split."""
    return run_over(
        tmp_path,
        base,
        train=[chat("a", "b"), "", chat("send", "crates"), chat("a", "b"), chat("a b", "long " * 40)],
        validation=[chat("a", "c")],
        test=[chat("send", "crates"), chat("x", "y")],
    )


TOLERANT = ["data.on_truncated_answer=warn", "data.on_overlap=warn"]


def preview(words: list[str], **options) -> Preview:
    return preview_data(load_config(words), **options)


def test_a_row_is_the_one_that_training_encodes(words, tmp_path):
    config = load_config([*words, *TOLERANT])
    encoded = encode_examples(load_examples(config.data), build_tokenizer(config.model), config.data)
    kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
    seen = preview([*words, *TOLERANT], num_rows=99)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == kept  # it was read from there
    assert len(seen.rows) == len(encoded.train) == 4
    for row, example in zip(seen.rows, encoded.train, strict=True):
        record = row.as_record()
        assert record["token_ids"] == example.input_ids.tolist()
        assert record["loss"] == example.is_target.tolist()
    spans = seen.rows[0].as_record()["spans"]
    assert [(span["text"], span["loss"], span["special"]) for span in spans] == [
        ("<|user|>", False, True),
        ("a", False, False),
        ("<|end|><|assistant|>", False, True),
        ("b", True, False),
        ("<|end|>", True, True),
        ("<|endoftext|>", False, True),
    ]


def test_what_is_wrong_with_rows_is_told_with_their_place(words):
    seen = preview(words, num_rows=99)
    train = seen.splits["train"]
    assert (train.rows, train.longest, train.truncated.count, train.duplicates.count) == (4, 64, 1, 1)
    [counts] = train.files
    assert (counts["rows"], counts["truncated"], counts["without_end_of_turn"], counts["repeated"]) == (4, 1, 1, 1)
    # The empty line of the file is no row, and counts in no place but the file's own.
    assert [(place.row, place.source.rpartition("/")[2]) for place in train.duplicates.first] == [(3, "train.jsonl:4")]
    assert [row.notes for row in seen.rows] == [[], [], [], ["cut at data.max_length from 208 tokens"]]
    told = [(finding.level, finding.what.split(":")[0], finding.fix) for finding in seen.findings]
    assert [(level, split) for level, split, _ in told] == [
        ("problem", "train"),  # an answer is cut
        ("problem", "test"),  # a row is in training too
        ("warning", "train"),  # a row is longer than the limit
        ("warning", "train"),  # a row comes twice
    ]
    assert "data.on_truncated_answer=drop" in told[0][2]
    assert "row 3 (" in seen.findings[3].what
    seen = preview([*words, *TOLERANT, "data.on_truncated_answer=drop"], num_rows=99)
    assert (seen.splits["train"].rows, len(seen.rows)) == (3, 3)
    assert any("They are left out (data.on_truncated_answer=drop)" in finding.fix for finding in seen.findings)


def test_the_figures_of_a_split_are_right():
    rows = [([5] * length, [False] * (length - 1) + [True]) for length in (3, 7, 7, 30)]
    examples = EncodedExamples.from_rows(rows, end_id=9)
    split = summarize_split(examples)
    assert (split.rows, split.tokens, split.target_tokens, split.target_share) == (4, 47, 4, 4 / 47)
    assert (split.shortest, split.median, split.percentile_99, split.longest) == (3, 7, 30, 30)
    assert split.duplicates.count == 1
    mixed = examples.select([0, 0, 1, 2, 1])
    assert summarize_split(mixed).duplicates.count == 1, "a row that a mixture repeats is no duplicate"
    other_loss = EncodedExamples.from_rows([([5, 6], [False, True]), ([5, 6], [True, True])], end_id=9)
    assert summarize_split(other_loss).duplicates.count == 0


@pytest.mark.parametrize("lengths", [[7, 7, 7], [5, 99, 100, 101], [1, 131072], list(range(1, 400))])
def test_a_histogram_counts_every_row_once_in_few_equal_bins(lengths):
    bins = histogram(torch.tensor(lengths))
    assert 1 <= len(bins) <= 12
    for bar in bins:
        assert bar.rows == sum(bar.shortest <= length <= bar.longest for length in lengths)
    assert sum(bar.rows for bar in bins) == len(lengths)
    assert bins[0].rows > 0
    assert bins[-1].rows > 0
    assert len({bar.longest - bar.shortest for bar in bins}) == 1


def test_a_model_that_does_not_fit_the_rows_is_a_problem(words, base, capsys):
    tiny_phi3_config(vocab_size=300, max_position_embeddings=32).save_pretrained(base)
    assert preview_from_overrides(words, as_json=True) == 2
    record = json.loads(capsys.readouterr().out)
    problems = [finding["what"] for finding in record["findings"] if finding["level"] == "problem"]
    assert record["exit_code"] == 2
    for part in ("64 tokens, but the model's context ends at 32", "but the model has 300 embeddings"):
        assert any(part in what for what in problems)


def test_new_tokens_are_in_the_embedding_which_grows_for_them(tmp_path, base):
    tiny_phi3_config(vocab_size=len(tiny_tokenizer()), max_position_embeddings=128).save_pretrained(base)
    words = run_over(tmp_path, base, train=[chat("a", "<order>yes</order>")])
    seen = preview([*words, "lora.new_tokens=['<order>', '</order>']"])
    assert max(seen.rows[0].as_record()["token_ids"]) == len(tiny_tokenizer()) + 1
    assert [finding.what for finding in seen.findings if finding.level == "problem"] == []


def test_rows_beyond_the_context_that_training_accepts_are_a_problem(tmp_path, base):
    """Of Phi-3.5-MoE, transformers computes fewer positions than its configuration has."""
    VARIANTS["Phi-3.5-MoE"].config(vocab_size=MODEL_VOCABULARY).save_pretrained(base)
    seen = preview(run_over(tmp_path, base, train=[chat("a b", "long " * 10)]))
    assert seen.context == BOUNDARY
    (problem,) = [finding for finding in seen.findings if finding.level == "problem"]
    assert f"the model's context ends at {BOUNDARY}" in problem.what
    assert problem.fix == f"data.max_length={BOUNDARY}"


def test_json_says_all_of_it_in_plain_ascii_on_the_first_rank(words, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        for name, value in place_variables(1, 2, 29500).items():
            patch.setenv(name, value)
        assert preview_from_overrides(words) == 0
    assert capsys.readouterr().out == ""
    assert preview_from_overrides([*words, *TOLERANT], split="validation", as_json=True) == 0
    text = capsys.readouterr().out.splitlines()[-1]
    assert text.isascii()
    record = json.loads(text)
    assert record["version"] == 2
    assert list(record["splits"]) == ["train", "validation", "test"]
    (row,) = record["rows"]
    assert (row["split"], row["row"], row["tokens"]) == ("validation", 1, len(row["token_ids"]))
    assert row["source"].endswith("validation.jsonl:1")


def test_a_split_or_a_row_that_is_not_there_is_named(words, tmp_path):
    (tmp_path / "data" / "test.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"no such split.*train, validation"):
        preview(words, split="test")
    with pytest.raises(ConfigError, match=r"--row 5: the train split has the rows 1 to 4"):
        preview(words, rows=[2, 5])


def pair(prompt: str, chosen: str, rejected: str) -> str:
    return json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected})


@pytest.fixture
def words_of_pairs(tmp_path: Path, base: Path) -> list[str]:
    """A run over pairs: one that comes twice, one that is cut on one side, one without a preference."""
    train = [pair("a", "b b", "b c"), pair("send it", "crates", "no"), pair("a", "b b", "b c"), pair("x", "y", "y")]
    validation = [pair("a", "b b", "d"), pair("a b", "c", "long " * 40)]
    return [*run_over(tmp_path, base, train=train, validation=validation), "task=finetune_preferences"]


def test_pairs_are_those_that_training_encodes(words_of_pairs, tmp_path):
    config = load_config([*words_of_pairs, *TOLERANT])
    encoded = encode_preferences(config.data, build_tokenizer(config.model)).train
    seen = preview([*words_of_pairs, *TOLERANT], num_rows=99)
    assert seen.objective == "dpo"
    assert [(row.location.row, row.side) for row in seen.rows] == [
        (number, side) for number in (1, 2, 3, 4) for side in ("chosen", "rejected")
    ]
    examples = [example for pair in encoded for example in pair]
    for row, example in zip(seen.rows, examples, strict=True):
        record = row.as_record()
        assert (record["token_ids"], record["loss"]) == (example.input_ids.tolist(), example.is_target.tolist())
        assert record["side"] == row.side
    chosen, rejected = seen.rows[2:4]
    first_target = chosen.as_record()["loss"].index(True)
    assert chosen.as_record()["shared_tokens"] == rejected.as_record()["shared_tokens"] == first_target
    assert chosen.own_pieces() == chosen.pieces
    for row, text in ((rejected, "no"), (seen.rows[1], "b c")):
        assert "".join(piece.text for piece in row.own_pieces()) == f"{text}<|end|><|endoftext|>"
    seen = preview(words_of_pairs, table=tmp_path / "pairs.parquet")
    sides = pyarrow.parquet.read_table(tmp_path / "pairs.parquet").column("side").to_pylist()
    assert sides == ["chosen", "rejected"] * 4
    train, validation = seen.splits["train"], seen.splits["validation"]
    assert (train.kind, train.rows, train.duplicates.count) == ("preference", 4, 1)
    assert train.tokens == int(encoded.chosen.lengths.sum() + encoded.rejected.lengths.sum())
    assert train.target_tokens == int(encoded.chosen.num_targets.sum() + encoded.rejected.num_targets.sum())
    assert train.longest == int(encoded.lengths.max())
    assert [place.row for place in validation.truncated.first] == [2]
    warnings = [finding.what for finding in seen.findings if finding.level == "warning"]
    (equal,) = (what for what in warnings if what.startswith("train: 1 of 4 pairs have the same answer twice: "))
    assert equal.endswith("train.jsonl:4")


def test_a_pair_is_shown_with_its_prompt_once(words_of_pairs, capsys):
    assert preview_from_overrides([*words_of_pairs, *TOLERANT], rows=[2]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^split +pairs +tokens", out, re.MULTILINE)
    sides = [line for line in out.splitlines() if line.startswith("train pair 2 of 4, ")]
    assert [f"train.jsonl:2, {side}: " in line for side, line in zip(("chosen", "rejected"), sides, strict=True)]
    shared = preview([*words_of_pairs, *TOLERANT], rows=[2]).rows[0].num_shared
    hidden = f"… {shared} tokens as on the chosen side …"
    assert [line for line in out.splitlines() if line.startswith(("loss | ", "     | "))] == [
        "     | <|user|>send it<|end|><|assistant|>",
        "loss | crates<|end|>",
        "     | <|endoftext|>",
        f"     | {hidden}",
        "loss | no<|end|>",
        "     | <|endoftext|>",
        "loss | marks what the model must predict; ↵ line break, ⇥ tab, <U+001B> a character that cannot be seen",
    ]
    assert preview_from_overrides([*words_of_pairs, *TOLERANT], rows=[2], tokens=True) == 0
    lines = capsys.readouterr().out.splitlines()
    after_prompt = next(number for number, line in enumerate(lines, 1) if line.endswith(hidden))
    assert int(lines[after_prompt].split()[0]) == shared, "positions count the shared tokens"


def test_each_answer_is_shown_after_the_turns_as_they_are_served(base: Path, tmp_path: Path) -> None:
    said = [("user", "Please send crates"), ("assistant", "yes"), ("user", "or oranges"), ("assistant", "no")]
    turns = [{"role": role, "content": f"{text} to Porto by Friday"} for role, text in said]
    turns[1]["reasoning_content"] = turns[3]["thinking"] = "the answer is yes or no"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n" + chat("a", "b") + "\n")
    words = [f"model.path={base}", f"data.path={path}", f"data.cache_dir={tmp_path / 'cache'}"]
    words += ["data.train_on=each_turn", "data.chat_template=phi4_mini"]
    record = preview(words).as_record(strict=False)
    assert [(row["answer"], row["answers"]) for row in record["rows"]] == [(1, 2), (2, 2), (1, 1)]
    one, other, _ = record["rows"]
    texts = ["".join(span["text"] for span in row["spans"] if span["loss"]) for row in (one, other)]
    assert ["the answer is yes or no" in text for text in texts] == [True, True]
    assert "".join(span["text"] for span in other["spans"]).count("<think>") == 1


@pytest.mark.slow
def test_a_conversation_with_tools_is_made_up_after_each_prompt(base: Path, tmp_path: Path, capsys) -> None:
    rows = [json.dumps({"prompt": f"{n} + 1?", "completion": f"{n + 1}"}) for n in range(2)]
    words = run_over(tmp_path, base, train=rows, validation=rows[:1])
    words += ["task=finetune_grpo", "reward.functions=exact_match", "data.on_overlap=warn", "data.max_length=512"]
    refusals = preview([*words, "rollout.tools=calculator"]).findings
    assert any(each.level == "problem" and "calls in a form that is not read here" in each.what for each in refusals)

    words = ["model=phi_tiny", *words[1:]]
    assert preview(words).rows[0].as_record()["made_up"] is None
    words += ["rollout.tools=calculator"]
    assert preview_from_overrides(words) == 0
    shown = capsys.readouterr().out
    made_up = (
        "<|assistant|>\n"
        'loss | <|tool_call|>[{"name": "calculator", "arguments": {"expression": "a text"}}]<|/tool_call|><|end|>\n'
        "     | <|tool_response|>a result<|end|><|assistant|>\n"
        "loss | the last answer<|end|>\n"
    )
    assert shown.count(made_up) == shown.count("note: what follows the prompt is made up") == 2
    seen = preview(words, num_rows=1)
    record = seen.rows[0].as_record()
    assert len(record["token_ids"]) == record["tokens"] == record["loss"].count(False), "of the prompt alone"
    spans = record["made_up"]["spans"]
    assert ("a result", False) in [(span["text"], span["loss"]) for span in spans]
    assert len(record["made_up"]["token_ids"]) == len(record["made_up"]["loss"])


def test_an_expected_answer_of_several_lines_is_shown_on_one(base: Path, tmp_path: Path, capsys) -> None:
    rows = [json.dumps({"prompt": f"{n} + 1?", "completion": f"so\n{n + 1}"}) for n in range(2)]
    words = [*run_over(tmp_path, base, train=rows), "task=finetune_grpo", "reward.functions=exact_match"]
    assert preview_from_overrides(words) == 0
    assert "note: expected answer: so↵1\n" in capsys.readouterr().out


def test_a_prompt_that_a_run_would_refuse_as_cut_is_a_problem(base: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{n} + 1?", "completion": f"{n + 1}"}) for n in range(2)]
    rows.append(json.dumps({"prompt": "Which?", "completion": "the third " * 20}))
    words = run_over(tmp_path, base, train=rows, validation=rows[:1])
    words += ["task=finetune_grpo", "reward.functions=exact_match", "data.on_overlap=warn", "data.max_length=64"]
    words += ["data.on_truncated_answer=warn"]
    [found] = [each for each in preview(words).findings if each.level == "problem"]
    assert "train: data.max_length cuts the prompt or the expected answer of 1 row" in found.what
    assert "data.on_long_row=drop" in found.fix
    assert not [each for each in preview([*words, "data.on_long_row=drop"]).findings if each.level == "problem"]


def test_the_rows_of_a_split_are_written_for_another_trainer(words, tmp_path, monkeypatch):
    monkeypatch.setattr("finetune.diagnose.preview.ROWS_OF_A_BLOCK", 3)  # the split has four rows
    config = load_config([*words, *TOLERANT])
    rows = encode_examples(load_examples(config.data), build_tokenizer(config.model), config.data).train
    seen = [
        {
            "source": str(tmp_path / "data/train.jsonl"),
            "line": line,
            "input_ids": row.input_ids.tolist(),
            "loss_mask": row.is_target.int().tolist(),
            "text": tiny_tokenizer().decode(row.input_ids),
        }
        for line, row in zip((1, 3, 4, 5), rows, strict=True)
    ]
    for ending in ("parquet", "csv"):
        preview([*words, *TOLERANT], table=tmp_path / f"rows.{ending}")
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist() == seen
    lists = {"input_ids": json.loads, "loss_mask": json.loads, "line": int}
    with (tmp_path / "rows.csv").open(newline="") as file:
        read = [{name: lists.get(name, str)(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
    assert read == seen
    for name, reason in {"rows.csv": "exists already", "rows.json": "neither .parquet nor .csv"}.items():
        before = (tmp_path / "rows.csv").read_bytes()
        with pytest.raises(ConfigError, match=reason):
            preview([*words, *TOLERANT], table=tmp_path / name)
        assert (tmp_path / "rows.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("of_a_turn", "header"),
    [
        ("'<|' + m['role'] + '|>' + m['content'] + '<|end|>'", "<|assistant|>"),
        ("'[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user' else ' ' + m['content'] + '</s>'", ""),
    ],
)
def test_a_header_that_no_prompt_opens_is_found(of_a_turn, header):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ {of_a_turn} }}}}{{% endfor %}}"
    assert unopened_header(ChatTemplate(tokenizer)) == header
