"""`%%distributed --detach`: a run goes on without the kernel that began it, and any notebook takes it home."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Any

import psutil
import pytest

from nbtrain.annexes.detached import keeper_client
from nbtrain.annexes.detached.run_folders import RunFolder, every_run
from tests.support.hygiene import gone_within
from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, START, TRAIN, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.limit(240)]

MAKE = f"import time; torch.manual_seed(3); {TRAIN}; losses = []; box = {{'model': model}}"
CONSTANTS = """
class Meter:
    def __init__(self): self.seen = 0
    def add(self): self.seen += 1
count, pair, note, meter, meters = 5, (1, 2), [1], Meter(), []"""
BIND = "count += len(note); pair = (*pair, 3); note = None; meter.add(); meters.append(Meter())\n"
BODY = """
torch.manual_seed(5)
for epoch in range({epochs}):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); opt.step(); opt.zero_grad()
        losses.append(loss.item()); log(loss=loss); time.sleep({pause})
    if rank == 0: print('epoch', epoch)
best = min(losses)
"""
SUM = "print(repr((sum(losses), best, sum(p.double().sum().item() for p in model.parameters()), torch.rand(1).item())))"


def cell(options: str = "", epochs: int = 3, pause: float = 0.2) -> str:
    return f"%%distributed -d 2 --monitor off {options}{BODY.format(epochs=epochs, pause=pause)}"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this test's runs; what is still running in the end is ended."""
    monkeypatch.setenv("NBTRAIN_RUNS", str(tmp_path / "runs"))
    yield tmp_path / "runs"
    for run in every_run():
        for keeper in keepers(run):
            keeper.kill()


def keepers(run: RunFolder) -> list[psutil.Process]:
    try:
        return [psutil.Process(int((run.path / "lock").read_text().split()[0]))] if run.is_kept else []
    except (OSError, psutil.NoSuchProcess):
        return []


Another = Callable[[], Notebook]


@pytest.fixture
def another(kernel_factory: Callable[..., Kernel], runs: Path) -> Another:
    """A new kernel, as that of another day."""
    return lambda: Notebook(kernel_factory(NBTRAIN_RUNS=str(runs)))


@contextmanager
def within(seconds: float) -> Iterator[Callable[[], None]]:
    deadline = time.monotonic() + seconds

    def wait() -> None:
        assert time.monotonic() < deadline
        time.sleep(0.1)

    yield wait


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    with within(seconds) as wait:
        while not condition():
            wait()


def test_a_run_outlives_its_kernel(another: Another) -> None:
    first = another()
    first(MAKE + CONSTANTS)
    said = first(cell("--detach") + BIND).stdout
    assert "run 1 goes on without this notebook: --devices 2 --monitor off on cpu. %distributed attach 1" in said
    (run,) = every_run()
    assert first("%distributed runs").stdout.split()[:1] == ["1"]
    assert "detached run 1  " in first("%distributed status").stdout
    os.kill(first.kernel.pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(first.kernel.pid) or psutil.Process(first.kernel.pid).status() == "zombie")
    second = another()
    second(MAKE)
    alone = second(cell() + SUM.replace("print", "if rank == 0: print")).stdout
    (alone,) = [line for line in alone.splitlines() if line.startswith("(")]
    second("del best, loss, x, y, epoch")
    second(MAKE + CONSTANTS + "; weights = list(model.parameters()); mine = losses")
    shown = second("%distributed attach", 100).stdout
    assert [f"epoch {n}" in shown for n in range(3)] == [True] * 3
    assert {"model", "opt", "losses"} <= set(shown.partition(": in place")[0].rpartition("nbtrain: ")[2].split(", "))
    assert f"{run} is done, 9 steps; what it did is in the notebook" in shown
    assert second(SUM).stdout.strip() == alone  # to the last bit
    same = "all(a is b for a, b in zip(weights, model.parameters())), mine is losses, box['model'] is model"
    assert second(f"print({same})").stdout == "(True, True, True)\n".replace("(", "").replace(")", "").replace(",", "")
    assert second("print(count, pair, note, meter.seen)").stdout == "6 (1, 2, 3) None 1\n"
    assert second("print(type(meter) is Meter, type(meters[0]) is Meter)").stdout == "True True\n"
    assert "done, taken home" in second("%distributed runs").stdout
    assert "is dropped" in second("%distributed runs --drop 1").stdout
    assert every_run() == []
    assert gone_within(10, lambda: [p.pid for p in keepers(run)]) == []


