"""Refuse options of a command that cannot be used together, or that have no effect without another option."""

from __future__ import annotations

from collections.abc import Mapping

from finetune.errors import ConfigError


class OptionRules:
    """Rules about the options that a user gave.

    Args:
        options: the value of each option by its name on the command line. None and False mean that the user did not
            give the option.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._given = {name for name, value in options.items() if value is not None and value is not False}

    def need(self, option: str, *alternatives: str) -> None:
        """Refuse an option when the user gave none of the options that it needs.

        Raises:
            ConfigError: names the option and what it needs.
        """
        if option in self._given and self._given.isdisjoint(alternatives):
            raise ConfigError(
                f"{option} needs {' or '.join(alternatives)}, which was not given. Add it, or leave out {option}."
            )

    def exclude(self, option: str, *others: str, because: str) -> None:
        """Refuse an option when the user also gave one of the others.

        `because` is the reason and what to do instead, as sentences.

        Raises:
            ConfigError: names the options that were given together, and the reason.
        """
        together = [other for other in others if other in self._given]
        if option in self._given and together:
            raise ConfigError(f"{option} and {' and '.join(together)} cannot be given together: {because}")
