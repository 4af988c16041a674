"""The kernel's record and socket: who may ask, what is answered and streamed, what is left.

The sockets are real, and so is the feed of the run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from nbtrain.base.events import Metrics
from nbtrain.watch.beacon import Beacon, BeaconRecord, here, listener
from nbtrain.watch.beacon.client import LONGEST, WAITING, of_this_user
from nbtrain.watch.beacon.kernel_record import records
from nbtrain.watch.beacon.listener import CLIENTS
from nbtrain.watch.feed.feed import Feed

KERNEL = "3f0c1c2e-8a54-4a55-9d5e-0b1d6b1f7a11"
RUN = {"id": "r1", "cell": 3, "summary": "", "strategy": "ddp", "devices": ["cpu"], "began": 0.0, "kernel": KERNEL}


class Client:
    """Somebody who has connected."""

    def __init__(self, folder: Path, kernel: str = KERNEL) -> None:
        record = BeaconRecord.read(folder, kernel)
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(10)
        self.connection.connect(record.socket)
        self._file = self.connection.makefile("rb")

    def say(self, line: bytes) -> None:
        self.connection.sendall(line)

    def ask(self, command: str) -> None:
        self.say(json.dumps({"command": command}).encode() + b"\n")

    def hear(self) -> Any:
        """The next message; None at the end."""
        line = self._file.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self._file.close()
        self.connection.close()


class Scene:
    """A beacon in a folder of its own, and what it was asked."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory / "nbtrain"
        self.state = "idle"
        self.done: list[str] = []
        self.patience = threading.Event()
        self.clients: list[Client] = []
        self.beacon = Beacon(KERNEL, directory, self.about, self.do)

    def about(self) -> dict[str, Any]:
        if self.state == "broken":
            raise RuntimeError("no answer")
        return {"engine": "local", "state": self.state}

    def do(self, command: str, run: str | None) -> tuple[bool, str]:
        if command == "kill":
            raise RuntimeError("no rank is there")
        if command == "stacks":
            self.patience.wait()
        self.done.append(command)
        return True, f"{command} it is"

    def connect(self) -> Client:
        self.clients.append(Client(self.folder))
        return self.clients[-1]

    def watch(self) -> Client:
        client = self.connect()
        client.ask("watch")
        assert client.hear()["about"]["kernel"] == KERNEL
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.beacon.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    found = Scene(tmp_path)
    yield found
    found.close()


def feed(**what: Any) -> Feed:
    found = Feed({**RUN, **what})
    found.opened("ddp · 1 rank")
    return found


def speak(run: Feed, step: int) -> None:
    """One message to whoever watches."""
    run.receive(Metrics(rank=0, time=float(step), points={"loss": [(step, 1.0 / (1 + step))]}))
    run.tick(float(step))


def test_the_record_and_the_socket_are_the_users_alone(scene: Scene) -> None:
    found = BeaconRecord.read(scene.folder, KERNEL)
    assert found.pid == os.getpid()
    assert found.alive
    said = json.loads((scene.folder / f"{KERNEL}.json").read_text())
    assert (said["kernel_id"], said["pid"], said["socket"], said["protocol"]) == (KERNEL, os.getpid(), found.socket, 1)
    modes = [stat.S_IMODE(os.lstat(p).st_mode) for p in (scene.folder, scene.folder / f"{KERNEL}.json", found.socket)]
    assert modes == [0o700, 0o600, 0o600]


def test_questions_and_commands_are_answered(scene: Scene) -> None:
    client = scene.connect()
    client.ask("about")
    who = {"kernel": KERNEL, "pid": os.getpid(), "engine": "local", "state": "idle"}
    assert client.hear() == {"ok": True, "about": who}
    client.ask("run")
    assert client.hear() == {"ok": True, "run": None}
    scene.beacon.follow(feed())
    client.ask("run")
    assert client.hear()["run"]["run"]["summary"] == "ddp · 1 rank"
    client.ask("stop")
    assert client.hear() == {"ok": True, "text": "stop it is"}
    assert scene.done == ["stop"]


def test_what_the_kernels_parts_raise_is_said_and_ends_nothing(scene: Scene) -> None:
    client = scene.connect()
    client.ask("kill")
    assert client.hear() == {"ok": False, "text": "RuntimeError: no rank is there"}
    scene.state = "broken"
    client.ask("about")
    assert client.hear() == {"ok": False, "text": "RuntimeError: no answer"}
    scene.state = "idle"
    client.ask("about")
    assert client.hear()["about"]["state"] == "idle"