HELD = """
import gc
class Meter:
    def __init__(self): self.seen = 0
    def add(self): self.seen += 1
a = [1]; nest = {'a': a}; b = [2]; box = {'b': b}; c = [3]; hold, kept, best = {}, {}, None; meter = Meter()
same = meter; bound = []; old = bound; gone, gone_too = [4], net(); table = torch.zeros(3); tables = [table]
teacher = net(); weight = teacher[0].weight; _private = 1; secret, also = [1], 3
get_ipython().user_ns_hidden.update(secret=secret, also=also);"""
HOLDS = """
a.append(2); hold['c'] = c; meter.add(); bound = [9]; del gone, gone_too; table.add_(1); alias = b; first = []
second = first; kept['layer'] = teacher[0]; best = net(); _private = 2; secret.append(2); also = 4; nest['b'] = box['b']
"""
TELL = """print(
    nest['a'] is a, a, hold['c'] is c, meter is same, same.seen, old, bound,
    [name for name in globals() if 'gone' in name],
    tables[0] is table, table, alias is b, box['b'] is b, nest['b'] is b, first is second,
    kept['layer'] is teacher[0], kept['layer'].weight is weight, type(best), _private, secret, also)"""


def test_names_and_what_they_share_come_home_as_from_an_ordinary_cell(another: Another) -> None:
    nb = another()
    nb(HELD)
    nb(f"%%distributed -d 2 --monitor off{HOLDS}")
    ordinary = nb(TELL).stdout
    nb("%distributed stop")
    nb("del alias, first, second")
    nb(HELD)
    nb(f"%%distributed -d 2 --monitor off --detach{HOLDS}")
    assert "gone, gone_too: deleted" in nb("%distributed attach").stdout
    assert nb(TELL).stdout == ordinary
    nb("gone = [4]")
    nb("%%distributed -d 2 --monitor off --detach\ndel gone")
    nb("gone.append(5)")
    assert "gone: yours kept, as it has changed since; the run has deleted it" in nb("%distributed attach").stdout


def test_it_is_stopped_after_a_whole_step_and_told_apart(another: Another) -> None:
    nb = another()
    nb(MAKE)
    nb(cell("--detach", epochs=500, pause=0.01).replace("model(x)", "box['model'](x)"))
    (run,) = every_run()
    until(lambda: "step" in nb("%distributed runs").stdout)
    assert "cell" in nb("%distributed runs where 1").stdout.lower()
    assert "has not ended yet: %distributed runs stop 1 ends it" in nb.refused("%distributed runs --drop 1")
    assert "attach has no option --devices; %distributed attach [RUN]" in nb.refused("%distributed attach --now -d 3")
    nb("own = box['model']; box['model'] = nn.Linear(3, 3)")
    said = nb.refused("%distributed attach --now")
    assert (
        "UsageError: what run 1: --devices 2 --monitor off trains is of another model: box['model'].weight (3, 3)"
        in said
    )
    assert "Nothing was changed: run the cells that make it as the run has it" in said
    nb("box['model'] = own")
    nb("weights = list(model.parameters()); before = weights[0].clone()")
    so_far = nb("%distributed attach 1 --now").stdout
    assert "box['model']" in so_far.partition(": as after step ")[0]
    step = so_far.partition("step ")[2].partition(" ")[0].replace(",", "")
    shown = "opt.state_dict()['state'][0]['step'].item(), weights[0] is model[0].weight, (weights[0] == before).all()"
    assert nb(f"print({shown}, losses)").stdout == f"{float(step)} True tensor(False) []\n"
    assert run.state == "running"
    nb("losses.append(7)")
    nb("%distributed runs stop 1")
    shown = nb("%distributed attach 1", 60).stdout
    assert "was stopped after step" in shown
    assert "box: yours kept" not in shown
    assert "losses: yours kept, as it has changed since; the run's is nbtrain.detached(1).values['losses']" in shown
    counts = "import nbtrain; r = nbtrain.detached(1); print(losses, len(r.values['losses']) * 1 == r.steps, r.state)"
    assert nb(counts).stdout == "[7] True stopped\n"
    assert run.end is not None


