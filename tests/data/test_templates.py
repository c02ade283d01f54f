from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from finetune.data.chat_template import ChatTemplate
from finetune.data.formats import Example
from finetune.data.templates import (
    AnswerTokens,
    TokenisedRow,
    encode_batch,
    end_of_turn_ids,
    mark_targets,
    render_dialogues,
    stop_ids,
    tokenize,
)
from finetune.data.turns import dialogue_of
from finetune.data.values import BadRowError
from finetune.errors import DataError
from tests.tiny import CHAT_TEMPLATES, Style, add_default_bos, tiny_tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "no"},
]

# Worked out by hand from the templates. <|end|> and <|im_end|> are 321, <|endoftext|> is 320, "yes" is 88 259, "no" is
# 310. The line breaks of Phi-3's template are inside its special tokens, so its ids are those of Phi-4-mini.
PHI_MINI = (
    "322 33 68 220 65 81 72 68 69 13 321 323 39 72 321 324 88 259 321 323 32 77 67 30 321 324 310 321 320",
    "0000000000000000" + "111" + "0000000" + "11" + "0",
)
GOLDEN: dict[Style, tuple[str, str]] = {
    "phi4_mini": PHI_MINI,
    "phi3": PHI_MINI,
    "phi4": (
        "322 315 314 273 323 33 68 220 65 81 72 68 69 13 321 322 280 261 323 39 72 321 322 270 316 318 323 88 259 321 "
        "322 280 261 323 32 77 67 30 321 322 270 316 318 323 310 321",
        "0000000000000000000000" + "00000" + "111" + "000000000" + "00000" + "11",
    ),
}


def encode(tokenizer: PreTrainedTokenizerFast, turns: list[dict[str, str]]) -> TokenisedRow | BadRowError:
    (row,) = render_dialogues(ChatTemplate(tokenizer), [dialogue_of(turns)])
    if isinstance(row, BadRowError):
        return row
    return mark_targets(row, tokenize(tokenizer, [row.text])[0], AnswerTokens(tokenizer))


def targets(tokenizer: PreTrainedTokenizerFast, turns: list[dict[str, str]]) -> str:
    row = encode(tokenizer, turns)
    assert isinstance(row, TokenisedRow), row
    return "".join(
        token
        for token, is_target in zip(tokenizer.convert_ids_to_tokens(row.token_ids), row.is_target, strict=True)
        if is_target
    )


