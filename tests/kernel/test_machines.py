"""Ranks on several machines: the same as on one, whatever happens to a machine or to the way there.

Machines are nodes on this one; where the network matters, hosts of their own.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.machines import TWO, Machines, notebook_with_machines, ticket_of
from tests.support.networks import two_hosts
from tests.support.notebook import LOOP, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]

FRESH = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.AdamW(model.parameters(), 1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True); losses = []
"""
TRAIN = LOOP + "    losses.append(loss.item())\n"
WEIGHTS = "torch.cat([one.detach().flatten().double() for one in model.state_dict().values()]).tolist()"


Two = tuple[Notebook, Machines]


@pytest.fixture(scope="module")
def module_machines() -> Iterator[Two]:
    with notebook_with_machines() as both:
        yield both


@pytest.fixture
def notebook(module_machines: Two) -> Notebook:
    notebook, _ = module_machines
    notebook("%distributed --monitor off")
    notebook(FRESH)
    return notebook


@pytest.fixture
def own_machines() -> Iterator[Two]:
    """For a test that harms them."""
    with notebook_with_machines() as (notebook, machines):
        notebook.kernel.wait_for(lambda: machines.joined() == 2)
        notebook("%distributed --monitor off")
        notebook(FRESH)
        yield notebook, machines


def weights(notebook: Notebook) -> list[float]:
    found = notebook(WEIGHTS).value
    assert found is not None
    return [float(one) for one in found.strip("[]").replace("\n", "").split(",")]


@pytest.mark.sample("ddp")
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "ddp2", "fsdp_hybrid", "zero1", "horovod", "pipeline", "deepspeed --stage 3", "ddp --accumulate 2"],
)  # fmt: skip
def test_a_cell_trains_as_on_one_machine(notebook: Notebook, strategy: str) -> None:
    notebook(f"%%distributed --nodes 2 --devices 4 -s {strategy}\n{TRAIN}")
    expected, losses = weights(notebook), notebook("losses").value
    notebook(FRESH)
    notebook(f"%%distributed {TWO} -s {strategy}\n{TRAIN}")
    assert weights(notebook) == pytest.approx(expected, abs=1e-6)
    assert notebook("losses").value == losses
    notebook(f"%%distributed {TWO} -s {strategy}\n{TRAIN}")
    once = len(eval(losses or "[]"))
    assert notebook("len(losses)").value == str(2 * once)


def test_ranks_know_where_they_are_and_what_the_notebook_has_set(notebook: Notebook) -> None:
    notebook("import os; os.environ['MINE'] = '7'; sys_path = __import__('sys').path.insert(0, '/nowhere')")
    run = notebook(
        f"%%distributed {TWO} --output all\n"
        "import os, sys\nassert os.environ['MINE'] == '7'\n"
        "at = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'LOCAL_WORLD_SIZE')]\n"
        "print('at', *at)\n"
    )
    said = sorted(re.findall(r"at (\d \d \d \d)", run.text))
    assert said == ["0 0 0 2", "1 1 0 2", "2 0 1 2", "3 1 1 2"]
    assert "4 ranks in 2 nodes · elastic" in notebook("%distributed status").text


def test_objects_cross_once_for_each_machine(notebook: Notebook) -> None:
    notebook(f"%%distributed {TWO}\npass")
    notebook("from nbtrain.engines.remote.lobby import lobby\n"
             "sent = lambda: [p.frames.bytes_sent for p in lobby().machines('join')]\n"
             "got = lambda: [p.frames.bytes_received for p in lobby().machines('join')]\n"
             "big = torch.ones(8_000_000); before, had = sent(), got()")  # fmt: skip
    notebook(f"%%distributed {TWO}\nassert big.sum() == 8_000_000\nbig[rank] = 2")
    there = notebook("sorted((b - a) // 1_000_000 for a, b in zip(before, sent()))[-2:]").value
    home = notebook("sorted((b - a) // 1_000_000 for a, b in zip(had, got()))[-2:]").value
    assert there == "[32, 32]"
    assert home == "[0, 32]"
    assert notebook("big[:4].tolist()").value == "[2.0, 1.0, 1.0, 1.0]"
    # Written again into the same memory, there and here.
    notebook("big[5] = 9")
    notebook(f"%%distributed {TWO}\nassert big[5] == 9 and big[0] == 2\nbig[6] = 8")
    assert notebook("big[4:8].tolist()").value == "[1.0, 9.0, 8.0, 1.0]"


