"""Evaluate the part of Go's template language that our Modelfiles use.

Language: https://pkg.go.dev/text/template. `{{ range .Messages }}`, `{{ if eq .Role "x" }}`, `else if`, `end`,
`{{ .Content }}` and quoted strings; anything else is an error. Where Go is installed, a test compares this with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

Token = tuple[str, str]
_ACTION = re.compile(r"\{\{ (.*?) \}\}", re.DOTALL)


def render_go(template: str, messages: list[dict[str, str]]) -> str:
    return "".join(_run(list(_tokens(template)), messages, None))


def _tokens(template: str) -> Iterator[Token]:
    position = 0
    for action in _ACTION.finditer(template):
        yield "text", template[position : action.start()]
        yield "action", action[1]
        position = action.end()
    assert "{{" not in template[position:]
    yield "text", template[position:]


def _run(tokens: list[Token], messages: list[dict[str, str]], message: dict[str, str] | None) -> list[str]:
    out: list[str] = []
    rest = iter(tokens)
    for kind, value in rest:
        if kind == "text":
            out.append(value)
        elif value == "range .Messages":
            body = _until_end(rest)
            for each in messages:
                out += _run(body, messages, each)
        elif found := re.fullmatch(r'if eq \.Role "(\w+)"', value):
            out += _run(_chosen(found[1], _until_end(rest), message["role"]), messages, message)
        elif value == ".Content":
            out.append(message["content"])
        else:
            assert value.startswith('"'), f"{{{{ {value} }}}} is not in the subset"
            out.append(json.loads(value))
    return out


def _until_end(tokens: Iterator[Token]) -> list[Token]:
    depth, body = 1, []
    for token in tokens:
        kind, value = token
        depth += kind == "action" and value.startswith(("if ", "range "))
        depth -= token == ("action", "end")
        if depth == 0:
            return body
        body.append(token)
    raise AssertionError("a block without `end`")


def _chosen(first_role: str, body: list[Token], role: str) -> list[Token]:
    """The branch of a role; none of ours has another `if` inside."""
    branches: list[tuple[str, list[Token]]] = [(first_role, [])]
    for token in body:
        found = re.fullmatch(r'else if eq \.Role "(\w+)"', token[1]) if token[0] == "action" else None
        if found:
            branches.append((found[1], []))
        else:
            branches[-1][1].append(token)
    return next((inside for name, inside in branches if name == role), [])
