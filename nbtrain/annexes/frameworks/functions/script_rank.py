"""In a script there are no ranks to send a cell to: the process is one, and so is each that torchrun has started."""

from __future__ import annotations

import atexit
import builtins
import linecache
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.base.events import Finished, Metrics
from nbtrain.base.specs import Needs, PoolSpec, RankInfo, RunSpec
from nbtrain.machine import registry
from nbtrain.notebook.magics.line.parse import Request, parse
from nbtrain.notebook.magics.line.resolve import Resolver
from nbtrain.notebook.report.cell_report import disagreements, work_advice
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.views.text import TextView
from nbtrain.worker.checkpoints.checkpoints_of_cell import Checkpoints
from nbtrain.worker.process.process_group import A_MONTH
from nbtrain.worker.random_states.default_generators import capture, restore
from nbtrain.worker.runtime import Runtime, installed

EVERY = 0.5
"""seconds between two looks at how far the loop is"""


@cache
def script_rank() -> ScriptRank:
    """This process, for as long as it lives."""
    return ScriptRank()


class ScriptRank:
    """A process of a script, as torchrun's environment describes it; alone without."""

    def __init__(self) -> None:
        told = os.environ.get
        self.rank, self.world_size = int(told("RANK", "0")), int(told("WORLD_SIZE", "1"))
        self.local_rank = int(told("LOCAL_RANK", "0"))
        self.nodes = self.world_size // int(told("LOCAL_WORLD_SIZE", str(self.world_size)))
        self.running = False
        """a text runs, as a cell would"""
        self._randomness: Any = None
        self._resolver = OwnProcesses(self)

    def join(self, kind: str = "") -> None:
        """Form the group, once. `kind`: of devices."""
        if self.world_size > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and kind != "cpu" else "gloo"
            dist.init_process_group(backend, timeout=A_MONTH)  # one may download for as long as it takes
            atexit.register(_leave)

    def of_rank_0(self, value: Any) -> Any:
        """What rank 0 has of it, on every rank."""
        if self.world_size == 1:
            return value
        self.join()
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def spec(self, line: str, names: dict[str, Any]) -> RunSpec:
        return self._resolver.run(self._request(line, names), Request(), names)

    def run(self, line: str, file: str, text: str, names: dict[str, Any], objects: Mapping[str, Any]) -> None:
        """Run a text as a cell below `%%distributed LINE` would be. `objects`: what the strategy may have to set up."""
        spec = self.spec(line, names)
        device = spec.pool.devices[self.rank]
        if spec.pool.kind == "cuda":
            torch.cuda.set_device(device)
        self.join(spec.pool.kind)
        info = RankInfo(
            rank=self.rank, world_size=self.world_size, local_rank=self.local_rank, nodes=self.nodes,
            device=device, threads=torch.get_num_threads(),
        )  # fmt: skip
        strategy = registry.make_strategy(spec.strategy, spec.options, names)
        with _shown(self, spec) as show:
            runtime = Runtime(info, strategy, show.log, self._randomness, precision=spec.precision)
            self._randomness = runtime.randomness
            if (around := installed()) is not None and not around.strategy.facts.hands_off:  # that of a rank
                raise UsageError(
                    "the script says by itself what is distributed, and how: leave --strategy out of the line that "
                    "runs it"
                )
            runtime.install()
            ok, self.running = False, True
            try:
                with _builtins(runtime):
                    self._run(runtime, spec, objects, show, file, text, names)
                ok = True
            finally:
                self.running = False
                runtime.uninstall(ok)  # what is in pieces is put together by all of them, and one may have failed
                if around is not None:
                    around.install()
                    Checkpoints.running = around.checkpoints

    def _run(
        self, runtime: Runtime, spec: RunSpec, objects: Mapping[str, Any], show: Any, file: str, text: str,
        names: dict[str, Any],
    ) -> None:  # fmt: skip
        states = self.of_rank_0(capture())
        runtime.randomness.adopt(states)
        ok = False
        try:
            for note in runtime.begin(spec, objects):
                show.note(note)
            show.watch(runtime)
            linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
            exec(compile(text, file, "exec"), {**names})
            ok = True
        finally:
            show.watch(None)
            for note in runtime.end(ok):
                show.note(note)
        runtime.checkpoints.finish()
        self._compare(runtime, show)
        restore(self.of_rank_0(runtime.randomness.collect() or states))

    def _compare(self, runtime: Runtime, show: _Show) -> None:
        """What a notebook says when a cell ends: ranks that had other data, or have other weights."""
        if self.world_size == 1:
            return
        mine = Finished(
            rank=self.rank, time=time.time(), steps=runtime.steps.count, compared=runtime.compared(),
            replica_checksums=runtime.replica_checksums.take(),
        )  # fmt: skip
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, mine)
        finished = dict(enumerate(every))
        for sentence in (*disagreements(finished, 0), *work_advice(finished.values()).values()):
            show.note(sentence)

    def _request(self, line: str, names: dict[str, Any]) -> Request:
        """In one process a strategy has nothing to divide."""
        request = parse(line, names)
        if self.world_size > 1:
            return request
        wanted = _count(request)
        if wanted is not None and wanted > 1:
            warnings.warn(
                f"devices={wanted}, and this script is one process: torchrun --nproc-per-node {wanted} starts it on "
                "as many",
                stacklevel=2,
            )
        if request.value("strategy") in ("auto", "single", "none"):
            return request
        return replace(
            request, given={key: option for key, option in request.given.items() if key != "strategy"}, own={}
        )


