"""The sockets between kernel and ranks at their limits: interrupts, ranks that do not read, broken bytes, strangers."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import nbtrain.engines._local.directory as private
from nbtrain.base.awake_time import AwakeTimeout
from nbtrain.base.errors import PoolError
from nbtrain.base.events import Event, Metrics, Output, RankState
from nbtrain.base.messages import CellSource, Forget
from nbtrain.base.specs import RankInfo
from nbtrain.engines._local.kernel_channel import PATIENCE, STRANGERS, Channel
from nbtrain.worker.process.process_group import RankGroup
from nbtrain.worker.process.rank_channel import DOWN, HEAD, NAME, UP, Forged, Frames, Link, Sealer, address
from nbtrain.worker.shell.output import Outlet

SECRET = b"of this process"
BIG = "x" * (4 << 20)
"""Characters; no socket's buffer holds them."""


@pytest.fixture
def directory() -> Iterator[str]:
    path = private.make()
    yield path
    private.remove(path)


@pytest.fixture
def channel(directory: str) -> Iterator[Channel]:
    made = Channel(directory, [0])
    yield made
    made.close()


@pytest.fixture
def connect(directory: str) -> Iterator[Callable[[], socket.socket]]:
    """One more connection, by whoever it may be."""
    with ExitStack() as stack:

        def connected() -> socket.socket:
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.connect(address(directory))
            return made

        yield connected


@contextmanager
def linked(channel: Channel, directory: str, rank: int = 0) -> Iterator[Link]:
    """A rank whose name was heard."""
    link = Link(directory, rank, channel.secrets[rank])
    try:
        while rank not in channel._ranks:
            assert channel.receive(1) == []
        yield link
    finally:
        link.close()


