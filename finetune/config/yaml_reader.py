"""Read YAML files and the values of overrides into settings: key, value, and origin.

Values are null, booleans, numbers, text, lists and mappings only. The one tag of our own, ``!pyobject a.b.C``, reads as
a `DottedName`; nothing is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

MAX_FILE_BYTES = 1_000_000

COMMAND_LINE = "command line"
"""The origin of settings from overrides."""

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
    """``configs/task/debug.yaml:4``, ``command line``, or with a path in place of a group ``…: data=chats.jsonl``."""
    text: str | None = None
    """The characters of an unquoted value. Keys that take text use them, so that a revision 12e7 stays text."""
    older_key: str | None = None
    """The key as it was written, if in an older spelling."""

    @property
    def dotted(self) -> str:
        """The key as an override names it: `training.max_steps`."""
        return ".".join(self.key)


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


def read_settings(path: Path, shown: str, problems: list[str]) -> list[Setting]:
    """Read all settings of a file that can be read. `shown` is its name in messages and origins.

    `problems` receives one line per problem, beginning with ``file:line``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        problems.append(f"{shown}: cannot be read ({error.strerror}). Expected a YAML file.")
        return []
    if len(data) > MAX_FILE_BYTES:
        problems.append(f"{shown}: larger than {MAX_FILE_BYTES:,} bytes, which no config is.")
        return []
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.append(f"{shown}:{line}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.")
        return []
    return _Reading(shown, problems).settings(text)


def read_value(key: Sequence[str], text: str, problems: list[str], *, as_text: bool) -> list[Setting]:
    """Read the value of an override: the text that follows the ``=``. `problems` receives its problems.

    With `as_text`, the key takes text. A value that is not valid YAML, such as ``*.jsonl``, is then taken as it is.
    """
    found: list[str] = []
    settings = _Reading(COMMAND_LINE, found, at=tuple(key)).settings(text)
    # A tag is never taken for text: `!!python/...` must be refused and `!pyobject ...` checked.
    if as_text and not text.startswith("!") and (found or [s.key for s in settings] != [tuple(key)]):
        return [Setting(key=tuple(key), value=text, origin=COMMAND_LINE, text=text)]
    if not settings and not found:
        found.append(f"{COMMAND_LINE}: {'.'.join(key)}: has no value but a comment. Put the value in quotes.")
    problems.extend(found)
    return settings


