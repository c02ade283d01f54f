"""Make the reference of the configuration: every key with its type, default and meaning."""

from __future__ import annotations

from typing import Any

from finetune.config.schema import Config

_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_INTRODUCTION = """# Configuration

This page lists every key. Set a key in a YAML file (`optim: {learning_rate: 1e-4}`) or on the command line
(`optim.learning_rate=1e-4`). Later settings override earlier ones: defaults, run file, groups (`model=phi4`),
arguments. Unknown keys and values of another type are refused, all of them at once. A warning names the keys that other
keys, the rows or the number of processes leave without effect. `finetune config show …` prints the values of a run and
where each came from, `finetune config schema` prints this reference as JSON Schema, for editors.

`model=` takes a name from `configs/model`, a folder or a hub id (`model=phi4`, `model=./my-phi`,
`model=microsoft/phi-4`), and `data=` a name from `configs/data`, a file, a folder or a hub id. A path or hub id sets
`model.path` or `data.path`. It has a slash, or it is a file or folder that exists; a hub id without a slash goes into
`model.path=` or `data.path=`. A name in `configs/` wins over a file of the same name, and `./name` is always a path.
A file that ends in `.yaml` or `.yml` is read as a config. The same holds in a run file (`data: chats.jsonl`). On the
command line a file of rows needs no key: `finetune train chats.jsonl model=phi4`. A command without a run file has
`task=finetune_lora` unless it names another task; a run file says all itself.

`finetune init` asks for model, data and the run's folder, and writes a run file with what they set; with `--full`, it
has every key of this page. In a pipe `finetune init` prints the file. `finetune init --from FILE`
[translates a file of another tool](../tasks/coming-from.md).

This page is made from `finetune/config/schema.py`.
"""


def configuration_page() -> str:
    """Return the page as markdown."""
    schema = Config.model_json_schema()
    sections = {key: value for key, value in schema["properties"].items() if "$ref" in value}
    own = {key: value for key, value in schema["properties"].items() if key not in sections}
    parts = [_INTRODUCTION, "## Top level\n", *_table(own, "")]
    for name, reference in sections.items():
        section = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        meaning = section.get("description", "").split("\n\n")[0].replace("\n", " ")
        parts += [f"\n## {name}\n", f"{meaning}\n", *_table(section["properties"], f"{name}.")]
    return "\n".join(parts) + "\n"


def _table(properties: dict[str, dict[str, Any]], prefix: str) -> list[str]:
    rows = [
        f"| <span id='{prefix}{name}'></span>`{prefix}{name}` | {_type_in_words(value)} | {_default(value)} | "
        f"{_cell(value['description'])} |"
        for name, value in properties.items()
    ]
    return ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]


def _type_in_words(value: dict[str, Any]) -> str:
    """Describe a JSON Schema type: `whole number above 0, or null`."""
    if "anyOf" in value:
        return ", or ".join(_type_in_words(choice) for choice in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        return f"list of {_type_in_words(value['items'])}"
    if value.get("type") == "object":
        return "mapping"
    bounds = [
        f"{words} {'2⁶³' if value[bound] == 2**63 else value[bound]}"
        for bound, words in _BOUNDS.items()
        if bound in value
    ]
    return " ".join([_KINDS[value["type"]], " and ".join(bounds)]).strip()


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    if default is None:
        return "`null`" if "default" in value else "empty"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
