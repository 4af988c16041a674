"""A real SLURM: tasks on both nodes, jobs that are cancelled, and that nothing of them is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hygiene import gone_within
from tests.support.slurm import Slurm, running_slurm

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with running_slurm(tmp_path) as found:
        yield found


def until(said: Path, words: str, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not (said.exists() and said.read_text() == words):
        assert time.monotonic() < deadline, said.read_text() if said.exists() else f"no {said}"
        time.sleep(0.05)


def test_tasks_know_where_they_are(slurm: Slurm) -> None:
    line = "echo $SLURMD_NODENAME $SLURM_NODEID $SLURM_PROCID $SLURM_LOCALID $SLURM_NTASKS $SLURM_JOB_NODELIST"
    assert sorted(slurm.run("srun", "-N2", "--ntasks-per-node=2", "sh", "-c", line).splitlines()) == [
        "node1 0 0 0 4 node[1-2]",
        "node1 0 1 1 4 node[1-2]",
        "node2 1 2 0 4 node[1-2]",
        "node2 1 3 1 4 node[1-2]",
    ]
    assert slurm.run("scontrol", "show", "hostnames", "node[1-2]").split() == ["node1", "node2"]


def test_an_srun_that_fails_says_so(slurm: Slurm) -> None:
    with pytest.raises(AssertionError, match="Exited with exit code 3"):
        slurm.run("srun", "-N2", "sh", "-c", "exit 3")


def test_a_batch_job_runs_and_is_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    said = tmp_path / "said"
    line = f"trap 'echo asked >> {said}; exit' TERM; echo started >> {said}; while :; do sleep 0.1; done"
    job = int(slurm.run("sbatch", "--parsable", "-N1", f"--output={tmp_path}/job", "--wrap", f'srun sh -c "{line}"'))
    until(said, "started\n")
    assert slurm.jobs() == {job: "RUNNING"}
    slurm.run("scancel", str(job))
    until(said, "started\nasked\n")
    assert gone_within(10, lambda: [*map(str, slurm.jobs())]) == []


def test_what_still_runs_ends_with_it(tmp_path: Path) -> None:
    """The hygiene of tests sees to it that nothing is left."""
    with running_slurm(tmp_path) as slurm:
        line = f"trap '' TERM; echo started > {tmp_path}/said; while :; do sleep 1; done"
        slurm.run("sbatch", "-N2", f"--output={tmp_path}/job", "--wrap", f'srun -n1 sh -c "{line}"')
        until(tmp_path / "said", "started\n")


def test_also_when_its_controller_is_gone(tmp_path: Path) -> None:
    with running_slurm(tmp_path) as slurm:
        slurm.run("sbatch", "-N2", f"--output={tmp_path}/job", "--wrap", f"echo started > {tmp_path}/said; sleep 1000")
        until(tmp_path / "said", "started\n")
        slurm.run("scontrol", "shutdown", "slurmctld")
