"""What the three ways of starting local ranks have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from nbtrain.engines.base import Death

if TYPE_CHECKING:
    from nbtrain.worker.process.start import RankConfig


class Processes(Protocol):
    """The processes of one pool."""

    @property
    def settled(self) -> bool:
        """None is alive, and none is about to be."""

    def fileno(self) -> int | None:
        """Readable when there is news; None: one has to look."""

    def launch(self, configs: Iterable[RankConfig]) -> None:
        """Does not wait for them."""

    def news(self) -> list[Death]:
        """Who has died since the last call. Does not wait."""

    def pids(self) -> dict[int, int]:
        """rank → process, of those that are alive."""

    def kill(self, ranks: Iterable[int]) -> None:
        """End these, with whatever they have started."""

    def release(self) -> None:
        """The pool is over, and every process of it."""
