"""Under `none` a rank is to a script what a process of torchrun is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.kernels import ROOT, Kernel
from tests.support.notebook import Notebook

ASKED = {
    "nothing": ("dist.init_process_group()", True),
    "our backend": ("dist.init_process_group('gloo')", True),
    "from the environment": ("dist.init_process_group(backend='gloo', init_method='env://')", True),
    "its rank": ("dist.init_process_group('gloo', rank=rank, world_size=2)", True),
    "a timeout": ("dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=30))", False),
    "an address": ("dist.init_process_group('gloo', 'tcp://127.0.0.1:' + port, rank=rank, world_size=2)", False),
    "a store": (
        "dist.init_process_group('gloo', store=dist.TCPStore('127.0.0.1', int(port), 2, rank == 0), rank=rank, "
        "world_size=2)",
        False,
    ),
}
FIRST = """
import datetime, os, torch
import torch.distributed as dist
port = os.environ["MASTER_PORT"]
"""
MEET = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2\n"


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel, "")
    yield notebook
    notebook("%distributed stop")


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("asked", ASKED)
def test_a_script_is_given_our_group_or_the_one_it_asks_for(notebook: Notebook, asked: str) -> None:
    line, ours = ASKED[asked]
    cell = (
        f"%%distributed -s none -d 2{FIRST}before = dist.group.WORLD\n{line}\n"
        f"assert (dist.group.WORLD is before) == {ours}; before = None\n{MEET}"
    )
    assert "differs" not in notebook(cell).text
    assert notebook("%%distributed -s ddp -d 2\nprint(reduce(1.0, 'sum'))").stdout.splitlines()[-1] == "2.0"


LATE = "import time\nif rank == {}: time.sleep(0.3)\n"


@pytest.mark.sample(first=2)
@pytest.mark.parametrize(
    ("first", "second", "late"),
    [("a timeout", "an address", 0), ("nothing", "our backend", 1), ("an address", "our backend", 0),
     ("an address", "an address", 1)],
)  # fmt: skip
def test_a_script_ends_its_group_and_forms_another(notebook: Notebook, first: str, second: str, late: int) -> None:
    """One rank comes for the second group while the other still has the first, whose store listens at the same port."""
    notebook(
        f"%%distributed -s none -d 2{FIRST}{ASKED[first][0]}\n{MEET}{LATE.format(late)}"
        f"dist.destroy_process_group()\nassert not dist.is_initialized()\n{ASKED[second][0]}\n{MEET}"
    )
    assert notebook("%%distributed -s ddp -d 2\nprint(reduce(1.0, 'sum'))").stdout.splitlines()[-1] == "2.0"


@pytest.mark.parametrize("late", [0, 1])
def test_who_holds_a_group_that_has_ended_forms_another(notebook: Notebook, late: int) -> None:
    """Its store goes on at the port, with the addresses of the first group."""
    notebook(
        f"%%distributed -s none -d 2{FIRST}{ASKED['a timeout'][0]}\n{MEET}held = dist.group.WORLD\n"
        f"dist.destroy_process_group()\n{LATE.format(late)}{ASKED['a timeout'][0]}\n{MEET}held = None"
    )


def test_a_second_group_without_an_end_of_the_first_is_refused_as_torch_does(notebook: Notebook) -> None:
    error = notebook.fails(
        f"%%distributed -s none -d 2{FIRST}dist.init_process_group('gloo')\ndist.init_process_group('gloo')"
    )
    assert "twice" in error.evalue


def test_one_rank_forms_its_group_and_may_run_again(notebook: Notebook) -> None:
    for _ in range(2):
        notebook(f"%%distributed -s none -d 1{FIRST}dist.init_process_group('gloo'); assert dist.get_world_size() == 1")


def test_a_script_under_a_strategy_that_distributes_is_told_what_to_write(notebook: Notebook) -> None:
    script = "import torch.distributed as dist\ndist.init_process_group('gloo')"
    error = notebook.fails(f"%%distributed -s ddp -d 2\n{script}")
    assert (error.ename, "%%distributed -s none" in error.evalue) == ("NotSupported", True)


def test_meshes_are_made(notebook: Notebook) -> None:
    notebook(
        "%%distributed -s none -d 2\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "assert init_device_mesh('cpu', (2,)).size() == 2"
    )


def test_the_environment_is_that_of_torchrun(notebook: Notebook) -> None:
    """The names that torch's own agent sets; and nobody listens at the port."""
    notebook("""%%distributed -s none -d 2
import inspect, os, re, socket
from torch.distributed.elastic.agent.server import local_elastic_agent
asked = set(re.findall(r'^ +"([A-Z_]+)": ', inspect.getsource(local_elastic_agent), re.M)) | {"LOCAL_RANK"}
assert {"RANK", "MASTER_PORT"} <= asked <= set(os.environ), asked - set(os.environ)
assert os.environ["RANK"] == os.environ["ROLE_RANK"] == os.environ["LOCAL_RANK"] == str(rank)
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
with socket.socket() as s:
    assert s.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
assert len(set(gather(os.environ["MASTER_PORT"]))) == 1
""")


def test_nothing_tells_a_library_that_a_rank_is_interactive(notebook: Notebook) -> None:
    notebook("""%%distributed -s none -d 2
import argparse, builtins, sys
assert not hasattr(sys, "ps1") and not hasattr(builtins, "__IPYTHON__")
assert argparse.ArgumentParser().parse_args() == argparse.Namespace()
""")


def test_what_ranks_draw_under_none_is_their_own_affair(notebook: Notebook) -> None:
    notebook("import torch")
    shown = notebook("%%distributed -s none -d 2\ntorch.manual_seed(rank); _ = torch.utils.data.DataLoader([1, 2])")
    assert "order of batches" not in shown.text


def test_who_meets_at_a_port_is_freed_when_a_rank_has_failed(notebook: Notebook) -> None:
    error = notebook.fails(
        f"%%distributed -s none -d 2{FIRST}if rank == 1: raise OSError('gone')\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=900))"
    )
    assert error.evalue == "gone"
    notebook(f"%%distributed -s none -d 2{FIRST}dist.init_process_group('gloo')\n{MEET}")


SCRIPTS = sorted((ROOT / "tests/programs/torchrun").glob("*.py"))
PLAYED = "import os, runpy, sys; runpy.run_path(sys.argv.pop(), run_name='__main__'); os._exit(0)"
"""A script from its first line to its last. How Python ends is left out: there a thread of gloo that lets go of a DDP
now and then aborts the process, with all its work done (torch's issue 179291)."""


@pytest.mark.sample("ddp_example")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_in_a_cell_does_what_it_does_under_torchrun(notebook: Notebook, script: Path, tmp_path: Path) -> None:
    """To the last bit: its own process group, its own sampler, its own wrapper of the model."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    torchrun += [sys.executable, "-c", PLAYED, str(script)]
    real, ours = tmp_path / "real.pt", tmp_path / "ours.pt"
    environment = {**os.environ, "OUT": str(real), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    played = subprocess.run(torchrun, env=environment, capture_output=True, timeout=120, text=True)
    assert played.returncode == 0, played.stderr
    notebook(f"import os; os.environ['OUT'] = {str(ours)!r}")
    notebook(f"%%distributed -s none -d 2\n{script.read_text()}")
    assert torch.equal(torch.load(real), torch.load(ours))
