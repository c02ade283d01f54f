"""An answer in its parts: thinking, text, calls. Rendering what was read gives the answer again."""

import json

import pytest

from finetune.data.chat_template import use_chat_template
from finetune.data.encoded import EncodedExamples
from finetune.data.formats import FORMATS, parse_row
from finetune.data.templates import AnswerTokens, encode_batch
from finetune.data.turns import Dialogue
from finetune.inference.answers import Answer, AnswerReader, answer_text, json_equal, json_valid
from finetune.inference.evaluation import Dialogues
from tests.tiny import CHAT_TEMPLATES, tiny_tokenizer

CALL = {"name": "weather", "arguments": {"city": "Porto", "days": [1, 2]}}
QUESTION = {"role": "user", "content": "Hi"}
HERMES = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m.get('reasoning_content') %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
    "{{ m['content'] }}{% for c in m.get('tool_calls', []) %}{{ '<tool_call>\n' + c['function'] | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokens_with(template):
    tokenizer = tiny_tokenizer()
    if template == "phi4_mini":
        use_chat_template(tokenizer, template)
    else:
        tokenizer.chat_template = template
    return AnswerTokens(tokenizer)


def read(tokens, text):
    return AnswerReader(tokens).read(tokens.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("template", ["phi4_mini", HERMES])
@pytest.mark.parametrize("reasoning", ["", "I must look.\n\n{so}"])
@pytest.mark.parametrize(("content", "calls"), [("yes", ()), ("", (CALL,)), ("Wait.", (CALL, CALL)), ('{"a": 1}', ())])
def test_an_answer_that_the_template_rendered_is_read_back(template, reasoning, content, calls):
    tokens = tokens_with(template)
    turn = Answer(content, reasoning, content, calls).as_turn()
    prompt, whole = (
        tokens.template.render([Dialogue(turns, ())], with_prompt=has_prompt)[0]
        for turns, has_prompt in (((QUESTION,), True), ((QUESTION, turn), False))
    )
    found = read(tokens, whole.removeprefix(prompt).partition("<|end|>")[0])
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, calls)
    assert found.as_turn() == turn
    assert "think" not in found.text
    if calls:
        assert found.text == answer_text(turn), "what is scored has one form, whatever the template writes"
        assert json_equal(found.text, json.dumps(calls)) == json_valid(found.text, "") == 1


@pytest.mark.parametrize("template", ["phi4_mini", CHAT_TEMPLATES["phi4_mini"]])
def test_thinking_ends_at_its_mark_whatever_the_template_renders(template):
    found = read(tokens_with(template), '<think>\nso {"b": 2}\n</think>{"a": 1}')
    assert found.text == '{"a": 1}'
    assert found.reasoning.endswith('so {"b": 2}')


def test_thinking_that_never_ends_leaves_nothing_to_score():
    tokens = tokens_with("phi4_mini")
    assert read(tokens, "<think>\nyes or no") == Answer("", "yes or no")
    assert read(tokens, "yes or no").text == "yes or no"


@pytest.mark.parametrize("text", ["<tool_call>\nnot JSON\n</tool_call>", "<tool_call>\n[1]", '{"name": "a"}'])
def test_what_only_looks_like_a_call_is_text(text):
    found = read(tokens_with(HERMES), text)
    assert found.calls == ()
    assert found.content == found.text


def test_a_call_with_a_key_twice_or_with_text_after_it_is_not_equal_to_the_call():
    tokens = tokens_with(HERMES)
    once = '<tool_call>\n{"name": "a", "arguments": {"b": 1}}\n</tool_call>'
    assert json_equal(read(tokens, once).text, read(tokens, once).text) == 1
    twice = once.replace('"b": 1', '"b": 2, "b": 1')
    for other in (f"{once} Done.", f"{once}{once} Done.", f"{once} And {once}", twice):
        assert json_equal(read(tokens, other).text, read(tokens, once).text) == 0
    assert read(tokens, twice).problem.startswith("the call ")


