"""What several tests on ranks are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.player import Player


@pytest.fixture(scope="module")
def one_process() -> Iterator[Player]:
    with Player("") as player:
        yield player