def test_an_error_on_another_machine_shows_its_line(notebook: Notebook) -> None:
    error = notebook.fails(f"%%distributed {TWO}\n{LOOP}    if rank == 3:\n        raise ValueError('bad')")
    assert error.ename == "ValueError"
    assert "raise ValueError('bad')" in error.traceback
    assert "raised on rank 3; ranks 0, 1, 2 were stopped" in error.traceback
    notebook(f"%%distributed {TWO}\n{TRAIN}")


def test_a_rank_that_is_killed_is_replaced(notebook: Notebook) -> None:
    error = notebook.fails(f"%%distributed {TWO}\nimport os\nif rank == 2: os.kill(os.getpid(), 9)\nbarrier()")
    assert re.search(r"rank 2 \(process \d+\) was ended by SIGKILL", error.evalue)
    assert re.search(r"[Rr]ank 2 had .* of .* at most", error.evalue)
    notebook(f"%%distributed {TWO}\n{TRAIN}")


@pytest.mark.thorough
def test_a_machine_whose_ranks_are_gone_with_what_they_are_forked_from_begins_anew(own_machines: Two) -> None:
    notebook, machines = own_machines
    cell = f"%%distributed {TWO}\nprint('all', sum(gather(rank)))"
    notebook(cell)
    node = psutil.Process(machines.nodes[0].pid)
    (nursery,) = [one for one in node.children() if "nursery" in " ".join(one.cmdline())]
    nursery.kill()
    notebook.kernel.wait_for(lambda: not nursery.is_running() or nursery.status() == psutil.STATUS_ZOMBIE)
    result = notebook.kernel.run(cell)  # it may be sent before the death is told
    if result.error is not None:
        result = notebook(cell)
    assert "all 6" in result.stdout
    assert [one.poll() for one in machines.nodes] == [None, None]


def test_stop_ends_all_after_the_same_step(notebook: Notebook) -> None:
    cell = notebook.kernel.start(
        f"%%distributed {TWO} -s ddp\nimport time\nn = 0\nwhile True:\n    for x, y in loader:\n"
        "        loss = F.cross_entropy(model(x), y); opt.zero_grad(); loss.backward(); opt.step(); n += 1\n"
        "        if n == 5: print('going')\n        time.sleep(0.01 * rank)"
    )
    notebook.kernel.wait_for(lambda: "going" in cell.stdout)
    notebook.kernel.interrupt()
    notebook.kernel.wait(cell)
    assert cell.error is not None
    steps = re.search(r"stopped after step (\d+)", cell.error.evalue)
    assert steps is not None
    assert notebook("n").value == steps[1]
    run = notebook(f"%%distributed {TWO}\nprint('all', sorted(set(map(int, gather(n)))))")
    assert f"all [{steps[1]}]" in run.text


@pytest.mark.thorough
def test_where_and_breakpoints_reach_other_machines(notebook: Notebook, tmp_path: Path) -> None:
    begun, seen = tmp_path / "begun", tmp_path / "seen"
    cell = notebook.kernel.start(
        f"%%distributed {TWO} --background\nimport pathlib, time\nif rank == 3:\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n    while not pathlib.Path({str(seen)!r}).exists():\n"
        "        time.sleep(0.05)\nbarrier()"
    )
    notebook.kernel.wait(cell)
    notebook.kernel.wait_for(begun.exists)
    where = notebook("%distributed where").text
    seen.touch()
    assert "rank 3 is at Cell" in where
    assert "time.sleep(0.05)" in where or "while not" in where
    notebook("import nbtrain; nbtrain.background().wait()")
    asked = notebook.kernel.type(f"%%distributed {TWO}\nz = rank * 11\nif rank == 3: breakpoint()", "p z", "c")
    assert "33" in asked.text


@pytest.mark.thorough
def test_a_machine_that_is_lost_is_said_and_another_takes_its_place(own_machines: Two) -> None:
    notebook, machines = own_machines
    notebook(f"%%distributed {TWO}\n{TRAIN}")
    threading.Timer(1.0, machines.nodes[-1].kill).start()
    error = notebook.fails(f"%%distributed {TWO}\nimport time\nfor _ in range(300): time.sleep(0.05); barrier()")
    assert error.ename == "RankDied"
    assert re.search(r"ranks \d, \d were lost with the machine \S+: its node has ended", error.evalue)
    assert "The notebook is as it was before this cell" in error.evalue
    assert "there is no kept step: With its machine the run has lost its ranks" in notebook("%distributed recover").text
    machines.add()
    notebook(f"%%distributed {TWO}\n{TRAIN}")