def test_what_it_raises_is_shown_by_attach_and_its_last_step_comes_home(another: Another) -> None:
    nb = another()
    nb(MAKE)
    nb(cell("--detach", pause=0.05).replace("losses.append", "assert len(losses) < 5, 'far enough'; losses.append"))
    result = nb.kernel.run("%distributed attach", 60)
    assert result.error is not None
    assert "far enough" in result.text
    assert "run 1: --devices 2 --monitor off has failed" in result.text
    assert "as it was before" not in result.text
    assert nb("print(len(losses))").stdout == "5\n"


def test_who_waits_long_for_its_weights_is_told(another: Another) -> None:
    nb = another()
    nb(MAKE + "; import nbtrain.annexes.detached.weights_so_far as now; now.SLOW, now.LONG = 0.5, 1.0")
    nb("%%distributed -d 2 --monitor off --detach" + LOOP.replace("zero_grad()", "zero_grad(); time.sleep(600)"))
    asks = nb.kernel.start("%distributed attach --now")
    nb.kernel.wait_for(lambda: "no step has ended for 1 s: %distributed runs where 1" in asks.stdout)
    nb.kernel.interrupt()
    nb.kernel.wait_for(lambda: asks.done)
    assert "run 1: --devices 2 --monitor off goes on: %distributed attach 1 --now asks again" in asks.text
    assert "sleep" in nb("%distributed runs where 1").stdout
    assert "its ranks are ended at once; nothing" in nb("%distributed runs kill 1").stdout


def test_what_goes_wrong_at_the_start_stands_below_the_cell(another: Another) -> None:
    nb = another()
    nb(MAKE)
    error = nb.fails("%%distributed -d 2 -s fsdp --wrap Nothing --detach" + BODY.format(epochs=1, pause=0), 60)
    assert "Nothing" in error.evalue
    nb("import threading; lock = threading.Lock()")
    assert nb.fails("%%distributed -d 2 --detach\nlock.acquire()").ename == "CannotTravel"
    assert nb.fails("%%distributed -d 2 --detach\nprint(nowhere)").ename in ("NameError", "MissingName")
    for options, why in {
        "--engine inprocess -s single -d 1": "--engine inprocess runs the cell in this kernel",
        "--start fork": "--start fork makes ranks of this kernel",
        "--keep losses": "--keep leaves objects on this notebook's ranks",
        "--background": "--background goes on in this kernel",
    }.items():
        devices = "" if "-d 1" in options else "-d 2"
        assert why in nb.refused(f"%%distributed {devices} {options} --detach\nlosses")
    for limit, why in {"LIVE = 0": "0 such runs go on already", "LEFT = -1": "and --drop 1 deletes one"}.items():
        nb(f"import nbtrain.annexes.detached.start as detach; detach.LIVE = 4; detach.{limit}")
        assert why in nb.refused("%%distributed -d 2 --detach\nlosses")
    assert every_run() == []


def test_one_whose_ranks_are_ended_at_once_brings_nothing(another: Another) -> None:
    nb = another()
    nb(MAKE)
    nb(cell("--detach", epochs=500, pause=0.05))
    (run,) = every_run()
    until(lambda: " · loss " in nb("%distributed runs").stdout)  # it steps, and logs
    nb("%distributed runs kill 1")
    until(lambda: run.end is not None)
    assert "killed, not taken home" in nb("%distributed runs").stdout
    assert "does not run any more: it is killed" in nb.refused("%distributed runs where 1")
    assert "nothing that they did is in the notebook" in nb("%distributed attach").stdout
    assert nb("print(losses, opt.state)").stdout == "[] defaultdict(<class 'dict'>, {})\n"


