"""A ticket: what a machine needs to take part in one notebook's pool. One line of text, to be pasted.

Its keys are made for one pool and known to nobody else: the kernel's public one, so that a node knows whom it speaks
to, and a pair for the nodes, so that the kernel does. Whoever has a ticket can run code as the user until it expires.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
import zlib
from dataclasses import astuple, dataclass, field

from nbtrain.base.errors import UsageError

MARK = "nbtrain-1-"
"""What a ticket begins with; the number is that of the protocol."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Frozen, so that equality says whether it is the one that was given out."""

    pool: str
    """a name that no other pool has"""
    addresses: tuple[str, ...]
    """where the kernel may be reached, the likeliest first"""
    port: int
    kernel_key: str
    """the kernel's public key"""
    public_key: str
    secret_key: str = field(repr=False)
    """the nodes' own"""
    expires: float
    """seconds since the epoch"""

    def text(self) -> str:
        data = json.dumps(astuple(self), separators=(",", ":")).encode()
        return MARK + base64.urlsafe_b64encode(zlib.compress(data, 9)).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> Ticket:
        """Raises `UsageError` where this is no ticket, or one that has expired."""
        text = "".join(text.split())  # a terminal may have broken the line
        if not text.startswith(MARK):
            said = "is none" if not text.startswith(MARK[:8]) else "is another version's"
            raise UsageError(
                f"this {said}: a ticket begins with {MARK}, and %distributed join in the notebook shows it"
            )
        try:
            data = base64.urlsafe_b64decode(text[len(MARK) :] + "=" * (-len(text[len(MARK) :]) % 4))
            pool, addresses, *rest = json.loads(zlib.decompress(data))
            ticket = cls(pool, tuple(addresses), *rest)
        except (binascii.Error, zlib.error, ValueError, TypeError, RecursionError) as error:
            raise UsageError(
                "this ticket is damaged, or not whole: copy the line that %distributed join shows once more"
            ) from error
        if ticket.expires < time.time():
            late = time.strftime("%H:%M on %d %B", time.localtime(ticket.expires))
            raise UsageError(f"this ticket has expired at {late}: %distributed join in the notebook shows a new one")
        return ticket
