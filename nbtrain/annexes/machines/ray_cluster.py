"""Ranks on the machines of a Ray cluster. Ray finds the machines and starts a node on each, in an actor; what runs
there is nbtrain's own, as on machines that have joined by themselves.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil

from nbtrain.base.errors import PoolError, UsageError
from nbtrain.base.specs import MachinesWanted, PoolSpec
from nbtrain.engines.remote.lobby import MONTH, if_open
from nbtrain.engines.remote.pool import RemotePool

LEAVE = 10.0
"""Seconds for nodes that were sent away to end by themselves: one that is killed with its actor clears nothing away."""
ENDING = 2.0
"""The same as the notebook ends, for which Jupyter gives it 5 seconds."""
ANSWERS = 5.0
"""Seconds for the address of a cluster to take a connection."""
AGAIN = 2.0
"""Seconds between two looks at the machines that the cluster has, while some are awaited."""
GROWS = "NBTRAIN_RAY_GROWS"
"""Environment variable: an autoscaler adds machines, so that more than there is may be asked for."""


@dataclass
class _Slot:
    """One of the machines that were asked for."""

    actor: Any
    ended: Any
    """the future of what its node said when it ended"""
    fresh: bool = True
    """started since machines were asked for last: if it ends before it joins, something is wrong"""


class RayDoor:
    """A placement group with a bundle for each machine, and an actor in each that runs a node."""

    lasts = MONTH
    hosts: tuple[str, ...] = ()

    def __init__(self, wanted: MachinesWanted) -> None:
        if wanted.hosts:
            raise UsageError("--hosts: Ray chooses the machines; write --nodes with their number")
        if wanted.most is not None:
            raise UsageError(
                f"--nodes {wanted.nodes}:{wanted.most}: Ray gives all machines of a group or none; write one number"
            )
        _connect()
        self.nodes = wanted.nodes or 1
        self._wanted = wanted
        self._bundle = bundle(wanted, _machines())
        if short := self._short():
            raise UsageError(short)
        self._driver = ""
        """the connection by which actors were started; they end with it"""
        self._group: Any = None
        self._slots: dict[int, _Slot] = {}
        self._ticket = ""
        self._looked = 0.0

    def open(self, ticket: str, there: Collection[str]) -> None:
        import ray
        from ray.util import placement_group

        _connect()  # the notebook may have called ray.shutdown()
        driver = ray.get_runtime_context().get_worker_id()
        if driver != self._driver:
            self._driver, self._group, self._slots = driver, None, {}
        if short := self._short():
            raise PoolError(short)
        self._ticket, self._looked = ticket, time.monotonic()
        if self._group is None:
            # never two nodes on one machine: they would have one another's devices
            strategy = "STRICT_SPREAD" if self.nodes > 1 else "PACK"
            self._group = placement_group([dict(self._bundle) for _ in range(self.nodes)], strategy=strategy)
        for number in range(self.nodes):
            slot = self._slots.get(number)
            if slot is None or _ended(slot):
                self._start(number)
            else:
                slot.fresh = False

    def _start(self, number: int) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from nbtrain.annexes.machines.ray_actor import NodeActor

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        made = ray.remote(NodeActor).options(
            num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), max_restarts=0, max_task_retries=0,
            scheduling_strategy=place,
        )  # fmt: skip
        actor = made.remote()
        self._slots[number] = _Slot(actor, actor.run.remote(self._ticket))

    def trouble(self, there: Collection[str]) -> str | None:
        for number, slot in self._slots.items():
            if _ended(slot):
                if slot.fresh:
                    return self._why(slot)
                self._start(number)  # it ran when machines were asked for, and Ray tells of its end now
        if time.monotonic() - self._looked > AGAIN:
            self._looked = time.monotonic()
            return self._short()
        return None

    @staticmethod
    def _why(slot: _Slot) -> str:
        import ray

        try:
            status, said = ray.get(slot.ended)
        except ray.exceptions.RayError as error:
            text = str(error).strip()
            if "No module named 'nbtrain'" in text:
                return (
                    "nbtrain is not installed on the machines of the Ray cluster: install there what the notebook has, "
                    'or call ray.init(runtime_env={"pip": ["nbtrain"]}) in the notebook before its first cell with '
                    "--engine ray"
                )
            return f"Ray could not start nbtrain's node on one of its machines: {text}"
        words = said.strip() or "it said nothing"
        return f"nbtrain's node on one of Ray's machines has ended (status {status}):\n{words}"

    def waiting(self, there: Collection[str]) -> str:
        import ray
        from ray.util import placement_group_table

        if placement_group_table(self._group).get("state") == "CREATED":
            return "the nodes that Ray is starting"
        free = ray.available_resources()
        now = ", ".join(f"{_count(free.get(kind, 0), kind)} of {_number(total)}" for kind, total in _totals().items())
        return f"{_asked(self.nodes, self._bundle)} of the Ray cluster, which others use; free are {now}"

    def close(self) -> None:
        ray = sys.modules.get("ray")
        slots, self._slots = list(self._slots.values()), {}
        group, self._group = self._group, None
        if group is None or ray is None or not ray.is_initialized():
            return
        if ray.get_runtime_context().get_worker_id() != self._driver:
            return
        from ray.util import placement_group_table, remove_placement_group

        with suppress(ray.exceptions.RayError):
            if placement_group_table(group).get("state") == "CREATED":
                ray.wait([slot.ended for slot in slots], num_returns=len(slots), timeout=ENDING if _ends else LEAVE)
            for slot in slots:
                ray.kill(slot.actor)
            remove_placement_group(group)

    def _short(self) -> str | None:
        """What the cluster lacks for this, if it can never have it."""
        return None if os.environ.get(GROWS, "0") != "0" else shortage(self.nodes, self._bundle, _machines())


class RayPool(RemotePool):
    """Ranks on the machines of a Ray cluster."""

    door = RayDoor

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        atexit.register(self.close)  # as the notebook ends, before Ray does

    def close(self, *, kill: bool = False) -> None:
        atexit.unregister(self.close)
        super().close(kill=kill)


# -- what is asked for, and what there is --------------------------------------------------------

Resources = Mapping[str, float]


def bundle(wanted: MachinesWanted, machines: Mapping[str, Resources]) -> dict[str, int]:
    """What Ray is asked for on each machine. A CPU for each rank, and a GPU where ranks have one."""
    typed, count = wanted.devices, wanted.nodes or 1
    cards = sorted((int(machine.get("GPU", 0)) for machine in machines.values()), reverse=True)
    most = cards[min(count, len(cards)) - 1] if cards else 0
    spec: Any = typed.strip().lower() if isinstance(typed, str) else typed
    if isinstance(spec, str) and spec.lstrip("-").isdecimal():
        spec = int(spec)
    if wanted.accelerator == "tpu":
        raise UsageError("--engine ray runs on CPUs and CUDA cards, not on TPUs: take --engine local there")
    on_cards = wanted.accelerator != "cpu" and spec not in (0, None) and bool(cards and cards[0])
    if not on_cards and (spec == -1 or wanted.accelerator in ("gpu", "cuda")):
        asked = "--devices -1" if spec == -1 else f"--accelerator {wanted.accelerator}"
        raise UsageError(
            f"{asked} asks for GPUs, and no machine of the Ray cluster has one: write --devices 2 for ranks on CPUs"
        )
    if isinstance(spec, int):
        ranks = most if spec == -1 else max(1, spec)
    elif spec == "auto" and on_cards:
        ranks = most
    elif spec == "auto":
        cores = sorted((int(machine.get("CPU", 0)) for machine in machines.values()), reverse=True)
        ranks = max(1, min([4, *cores[:count]]))
    elif spec is None:
        ranks = 1
    else:
        raise UsageError(f"--devices {typed} names devices, and Ray chooses them: write a number, -1 or auto")
    return {"CPU": max(1, ranks), "GPU": max(1, ranks)} if on_cards else {"CPU": ranks}


def shortage(nodes: int, bundle: Resources, machines: Mapping[str, Resources]) -> str | None:
    """Why so many bundles never fit these machines, with the figures; None if they do."""
    fitting = sum(all(machine.get(kind, 0) >= count for kind, count in bundle.items()) for machine in machines.values())
    if fitting >= nodes:
        return None
    there = "; ".join(
        f"{name} ({', '.join(_count(machine.get(kind, 0), kind) for kind in bundle)})"
        for name, machine in machines.items()
    )
    main = "GPU" if "GPU" in bundle else "CPU"
    most = sorted((int(min(machine.get(kind, 0) for kind in bundle)) for machine in machines.values()), reverse=True)
    less = [f"--nodes {fitting}"] if fitting else []
    if len(most) >= nodes and most[nodes - 1]:
        less.append(f"--devices {most[nodes - 1]}")
    elif not fitting and most and most[0]:
        less.append(f"--nodes 1 --devices {most[0]}")
    write = f"Write {' or '.join(less)}, or add" if less else "Add"
    return (
        f"{_asked(nodes, bundle)} {'is' if nodes == 1 else 'are'} asked for, and the Ray cluster has {len(machines)}: "
        f"{there}. {write} machines with more {main}s to the cluster; {GROWS}=1 waits for those that an autoscaler adds"
    )


def _asked(nodes: int, bundle: Resources) -> str:
    each = " and ".join(_count(count, kind) for kind, count in bundle.items())
    return f"1 machine with {each}" if nodes == 1 else f"{nodes} machines with {each} each"


def _count(count: float, kind: str) -> str:
    return f"{_number(count)} {kind}{'s' * (count != 1)}"


def _number(count: float) -> str:
    return f"{count:g}"


def _machines() -> dict[str, Resources]:
    """Those that are there: address → its resources, also those that are used."""
    import ray

    machines: dict[str, Resources] = {}
    for node in ray.nodes():
        if node["Alive"]:
            name = node["NodeManagerAddress"]
            # several on one machine are for tests, or Ray's own trials
            machines[name if name not in machines else f"{name} {node['NodeID'][:8]}"] = node["Resources"]
    return machines


def _totals() -> dict[str, float]:
    import ray

    return {kind: total for kind, total in ray.cluster_resources().items() if kind in ("CPU", "GPU")}


def _ended(slot: _Slot) -> bool:
    import ray

    done, _ = ray.wait([slot.ended], timeout=0)
    return bool(done)


# -- the connection ------------------------------------------------------------------------------


_NOT_THERE = (
    "Ray is not available ({where}): {why}. Does the cluster run, and is this machine part of it? `ray status` in "
    "a terminal says. Without RAY_ADDRESS, and after `ray stop`, nbtrain starts a Ray on this machine alone"
)


def _connect() -> None:
    """Be a driver of a Ray cluster: the notebook's own connection if it has one, what RAY_ADDRESS names, the one that
    `ray start` has started here; or a Ray on this machine alone."""
    with _undisturbed():
        import ray

        _end_before_ray()
        if ray.is_initialized():
            client = sys.modules.get("ray.util.client")
            if client is not None and client.ray.is_connected():
                raise UsageError(
                    "the notebook is connected to Ray by Ray Client (ray://), through which the cluster's machines "
                    "cannot reach it. Let its kernel run on a machine of the cluster, call ray.shutdown(), and then "
                    'ray.init("auto")'
                )
            return
        address = os.environ.get("RAY_ADDRESS", "")
        if "://" in address:
            raise UsageError(
                f"RAY_ADDRESS={address} is for Ray Client, through which the cluster's machines cannot reach the "
                "notebook. Let its kernel run on a machine of the cluster, and write there "
                'import os; os.environ["RAY_ADDRESS"] = "auto"'
            )
        if why := _unreachable(address):
            raise UsageError(_NOT_THERE.format(where=f"RAY_ADDRESS={address}", why=why))
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # of whatever class: it has one of its own for each step of its start, or none
            ray.shutdown()
            where = f"RAY_ADDRESS={address}" if address else "ray.init()"
            why = str(error).strip() or type(error).__name__
            raise UsageError(_NOT_THERE.format(where=where, why=why)) from error
        if _started_here():
            has = " and ".join(_count(total, kind) for kind, total in _totals().items())
            print(
                f"started Ray on this machine alone, with {has}, as no cluster was found; it ends with the notebook. "
                "RAY_ADDRESS=HOST:PORT, or ray.init() in the notebook, names one"
            )


def _unreachable(address: str) -> str:
    """Why nobody listens there, which Ray itself takes minutes to find; empty if somebody does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():  # auto, local, or nothing
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERS).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""


