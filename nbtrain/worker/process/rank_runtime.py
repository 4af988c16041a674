"""Which runtime a rank's cells run under, and what it has to set up for them."""

from __future__ import annotations

import builtins
from contextlib import suppress
from typing import Any

import nbtrain.machine.registry as registry
from nbtrain.base.specs import RunSpec
from nbtrain.exchange.graph.object_path import FoundObjects, find_all


class RankRuntime:
    """Another strategy, other options or another precision mean another runtime."""

    def __init__(self, rank: Any) -> None:
        """`rank`: the one of worker/rank.py."""
        self._rank = rank
        self.now: Any = None
        self._randomness: Any = None
        """every runtime's, one after another"""
        self._runs_as: Any = None
        self.objects: dict[frozenset[tuple[str, int]], FoundObjects] = {}
        """names and what they hold → the objects that a strategy may prepare, for the last few cells"""

    def of(self, spec: RunSpec) -> Any:
        """The runtime for such a cell."""
        from nbtrain.worker.runtime import Runtime

        rank, names = self._rank, self._rank.shell.user_ns
        # A class or object of the notebook's may be another one by now under the same name.
        runs_as = spec.strategy, dict(spec.options), registry.load_strategy(spec.strategy, names), spec.precision
        if self.now is None or runs_as != self._runs_as:
            self.close(True)
            strategy = registry.make_strategy(spec.strategy, spec.options, names)
            log, replaced = rank.outputs.outlet.log, rank.twins.replace
            self.now = Runtime(rank.info, strategy, log, self._randomness, replaced, spec.precision)
            self._randomness = self.now.randomness
            self.now.install()
            self._runs_as = runs_as
            for name, value in self.now.builtins().items():
                setattr(builtins, name, value)
        return self.now

    def to_prepare(self, names: dict[str, Any], changed: bool) -> FoundObjects:
        """Every object that a strategy may prepare; searched again only when something changed: numbers and tensors,
        which most cells make anew, lead to none."""
        from nbtrain.worker.setup.components import PREPARABLE, RECENT

        is_whole = self._rank.twins.is_whole
        asked = frozenset(
            (name, id(value)) for name, value in names.items() if isinstance(value, PREPARABLE) or not is_whole(value)
        )
        if changed:
            self.objects.clear()
        if asked not in self.objects:
            if len(self.objects) == RECENT:
                del self.objects[next(iter(self.objects))]
            self.objects[asked] = find_all(self._rank.twins.table, names, PREPARABLE)
        return self.objects[asked]

    def close(self, whole: bool) -> None:
        """`whole`: what is in pieces is put together again, which is collective."""
        if self.now is not None:
            self.now.uninstall(whole)
            self.now = self._runs_as = None

    def give_up(self) -> None:
        """Its end has failed: take back what can be, and drop it, whatever fails."""
        with suppress(Exception):
            self.close(False)
        self.now = self._runs_as = None
        self.objects.clear()
