"""Answers requests in a thread of the kernel, and sends the messages of the run to watchers.

    {"command": "about"}                     → {"ok": true, "about": {...}}
    {"command": "run"}                       → {"ok": true, "run": everything known of the run, or null}
    {"command": "stop" | "stacks" | "kill"}  → {"ok": ..., "text": ...}; with "run": ID only if this run goes on
    {"command": "weights"}                   → of a detached run: after which step what it trains is saved, and where
    {"command": "watch"}                     → {"about": {...}} whenever it changes, and the messages of the run
    {"command": "again"}                     → to a watcher: everything once more, in order among the messages

One JSON object a line. The kernel is never kept waiting: what a run says goes into a queue that the thread empties.
"""

from __future__ import annotations

import os
import selectors
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nbtrain.watch.beacon.client import Client, Gone, encode, of_this_user
from nbtrain.watch.beacon.kernel_record import ELSEWHERE, BeaconRecord, here, make_folder, records

Message = dict[str, Any]

COMMANDS = ("stop", "stacks", "kill")
WEIGHTS = "weights"
"""asked by who reads them afterwards, and no page does"""
CLIENTS = 64
"""Connections at a time; one more, and the oldest goes."""
UNHEARD = 1000
"""Messages of a run that may wait for the thread. Older ones are lost, which their clients notice."""
GRACE = 1.0
"""Seconds in which the thread ends."""
LATELY = 2.0
"""Seconds between looks whether `about` has changed."""
FULL = 0.1
"""Seconds until the next try, when the process has as many files open as it may."""


class FollowedRun(Protocol):
    """A feed of a run's messages."""

    def everything(self) -> Message | None: ...

    def subscribe(self, callback: Callable[[Message], None], /) -> Callable[[], None]: ...


