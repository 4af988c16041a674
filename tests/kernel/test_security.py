"""What others on the machine can see, open and reach of a kernel, its nursery and its ranks: nothing.

Everything is looked up in /proc, of a real kernel whose files lie in a place that everybody may write to, as /tmp is.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import nbtrain.engines._local.directory as private
from nbtrain.base.errors import PoolError
from nbtrain.engines._local.kernel_channel import Channel
from nbtrain.watch.beacon import Beacon, BeaconRecord
from nbtrain.worker.process.rank_channel import UP, Sealer, address
from tests.support.hygiene import GRACE, gone_within
from tests.support.kernels import Kernel, running_kernel
from tests.support.notebook import LOOP, TRAIN, Notebook

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(sys.platform != "linux", reason="what processes have open is read from Linux's /proc"),
]

NOBODY = 65534
OTHER = pytest.mark.skipif(os.geteuid() != 0, reason="to become another user, the tests have to run as root")
LISTENS = "0A"
LOOPBACK = "127.0.0.1"

SECRETS = """
def _():
    import gc
    from nbtrain.engines._local.kernel_channel import Channel
    [channel] = [o for o in gc.get_objects() if type(o) is Channel and o._listener.fileno() >= 0]
    print(*(channel.secrets[rank].hex() for rank in sorted(channel.secrets)))
