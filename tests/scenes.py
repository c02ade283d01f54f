"""Scenes: tests that start processes and wait for them, so several of one file run at a time.

A file makes its scenes, collects them with a decorator, and has one parametrized test that takes the result of each:

    SCENES = Scenes(at_a_time=3)

    @SCENES.add
    def a_killed_rank(play): ...

    @pytest.fixture(scope="module")
    def scenes(request, tmp_path_factory):
        with SCENES.running(request, tmp_path_factory, Play) as started:
            yield started

    @pytest.mark.parametrize("act", SCENES.params)
    def test_scene(scenes, act):
        scenes[act].result()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

Act = Callable[[Any], None]


class Play(Protocol):
    """The processes of one scene."""

    def stop(self) -> None:
        """End what is left of them."""


class Scenes:
    """The scenes of one file.

    Args:
        at_a_time: how many run at once.
    """

    def __init__(self, *, at_a_time: int) -> None:
        self.params: list[Any] = []
        """The parameters of the test."""
        self._at_a_time = at_a_time

    def add(self, act: Act, *marks: pytest.MarkDecorator) -> Act:
        """Let a function that takes a play be a scene."""
        self.params.append(pytest.param(act, id=getattr(act, "__name__", ""), marks=marks))
        return act

    @contextmanager
    def running(
        self,
        request: pytest.FixtureRequest,
        folders: pytest.TempPathFactory,
        make_play: Callable[[Path, Act], Play],
    ) -> Iterator[dict[Act, Future[None]]]:
        """Run the scenes that were selected, each with a play in a folder of its own."""

        def run(act: Act, folder: Path) -> None:
            play = make_play(folder, act)
            try:
                act(play)
            finally:
                play.stop()

        mine = {id(param.values[0]) for param in self.params}
        acts = [item.callspec.params.get("act") for item in request.session.items if hasattr(item, "callspec")]
        with ThreadPoolExecutor(self._at_a_time) as pool:
            yield {act: pool.submit(run, act, folders.mktemp(act.__name__)) for act in acts if id(act) in mine}
