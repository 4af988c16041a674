"""The interface of the three ways to start local ranks."""

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
        """No process is alive or about to start."""

    def fileno(self) -> int | None:
        """A descriptor that is readable when there is news; None if `news` must be polled."""

    def launch(self, configs: Iterable[RankConfig]) -> None:
        """Does not wait for them."""

    def news(self) -> list[Death]:
        """Ranks that died since the last call. Does not wait."""

    def pids(self) -> dict[int, int]:
        """rank → process, of those that are alive."""

    def kill(self, ranks: Iterable[int]) -> None:
        """End these, with whatever they have started."""

    def release(self) -> None:
        """End every process of the pool."""
