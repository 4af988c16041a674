"""The sockets between kernel and ranks at their limits: interrupts, ranks that do not read, broken bytes."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nbtrain.engines._local.channel import PATIENCE, Channel
from nbtrain.errors import PoolError
from nbtrain.events import Event, Output, RankState
from nbtrain.messages import Forget, Source
from nbtrain.worker.link import DOWN, HEAD, NAME, UP, Frames, Link, Sealer, address

SECRET = b"of this process"
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
    link = Link(directory, 0, SECRET)
    connection, _ = listener.accept()
    event, heard = Output(rank=0, time=0.0, stream="stdout", text=BIG), []

    def read() -> None:
        connection.recv(1, socket.MSG_PEEK)  # the frame has begun
        os.kill(os.getpid(), signal.SIGINT)
        frames = Frames(SECRET, UP)
        connection.recv(NAME.size)
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
    frames, sealer = Frames(SECRET, DOWN), Sealer(SECRET, DOWN)
    with pytest.raises(Exception, match=r"pickle|unpickling|load key"):
        frames.feed(sealer.frame(b"\xff\xff\xff\xff"))
    assert frames.feed(sealer.frame(pickle.dumps(Forget()))) == [Forget()]


def test_nonsense_from_a_rank_is_the_pools_failure(channel: Channel, directory: str) -> None:
    link = Link(directory, 0, channel.secrets[0])
    link.send(state("ready"))
    channel.receive(1)
    link._socket.sendall(link._sealer.frame(b"\xff\xff\xff\xff"))
    with pytest.raises(PoolError, match="what a rank said cannot be read"):
        while channel.receive(1):
            pass
    assert channel.receive(0) == []
    link.close()


def test_a_rank_that_does_not_read_is_given_up(channel: Channel, directory: str) -> None:
    link = Link(directory, 0, channel.secrets[0])
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
    link = Link(directory, 0, channel.secrets[0])
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


class Bomb:
    """What a pickle may do to whoever opens it."""

    armed = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "armed", True)


def strangers(rank: int = 0) -> dict[str, bytes]:
    """What somebody may send who can connect and does not know the secret."""
    name, bomb = NAME.pack(rank), pickle.dumps(Bomb())
    return {
        "nothing": b"",
        "a bare pickle": bomb,
        "a pickle in a frame without a seal": name + HEAD.pack(len(bomb), bytes(16)) + bomb,
        "a frame sealed with a secret of his own": name + Sealer(b"another", UP).frame(bomb),
        "a rank that there is not": NAME.pack(7) + Sealer(SECRET, UP).frame(bomb),
        "a frame as long as all memory": name + HEAD.pack(1 << 62, bytes(16)) + bomb,
        "noise": bytes(range(256)) * 64,
    }


def dropped(channel: Channel, stranger: socket.socket) -> None:
    """The kernel hears nothing from this connection, and closes it."""
    while True:
        assert channel.receive(0.01) == []
        with contextlib.suppress(BlockingIOError):
            assert stranger.recv(1, socket.MSG_DONTWAIT) == b""
            return


@pytest.mark.parametrize("name", strangers())
def test_what_a_stranger_sends_is_not_opened(channel: Channel, directory: str, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(address(directory))
        stranger.sendall(strangers()[name])
        stranger.shutdown(socket.SHUT_WR)
        dropped(channel, stranger)
    assert not Bomb.armed
    link = Link(directory, 0, channel.secrets[0])  # the rank itself is still welcome
    link.send(state("ready"))
    heard: list[Event] = []
    while not heard:
        heard = channel.receive(1)
    assert heard == [state("ready")]
    link.close()


def test_what_was_said_before_is_not_heard_again(channel: Channel, directory: str) -> None:
    """Neither on another connection, nor on the same, nor when a new process has taken the rank's place."""
    sealer = Sealer(channel.secrets[0], UP)
    said = NAME.pack(0) + sealer.frame(pickle.dumps(state("ready")))
    with socket.socket(socket.AF_UNIX) as rank, socket.socket(socket.AF_UNIX) as other:
        rank.connect(address(directory))
        rank.sendall(said)
        while not channel.receive(1):
            pass
        other.connect(address(directory))
        other.sendall(said)
        dropped(channel, other)
        rank.sendall(said[NAME.size :])
        with pytest.raises(PoolError, match="seal is not right"):
            while channel.receive(1):
                pass
    channel.expect(0)
    with socket.socket(socket.AF_UNIX) as late:
        late.connect(address(directory))
        late.sendall(said)
        dropped(channel, late)
