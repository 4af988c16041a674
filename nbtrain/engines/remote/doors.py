"""What starts nodes on other machines, where the user does not do it himself. A door only makes the command, or hands
it to a queue; how ranks are started, watched and spoken with is the same behind each.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

from nbtrain.engines.remote.lobby import JOIN, Lobby, Peer
from nbtrain.errors import PoolError
from nbtrain.specs import MachinesWanted

SOON = 2.0
"""Seconds after which the user is told that machines are awaited."""


class Door(Protocol):
    """One way to have nodes started. It is kept until the notebook ends, or other machines are wanted."""

    def __init__(self, wanted: MachinesWanted) -> None:
        """Raises `UsageError` where that cannot be."""

    @property
    def nodes(self) -> int:
        """How many machines it leads to."""

    def open(self, ticket: str) -> None:
        """Have a node on each of its machines, with this ticket, unless one of its own still runs there. Does not wait
        for them to join."""

    def trouble(self) -> str | None:
        """Why no more machines will come, with what was said there; None as long as they may."""

    def waiting(self) -> str:
        """What is waited for, to be shown: `a machine of the queue (job 17 is PENDING: Resources)`."""

    def close(self) -> None:
        """End what it has started."""


class Entrance:
    """Machines for one pool: those of a door, or those that have joined by themselves."""

    def __init__(self, lobby: Lobby, source: str = JOIN, door: Door | None = None) -> None:
        """`source`: tells its machines from others, who joined with other tickets."""
        self.lobby, self.source, self.door = lobby, source, door
        self._open = False

    def machines(self) -> list[Peer]:
        return self.lobby.machines(self.source)

    def wait(self, count: int, taken: Collection[Peer | None] = ()) -> list[Peer]:
        """So many machines that have joined and are not taken. Stop ends the waiting."""

        def free() -> list[Peer]:
            return [peer for peer in self.machines() if peer not in taken]

        if len(free()) < count and self.door is not None:
            self.door.open(self.lobby.ticket(source=self.source).text())
        began, said = time.monotonic(), False
        while len(free()) < count:
            if self.lobby.wait(lambda: len(free()) >= count, 0.1):
                break
            if self.door is not None and (why := self.door.trouble()) is not None:
                raise PoolError(why)
            if not said and time.monotonic() - began > SOON:
                said = True
                print(self._waiting(count - len(free())))
        return free()[:count]

    def _waiting(self, lacking: int) -> str:
        if self.door is not None:
            return f"waiting for {self.door.waiting()} … (Stop ends the waiting)"
        more = f"{lacking} more machine{'s' * (lacking > 1)}"
        return f"waiting for {more}; on each, run\n  {join_line(self.lobby)}\n(Stop ends the waiting)"


_entrances: dict[tuple[str, MachinesWanted], Entrance] = {}


def entrance(lobby: Lobby, engine: str, door: type[Door] | None, wanted: MachinesWanted | None) -> Entrance:
    """The one that leads to these machines; made if there is none."""
    if door is None or wanted is None:
        return Entrance(lobby)
    key = engine, wanted
    found = _entrances.get(key)
    if found is None or found.lobby is not lobby:
        made = door(wanted)  # where that cannot be, the machines of the last cell stay
        for other in [other for other in _entrances if other[0] == engine]:  # its machines may be wanted for this one
            close(_entrances.pop(other))
        found = _entrances[key] = Entrance(lobby, f"{engine} {len(_entrances)} {time.monotonic()}", made)
        lobby.on_close.append(found.door.close)  # type: ignore[union-attr]
    return found


def close(entrance: Entrance) -> None:
    """Its machines are not needed any more."""
    entrance.lobby.send_away(entrance.machines(), "the notebook uses other machines")
    if entrance.door is not None:
        entrance.door.close()


def join_line(lobby: Lobby, places: int | None = None) -> str:
    """The command that a machine takes part with."""
    return f"python -m nbtrain node {lobby.ticket(places).text()}"
