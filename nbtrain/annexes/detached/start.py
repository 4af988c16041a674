"""`%%distributed --detach`: hands a cell over to a keeper (`keeper.py`), which runs it without this kernel."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import nbtrain.base.humanize as humanize
import nbtrain.compat.kernel as kernel_of
from nbtrain.annexes.detached.detached_run import DetachedRun
from nbtrain.annexes.detached.digests import digests
from nbtrain.annexes.detached.order import Order
from nbtrain.annexes.detached.plain_loops import with_resumable
from nbtrain.annexes.detached.run_folders import GOES_ON, LOG, RunFolder, every_run, place, started_here
from nbtrain.annexes.detached.runs_table import until_when
from nbtrain.base.awake_time import Stopwatch
from nbtrain.base.errors import PoolError, RankError, UsageError
from nbtrain.base.specs import RunSpec
from nbtrain.engines._local import outliving
from nbtrain.engines._local.warm import warm
from nbtrain.exchange.kinds.base import Handle
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.exchange.names.name_order import NameOrder
from nbtrain.machine import registry
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState
from nbtrain.notebook.run.elastic_cell import ONE, WRITE, check_loops
from nbtrain.notebook.sync.captured_names import captured, check_shown
from nbtrain.notebook.sync.kernel_environment import SentEnvironment
from nbtrain.notebook.sync.notebook_side import NotebookSide
from nbtrain.watch.beacon import here
from nbtrain.watch.runs.run_folder import notebook
from nbtrain.worker.checkpoints import api
from nbtrain.worker.checkpoints.newest import last_number
from nbtrain.worker.checkpoints.schedule import place_of
from nbtrain.worker.data.batch_dealing import batches_of_a_step
from nbtrain.worker.random_states.default_generators import capture, packed

LOOK_UP = 0.05
SLOW = 2.0
"""Seconds after which it is said what is waited for."""
WAITS = {
    "here": "waiting for torch to be imported …", "taken": "handing the cell over to a process of its own …",
    "running": "it starts ranks of its own …",
}  # fmt: skip
LIVE = 4
"""Runs that may go on at a time,"""
LEFT = 20 << 30
"""and bytes that all may leave on the disk until another is refused."""
OURS = ("nbtrain_", "lightning_work")
"""How names begin that a call has for as long as it lasts: `nbtrain.run`, or a Trainer's."""
SHORT = 100
"""Elements of a list that are looked at."""


def start(
    state: MagicsState, line: Request, base: Request, cell: Cell, goes_on: tuple[bytes, int] | None = None
) -> DetachedRun:
    """Have the cell run without this kernel; returns once a keeper has all that it needs. `goes_on`: where the cell's
    loops begin, and how many batches a step has taken until there."""
    until = line.value("until")
    line = replace(line, given={name: value for name, value in line.given.items() if name not in ("detach", "until")})
    spec = state.devices.run(line, base, state.notebook)
    refuse(spec, state)
    shell, namespace = state.shell, state.notebook
    names = captured(cell, namespace, NameOrder(namespace), spec)
    spec, placed, no_place = _noting_its_place(spec, cell, names, namespace, goes_on)
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
    found, numbers = here(), state.opened().ranks.numbers()
    runtime = str(found[1]) if found is not None else ""
    about = {
        "line": str(line).strip(), "strategy": spec.strategy, "ranks": spec.pool.world_size, "where": spec.pool.where,
        "cell": cell.number, "source": cell.source if placed is cell and goes_on is None else placed.code.strip("\n"),
        "notebook": notebook(namespace), "cwd": os.getcwd(),
        "save_to": str(place_of(spec.save_to)) if spec.save_steps or spec.save_seconds else "",
        "runtime": runtime, "monitor": spec.monitor, "whole_line": str(line.over(base)), "batches": spec.batches,
        "no_place": no_place, "since": last_number(spec.save_to), "until": until,
    }  # fmt: skip
    with outliving.start("nbtrain.annexes.detached.keeper") as kernel, ExitStack() as undo:
        keeper = _Keeper(kernel, about)
        folder = keeper.folder
        undo.callback(folder.remove)
        undo.callback(keeper.kill)  # what was not taken over does not run
        with closing(NotebookSide(namespace, str(folder.path), [0], numbers)) as side:
            out = side.outgoing(names.hard, names.soft, spec.options, running=cell.filename)
            if (source := side.source(cell.filename)) is not None:
                out = replace(out, sources=(source, *out.sources))
            environment = SentEnvironment(shell).changes(registry.forms_no_group(spec.strategy))
            kernel.send(Order(
                spec=replace(spec, options={}, monitor="off", background=False), cell=placed, out=out,
                environment=environment, until=until, runtime=runtime,
            ))  # fmt: skip
            state.devices.forget()  # its leases are the keeper's now
            keeper.says("taken")
        _note_what_is_here(folder, namespace, names, shell.user_ns_hidden)
        started_here.add(folder.key)
        undo.pop_all()
        try:
            keeper.says("running")
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{folder} goes on: %distributed runs stop {folder.number} ends it") from None
    if spec.resume is not None:
        api.resumed(spec.resume[0])  # the run's loops go on there, and no other cell's
    for sentence in side.unsendable:
        print(sentence)
    magic = "%distributed"
    print(
        f"run {folder.number} goes on without this notebook{until_when(until)}: {about['line'] or spec.strategy} on "
        f"{spec.pool.where}. "
        f"{magic} attach {folder.number} shows it and brings home what it has done, {magic} runs lists all"
    )
    return DetachedRun(folder)


