"""%distributed join: its line, and the files with which queues start machines."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nbtrain.engines.remote.ticket import Ticket
from tests.support.hygiene import gone_within
from tests.support.kernels import Kernel, running_kernel
from tests.support.notebook import Notebook
from tests.support.slurm import running_slurm
from tests.support.started_nodes import no_nodes_within

pytestmark = pytest.mark.kernel


@pytest.fixture
def notebook(shared_kernel: Kernel, tmp_path: Path) -> Iterator[Notebook]:
    found = Notebook(shared_kernel, "")
    found(f"%cd -q {tmp_path}")
    yield found
    found("%cd -q ~")


def test_the_line(notebook: Notebook) -> None:
    said = notebook("%distributed join").stdout
    (line,) = re.findall(r"^  echo (\S+) \| python -m nbtrain node -$", said, re.M)
    assert Ticket.read(line).addresses
    assert "  %%distributed --engine elastic --nodes 2 --devices 4" in said
    longer = notebook("%distributed join --hours 3 --nodes 4").stdout
    (other,) = re.findall(r"^  echo (\S+) \|", longer, re.M)
    assert 7190 < Ticket.read(other).expires - Ticket.read(line).expires < 7210
    assert "--nodes 4" in longer


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--hours never", "--hours takes a number of hours, more than 0"),
        ("--slurm", "--slurm needs a value: --slurm job.sbatch"),
        ("--slurm a --kubernetes b", "join writes one file"),
        ("--image a", "--image is for --kubernetes FILE"),
        ("--fast", "join has no option --fast; it takes --nodes N"),
        ("there", "join takes no arguments, and got 'there'"),
    ],
)
def test_a_wrong_line_is_one_line(notebook: Notebook, line: str, said: str) -> None:
    assert said in notebook.refused(f"%distributed join {line}")


def test_a_file_for_kubectl(notebook: Notebook, tmp_path: Path) -> None:
    line = "%distributed join --kubernetes My_Job.yaml --nodes 3 --devices 4 --accelerator gpu --image team/train:1"
    said = notebook(line).stdout
    assert "written: My_Job.yaml. Start it with: kubectl apply -f My_Job.yaml" in said
    assert "%%distributed --engine elastic --nodes 3 --devices 4 --accelerator gpu" in said
    file = tmp_path / "My_Job.yaml"
    assert file.stat().st_mode & 0o077 == 0
    secret, job = yaml.safe_load_all(file.read_text())
    assert (secret["kind"], secret["metadata"]["name"]) == ("Secret", "my-job-ticket")
    assert Ticket.read(secret["stringData"]["ticket"]).addresses
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"]["name"] == "my-job"
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["image"]) == (3, "team/train:1")
    assert trainer["command"] == ["python", "-m", "nbtrain", "node"]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "4"}
    reference = {"secretKeyRef": {"name": "my-job-ticket", "key": "ticket"}}
    assert trainer["env"] == [{"name": "NBTRAIN_TICKET", "valueFrom": reference}]
    assert "is there already: another name, or --force" in notebook.refused(
        "%distributed join --kubernetes My_Job.yaml"
    )
    assert "Its image has to have nbtrain" in notebook("%distributed join --kubernetes My_Job.yaml --force").stdout
    _, job = yaml.safe_load_all(file.read_text())
    assert (job["spec"]["trainer"]["numNodes"], "image" in job["spec"]["trainer"]) == (1, False)


@pytest.mark.thorough
def test_a_file_for_sbatch(tmp_path: Path) -> None:
    with running_slurm(tmp_path) as slurm, running_kernel(**slurm.environment) as kernel:
        notebook = Notebook(kernel, "")
        said = notebook(
            f"%distributed join --slurm {tmp_path}/job.sbatch --nodes 2 --devices 1 --accelerator cpu"
        ).stdout
        script, ticket = tmp_path / "job.sbatch", tmp_path / "job.sbatch.ticket"
        assert f"Have it queued with: sbatch {script}" in said
        assert ticket.stat().st_mode & 0o077 == 0
        assert ticket.read_text().strip() not in script.read_text()
        assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=1\n" in script.read_text()
        subprocess.run(["sh", "-n", str(script)], check=True)
        slurm.run("sbatch", f"--output={tmp_path}/said", str(script))
        cell = said.splitlines()[-1].strip()
        assert cell == "%%distributed --engine elastic --nodes 2 --devices 1 --accelerator cpu"
        run = notebook(f"{cell} -s none --output all --monitor off\nprint('here', rank)")
        assert {"[rank 0] here 0", "[rank 1] here 1"} <= set(run.text.splitlines())
        refused = notebook.refused(f"%distributed join --slurm {script}")
        assert "is there already" in refused
        kernel.client.shutdown()
        assert no_nodes_within(5)
        assert not gone_within(5, lambda: [str(slurm.jobs())] if slurm.jobs() else [])
