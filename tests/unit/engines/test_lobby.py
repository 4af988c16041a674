"""Strangers at the kernel's and at a node's port: what they say again, cut short, or make up, is heard by nobody, and
the pool that runs there goes on. Tickets that are wrong or late: kernel/test_machines.py.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from nbtrain.base.events import Finished
from nbtrain.base.messages import RunCell
from nbtrain.base.specs import MachinesWanted, PoolSpec, RunSpec
from nbtrain.engines.remote import join_message
from nbtrain.engines.remote.lobby import DESCRIPTORS, Lobby, lobby
from nbtrain.engines.remote.numbered_frames import HEAD, NUMBERED, URGENT, Frame
from nbtrain.engines.remote.pool import RemotePool
from nbtrain.engines.remote.ticket import Ticket
from nbtrain.notebook.pool.status import report
from nbtrain.worker.loop.shared_board import STEPS
from tests.support.stub_nodes import StubNode, stub_nodes

MB = 1 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""how every connection of ZeroMQ's begins"""
LONG_COMMAND = 6
"""the byte that a frame of the handshake begins with whose size takes eight bytes"""


@dataclass
class Wire:
    """A relay on the way to the kernel, which keeps what was said."""

    port: int
    """the kernel's"""
    said: list[bytearray] = field(default_factory=list)
    """by each connection, to the kernel"""
    ends: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)
    cut_at: int | None = None
    """of what is said next so many bytes pass, and then the connection is cut"""

    def __post_init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.own_port = self.server.getsockname()[1]
        self.threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, do: object, *args: object) -> None:
        thread = threading.Thread(target=do, args=args)  # type: ignore[arg-type]
        self.threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                self.ends.append((near, far))
                self.said.append(bytearray())
                self._start(self._relay, near, far, self.said[-1])
                self._start(self._relay, far, near, None)

    def _relay(self, one: socket.socket, other: socket.socket, kept: bytearray | None) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if kept is not None:
                    kept += data
                    if self.cut_at is not None:
                        other.sendall(data[: self.cut_at])
                        self.cut_at = None
                        break
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for pair in self.ends:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for pair in self.ends:
            for end in pair:
                end.close()


def frames(said: bytes) -> list[bytes]:
    """The frames of ZeroMQ's that one end of a connection has said."""
    found, at = [], len(GREETING)
    while at + 9 <= len(said):
        head, size = (9, struct.unpack_from(">Q", said, at + 1)[0]) if said[at] & 2 else (2, said[at + 1])
        found.append(bytes(said[at : at + head + size]))
        at += head + size
    return found


@dataclass
class Running:
    """A pool of two machines with two ranks each."""

    pool: RemotePool
    lobby: Lobby
    ticket: Ticket
    nodes: list[StubNode]
    wire: Wire
    cells: int = 0

    def cell(self) -> None:
        """Every rank says once that it has ended."""
        self.cells += 1
        ranks = tuple(info.rank for info in self.pool.ranks)
        self.pool.send(RunCell(
            spec=RunSpec(pool=self.pool.spec), code="pass", filename="", quiet=False, number=self.cells, sent=0.0,
            ranks=ranks,
        ), ranks)  # fmt: skip
        ended: list[int] = []
        until = time.monotonic() + 20
        while len(ended) < len(ranks) and time.monotonic() < until:
            ended += [event.rank for event in self.pool.poll(0.1) if isinstance(event, Finished)]
        assert sorted(ended) == list(ranks)
        assert not [event for event in self.pool.poll(0.05) if isinstance(event, Finished)]

    def status(self) -> str:
        return report(self.pool, None)

    def undisturbed(self) -> None:
        """The machines are the same as ever, and work."""
        assert len(self.lobby.machines()) == 2
        assert len(self.pool.alive()) == 4
        self.cell()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.lobby.port), 2)


@pytest.fixture
def running() -> Iterator[Running]:
    here = lobby()
    with ExitStack() as stack:
        stack.callback(here.close)
        wire = Wire(here.port)
        stack.callback(wire.close)
        ticket = replace(here.ticket(), addresses=("127.0.0.1",))
        through = replace(ticket, port=wire.own_port)
        nodes = stack.enter_context(stub_nodes(through, 2))
        spec = PoolSpec(engine="elastic", devices=("cpu",) * 4, nodes=2, machines=MachinesWanted(nodes=2))
        pool = RemotePool(spec)
        stack.callback(pool.close)
        until = time.monotonic() + 20
        while len(pool.alive()) < 4 and time.monotonic() < until:
            pool.poll(0.05)
        found = Running(pool, here, ticket, nodes, wire)
        found.cell()
        yield found


def cut_off(stranger: socket.socket) -> bool:
    """Whether the kernel ends the connection; what it says before that is its own handshake's."""
    stranger.settimeout(5)
    with suppress(ConnectionError):
        try:
            while stranger.recv(MB):
                pass
        except TimeoutError:
            return False
    return True