class OwnProcesses(Resolver):
    """Resolves a line for the processes that there are."""

    def __init__(self, process: ScriptRank) -> None:
        super().__init__()
        self._process = process

    def pool(self, request: Request, needs: Iterable[tuple[str, Needs]] = ()) -> PoolSpec:
        count = self._process.world_size
        wanted = _count(request)
        if count > 1 and wanted not in (None, count):
            raise UsageError(f"devices={wanted}, and torchrun has started {count}: torchrun --nproc-per-node {wanted}")
        accelerator = request.value("accelerator")
        card = torch.cuda.is_available() and accelerator in ("auto", "gpu", "cuda")
        if not card and accelerator not in ("auto", "cpu"):
            raise UsageError(f"accelerator={accelerator!r}: there is none here. Leave it out, or write 'cpu'")
        kind = "cuda" if card else "cpu"
        for who, need in needs:
            if need.together:
                raise NotSupported(f"{who} has all devices in one process: with torchrun write strategy='ddp'")
            if need.max_ranks is not None and count > need.max_ranks:
                raise UsageError(f"{who} takes {need.max_ranks} process, and torchrun has started {count}")
            if kind not in need.kinds:
                raise UsageError(f"{who} runs on {' and '.join(need.kinds)}, and these devices are {kind}")
            if count < need.min_ranks:
                raise UsageError(f"{who} takes {need.min_ranks} processes or more: start the script with torchrun")
            if reason := registry.missing(need):
                raise UsageError(f"{who}: {reason}")
        per_machine = count // self._process.nodes
        listed = request.value("devices").value
        cards = listed if isinstance(listed, list | tuple) else range(per_machine)
        devices = [f"cuda:{cards[rank % per_machine]}" if card else "cpu" for rank in range(count)]
        return PoolSpec(kind=kind, devices=tuple(devices), nodes=self._process.nodes)


def _count(request: Request) -> int | None:
    """How many devices a line asks for; None: as many as there are."""
    value = request.value("devices").value
    if isinstance(value, list | tuple):
        return len(value)
    return value if isinstance(value, int) and value > 0 else None


class _Show:
    """Lines of text on the terminal, on rank 0, as a notebook without widgets has them."""

    def __init__(self, process: ScriptRank, on: bool) -> None:
        self._on = on and process.rank == 0
        """the lines; notes are said in any case"""
        self._rank = process.rank
        self._feed = Feed({"began": time.time(), "devices": ()})
        self._view = TextView(self._feed, None, self)
        self._runtime: Runtime | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()

    def begin(self) -> None:
        if self._on:
            threading.Thread(target=self._loop, name="nbtrain-progress", daemon=True).start()

    def end(self, ok: bool) -> None:
        self._over.set()
        with self._lock:
            self._feed.closed(ok)
            if self._on:
                self._view.closed(ok)

    def watch(self, runtime: Runtime | None) -> None:
        with self._lock:
            self._read()  # how far the loop came
            self._runtime = runtime

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._on:
            points = {name: [(step, float(value))] for name, value in values.items()}
            with self._lock:
                self._feed.receive(Metrics(rank=self._rank, time=time.time(), points=points))

    def note(self, text: str) -> None:
        if self._rank == 0:
            print(f"nbtrain: {text}", flush=True)

    def line(self, text: str) -> None:
        print(text, flush=True)

    def _read(self) -> None:
        for event in self._runtime.readings.events() if self._runtime is not None else ():
            self._feed.receive(event)

    def _loop(self) -> None:
        while not self._over.wait(EVERY):
            with self._lock:
                if self._over.is_set():
                    return
                self._read()
                self._feed.tick(time.monotonic())
                self._view.tick(time.monotonic())


@contextmanager
def _shown(process: ScriptRank, spec: RunSpec) -> Iterator[_Show]:
    show = _Show(process, spec.monitor != "off")
    show.begin()
    ok = False
    try:
        yield show
        ok = True
    finally:
        show.end(ok)


@contextmanager
def _builtins(runtime: Runtime) -> Iterator[None]:
    """What a cell may use by name: `log`, `save`, `gather`, … Outside of it the script's builtins are Python's."""
    given = runtime.builtins()
    before = {name: getattr(builtins, name) for name in given if hasattr(builtins, name)}
    for name, value in given.items():
        setattr(builtins, name, value)
    try:
        yield
    finally:
        for name in given:
            delattr(builtins, name)
        for name, value in before.items():
            setattr(builtins, name, value)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