_()
"""


@dataclass(frozen=True)
class Jupyters:
    """What a kernel has before it knows nbtrain."""

    files: frozenset[tuple[int, str]]
    listening: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class World:
    """A notebook with a pool that has trained, between two cells."""

    notebook: Notebook
    start: str
    kernel: int
    nursery: list[int]
    ranks: list[int]
    others: list[int]
    """anything else that the kernel has started"""
    directory: str
    beacon: Path
    """the folder in which the kernel says where it can be asked"""
    secrets: list[bytes]
    jupyters: Jupyters

    def distributed(self, code: str) -> str:
        """A cell on the same ranks."""
        return f"{magic(self.start)}\n{code}"

    @property
    def pids(self) -> list[int]:
        return [self.kernel, *self.nursery, *self.ranks, *self.others]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Everybody may enter and write; nobody may touch what is another's."""
    made = Path(tempfile.mkdtemp(prefix="nbs-", dir="/tmp"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def notebook(place: Path) -> Iterator[tuple[Notebook, Jupyters]]:
    with running_kernel(XDG_RUNTIME_DIR=str(place), TMPDIR=str(place)) as kernel:
        kernel.run("1")
        listening = frozenset(found.here for found in of_the_net(kernel.pid) if found.listens)
        before = Jupyters(frozenset(opened(kernel.pid).items()), listening)
        notebook = Notebook(kernel)
        notebook("torch.set_num_threads(1)")
        yield notebook, before


@pytest.fixture(scope="module", params=["warm", "spawn"])
def world(request: pytest.FixtureRequest, notebook: tuple[Notebook, Jupyters], place: Path) -> World:
    nb, before = notebook
    nb(TRAIN)
    nb(magic(request.param) + LOOP)
    return look(nb, before, request.param, place)


def magic(start: str) -> str:
    return f"%%distributed --strategy ddp --devices 2 --start {start} --monitor off"


def look(nb: Notebook, before: Jupyters, start: str, place: Path) -> World:
    kernel: Kernel = nb.kernel
    ranks = nb.pids()
    children = [process.pid for process in kernel.children() if process.pid not in ranks]
    nursery = [pid for pid in children if "nbtrain.engines._local.nursery" in command(pid)]
    [directory] = place.glob("nbtrain-*")
    secrets = [bytes.fromhex(word) for word in nb(SECRETS).stdout.split()]
    assert len(ranks) == len(secrets) == 2
    assert nursery or start == "spawn"
    beacon = Path(kernel.manager.connection_file).parent / "nbtrain"
    return World(
        notebook=nb, start=start, kernel=kernel.pid, nursery=nursery, ranks=ranks,
        others=[pid for pid in children if pid not in nursery], directory=str(directory), beacon=beacon,
        secrets=secrets, jupyters=before,
    )  # fmt: skip


# -- what /proc tells ------------------------------------------------------------------------


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def opened(pid: int) -> dict[int, str]:
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


@dataclass(frozen=True)
class Socket:
    """One line of /proc/net."""

    kind: str
    here: str
    """`address:port`, or a Unix socket's path; that begins with @ if no file's mode guards it"""
    there: str = ""
    listens: bool = False


def sockets(pid: int) -> list[Socket]:
    inodes = [target[8:-1] for target in opened(pid).values() if target.startswith("socket:")]
    known = _sockets()
    return [known.get(inode, Socket("unknown", inode)) for inode in inodes]


def _sockets() -> dict[str, Socket]:
    found = {}
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            _, here, there, state, *_ = fields = line.split()
            found[fields[9]] = Socket(kind, _endpoint(here), _endpoint(there), state == LISTENS)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(None, 7)
        accepts = bool(int(fields[3], 16) & 1 << 16)  # __SO_ACCEPTCON
        found[fields[6]] = Socket("unix", fields[7] if len(fields) > 7 else "", listens=accepts)
    return found


def _endpoint(text: str) -> str:
    host, port = text.split(":")
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}"


def of_the_net(pid: int) -> list[Socket]:
    return [found for found in sockets(pid) if found.kind != "unix"]


# -- sockets ---------------------------------------------------------------------------------


@pytest.mark.sample(first=1)
def test_the_kernel_listens_where_jupyter_told_it_to_and_nowhere_else(world: World) -> None:
    """On the ports of its connection file, and what ipykernel opens for itself."""
    info = world.notebook.kernel.manager.get_connection_info()
    told = {f"{info['ip']}:{info[name]}" for name in info if name.endswith("_port") and info[name]}
    now = {found.here for found in of_the_net(world.kernel) if found.listens}
    assert told <= now == world.jupyters.listening
    assert {found.kind for found in of_the_net(world.kernel)} == {"tcp"}


def test_ranks_have_gloos_connections_to_each_other_on_the_loopback_interface(world: World) -> None:
    """Gloo listens once on each rank, and connects each pair. No one else of ours is on any network."""
    listening, connected = [], set()
    for rank in world.ranks:
        for found in of_the_net(rank):
            assert found.kind == "tcp"
            assert found.here.startswith(f"{LOOPBACK}:")
            if found.listens:
                listening.append(found.here)
            else:
                connected.add(frozenset((found.here, found.there)))
    assert len(listening) == len(set(listening)) == 2
    assert len(connected) == 1
    assert connected.pop() & set(listening)
    for other in world.nursery + world.others:
        assert of_the_net(other) == []


def test_unix_sockets_have_a_file_whose_mode_guards_them_or_no_name(world: World) -> None:
    channel, beacon = address(world.directory), str(world.beacon / f"{world.kernel}.sock")
    for pid in world.pids:
        named = [found for found in sockets(pid) if found.kind == "unix" and found.here]
        assert {found.here for found in named} <= ({channel, beacon} if pid == world.kernel else {channel})
        assert sum(found.listens for found in named) == 2 * (pid == world.kernel)
    assert not [found for found in _sockets().values() if found.here.startswith("@") and "nbtrain" in found.here]


def test_the_nursery_has_one_socket_and_it_has_no_address(world: World) -> None:
    for pid in world.nursery:
        assert sockets(pid) == [Socket("unix", "")]


# -- files -----------------------------------------------------------------------------------


def test_directories_are_entered_and_files_opened_by_their_user_alone(world: World, place: Path) -> None:
    """Torch makes a directory for what it compiles, readable by all; the kernel's home is the test's own."""
    torchs = {path for path in place.iterdir() if path.name.startswith("torchinductor_")}
    homes = {path for path in place.iterdir() if path.name.startswith("home-")}
    assert set(place.iterdir()) - torchs - homes == {Path(world.directory)}
    assert mode(world.directory) == 0o700
    inside = list(Path(world.directory).rglob("*"))
    assert Path(address(world.directory)) in inside
    beacons = list(world.beacon.iterdir())
    assert {path.suffix for path in beacons} == {".json", ".sock"}
    for path in (*inside, world.beacon, *beacons):
        assert mode(path) == (0o700 if path.is_dir() else 0o600)
    for path in torchs:
        assert not mode(path) & 0o022


def test_what_processes_have_open_is_theirs_alone(world: World) -> None:
    """Files without a name: memory, and what a nursery or a rank would say if it could not start."""
    memories: set[tuple[int, int]] = set()

    def others() -> list[str]:
        """What is neither: a module that is imported at this moment may be among it, but does not stay open."""
        found = []
        for pid in world.pids:
            for number, target in opened(pid).items():
                if pid == world.kernel and ((number, target) in world.jupyters.files or "/history.sqlite" in target):
                    continue  # Jupyter's; IPython opens a journal now and then
                try:
                    status = os.stat(f"/proc/{pid}/fd/{number}")
                except FileNotFoundError:  # closed meanwhile
                    continue
                if stat.S_ISREG(status.st_mode):
                    if target.startswith("/memfd:nbtrain-"):
                        memories.add((pid, number))
                    mine = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o600
                    if not (mine and target.endswith(" (deleted)")):
                        found.append(target)
                elif stat.S_ISDIR(status.st_mode):  # the pool's own, by whose lock it is known that somebody has it
                    mine = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
                    found += [] if mine and os.path.basename(target).startswith("nbtrain-") else [target]
                elif not stat.S_ISSOCK(status.st_mode) and target != "/dev/null":
                    found += [] if target.startswith(("pipe:", "anon_inode:")) else [target]
        return found

    assert not gone_within(GRACE, others)
    assert len(memories) > 4  # where all are seen, in the kernel and the ranks


def test_memory_is_shared_through_files_without_a_name(world: World) -> None:
    shared = [path for pid in world.pids if pid != world.kernel for path in writable_and_shared(pid)]
    assert shared
    assert {path.split("-")[0] for path in shared} == {"/memfd:nbtrain"}


def test_what_loader_workers_share_is_theirs_alone(world: World, place: Path) -> None:
    """While a cell runs: torch passes them memory, and multiprocessing has sockets, which lie in our directory."""
    go = place / "home-go"
    cell = world.notebook.kernel.start(
        world.distributed(
            f"import os, time\nfor x, y in DataLoader(data, batch_size=4, num_workers=1):\n"
            f"    barrier(); print('begun', flush=True)\n    while not os.path.exists({str(go)!r}): time.sleep(0.01)"
        )
    )
    torchs: set[str] = set()

    def wrong(pid: int) -> list[str]:
        """Files have their names for a moment, until those who share them have opened them."""
        found = []
        for number, target in opened(pid).items():
            with suppress(FileNotFoundError):  # closed meanwhile
                if target.startswith("/dev/shm/") and mode_of_open(pid, number) != 0o600:
                    found.append(target)
        for path in writable_and_shared(pid):
            torchs.update([path] if path.startswith("/dev/shm/torch_") else [])
            known = path.startswith(("/memfd:nbtrain-", "/dev/shm/torch_", "/dev/shm/sem."))
            if not (known and path.endswith("(deleted)")):  # nobody else can open it any more
                found.append(path)
        return found

    try:
        world.notebook.kernel.wait_for(lambda: "begun" in cell.stdout)
        workers = {process.pid for process in world.notebook.kernel.children()} - {*world.pids}
        assert len(workers) >= 2
        for pid in workers | {*world.ranks}:
            for found in sockets(pid):
                assert found.kind == "tcp" or os.path.dirname(found.here) in ("", world.directory), found
            assert not gone_within(GRACE, lambda pid=pid: wrong(pid))  # type: ignore[misc]
        assert torchs
        assert mode(world.directory) == 0o700
    finally:
        go.touch()
        world.notebook.kernel.wait(cell)
        go.unlink()
    assert cell.error is None


def test_no_secret_is_shown_in_a_command_line_an_environment_or_a_file(world: World, place: Path) -> None:
    """Every user may read everybody's command lines."""
    secrets = [form for secret in world.secrets for form in (secret, secret.hex().encode(), base64.b64encode(secret))]
    assert len({*secrets}) == 6
    assert all(len(secret) == 32 for secret in world.secrets)
    files = [path for path in place.rglob("*") if path.is_file() and "ipython" not in path.parts]
    files += [path for path in world.beacon.iterdir() if path.is_file()]
    files += [Path(f"/proc/{pid}/{name}") for pid in world.pids for name in ("cmdline", "environ")]
    for path in files:
        said = path.read_bytes()
        assert not [secret for secret in secrets if secret in said], path


def test_nobody_dumps_more_than_the_kernel_would(world: World) -> None:
    """A core file holds all that a process knew."""

    def limit(pid: int) -> str:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
        return next(line for line in lines if line.startswith("Max core file size"))

    assert {limit(pid) for pid in world.pids} == {limit(os.getpid())}


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def mode_of_open(pid: int, number: int) -> int:
    return stat.S_IMODE(os.stat(f"/proc/{pid}/fd/{number}").st_mode)


def writable_and_shared(pid: int) -> list[str]:
    """The files of such memory."""
    lines = [line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [path[0] for _, rights, _, _, _, *path in lines if "w" in rights and rights.endswith("s")]


# -- another user ----------------------------------------------------------------------------


def tried(tries: Mapping[str, Callable[[], object]], user: int) -> dict[str, str]:
    """What comes of it if this user tries: an error's name, or nothing if he may."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            if user != os.geteuid():
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            with os.fdopen(writer, "w") as file:
                json.dump({name: _tried(attempt) for name, attempt in tries.items()}, file)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(pid, 0)
    result: dict[str, str] = json.loads(said)
    assert set(result) == set(tries)
    return result


def _tried(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def _system(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


PTRACE_SEIZE, PIDFD_GETFD = 0x4206, 438


class Piece(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def _peek(pid: int) -> None:
    """Read another process's memory."""
    start = int(Path("/proc/self/maps").read_text().split("-")[0], 16)
    room = ctypes.create_string_buffer(1)
    here, there = Piece(ctypes.addressof(room), 1), Piece(start, 1)
    _system("process_vm_readv", pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)


def reading(world: World) -> dict[str, Callable[[], object]]:
    """What the user himself may do."""
    tries: dict[str, Callable[[], object]] = {
        "list the directory": lambda: os.listdir(world.directory),
        "see the channel": lambda: os.stat(address(world.directory)),
        "connect to the channel": lambda: _connect(address(world.directory)),
        "enter the directory": lambda: os.chdir(world.directory),
    }
    for pid in world.pids:
        tries |= {
            f"signal {pid}": lambda pid=pid: os.kill(pid, 0),
            f"list what {pid} has open": lambda pid=pid: os.listdir(f"/proc/{pid}/fd"),
            f"open the memory of {pid}": lambda pid=pid: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)),
            f"read the environment of {pid}": lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes(),
            f"read the maps of {pid}": lambda pid=pid: Path(f"/proc/{pid}/maps").read_bytes(),
            f"go where {pid} is": lambda pid=pid: os.chdir(f"/proc/{pid}/cwd"),
        }  # type: ignore[misc]
        for number, target in opened(pid).items():
            if target.startswith("/memfd:"):
                path = f"/proc/{pid}/fd/{number}"
                tries[f"open {path}"] = lambda path=path: os.close(os.open(path, os.O_RDONLY))  # type: ignore[misc]
    return tries


