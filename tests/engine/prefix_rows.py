"""Seeded rows with many kinds of shared prefixes, for tests."""

from __future__ import annotations

import torch

Row = tuple[torch.Tensor, torch.Tensor]


def rows_of(*lists: list[int], targets: float = 1.0, seed: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.tensor(ids), torch.rand(len(ids), generator=generator) < targets) for ids in lists]


def random_rows(seed: int, *, longest: int = 60, targets: float = 0.4) -> list[Row]:
    """Each row starts anew or goes on from a cut of an earlier one; some are equal, some a beginning of another."""
    generator = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    lists: list[list[int]] = []
    for _ in range(1 + number(12)):
        earlier = lists[number(len(lists))] if lists and number(4) else []
        beginning = earlier[: number(len(earlier) + 1)]
        new = torch.randint(4, (number(longest),), generator=generator).tolist()
        lists.append((beginning + new) or [number(4)])
    if number(2):
        lists += [list(lists[0]), lists[-1][: 1 + len(lists[-1]) // 2], [number(4)]]
    return rows_of(*lists, targets=targets, seed=seed)
