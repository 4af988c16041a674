"""A real SLURM on this machine, with two nodes that are both this machine.

with running_slurm(folder) as slurm:
    slurm.run("srun", "-N2", "hostname")                  # what it prints
    subprocess.Popen(["sbatch", ...], env=os.environ | slurm.environment)
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.daemons import daemons, free_ports, program

NODES = ("node1", "node2")
"""In SLURM's lists they are node[1-2]. Their names resolve nowhere: both have the address 127.0.0.1."""

CPUS = 8
"""Of each node, whatever the machine has."""

_CONTROLLER = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={short}/munge
CredType=cred/munge
StateSaveLocation={short}/state
SlurmdSpoolDir={short}/%n
SlurmctldPidFile={short}/slurmctld.pid
SlurmdPidFile={short}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=5
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN\n"


@dataclass(frozen=True, slots=True)
class Slurm:
    """A controller and a slurmd for each node."""

    environment: dict[str, str]
    """On top of a process's own: its srun, sbatch, squeue and scancel are for these nodes."""

    def run(self, *argv: str, timeout: float = 30) -> str:
        """What a command of SLURM's prints; an error is raised if it fails."""
        done = subprocess.run(
            [program(argv[0], "slurm-client"), *argv[1:]], env=os.environ | self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def jobs(self) -> dict[int, str]:
        """Number → state, of those that are not over: PENDING, RUNNING, COMPLETING."""
        lines = self.run("squeue", "--noheader", "--format=%A %T").splitlines()
        return {int(number): state for number, state in map(str.split, lines)}

    def ready(self) -> bool:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            told = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", timeout=5)
            return told.split() == [word for name in NODES for word in (name, "idle")]
        return False


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Both nodes are idle when this yields; ends with its jobs. Configuration and logs are in `folder`."""
    munged, slurmctld, slurmd = (
        program("munged", "munge"),
        program("slurmctld", "slurmctld"),
        program("slurmd", "slurmd"),
    )
    program("srun", "slurm-client")
    with _short_folder() as short, daemons(folder, lambda: _steps(short)) as started:
        host, (port, *ports) = socket.gethostname().partition(".")[0], free_ports(1 + len(NODES))
        config = folder / "slurm.conf"
        nodes = (_NODE.format(name=n, host=host, port=p, cpus=CPUS) for n, p in zip(NODES, ports, strict=True))
        settings = _CONTROLLER.format(host=host, port=port, user=getpass.getuser(), short=short)
        config.write_text("".join([*nodes, settings]))
        if _version(slurmctld) >= (23, 11):
            (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        elif _version(slurmctld) >= (23, 2):
            (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")
        key = short / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (short / "state").mkdir()
        files = {"socket": "munge", "key-file": key.name, "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={short / name}" for option, name in files.items()]
        # Forced, because it wants a folder that everybody may enter.
        started.start("munged", munged, "--foreground", "--force", f"--log-file={folder / 'munge.log'}", *options)
        started.wait_until((short / "munge").exists)
        started.start("slurmctld", slurmctld, "-D", "-i", "-f", str(config))
        for name in NODES:
            started.start(name, slurmd, "-D", "-N", name, "-f", str(config))
        slurm = Slurm({"SLURM_CONF": str(config), **started.environment})
        started.wait_until(slurm.ready)
        yield slurm


@contextmanager
def _short_folder() -> Iterator[Path]:
    """The path of a Unix socket has about 100 characters, and steps of jobs have theirs below it."""
    short = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        yield short
    finally:
        shutil.rmtree(short, ignore_errors=True)


def _version(slurmctld: str) -> tuple[int, int]:
    told = subprocess.run([slurmctld, "-V"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])


def _steps(short: Path) -> list[psutil.Process]:
    """What watches over a step is nobody's child, and has overwritten its environment; it listens below `short`."""
    found = []
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            if process.info["name"] == "slurmstepd" and any(
                connection.laddr and str(connection.laddr).startswith(str(short))
                for connection in process.net_connections("unix")
            ):
                found.append(process)
    return found
