"""The kernel's end of the channel: one socket to each rank, one for everybody's events."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import zmq

from nbtrain.events import Event
from nbtrain.messages import Message
from nbtrain.worker.link import Addresses

PATIENCE = 5000
"""Milliseconds that a message may wait to be taken; a rank reads between cells only, and then at once."""


class Channel:
    """A socket that nobody has connected to takes no message: they wait here until the rank has said something."""

    def __init__(self, directory: str, world_size: int) -> None:
        addresses = Addresses.below(directory)
        self._context = zmq.Context()
        self._commands = []
        for rank in range(world_size):
            socket = self._context.socket(zmq.PAIR)
            socket.linger = 0
            socket.sndtimeo = PATIENCE
            socket.bind(addresses.commands.format(rank))
            self._commands.append(socket)
        self._waiting: dict[int, list[bytes]] = {rank: [] for rank in range(world_size)}
        """messages for ranks that are not there yet"""
        self._events = self._context.socket(zmq.PULL)
        self._events.bind(addresses.events)
        self._poller = zmq.Poller()
        self._poller.register(self._events, zmq.POLLIN)

    def watch(self, fd: int) -> None:
        """Wake up for this descriptor too."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poller.unregister(fd)

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        data = pickle.dumps(message, 5)
        for rank in ranks:
            if rank in self._waiting:
                self._waiting[rank].append(data)
            else:
                self._commands[rank].send(data)

    def receive(self, seconds: float) -> list[Event]:
        """Every event there is; waits for the first one, or for a watched descriptor."""
        self._poller.poll(max(int(seconds * 1000), 0))
        events: list[Event] = []
        while True:
            try:
                event = pickle.loads(self._events.recv(zmq.NOBLOCK, copy=False).buffer)
            except zmq.Again:
                return events
            events.append(event)
            for data in self._waiting.pop(event.rank, ()):
                self._commands[event.rank].send(data)

    def close(self) -> None:
        for socket in (*self._commands, self._events):
            socket.close(0)
        self._context.term()