def meddling(world: World) -> dict[str, Callable[[], object]]:
    """What nobody should try on a process that he still needs."""
    tries: dict[str, Callable[[], object]] = {
        "move the directory": lambda: os.rename(world.directory, world.directory + "-mine"),
        "remove the directory": lambda: os.rmdir(world.directory),
        "write into the directory": lambda: os.mkdir(os.path.join(world.directory, "mine")),
        "open the directory to all": lambda: os.chmod(world.directory, 0o777),
    }
    for pid in world.pids:
        tries |= {
            f"end {pid}": lambda pid=pid: os.kill(pid, signal.SIGKILL),
            f"trace {pid}": lambda pid=pid: _system("ptrace", PTRACE_SEIZE, pid, None, None),
            f"peek into {pid}": lambda pid=pid: _peek(pid),
            f"take a socket of {pid}": lambda pid=pid: _system("syscall", PIDFD_GETFD, os.pidfd_open(pid), 0, 0),
        }  # type: ignore[misc]
    return tries


@OTHER
def test_another_user_can_neither_read_nor_signal_nor_connect(world: World) -> None:
    tries = reading(world)
    assert len(tries) > 4 + 6 * len(world.pids)
    assert set(tried(tries, os.geteuid()).values()) == {""}  # so that it is the user that makes the difference
    assert set(tried(tries, NOBODY).values()) <= {"EACCES", "EPERM"}
    assert set(tried(meddling(world), NOBODY).values()) <= {"EACCES", "EPERM"}
    world.notebook(world.distributed("barrier()"))
    assert world.notebook.pids() == world.ranks