@pytest.mark.thorough
def test_a_new_machine_knows_what_the_others_have_entered(own_machines: Two) -> None:
    """Between cells a machine is lost, and the next cell enters what the last one did."""
    notebook, machines = own_machines
    cell = f"%%distributed {TWO}\nprint('all', sum(gather(rank)))"
    notebook(cell)
    machines.add()
    notebook.kernel.wait_for(lambda: machines.joined() == 3)
    machines.nodes[0].kill()
    machines.nodes[0].wait()
    notebook.kernel.wait_for(lambda: machines.joined() == 2)
    assert "all 6" in notebook(cell).stdout


@pytest.mark.thorough
def test_a_machine_that_is_awaited_is_said(notebook: Notebook) -> None:
    cell = notebook.kernel.start("%%distributed --engine elastic --nodes 9 --devices 1\npass")
    notebook.kernel.wait_for(lambda: "more machines, with the line that %distributed join has shown" in cell.stdout)
    notebook.kernel.interrupt()
    notebook.kernel.wait(cell)
    assert "nbtrain-1-" not in cell.stdout  # it is saved in the notebook
    assert cell.error is not None
    assert cell.error.ename == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('--devices "0,1"', "names GPUs"),
        ("-s dp", "is one process; on several machines take --strategy ddp"),
        ("--start fork", "leave it out"),
        ("--devices free:1", "on several machines write a number"),
        ("--verify", "is played on the notebook's machine"),
        ("--grow 1,2", "is played on the notebook's machine"),
    ],
)
def test_what_machines_cannot_do_is_said(notebook: Notebook, line: str, said: str) -> None:
    assert said in notebook.refused(f"%%distributed --engine elastic --nodes 2 {line}\npass")


# -- who may take part ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_other_tickets_are_refused(own_machines: Two) -> None:
    notebook, machines = own_machines
    late = notebook("from nbtrain.engines.remote.lobby import lobby\nprint(lobby().ticket(seconds=-1).text())").stdout
    forged = notebook(
        "from dataclasses import replace; import zmq\n"
        "pair = zmq.curve_keypair(); t = lobby().ticket()\n"
        "print(replace(t, public_key=pair[0].decode(), secret_key=pair[1].decode()).text())"
    ).stdout
    before = machines.joined()
    ends = [machines.add(ticket=one.strip()) for one in (late, forged)]
    assert ends[0].wait(30) == 2
    notebook.kernel.wait_for(lambda: "no answer from" in machines.said(len(machines.nodes) - 1).read_text(), 30)
    ends[1].terminate()
    ends[1].wait(15)
    said = [machines.said(number).read_text() for number in range(len(machines.nodes) - 2, len(machines.nodes))]
    assert "has expired" in said[0]
    assert "joined" not in said[1]
    assert machines.joined() == before
    refused = notebook("sum(lobby().admission.refused.values())").value
    assert refused is not None
    assert int(refused) >= 2
    notebook(f"%%distributed {TWO}\npass")
    assert re.search(r"refused: \d+ × no ticket of this notebook", notebook("%distributed status").text)


# -- the way there -----------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.limit(240)
def test_hosts_of_their_own_and_a_cable_that_is_out_for_ten_seconds() -> None:
    with two_hosts() as hosts, notebook_with_machines(0) as (notebook, machines):
        kernel = notebook.kernel
        for host in hosts:
            machines.add(host.run)
        notebook(FRESH)
        notebook(f"%%distributed {TWO} --monitor off -s fsdp\n{TRAIN}", 120)
        assert sorted(re.findall(r"node-[ab]", notebook("%distributed join").text)) == ["node-a", "node-b"]
        cell = kernel.start(
            f"%%distributed {TWO} --monitor off --output all\nimport time\nprint('begun')\n"
            "for i in range(60):\n    print('at', rank, i)\n    time.sleep(0.05)\n"
            f"{LOOP}"
        )
        kernel.wait_for(lambda: "at 2 5" in cell.stdout and "at 0 5" in cell.stdout, 60)
        hosts[1].cut()
        time.sleep(10)
        hosts[1].mend()
        kernel.wait(cell, 120)
        assert cell.error is None, cell.text
        for rank in range(4):
            assert [int(one) for one in re.findall(rf"at {rank} (\d+)", cell.stdout)] == list(range(60))
        notebook(f"%%distributed {TWO} --monitor off -s ddp\n{TRAIN}", 120)


