"""--engine slurm, with a real SLURM of two nodes: jobs of the notebook's own, and steps of the job that it is in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hygiene import gone_within
from tests.support.kernels import running_kernel
from tests.support.notebook import LOOP, START, TRAIN, Notebook
from tests.support.slurm import Slurm, running_slurm
from tests.support.started_nodes import WEIGHTS, no_nodes_within

pytestmark = [pytest.mark.kernel, pytest.mark.thorough]
LINE = "%%distributed --engine slurm --nodes 2 --devices 1 --monitor off"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def notebook(slurm: Slurm) -> Iterator[Notebook]:
    """Outside an allocation; nothing is in the queue when its kernel has ended."""
    with running_kernel(**slurm.environment) as kernel:
        yield Notebook(kernel, START)
    empty(slurm)


def empty(slurm: Slurm) -> None:
    assert no_nodes_within(5)
    assert not gone_within(5, lambda: [str(slurm.jobs())] if slurm.jobs() else [])


@contextmanager
def allocation(slurm: Slurm) -> Iterator[str]:
    """A job that has both nodes."""
    job = slurm.run("sbatch", "--parsable", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 100").strip()
    try:
        assert not gone_within(20, lambda: [] if slurm.jobs().get(int(job)) == "RUNNING" else ["no allocation"])
        yield job
    finally:
        slurm.run("scancel", job)


def test_a_job_of_its_own_trains_as_this_machine(slurm: Slurm, notebook: Notebook) -> None:
    notebook(TRAIN)
    notebook("torch.manual_seed(1);")
    notebook(f"{LINE} -s ddp{LOOP}")
    there = notebook(WEIGHTS).value
    ranks = notebook("%distributed status").stdout.splitlines()[1:3]
    assert [line.rpartition("on ")[2] for line in ranks] == ["node1", "node2"]
    (job,) = slurm.jobs()
    assert "nbtrain-1-" not in slurm.run("scontrol", "show", "job", str(job)), "the ticket"
    notebook("%distributed stop")
    empty(slurm)
    notebook("torch.manual_seed(0); X, Y = torch.randn(96, 4), Y")
    notebook(TRAIN)
    notebook("torch.manual_seed(1);")
    notebook(f"%%distributed --engine local --devices 2 --monitor off -s ddp{LOOP}")
    assert notebook(WEIGHTS).value == there


def test_a_cancelled_job_is_queued_again(slurm: Slurm, notebook: Notebook) -> None:
    notebook(f"{LINE} -s none\npass")
    (job,) = slurm.jobs()
    slurm.run("scancel", str(job))
    assert no_nodes_within(10)
    notebook("import time; time.sleep(3)")
    run = notebook(f"{LINE} -s none --output all\nprint('here', rank)")
    assert {"[rank 0] here 0", "[rank 1] here 1"} <= set(run.text.splitlines())
    assert job not in slurm.jobs()


def test_what_the_queue_says_is_shown(slurm: Slurm, notebook: Notebook) -> None:
    with allocation(slurm):
        run = notebook.kernel.start(f"{LINE} -s none\npass")
        notebook.kernel.wait_for(lambda: "PENDING: Resources" in run.text)
        assert re.search(r"waiting for a place in the queue \(job \d+ is PENDING: Resources; %distr", run.text)
        notebook.kernel.interrupt()
        notebook.kernel.wait(run)
        run = notebook.kernel.start(f"{LINE} -s none\npass")
        notebook.kernel.wait_for(lambda: "PENDING: Resources" in run.text)
        (job,) = (number for number, state in slurm.jobs().items() if state == "PENDING")
        assert len(slurm.jobs()) == 2
    notebook.kernel.wait(run)
    assert run.error is None, run.text
    assert slurm.jobs() == {job: "RUNNING"}


def test_a_job_that_ends_before_it_runs(slurm: Slurm, notebook: Notebook, tmp_path: Path) -> None:
    said = notebook.kernel.run(f"{LINE} -s none --sbatch '--partition nowhere'\npass").text
    assert "sbatch refuses this job. It said:\n  sbatch: error: invalid partition specified: nowhere" in said
    run = notebook.kernel.run(f"{LINE} -s none --python {tmp_path}/python\npass")
    assert re.search(r"job \d+ has FAILED: no Python there: name one with --python", run.text)
    with allocation(slurm) as other:
        run = notebook.kernel.start(f"{LINE} -s none\npass")
        notebook.kernel.wait_for(lambda: "PENDING: Resources" in run.text)
        slurm.run("scancel", *(str(job) for job in slurm.jobs() if job != int(other)))
        notebook.kernel.wait(run)
    assert re.search(r"job \d+ is over \(CANCELLED", run.text)


def test_a_step_of_the_job_that_the_notebook_is_in(slurm: Slurm) -> None:
    with allocation(slurm) as job:
        with running_kernel("srun", f"--jobid={job}", "--overlap", "-N1", "-n1", **slurm.environment) as kernel:
            notebook = Notebook(kernel, "")
            line = LINE.replace("--nodes 2 ", "")
            run = notebook(f"{line} -s none --output all\nimport os\nprint(rank, os.environ['SLURMD_NODENAME'])")
            assert {"[rank 0] 0 node1", "[rank 1] 1 node2"} <= set(run.text.splitlines())
            assert list(slurm.jobs()) == [int(job)]
            said = notebook.refused(f"{line} -s none --nodes 3\npass")
            assert f"job {job}, which this notebook is in, has 2. Write --nodes 2, or" in said
            notebook("%distributed stop")
            assert no_nodes_within(5)
            assert list(slurm.jobs()) == [int(job)]
        assert no_nodes_within(5)