def test_half_a_surrogate_pair_in_a_call_is_text_that_can_be_written():
    found = read(tokens_with(HERMES), '<tool_call>\n{"name": "a", "arguments": {"b": "\\ud800"}}\n</tool_call>')
    assert found.text.encode()
    assert json.loads(found.text) == list(found.calls)


BARE = HERMES.replace("'<tool_call>\n' + ", "").replace("'\n</tool_call>'", "''")


def test_without_marks_only_json_with_a_name_and_arguments_is_a_call():
    tokens = tokens_with(BARE)
    assert AnswerReader(tokens).call_marks == ("", "")
    for text in (
        '{"name": "Ana Silva", "city": "Porto"}',
        '{"name": "Ana Silva"}',
        '[{"name": "Ana", "arguments": 1, "a": 2}]',
    ):
        found = read(tokens, text)
        assert (found.calls, found.content) == ((), text)
        assert found.as_turn()["content"] == text
    for key in ("arguments", "parameters"):
        for more in ("", '"type": "function", ', '"id": "call00000", '):
            text = f'{{{more}"name": "a", "{key}": {{"b": 1}}}}'
            found = read(tokens, text)
            assert found.calls == ({"name": "a", "arguments": {"b": 1}},)
            assert found.text == text


def test_rows_are_scored_after_the_thinking():
    tokens = tokens_with("phi4_mini")
    answers = [{"content": "yes", "thinking": "It is."}, {"tool_calls": [{"function": CALL}]}]
    rows = [
        parse_row({"messages": [QUESTION, {"role": "assistant", **answer}]}, FORMATS["messages"], {})
        for answer in answers
    ]
    encoded = [(row.token_ids, row.is_target) for row in encode_batch(rows, tokens, "all")]
    examples = EncodedExamples.from_rows(encoded, end_id=tokens.end_id, row_type="messages")
    expected = Dialogues(examples, tokens.tokenizer).expected
    assert expected[0] == "yes"
    assert json.loads(expected[1]) == [CALL]
    assert expected == [answer_text(row.messages[1]) for row in rows]


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("style", ["phi4_mini", "phi3", "phi4", "chatml"])
def test_a_row_is_shown_by_its_last_turn_before_the_answer(style):
    tokenizer = tiny_tokenizer("phi4" if style == "chatml" else style)
    if style == "chatml":
        tokenizer.chat_template = CHATML
    tokens = AnswerTokens(tokenizer)
    turns = [{"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": "yes"}]
    row = parse_row({"messages": [*turns, {**QUESTION, "content": "And now?"}, turns[-1]]}, FORMATS["messages"], {})
    (encoded,) = encode_batch([row], tokens, "all")
    examples = EncodedExamples.from_rows(
        [(encoded.token_ids, encoded.is_target)], end_id=tokens.end_id, row_type="messages"
    )
    shown = Dialogues(examples, tokens.tokenizer)
    assert shown.last_turn(0) == "And now?"
    assert shown.context(0) == f"user: {QUESTION['content']}\nassistant: yes"
    assert shown.question(0) == QUESTION["content"]


def test_the_result_of_a_tool_is_shown_with_the_call_before_it_and_is_no_question():
    tokens = tokens_with("phi4_mini")
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
    turns = [QUESTION, call, {"role": "tool", "content": "three crates " * 20}, {"role": "tool", "content": "31"}]
    row = parse_row({"messages": [*turns, {"role": "assistant", "content": "yes"}]}, FORMATS["messages"], {})
    encoded = [(row.token_ids, row.is_target) for row in encode_batch([row], tokens, "all")]
    examples = EncodedExamples.from_rows(encoded, end_id=tokens.end_id, row_type="messages")
    shown = Dialogues(examples, tokens.tokenizer)
    assert (shown.last_turn(0), shown.question(0)) == ("31", QUESTION["content"])
    first, called, long = shown.context(0).splitlines()
    assert first == f"user: {QUESTION['content']}"
    assert CALL["name"] in called
    assert long.startswith("tool_response: three crates three")
    assert (len(long), long[-1]) == (100, "…")
