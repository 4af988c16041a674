"""The sockets between kernel and ranks at their limits: interrupts, ranks that do not read, broken bytes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from nbtrain.engines._local.channel import PATIENCE, Channel
from nbtrain.errors import PoolError
from nbtrain.events import Output, RankState
from nbtrain.messages import Forget, Source
from nbtrain.worker.link import HEAD, Frames, Link, address, frame

BIG = "x" * (4 << 20)
"""Characters; no socket's buffer holds them."""


@pytest.fixture
def directory() -> Iterator[str]:
    import nbtrain.engines._local.directory as directory

    path = directory.make()
    yield path
    directory.remove(path)


@pytest.fixture
def channel(directory: str) -> Iterator[Channel]:
    made = Channel(directory, 1)
    yield made
    made.close()


def state(name: str) -> RankState:
    return RankState(rank=0, time=0.0, state=name)


def test_an_interrupt_does_not_tear_a_frame(directory: str) -> None:
    """It comes while a rank waits for the notebook to read what it prints."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address(directory))
    listener.listen(1)
    link = Link(directory)
    connection, _ = listener.accept()
    event, heard = Output(rank=0, time=0.0, stream="stdout", text=BIG), []

    def read() -> None:
        connection.recv(1, socket.MSG_PEEK)  # the frame has begun
        os.kill(os.getpid(), signal.SIGINT)
        frames = Frames()
        while data := connection.recv(1 << 18):
            heard.extend(frames.feed(data))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            link.send(event)
        link.send(state("ready"))
    finally:
        link.close()
        reader.join()
        connection.close()
        listener.close()
    assert heard == [event, state("ready")]


def test_what_cannot_be_opened_is_met_once() -> None:
    frames = Frames()
    with pytest.raises(Exception, match=r"pickle|unpickling|load key"):
        frames.feed(HEAD.pack(4) + b"\xff\xff\xff\xff")
    assert frames.feed(frame(Forget())) == [Forget()]


def test_nonsense_from_a_rank_is_the_pools_failure(channel: Channel, directory: str) -> None:
    link = Link(directory)
    link.send(state("ready"))
    channel.receive(1)
    link._socket.sendall(HEAD.pack(4) + b"\xff\xff\xff\xff")
    with pytest.raises(PoolError, match="what a rank said cannot be read"):
        while channel.receive(1):
            pass
    assert channel.receive(0) == []
    link.close()


def test_a_rank_that_does_not_read_is_given_up(channel: Channel, directory: str) -> None:
    link = Link(directory)
    link.send(state("ready"))
    while not channel.receive(1):
        pass
    began = time.monotonic()
    with pytest.raises(PoolError, match="rank 0 takes no message"):
        channel.send(Source(filename="", text=BIG, number=None), [0])  # type: ignore[arg-type]
    assert PATIENCE <= time.monotonic() - began < 2 * PATIENCE
    link.close()


def test_a_rank_that_starts_is_not_written_to(channel: Channel, directory: str) -> None:
    """It may be a while until it reads, and the notebook must not wait in a write."""
    message = Source(filename="", text=BIG, number=None)
    channel.send(message, [0])  # type: ignore[arg-type]
    link = Link(directory)
    link.send(state("starting"))
    while not channel.receive(1):
        pass
    with pytest.raises(BlockingIOError):
        link._socket.recv(1, socket.MSG_DONTWAIT)
    heard = []
    reader = threading.Thread(target=lambda: heard.append(link.receive()))
    reader.start()
    link.send(state("ready"))
    while not channel.receive(1):
        pass
    reader.join()
    assert heard == [message]
    link.close()