@OTHER
def test_who_can_connect_and_is_another_user_is_dropped_unheard(place: Path) -> None:
    """The system is asked who it is, should the directory's mode ever not keep him out."""
    directory = private.make()
    channel = Channel(directory, [0])
    said = Sealer(channel.secrets[0], UP).name(0)  # he even knows the secret

    def come_and_speak() -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("channel")
            stranger.sendall(said)

    here = os.getcwd()
    try:
        os.chdir(directory)
        os.chmod(directory, 0o711)
        os.chmod("channel", 0o666)
        assert tried({"come": come_and_speak}, NOBODY) == {"come": ""}
        assert channel.receive(1) == []
        assert not channel._strangers
        assert not channel._ranks
        assert tried({"come": come_and_speak}, os.geteuid()) == {"come": ""}
        for _ in range(2):
            channel.receive(1)
        assert 0 in channel._ranks
    finally:
        os.chdir(here)
        channel.close()
        private.remove(directory)


@OTHER
def test_another_user_can_ask_nothing_of_a_kernel(place: Path) -> None:
    """Nor where the folder's mode, for whatever reason, does not keep him out."""
    beside = Path(tempfile.mkdtemp(prefix="home-", dir=place))
    beside.chmod(0o755)
    done: list[str] = []
    beacon = Beacon("k", beside, dict, lambda command, run: (not done.append(command), ""))
    record = BeaconRecord.read(beside / "nbtrain", "k")
    assert record is not None

    def ask(path: str) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            stranger.sendall(b'{"command": "stop"}\n')
            if not stranger.recv(100):
                raise ConnectionResetError(errno.ECONNRESET, "hung up on")

    tries: dict[str, Callable[[], object]] = {
        "list the folder": lambda: os.listdir(beside / "nbtrain"),
        "read the record": lambda: (beside / "nbtrain" / "k.json").read_bytes(),
        "ask": lambda: ask(record.socket),
    }
    try:
        assert set(tried(tries, os.geteuid()).values()) == {""}
        assert set(tried(tries, NOBODY).values()) == {"EACCES"}
        os.chmod(beside / "nbtrain", 0o711)
        os.chmod(record.socket, 0o666)
        assert tried({"ask": lambda: ask(record.socket)}, NOBODY)["ask"] in ("ECONNRESET", "EPIPE")
        assert done == ["stop"]
    finally:
        beacon.close()
        shutil.rmtree(beside)


