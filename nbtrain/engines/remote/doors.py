"""What starts nodes on other machines, where the user does not do it himself. A door only makes the command, or hands
it to a queue; how ranks are started, watched and spoken with is the same behind each.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from nbtrain.base.errors import PoolError
from nbtrain.base.specs import MachinesWanted
from nbtrain.engines.remote.lobby import HOUR, JOIN, Lobby, Peer
from nbtrain.engines.remote.machines import differences

SOON = 2.0
"""Seconds after which the user is told that machines are awaited."""


class Door(Protocol):
    """One way to have nodes started. It is kept until the notebook ends, or other machines are wanted. `there`: the
    names of those of its machines that take part now."""

    lasts: float
    """Seconds that its tickets are to be good for."""
    hosts: tuple[str, ...]
    """Names of its machines, in the order in which they get their ranks, as far as that is known before they join."""

    def __init__(self, wanted: MachinesWanted) -> None:
        """Raises `UsageError` where that cannot be."""

    @property
    def nodes(self) -> int:
        """How many machines it leads to."""

    def open(self, ticket: str, there: Collection[str]) -> None:
        """Have a node on each of its machines that is not there, with this ticket. Does not wait for them to join."""

    def trouble(self, there: Collection[str]) -> str | None:
        """Why no more machines will come, with what was said there; None as long as they may."""

    def waiting(self, there: Collection[str]) -> str:
        """What is waited for, to be shown: `a machine of the queue (job 17 is PENDING: Resources)`."""

    def close(self) -> None:
        """End what it has started."""


class Entrance:
    """Machines for one pool: those of a door, or those that have joined by themselves."""

    def __init__(self, lobby: Lobby, source: str = JOIN, door: Door | None = None) -> None:
        """`source`: tells its machines from others, who joined with other tickets."""
        self.lobby, self.source, self.door = lobby, source, door
        self._compared: list[Peer] = []

    def machines(self) -> list[Peer]:
        """Those of a door are in the same order each time, whichever was the first to join."""
        peers = self.lobby.machines(self.source)
        return peers if self.door is None else sorted(peers, key=self._place)

    def _place(self, peer: Peer) -> tuple[Any, ...]:
        name = peer.machine.name
        hosts = self.door.hosts if self.door is not None else ()
        numbers = [int(part) if part.isdecimal() else 0 for part in re.split(r"(\d+)", name)]  # node10 is after node9
        return hosts.index(name) if name in hosts else len(hosts), re.sub(r"\d+", "", name), numbers

    def wait(self, count: int, taken: Collection[Peer | None] = ()) -> list[Peer]:
        """So many machines that have joined and are not taken. Stop ends the waiting."""

        def free() -> list[Peer]:
            return [peer for peer in self.machines() if peer not in taken]

        if len(free()) < count and self.door is not None:
            self.door.open(self.lobby.ticket(seconds=self.door.lasts, source=self.source).text(), self._there())
        look, said = time.monotonic() + SOON, ""
        while len(free()) < count:
            if self.lobby.wait(lambda: len(free()) >= count, 0.1):
                break
            if self.door is not None and (why := self.door.trouble(self._there())) is not None:
                raise PoolError(why)
            if time.monotonic() > look and (text := self._waiting(count - len(free()))) != said:
                look, said = time.monotonic() + SOON, text
                print(text)
        self._compare()
        return free()[:count]

    def _compare(self) -> None:
        """Tell once of each machine of a door that has other versions: it was not the user who installed there now."""
        new = [peer for peer in self.machines() if peer not in self._compared] if self.door is not None else []
        self._compared += new
        for sentence in differences([peer.machine for peer in new]):
            print(sentence)

    def _there(self) -> set[str]:
        return {peer.machine.name for peer in self.machines()}

    def _waiting(self, lacking: int) -> str:
        if self.door is not None:
            return f"waiting for {self.door.waiting(self._there())} … (Stop ends the waiting)"
        more = f"{lacking} more machine{'s' * (lacking > 1)}"
        if not self.lobby.admission.gives(self.source):  # nobody will come, and a ticket shown here would be saved
            raise PoolError(f"{more} wanted, and no ticket is good now: %distributed join shows the line for each")
        return f"waiting for {more}, with the line that %distributed join has shown (Stop ends the waiting)"


_entrances: dict[tuple[str, MachinesWanted], Entrance] = {}


def entrance(
    lobby: Lobby, engine: str, door: Callable[[MachinesWanted], Door] | None, wanted: MachinesWanted | None,
    leaving: Callable[[], object] = lambda: None,
) -> Entrance:  # fmt: skip
    """The one that leads to these machines; made if there is none. `leaving` is called before another one has to go,
    and the ranks behind it; what it raises keeps them."""
    if door is None or wanted is None:
        return Entrance(lobby)
    key = engine, wanted
    known = _entrances.get(key)
    if known is None or known.lobby is not lobby:
        leads = door(wanted)  # it may refuse, and then all stays as it is
        others = [other for other in _entrances if other[0] == engine]
        if others:
            leaving()
        for other in others:  # its machines may be wanted for this one
            close(_entrances.pop(other))
        known = _entrances[key] = Entrance(lobby, f"{engine} {time.monotonic()}", leads)
        lobby.on_close.append(leads.close)
    return known


def close(entrance: Entrance) -> None:
    """Its machines are not needed any more."""
    entrance.lobby.send_away(entrance.machines(), "the notebook uses other machines")
    if entrance.door is not None:
        entrance.door.close()


def let_go() -> None:
    """What doors have started is given back: places of a queue are other people's, too."""
    for key in list(_entrances):
        close(_entrances.pop(key))


def join_line(lobby: Lobby, seconds: float = HOUR) -> str:
    """The command that a machine takes part with. `seconds`: for how long. The shell says the ticket itself, so that
    it is in no list of processes."""
    return f"echo {lobby.ticket(seconds=seconds).text()} | python -m nbtrain node -"