@contextmanager
def meanwhile(target: Callable[[], Any], *, free: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """`target` in a thread of its own; `free` is what makes it end should the test fail."""
    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield
    except BaseException:
        free()
        raise
    finally:
        thread.join()


def state(name: str, rank: int = 0) -> RankState:
    return RankState(rank=rank, time=0.0, state=name)


def big() -> Any:
    return CellSource(filename="", text=BIG, number=None)


def heard(channel: Channel) -> list[Event]:
    """The next events, waited for."""
    while not (events := channel.receive(1)):
        pass
    return events


def still_welcome(channel: Channel, directory: str) -> None:
    """The rank itself can come and speak."""
    with linked(channel, directory) as link:
        link.send(state("ready"))
        assert heard(channel) == [state("ready")]


def dropped(channel: Channel, stranger: socket.socket) -> None:
    """The kernel hears nothing from this connection, and closes it."""
    stranger.setblocking(False)
    while True:
        assert channel.receive(0.01) == []
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:  # it had said more than was read
            return
        except BlockingIOError:
            continue
        return


# -- ranks that are slow, interrupted or confused --------------------------------------------


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What a signal raises in a callback of the garbage collector is swallowed, and hypothesis has such a callback."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_an_interrupt_does_not_tear_a_frame(channel: Channel, directory: str) -> None:
    """It comes while a rank waits for the notebook to read what it prints."""
    event, came = Output(rank=0, time=0.0, stream="stdout", text=BIG), list[Event]()
    with linked(channel, directory) as link:
        connection = channel._ranks[0][0]

        def read() -> None:
            connection.setblocking(True)
            connection.recv(1, socket.MSG_PEEK)  # the frame has begun
            connection.setblocking(False)
            os.kill(os.getpid(), signal.SIGINT)
            patience = AwakeTimeout(20)
            while len(came) < 2 and not patience.over:
                came.extend(channel.receive(0.1))

        with meanwhile(read, free=link.close):
            with pytest.raises(KeyboardInterrupt):
                link.send(event)
            link.send(state("ready"))
    assert came == [event, state("ready")]


def test_what_a_cell_logs_goes_in_order_and_in_few_messages() -> None:
    events = list[Event]()
    outlet = Outlet(3, events.append)
    outlet.begin(state("running"), shows_widgets=True)
    for step in range(1000):
        outlet.log(step, {"loss": step / 2, "twice": step})
    outlet.write("stdout", "after it\n")
    outlet.flush()
    first, *metrics, text = events
    assert first == state("running")
    assert isinstance(text, Output)
    found: dict[str, list[tuple[int, float]]] = {"loss": [], "twice": []}
    for event in metrics:
        assert isinstance(event, Metrics)
        assert event.rank == 3
        for name, points in event.points.items():
            found[name] += points
    assert found["loss"] == [(step, step / 2) for step in range(1000)]
    assert found["twice"] == [(step, step) for step in range(1000)]
    assert isinstance(metrics[0], Metrics)
    assert metrics[0].points == {"loss": [(0, 0.0)], "twice": [(0, 0)]}, "the first goes at once: it may be the last"
    assert len(metrics) < 100


@pytest.mark.usefixtures("uncollected")
def test_interrupts_leave_no_lock_held_and_lose_no_text() -> None:
    """A signal may strike between any two instructions, those in which `threading` takes an event's lock too."""
    text = list[str]()
    outlet = Outlet(0, lambda event: text.append(event.text) if isinstance(event, Output) else None)
    main, over, armed, written, struck = os.getpid(), time.monotonic() + 1.5, False, 0, 0

    def strike(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, strike)
    if (pest := os.fork()) == 0:  # not a thread: its signals would come where threads take turns
        while time.monotonic() < over and os.getppid() == main:
            os.kill(main, signal.SIGINT)
            time.sleep(0.0001)
        os._exit(0)
    try:
        while time.monotonic() < over:
            try:
                armed = True
                while armed and time.monotonic() < over:
                    written += 1
                    outlet.write("stdout", "x")
                    outlet.flush()
            except KeyboardInterrupt:
                struck += 1
            assert not outlet.waiting._cond._lock.locked()  # type: ignore[attr-defined]
    finally:
        os.waitpid(pest, 0)
        signal.signal(signal.SIGINT, before)
    outlet.flush()
    assert struck > 10
    assert len("".join(text)) >= written - struck, "what was not written was not lost"


def test_nonsense_from_a_rank_is_the_pools_failure(channel: Channel, directory: str) -> None:
    """The rank says it itself, so it is opened; it may be an object of the user's that cannot be."""
    with linked(channel, directory) as link:
        link._socket.sendall(link._sealer.frame(b"\xff\xff\xff\xff"))
        with pytest.raises(PoolError, match="what rank 0 said cannot be read"):
            heard(channel)
        assert channel.receive(0) == []


def test_a_rank_that_does_not_read_is_given_up(channel: Channel, directory: str, monkeypatch: Any) -> None:
    assert PATIENCE > 1
    monkeypatch.setattr("nbtrain.engines._local.kernel_channel.PATIENCE", patience := 0.5)
    with linked(channel, directory) as link:
        link.send(state("ready"))
        heard(channel)
        began = time.monotonic()
        with pytest.raises(PoolError, match="rank 0 takes no message"):
            channel.send(big(), [0])
        assert patience <= time.monotonic() - began < 10


def test_a_rank_that_starts_is_not_written_to(channel: Channel, directory: str) -> None:
    """It may be a while until it reads, and the notebook must not wait in a write."""
    channel.send(big(), [0])
    with linked(channel, directory) as link:
        link.send(state("starting"))
        heard(channel)
        with pytest.raises(BlockingIOError):
            link._socket.recv(1, socket.MSG_DONTWAIT)
        came: list[Any] = []
        with meanwhile(lambda: came.append(link.receive()), free=lambda: link._socket.shutdown(socket.SHUT_RDWR)):
            link.send(state("ready"))
            heard(channel)
    assert came == [big()]


def test_what_was_read_while_another_was_written_to_is_not_waited_for(directory: str) -> None:
    """Both ranks speak at once; whoever is read second is read in the middle of a long message to the first."""
    channel, read = Channel(directory, range(2)), threading.Event()
    came: list[Any] = []

    def receive(link: Link) -> None:
        read.wait()
        with suppress(EOFError):
            came.append(link.receive())

    with closing(channel), linked(channel, directory, 0) as first, linked(channel, directory, 1) as second:

        def both_heard() -> None:
            patience = AwakeTimeout(3)
            while len(channel._heard) < 2 and not patience.over:
                time.sleep(0.001)
            read.set()

        channel.send(big(), [0, 1])
        first.send(state("ready", 0))
        second.send(state("ready", 1))
        with (
            meanwhile(both_heard, free=read.set),
            meanwhile(lambda: receive(first), free=lambda: first._socket.shutdown(socket.SHUT_RDWR)),
            meanwhile(lambda: receive(second), free=lambda: second._socket.shutdown(socket.SHUT_RDWR)),
        ):
            assert {event.rank for event in heard(channel)} == {0, 1}
    assert came == [big(), big()]


# -- what nobody of ours has said ------------------------------------------------------------


class Bomb:
    """What a pickle may do to whoever opens it: this one makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)

    @property
    def armed(self) -> bytes:
        return pickle.dumps(self)

    @property
    def went_off(self) -> bool:
        return self.path.exists()


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[Bomb]:
    """Must not go off in the test, and does at its end: else it would prove nothing."""
    made = Bomb(tmp_path / "opened")
    yield made
    assert not made.went_off
    pickle.loads(made.armed)
    assert made.went_off


def recorded(secret: bytes, *contents: bytes) -> bytes:
    """All that a rank with this secret says."""
    sealer = Sealer(secret, UP)
    return sealer.name(0) + b"".join(map(sealer.frame, contents))


STRANGERS_SAY: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda bomb: b"",
    "half a name": lambda bomb: NAME.pack(0, bytes(16))[:10],
    "a bare pickle": lambda bomb: bomb,
    "the name of a rank that is expected, without a seal": lambda bomb: NAME.pack(0, bytes(16)) + bomb,
    "a name and a frame, sealed with another secret": lambda bomb: recorded(SECRET, bomb),
    "a name without a seal and a frame as long as all memory": lambda bomb: (
        NAME.pack(0, bytes(16)) + HEAD.pack(1 << 63, bytes(16), bytes(16)) + bomb
    ),
    "a rank that there is not": lambda bomb: NAME.pack(7, bytes(16)) + bomb,
    "noise": lambda bomb: bytes(range(256)) * 64,
}
"""By somebody who can connect and does not know the secret."""


@pytest.mark.parametrize("what", STRANGERS_SAY)
def test_what_a_stranger_says_is_not_opened(
    channel: Channel, directory: str, connect: Callable[[], socket.socket], bomb: Bomb, what: str
) -> None:
    stranger = connect()
    stranger.sendall(STRANGERS_SAY[what](bomb.armed))
    stranger.shutdown(socket.SHUT_WR)
    dropped(channel, stranger)
    still_welcome(channel, directory)


def test_a_stranger_cannot_take_the_place_of_a_rank(
    channel: Channel, directory: str, connect: Callable[[], socket.socket], bomb: Bomb
) -> None:
    """Not even with the secret: there is one process of this name, and it is here."""
    with linked(channel, directory) as link:
        stranger = connect()
        stranger.sendall(recorded(channel.secrets[0], bomb.armed))
        dropped(channel, stranger)
        link.send(state("ready"))
        assert heard(channel) == [state("ready")]


def test_strangers_who_say_nothing_keep_nobody_waiting(
    channel: Channel, directory: str, connect: Callable[[], socket.socket]
) -> None:
    before = len(os.listdir("/dev/fd"))
    silent = []
    for count in range(3 * STRANGERS):
        silent.append(connect())
        if count % 2:
            silent[-1].sendall(NAME.pack(0, bytes(16))[:-1])
        assert channel.receive(0.01) == []
    still_welcome(channel, directory)
    assert len(channel._strangers) <= STRANGERS
    assert len(os.listdir("/dev/fd")) - before - len(silent) <= STRANGERS + 2
    for early in silent[: len(silent) - STRANGERS]:
        assert early.recv(1) == b""


def test_no_more_is_read_of_a_stranger_than_a_name(
    channel: Channel, directory: str, connect: Callable[[], socket.socket]
) -> None:
    """Whoever sends a gigabyte has sent what a socket's buffer holds when he is dropped."""
    stranger, sent = connect(), 0
    stranger.setblocking(False)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while sent < 1 << 30:
            try:
                sent += stranger.send(b"x" * (1 << 16))
            except BlockingIOError:
                assert channel.receive(0.01) == []
    assert sent < 1 << 22
    still_welcome(channel, directory)


def test_every_flipped_bit_of_a_frame_is_noticed_before_it_is_opened(bomb: Bomb) -> None:
    """Also in the length, at once: nobody waits for bytes that will never come."""
    whole = Sealer(SECRET, UP).frame(bomb.armed)
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Forged):
            Frames(SECRET, UP).feed(changed)