# -- somebody who can connect ----------------------------------------------------------------


# -- where the directory is made -------------------------------------------------------------


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """As if there were no other place on the machine."""
    return lambda path: monkeypatch.setattr(private, "_places", lambda: iter([str(path)]))


@pytest.fixture
def base(place: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=place))
    yield made
    shutil.rmtree(made)


@OTHER
def test_a_place_of_another_users_is_not_used(
    base: Path, only: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `su` leaves it behind in XDG_RUNTIME_DIR: that user could put a directory of his own in place of ours."""
    os.chown(base, NOBODY, NOBODY)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    made = private.make()
    assert base not in Path(made).parents
    private.remove(made)
    only(base)
    with pytest.raises(PoolError, match=rf"{base}: it belongs to another user \(number {NOBODY}\).* one that is yours"):
        private.make()
    assert not list(base.iterdir())


def test_a_place_where_everybody_may_rename_is_not_used(base: Path, only: Callable[[Path], None]) -> None:
    base.chmod(0o777)
    only(base)
    with pytest.raises(PoolError, match="every user may rename what lies in it"):
        private.make()
    base.chmod(0o1777)
    made = private.make()
    assert mode(made) == 0o700
    private.remove(made)


def test_a_place_that_opens_what_is_made_to_all_is_not_used(base: Path) -> None:
    """As file systems without modes do."""
    assert private._problem(str(base)) is None
    for other in (0o701, 0o710, 0o755, 0o777):
        base.chmod(other)
        assert private._problem(str(base)) == "what is made there is not this user's alone"
    base.chmod(0o700)


def test_what_was_put_in_its_way_is_neither_followed_nor_used(
    base: Path, only: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who foresees the name has prepared a link, a directory and a file."""
    victim = base / "victim"
    victim.mkdir()
    (base / "nbtrain-link").symlink_to(victim)
    (base / "nbtrain-directory").mkdir(mode=0o777)
    (base / "nbtrain-file").touch()
    names = iter(["link", "directory", "file", "free"])
    monkeypatch.setattr(tempfile, "_get_candidate_names", lambda: names)
    only(base)
    made = private.make()
    assert made == str(base / "nbtrain-free")
    assert not list(victim.iterdir())
    private.remove(made)


def test_removing_it_follows_no_link(base: Path, only: Callable[[Path], None]) -> None:
    victim = base / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    only(base)
    made = Path(private.make())
    (made / "inside").symlink_to(victim)
    private.remove(str(made))
    assert not made.exists()
    made.symlink_to(victim)  # somebody has put this in its place
    private.remove(str(made))
    assert (victim / "precious").exists()
