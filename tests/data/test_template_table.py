"""The table of docs/data.md: what the templates of the Phi family render.

FINETUNE_WRITE_TABLES=1 pytest tests/data/test_template_table.py
"""

from __future__ import annotations

import json
import os

from finetune.data.chat_template import ChatTemplate, use_chat_template
from finetune.data.formats import FORMATS, parse_row
from finetune.data.templates import AnswerTokens, encode_batch
from finetune.data.turns import Turn, parse_turns
from finetune.data.values import BadRowError
from tests.launches import REPOSITORY
from tests.model.test_variants import GOLDEN
from tests.model.variants import VARIANTS

_PAGE = REPOSITORY / "docs" / "data.md"
_BEGIN, _END = "<!-- table: keys that templates render -->", "<!-- end of table -->"
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_ANSWER: Turn = {"role": "assistant", "content": "yes"}
_USER: Turn = {"role": "user", "content": "Hi"}
_TOOLS = [{"type": "function", "function": {"name": "f"}}]
_COLUMNS: dict[str, list[Turn]] = {
    "`tools`": [_USER, _ANSWER],
    "`tool_calls`": [_USER, {**_ANSWER, "tool_calls": [_CALL]}],
    "thinking": [_USER, {**_ANSWER, "thinking": "so"}],
    "role tool": [_USER, _ANSWER, {"role": "tool", "content": "42"}, _ANSWER],
    "role developer": [{"role": "developer", "content": "Be brief."}, _USER, _ANSWER],
}


def cell(tokens: AnswerTokens, column: str) -> str:
    tools = _TOOLS if column == "`tools`" else None
    if tokens.template.ignored(parse_turns(_COLUMNS[column], "messages", tools)):
        return ""
    row = parse_row({"messages": _COLUMNS[column], "tools": tools}, FORMATS["messages"], {})
    (encoded,) = encode_batch([row], tokens, "all")
    return "" if isinstance(encoded, BadRowError) else "rendered"


def table() -> str:
    names: dict[tuple[str, ...], list[str]] = {}
    for name, variant in VARIANTS.items():
        tokenizer = variant.tokenizer()
        if tokenizer.chat_template is not None:
            tokens = AnswerTokens(tokenizer)
            names.setdefault(tuple(cell(tokens, column) for column in _COLUMNS), []).append(name)
    rows = [["; ".join(alike), *cells] for cells, alike in names.items()]
    tokenizer = VARIANTS["Phi-4-mini"].tokenizer()
    use_chat_template(tokenizer, "phi4_mini")
    tokens = AnswerTokens(tokenizer)
    rows.append(["`data.chat_template=phi4_mini`", *(cell(tokens, column) for column in _COLUMNS)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (["template", *_COLUMNS], ["---"] * 6, *rows))


def test_the_table_says_what_each_template_renders():
    before, _, rest = _PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    there, _, after = rest.partition(_END)
    if os.environ.get("FINETUNE_WRITE_TABLES"):
        _PAGE.write_text(f"{before}{_BEGIN}\n{table()}\n{_END}{after}", encoding="utf-8")
        return
    assert there.strip() == table(), "docs/data.md is out of date; write it with FINETUNE_WRITE_TABLES=1"


def test_the_training_template_of_phi_4_mini_gives_its_golden_ids():
    tokenizer = VARIANTS["Phi-4-mini"].tokenizer()
    use_chat_template(tokenizer, "phi4_mini")
    turns = [
        _USER,
        {"role": "assistant", "content": None, "thinking": "no", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        _ANSWER,
    ]
    row = parse_row({"messages": turns, "tools": _TOOLS}, FORMATS["messages"], {})
    (encoded,) = encode_batch([row], AnswerTokens(tokenizer), "all")
    assert not isinstance(encoded, BadRowError)
    golden = GOLDEN["Phi-4-mini, data.chat_template=phi4_mini"]
    assert tokenizer.convert_ids_to_tokens(encoded.token_ids) == golden["tokens"].split(" ")
    assert " ".join(map(str, encoded.token_ids)) == golden["ids"]
    assert "".join(map(str, encoded.is_target)) == golden["targets"]


def test_without_calls_and_thinking_it_renders_what_the_models_own_template_does():
    tokenizer = VARIANTS["Phi-4-mini"].tokenizer()
    dialogue = parse_turns(
        [{"role": "system", "content": "Be brief.", "tools": json.dumps([{"name": "f"}])}, _USER], "m"
    )
    (own,) = ChatTemplate(tokenizer).render([dialogue], with_prompt=True)
    use_chat_template(tokenizer, "phi4_mini")
    (ours,) = ChatTemplate(tokenizer).render([dialogue], with_prompt=True)
    assert ours == own


def test_phi_tiny_has_this_template():
    shipped = REPOSITORY / "finetune/data/chat_templates/phi4_mini.jinja"
    assert (REPOSITORY / "finetune/assets/phi_tiny/chat_template.jinja").read_text() == shipped.read_text()