def _noting_its_place(
    spec: RunSpec, cell: Cell, names: Captured, namespace: dict[str, Any], goes_on: tuple[bytes, int] | None
) -> tuple[RunSpec, Cell, str]:
    """How it runs, and what, where another run can go on from where it is stopped; why it cannot, if not."""
    placed = with_resumable(cell, namespace)
    try:
        check_loops(placed, names, namespace)
    except UsageError as error:
        return spec, cell, str(error).removeprefix(WRITE).removesuffix(ONE)
    place, batches = goes_on or (None, batches_of_a_step(spec, namespace))
    # What `load` has left for a loop with `resumable` is not for one that is a plain loop wherever else it runs.
    resume = ("", place) if place is not None else spec.resume if placed is cell else None
    return replace(spec, notes_place=True, batches=batches, resume=resume), placed, ""


def refuse(spec: RunSpec, state: MagicsState) -> None:
    """Raises why it cannot go on without the notebook, or not now."""
    runs = every_run()
    live = [str(run.number) for run in runs if run.state == GOES_ON]
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
        f"{LIVE} such runs go on already, {', '.join(live)}: %distributed runs stop {live[0] if live else ''} ends one":
            len(live) >= LIVE,
        f"what such runs have left takes {humanize.size(LEFT)}: %distributed runs lists them, and --drop 1 deletes one":
            sum(run.size for run in runs) > LEFT,
    }  # fmt: skip
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(f"--detach goes on without this notebook, and {why}")


class _Keeper:
    """The kernel's end of it."""

    def __init__(self, kernel: Connection[Any, Any], about: dict[str, Any]) -> None:
        self.kernel = kernel
        self._watch, self._said = Stopwatch(), False
        with suppress(BrokenPipeError):  # it has not come up, as `says` finds
            kernel.send((str(place()), about))
        pid, path = self.says("here")
        self._pid, self.folder = int(pid), RunFolder(Path(path))

    def says(self, wanted: str) -> list[str]:
        """Wait until it is `here`, has everything (`taken`), and until the cell has begun on its ranks (`running`)."""
        while not self.kernel.poll(LOOK_UP):
            warm().attend()
            if not self._said and self._watch.seconds > SLOW:
                self._said = True
                print(WAITS[wanted], flush=True)
        try:
            what, lines = self.kernel.recv()
        except (EOFError, ConnectionError):
            raise PoolError(f"the process that would run it has ended: {self._last_words()}") from None
        if what == "refused":
            error = RankError("\n".join(lines))
            kernel_of.show_as(error, lines)
            raise error
        return list(lines)

    def _last_words(self) -> str:
        with suppress(OSError, AttributeError):  # there is no folder yet
            lines = (self.folder.path / LOG).read_text(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "it has said nothing")
        return "it has said nothing"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(EOFError, OSError):
            while True:  # until its end of the pipe is closed
                self.kernel.recv()


def _is_on_a_card(value: Any) -> bool:
    """A tensor, or a list or dict that plainly has one."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_on_a_card, value[:SHORT]))
    if isinstance(value, dict):
        return any(map(_is_on_a_card, list(value.values())[:SHORT]))
    torch: Any = sys.modules.get("torch")
    plain = torch is not None and isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return bool(plain and value.is_cuda)


def _note_what_is_here(folder: RunFolder, namespace: dict[str, Any], names: Captured, hidden: Collection[str]) -> None:
    """Under names that the run is sent, and others that it binds: by which `attach` knows what the notebook has changed
    since. `hidden`: where those stand that are ours, and no cell's. Nothing of the notebook's runs meanwhile."""
    sent, states = {*names.hard, *names.soft}, packed(capture())
    folder.write("sent.json", {
        "names": digests(namespace, sent), "bound": digests(namespace, names.writes - sent),
        "random": digests(states, states),
        "own": sorted(name for name in sent.intersection(hidden) if name.startswith(OURS)),
    })  # fmt: skip
