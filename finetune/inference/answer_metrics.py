"""Measures of a generated answer against the expected one: those that are shipped, and the user's own.

Security: a metric is code. A name is looked up in `METRICS`, or in a module that the command line itself allows with
`--metrics-from`; never in one that only a configuration, a run's folder or a data set names. The module must be
installed: a file in the current folder, which may be a downloaded one, is not imported.
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

from finetune.errors import ConfigError, DataError

Metric = Callable[[str, str], float]
"""(generated answer, expected answer) to a number. The figure of a model is the mean over the rows."""


def exact_match(answer: str, expected: str) -> float:
    """1 where both are the same but for white space around them."""
    return float(answer.strip() == expected.strip())


def json_valid(answer: str, expected: str) -> float:
    """1 where the answer is a JSON object or array; a bare number or word is an answer, not a document."""
    return float(isinstance(_parsed(answer), (dict, list)))


def json_equal(answer: str, expected: str) -> float:
    """1 where both are JSON documents that say the same, whatever the order of keys and the spacing."""
    found = _parsed(answer)
    return float(isinstance(found, (dict, list)) and found == _parsed(expected))


def token_f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall over words, as SQuAD counts them (Rajpurkar et al., arXiv:1606.05250).

    Words are split at white space and compared in lower case. Unlike SQuAD, articles are kept: removing them is for
    English alone.
    """
    found, wanted = answer.lower().split(), expected.lower().split()
    common = (Counter(found) & Counter(wanted)).total()
    if not found or not wanted:
        return float(found == wanted)
    return 2 * common / (len(found) + len(wanted))


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


METRICS: Mapping[str, Metric] = {
    "exact_match": exact_match,
    "json_valid": json_valid,
    "json_equal": json_equal,
    "token_f1": token_f1,
}
SHARES = frozenset({"exact_match", "json_valid", "json_equal"})
"""Metrics that are shares of the rows, shown in per cent."""


def resolve_metrics(names: Sequence[str], allowed_modules: Sequence[str] = ()) -> dict[str, Metric]:
    """Look up metrics by name. Imports a module only if it is allowed.

    Args:
        names: of `METRICS`, or dotted: `my_package.scores.bleu`.
        allowed_modules: in which a dotted name may stand, from the command line and nowhere else.

    Raises:
        ConfigError: an unknown name, a module that is not allowed or not installed, or a name that is not a function.
    """
    return {name: _resolve(name, allowed_modules) for name in dict.fromkeys(names)}


def measure(name: str, metric: Metric, answer: str, expected: str) -> float:
    """Measure one answer.

    Raises:
        DataError: a user's own metric failed, or gave something that is not a finite number.
    """
    try:
        value = float(metric(answer, expected))
    except Exception as error:  # it is the user's own code
        raise DataError(f"the metric {name} failed on the answer {answer[:60]!r}: {error!r}. Correct it.") from error
    if not math.isfinite(value):
        raise DataError(f"the metric {name} gave {value} for the answer {answer[:60]!r}; expected a finite number.")
    return value


def _resolve(name: str, allowed_modules: Sequence[str]) -> Metric:
    if name in METRICS:
        return METRICS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ConfigError(
            f"--metric is {name}; expected one of {', '.join(METRICS)}, or a function of your own "
            f"installed package: --metric my_package.scores.{name} --metrics-from my_package.scores."
        )
    if module not in allowed_modules:
        raise ConfigError(
            f"--metric is {name}, but {module} is not allowed: a metric is code, which is run. If the package is "
            f"yours, allow it with --metrics-from {module}."
        )
    found = getattr(_import_installed(module), attribute, None)
    if not callable(found):
        raise ConfigError(f"--metric is {name}, but {module} has no function {attribute}.")
    metric: Metric = found
    return metric


def _import_installed(module: str) -> object:
    with _without_current_folder():
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or module
            raise ConfigError(
                f"--metrics-from is {module}, but {missing} is not installed. Install your package into this "
                "environment (pip install -e FOLDER); a file in the current folder is not imported."
            ) from error
        except Exception as error:  # it is the user's own code
            raise ConfigError(f"--metrics-from is {module}, which fails when it is imported: {error!r}.") from error


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Import as `python -P` does: `python -m` puts the current folder before all installed packages."""
    before = list(sys.path)
    if sys.path and not sys.flags.safe_path and sys.path[0] in ("", os.curdir, str(Path.cwd())):
        del sys.path[0]
    try:
        yield
    finally:
        sys.path[:] = before