def _started_here() -> bool:
    """Whether Ray's own processes are this one's children: ray.init() does not say whether it has started any."""
    return any("gcs_server" in child.name() for child in psutil.Process().children())


_ends = False
"""the notebook does"""


@cache
def _end_before_ray() -> None:
    """Nodes are sent away while Ray still runs: its own function for the end of the process has been registered by now,
    and the last one that is registered is called first."""
    atexit.register(_leave, os.getpid())


def _leave(owner: int) -> None:
    global _ends
    if os.getpid() != owner:  # forked from the notebook
        return
    _ends = True
    if (lobby := if_open()) is not None:
        lobby.close()
    ray = sys.modules["ray"]
    if not (ray.is_initialized() and _started_here()):
        return
    theirs = [process for child in psutil.Process().children() if child.name() == "raylet"
              for process in child.children(recursive=True)]  # fmt: skip
    ray.shutdown()
    # A worker that Ray was about to start does not know that there is none any more, and looks for it.
    for process in theirs:
        with suppress(psutil.Error):
            process.kill()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ray takes the handler of SIGTERM, `breakpoint()` and the first place of `sys.path` for itself. The notebook keeps
    its own; what Ray has put on the path comes last there."""
    path: Sequence[str] = list(sys.path)
    handler = signal.getsignal(signal.SIGTERM)
    breakpoints = os.environ.get("PYTHONBREAKPOINT")
    try:
        yield
    finally:
        sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
        if handler is not None and signal.getsignal(signal.SIGTERM) != handler:
            with suppress(ValueError):  # not the main thread: Ray could not have changed it either
                signal.signal(signal.SIGTERM, handler)
        if breakpoints is None:
            os.environ.pop("PYTHONBREAKPOINT", None)
        else:
            os.environ["PYTHONBREAKPOINT"] = breakpoints
