"""The table of checks: what `finetune verify` compares, with one row for each check in all outputs.

`compare` and the digests make a `Check` for each row. certificate.json holds the counts, and the terminal and the model
card show the rows of `check_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.runs.comparison import loss_difference

CHECKS = {
    "tensors": "tensors",
    "files": "other files",
    "stop_ids": "stop ids",
    "rendered": "conversations as text and tokens",
    "positions": "logits at positions",
    "answers": "greedy answers",
}
"""The title of each check, by its field in certificate.json. Differences are listed in this order: the bytes first,
because changed bytes explain changed answers."""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    compared: int = 0
    """The number of items."""
    equal: int = 0
    """The number of equal items."""
    mismatches: tuple[str, ...] = ()
    """The differences, one sentence each."""

    @classmethod
    def of(cls, differences: Iterable[str]) -> Check:
        """Count items by their differences; an empty string means that the item is equal."""
        found = list(differences)
        mismatches = tuple(filter(None, found))
        return cls(len(found), len(found) - len(mismatches), mismatches)

    def as_record(self) -> dict[str, int]:
        """Convert the counts to plain values."""
        return {"compared": self.compared, "equal": self.equal}


def rows_of_checks(content: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the title of each check, the number of equal items, and how far items are apart.

    The verdict counts answers that differ at a near tie as equal. Here they are shown apart from the equal answers.
    In a certificate, numbers that are not finite are texts. Earlier versions did not write `stop_ids`.

    Raises:
        KeyError, TypeError: it is not the content of a certificate.
    """
    near_ties = content["near_ties"]
    details = {
        "positions": f"{float(content['relative']):.3g} (bound {content['bound']:.3g})",
        "answers": f"{near_ties} differ at a near tie" if near_ties else "",
    }
    for name, title in CHECKS.items():
        counts = content[name] if name != "stop_ids" else content.get(name, {"compared": 0})
        equal = counts["equal"] - near_ties if name == "answers" else counts.get("equal")
        if counts["compared"]:
            yield title, f"{equal} of {counts['compared']}", details.get(name, "")
    if replay := content["replay"]:
        differences = [loss_difference(step["recorded"], float(step["computed"])) for step in replay["steps"]]
        equal = sum(difference <= replay["bound"] for difference in differences)
        bound = f"(bound {replay['bound']:.3g}, {replay['precision']})"
        yield "losses of steps", f"{equal} of {len(differences)}", f"{max(differences):.3g} {bound}"
