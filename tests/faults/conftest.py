"""Scenes for tests: one kernel for each strategy and start method, for a whole module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.scene import Scene, open_scene


@pytest.fixture(scope="module")
def open_scenes(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """`@pytest.mark.parametrize("open_scenes", COMBINATIONS, indirect=True)`; pytest plays what shares one in a row."""
    with open_scene(request.param) as scene:
        yield scene


@pytest.fixture
def scene(open_scenes: Scene) -> Scene:
    """With a newly prepared world."""
    open_scenes.prepare()
    return open_scenes
