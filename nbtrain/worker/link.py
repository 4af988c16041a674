"""A rank's end of the channel: messages in, events out.

Two sockets, because a ZeroMQ socket belongs to one thread: messages are read by the main thread only,
events are sent by whoever has something to say, one at a time.
"""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from typing import Any

import zmq

from nbtrain.events import Event
from nbtrain.messages import Message


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a pool listens: `commands.format(rank)` for one rank's messages, `events` for everybody's."""

    commands: str
    events: str

    @staticmethod
    def below(directory: str) -> Addresses:
        return Addresses(f"ipc://{directory}/rank{{}}", f"ipc://{directory}/events")


class Link:
    """Made in the rank's own process: sockets do not survive a fork."""

    def __init__(self, addresses: Addresses, rank: int) -> None:
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PAIR)
        self._events = self._context.socket(zmq.PUSH)
        self._events.linger = 2000
        self._commands.connect(addresses.commands.format(rank))
        self._events.connect(addresses.events)
        self._lock = threading.RLock()

    def receive(self) -> Message:
        message: Any = pickle.loads(self._commands.recv(copy=False).buffer)
        return message  # type: ignore[no-any-return]

    def send(self, event: Event) -> None:
        data = pickle.dumps(event, 5)
        with self._lock:
            self._events.send(data)

    def close(self) -> None:
        self._commands.close(0)
        self._events.close(2000)
        self._context.term()
