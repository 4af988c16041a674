"""--engine ssh, with a real sshd: nodes that ssh starts, and what is said where one does not come."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.kernels import ROOT, Kernel, running_kernel
from tests.support.notebook import LOOP, START, TRAIN, Notebook
from tests.support.sshd import running_sshd
from tests.support.started_nodes import WEIGHTS, no_nodes_within, nodes

pytestmark = pytest.mark.kernel
LINE = "%%distributed --engine ssh --hosts node-a,node-b --devices 1 --monitor off"


@pytest.fixture(scope="module")
def ssh_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel whose ssh leads to node-a and node-b, which find this nbtrain."""
    with (
        running_sshd(tmp_path_factory.mktemp("ssh"), PYTHONPATH=str(ROOT)) as sshd,
        running_kernel(**sshd.environment) as kernel,
    ):
        yield kernel


@pytest.fixture
def notebook(ssh_kernel: Kernel) -> Iterator[Notebook]:
    """Its machines are sent away after each test."""
    ssh_kernel.run("%reset -f")
    found = Notebook(ssh_kernel, START)
    yield found
    found("%distributed stop")
    assert no_nodes_within(5)


@pytest.mark.thorough
def test_a_cell_trains_as_on_this_machine(notebook: Notebook) -> None:
    notebook(TRAIN)
    notebook("torch.manual_seed(1);")
    notebook(f"{LINE} -s ddp{LOOP}")
    there = notebook(WEIGHTS).value
    ranks = notebook("%distributed status").stdout.splitlines()[1:3]
    assert [line.rpartition("on ")[2] for line in ranks] == ["node-a", "node-b"]
    notebook("torch.manual_seed(0); X, Y = torch.randn(96, 4), Y")
    notebook(TRAIN)
    notebook("torch.manual_seed(1);")
    notebook(f"%%distributed --engine local --devices 2 --monitor off -s ddp{LOOP}")
    assert notebook(WEIGHTS).value == there


@pytest.mark.thorough
def test_the_ticket_is_in_no_list_of_processes(notebook: Notebook) -> None:
    run = notebook(f"{LINE} -s none\nimport os\nprint(os.environ.get('NBTRAIN_TICKET'))")
    assert "None" in run.stdout.splitlines()
    own = psutil.Process(notebook.kernel.pid).children(recursive=True)
    assert len(nodes()) == 2
    assert not [one for one in [*own, *nodes()] if "nbtrain-1-" in " ".join(one.cmdline())]


@pytest.mark.thorough
def test_a_killed_node_comes_back_and_the_other_stays(notebook: Notebook) -> None:
    notebook(f"{LINE} -s none\npass")
    first, second = nodes()
    second.kill()
    notebook("import time; time.sleep(3)")
    run = notebook(f"{LINE} -s none --output all\nprint('here', rank)")
    assert "lost with the machine node-b" in run.text
    assert {"[rank 0] here 0", "[rank 1] here 1"} <= set(run.text.splitlines())
    assert nodes()[0] == first
    assert nodes()[1] != second


@pytest.mark.thorough
def test_a_run_goes_on_without_its_ssh(notebook: Notebook) -> None:
    notebook(f"{LINE} -s none\npass")
    before = nodes()
    ssh = [one for one in psutil.Process(notebook.kernel.pid).children() if one.name() == "ssh"]
    assert len(ssh) == 2
    for one in ssh:
        one.kill()
    run = notebook(f"{LINE} -s none\nimport time\nfor _ in range(10):\n    time.sleep(0.1); barrier()\nprint('over')")
    assert "over" in run.stdout.splitlines()
    assert nodes() == before


@pytest.mark.thorough
def test_a_cell_that_is_refused_ends_nothing(notebook: Notebook) -> None:
    """Other machines would take the place of those that a run has, or that have what the notebook has not."""
    notebook(f"import time, nbtrain; {TRAIN}")
    notebook(f"{LINE} --background\nfor step in range(400):\n    time.sleep(0.05)\n    print(step)")
    before = nodes()
    other = LINE.replace("--devices 1", "--devices 2")
    assert "the ranks are in use: <run of In [" in notebook.refused(f"{other}\npass")
    assert "the ranks are in use" in notebook.refused("%%distributed --engine ssh --hosts node-a --devices 1\npass")
    assert nodes() == before
    notebook("nbtrain.background().stop()")
    notebook(f"{LINE} --keep big\nbig = torch.ones(8)")
    assert "lives only on the current ranks" in notebook.refused(f"{other}\npass")
    assert nodes() == before


@pytest.mark.thorough
def test_what_is_wrong_there_is_said(notebook: Notebook, tmp_path: Path) -> None:
    said = notebook.kernel.run(f"{LINE.replace('node-b', 'nowhere')} -s none\npass").text
    assert "nowhere: ssh does not lead there. `ssh -o BatchMode=yes nowhere` has to work. It said:" in said
    said = notebook.kernel.run(f"{LINE} -s none --python {tmp_path}/python\npass").text
    assert "no Python there: name one with --python" in said
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    said = notebook.kernel.run(f"{LINE} -s none --python {bare}\npass").text
    assert "no nbtrain there: pip install nbtrain==" in said
    assert "No module named nbtrain" in said
    assert "as ssh knows them" in notebook.refused("%%distributed --engine ssh\npass")
    assert "--engine ssh: write that, too" in notebook.refused("%%distributed --hosts node-a\npass")
    assert "more than --hosts names: 2" in notebook.refused(f"{LINE} --nodes 3\npass")


@pytest.mark.thorough
def test_nothing_is_left_when_the_notebook_ends(tmp_path: Path) -> None:
    with running_sshd(tmp_path, PYTHONPATH=str(ROOT)) as sshd:
        with running_kernel(**sshd.environment) as kernel:
            Notebook(kernel, "")(f"{LINE} -s none\npass")
            assert len(nodes()) == 2
        assert no_nodes_within(5)
