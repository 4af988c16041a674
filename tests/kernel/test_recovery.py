"""After something went wrong in the middle, notebook and ranks agree again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.engines._local import directory
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

pytestmark = pytest.mark.kernel


@pytest.fixture
def nb(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook("%load_ext nbtrain")
    yield notebook
    notebook("%distributed stop")


@pytest.mark.thorough
def test_an_object_that_cannot_be_changed_here_does_not_cost_the_rest(nb: Notebook) -> None:
    nb("""
import os
class Bad:
    here = os.getpid()
    def __init__(self): self.n = 1
    def __getstate__(self): return {'n': self.n}
    def __setstate__(self, state):
        if os.getpid() == self.here: raise ValueError('not here')
        self.n = state['n']
bad = Bad(); kept = [1]""")
    said = nb("%%distributed -d 2\nbad.n = 2; kept.append(2)").stdout
    assert "bad: ValueError: not here; the notebook's is not changed" in said
    assert nb("print(kept, bad.n)").stdout == "[1, 2] 1\n"
    assert nb("%%distributed -d 2\nprint(kept, bad.n)").stdout.splitlines()[-1] == "[1, 2] 1"


def test_a_screen_that_fails_does_not_leave_the_cell_to_the_next_one(nb: Notebook) -> None:
    broken = "class Broken:\n    def write(self, text): raise ValueError('closed')\n    def flush(self): pass"
    nb(f"import sys; seen = []; shown = sys.stdout\n{broken}\nsys.stdout = Broken()")
    assert nb.fails("%%distributed -d 2 --monitor off\nprint('x')\nimport time; time.sleep(1)\nseen.append('old')")
    nb("sys.stdout = shown")
    nb("%%distributed -d 2\nseen.append('new')")
    assert nb("print(seen)").stdout == "['new']\n"


@pytest.mark.thorough
def test_ranks_that_were_cut_short_at_different_places_do_not_go_on(nb: Notebook) -> None:
    """A collective that one rank had begun and the other had not would pair up with the next cell's, forever."""
    nb("m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), 0.1)")
    ranks = nb.pids()
    nb.fails("%%distributed -d 2\nimport torch.distributed as dist\n"
             "if rank == 0: work = dist.all_reduce(torch.ones(1), async_op=True)\nraise ValueError(rank)")  # fmt: skip
    nb("%%distributed -d 2\nm(torch.ones(1, 2)).sum().backward(); o.step()", timeout=20)
    assert not {*ranks} & {*nb.pids()}
    before = nb.pids()
    nb.fails("%%distributed -d 2\n1 / 0")
    nb("%%distributed -d 2\npass")
    assert nb.pids() == before, "all of them failed alike: they go on"


