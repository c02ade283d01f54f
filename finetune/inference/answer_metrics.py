"""Which functions may measure an answer.

Security: a metric is code. A name is looked up among those of `finetune.inference.answers`, or in a module that the
command line itself allows with `--metrics-from`; never in one that only a configuration, a run's folder or a data set
names. The module must be installed: what happens to lie in the current folder, which may be a downloaded one, is not
imported.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from finetune.errors import ConfigError, DataError
from finetune.inference.answers import METRICS, Metric


def resolve_metrics(names: Sequence[str], allowed_modules: Sequence[str] = ()) -> dict[str, Metric]:
    """The functions that names mean. Imports a module only if it is allowed.

    Args:
        names: of `METRICS`, or dotted: `my_package.scores.bleu`.
        allowed_modules: in which a dotted name may stand, from the command line and nowhere else.

    Raises:
        ConfigError: an unknown name, a module that is not allowed or not installed, or something that is no function.
    """
    return {name: _resolve(name, allowed_modules) for name in dict.fromkeys(names)}


def measure(name: str, metric: Metric, answer: str, expected: str) -> float:
    """One answer's figure.

    Raises:
        DataError: a user's own metric failed, or gave something that is no finite number.
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
            f"--metric is {name}, which is none of {', '.join(METRICS)}. Name one of these, or a function of your own "
            f"installed package: --metric my_package.scores.{name} --metrics-from my_package.scores."
        )
    if module not in allowed_modules:
        raise ConfigError(
            f"--metric is {name}, and {module} is no module that metrics may come from: a metric is code, and is run. "
            f"If the package is yours, allow it with --metrics-from {module}."
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
    """What `python -P` leaves out: `python -m` puts the folder that one stands in before all installed packages."""
    before = list(sys.path)
    if sys.path and not sys.flags.safe_path and sys.path[0] in ("", os.curdir, str(Path.cwd())):
        del sys.path[0]
    try:
        yield
    finally:
        sys.path[:] = before