class _Reading:
    """The state of reading one document: its name in messages, and the keys seen."""

    def __init__(self, shown: str, problems: list[str], at: tuple[str, ...] | None = None) -> None:
        self._shown = shown
        self._problems = problems
        self._at = at  # the override's key; None for a file
        self._first_lines: dict[tuple[str, ...], int] = {}

    def settings(self, text: str) -> list[Setting]:
        try:
            root = _Loader(text).get_single_node()
            if root is None or (self._at is None and root.tag == f"{_TAG}null"):
                return []
            if self._at is None and not isinstance(root, yaml.MappingNode):
                self._problem(root, (), "expected `key: value` lines")
                return []
            return self._unfold(root, self._at or (), self._origin(root))
        except yaml.MarkedYAMLError as error:
            self._syntax_problem(error)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self._problems.append(f"{self._place(line)}: a character that YAML forbids ({error.reason})")
        except RecursionError:
            self._problems.append(f"{self._shown}: nested too deeply")
        return []

    def _unfold(self, node: yaml.Node, key: tuple[str, ...], origin: str) -> list[Setting]:
        """Return one setting per leaf below ``node``; a list is a leaf."""
        if isinstance(node, yaml.MappingNode) and node.value:
            if not self._is_plain(node, key):
                return []
            settings = []
            for key_node, value_node in node.value:
                below = self._key(key_node, key)
                if below is not None and self._is_first(key_node, below):
                    settings += self._unfold(value_node, below, self._origin(key_node))
            return settings
        value = self._plain(node, key)
        is_unquoted = isinstance(node, yaml.ScalarNode) and not node.style
        return [Setting(key=key, value=value, origin=origin, text=node.value if is_unquoted else None)]

    def _plain(self, node: yaml.Node, key: tuple[str, ...]) -> object:
        """Convert a node to Python's own types."""
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key)
        if not self._is_plain(node, key):
            return None
        if not isinstance(node, yaml.MappingNode):
            return [self._plain(item, key) for item in node.value]
        values: dict[str, object] = {}  # a mapping inside a list, which has no dotted key of its own
        for key_node, value_node in node.value:
            below = self._key(key_node, key)
            if below is None:
                continue
            if below[-1] in values:
                self._problem(key_node, below, "given twice in one mapping. Keep one of the two.")
            values[below[-1]] = self._plain(value_node, key)
        return values

    def _scalar(self, node: yaml.ScalarNode, key: tuple[str, ...]) -> object:
        text, tag = node.value, node.tag.removeprefix(_TAG)
        if tag == "str":
            return text
        if tag == "!pyobject":
            if all(part.isidentifier() for part in text.split(".")):
                return DottedName(text)
            self._problem(node, key, f"expected !pyobject package.Name, got '{text}'")
            return None
        if tag not in _READERS:
            self._refuse_tag(node, key)
            return None
        try:
            return _READERS[tag](text)
        except ValueError:
            self._problem(node, key, f"{text[:40]!r} is not a number that can be read")
        return None

    def _is_plain(self, node: yaml.Node, key: tuple[str, ...]) -> bool:
        """Whether a mapping or a list has no tag of its own. A tag is refused."""
        if node.tag in (_TAG + "map", _TAG + "seq"):
            return True
        self._refuse_tag(node, key)
        return False

    def _key(self, node: yaml.Node, above: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the whole key, or None if the node cannot be a key. Keys are text as written, also 0 and on."""
        if not isinstance(node, yaml.ScalarNode) or not node.tag.startswith(_TAG) or not node.value:
            self._problem(node, above, "a key must be text")
            return None
        if node.value == "<<" and not node.style:
            self._problem(node, above, "merge keys (<<) are not read. Write the keys out.")
            return None
        # At the top of a file `data.max_length: 512` is one key of a section, as on the command line.
        return (*above, *node.value.split(".")) if not above else (*above, node.value)

    def _is_first(self, node: yaml.Node, key: tuple[str, ...]) -> bool:
        line = node.start_mark.line + 1
        if key not in self._first_lines:
            self._first_lines[key] = line
            return True
        first = self._first_lines[key]
        where = "" if self._at is not None else f", first on line {first}, again on line {line}"
        self._problem(node, key, f"given twice{where}. Keep one of the two.")
        return False

    def _refuse_tag(self, node: yaml.Node, key: tuple[str, ...]) -> None:
        tag = node.tag.replace(_TAG, "!!")
        self._problem(node, key, f"the tag {tag} is refused. A config may use only !pyobject.")

    def _syntax_problem(self, error: yaml.MarkedYAMLError) -> None:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark else 1
        key = f" {'.'.join(self._at)}:" if self._at else ""
        self._problems.append(f"{self._place(line)}:{key} not valid YAML: {what}")

    def _problem(self, node: yaml.Node, key: tuple[str, ...], message: str) -> None:
        self._problems.append(": ".join(part for part in (self._origin(node), ".".join(key), message) if part))

    def _origin(self, node: yaml.Node) -> str:
        return self._place(node.start_mark.line + 1)

    def _place(self, line: int) -> str:
        return self._shown if self._at is not None else f"{self._shown}:{line}"


_READERS: dict[str, Callable[[str], object]] = {
    "null": lambda _: None,
    "bool": lambda text: text.lower() in ("yes", "true", "on"),
    "int": lambda text: int(text, 0),
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}
"""The reader of each plain type; those of numbers raise ValueError."""
