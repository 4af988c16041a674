"""`%%distributed --detach`: hands a cell over to a keeper (`keeper.py`), which runs it without this kernel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import nbtrain.compat.kernel as kernel_of
from nbtrain.annexes.detached.digests import digests
from nbtrain.annexes.detached.order import Order
from nbtrain.annexes.detached.run_folders import LOG, RunFolder
from nbtrain.base.awake_time import Stopwatch
from nbtrain.base.errors import PoolError, RankError, UsageError
from nbtrain.base.specs import RunSpec
from nbtrain.exchange.kinds.base import Handle
from nbtrain.exchange.names.name_order import NameOrder
from nbtrain.machine import registry
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState
from nbtrain.notebook.sync.captured_names import captured, check_shown
from nbtrain.notebook.sync.kernel_environment import SentEnvironment
from nbtrain.notebook.sync.notebook_side import NotebookSide
from nbtrain.watch.beacon import here
from nbtrain.watch.runs.run_folder import notebook

PATIENCE = 60.0
"""Seconds in which a keeper answers; importing torch from a slow disk takes some of them."""
SLOW = 2.0
"""Seconds after which it is said what is waited for."""
WAITS = {"taken": "handing the cell over to a process of its own …", "running": "it starts ranks of its own …"}
SHORT = 100
"""Elements of a list that are looked at."""
CODE = "from nbtrain.annexes.detached.keeper import main; main({}, {!r})"


def start(state: MagicsState, line: Request, base: Request, cell: Cell) -> None:
    """Have the cell run without this kernel; returns once a keeper has all that it needs."""
    line = replace(line, given={name: value for name, value in line.given.items() if name != "detach"})
    spec = state.devices.run(line, base, state.notebook)
    _refuse(spec, state)
    shell, namespace = state.shell, state.notebook
    names = captured(cell, namespace, NameOrder(namespace), spec)
    check_shown(cell.code, namespace)
    if cards := [name for name in (*names.hard, *names.soft) if _is_on_a_card(namespace.get(name))]:
        raise UsageError(
            f"{', '.join(cards)}: a tensor on a card of this kernel's comes to a detached run on the CPU. Write "
            f"{cards[0]} = {cards[0]}.cpu(), and .to(device) in the cell; models go to the ranks' devices by themselves"
        )
    if handles := [name for name in (*names.hard, *names.soft) if type(namespace.get(name)) is Handle]:
        raise UsageError(
            f"{', '.join(handles)}: what is behind a handle lives on this notebook's ranks, and a detached run has its "
            f"own: {handles[0]} = {handles[0]}.pull() first"
        )
    place, numbers = here(), state.opened().ranks.numbers()
    runtime = str(place[1]) if place is not None else ""
    about = {
        "line": str(line).strip(), "strategy": spec.strategy, "ranks": spec.pool.world_size, "where": spec.pool.where,
        "cell": cell.number, "source": cell.source, "notebook": notebook(namespace), "cwd": os.getcwd(),
        "python": sys.version.split()[0], "save_to": spec.save_to if spec.save_steps or spec.save_seconds else "",
        "runtime": runtime,
    }  # fmt: skip
    folder = RunFolder.make(about)
    keeper: subprocess.Popen[bytes] | None = None
    taken = False
    side = NotebookSide(namespace, str(folder.path), [0], numbers)
    try:
        keeper, kernel = _keeper(folder)
        out = side.outgoing(names.hard, names.soft, spec.options, running=cell.filename)
        if (source := side.source(cell.filename)) is not None:
            out = replace(out, sources=(source, *out.sources))
        environment = SentEnvironment(shell).changes(registry.forms_no_group(spec.strategy))
        with kernel:
            kernel.send(Order(
                spec=replace(spec, options={}, monitor="off", background=False), cell=cell, out=out,
                environment=environment, runtime=runtime,
            ))  # fmt: skip
            state.devices.forget()  # its leases are the keeper's now
            _wait_for("taken", kernel, keeper, folder)
            _note_what_was_sent(folder, namespace, (*names.hard, *names.soft))
            taken = True
            _wait_for("running", kernel, keeper, folder)
    except BaseException as error:
        if taken and isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{folder} goes on: %distributed runs stop {folder.number} ends it") from None
        if keeper is not None:  # what was not taken over does not run
            keeper.kill()
            keeper.wait()
        folder.remove()
        raise
    finally:
        side.close()
    for sentence in side.unsendable:
        print(sentence)
    magic = "%distributed"
    print(
        f"run {folder.number} goes on without this notebook: {about['line'] or spec.strategy} on {spec.pool.where}. "
        f"{magic} attach {folder.number} shows it and brings home what it has done, {magic} runs lists all"
    )


def _refuse(spec: RunSpec, state: MagicsState) -> None:
    wrong = {
        "--engine inprocess runs the cell in this kernel, with which it ends: leave it out":
            spec.pool.engine == "inprocess",
        "--start fork makes ranks of this kernel: leave it out": spec.pool.start == "fork",
        f"--engine {spec.pool.engine}: the other machines take part in this notebook: leave it out":
            spec.pool.machines is not None,
        "--keep leaves objects on this notebook's ranks: leave it out": bool(spec.keep),
        "--background goes on in this kernel: leave one of both out": spec.background,
        "this notebook's ranks have the cards: %distributed stop, then run the cell again":
            spec.pool.kind == "cuda" and state.session is not None and state.session.ranks.pool is not None,
        "--log-to hands what is logged to an object of this kernel: write to it in the cell": bool(spec.log_to),
    }  # fmt: skip
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(f"--detach goes on without this notebook, and {why}")


def _keeper(folder: RunFolder) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    ours, theirs = socket.socketpair()
    log = os.open(folder.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-c", CODE.format(theirs.fileno(), str(folder.path))],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=[theirs.fileno()],
        )  # fmt: skip
    finally:
        os.close(log)
        theirs.close()
    return keeper, Connection(ours.detach())


def _wait_for(wanted: str, kernel: Connection[Any, Any], keeper: subprocess.Popen[bytes], folder: RunFolder) -> None:
    """Wait until the keeper has everything (`taken`), and until the cell has begun on its ranks (`running`)."""
    watch, said = Stopwatch(), False
    while not kernel.poll(0.05):
        if keeper.poll() is not None or (wanted == "taken" and watch.seconds > PATIENCE):
            raise PoolError(f"the process that would run it has not come up: {_last_words(folder)}")
        if not said and watch.seconds > SLOW:
            said = True
            print(WAITS[wanted], flush=True)
    try:
        what, lines = kernel.recv()
    except EOFError:
        raise PoolError(f"the process that would run it has ended: {_last_words(folder)}") from None
    if what == "refused":
        error = RankError("\n".join(lines))
        kernel_of.show_as(error, lines)
        raise error


def _is_on_a_card(value: Any) -> bool:
    """A tensor, or a list or dict that plainly has one."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_on_a_card, value[:SHORT]))
    if isinstance(value, dict):
        return any(map(_is_on_a_card, list(value.values())[:SHORT]))
    torch: Any = sys.modules.get("torch")
    plain = torch is not None and isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return bool(plain and value.is_cuda)


def _last_words(folder: RunFolder) -> str:
    with suppress(OSError):
        lines = (folder.path / LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it has said nothing"
    return "it has said nothing"


def _note_what_was_sent(folder: RunFolder, namespace: dict[str, Any], names: Iterable[str]) -> None:
    """By which `attach` knows what the notebook has changed since. Nothing of the notebook's runs meanwhile."""
    folder.write("sent.json", digests(namespace, names))
