"""`--engine ray`: cells on the machines of a real Ray cluster, as docs/clusters.md has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.hygiene import alive, gone_within, marked
from tests.support.kernels import MARK, Kernel, running_kernel
from tests.support.notebook import LOOP, TRAIN, Notebook
from tests.support.ray_cluster import PLACE, RayCluster, ray_cluster, ray_settings

pytestmark = [pytest.mark.kernel, pytest.mark.ranks, pytest.mark.slow, pytest.mark.thorough]

START = """
import os, signal
handler, breakpoints = signal.getsignal(signal.SIGTERM), os.environ.get("PYTHONBREAKPOINT")
"""
WHERE = f"""
import os
found = gather(int(os.environ["{PLACE}"]))
if rank == 0: print(*found)
"""
FIRST = 120.0
"""Seconds for a cell that waits for Ray, too."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(3, cpus=2) as found:
        yield found


@pytest.fixture(scope="module")
def kernel(cluster: RayCluster) -> Iterator[Kernel]:
    with running_kernel(**cluster.environment) as found:
        found.run(START)
        yield found


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(kernel)
    yield made
    made("%distributed stop")


def ray(nodes: int, devices: int, cell: str = "", strategy: str = "ddp") -> str:
    return f"%%distributed --engine ray --nodes {nodes} --devices {devices} -s {strategy} --monitor off\n{cell}"


def places(notebook: Notebook, nodes: int, devices: int) -> list[int]:
    """The machine of each rank."""
    shown = notebook(ray(nodes, devices, WHERE), FIRST).stdout
    return [int(word) for word in shown.splitlines()[-1].split()]


def actors(cluster: RayCluster) -> list[psutil.Process]:
    """Processes of actors that have a node, in the cluster of this test."""
    return [process for process in cluster.processes() if process.cmdline()[:1] == ["ray::NodeActor.run"]]


def alone(notebook: Notebook, cell: str) -> str:
    """What a cell shows for which a Ray of its own is started. Ray gives its start 30 s, and a busy machine may take
    longer."""
    shown = notebook.kernel.run(ray(1, 1, cell), FIRST).text
    return notebook(ray(1, 1, cell), FIRST).text if "timed out during startup" in shown else shown


def _files(settings: dict[str, str]) -> dict[str, str]:
    """What a killed kernel leaves is with Ray's own files."""
    return dict.fromkeys(("TMPDIR", "XDG_RUNTIME_DIR"), settings["RAY_TMPDIR"])


@pytest.mark.limit(240)
@pytest.mark.parametrize(("nodes", "devices", "strategy"), [(2, 1, "ddp"), (2, 2, "ddp"), (3, 1, "fsdp")])
def test_a_loop_trains_as_on_the_ranks_of_one_machine(
    notebook: Notebook, nodes: int, devices: int, strategy: str
) -> None:
    alone = f"%%distributed --engine local --devices {nodes * devices} -s {strategy} --monitor off\n"
    notebook(f"torch.manual_seed(1); {TRAIN}\nstart = {{k: v.clone() for k, v in model.state_dict().items()}}")
    notebook("torch.manual_seed(2)")
    notebook(alone + LOOP, FIRST)
    notebook("there = {k: v.clone() for k, v in model.state_dict().items()}")
    notebook(f"torch.manual_seed(1); {TRAIN}\nmodel.load_state_dict(start); torch.manual_seed(2)")
    notebook(ray(nodes, devices, LOOP, strategy), FIRST)
    moved = "any(not torch.equal(start[k], v) for k, v in model.state_dict().items())"
    same = "all(torch.allclose(there[k], v, atol=1e-6) for k, v in model.state_dict().items())"
    assert notebook(f"{moved} and {same}").value == "True"


def test_the_handler_of_sigterm_and_breakpoint_stay_the_kernels(notebook: Notebook) -> None:
    notebook(ray(1, 1, "pass"), FIRST)
    kept = "signal.getsignal(signal.SIGTERM) == handler and os.environ.get('PYTHONBREAKPOINT') == breakpoints"
    assert notebook(kept).value == "True"
    assert notebook("import sys; 'thirdparty_files' in sys.path[0]").value == "False"


@pytest.mark.limit(240)
def test_more_than_there_is_is_an_error_at_once_and_costs_no_ranks(notebook: Notebook) -> None:
    before = places(notebook, 2, 1)
    notebook(ray(2, 1, "kept = 17"))
    said = notebook.refused(ray(4, 1, "pass"))
    assert "4 machines with 1 CPU each are asked for, and the Ray cluster has 3: " in said
    assert said.count("(2 CPUs)") == 3
    assert "Write --nodes 3" in said
    assert "1 machine with 5 CPUs is asked for" in notebook.refused(ray(1, 5, "pass"))
    assert "on several machines write a number" in notebook.refused("%%distributed --engine ray -d free:2\npass")
    assert places(notebook, 2, 1) == before


@pytest.mark.limit(240)
def test_a_killed_actor_takes_its_node_along_and_the_next_cell_has_another(
    notebook: Notebook, cluster: RayCluster
) -> None:
    assert len(set(places(notebook, 2, 1))) == 2
    victim, *_ = found = actors(cluster)
    assert len(found) == 2
    theirs = victim.children(recursive=True)
    assert theirs
    victim.kill()
    assert not gone_within(30, lambda: [str(one) for one in theirs if alive(one)])
    assert len(set(places(notebook, 2, 1))) == 2
    assert len(actors(cluster)) == 2


