"""Two processes that play programs: a notebook with warm ranks, and one process as the oracle. Both outlive programs.

    with Player("ddp") as ranks:        # `Player("")` is one process
        story = ranks.play(program)     # what each cell said, raised and left

A player that hangs is told to stop, as a user would; if it does not, it ends with everything that it started.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.fuzz.held import Held, held

ROOT = Path(__file__).resolve().parent.parent.parent
SLOW = 60.0
"""Seconds after which a cell hangs."""
FIRST = 240.0
"""the same, for a cell that may have to compile something or start ranks"""
STOPPING = 15.0
"""what a cell gets to end when it is told to, twice"""
DEVICES = 2

FOR_ALL_MODELS = ("register_module_forward_hook", "register_optimizer_step_post_hook")
"""What leaves a hook in a process that speaks of one program's names."""
LEFT = """
import importlib
for module in map(importlib.import_module, ("torch.nn.modules.module", "torch.optim.optimizer")):
    for name, table in [*vars(module).items()]:
        if name.startswith("_global") and isinstance(table, dict):
            for key in [key for key, hook in table.items() if getattr(hook, "__module__", "") == "__main__"]:
                del table[key]
"""
"""Takes those away that a notebook's cells have left: ranks outlive programs."""

NUDGE = """
with torch.no_grad():
    for p in model.parameters(): p.mul_(1 + 1e-7 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
del p
"""
"""All weights begin a rounding error away."""

ALONE = """
rank, world_size, device = 0, 1, torch.device("cpu")
def reduce(value, op="mean"): return value
def barrier(): pass
def log(**values): pass
def setup(*objects): return objects
"""


@dataclass(frozen=True, slots=True)
class Raised:
    name: str
    """of the exception's class"""
    bases: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        return cls(type(error).__name__, tuple(one.__name__ for one in type(error).__mro__), str(error))


@dataclass(frozen=True, slots=True)
class Played:
    """One cell."""

    code: str
    distributed: bool
    error: Raised | None
    shown: str
    held: Held = field(repr=False)
    hung: bool = False


class Player:
    def __init__(self, strategy: str, options: str = "") -> None:
        self.strategy = strategy
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._fresh = True
        self.last_words = ""
        """what the process wrote on its own, when it has ended"""

    def __enter__(self) -> Player:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def play(self, cells: list[tuple[bool, str]], nudged: bool = False) -> list[Played]:
        """Up to the first cell that raises or hangs."""
        try:
            return self._play(cells, nudged)
        finally:
            if self.strategy and self._process and any(name in code for _, code in cells for name in FOR_ALL_MODELS):
                self._ask(("run", f"{self._line}{LEFT}"))

    @property
    def _line(self) -> str:
        return f"%%distributed -s {self.strategy} -d {DEVICES} --split-batches --monitor off {self.options}".strip()

    def _play(self, cells: list[tuple[bool, str]], nudged: bool) -> list[Played]:
        if self._process is None:
            self._start()
        found: list[Played] = []
        if self._ask(("clear", "" if self.strategy else "alone")) is None:
            raise RuntimeError(f"no process to play in: {self.last_words}")
        for number, (distributed, code) in enumerate(cells):
            text = f"{self._line}\n{code}" if distributed and self.strategy else code
            answer = self._ask(("run", text + (NUDGE if nudged and number == 0 else "")))
            if answer is None:
                found.append(Played(code, distributed, None, "", {}, hung=True))
                return found
            error, shown, after = answer
            found.append(Played(code, distributed, error, shown, after))
            self._fresh = self._fresh and not distributed
            if error is not None:
                return found
        return found

    def close(self) -> None:
        """The ranks end as they do with a notebook."""
        if self._process is None:
            return
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(("end", ""))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        code = f"from tests.fuzz.player import serve; serve({theirs.fileno()})"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "NBTRAIN_HISTORY": "off", "PYTHONPATH": str(ROOT)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed when the process has ended
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], cwd=ROOT, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._fresh = True

    def _ask(self, question: tuple[str, str]) -> Any:
        """The answer; None if there is none in time, and then this player begins anew."""
        assert self._process is not None
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(question)
            if self._pipe.poll(FIRST if self._fresh else SLOW):
                return pickle.loads(self._pipe.recv_bytes())
            for _ in range(2):
                self._process.send_signal(signal.SIGINT)
                if self._pipe.poll(STOPPING):
                    self._pipe.recv_bytes()
                    break
        self._end()
        return None

    def _end(self) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        self._log.seek(0)
        self.last_words = self._log.read().decode(errors="replace")[-3000:]
        self._log.close()
        self._process = None


# --- in the other process ------------------------------------------------------------------------


def serve(pipe: int) -> None:
    connection = Connection(pipe)
    with _Notebook() as notebook:
        while True:
            kind, text = connection.recv()
            if kind == "end":
                return
            try:
                answer = notebook.clear(text) if kind == "clear" else notebook.run(text)
            except KeyboardInterrupt:
                answer = (Raised("KeyboardInterrupt", (), traceback.format_exc()), "", {})
            connection.send_bytes(pickle.dumps(answer))  # not `send`: torch would share memory


class _Notebook:
    """One process: a namespace, or an IPython shell with nbtrain once a cell asks for that."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._live: Any = None
        self._alone: Any = None

    def __enter__(self) -> _Notebook:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def clear(self, how: str) -> bool:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
        if how:
            from tests.fuzz.programs import OneProcess

            self._alone = OneProcess()
            self._alone.run("import torch\n" + ALONE)
            for hooks in _global_hooks():
                hooks.clear()
        elif self._live is None:
            from tests.fuzz.sessions import live

            self._live = self._stack.enter_context(live(""))
        else:
            self._live.clear()
        return True

    def run(self, text: str) -> tuple[Raised | None, str, Held]:
        if self._alone is not None:
            error, shown, namespace = self._alone.run(text), "", self._alone.namespace
        else:
            error = self._live.run(text, False)
            shown, namespace = self._live.shown, self._live.namespace
        return (Raised.of(error) if error else None), shown, {} if error else held(namespace)


def _global_hooks() -> Iterator[Any]:
    """Those that one program registered for all models of a process."""
    import torch

    for module in (torch.nn.modules.module, importlib.import_module("torch.optim.optimizer")):
        for name, value in vars(module).items():
            if name.startswith("_global") and isinstance(value, dict):
                yield value
