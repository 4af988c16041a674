"""Settles names that the notebook assigns while a run in the background may assign or change them, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from nbtrain.exchange.kinds.base import ATOMS
from nbtrain.session.sync.notebook_side import MISSING, same

if TYPE_CHECKING:
    from nbtrain.session.run.cell_run import CellRun

UNCHANGING = (*ATOMS, FunctionType, ModuleType, type)


class NameConflicts:
    """Made when the run begins."""

    def __init__(self, run: CellRun) -> None:
        self._run = run
        self._namespace = run.shell.user_ns
        names = dict.fromkeys((*run.names.hard, *run.names.soft, *sorted(run.names.writes)))
        self._before = {name: self._namespace.get(name, MISSING) for name in names}

    @contextmanager
    def kept(self, values: dict[str, Any]) -> Iterator[None]:
        """Inside, the names hold what they held when the run began, so that what comes home finds its place. Afterwards
        they are the notebook's again, and what the run left under them, if it differs, is in `values`."""
        namespace = self._namespace
        theirs = {name: namespace.get(name, MISSING) for name in self._before}
        theirs = {name: value for name, value in theirs.items() if not same(value, self._before[name])}
        for name in theirs:
            _put(namespace, name, self._before[name])
        try:
            yield
        finally:
            for name, value in theirs.items():
                found = namespace.get(name, MISSING)
                if self._run.home.came and self._is_work(name, found) and not same(found, value):
                    values[name] = found
                _put(namespace, name, value)

    def _is_work(self, name: str, found: Any) -> bool:
        """Whether the run has assigned it, or may have changed it in place."""
        if found is MISSING:
            return False
        return not same(found, self._before[name]) or not isinstance(found, UNCHANGING)


def _put(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value