def test_a_rank_that_dies_in_the_middle_of_a_frame_is_heard_until_there(
    channel: Channel, directory: str, bomb: Bomb
) -> None:
    with linked(channel, directory) as link:
        link.send(state("ready"))
        link._socket.sendall(link._sealer.frame(bomb.armed)[:-1])
    assert heard(channel) == [state("ready")]
    assert channel.receive(0.01) == []
    began = time.monotonic()
    assert channel.receive(0.2) == []  # its end was met, and is not met again
    assert time.monotonic() - began > 0.1
    channel.send(big(), [0])  # its death is told by others; nobody waits for it here


def test_a_rank_that_spoke_and_died_is_known_to_have_ended(channel: Channel, directory: str) -> None:
    """What asks before a cell whether all are there asks once; its last words must not hide that it is gone."""
    with linked(channel, directory) as link:
        link.send(state("idle"))
        link.close()
        assert channel.receive(0) == [state("idle")]
        assert channel.ended == {0}


FORGED: dict[str, Callable[[bytes], bytes]] = {
    "a frame sealed with another secret": lambda bomb: Sealer(SECRET, UP).frame(bomb),
    "a length of all memory": lambda bomb: HEAD.pack(1 << 63, bytes(16), bytes(16)),
    "what a cell prints to a descriptor that is not its own": lambda bomb: b"loss 0.25 accuracy 0.75\n" * 10,
}