def test_a_function_is_handed_over_and_its_arguments_come_home(another: Another) -> None:
    nb = another()
    nb(MAKE + "; import nbtrain; weights = list(model.parameters())")
    nb("def train(model, opt, losses, epochs):" + BODY.format(epochs="epochs", pause=0.02).replace("\n", "\n    ")
       + "\n    return best, epochs")  # fmt: skip
    began = nb("run = nbtrain.run(train, model, opt, epochs=2, losses=losses, devices=2, detach=True); run")
    assert began.value == "<run 1: --devices 2, running>"
    assert "return what it has computed" not in nb("run.attach()").stdout
    same = "all(a is b for a, b in zip(weights, model.parameters())), run.result == (min(losses), 2), len(losses)"
    assert nb(f"print({same}, [name for name in globals() if 'nbtrain_' in name])").stdout == "True True 6 []\n"
    call = "nbtrain.run(train, model, opt, epochs=500, losses=losses, devices=2, detach=True, "
    assert (
        "detach=True goes on without this notebook, and background=True in it"
        in nb.fails(f"{call}background=1)").evalue
    )
    assert (
        "the function has an argument of that name"
        in nb.fails("nbtrain.run(lambda until: until, until=3, detach=True)").evalue
    )
    assert nb("nbtrain.run(lambda until: until, until=3, devices=2)").value == "3"
    nb(f"run = {call.replace('detach=True, ', '')}until='2s')")
    until(lambda: every_run()[-1].end is not None)
    assert nb("run.state").value == "'stopped'"
    assert (
        "nbtrain.predict returns what it has computed"
        in nb.fails("nbtrain.predict(model, loader, strategy='ddp --detach')").evalue
    )


SCRIPT = f"""
import nbtrain
{START}
def train(model, opt, losses, epochs):
{indent(BODY.format(epochs="epochs", pause=0.02), "    ")}
    return best
if __name__ == "__main__":
    import time
    {TRAIN}; losses = []
    nbtrain.run(train, model, opt, losses, 2, devices=2, detach=True)
    print(nbtrain.run(train, model, opt, losses, 500, devices=2, detach=True, until="6s"))
    print(nbtrain.run(train, model, opt, losses, 1) == min(losses), len(losses))
"""


