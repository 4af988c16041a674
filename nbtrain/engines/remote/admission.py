"""Who may take part: the tickets that were given out, and who has come with which. A connection is known by its key,
which CURVE has proven, and nothing that it says is read before its ticket is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from nbtrain.engines.remote.ticket import Ticket

ANOTHER = "; %distributed join in the notebook shows a new one"
STRANGE = "no ticket of this notebook"
LATE = "an expired ticket"
MOMENT = 1.0
"""Seconds in which one who is refused is answered once, and no more than"""
ANSWERS = 64
"""of them: a stranger must not have the kernel speak as often as he does."""


@dataclass
class _Given:
    """A ticket that was given out."""

    ticket: Ticket
    source: str
    """for whom it was made"""

    @property
    def late(self) -> bool:
        return self.ticket.expires < time.time()


class Admission:
    """All calls but `give` and `gives` are the lobby's thread's."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        """why → how often"""
        self._given: dict[str, _Given] = {}
        """by the ticket's public key"""
        self._answered: dict[bytes, float] = {}

    def give(self, ticket: Ticket, source: str) -> None:
        self._given[ticket.public_key] = _Given(ticket, source)

    def gives(self, source: str) -> bool:
        """Whether a ticket of this source lets machines in now."""
        return any(given.source == source and not given.late for given in list(self._given.values()))

    def connects(self, key: str, taking_part: Collection[str]) -> bool:
        """Whether the owner of this key may connect. `taking_part`: the keys of machines that have joined. One of
        those comes again after a connection that has dropped, also with a ticket that has expired since."""
        given = self._given.get(key)
        may = given is not None and (not given.late or key in taking_part)
        if not may:
            self.refused[STRANGE if given is None else LATE] += 1
        return may

    def why_not(self, key: str) -> str:
        """Why nobody new joins with this key; empty if he may."""
        given = self._given.get(key)
        if given is None:
            return "this ticket is another notebook's"
        if given.late:
            return f"this ticket has expired{ANOTHER}"
        return ""

    def source(self, key: str) -> str:
        """For whom the ticket with this key was made."""
        return self._given[key].source

    def answers(self, identity: bytes) -> bool:
        """Whether one who is refused is told so now."""
        now = time.monotonic()
        while self._answered and (first := next(iter(self._answered))) and now - self._answered[first] > MOMENT:
            del self._answered[first]
        if identity in self._answered or len(self._answered) >= ANSWERS:
            return False
        self._answered[identity] = now
        return True
