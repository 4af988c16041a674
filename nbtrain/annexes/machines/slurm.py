"""Ranks on nodes that SLURM gives: `--engine slurm`. Inside an allocation a step of it (`srun --overlap`) has a node on
each of its machines. Outside, and with `--sbatch`, a job is queued that does the same.

The ticket goes there in the environment, which SLURM shows to nobody but the user.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nbtrain.annexes.machines.start_there import Child, complaint, end, python_there, shown, why_ended, worth_saying
from nbtrain.base.errors import PoolError, UsageError
from nbtrain.base.specs import MachinesWanted
from nbtrain.engines.remote.doors import Door
from nbtrain.engines.remote.lobby import MONTH
from nbtrain.engines.remote.pool import RemotePool

GRACE = 1.5
"""Seconds in which a step ends by itself."""
ANSWER = 30.0
"""Seconds in which SLURM answers a question."""
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STOPPED", "SIGNALING")
"""States in which a job may still have machines for us, or is about to be over."""
OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
"""Where SLURM is, and who asks."""
OF_A_JOB = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK")
"""What a job was given for a task; srun would take each for a wish, and leave the rest of the machine unused."""


def node_script(python: str) -> str:
    """What each machine runs. A node that was killed comes back, unless it dies as soon as it starts."""
    return "; ".join((
        python_there(python),
        "tries=0",
        "while :",
        "do began=$(date +%s)",
        '"$p" -m nbtrain node </dev/null',
        "status=$?",
        "tries=$((tries + 1))",
        'if [ "$status" -eq 0 ] || [ "$status" -eq 2 ] || [ "$tries" -ge 20 ] || '
        '[ $(($(date +%s) - began)) -lt 3 ]; then exit "$status"; fi',
        "done",
    ))  # fmt: skip


def step(nodes: int, python: str, more: Sequence[str] = ()) -> list[str]:
    """The command that has a node on so many machines of an allocation, with all that it has of each. One that cannot
    start ends them all. `more`: options of srun."""
    return [
        "srun", *more, "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none",
        "--kill-on-bad-exit=1", "--wait=0", "sh", "-c", node_script(python),
    ]  # fmt: skip


def asked_for(devices: object, accelerator: str) -> list[str]:
    """What `--devices` and `--accelerator` mean for the queue; nothing, where they count what is found there."""
    if not isinstance(devices, int) or devices < 1:
        return []
    return [f"--gpus-per-node={devices}" if accelerator in ("gpu", "cuda") else f"--cpus-per-task={devices}"]


def batch_script(nodes: int, python: str, before: str = "") -> str:
    """`before`: lines below the first."""
    return f"#!/bin/sh\n{before}unset {' '.join(OF_A_JOB)}\nexec {shlex.join(step(nodes, python))}\n"


@dataclass(frozen=True, slots=True)
class State:
    """Of a job."""

    name: str
    """`PENDING`, `RUNNING`, …"""
    reason: str = ""

    @property
    def alive(self) -> bool:
        return self.name in ALIVE

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason not in ("", "None") else self.name


class _Step:
    """A step of the job that the notebook is in, on each of its machines."""

    lasts = MONTH
    hosts: tuple[str, ...] = ()

    def __init__(self, job: str, wanted: MachinesWanted) -> None:
        _need("srun")
        there = _machines_of(job)
        self.nodes = wanted.nodes or there
        if self.nodes > there:
            raise UsageError(
                f"--nodes {self.nodes}: job {job}, which this notebook is in, has {there}. Write --nodes {there}, "
                'or what another job asks for: --sbatch "--time 2:00:00"'
            )
        self._job, self._python = job, wanted.python
        self._child: Child | None = None
        self._ticket = ""
        self._old = False
        """it was there before, so that another takes its place when it ends"""

    def open(self, ticket: str, there: Collection[str]) -> None:
        self._ticket = ticket
        self._old = self._child is not None and self._child.status is None
        if not self._old:
            self._child = Child(step(self.nodes, self._python, [f"--jobid={self._job}"]), _environ(ticket))

    def trouble(self, there: Collection[str]) -> str | None:
        if self._child is None or (status := self._child.status) is None:
            return None
        if self._old:
            self.open(self._ticket, there)
            return None
        return why_ended(f"job {self._job}", status, list(self._child.lines))

    def waiting(self, there: Collection[str]) -> str:
        said = self._child.complaint if self._child is not None else ""
        return f"the nodes of job {self._job}" + (f" ({said})" if said else "")

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            end([child], GRACE)


class _Job:
    """One that is queued for the notebook."""

    lasts = MONTH
    hosts: tuple[str, ...] = ()

    def __init__(self, wanted: MachinesWanted) -> None:
        _need("sbatch")
        self.nodes = wanted.nodes or 1
        self._wanted = wanted
        self._number = ""
        self._state = State("")
        self._submitted = self._look = 0.0
        self._output = Path()
        self._ticket = ""
        self._old = False
        """it was there before, so that another takes its place when it ends"""

    def open(self, ticket: str, there: Collection[str]) -> None:
        self._ticket = ticket
        self._old = bool(self._number) and self._now().alive
        if not self._old:
            self._submit()

    def _submit(self) -> None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbtrain"
        folder.mkdir(parents=True, exist_ok=True)
        wanted = self._wanted
        argv = [
            "sbatch", "--parsable", "--job-name=nbtrain", f"--nodes={self.nodes}", "--ntasks-per-node=1",
            "--export=ALL", f"--output={folder / 'slurm-%j.log'}", *asked_for(wanted.devices, wanted.accelerator),
            *shlex.split(wanted.sbatch),
        ]  # fmt: skip
        done = _asked(argv, batch_script(self.nodes, wanted.python), _environ(self._ticket))
        number = re.match(r"\d+", done.stdout.strip())
        if done.returncode or number is None:
            raise PoolError(f"sbatch refuses this job{shown(worth_saying(done.stderr + done.stdout))}")
        if self._number:
            self._output.unlink(missing_ok=True)
        self._number = number[0]
        self._output = folder / f"slurm-{self._number}.log"
        self._state, self._submitted = State("PENDING"), time.monotonic()
        self._look = self._submitted + 0.5

    def _now(self) -> State:
        """As SLURM has it. It is asked seldom, as many ask it; while it is too busy to answer, nothing is new."""
        waited = time.monotonic() - self._submitted
        self._look = time.monotonic() + min(10.0, 1.0 + waited / 10)
        try:
            return self._asked_now()
        except PoolError:
            return self._state

    def _asked_now(self) -> State:
        done = _asked(["squeue", "--noheader", "--jobs", self._number, "--format=%T|%r"])
        name, _, reason = done.stdout.strip().partition("|")
        gone = (not done.returncode and not name) or "Invalid job id" in done.stderr
        if name:
            self._state = State(name, reason)
        elif gone:  # its end is known for some minutes
            done = _asked(["scontrol", "--oneliner", "show", "job", self._number])
            fields = dict(re.findall(r"(JobState|Reason|ExitCode)=(\S+)", done.stdout))
            self._state = State(fields.get("JobState", "over"), fields.get("Reason", ""))
        return self._state

    def trouble(self, there: Collection[str]) -> str | None:
        state = self._now() if time.monotonic() > self._look else self._state
        if state.alive:
            return None
        if self._old:
            self.open(self._ticket, there)
            return None
        lines = _lines(self._output)
        if state.name == "FAILED" and lines:
            return why_ended(f"job {self._number} has FAILED", None, lines)
        return f"job {self._number} is over ({state}){shown(lines)}"

    def waiting(self, there: Collection[str]) -> str:
        if self._state.name != "RUNNING":
            return f"a place in the queue (job {self._number} is {self._state}; %distributed stop cancels it)"
        said = complaint(_lines(self._output))
        return f"the nodes of job {self._number}, which runs" + (f" ({said})" if said else "")

    def close(self) -> None:
        number, self._number = self._number, ""
        if number:
            with suppress(PoolError):
                _asked(["scancel", number])
            self._output.unlink(missing_ok=True)


def slurm_door(wanted: MachinesWanted) -> Door:
    """A step of the job that the notebook is in, or a job of its own."""
    if wanted.hosts:
        raise UsageError(
            f'--hosts is for --engine ssh; with --engine slurm write --sbatch "--nodelist {",".join(wanted.hosts)}"'
        )
    if wanted.most is not None:
        raise UsageError(
            f"--nodes {wanted.nodes}:{wanted.most}: SLURM gives a job a fixed number of nodes: write --nodes "
            f"{wanted.most}"
        )
    allocation = "" if wanted.sbatch else os.environ.get("SLURM_JOB_ID", "")
    return _Step(allocation, wanted) if allocation else _Job(wanted)


def _machines_of(job: str) -> int:
    """Of a whole job. In a step of it, SLURM_NNODES is the step's."""
    said = _asked(["squeue", "--noheader", "--jobs", job, "--format=%D"]).stdout.strip()
    return int(
        said if said.isdecimal() else os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1
    )


def _need(command: str) -> None:
    if shutil.which(command) is None:
        raise UsageError(
            f"--engine slurm: there is no {command} on this machine; Jupyter has to run where jobs are submitted"
        )


def _environ(ticket: str) -> dict[str, str]:
    """The notebook's, without what SLURM says in it of the step that the notebook is in."""
    kept = {
        name: value for name, value in os.environ.items()
        if name in OF_THE_CLUSTER or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))
    }  # fmt: skip
    return {**kept, "NBTRAIN_TICKET": ticket}


def _asked(
    argv: Sequence[str], said: str = "", environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, input=said, env=environ, capture_output=True, text=True, timeout=ANSWER, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PoolError(f"{argv[0]} does not answer: {error}") from error


def _lines(path: Path) -> list[str]:
    """Of a job's output, that of all its machines."""
    with suppress(OSError):
        return worth_saying(path.read_text(errors="replace"))
    return []


class SlurmPool(RemotePool):
    """A node on each machine of an allocation."""

    door = staticmethod(slurm_door)