def test_a_command_that_takes_its_time_keeps_nobody_waiting(scene: Scene) -> None:
    slow, quick = scene.connect(), scene.connect()
    slow.ask("stacks")
    quick.ask("about")
    assert quick.hear()["ok"]
    assert scene.done == []
    scene.patience.set()
    assert slow.hear() == {"ok": True, "text": "stacks it is"}


def test_who_watches_is_told_of_the_run_and_of_the_next(scene: Scene) -> None:
    first = feed()
    scene.beacon.follow(first)
    client = scene.watch()
    told = client.hear()
    assert (told["kind"], told["run"]["id"]) == ("all", "r1")
    speak(first, 1)
    news = client.hear()
    assert (news["kind"], news["seq"]) == ("news", told["seq"] + 1)
    assert news["points"]["metric/loss/0"] == [[1], [0.5]]
    scene.state = "running"
    scene.beacon.changed()
    assert client.hear()["about"]["state"] == "running"
    first.closed(True)
    assert client.hear()["kind"] == "end"
    second = feed(id="r2")
    scene.beacon.follow(second)
    assert client.hear()["run"]["id"] == "r2"
    speak(first, 2)  # nobody follows that one any more
    speak(second, 1)
    assert client.hear()["seq"] == 1


def test_who_watches_hears_what_nobody_has_said(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much memory the ranks hold, for one."""
    monkeypatch.setattr(listener, "LATELY", 0.01)
    clients = [scene.watch(), scene.watch()]
    for state in ("starting", "broken", "running"):
        scene.state = state
        if state != "broken":
            assert [client.hear()["about"]["state"] for client in clients] == [state, state]
    asker = scene.connect()
    for _ in range(20):  # some looks later: nothing new, nothing said
        asker.ask("about")
        asker.hear()
    scene.beacon.close()
    assert [client.hear() for client in clients] == [None, None]


def test_one_who_does_not_read_is_dropped_and_keeps_nobody_waiting(scene: Scene) -> None:
    run = feed()
    scene.beacon.follow(run)
    sleeper, reader = scene.watch(), scene.watch()
    sleeper.hear(), reader.hear()
    sleeper.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    many = {f"curve {number}": 0.5 for number in range(300)}
    for step in range(1, 3 * WAITING):
        run.receive(Metrics(rank=0, time=float(step), points={name: [(step, value)] for name, value in many.items()}))
        run.tick(float(step))
        assert reader.hear()["seq"] == step
    heard = 0
    with suppress(ValueError):  # the last line is cut
        while sleeper.hear() is not None:
            heard += 1
    assert heard < 3 * WAITING - 1
    assert scene.watch().hear()["seq"] == 3 * WAITING - 1


@pytest.mark.parametrize(
    "said", [b"hello\n", b"[]\n", b'{"command": "exec"}\n', b'{"command": "again"}\n', b"x" * (LONGEST + 2), b"\xff\n",
             b"[" * (LONGEST - 1) + b"\n", b'{"command": ["stop"]}\n'],
    ids=range(8),
)  # fmt: skip
def test_whoever_says_what_nobody_understands_is_dropped(scene: Scene, said: bytes) -> None:
    stranger, other = scene.connect(), scene.connect()
    stranger.say(said)
    assert stranger.hear() is None
    other.ask("about")
    assert other.hear()["ok"]


def test_when_too_many_are_there_the_oldest_goes(scene: Scene) -> None:
    clients = [scene.connect() for _ in range(CLIENTS + 1)]
    clients[-1].ask("about")
    assert clients[-1].hear()["ok"]
    assert clients[0].hear() is None
    clients[1].ask("about")
    assert clients[1].hear()["ok"]


def test_nothing_is_left(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.beacon.follow(feed())
    client = scene.watch()
    client.hear()
    scene.beacon.close()
    scene.beacon.close()
    assert client.hear() is None
    assert list(scene.folder.iterdir()) == []
    scene.beacon.follow(None)  # a late call does no harm
    scene.close()


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    scene = Scene(deep)
    found = BeaconRecord.read(scene.folder, KERNEL)
    place = Path(found.socket).parent
    assert place != scene.folder
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    client = scene.connect()
    client.ask("about")
    assert client.hear()["ok"]
    scene.close()
    assert not place.exists()


ELSEWHERE = """
import os, sys, time
from pathlib import Path
from nbtrain.watch.beacon import Beacon
beacon = Beacon("dead-1", Path(sys.argv[1]), dict, lambda command, run: (True, ""))
{then}
print("ready", flush=True)
time.sleep(60)
"""


def another(directory: Path, then: str = "") -> subprocess.Popen[str]:
    """Another process with a beacon, killed as the system kills."""
    process = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE.format(then=then), str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_what_a_dead_kernel_has_left_is_removed(tmp_path: Path) -> None:
    process = another(tmp_path)
    folder = tmp_path / "nbtrain"
    assert [record.kernel_id for record in records(folder)] == ["dead-1"]
    end(process)
    assert {path.name for path in folder.iterdir()} == {f"{process.pid}.sock", "dead-1.json"}
    scene = Scene(tmp_path)
    assert {path.name for path in folder.iterdir()} == {f"{os.getpid()}.sock", f"{KERNEL}.json"}
    scene.close()


def test_a_fork_of_the_kernel_ends_nothing(tmp_path: Path) -> None:
    fork = "if os.fork() == 0: beacon.close(); os._exit(0)\nos.wait()"
    process = another(tmp_path, fork)
    client = Client(tmp_path / "nbtrain", "dead-1")
    client.ask("about")
    assert client.hear()["about"]["pid"] == process.pid
    client.close()
    end(process)


def written(scene: Scene, **other: Any) -> Path:
    """The record as somebody else might have written it."""
    path = scene.folder / f"{KERNEL}.json"
    path.write_text(json.dumps(asdict(scene.beacon._record) | other))
    return path


@pytest.mark.parametrize("other", [
    {"kernel_id": "another"}, {"pid": "7"}, {"pid": True}, {"pid": 0}, {"pid": -1}, {"protocol": 2},
    {"socket": "here.sock"}, {"socket": None}, {"host": 1}, {"more": "x" * 5000},
])  # fmt: skip
def test_a_record_that_says_something_else_is_not_believed(scene: Scene, other: dict[str, Any]) -> None:
    written(scene, **other)
    assert BeaconRecord.read(scene.folder, KERNEL) is None
    assert list(records(scene.folder)) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_record_that_others_may_read_or_write_is_not_believed(scene: Scene, mode: int) -> None:
    os.chmod(scene.folder / f"{KERNEL}.json", mode)
    assert BeaconRecord.read(scene.folder, KERNEL) is None


def test_what_is_another_users_is_not_believed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    found = BeaconRecord.read(scene.folder, KERNEL)
    mine, me = scene.connect(), os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: me + 1)
        assert BeaconRecord.read(scene.folder, KERNEL) is None
        assert not found.listens
        assert not of_this_user(mine.connection)
    assert of_this_user(mine.connection)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "linked folder", "garbage", "name"])
def test_what_is_no_plain_file_is_not_believed(scene: Scene, tmp_path: Path, kind: str) -> None:
    path, kernel, folder = scene.folder / f"{KERNEL}.json", KERNEL, scene.folder
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "linked folder":
        folder = tmp_path / "other"
        folder.symlink_to(scene.folder)
    elif kind == "name":
        kernel = f"../nbtrain/{KERNEL}"
    else:
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path, 0o600)
        elif kind == "folder":
            path.mkdir(0o700)
        else:
            path.write_bytes(b"\xff{")
            path.chmod(0o600)
    assert BeaconRecord.read(folder, kernel) is None
    if path.is_dir():
        path.rmdir()


def test_a_record_of_another_machine_is_left_alone(scene: Scene) -> None:
    """A home directory may be the same on many."""
    path = written(scene, host="another", pid=2**22 + 5)
    assert list(records(scene.folder)) == []
    assert path.exists()


@pytest.mark.parametrize("other", [{"boot": "an earlier one"}, {"pid": 2**22 + 5}, {"socket": "/nowhere/s"}])
def test_a_record_whose_kernel_is_gone_is_removed(scene: Scene, other: dict[str, Any]) -> None:
    path = written(scene, **other)
    assert list(records(scene.folder)) == []
    assert not path.exists()


def test_only_sockets_of_its_own_are_removed_with_a_record(scene: Scene, tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.write_text("years")
    for path in (mine, scene.folder / "thesis"):
        replace(scene.beacon._record, socket=str(path)).remove(scene.folder)
    assert mine.exists()


def test_a_folder_that_is_not_this_users_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "nbtrain").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="not a directory of this user"):
        Scene(tmp_path)


def test_a_plain_program_has_no_kernel() -> None:
    assert here() is None
    assert Beacon.start(dict, lambda command, run: (True, "")) is None
