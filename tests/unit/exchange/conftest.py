"""Keeps what earlier tests noted about local modules away from the tests of the exchange."""

from __future__ import annotations

import pytest

from nbtrain.exchange.kinds import python_module_state


@pytest.fixture(autouse=True)
def no_local_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebook and ranks are one process here, so what is noted of a module would be both sides' own.

    Once a test has loaded the extension, every test file counts as a local module, and what changed in one of them
    would travel with each cell.
    """
    monkeypatch.setattr(python_module_state, "_STATES", {})
    monkeypatch.setattr(python_module_state, "_PLACES", {})