def test_what_was_said_by_a_machine_is_not_heard_of_another_connection(running: Running) -> None:
    spoken = [bytes(said) for said in list(running.wire.said) if len(frames(said)) > 3]
    assert len(spoken) == 2
    for said in spoken:
        with running.connect() as stranger:
            with suppress(OSError):
                stranger.sendall(said)
            assert cut_off(stranger)
    running.undisturbed()


def test_what_is_said_again_on_a_machines_own_connection_ends_that_and_it_comes_anew(running: Running) -> None:
    wire = running.wire
    (number, *_) = [number for number, said in enumerate(wire.said) if len(frames(said)) > 3]
    count, last = len(wire.said), frames(wire.said[number])[-1]
    wire.ends[number][1].sendall(last)
    until = time.monotonic() + 10
    while len(wire.said) == count and time.monotonic() < until:
        time.sleep(0.02)
    assert len(wire.said) > count
    running.undisturbed()


@pytest.mark.parametrize("size", [1, 63, 64, 200, 300])
def test_a_frame_that_is_cut_short_changes_nothing(running: Running, size: int) -> None:
    """By a stranger who has heard a machine's first words; sizes are within the greeting, and within the handshake."""
    said = max(running.wire.said, key=len)
    with running.connect() as stranger:
        stranger.sendall(said[:size])
    running.undisturbed()


@pytest.mark.parametrize("size", [1, 20])
def test_a_machine_whose_frame_was_cut_short_says_it_again(running: Running, size: int) -> None:
    count = len(running.wire.said)
    running.wire.cut_at = size
    running.cell()
    until = time.monotonic() + 10
    while len(running.wire.said) == count and time.monotonic() < until:
        time.sleep(0.02)
    assert len(running.wire.said) > count
    running.undisturbed()


@contextmanager
def speaking(running: Running, with_ticket: bool) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    pair = zmq.curve_keypair()
    made.curve_serverkey = running.ticket.kernel_key.encode()
    made.curve_publickey = running.ticket.public_key.encode() if with_ticket else pair[0]
    made.curve_secretkey = running.ticket.secret_key.encode() if with_ticket else pair[1]
    made.connect(f"tcp://127.0.0.1:{running.lobby.port}")
    yield made
    context.destroy(0)


def refused(running: Running) -> int:
    until = time.monotonic() + 5
    while not running.lobby.admission.refused and time.monotonic() < until:
        time.sleep(0.02)
    return sum(running.lobby.admission.refused.values())


JOINS = HEAD.pack(URGENT, 0, 0), join_message.MARK


@pytest.mark.parametrize("said", [
    [b""], [b"short"], [b"\xff" + os.urandom(MB)], [*JOINS, b"no JSON"], [*JOINS, b"[" * MB],
    [*JOINS, b'{"machine": 1}'],
], ids=["0", "5", "MB", "words", "deep", "other"])  # fmt: skip
def test_what_somebody_with_a_ticket_makes_up_is_refused_and_counted(running: Running, said: list[bytes]) -> None:
    with speaking(running, with_ticket=True) as stranger:
        stranger.send_multipart(said)
        assert refused(running) == 1
    assert "refused: 1 × " in running.status()
    running.undisturbed()