@pytest.mark.parametrize("what", FORGED)
def test_a_rank_with_whose_voice_somebody_else_speaks_is_given_up(
    channel: Channel, directory: str, bomb: Bomb, what: str
) -> None:
    with linked(channel, directory) as link:
        link.send(state("ready"))
        assert heard(channel) == [state("ready")]
        link._socket.sendall(FORGED[what](bomb.armed))
        with pytest.raises(PoolError, match=r"rank 0 is given up: .* seal that is not right, so it was not opened"):
            heard(channel)
        link._socket.settimeout(5)
        with suppress(ConnectionResetError):
            assert link._socket.recv(1) == b""
        assert channel.receive(0) == []
        channel.send(Forget(), [0])  # who closes the pool still tries


# -- what was said before --------------------------------------------------------------------


def test_frames_in_another_order_or_with_one_left_out_are_not_opened(bomb: Bomb) -> None:
    sealer = Sealer(SECRET, UP)
    first, second = sealer.frame(pickle.dumps(1)), sealer.frame(bomb.armed)
    for said in (second, second + first, first + first):
        with pytest.raises(Forged):
            Frames(SECRET, UP).feed(said)
    frames = Frames(SECRET, UP)
    with pytest.raises(Forged):  # nor do the rest make sense once one was wrong
        frames.feed(bytes(HEAD.size) + first)
    with pytest.raises(Forged):
        frames.feed(second)


def test_what_was_said_is_not_heard_on_another_connection(
    channel: Channel, directory: str, connect: Callable[[], socket.socket], bomb: Bomb
) -> None:
    """Neither beside the first, nor after it has ended, nor when a new process has taken the rank's place."""
    said = recorded(channel.secrets[0], bomb.armed)
    first = connect()
    first.sendall(said[: NAME.size])
    while 0 not in channel._ranks:
        assert channel.receive(1) == []
    for change in (lambda: None, first.close, lambda: channel.expect(0)):
        change()
        other = connect()
        other.sendall(said)
        dropped(channel, other)
    still_welcome(channel, directory)


def test_a_new_process_of_a_rank_has_another_secret(channel: Channel, directory: str) -> None:
    """And the connection of the one before is heard no more."""
    earlier = channel.secrets[0]
    with linked(channel, directory) as link:
        channel.expect(0)
        assert channel.secrets[0] != earlier
        with suppress(BrokenPipeError):
            link.send(state("ready"))
        assert channel.receive(0.01) == []
        still_welcome(channel, directory)


def test_what_went_in_one_direction_is_not_heard_in_the_other(channel: Channel, directory: str, bomb: Bomb) -> None:
    with pytest.raises(Forged):
        Frames(SECRET, DOWN).feed(Sealer(SECRET, UP).frame(bomb.armed))
    with linked(channel, directory) as link:
        connection, sealer = channel._ranks[0]
        connection.sendall(link._sealer.frame(bomb.armed))
        with pytest.raises(Forged):
            link.receive()
        link._socket.sendall(sealer.frame(bomb.armed))
        with pytest.raises(PoolError, match="seal that is not right"):
            heard(channel)


def test_whoever_takes_the_kernels_place_is_not_obeyed(directory: str, bomb: Bomb) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(directory))
        listener.listen(1)
        link = Link(directory, 0, SECRET)
        connection, _ = listener.accept()
        with connection:
            said = connection.recv(1 << 16)
            assert SECRET not in said
            connection.sendall(Sealer(b"another", DOWN).frame(bomb.armed))
            with pytest.raises(Forged):
                link.receive()
        link.close()


# -- the process group's connections -------------------------------------------------------------


def test_giving_a_group_up_leaves_a_users_own_sockets() -> None:
    """A thread of the user's may open some while a group is formed, so they are noted with the group's."""
    info = RankInfo(rank=0, world_size=2, local_rank=0, device="cpu", threads=1)
    with ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        here = stack.enter_context(socket.create_connection(listener.getsockname()))
        there = stack.enter_context(listener.accept()[0])
        group = RankGroup(info, "gloo")
        group._sockets = {(s.fileno(), os.fstat(s.fileno()).st_ino) for s in (ours, listener, here)}
        group.give_up()
        assert there.recv(1) == b"", "as the group's: on this machine"
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
