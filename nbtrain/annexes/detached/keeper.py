"""The keeper's process: takes a cell over from a kernel, runs it as a notebook would, and keeps what it did.

It is nobody's child and has a session of its own, so it outlives the kernel, its server and the terminal. The cell is
run by `Session.run`, as in a notebook, on ranks that are this process's, and end with it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

import nbtrain.compat.kernel as kernel_of
from nbtrain.annexes.detached import result_file
from nbtrain.annexes.detached.order import Order
from nbtrain.annexes.detached.output_log import OutputLog
from nbtrain.annexes.detached.run_folders import END, FIGURES, LOG, PLACE, RANDOM, RunFolder
from nbtrain.base.errors import DeviceError, UsageError, text_of
from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.names.cell_names import own
from nbtrain.machine.leases import Lease
from nbtrain.notebook.background.weight_reads import why_not
from nbtrain.notebook.session import Session
from nbtrain.watch.beacon import Beacon
from nbtrain.worker.checkpoints.live_weights import LiveWeights
from nbtrain.worker.home.rank_side import RankSide
from nbtrain.worker.loop.shared_board import OPEN
from nbtrain.worker.process.rank_environment import NotebookEnvironment
from nbtrain.worker.random_states.default_generators import capture, packed, restore, unpacked

MISSING = object()
LATELY, SHARE = 1.0, 0.01
"""Seconds between two notes of how far the run is, and how much of the time they may take."""
FIRST, AGAIN = 1.0, 30.0
"""Seconds until a result that could not be written is tried again: at first, and at most."""


def main(end: int, shell: Any) -> None:
    """`shell`: a rank's; it has imported what ranks do (`engines/_local/outliving.py`)."""
    kernel = Connection(end)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # As Stop: it ends after a whole step, and is kept.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    told, folder = Told(kernel), None
    try:
        where, about = kernel.recv()
        folder = RunFolder.make(about, Path(where))
        lock = folder.hold()
        told.say("here", [str(os.getpid()), str(folder.path)])
        order: Order = kernel.recv()
    except (EOFError, ConnectionError):  # the kernel has ended before it could hand anything over
        if folder is not None:
            folder.remove()
        return
    except (UsageError, OSError) as error:
        return told.say("refused", [text_of(error)])
    words = os.open(folder.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    for stream in (1, 2):
        os.dup2(words, stream)
    os.close(words)
    log = OutputLog(folder.path)
    sys.stdout, sys.stderr = log.stream("stdout"), log.stream("stderr")
    try:
        keeper = Keeper(folder, order, log, told, shell)
    except Exception as error:  # what the notebook has sent may run code of the user's
        told.say("refused", [f"{type(error).__name__}: {text_of(error)}"])
        folder.remove()
        return
    told.say("taken")
    keeper.run()
    os.close(lock)


class Told:
    """What the kernel that starts the run is told, as long as it listens."""

    def __init__(self, kernel: Connection[Any, Any]) -> None:
        self._kernel: Connection[Any, Any] | None = kernel
        self._lock = threading.Lock()

    def say(self, what: str, lines: Sequence[str] = ()) -> None:
        """`here` with its process and folder, `taken`, `refused` with why, or `running`, which is the last."""
        with self._lock:
            if self._kernel is not None:
                with suppress(OSError):  # it has ended; the run goes on
                    self._kernel.send((what, list(lines)))
                if what in ("refused", "running"):
                    self._kernel.close()
                    self._kernel = None


class Keeper:
    def __init__(self, folder: RunFolder, order: Order, log: OutputLog, told: Told, shell: Any) -> None:
        self.folder, self.order, self.told = folder, order, told
        self.over = threading.Event()
        self.lease = Lease()
        for name, card in zip(order.spec.pool.devices, order.spec.pool.uuids, strict=False):
            if not self.lease.add(card):
                raise DeviceError(f"{name} has been taken by another notebook meanwhile")
        self.shell = shell
        shell.outlet = log
        environment = NotebookEnvironment(self.shell, {"MPLBACKEND": os.environ["MPLBACKEND"]})
        said = environment.take(order.environment)
        self.shell.texts.learn(order.out.sources)
        self.before = set(self.shell.user_ns)
        self.side = RankSide(0, 1, self.shell.user_ns, str(folder.path), "cpu")
        self.side.open(order.out.parcel, (), ())
        self.sent = {name: value for name, value in self.shell.user_ns.items() if name not in self.before}
        for sentence in (*said, *environment.settle()):
            print(sentence)
        if order.out.random_states is not None:
            restore(unpacked(order.out.random_states))
        self.session = Session(self.shell)
        # It is found by who looks for kernels: the server's page, and `%distributed attach`.
        name, self._asked = f"run-{folder.path.name}", threading.Lock()
        self._live: LiveWeights | None = None
        """once a notebook has asked for its weights"""
        self.session.public_record.make_beacon = lambda about, do: Beacon(
            name, Path(order.runtime or folder.path), about, partial(self._do, do)
        )

    def run(self) -> None:
        spec = self.order.spec
        spec = replace(spec, options={**spec.options, **self.side.options}, weights_folder=str(self.folder.path))
        telling = threading.Thread(target=self._tell, daemon=True)
        telling.start()
        how, kept = "done", ""
        place, left = None, False
        lines: list[str] = []
        try:
            self.session.run(spec, self.order.cell)
        except KeyboardInterrupt as stopped:
            feed = self.session.public_record.feed
            killed = feed is not None and feed.ended is not None and feed.ended["how"] == "killed"
            how, lines = "killed" if killed else "stopped", [str(stopped)]
            place, left = vars(stopped).get("place", (None, False))
        except BaseException as error:  # the run's own: it is kept, and shown to who attaches
            how, lines = "failed", _shown(error)
            if not self._has_begun:
                self.session.close()
                self.told.say("refused", lines)
                self.folder.remove()
                return
            kept = self._recovered()
        # Its work is at home on the disk, or lost: nothing ends it before that.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        end = {"how": how, "lines": lines, "kept": kept, "steps": self._steps, "goes_on": place is not None}
        end["step_left"] = left
        with self._asked:
            self.over.set()  # nobody asks its ranks any more
            self.session.close()  # its cards are free before anybody is told
        if self._live is not None:
            self._live.close()
        self.lease.close()
        telling.join()
        if place is not None:
            self._patiently(lambda: self.folder.put(PLACE, place, lasting=True))
        namespace = self.shell.user_ns
        changed, same = self._changed()
        end["deleted"] = sorted(self.sent.keys() - namespace.keys())
        end["rebound"] = [name for name in changed if namespace[name] is not self.sent.get(name, MISSING)]
        self._patiently(lambda: end.update(result_file.write(self.folder.path, namespace, changed, same)))
        states = pickle.dumps(packed(capture()), 5)
        self._patiently(lambda: self.folder.put(RANDOM, states, lasting=True))
        self._patiently(lambda: self.folder.write(END, {**end, "ended": time.time()}))

    def _tell(self) -> None:
        """In a thread of its own: that it runs, and from then on how far it is, for who attaches."""
        while not self._has_begun and not self.over.wait(0.05):
            pass
        self.told.say("running")
        until = self.order.until
        while True:
            over, began = self.over.is_set(), time.monotonic()
            if (feed := self.session.public_record.feed) is not None:
                with suppress(OSError):  # no room, or it is being dropped
                    self.folder.put(FIGURES, feed.snapshot())
            if over:
                return
            if until is not None and time.time() >= until:
                until = None
                os.kill(os.getpid(), signal.SIGTERM)
            self.over.wait(max(LATELY, (time.monotonic() - began) / SHARE))

    def _do(self, do: Callable[..., tuple[bool, str]], command: str, run: str | None = None) -> tuple[bool, str]:
        """A notebook's command, in a thread of the beacon's."""
        pool = self.session.ranks.pool
        if pool is None or not self._has_begun or not self.session.ranks.running or self.over.is_set():
            return False, ""  # it is about to start, or to end
        if command != "weights":
            return do(command, run)
        if why := why_not(self.order.spec, self.shell.user_ns):
            return False, why
        with self._asked:
            if self.over.is_set():  # while this has waited
                return False, ""
            if self._live is None:
                number = max(abs(part[OPEN]) for part in pool.board.parts)
                self._live = LiveWeights(pool.board, number, str(self.folder.path), {})
            return True, self._live.request()

    @property
    def _has_begun(self) -> bool:
        feed = self.session.public_record.feed
        return feed is not None and bool(feed.run["summary"])

    @property
    def _steps(self) -> int:
        feed = self.session.public_record.feed
        return max((rank.steps for rank in feed.figures.ranks.values()), default=0) if feed is not None else 0

    def _recovered(self) -> str:
        """The last step of a failed cell, which nobody is here to ask for."""
        try:
            return self.session.recover()
        except Exception as error:  # no step is kept, or it is gone with its ranks
            return text_of(error).partition("\n")[0]

    def _changed(self) -> tuple[list[str], list[str]]:
        """Names that the run has assigned, or below which it has changed something; and the others that it was sent."""
        namespace = self.shell.user_ns
        changed: list[str] = []
        same: list[str] = []
        for name in sorted(self.sent.keys() & namespace.keys()):
            if isinstance(namespace[name], (DataLoader, Dataset)):  # who takes the weights has data of his own
                continue
            walk = Walk(self.side.table, namespace)
            try:
                walk.name(name, namespace[name])
                is_other = walk.finish().records or walk.culprits or namespace[name] is not self.sent[name]
                (changed if is_other else same).append(name)
            finally:
                walk.undo()
        return [*changed, *(name for name in own(namespace) if name not in self.before | self.sent.keys())], same

    def _patiently(self, write: Callable[[], object]) -> None:
        """What the run has done is nowhere but here: where the disk is full, wait until there is room."""
        again = FIRST
        while True:
            try:
                write()
            except OSError as error:
                if not self.folder.path.is_dir():  # somebody has deleted it: nobody wants it
                    return
                self.folder.waits(f"it has ended, and its result waits for room: {error.strerror}")
                time.sleep(again)
                again = min(2 * again, AGAIN)
            else:
                return


def _shown(error: BaseException) -> list[str]:
    render = kernel_of.renders(error)
    return list(render()) if render is not None else [f"{type(error).__name__}: {text_of(error)}"]
