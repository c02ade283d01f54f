"""Read YAML files and the values of overrides into settings: key, value, and origin.

Values are null, booleans, numbers, text, lists and mappings only. The one tag of our own, ``!pyobject a.b.C``, reads as
a `DottedName`; nothing is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from finetune.limits import read_regular

MAX_FILE_BYTES = 1_000_000

COMMAND_LINE = "command line"
"""The origin of overrides that are arguments of the process."""
SCRIPT = "overrides"
"""The origin of overrides that a script gives."""
OVERRIDES = (COMMAND_LINE, SCRIPT)

_TAG = "tag:yaml.org,2002:"

PLAIN_VALUES = {
    f"{_TAG}{name}": (re.compile(f"^(?:{pattern})$"), list(first))
    for name, pattern, first in (
        ("bool", "yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
        ("int", "[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+)", "-+0123456789"),
        (
            "float",
            r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
            r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
            "-+.0123456789",
        ),
    )
} | {f"{_TAG}null": (re.compile("^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])}
"""For each tag the pattern of its unquoted text, and the characters that this text may begin with.

PyYAML's own table follows YAML 1.1: 1e-4 is text there, 1:30 ninety, 010 eight and 2025-01-15 a date.
"""


class DottedName(str):
    """The name in ``!pyobject a.b.C``, as text. Check the allow-list before resolving it."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value as it was written.

    Mappings are unfolded into one setting per key; only an empty mapping is a value (it clears its key).
    """

    key: tuple[str, ...]
    value: object
    origin: str
    """``configs/task/debug.yaml:4``, one of `OVERRIDES`, or with a path in place of a group ``…: data=chats.jsonl``."""
    text: str | None = None
    """The characters of an unquoted value. Keys that take text use them, so that a revision 12e7 stays text."""
    older_key: str | None = None
    """The key as it was written, if in an older spelling."""

    @property
    def dotted(self) -> str:
        """Return the key as an override names it: `training.max_steps`."""
        return ".".join(self.key)


Settings = dict[tuple[str, ...], Setting]
"""The setting that counts for each key. No key is above another one."""


def find_setting(chosen: Settings, dotted: str) -> Setting | None:
    """Return the setting at a key, or the first one below it."""
    key = tuple(dotted.split("."))
    return next((setting for other, setting in chosen.items() if other[: len(key)] == key), None)


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with `PLAIN_VALUES` for unquoted text, and without aliases, which unfold without end."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse an alias, or build the next node."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, "aliases (*name) are not read. Write the value out.", mark)
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first_characters) in PLAIN_VALUES.items():
    _Loader.add_implicit_resolver(_tag, _pattern, _first_characters)
_parse = lru_cache(maxsize=16)(lambda text: _Loader(text).get_single_node())
"""The nodes of a text, which nobody changes. A command reads the config.yaml of its run several times."""


def read_settings(path: Path, shown: str, problems: list[str]) -> list[Setting]:
    """Read all settings of a file that can be read. `shown` is its name in messages and origins.

    `problems` receives one line per problem, beginning with ``file:line``.
    """
    try:
        data = read_regular(path, most=MAX_FILE_BYTES, follows_links=True)
    except OSError as error:
        problems.append(f"{shown}: cannot be read ({error.strerror}). Expected a YAML file.")
        return []
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.append(f"{shown}:{line}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.")
        return []
    return _Reading(shown, problems).settings(text)


def read_value(
    key: Sequence[str], text: str, problems: list[str], *, as_text: bool, origin: str = COMMAND_LINE
) -> list[Setting]:
    """Read the value of an override: the text that follows the ``=``. `problems` receives its problems.

    With `as_text`, the key takes text. A value that is not valid YAML, such as ``*.jsonl``, is then taken as it is, and
    so is a value in which YAML would see a comment: ``runs/lora #2``.
    """
    own_problems: list[str] = []
    settings = _Reading(origin, own_problems, at=tuple(key)).settings(text)
    # A tag is never taken for text: `!!python/...` must be refused and `!pyobject ...` checked.
    is_read_whole = [s.key for s in settings] == [tuple(key)] and settings[0].text in (None, text.strip())
    if as_text and not text.startswith("!") and (own_problems or not is_read_whole):
        return [Setting(key=tuple(key), value=text, origin=origin, text=text)]
    if not settings and not own_problems:
        own_problems.append(f"{origin}: {'.'.join(key)}: has no value but a comment. Put the value in quotes.")
    problems.extend(own_problems)
    return settings


class _Reading:
    """The state of reading one document: its name in messages, and the keys seen."""

    def __init__(self, shown: str, problems: list[str], at: tuple[str, ...] = ()) -> None:
        self._shown = shown
        self._problems = problems
        self._at = at  # the override's key; empty for a file
        self._first_lines: dict[tuple[str, ...], int] = {}

    def settings(self, text: str) -> list[Setting]:
        try:
            root = (_parse if len(text) < 1 << 15 else _parse.__wrapped__)(text)  # a large one is not kept
            if root is None or (not self._at and root.tag == f"{_TAG}null"):
                return []
            if self._at or isinstance(root, yaml.MappingNode):
                return self._unfold(root, self._at, root)
            self._problem(root, (), "expected `key: value` lines")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            problem = ", ".join(part for part in (error.context, error.problem) if part)
            self._report(mark.line if mark else 0, self._at, f"not valid YAML: {problem}")
        except yaml.reader.ReaderError as error:
            self._report(text.count("\n", 0, error.position), (), f"a character that YAML forbids ({error.reason})")
        except RecursionError:
            self._problems.append(f"{self._shown}: nested too deeply")
        return []

    def _unfold(self, node: yaml.Node, key: tuple[str, ...], place: yaml.Node) -> list[Setting]:
        """Return one setting per leaf below a node, which begins on the line of `place`; a list is a leaf."""
        if isinstance(node, yaml.MappingNode) and (node.value or not key):
            entries = self._entries(node, key, self._first_lines)
            return [setting for name, below, value in entries for setting in self._unfold(value, below, name)]
        text = node.value if isinstance(node, yaml.ScalarNode) and not node.style else None
        return [Setting(key=key, value=self._value(node, key), origin=self._origin(place.start_mark.line), text=text)]

    def _entries(
        self, node: yaml.MappingNode, above: tuple[str, ...], first_lines: dict[tuple[str, ...], int]
    ) -> Iterator[tuple[yaml.Node, tuple[str, ...], yaml.Node]]:
        """Yield the node of each key, the whole key, and the node of its value. Refuse repeated keys.

        A key is text as written, even 0 and on. Below another key it may be "", the name of a whole model in a device
        map. `first_lines` maps the keys seen before to their lines.
        """
        for name, value in node.value if self._has_no_tag(node, above) else ():
            is_text = isinstance(name, yaml.ScalarNode) and name.tag.startswith(_TAG)
            if not is_text or not (name.value or (above and name.style)):
                self._problem(name, above, "a key must be text")
                continue
            if name.value == "<<" and not name.style:
                self._problem(name, above, "merge keys (<<) are not read. Write the keys out.")
                continue
            # At the top of a file `data.max_length: 512` is one key of a section, as on the command line.
            key = (*above, name.value) if above else tuple(name.value.split("."))
            if key in first_lines:
                lines = f", first on line {first_lines[key]}, again on line {name.start_mark.line + 1}"
                self._problem(name, key, f"given twice{'' if self._at else lines}. Keep one of the two.")
                continue
            first_lines[key] = name.start_mark.line + 1
            yield name, key, value

    def _value(self, node: yaml.Node, key: tuple[str, ...]) -> object:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key)
        if isinstance(node, yaml.MappingNode):  # inside a list
            return {below[-1]: self._value(value, key) for _, below, value in self._entries(node, key, {})}
        return [self._value(item, key) for item in node.value] if self._has_no_tag(node, key) else None

    def _scalar(self, node: yaml.ScalarNode, key: tuple[str, ...]) -> object:
        text, tag = node.value, node.tag.removeprefix(_TAG)
        if tag == "!pyobject":
            if all(part.isidentifier() for part in text.split(".")):
                return DottedName(text)
            self._problem(node, key, f"expected !pyobject package.Name, got '{text}'")
        elif tag in _READERS:
            try:
                return _READERS[tag](text)
            except ValueError:
                self._problem(node, key, f"{text[:40]!r} is not a number that can be read")
        else:
            self._refuse_tag(node, key)
        return None

    def _has_no_tag(self, node: yaml.Node, key: tuple[str, ...]) -> bool:
        """Return whether a mapping or a list is without a tag. Note a problem if it has one."""
        if node.tag in (f"{_TAG}map", f"{_TAG}seq"):
            return True
        self._refuse_tag(node, key)
        return False

    def _refuse_tag(self, node: yaml.Node, key: tuple[str, ...]) -> None:
        self._problem(node, key, f"the tag {node.tag.replace(_TAG, '!!')} is refused. A config may use only !pyobject.")

    def _problem(self, node: yaml.Node, key: tuple[str, ...], message: str) -> None:
        self._report(node.start_mark.line, key, message)

    def _report(self, line: int, key: tuple[str, ...], message: str) -> None:
        self._problems.append(": ".join(filter(None, (self._origin(line), ".".join(key), message))))

    def _origin(self, line: int) -> str:
        return self._shown if self._at else f"{self._shown}:{line + 1}"


_READERS: dict[str, Callable[[str], object]] = {
    "str": str,
    "null": lambda _: None,
    "bool": lambda text: text.lower() in ("yes", "true", "on"),
    "int": lambda text: int(text, 0),
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}
"""The reader of each plain type; those of numbers raise ValueError."""