@pytest.mark.thorough
def test_a_notebook_that_ignores_its_children_loses_a_spawned_rank_alone(nb: Notebook) -> None:
    nb("import signal; before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    spawned = "%%distributed -d 2 --start spawn\n"
    assert nb.fails(f"{spawned}import os\nif rank == 1: os.kill(os.getpid(), 9)\nbarrier()").ename == "RankDied"
    assert "[0, 1]" in nb(f"{spawned}print(gather(rank))").stdout
    nb("%distributed stop\nsignal.signal(signal.SIGCHLD, before)")


def test_starting_twice_does_not_wait_for_ever(nb: Notebook) -> None:
    nb("%distributed start --devices 2")
    nb("%distributed start --devices 2")
    assert "2 ranks" in nb("%distributed status").stdout


def test_nothing_is_started_in_the_kernel(nb: Notebook) -> None:
    assert "no ranks to start" in nb.refused("%distributed start --engine inprocess --devices 1")
    nb("%distributed --engine local")


def test_ranks_that_were_freed_form_a_new_group_where_only_some_ran_the_cell(nb: Notebook) -> None:
    """What frees who waits shuts the connections to all the others, those that had no part in the cell too."""
    nb("import time, torch")
    nb("%%distributed -d 3\npass")
    nb.fails(
        "%%rank 0,1\nif rank == 0: raise ValueError\ntry: time.sleep(30)\nexcept KeyboardInterrupt: time.sleep(0.4)"
    )
    nb("%%distributed -d 3\nsum_ = float(reduce(torch.ones(1), 'sum'))")
    assert nb("print(sum_)").stdout == "3.0\n"


def test_a_rank_that_dies_while_its_objects_come_home_is_named(nb: Notebook) -> None:
    error = nb.fails("""%%distributed -d 2
import os
class Bad:
    def __getstate__(self): return {'a': 1}
    def __setstate__(self, state): raise ValueError('not here')
class Ends:
    packed = 0
    def __reduce__(self):
        self.packed += 1
        if self.packed > 1: os._exit(9)
        return Ends, ()
bad, ends = Bad(), Ends()""")
    assert error.ename == "RankDied"
    assert "exit code 9" in error.evalue
    nb("%%distributed -d 2\npass")


def test_what_the_kernel_has_no_memory_for_stays_on_the_ranks(nb: Notebook) -> None:
    nb("%%distributed -d 2\npass")
    nb("import psutil, resource, torch; before = resource.getrlimit(resource.RLIMIT_AS); kept = []")
    nb("resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 27), before[1]))")
    said = nb("%%distributed -d 2\nbig = torch.ones(1 << 26); kept.append(1)").stdout
    nb("resource.setrlimit(resource.RLIMIT_AS, before)")
    assert re.search(r"big.* stays? on the ranks", said), said
    assert nb("print(kept, big)").stdout.startswith("[1] <torch.Tensor on the ranks: tensor([1.")


def test_a_second_press_ends_the_wait_for_what_is_packed_again(nb: Notebook, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    state = "def __getstate__(self): return 1\n    def __setstate__(self, state): raise ValueError('not here')"
    slow = f"def __repr__(self): import time; open({str(asked)!r}, 'w').close(); time.sleep(600)"
    cell = nb.kernel.start(f"%%distributed -d 2\nclass Bad:\n    {state}\n    {slow}\nbad = Bad()")
    nb.kernel.wait_for(asked.exists, 20)
    nb.kernel.interrupt()
    nb.kernel.wait_for(lambda: "press Stop again" in cell.text, 20)
    time.sleep(0.5)  # else it is a double click
    nb.kernel.interrupt()
    nb.kernel.wait(cell, 20)
    assert "discarded; the notebook is as it was before this cell" in cell.text
    nb("%%distributed -d 2\nbarrier()")


STEPS = """%%distributed -d 2
import os, threading
for i in range(3):
    m(torch.ones(1, 2)).sum().backward(); o.step(); o.zero_grad(); log.append(i)
"""
TRAINING = "m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), 0.1); log = []; before = m.weight.clone()"


@pytest.mark.parametrize(
    "end",
    [
        "if rank == 0: os._exit(3)",
        "if rank == 0: threading.Timer(0.03, os._exit, (3,)).start(); raise ValueError\nbarrier()",
        "class Ends:\n    def __reduce__(self):\n        if rank == 0: os._exit(3)\n        return Ends, ()\n"
        "log.append(Ends()); raise ValueError",
        "log.append(os.getpid()); m(torch.ones(1, 2)).sum().backward(); raise ValueError",
    ],
    ids=["when the others have ended", "after it has failed", "while it is packed", "after the cell"],
)
def test_what_the_others_have_is_recovered_whenever_a_rank_dies(nb: Notebook, end: str) -> None:
    nb(TRAINING)
    nb("%%distributed -d 2\npass")
    first = nb.pids()[0]
    nb.fails(STEPS + end)
    if "getpid" in end:
        os.kill(first, signal.SIGKILL)
        nb.kernel.wait_for(lambda: first not in nb.pids(), 5)
    assert "until step 3" in nb("%distributed recover").stdout
    assert nb("print(log[:3], bool((before != m.weight).any()))").stdout == "[0, 1, 2] True\n"
    nb("%%distributed -d 2\nbarrier()")


def test_asking_how_ranks_are_ends_none(nb: Notebook) -> None:
    nb("%%distributed -d 2 --keep mine\nmine = torch.ones(2) * rank")
    last = nb.pids()[-1]
    os.kill(last, signal.SIGKILL)
    nb.kernel.wait_for(lambda: last not in nb.pids(), 5)
    assert "rank 1: cpu · 1 thread · has died; the next cell replaces it" in nb("%distributed status").stdout
    nb("mine = mine.pull()")
    assert nb("print(mine)").stdout == "tensor([0., 0.])\n"


def test_what_the_user_did_since_the_failure_is_not_overwritten_unasked(nb: Notebook) -> None:
    nb(TRAINING + "; rest = [1]; z = 1; same = [0]")
    nb.fails(STEPS + "z = 2; same.append(1); rest\nm(torch.ones(1, 2)).sum().backward(); raise ValueError")
    nb("old = log; log = ['mine']; z = 3; rest = ['mine']\nwith torch.no_grad(): m.weight.fill_(7)")
    said = nb.refused("%distributed recover")
    assert "changed in the notebook since the cell failed: log, m, " in said
    assert "z. What" in said
    assert nb("print(log, z, m.weight[0, 0].item(), same)").stdout == "['mine'] 3 7.0 [0]\n"
    nb("m.bias")
    assert "until step 3" in nb("%distributed recover").stdout
    said = nb("print(log, log is old, z, m.weight[0, 0].item() != 7, rest, same)").stdout
    assert said == "[0, 1, 2] True 2 True ['mine'] [0, 1]\n"
    nb("%%distributed -d 2\nlog.append(float(reduce(torch.ones(1), 'sum'))); rest.append(2)")
    assert nb("print(log, rest)").stdout == "[0, 1, 2, 2.0] ['mine', 2]\n"


def test_what_the_user_lets_go_of_is_said_before_it_comes_back(nb: Notebook) -> None:
    nb(TRAINING + "; help_ = lambda: 1")
    nb.fails(STEPS + "help_(); m(torch.ones(1, 2)).sum().backward(); raise ValueError")
    nb("del log; help_ = lambda: 2")
    assert "since the cell failed: log. What" in nb.refused("%distributed recover")
    nb("%distributed recover")
    assert nb("print(log, help_())").stdout == "[0, 1, 2] 2\n"


OTHERS = "m2 = torch.nn.Linear(2, 2); o2 = torch.optim.SGD(m2.parameters(), 0.1); big = torch.ones(3)"


@pytest.mark.parametrize("options", ["", pytest.param(" -s fsdp", marks=pytest.mark.thorough)])
def test_a_kept_step_stays_until_another_cell_has_trained_its_objects(nb: Notebook, options: str) -> None:
    nb(f"{TRAINING}; {OTHERS}; torch.manual_seed(1)")
    steps = STEPS.replace("-d 2", f"-d 2{options}")
    nb(f"%%distributed -d 2{options} --keep there\nthere = [big]")
    error = nb.fails(steps + "raise ValueError").traceback
    assert "Another cell that trains the same objects to its end discards it." in error
    said = nb(f"%%distributed -d 2{options}\nbig += 1; log.append('later')").stdout
    assert "step 3 of the failed cell stays kept" in said
    error = nb.fails(steps.replace("range(3)", "range(1)") + "raise ValueError").traceback
    assert "Step 3 of the cell that failed before is still kept" in error
    nb("there = there.pull()")
    said = nb("%%distributed -d 3\nm2(torch.ones(1, 2)).sum().backward(); o2.step(); o2.zero_grad()").stdout
    assert "new ranks" in said
    assert "since the cell failed: log. What" in nb.refused("%distributed recover")
    assert "until step 3" in nb("%distributed recover").stdout
    assert nb("print(log, bool((before != m.weight).any()), big)").stdout == "[0, 1, 2] True tensor([2., 2., 2.])\n"
    assert "the notebook has it" in nb("%distributed recover").stdout
    now = "%%distributed -d 3\nhere = [round(float(m.weight.detach().sum()), 4), log]"
    nb(now)
    assert nb("print(here == [round(float(m.weight.detach().sum()), 4), log])").stdout == "True\n"
    nb.fails(steps.replace("-d 2", "-d 3") + "raise ValueError")
    nb(steps.replace("-d 2", "-d 3"))
    said = nb("%distributed recover").stdout
    assert said == "there is no kept step: another cell has trained the same objects since\n"
    nb.fails(steps.replace("-d 2", "-d 3") + "raise ValueError")
    nb(TRAINING)
    error = nb.fails(steps.replace("-d 2", "-d 3").replace("range(3)", "range(1)") + "raise ValueError").traceback
    assert "It takes the place of step 3 of the cell that failed before." in error


def test_why_no_step_was_kept(nb: Notebook) -> None:
    nb(TRAINING)
    nb.fails("%%distributed -d 2\nraise ValueError")
    said = nb("%distributed recover").stdout
    assert said == "there is no kept step: the last cell that failed had finished no step\n"


def test_a_double_click_on_stop_is_one_press(nb: Notebook) -> None:
    """The second press ends ranks, and with them what they did."""
    nb(TRAINING)
    nb("%%distributed -d 2\npass")
    ranks = nb.pids()
    cell = nb.kernel.start(STEPS.replace("range(3)", "range(10**6)") + "    if i == 5: print('here')")
    nb.kernel.wait_for(lambda: "here" in cell.stdout, 20)
    nb.kernel.interrupt()
    time.sleep(0.05)
    nb.kernel.interrupt()
    nb.kernel.wait(cell, 15)
    assert "what the cell did until then is in the notebook" in cell.text
    assert nb.pids() == ranks
    assert int(nb("print(len(log))").stdout) > 5


@pytest.mark.thorough
def test_a_press_on_stop_while_it_is_recovered(nb: Notebook) -> None:
    state = "    def __getstate__(self):\n        import time; time.sleep(self.n); return {'n': self.n}"
    slow = f"class Slow:\n    n = 0\n{state}"
    nb(f"{TRAINING}\n{slow}\nslow = Slow()")
    body = "slow.n = 4\nm(torch.ones(1, 2)).sum().backward(); raise ValueError"
    for presses in (1, 2):
        nb.fails(STEPS + body)
        cell = nb.kernel.start("%distributed recover")
        time.sleep(1)
        nb.kernel.interrupt()
        nb.kernel.wait_for(lambda: "press Stop again" in cell.text, 10)  # noqa: B023
        if presses == 2:
            time.sleep(0.5)
            nb.kernel.interrupt()
        nb.kernel.wait(cell, 20)
        assert ("discarded" in cell.text) == (presses == 2)
        assert nb("print(log)").stdout == "[0, 1, 2]\n"
        nb("slow.n = 0")
    nb("%%distributed -d 2\nlog.append(3)")
    assert nb("print(log)").stdout == "[0, 1, 2, 3]\n"


def test_only_what_nobody_has_any_more_is_cleared_away(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(tempfile.mkdtemp(prefix="k-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    made = (
        "import os, socket, sys\nfrom nbtrain.engines._local import directory\n"
        "from nbtrain.worker.process.rank_channel import address\npath = directory.make()\n"
        "socket.socket(socket.AF_UNIX).bind(address(path))\nprint(path, flush=True)\nsys.stdin.read()\nos._exit(1)"
    )
    other = place / "nbtrain-of-somebody"
    other.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", made], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        directory.sweep()
        assert path.exists(), "its owner lives"
        owner.communicate()
        assert path.exists()
        directory.sweep()
        assert not path.exists()
        assert other.exists(), "it is no pool's"
    finally:
        owner.kill()
        owner.wait()
        shutil.rmtree(place)


def test_the_notebooks_own_directory_is_not_looked_through(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may hold a million files, and may be gone. Sockets may lie there all the same, where no other place is."""
    listed: list[str] = []
    monkeypatch.setattr(directory.os, "listdir", lambda path: listed.append(path) or [])
    monkeypatch.chdir(tmp_path)
    directory.sweep()
    assert "/tmp" in listed
    assert str(tmp_path) not in listed
    assert list(directory._places())[-1] == str(tmp_path)
    tmp_path.rmdir()
    directory.sweep()
    assert list(directory._places()) == listed[: len(listed) // 2]