@pytest.mark.thorough
@pytest.mark.limit(120)
def test_a_checkpoint_in_a_folder_that_not_all_machines_see_is_refused(tmp_path: Path) -> None:
    hides = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(tmp_path)]
    with two_hosts() as (a, b), notebook_with_machines(0) as (notebook, machines):
        machines.add(a.run)
        notebook.kernel.wait_for(lambda: machines.joined() == 1)  # so that rank 0 is there
        machines.add(lambda argv, **options: b.run([*hides, *argv], **options))
        notebook(FRESH)
        save = f"save('{tmp_path}/run')\n"
        began = time.monotonic()
        said = notebook.kernel.run(f"%%distributed {TWO} --monitor off -s fsdp\n{LOOP}{save}", 90).text
        assert f"{tmp_path} of node-a, where rank 0 is, is not to be seen on node-b" in said
        assert time.monotonic() - began < 60
        assert not list(tmp_path.iterdir())
        notebook(f"%%distributed {TWO} --monitor off -s fsdp\n{TRAIN}")


@pytest.mark.thorough
def test_a_notebook_that_ends_sends_its_machines_home(own_machines: Two) -> None:
    notebook, machines = own_machines
    notebook(f"%%distributed {TWO} --monitor off\npass", 60)
    notebook.kernel.manager.shutdown_kernel()
    assert [node.wait(15) for node in machines.nodes] == [0, 0]
    assert "the notebook has ended" in machines.said(0).read_text()


def test_a_ticket_is_shown_once_more_with_who_has_joined(module_machines: Two) -> None:
    notebook, machines = module_machines
    notebook.kernel.wait_for(lambda: machines.joined() == 2)
    assert ticket_of(notebook.kernel) != machines.ticket


# --- a node on the notebook's own machine: shared memory is opened there, and not sent ---------------

COUNT = """
from nbtrain.engines.remote.lobby import lobby
def crossed():
    return [p.frames.bytes_sent + p.frames.bytes_received for p in lobby().machines("join")]
"""


@pytest.fixture(params=["0", "1"], ids=["both on it", "one of them"])
def beside(request: pytest.FixtureRequest) -> Iterator[Two]:
    with notebook_with_machines(1, apart="0") as (notebook, machines):
        notebook.kernel.wait_for(lambda: machines.joined() == 1)
        machines.apart = request.param
        machines.add()
        notebook.kernel.wait_for(lambda: machines.joined() == 2)
        notebook("%distributed --monitor off")
        notebook(COUNT + FRESH)
        yield notebook, machines


@pytest.mark.thorough
def test_what_lies_in_memory_is_not_sent_to_the_same_machine(beside: Two) -> None:
    notebook, machines = beside
    for strategy in ("ddp", "fsdp"):
        notebook(FRESH)
        notebook(f"%%distributed --nodes 2 --devices 4 -s {strategy}\n{TRAIN}")
        expected = weights(notebook)
        notebook(FRESH)
        notebook(f"%%distributed {TWO} -s {strategy}\n{TRAIN}")
        assert weights(notebook) == pytest.approx(expected, abs=1e-6)
        notebook(f"%%distributed {TWO} -s {strategy}\n{TRAIN}")
    notebook("%distributed stop")
    notebook(f"%%distributed {TWO}\npass")
    notebook("bigs = [torch.ones(4_000_000 + i) for i in range(3)]; before = crossed()")
    for turn in range(4):  # the segments are taken in turn, and by others
        notebook(f"%%distributed {TWO}\nassert bigs[{turn % 3}].sum() % 1000 >= 0\nbigs[{turn % 3}] += 1")
        notebook(f"bigs[{(turn + 1) % 3}] += 1")
    assert notebook("[int(big.mean()) for big in bigs]").value == "[4, 4, 3]"
    there = [int(one) for one in (notebook("[b - a for a, b in zip(before, crossed())]").value or "")[1:-1].split(",")]
    assert there[0] < 4_000_000
    assert (there[1] < 4_000_000) == (machines.apart == "0")