class Beacon:
    """Answers for one kernel. All calls are quick, and may come from any thread."""

    def __init__(
        self,
        kernel_id: str,
        directory: Path,
        about: Callable[[], Message],
        do: Callable[[str, str | None], tuple[bool, str]],
    ) -> None:
        """`directory`: the one of the connection file. `about` is called from the beacon's thread and must not wait
        for anything; `do`, with a command and the id of the run that is meant, from one of its own."""
        self.kernel_id = kernel_id
        self._about, self._do = about, do
        self._pid = os.getpid()
        self._folder = make_folder(directory)
        self._clients: list[Client] = []
        self._run: FollowedRun | None = None
        """the one that is followed; `_next` will be"""
        self._next: FollowedRun | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._heard: deque[tuple[FollowedRun, Message]] = deque(maxlen=UNHEARD)
        self._answers: deque[tuple[Client, Message]] = deque()
        self._changed = self._closing = False
        self._told: Message = {}
        self._due = 0.0
        """when to look whether `about` says something new; what the ranks hold changes without anybody saying so"""
        for _ in records(self._folder):  # what the dead have left goes
            pass
        with ExitStack() as undo:
            self._wake, self._woken = socket.socketpair()
            undo.callback(self._wake.close)
            undo.callback(self._woken.close)
            self._wake.setblocking(False)
            self._listener, path = _listen(self._folder)
            undo.callback(self._listener.close)
            self._record = BeaconRecord.mine(kernel_id, path)
            undo.callback(self._record.remove, self._folder)
            self._selector = selectors.DefaultSelector()
            undo.callback(self._selector.close)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._record.write(self._folder)
            self._thread = threading.Thread(target=self._serve, name="nbtrain-beacon", daemon=True)
            self._undo = undo.pop_all()
        self._thread.start()

    @classmethod
    def start(cls, about: Callable[[], Message], do: Callable[[str, str | None], tuple[bool, str]]) -> Beacon | None:
        """A beacon for this kernel; None outside a kernel, or where file and socket cannot be made."""
        place = here()
        if place is None:
            return None
        try:
            return cls(*place, about, do)
        except OSError:
            return None

    def follow(self, run: FollowedRun | None) -> None:
        """Show this run to watchers from now on."""
        self._next = run
        self._ring_for_clients()

    def changed(self) -> None:
        """Call it when `about` says something new."""
        self._changed = True
        self._ring_for_clients()

    def close(self) -> None:
        """Leave no file, no socket and no thread; again does nothing."""
        if self._closing or os.getpid() != self._pid:  # a fork has a copy of this, and nothing of it is its own
            return
        self._closing = True
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(GRACE)
        with suppress(OSError):  # the thread has done it, unless it hangs
            self._record.remove(self._folder)

    def _ring_for_clients(self) -> None:
        """Wake the thread only if somebody is connected: a cell must not wake it for nothing."""
        if self._clients:
            self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # it has been rung already, or is closed
            self._wake.send(b"\0")

    # -- the thread --------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._woken:
                        self._woken.recv(4096)
                    elif key.data in self._clients:  # and was not dropped a moment ago
                        self._attend(key.data)
                self._relay()
        finally:
            self._closing = True
            self._record.remove(self._folder)  # first: who hears the end looks whether it is still there
            self._unfollow()
            for client in list(self._clients):
                self._drop(client)
            self._undo.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # gone since the selector saw it
            return
        except OSError:
            time.sleep(FULL)
            return
        if not of_this_user(connection):
            connection.close()
            return
        if len(self._clients) == CLIENTS:
            self._drop(self._clients[0])
        client = Client(connection)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _attend(self, client: Client) -> None:
        try:
            client.flush()
            for request in client.requests():
                self._answer(client, request)
        except Gone:
            self._drop(client)
        else:
            self._select(client)

    def _answer(self, client: Client, request: Message) -> None:
        command = request.get("command")
        if command == "about":
            client.send(encode(self._asked(lambda: {"ok": True, "about": self._who()})))
        elif command == "run":
            client.send(encode(self._asked(lambda: {"ok": True, "run": _all_of(self._next)})))
        elif command == "watch" and not client.watching:
            client.watching = True
            self._follow()
            self._look()
            self._show(client)
            self._show_all(client)
        elif command == "again" and client.watching:
            self._show_all(client)
        elif command in (*COMMANDS, WEIGHTS):
            asked = client, command, request.get("run")
            threading.Thread(target=self._obey, args=asked, name="nbtrain-beacon-command", daemon=True).start()
        else:
            raise Gone

    def _obey(self, client: Client, command: str, run: str | None) -> None:
        """Carry out a command, in a thread of its own: a stop may take long, and messages go on meanwhile."""

        def answer() -> Message:
            ok, text = self._do(command, run)
            return {"ok": ok, "text": text}

        self._answers.append((client, self._asked(answer)))
        self._ring()

    def _asked(self, ask: Callable[[], Message]) -> Message:
        """What `ask` returns; an error in the kernel's code becomes an answer, and does not end the thread."""
        try:
            return ask()
        except Exception as error:  # of the kernel's code, whatever it is
            return {"ok": False, "text": f"{type(error).__name__}: {error}"}

    def _who(self) -> Message:
        return {"kernel": self.kernel_id, "pid": self._pid, **self._about()}

    # -- what watchers see -------------------------------------------------------------------

    def _relay(self) -> None:
        """Send what other threads have queued."""
        watching = [client for client in self._clients if client.watching]
        changed, self._changed = self._changed, False  # told after what the run has said before
        changed = changed or time.monotonic() >= self._due
        if self._next is not self._run:
            self._unfollow()
            self._run = self._next
            if watching:
                self._follow()
            for client in watching:
                client.since = -1
                self._try(client, self._show_all)
        for run, message in _emptied(self._heard):
            if run is self._run:
                data = encode(message)
                for client in watching:
                    if message.get("seq", client.since + 1) > client.since:
                        self._try(client, partial(_send, data))
        if changed and watching:
            self._look()
        for client in watching:
            self._try(client, self._show)
        for client, answer in _emptied(self._answers):
            self._try(client, partial(_send, encode(answer)))
        if self._unsubscribe is not None and not any(client.watching for client in self._clients):
            self._unfollow()

    def _follow(self) -> None:
        if self._run is not None and self._unsubscribe is None:
            run = self._run
            self._unsubscribe = run.subscribe(lambda message: self._hear(run, message))

    def _unfollow(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def _hear(self, run: FollowedRun, message: Message) -> None:
        """Called by the run's own thread."""
        self._heard.append((run, message))
        self._ring()

    def _patience(self) -> float | None:
        if any(client.watching for client in self._clients):
            return max(0.0, self._due - time.monotonic())
        return None

    def _look(self) -> None:
        """Ask `about` again, and keep the answer if it changed."""
        self._due = time.monotonic() + LATELY
        told = self._asked(lambda: {"about": self._who()})
        if "about" in told and told != self._told:
            self._told = told

    def _show(self, client: Client) -> None:
        if self._told and client.told is not self._told:
            client.told = self._told
            client.send(encode(self._told))

    def _show_all(self, client: Client) -> None:
        message = _all_of(self._run)
        if message is not None:
            client.since = message["seq"]
            client.send(encode(message))

    def _try(self, client: Client, send: Callable[[Client], None]) -> None:
        if client not in self._clients:
            return
        try:
            send(client)
        except Gone:
            self._drop(client)
        else:
            self._select(client)

    def _select(self, client: Client) -> None:
        """Wait for requests, and while messages are unsent for room to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.has_unread else 0)
        self._selector.modify(client.connection, events, client)

    def _drop(self, client: Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.connection)
        client.close()


def _send(data: bytes, client: Client) -> None:
    client.send(data)


def _emptied(queue: deque[Any]) -> Iterator[Any]:
    while queue:
        yield queue.popleft()


def _listen(folder: Path) -> tuple[socket.socket, str]:
    """Listen in the folder; in a temporary one where the path is too long or takes no sockets."""
    try:
        return _bind(folder / f"{os.getpid()}.sock")
    except OSError:
        pass
    made = tempfile.mkdtemp(prefix=ELSEWHERE)  # mode 0700, a name nobody can foresee
    try:
        return _bind(Path(made) / "s")
    except OSError:
        os.rmdir(made)
        raise


def _bind(path: Path) -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        # In a folder of mode 0700, and nobody can connect before it listens. (A umask is the whole process's.)
        os.fchmod(listener.fileno(), 0o600)  # Linux makes the file so
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(CLIENTS)
    except OSError:
        listener.close()
        raise
    return listener, str(path)


def _all_of(run: FollowedRun | None) -> Message | None:
    return run.everything() if run is not None else None
