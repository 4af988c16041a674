"""What a rank does from its first to its last message."""

from __future__ import annotations

import builtins
import ctypes
import datetime
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import nbtrain.registry as registry
from nbtrain.errors import CannotTravel, NbtrainError
from nbtrain.events import Adopted, Event, Failed, Finished, Pulled, RankState, Repacked
from nbtrain.exchange.parcel import Parcel
from nbtrain.exchange.residence import Table
from nbtrain.messages import Adopt, Close, Forget, Leave, Pull, Run
from nbtrain.specs import RankInfo, RunSpec
from nbtrain.worker.homeward import KERNEL, LIMIT
from nbtrain.worker.interrupts import Interrupts
from nbtrain.worker.link import Link
from nbtrain.worker.meters import Meters
from nbtrain.worker.output import Outputs
from nbtrain.worker.shell import RankShell
from nbtrain.worker.streams import adopt as adopt_streams
from nbtrain.worker.streams import collect as collect_streams
from nbtrain.worker.surroundings import Taken
from nbtrain.worker.twins import Twins

A_MONTH = datetime.timedelta(days=30)
"""Collectives wait this long for a slow peer: there is no time limit on user code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankConfig:
    """What a rank is told when it is born."""

    info: RankInfo
    directory: str
    """private to the user; the channel's sockets and the group's store lie in it"""
    backend: str
    generation: int
    """a store's file is never used twice: it would hand out dead addresses"""
    environ: Mapping[str, str]
    """the kernel's, as it is now: which cards and which network there are is settled when a rank takes its place"""