@pytest.mark.parametrize("style", list(GOLDEN))
def test_tokens_and_targets_of_a_conversation(style):
    tokenizer = tiny_tokenizer(style)
    row = encode(tokenizer, CONVERSATION)
    assert isinstance(row, TokenisedRow)
    token_ids, is_target = GOLDEN[style]
    assert " ".join(map(str, row.token_ids)) == token_ids
    assert "".join(map(str, row.is_target)) == is_target
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert row.token_ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    prompt = tokenizer.apply_chat_template(CONVERSATION[:-1], tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert row.token_ids[: len(prompt_ids)] == prompt_ids
    assert list(row.is_target[len(prompt_ids) :])[:2] == [1, 1]


@pytest.mark.parametrize(
    ("style", "end"), [("phi4_mini", "<|end|>"), ("phi3", "<|end|>"), ("phi4", "<|im_end|>"), ("none", "<|endoftext|>")]
)
def test_end_of_turn_comes_from_the_template_and_is_first_among_stop_ids(style, end):
    tokenizer = tiny_tokenizer(style)
    end_id = tokenizer.convert_tokens_to_ids(end)
    assert end_of_turn_ids(tokenizer) == (end_id, end_id)
    assert stop_ids(tokenizer, [7, end_id]) == list(dict.fromkeys([end_id, tokenizer.eos_token_id, 7]))
    assert stop_ids(tokenizer, 9)[-1] == 9
    assert stop_ids(tokenizer)[0] == end_id


def test_end_of_turn_is_trained_where_it_is_also_eos_and_pad():
    tokenizer = tiny_tokenizer("phi4_mini")
    tokenizer.eos_token = tokenizer.pad_token = "<|end|>"
    assert targets(tokenizer, CONVERSATION) == "yes<|end|>no<|end|>"


def test_a_template_that_marks_its_answers_gives_the_same_targets():
    tokenizer = tiny_tokenizer("phi4_mini")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    assert targets(tokenizer, CONVERSATION) == "yes<|end|>no<|end|>"


# As Olmo-3-7B-Instruct's: a default system turn, and eos instead of <|im_end|> after the last answer.
OLMO3 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou have no functions.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' and loop.last else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("first", [0, 1])
def test_an_earlier_answer_ends_with_the_token_of_all_turns_but_the_last(first):
    tokenizer = tiny_tokenizer("phi4")
    tokenizer.chat_template = OLMO3
    assert targets(tokenizer, CONVERSATION[first:]) == "yes<|im_end|>no<|endoftext|>"
    end_ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert list(end_of_turn_ids(tokenizer)) == stop_ids(tokenizer) == end_ids


@pytest.mark.parametrize(
    "end",
    [
        "'<|end|>' if m['role'] == 'assistant' else ''",  # a token that only answers have
        "'<|end|>' if m['role'] == 'user' else ''",  # an earlier answer has no end
        "''",
    ],
)
def test_a_turn_that_follows_an_answer_without_a_known_end_is_never_learnt(end):
    tokenizer = tiny_tokenizer("phi4_mini")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
        f"{{{{ eos_token if loop.last and not add_generation_prompt else ({end}) }}}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    problem = encode(tokenizer, CONVERSATION)
    assert isinstance(problem, BadRowError)
    assert "does not end the answer 'yes<|" in str(problem)
    assert "data.train_on=each_turn (or last)" in str(problem)
    assert targets(tokenizer, CONVERSATION[:3]) == "yes<|endoftext|>"
    (row,) = render_dialogues(ChatTemplate(tokenizer), [dialogue_of(CONVERSATION)._replace(learnt=(2,))])
    assert not isinstance(row, BadRowError)
    problem = mark_targets(row, tokenize(tokenizer, [row.text])[0], AnswerTokens(tokenizer))
    assert isinstance(problem, BadRowError), "the last answer carries no loss"


def test_a_tool_result_after_a_call_without_end_is_never_learnt():
    tokenizer = tiny_tokenizer("phi4_mini")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if m['tool_calls'] %}"
        "{{ m['tool_calls'] | tojson }}{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": {"city": "Porto"}}}
    called = [CONVERSATION[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    problem = encode(tokenizer, [*called, {"role": "tool", "content": "Porto"}, CONVERSATION[4]])
    assert "a turn follows it, which would be learnt too" in str(problem)
    ended = tokenizer.chat_template.replace("tojson }}", "tojson }}{{ '<|end|>' }}")
    tokenizer.chat_template = ended
    row = targets(tokenizer, [*called, {"role": "tool", "content": "Porto"}, CONVERSATION[4]])
    assert row.count("<|end|>") == 2
    assert row.endswith("}]<|end|>no<|end|>")


def test_an_answer_that_begins_with_special_tokens_is_learnt_to_its_end():
    tokenizer = tiny_tokenizer("phi4")  # as gpt-oss: <|im_sep|> is its <|message|>, <|im_end|> its <|end|>
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['thinking'] and loop.last %}"
        "{{ '<|im_start|>assistant<|im_sep|>' + m['thinking'] + '<|im_end|>' }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] }}"
        "{{ eos_token if loop.last and m['role'] == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    assert targets(tokenizer, CONVERSATION[:3]) == "<|im_sep|>yes<|endoftext|>"
    # Thinking ends with <|im_end|>, so generation must not stop there.
    assert stop_ids(tokenizer) == tokenizer.convert_tokens_to_ids(["<|endoftext|>"])
    assert "data.train_on=each_turn" in str(encode(tokenizer, CONVERSATION))


def test_white_space_that_a_special_token_swallows_is_not_part_of_the_answer():
    turns = [CONVERSATION[1], {"role": "assistant", "content": "  \n yes"}]
    assert targets(tiny_tokenizer("phi3"), turns) == "yes<|end|>"
    assert targets(tiny_tokenizer("phi4"), turns) == "ĠĠĊĠyes<|im_end|>"


def test_an_answer_whose_first_character_takes_several_tokens_is_a_target_from_the_first():
    tokenizer = tiny_tokenizer("phi4")
    turns = [CONVERSATION[1], {"role": "assistant", "content": "🍊"}]
    row = encode(tokenizer, turns)
    assert isinstance(row, TokenisedRow)
    answer = [i for i, is_target in zip(row.token_ids, row.is_target, strict=True) if is_target]
    assert len(answer) == 5
    assert tokenizer.decode(answer) == "🍊<|im_end|>"


def test_a_token_that_holds_the_end_of_the_prompt_and_the_start_of_the_answer_is_a_target():
    tokenizer = tiny_tokenizer("phi4_mini")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% else %}{{ '; ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    assert targets(tokenizer, [CONVERSATION[1], {"role": "assistant", "content": "the"}]) == "Ġthe<|end|>"


def test_an_assistant_may_begin_where_the_template_lets_it():
    turns = [{"role": "assistant", "content": "Hi"}, *CONVERSATION[1:3]]
    assert targets(tiny_tokenizer("phi4"), turns) == "Hi<|im_end|>yes<|im_end|>"
    refusing = tiny_tokenizer("phi4")
    refusing.chat_template = (
        "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('a user must begin') }}{% endif %}"
        + CHAT_TEMPLATES["phi4"]
    )
    good, bad = render_dialogues(ChatTemplate(refusing), [dialogue_of(CONVERSATION), dialogue_of(turns)])
    assert not isinstance(good, BadRowError)
    assert isinstance(bad, BadRowError)
    assert "the chat template refuses the row: a user must begin" in str(bad)


def test_a_turn_that_the_template_leaves_out_is_a_problem():
    turns = [CONVERSATION[1], {"role": "tool", "content": "42"}, CONVERSATION[2]]
    assert targets(tiny_tokenizer("phi4_mini"), turns) == "yes<|end|>"
    problem = encode(tiny_tokenizer("phi3"), turns)
    assert isinstance(problem, BadRowError)
    assert "leaves out messages[1].content (role tool)" in str(problem)


def test_a_template_that_rewrites_earlier_turns_is_a_problem():
    tokenizer = tiny_tokenizer("phi4")
    tokenizer.chat_template = "{{ messages | length }} turns: " + CHAT_TEMPLATES["phi4"]
    (row,) = render_dialogues(ChatTemplate(tokenizer), [dialogue_of(CONVERSATION)])
    assert isinstance(row, BadRowError)
    assert "renders turns differently once an answer follows" in str(row)
    with pytest.raises(DataError, match=r"chat template cannot be used: .* renders turns differently"):
        AnswerTokens(tokenizer)


@pytest.mark.parametrize(
    "example",
    [
        Example("text", text="the answer"),
        Example("text", text="<s>the answer"),
        Example("text", text="None the answer"),
        Example("prompt_completion", prompt="the", completion=" answer"),
    ],
)
def test_what_no_template_renders_begins_as_the_tokenizer_begins_any_text(example):
    tokenizer = tiny_tokenizer("none")
    written = f"{example.text or example.prompt + example.completion}<|endoftext|>"
    (row,) = encode_batch([example], AnswerTokens(tokenizer), "all")
    assert row.token_ids == tokenizer(written)["input_ids"]
    text = written.removeprefix("<s>")
    plain = tokenizer(text)["input_ids"]
    add_default_bos(tokenizer)
    (row,) = encode_batch([example], AnswerTokens(tokenizer), "all")
    assert row.token_ids == tokenizer(text)["input_ids"] == [tokenizer.bos_token_id, *plain]
    first = 1 if example.row_type == "text" else len(tokenizer("the")["input_ids"])
    assert list(row.is_target) == [int(place >= first) for place in range(len(row.token_ids))]


def test_a_result_of_a_tool_that_a_template_writes_as_json_is_found():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}Result: {{ m['content'] | tojson }}\n"
        "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    result = {"role": "tool", "content": 'He said "no"\nand left'}
    assert targets(tokenizer, [CONVERSATION[1], result, CONVERSATION[2]]) == "yes<|end|>"


def test_the_first_token_carries_no_loss_though_the_answer_begins_with_it():
    tokenizer = tiny_tokenizer("none")
    (row,) = encode_batch([Example("prompt_completion", completion="yes")], AnswerTokens(tokenizer), "all")
    assert list(row.is_target) == [0] + [1] * (len(row.token_ids) - 1)


def test_what_a_template_renders_gets_no_token_in_front():
    tokenizer = tiny_tokenizer()
    example = Example("prompt_completion", prompt="Hi", completion="yes")
    (plain,) = encode_batch([example], AnswerTokens(tokenizer), "all")
    add_default_bos(tokenizer)
    (row,) = encode_batch([example], AnswerTokens(tokenizer), "all")
    assert row.token_ids == plain.token_ids


def test_a_template_without_an_end_is_refused():
    tokenizer = tiny_tokenizer("none")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    with pytest.raises(DataError, match="ends an answer with no special token"):
        end_of_turn_ids(tokenizer)


def test_a_tokenizer_without_template_and_eos_is_refused():
    tokenizer = tiny_tokenizer("none")
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no chat template and no eos token"):
        end_of_turn_ids(tokenizer)


def test_removing_a_special_token_does_not_spell_another_one():
    tokens = AnswerTokens(tiny_tokenizer("phi4_mini"))
    assert tokens.without_special_text("a<|e<|end|>nd|>b<|end|>") == "ab"
    nested = "<|e" * 20_000 + "<|end|>" + "nd|>" * 20_000
    assert tokens.without_special_text(nested) == ""
