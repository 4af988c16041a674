"""The two sides that tests of the exchange play on, without what earlier tests noted about local modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.exchange.kinds import python_module_state
from tests.support.sides import Sides


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_local_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebook and ranks are one process here, so what is noted of a module would be both sides' own.

    Once a test has loaded the extension, every test file counts as a local module, and what changed in one of them
    would travel with each cell.
    """
    monkeypatch.setattr(python_module_state, "_STATES", {})
    monkeypatch.setattr(python_module_state, "_PLACES", {})