@pytest.mark.limit(240)
def test_a_cell_waits_for_what_others_use_and_stop_ends_that(notebook: Notebook) -> None:
    notebook("%distributed stop")
    notebook(
        "import ray, time\n@ray.remote(num_cpus=2, scheduling_strategy='SPREAD')\ndef busy():\n"
        "    while True: time.sleep(0.1)\n"
    )
    # one machine for this notebook's ranks, and two for others
    notebook(ray(1, 2, "pass"), FIRST)
    notebook(
        "others = [busy.remote() for _ in range(2)]\nwhile ray.available_resources().get('CPU', 0): time.sleep(0.1)"
    )
    kernel = notebook.kernel
    stopped = kernel.start(ray(2, 2, "pass"))
    said = "waiting for 2 machines with 2 CPUs each of the Ray cluster, which others use; free are "
    kernel.wait_for(lambda: said in stopped.text)
    kernel.interrupt()
    kernel.wait(stopped)
    assert stopped.error is not None
    assert stopped.error.ename == "KeyboardInterrupt"
    notebook("for other in others: ray.cancel(other, force=True)")
    assert len(set(places(notebook, 2, 2))) == 2


@pytest.mark.limit(300)
def test_a_machine_that_is_lost_is_replaced_by_another_of_the_cluster() -> None:
    with ray_cluster(1) as cluster:
        cluster.tell(machines=2)
        with running_kernel(**cluster.environment) as kernel:
            notebook = Notebook(kernel)
            found = places(notebook, 2, 1)
            lost = max(found)
            cluster.tell(remove=lost)
            again = [*map(int, _retried(notebook).split())]
            assert len(set(again)) == 2
            assert lost not in again
            other = max(again)
            cluster.tell(remove=other)
            said = notebook.fails(ray(2, 1, WHERE), FIRST).evalue
            if "lost" in said:
                said = notebook.fails(ray(2, 1, WHERE), FIRST).evalue
            assert "the Ray cluster has 1: " in said


def _retried(notebook: Notebook) -> str:
    """A cell that is sent at the very moment may still find the machine."""
    result = notebook.kernel.run(ray(2, 1, WHERE), FIRST)
    if result.error is not None:
        assert "lost" in result.error.evalue
        result = notebook(ray(2, 1, WHERE), FIRST)
    return result.stdout.splitlines()[-1]


@pytest.mark.limit(240)
def test_a_notebooks_own_connection_is_used_with_its_runtime_env_and_stays(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("WORD = 'found'\n")
    environment = {name: value for name, value in cluster.environment.items() if name != "RAY_ADDRESS"}
    with running_kernel(**environment) as kernel:
        notebook = Notebook(kernel)
        runtime = {"env_vars": {"SAID": "by the notebook"}, "working_dir": str(tmp_path)}
        address = cluster.environment["RAY_ADDRESS"]
        notebook(f"import os, ray\nmade = ray.init({address!r}, runtime_env={runtime!r}, log_to_driver=False)", FIRST)
        shown = notebook(
            ray(1, 1, "import os\nfrom only_there import WORD\nprint(os.environ['SAID'], WORD)"), FIRST
        ).text
        assert "by the notebook found" in shown
        assert "started Ray" not in shown
        notebook("%distributed stop")
        assert notebook("ray.is_initialized()").value == "True"


@pytest.mark.limit(240)
def test_a_cluster_of_one_machine_is_started_said_and_ended() -> None:
    with ray_settings() as settings:
        with running_kernel(grace=10, **settings) as kernel:  # Ray's workers look now and then whether it is there
            notebook = Notebook(kernel)
            shown = alone(notebook, "print('rank', rank)")
            assert "started Ray on this machine alone, with " in shown
            assert "rank 0" in shown
            assert "has 1: " in notebook.refused(ray(2, 1, "pass"))
            notebook("import ray; ray.shutdown()")
            assert "started Ray" in alone(notebook, "print('rank', rank)")
        # what is left when the kernel has ended, running_kernel has found
        assert not marked("RAY_AUTH_TOKEN", settings["RAY_AUTH_TOKEN"])


@pytest.mark.limit(240)
def test_a_killed_kernel_leaves_nothing_of_its_own_ray() -> None:
    # a killed kernel's directory stays until another one clears it away
    with ray_settings() as settings, running_kernel(**settings, **_files(settings)) as kernel:
        notebook = Notebook(kernel)
        alone(notebook, "pass")
        kernel.kill()
        # Two agents of a killed raylet try for 60 s to tell the cluster, which is killed too.
        assert not gone_within(100, lambda: [str(one) for one in marked(MARK, kernel.mark)])


@pytest.mark.limit(240)
def test_addresses_that_lead_nowhere() -> None:
    with ray_settings() as settings, running_kernel(**settings) as kernel:
        notebook = Notebook(kernel)
        notebook("import os; os.environ['RAY_ADDRESS'] = 'ray://somewhere:10001'")
        assert "is for Ray Client" in notebook.refused(ray(1, 1, "pass"))
        notebook("os.environ['RAY_ADDRESS'] = '127.0.0.1:9'")
        assert "Ray is not available (RAY_ADDRESS=127.0.0.1:9): " in notebook.refused(ray(1, 1, "pass"))