class _Opened:
    """A pickle that leaves a folder behind where it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize(("kind", "said"), [
    ("another", "cannot read what this machine says: is nbtrain"),
    ("expired", "this ticket has expired"),
])  # fmt: skip
def test_nothing_is_opened_of_who_does_not_take_part(running: Running, tmp_path: Path, kind: str, said: str) -> None:
    """The ticket has been used: its machines may come again after a connection that has dropped."""
    given, opened = running.lobby.admission._given[running.ticket.public_key], tmp_path / "opened"
    if kind == "expired":
        given.ticket = replace(given.ticket, expires=0.0)
    with speaking(running, with_ticket=True) as stranger:
        for frame_kind in (URGENT, NUMBERED):
            stranger.send_multipart([HEAD.pack(frame_kind, 1, 0), pickle.dumps(_Opened(opened))])
        assert stranger.poll(5000)
        assert said in pickle.loads(stranger.recv_multipart()[-1]).reason
        assert not stranger.poll(200)  # said once
    assert not opened.exists()


def test_an_expired_ticket_connects_only_who_has_joined_with_it(running: Running) -> None:
    here = running.lobby
    given = here.admission._given[running.ticket.public_key]
    given.ticket = replace(given.ticket, expires=0.0)
    for _, far in list(running.wire.ends):
        with suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)
    running.cell()  # they come again
    running.undisturbed()
    assert not here.admission.refused
    for peer in here.machines():
        here.soon(partial(here._lose, peer, "the test has given it up"))
    here.wait(lambda: not here.machines(), 5)
    with speaking(running, with_ticket=True):
        assert refused(running)
    assert "× an expired ticket" in running.status()


def test_who_has_no_ticket_is_refused_and_counted(running: Running) -> None:
    with speaking(running, with_ticket=False) as stranger:
        stranger.send(b"hello")
        assert refused(running)
    assert "× no ticket of this notebook" in running.status()
    running.undisturbed()


def test_strangers_who_say_nothing_use_up_no_descriptors(running: Running) -> None:
    """A thousand of them: the machines come again, and a new one joins; each is cut off in three seconds."""
    own = psutil.Process()
    soft, hard = own.rlimit(psutil.RLIMIT_NOFILE)
    assert soft >= min(DESCRIPTORS, hard)
    with ExitStack() as stack:
        strangers = [stack.enter_context(running.connect()) for _ in range(1000)]
        running.undisturbed()
        assert cut_off(strangers[0])
        assert cut_off(strangers[-1])


@pytest.mark.parametrize("begins", [b"", GREETING, GREETING + bytes([LONG_COMMAND]) + struct.pack(">Q", 1 << 30)],
                         ids=["nothing", "greeting", "size"])  # fmt: skip
def test_a_gigabyte_of_garbage_takes_no_memory(running: Running, begins: bytes) -> None:
    own, garbage = psutil.Process(), os.urandom(MB)
    before = most = own.memory_info().rss
    with running.connect() as stranger, suppress(OSError):
        stranger.sendall(begins)
        for _ in range(1024):
            stranger.sendall(garbage)
            most = max(most, own.memory_info().rss)
    assert most - before < 32 * MB
    running.undisturbed()


def test_a_machine_that_is_slow_is_told_no_more_than_it_receives(running: Running) -> None:
    """Else Stop would wait behind all that ranks elsewhere have written meanwhile."""
    fast, slow = sorted(running.nodes, key=lambda node: node._pool.ranks[0].rank)
    peer, goes_on = running.pool._places[1], threading.Event()
    polls = slow._poll
    slow._poll = lambda seconds: (goes_on.wait(), polls(seconds))[1]
    fast._busy.add(0)  # so that it looks at the board often
    for step in range(1, 101):
        fast._pool.board.parts[0][STEPS] = step
        time.sleep(0.01)
    fast._busy.clear()
    waiting = len(peer.frames._queue) + len(peer.frames._open)
    goes_on.set()
    assert waiting <= 2
    until = time.monotonic() + 5
    while slow._pool.board.parts[0][STEPS] != 100 and time.monotonic() < until:
        time.sleep(0.02)
    assert slow._pool.board.parts[0][STEPS] == 100
    running.undisturbed()


def test_a_machine_that_is_given_up_with_frames_under_way_is_told_so_and_ends(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its frames was answered, each answer sent them all again, and neither side did anything else."""
    here, node, answers = running.lobby, running.nodes[0], list[bytes]()
    post = here._post

    def counted(identity: bytes, parts: Sequence[Frame]) -> bool:
        answers.append(identity)
        return post(identity, parts)

    monkeypatch.setattr(here, "_post", counted)
    (peer,) = (one for one in here.machines() if one.identity == node._kernel._identity)

    def give_up() -> None:
        here._lose(peer, "the test has given it up")
        for _ in range(20):
            node._kernel.send(None, bytes(1000))

    here.soon(give_up)
    until = time.monotonic() + 10
    while not node._over and time.monotonic() < until:
        time.sleep(0.02)
    assert node._over == "the notebook has given this machine up"
    assert answers.count(peer.identity) < 5


# -- a node's port ------------------------------------------------------------------------------------------

STORE = """
from nbtrain.engines.remote.node import _own_store
store = _own_store()
print(store.port, flush=True)
while word := input():
    store.set(word, word)
    print(store.get(word).decode(), flush=True)
"""


def test_strangers_where_process_groups_meet() -> None:
    """torch's store asks nobody who he is; what it cannot read ends that connection alone."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", STORE], text=True, bufsize=1, **pipes) as node:  # type: ignore[call-overload]

        def works(word: str) -> bool:
            node.stdin.write(f"{word}\n")
            return bool(node.stdout.readline().strip() == word)

        port, own, garbage = int(node.stdout.readline()), psutil.Process(node.pid), os.urandom(MB)
        assert works("before")
        before = most = own.memory_info().rss
        for said, times in ((b"\0", 1), (garbage[:17], 1), (garbage, 1), (garbage, 1024)):
            with socket.create_connection(("127.0.0.1", port), 2) as stranger, suppress(OSError):
                for _ in range(times):
                    stranger.sendall(said)
                    most = max(most, own.memory_info().rss)
            assert works("between")
        assert most - before < 64 * MB
        node.stdin.write("\n")