def dies_with_its_parent() -> None:
    """Linux ends this process when the one that forked it ends, however it ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


class Rank:
    """One rank's process, once its shell exists."""

    def __init__(self, config: RankConfig, shell: RankShell, table: Table | None = None) -> None:
        self.config = config
        self.info = config.info
        self.link = Link(config.directory)
        self.outputs = Outputs(self.info.rank, self.link.send)
        self.shell = shell
        shell.outlet = self.outputs.outlet
        self.meters = Meters(self.info.rank, self.outputs, self.link.send)
        self.twins = Twins(self.info.rank, self.info.world_size, shell.user_ns, config.directory, self.info.device)
        if table is not None:
            self.twins.inherit(table)
        self.runtime: Any = None
        self._randomness: Any = None
        """every runtime's, one after another"""
        self._runs_as: Any = None
        self._found: tuple[Any, dict[str, Any]] | None = None
        self._environ: dict[str, str] = {}

    # -- life ----------------------------------------------------------------------------

    def serve(self) -> None:
        self.interrupts = Interrupts()
        self._state("starting")
        try:
            self._take_place()
        except BaseException as error:  # an exit code alone would tell nobody why
            self._fail(error, self._lines_of(error), 0)
            raise
        self._state("ready")
        while True:
            message = self.link.receive()
            if type(message) is Run:
                self._run(message)
            elif type(message) is Adopt:
                self._adopt(message)
            elif type(message) is Pull:
                self._pull(message)
            elif type(message) is Leave:
                home = self.twins.leave(message.key, message.reason)
                self._send(Repacked(rank=self.info.rank, time=time.time(), home=home))
            elif type(message) is Forget:
                self.twins.forget(self._close_runtime, message.spare, message.known)
                self._found = None
            elif type(message) is Close:
                return self._close()

    def _take_place(self) -> None:
        """Threads, device, process group: what makes this process a rank."""
        import torch
        import torch.distributed as dist

        info = self.info
        torch.set_num_threads(info.threads)
        own = {"MPLBACKEND": os.environ["MPLBACKEND"]}
        for name in set(os.environ) - set(self.config.environ):
            del os.environ[name]
        os.environ.update(self.config.environ)
        self._environ = {
            **own,
            "RANK": str(info.rank),
            "WORLD_SIZE": str(info.world_size),
            "LOCAL_RANK": str(info.local_rank),
            "LOCAL_WORLD_SIZE": str(info.world_size),
            "OMP_NUM_THREADS": str(info.threads),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or _loopback(),
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME") or _loopback(),
        }
        os.environ.update(self._environ)
        self.taken = Taken(self.shell, self._environ)
        # Loader workers' sockets: multiprocessing would leave a directory of its own behind whenever a rank is killed.
        multiprocessing.current_process()._config["tempdir"] = self.config.directory  # type: ignore[attr-defined]
        if info.device.startswith("cuda"):
            torch.cuda.set_device(info.device)
        if info.world_size > 1:
            path = os.path.join(self.config.directory, f"group{self.config.generation}")
            backend = "cpu:gloo,cuda:nccl" if self.config.backend == "nccl" else self.config.backend
            dist.init_process_group(
                backend,
                store=dist.FileStore(path, info.world_size),
                rank=info.rank,
                world_size=info.world_size,
                timeout=A_MONTH,
            )

    def _close(self) -> None:
        import torch.distributed as dist

        self._close_runtime()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.outputs.finish()
        self.link.close()

    def _close_runtime(self) -> None:
        if self.runtime is not None:
            self.runtime.uninstall()
            self.runtime = self._runs_as = None

    # -- a cell --------------------------------------------------------------------------

    def _run(self, run: Run) -> None:
        try:
            ready = self._prepare(run)
        except BaseException as error:
            self._fail(error, self._lines_of(error), 0)
            return
        names, lead, running = ready
        if self.info.rank not in run.ranks:
            self.runtime.end(True)
            self._finish(Finished(rank=self.info.rank, time=time.time(), steps=0))
            return
        steps = self.runtime.steps
        self.outputs.outlet.begin(running)
        self.meters.begin(steps)
        failure, lines = self._execute(run)
        notes = self.runtime.end(failure is None)
        self.meters.end(steps)
        if failure is not None:
            self.outputs.outlet.announce()
            self._fail(failure, lines, steps.count)
            return
        try:
            homeward = self.twins.homeward(names, run.spec.keep, LIMIT if run.spec.pool.start != "fork" else math.inf)
            values = homeward.values() if len(run.ranks) > 1 else None
            finished = Finished(
                rank=self.info.rank,
                time=time.time(),
                steps=steps.count,
                home=homeward.pack(self.twins.packer) if lead else None,
                streams=collect_streams(self.runtime.randomness) if lead else None,
                agreement=self.runtime.agreement() if self.info.world_size > 1 else None,
                values=values,
                released=self.twins.released(),
                notes=tuple(notes),
            )
        except Exception as error:  # what went wrong on the way home is the cell's failure: nothing has come home
            self._fail(error, self._lines_of(error), steps.count)
        else:
            self.outputs.finish()
            unsaid = self.outputs.outlet.unsaid()
            self._send(finished if unsaid is None else replace(finished, began=unsaid))

    def _execute(self, run: Run) -> tuple[BaseException | None, list[str]]:
        """The user's code: the only time in which an interrupt is listened to."""
        from nbtrain.training.subset import only

        try:
            try:
                self.interrupts.listen(run.sent)
                with only(run.ranks, self.info.world_size):
                    return self.shell.run(run.code, run.filename, run.quiet)
            finally:
                self.interrupts.ignore()
        except KeyboardInterrupt as outside:  # it came before the cell's first line or after its last
            self.interrupts.ignore()
            return outside, []

    def _prepare(self, run: Run) -> tuple[dict[str, Any], bool, RankState]:
        complaints = self.taken.take(run.surroundings)
        again, gone = self.taken.refresh()
        for line in (*complaints, *gone):
            self.outputs.outlet.write("stderr", line + "\n")
        if again:  # what was prepared may call what is no more
            self._close_runtime()
            self._found = None
        self.shell.learn(run.sources)
        self.twins.packer.released(KERNEL, run.released.get(self.info.rank, ()))
        touched, names = self.twins.open(run.parcel, run.drop, run.unbind)
        spec = replace(run.spec, options=self.twins.options)
        runtime = self._runtime_for(spec)
        if run.streams is not None:
            adopt_streams(runtime.randomness, run.streams)
        if touched:
            self._state("preparing")
        runtime.workshop.retire(self.twins.holds)
        notes = list(runtime.begin(spec, self._objects(names, bool(touched))))
        if again:
            notes.append(f"changed on disk, loaded again: {', '.join(again)}")
        lead = self.info.rank == run.ranks[0]
        self.twins.start(touched, lead)
        return names, lead, RankState(rank=self.info.rank, time=time.time(), state="running", notes=tuple(notes))

    def _objects(self, names: dict[str, Any], changed: bool) -> dict[str, Any]:
        """Everything that a strategy may want to prepare; found again only when something changed."""
        from nbtrain.training.prepare import PREPARABLE

        asked = frozenset((name, id(value)) for name, value in names.items())
        if changed or self._found is None or self._found[0] != asked:
            self._found = asked, self.twins.find(names, PREPARABLE)
        return self._found[1]

    def _runtime_for(self, spec: RunSpec) -> Any:
        """The runtime of this strategy; another strategy or other options mean another one."""
        from nbtrain.training.runtime import Runtime

        # A class or object of the notebook's may be another one by now under the same name.
        runs_as = spec.strategy, dict(spec.options), registry.load_strategy(spec.strategy, self.shell.user_ns)
        if self.runtime is None or runs_as != self._runs_as:
            self._close_runtime()
            strategy = registry.make_strategy(spec.strategy, spec.options, self.shell.user_ns)
            self.runtime = Runtime(self.info, strategy, self.link.send, self._randomness)
            self._randomness = self.runtime.randomness
            self.runtime.install()
            self._runs_as = runs_as
            for name, value in self.runtime.builtins().items():
                setattr(builtins, name, value)
        return self.runtime

    def _adopt(self, message: Adopt) -> None:
        lacking = self.twins.adopt(message.news)
        self._found = None
        self._send(Adopted(rank=self.info.rank, time=time.time(), lacking=lacking))

    def _pull(self, message: Pull) -> None:
        self.twins.packer.released(KERNEL, message.released.get(self.info.rank, ()))
        try:
            parcel, reason = self.twins.pull(message.key, message.drop)
        except Exception as error:  # the object's own pickle method, or no memory left
            parcel, reason = None, f"{type(error).__name__}: {error}"
        rank = self.info.rank
        self._send(Pulled(rank=rank, time=time.time(), asked=message.asked, parcel=parcel, reason=reason))

    # -- what it says --------------------------------------------------------------------

    def _state(self, state: str, notes: tuple[str, ...] = ()) -> None:
        self._send(RankState(rank=self.info.rank, time=time.time(), state=state, notes=notes))

    def _send(self, event: Event) -> None:
        self.link.send(event)

    def _finish(self, event: Event) -> None:
        self.outputs.finish()
        self._send(event)

    def _fail(self, error: BaseException, lines: list[str], steps: int) -> None:
        self._finish(
            Failed(
                rank=self.info.rank, time=time.time(), name=type(error).__name__, text=str(error), lines=tuple(lines),
                exception=self._packed(error), interrupted=isinstance(error, KeyboardInterrupt), steps=steps,
            )
        )  # fmt: skip

    def _packed(self, error: BaseException) -> bytes | None:
        """The exception itself, so that the notebook can raise one of the same type."""
        cls = type(error)
        # Pickle would call an `__init__` of the user's once more, with what it had given to its base.
        plain = isinstance(cls.__init__, FunctionType) and cls.__reduce__ is BaseException.__reduce__
        try:
            whole = (cls, error.args, vars(error)) if plain else error
            parcel: Parcel | None = self.twins.alone("exception", whole)
        except (CannotTravel, Exception):  # its class may do anything when it is pickled
            return None
        return None if parcel is None else pickle.dumps(parcel, 5)

    def _lines_of(self, error: BaseException) -> list[str]:
        if isinstance(error, NbtrainError):
            return [f"{type(error).__name__}: {error}"]
        made = self.shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
        return list(made)


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"