def test_a_script_hands_over_and_ends(another: Another, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": str(Path(__file__).parents[2])}
    script = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert script.returncode == 0, script.stderr
    assert "nbtrain: the script may end; in a terminal python -m nbtrain runs lists its run" in script.stdout
    assert "<run 2: --devices 2, " in script.stdout
    assert "ranks were stopped" not in script.stdout
    assert "True 6" in script.stdout
    until(lambda: all(run.end is not None for run in every_run()))
    assert [run.state for run in every_run()] == ["done", "stopped"]
    nb = another()
    shown = nb("%distributed attach 1").stdout
    assert "run 1: --devices 2 is done, 6 steps" in shown
    assert nb("print(len(losses), type(model).__name__)").stdout == "6 Sequential\n"


def test_with_its_keeper_it_is_lost_and_is_gone_on_from_its_newest_checkpoint(another: Another, tmp_path: Path) -> None:
    nb = another()
    nb(f"import os; os.chdir({str(tmp_path)!r})")
    nb(MAKE)
    nb(cell(epochs=4, pause=0))
    nb("alone = losses, [p.tolist() for p in model.parameters()]\n%distributed stop")
    nb(MAKE)
    nb(cell("--detach --save-every 2", epochs=4))
    (run,) = every_run()
    (keeper,) = keepers(run)
    until(lambda: list(tmp_path.glob("checkpoints/step-*4")))
    ranks = keeper.children(recursive=True)
    keeper.kill()
    until(lambda: run.state == "lost", 10)
    assert gone_within(15, lambda: [p.pid for p in ranks if p.is_running() and p.status() != "zombie"]) == []
    said = nb("%distributed attach").text
    assert (
        f"is lost: its process was ended, or the machine was. load('{tmp_path}/checkpoints') takes its newest" in said
    )
    assert "lost" in nb("%distributed runs").stdout
    assert "goes on after its checkpoint of step" in nb("%distributed resume").stdout
    nb("%distributed attach")
    same = "alone[1] == [p.tolist() for p in model.parameters()], alone[0][-len(losses):] == losses, len(losses) < 12"
    assert nb(f"print({same})").stdout == "True True True\n"
    nb("%%distributed -d 2 --monitor off --detach --save-every 2\nprint(1 / 0)")
    until(lambda: every_run()[-1].end is not None)
    said = nb.refused("%distributed resume")
    assert "cannot be gone on from, as its loop does not know its place: for epoch in resumable(range(10)): …" in said


def test_a_lost_one_whose_cell_makes_the_optimizer_is_gone_on_from_with_it(another: Another, tmp_path: Path) -> None:
    nb = another()
    nb(f"import os; os.chdir({str(tmp_path)!r}); {MAKE}; del opt")
    made = "opt = torch.optim.Adam(model.parameters(), 0.01)"
    nb(cell("--detach --save-every 2", epochs=4).replace("\n", f"\n{made}\n", 1))
    until(lambda: list(tmp_path.glob("checkpoints/step-*4")))
    (keeper,) = keepers(every_run()[0])
    keeper.kill()
    until(lambda: every_run()[0].state == "lost", 10)
    assert "its checkpoint has Adam, made in its cell" in nb.refused("%distributed resume")
    nb(made)
    assert "goes on after its checkpoint of step" in nb("%distributed resume").stdout
    nb("%distributed attach")
    assert nb("print(int(opt.state_dict()['state'][0]['step']))").stdout == "12\n"


def test_on_a_full_disk_its_result_waits_for_room(another: Another) -> None:
    nb = another()
    nb(MAKE + "; big = nn.Linear(700, 700); opt = torch.optim.SGD(big.parameters(), 0.1); before = big.weight.clone()")
    nb("%%distributed -d 2 --monitor off --detach\nfor x, y in loader:\n    big(x.repeat(1, 175)).sum().backward()\n"
       "    opt.step(); opt.zero_grad(); time.sleep(0.3)")  # fmt: skip
    (run,) = every_run()
    (keeper,) = keepers(run)
    keeper.rlimit(psutil.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    until(lambda: run.waits_for)
    assert run.state == "running"
    assert "it has ended, and its result waits for room: File too large" in nb("%distributed runs").stdout
    shown = nb.kernel.start("%distributed attach")
    nb.kernel.wait_for(lambda: "waits for room" in shown.stdout)
    keeper.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    nb.kernel.wait(shown)
    assert "is done, 3 steps" in shown.stdout
    assert nb("print((before == big.weight).any().item())").stdout == "False\n"


def test_attach_shows_the_dashboard_while_it_goes_on_and_afterwards(another: Another) -> None:
    nb = another()
    nb(MAKE)
    nb(cell("--detach", epochs=500, pause=0.02).replace("--monitor off", "--monitor html"))
    kernel = another().kernel
    shown = kernel.start("%distributed attach")
    kernel.wait_for(lambda: sum("<svg" in data.get("text/html", "") for data in shown.updates) > 1)
    assert "epoch 0" in shown.stdout
    kernel.interrupt()
    kernel.wait_for(lambda: shown.done)
    assert "run 1: --devices 2 --monitor html goes on: %distributed attach 1 shows it again" in shown.text
    both = kernel.start("%distributed attach"), nb.kernel.start("%distributed attach")
    kernel.wait_for(lambda: "epoch 1\n" in both[0].stdout)
    nb.kernel.wait_for(lambda: "epoch 1\n" in both[1].stdout)
    (run,) = every_run()
    keeper_client.ask(run, "stop")
    for one, result in zip((kernel, nb.kernel), both, strict=True):
        one.wait(result)
        lines = [line for line in result.stdout.splitlines() if line.startswith("epoch ")]
        assert lines == [f"epoch {number}" for number in range(len(lines))], "each once, in order"
    assert [result.stdout.count("was stopped after step") for result in both] == [1, 1], "one after the other"
    again = nb("%distributed attach")
    (picture,) = [data["text/html"] for data in again.displays if "text/html" in data]
    assert "stopped" in picture
    assert "charts" in picture
    assert "is home already" in nb("%distributed attach").stdout
    (steps,) = [line for line in both[1].stdout.splitlines() if "was stopped after step" in line]
    assert f"step {nb('print(len(losses))').stdout.strip()}" in steps.replace(",", "")


RESUMABLE = BODY.replace("in range({epochs})", "in resumable(range({epochs}))")


def test_what_is_stopped_is_gone_on_from_in_another_kernel(another: Another) -> None:
    nb = another()
    nb(MAKE)
    nb("%%distributed -d 2 --monitor off" + RESUMABLE.format(epochs=8, pause=0))
    show = (
        "print(repr((losses, [p.tolist() for p in model.parameters()], opt.state_dict()['state'][0]['step'].item())))"
    )
    alone = nb(show).stdout
    nb("%distributed stop")
    nb(MAKE)
    nb(cell("--detach", epochs=8))
    (run,) = every_run()
    until(lambda: " · loss " in nb("%distributed runs").stdout)
    nb("%distributed runs stop 1")
    until(lambda: run.end is not None)
    assert (run.end or {})["how"] == "stopped"
    second = another()
    second(MAKE + "; own = loader; loader = DataLoader(TensorDataset(X + 1, Y), batch_size=16, shuffle=True)")
    assert "loader: not the data that run 1: --devices 2 --monitor off had" in second.refused("%distributed resume")
    second("del loader; weights = [p.tolist() for p in model.parameters()]")
    assert "name 'loader' is not defined" in second.kernel.run("%distributed resume 1").text
    second("loader = own; losses.append(3.0)")
    shown = second.refused("%distributed resume 1")
    assert "losses: the notebook has its own, and run 1: --devices 2 --monitor off cannot go on with that" in shown
    assert (
        second("print(weights == [p.tolist() for p in model.parameters()], 'epoch' in globals())").stdout
        == "True False\n"
    )
    second("del losses, opt")
    nb("del losses, opt")
    asked = nb.kernel.start("%distributed resume 1"), second.kernel.start("%distributed resume 1")
    nb.kernel.wait(asked[0])
    second.kernel.wait(asked[1])
    wins = "run 2 goes on without" in asked[0].text
    second, shown = (nb, asked[0].stdout) if wins else (second, asked[1].stdout)
    assert "run 2 goes on from run 1: --devices 2 --monitor off already: %distributed attach 2" in asked[wins].text
    became = dict(line.removeprefix("nbtrain: ").rpartition(": ")[::2] for line in shown.splitlines())
    became = {name: what for names, what in became.items() for name in names.split(", ")}
    assert (became["losses"], became["opt"], became["model"]) == ("new", "new", "in place"), shown
    assert "run 2 goes on without this notebook" in shown
    assert "yours kept" not in second("%distributed attach 2").stdout, "what the first part of the run has made"
    assert second(show).stdout == alone
    assert "run 2: --devices 2 --monitor off is done" in second.refused("%distributed resume 2")
    counted = BODY.format(epochs=99, pause=0.05).replace("for x, y in loader", "for i, (x, y) in enumerate(loader)")
    second("%%distributed -d 2 --monitor off --until 1s" + counted)
    until(lambda: every_run()[-1].end is not None)
    assert "does not know its place: enumerate would count from 0 again" in second.refused("%distributed resume")


def test_what_was_changed_since_it_came_home_is_gone_on_with(another: Another) -> None:
    nb = another()
    nb(MAKE)
    nb(cell("--detach", epochs=200, pause=0.02))
    (run,) = every_run()
    until(lambda: " · loss " in nb("%distributed runs").stdout)
    nb("%distributed runs stop 1")
    until(lambda: run.end is not None)
    nb("%distributed attach 1")
    nb("opt.param_groups[0]['lr'] = 0.125; losses.clear()")
    shown = nb("%distributed resume 1").stdout
    assert "as the notebook has it, changed since run 1: --devices 2 --monitor off came home" in shown
    changed = shown.partition(": as the notebook")[0]
    assert ("opt" in changed, "losses" in changed, "model" in changed) == (True, True, False), shown
    nb("%distributed runs stop 2")
    until(lambda: every_run()[-1].end is not None)
    nb("%distributed attach 2")
    ends = "import nbtrain; second = nbtrain.detached(2); print(opt.param_groups[0]['lr'], len(losses) <= second.steps)"
    assert nb(ends).stdout == "0.125 True\n"
    nb("opt.param_groups[0]['lr'] = 0.25; del losses")
    shown = nb("%distributed resume 2").stdout
    assert "losses: new" in shown, shown
    assert "opt: as the notebook has it, changed since run 2" in shown
    nb("%distributed runs stop 3")
    until(lambda: every_run()[-1].end is not None)
    assert nb("print(opt.param_groups[0]['lr'], len(losses) > 0)").stdout == "0.25 True\n"
