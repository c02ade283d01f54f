"""Metrics that compare a generated answer with the expected one: built-in metrics and the user's own.

Security: a metric is code. A name is looked up in `METRICS`, or in a module that the command line allows with
`--metrics-from`, never in one that only a configuration, a run's folder or a data set names. The module must be
installed: a file in the current folder, which may have been downloaded, is not imported.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from finetune.config.keys import did_you_mean
from finetune.errors import ConfigError, DataError

Metric = Callable[[str, str], float]
"""(generated answer, expected answer) to a number. The score of a model is the mean over the rows."""
Function = TypeVar("Function", bound=Callable[..., Any])


def exact_match(answer: str, expected: str) -> float:
    """Return 1 if both are equal, ignoring white space around them, else 0."""
    return float(answer.strip() == expected.strip())


def json_valid(answer: str, expected: str) -> float:
    """Return 1 if the answer is a JSON object or array, else 0; a bare number or string does not count."""
    return float(isinstance(_parsed(answer), (dict, list)))


def json_equal(answer: str, expected: str) -> float:
    """Return 1 if both are equal as JSON documents, whatever the order of keys and the spacing, else 0.

    An answer with a key twice equals nothing: readers disagree about its value (RFC 8259, section 4), and a model that
    is rewarded for it learns to write several values.
    """
    parsed = _parsed(answer, object_pairs_hook=_without_doubles)
    return float(isinstance(parsed, (dict, list)) and _is_same(parsed, _parsed(expected)))


def token_f1(answer: str, expected: str) -> float:
    """Return the harmonic mean of precision and recall over words, as in SQuAD (Rajpurkar et al., arXiv:1606.05250).

    Words are split at white space and compared in lower case. Unlike SQuAD, articles are kept, since removing them
    suits English only.
    """
    answer_words, expected_words = answer.lower().split(), expected.lower().split()
    common = (Counter(answer_words) & Counter(expected_words)).total()
    if not answer_words or not expected_words:
        return float(answer_words == expected_words)
    # With precision common / a and recall common / e, the harmonic mean is 2 * common / (a + e).
    return 2 * common / (len(answer_words) + len(expected_words))


def _parsed(text: str, **how: Any) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant, **how)
    except (ValueError, RecursionError):
        return None


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key comes twice")
    return document


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON value")


def _is_same(answer: object, expected: object) -> bool:
    """Compare JSON values. Unlike in Python, true is not 1."""
    if isinstance(answer, dict) and isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(_is_same(value, expected[key]) for key, value in answer.items())
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(_is_same, answer, expected))
    return answer == expected and isinstance(answer, bool) == isinstance(expected, bool)


METRICS: Mapping[str, Metric] = {
    "exact_match": exact_match,
    "json_valid": json_valid,
    "json_equal": json_equal,
    "token_f1": token_f1,
}
SHARES = frozenset({"exact_match", "json_valid", "json_equal"})
"""Metrics that are shares of the rows, shown as percentages."""


def resolve_metrics(
    names: Sequence[str], allowed_modules: Sequence[str] = (), *, asked_by: str = "--metric"
) -> dict[str, Metric]:
    """Look up metrics by name. Imports a module only if it is allowed.

    Args:
        names: names in `METRICS`, or dotted names like `my_package.scores.bleu`.
        allowed_modules: the modules that dotted names may refer to; from the command line only.
        asked_by: the option or key that names the metrics; `…s-from` or `…_from` allows modules.

    Raises:
        ConfigError: an unknown name, a module that is not allowed or not installed, or a name that is not a function.
    """
    return resolve_functions(names, METRICS, allowed_modules, asked_by=asked_by)


def resolve_functions(
    names: Sequence[str], known: Mapping[str, Function], allowed_modules: Sequence[str] = (), *, asked_by: str
) -> dict[str, Function]:
    """Look up functions by name, as `resolve_metrics` looks up metrics; `known` has the built-in ones."""
    allowed_by = "--metrics-from " if asked_by == "--metric" else f"{asked_by}_from="
    return {name: _resolve(name, known, allowed_modules, asked_by, allowed_by) for name in dict.fromkeys(names)}


def measure(name: str, metric: Metric, answer: str, expected: str) -> float:
    """Return the metric's value for an answer: `metric(answer, expected)` as a float.

    Raises:
        DataError: a user's own metric failed, or did not return a finite number.
    """
    try:
        value = float(metric(answer, expected))
    except Exception as error:  # it is the user's own code
        raise DataError(f"the metric {name} failed on the answer {answer[:60]!r}: {error!r}. Correct it.") from error
    if not math.isfinite(value):
        raise DataError(f"the metric {name} gave {value} for the answer {answer[:60]!r}; expected a finite number.")
    return value


def _resolve(
    name: str, known: Mapping[str, Function], allowed_modules: Sequence[str], asked_by: str, allowed_by: str
) -> Function:
    if name in known:
        return known[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        asking = asked_by + (" " if asked_by == "--metric" else "=")
        close = did_you_mean(name, known)
        raise ConfigError(
            f"{asked_by} is {name}; expected one of {', '.join(known)}, or a function of your own "
            f"installed package: {asking}my_package.scores.{name} {allowed_by}my_package.scores. {close}".rstrip()
        )
    if module not in allowed_modules:
        raise ConfigError(
            f"{asked_by} is {name}, but {module} is not allowed: a function is code that runs here. If you trust the "
            f"package, allow it with {allowed_by}{module}."
        )
    function = getattr(_import_installed(module, allowed_by.rstrip(" =")), attribute, None)
    if not callable(function):
        raise ConfigError(f"{asked_by} is {name}, but {module} has no function {attribute}.")
    return cast(Function, function)


def _import_installed(module: str, allowed_by: str) -> object:
    with _without_current_folder():
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or module
            raise ConfigError(
                f"{allowed_by} is {module}, but {missing} is not installed. Install your package into this "
                "environment (pip install -e FOLDER); a file in the current folder is not imported."
            ) from error
        except Exception as error:  # it is the user's own code
            raise ConfigError(f"{allowed_by} is {module}, which fails when it is imported: {error!r}.") from error


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Import as `python -P` does, since `python -m` puts the current folder before all installed packages."""
    before = list(sys.path)
    if sys.path and not sys.flags.safe_path and sys.path[0] in ("", os.curdir, str(Path.cwd())):
        del sys.path[0]
    try:
        yield
    finally:
        sys.path[:] = before
