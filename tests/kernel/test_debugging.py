"""Debugging on ranks: post-mortem, breakpoints, and where each rank is, from the notebook's own input line."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel, Result
from tests.support.notebook import LOOP, TRAIN, Notebook

pytestmark = pytest.mark.kernel

FAILS = """
def step(batch):
    wanted = rank + 40
    if rank == 1:
        raise ValueError('on purpose')
    return barrier()
"""


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    yield made
    made("%distributed stop")


def typed(notebook: Notebook, code: str, *answers: object) -> Result:
    return notebook.kernel.type(code, *answers)  # type: ignore[arg-type]


@pytest.mark.sample("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_post_mortem(notebook: Notebook, strategy: str) -> None:
    notebook(TRAIN + FAILS)
    cell = f"%%distributed -s {strategy} -d 2 --monitor off" + LOOP + "    step(x)\n"
    assert notebook.fails(cell).ename == "ValueError"
    said = typed(
        notebook, "%distributed debug", "p wanted, rank", "up", "p x.shape", "wanted = 1", "down", "a", "w", "l",
        "sum(p.numel() for p in model.parameters())", "pp nobody", "q",
    )  # fmt: skip
    assert said.error is None, said.text
    assert {prompt for prompt, _ in said.prompts} == {"(Pdb, rank 1) "}
    for line in (
        "(41, 1)", "torch.Size([16, 4])", "raise ValueError('on purpose')", "58", "step()", "batch = tensor",
        "NameError: name 'nobody' is not defined", "Cell In[",
    ):  # fmt: skip
        assert line in said.stdout, said.text
    assert "nbtrain/" not in said.text
    assert "IPython" not in said.text
    other = typed(notebook, "%distributed debug 0", "u", "p rank", "q")  # it was stopped where it waited
    assert "0\n" in other.stdout
    assert "(Pdb, rank 0) " in other.text
    again = typed(notebook, "%debug", "p wanted", "c")
    assert "41\n" in again.stdout
    notebook(f"%%distributed -s {strategy} -d 2 --monitor off" + LOOP)
    assert "there is nothing to debug" in notebook("%distributed debug").stdout
    assert "nothing to debug on rank 1" in notebook("%distributed debug 1").stdout
    assert "there is no rank 2; there are 0 to 1" in notebook.refused("%distributed debug 2")


@pytest.mark.thorough
def test_leaving_a_post_mortem(notebook: Notebook) -> None:
    """By Stop, also while an expression is evaluated; without an input line; after the rank's death."""
    notebook(FAILS)
    assert "there is nothing to debug" in notebook("%distributed debug").stdout
    failing = "%%distributed -d 2 --monitor off\nstep(1)"
    notebook.fails(failing)
    left = typed(notebook, "%distributed debug", "p wanted", notebook.kernel.interrupt)
    assert left.error is None, left.text
    assert left.stdout.rstrip().endswith("41"), left.text
    busy = notebook.kernel
    pids = notebook.pids()

    def interrupted() -> None:
        busy.client.input("import time; time.sleep(60)")
        time.sleep(0.5)
        busy.interrupt()

    began = time.monotonic()
    slow = typed(notebook, "%distributed debug", interrupted, "p wanted + 1", "q")
    assert time.monotonic() - began < 20
    assert "KeyboardInterrupt" in slow.text
    assert "42\n" in slow.stdout
    assert "cannot ask for input" in notebook.refused("%distributed debug")  # `run` allows no stdin
    assert notebook.pids() == pids
    refused = typed(notebook, "%distributed debug 1", "reduce(1)", "import torch", "torch.distributed.barrier()", "q")
    assert "barrier needs every rank" in refused.text, refused.text
    assert "reduce needs every rank" in refused.text, refused.text
    dead = typed(notebook, "%distributed debug", lambda: os.kill(pids[1], signal.SIGKILL))
    assert dead.error is None, dead.text
    assert "rank 1" in dead.stdout
    assert "SIGKILL" in dead.stdout
    assert "its frames with it" in dead.stdout
    assert "2\n" in notebook("%%distributed -d 2 --monitor off\nprint(world_size)").stdout


@pytest.mark.thorough
def test_names_of_the_cell_itself(notebook: Notebook) -> None:
    """No step was taken, so the ranks have dropped what the cell made: the debugger has it all the same."""
    notebook("given = [1, 2]")
    notebook.fails("%%distributed -d 2 --monitor off\nmade = sum(given) + rank\ngiven.append(made)\n1 / 0")
    assert "(4, [1, 2, 4])" in typed(notebook, "%distributed debug 1", "made, given", "made = 0", "new = 1", "q").stdout
    again = typed(notebook, "%distributed debug 1", "made, given", "new", "q").stdout
    assert "(4, [1, 2, 4])" in again
    assert "NameError: name 'new'" in again
    shown = notebook("%%distributed -d 2 --monitor off\nprint(given, [name in globals() for name in ('made', 'new')])")
    assert "[1, 2] [False, False]" in shown.stdout


def test_what_a_failed_cell_holds_is_free_at_the_next(notebook: Notebook) -> None:
    notebook("import weakref, gc\nclass Big: pass\n")
    notebook.fails(
        "%%distributed -d 2 --monitor off\ndef f():\n    big = Big(); __builtins__.seen = weakref.ref(big); 1/0\nf()"
    )
    shown = notebook("%%distributed -d 2 --monitor off --output all\nprint(__builtins__.seen())")
    assert shown.stdout.count("None") == 2


def test_a_breakpoint_steps_through_the_cell(notebook: Notebook) -> None:
    """All ranks reach it together: one asks, the others wait, and that is no hang."""
    notebook(TRAIN)
    cell = """%%distributed -d 2 --monitor off --hang-after 0.5
seen = 1
breakpoint()
seen = 2
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
seen = reduce(seen)"""
    notebook("%%distributed -d 2 --monitor off\nmodel, opt, loader")
    began = time.monotonic()
    shown = typed(
        notebook, cell, "p seen", "n", "n", "p seen", "n", "p x.shape", "n", "p loss.item() > 0", "s", "w",
        lambda: (time.sleep(1.5), notebook.kernel.client.input("c")),
    )  # fmt: skip
    assert shown.error is None, shown.text
    assert shown.prompts[0][1] - began < 1  # on a quiet machine a tenth of it
    assert {prompt for prompt, _ in shown.prompts} == {"(Pdb, rank 0) "}
    assert "> Cell In[" in shown.stdout
    assert "-> breakpoint()" in shown.stdout
    assert "-> seen = 2" in shown.stdout
    assert "-> for x, y in loader:" in shown.stdout
    assert "torch.Size([16, 4])" in shown.stdout
    assert "True\n" in shown.stdout
    assert "--Call--" in shown.stdout
    assert "backward()" in shown.stdout
    assert "hang-after" not in shown.text
    assert "nbtrain/" not in shown.text
    assert notebook("opt.state[model[0].weight]['step'], seen").value == "(tensor(3.), 2.0)"


TALKS = "x = 10 * rank\n{}\nprint('rank', rank, 'went on')\ntotal = reduce(rank)"


@pytest.mark.parametrize(
    ("stops", "option", "ranks"),
    [
        ("breakpoint()", "", [0]),
        ("if rank == 1: breakpoint()", "", [1]),
        ("import pdb; pdb.set_trace()", "--debug-ranks 1", [1]),
        ("from pdb import set_trace; set_trace()", "", [0]),
        ("import ipdb; ipdb.set_trace()", "", [0]),
        ("from IPython.core.debugger import set_trace\nif rank == 1: set_trace()", "", [1]),
        ("torch.distributed.breakpoint(1)", "", [1]),
        ("for turn in range(3): torch.distributed.breakpoint(skip=2)", "", [0]),
        ("breakpoint()", "--debug-ranks all", [0, 1]),
        ("if x > 5: breakpoint()", "-d 3", [1]),
        ("if rank == 0: barrier(); breakpoint()\nelse: barrier()\nif rank == 1: breakpoint()", "", [0, 1]),
    ],
)
def test_which_ranks_ask_at_a_breakpoint(notebook: Notebook, stops: str, option: str, ranks: list[int]) -> None:
    answers = [answer for _ in ranks for answer in ("p 'I am', rank", "c")]
    cell = f"%%distributed -d 2 {option} --monitor off --output all\n" + TALKS.format(stops)
    cell = cell.replace("-d 2 -d 3", "-d 3")
    shown = typed(notebook, cell, *answers)
    assert shown.error is None, shown.text
    asked = [prompt for prompt, _ in shown.prompts]
    assert sorted(asked) == sorted(f"(Pdb, rank {rank}) " for rank in ranks for _ in range(2))
    assert all(one == other for one, other in zip(asked[::2], asked[1::2], strict=True))  # one after another
    for rank in ranks:
        assert f"('I am', {rank})" in shown.stdout
    assert shown.stdout.count("went on") == (3 if "3" in option else 2)


@pytest.mark.thorough
def test_a_rank_that_needs_another_which_stands_at_a_breakpoint(notebook: Notebook) -> None:
    """`n` over a collective: the other rank asks next."""
    cell = "%%distributed -d 2 --debug-ranks all --monitor off\nbreakpoint()\ntotal = reduce(rank)\ntotal"
    shown = typed(notebook, cell, "n", "n", "c", "p total", "c")
    assert shown.error is None, shown.text
    assert [prompt[11] for prompt, _ in shown.prompts] == ["0", "0", "1", "0", "0"]
    assert "-> total\n" in shown.stdout


@pytest.mark.parametrize("how", ["q", "Stop"])
def test_quitting_at_a_breakpoint_stops_the_cell(notebook: Notebook, how: str) -> None:
    notebook(TRAIN + "\nseen = []")
    answer = "q" if how == "q" else notebook.kernel.interrupt
    began = time.monotonic()
    cell = "%%distributed -d 2 --monitor off\nseen.append(1)\nbreakpoint()\nseen.append(2)" + LOOP
    early = typed(notebook, cell, answer)
    assert early.error is not None
    assert early.error.ename == "KeyboardInterrupt"
    assert "stopped" in early.error.evalue
    pids = notebook.pids()
    cell = "%%distributed -d 2 --monitor off\nfor epoch in range(200):\n  for x, y in loader:\n    " + (
        "F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()\n    if epoch == 1: breakpoint()"
    )
    late = typed(notebook, cell, "p epoch", "n", answer)
    assert late.error is not None
    assert late.error.ename == "KeyboardInterrupt"
    assert "what the cell did until then is in the notebook" in late.error.evalue
    assert time.monotonic() - began < 30
    steps = notebook("int(opt.state[model[0].weight]['step'])").value
    assert steps in ("4", "5"), steps
    assert notebook.pids() == pids
    notebook("%%distributed -d 2 --monitor off" + LOOP)
    assert notebook("int(opt.state[model[0].weight]['step'])").value == str(int(steps) + 3)
    assert notebook("2 not in seen").value == "True"


@pytest.mark.thorough
def test_without_an_input_line_a_breakpoint_is_passed_over(notebook: Notebook) -> None:
    shown = notebook("%%distributed -d 2 --monitor off\nfor i in range(30):\n    breakpoint()\nprint('through')")
    assert shown.stdout.count("is passed over") == 1
    assert "cannot ask for input" in shown.stdout
    assert "through" in shown.stdout
    notebook("%%distributed -d 2 --background --monitor off\nbreakpoint()\nx = 1")
    refused = notebook.kernel.run("import nbtrain; nbtrain.background().wait()")
    assert "leave --background out" in refused.text


@pytest.mark.thorough
def test_a_rank_dies_while_it_asks(notebook: Notebook) -> None:
    notebook("%%distributed -d 2 --monitor off\npass")
    pids = notebook.pids()
    began = time.monotonic()
    cell = "%%distributed -d 2 --monitor off\nif rank == 1: breakpoint()\nbarrier()"
    died = typed(notebook, cell, "p rank", lambda: os.kill(pids[1], signal.SIGKILL))
    assert died.error is not None
    assert died.error.ename == "RankDied"
    assert "SIGKILL" in died.error.evalue
    assert time.monotonic() - began < 15
    assert "went\n" in notebook("%%distributed -d 2 --monitor off\nprint('went')\nbarrier()").stdout


@pytest.mark.thorough
def test_stepping_past_the_end_of_the_cell(notebook: Notebook) -> None:
    notebook("def half(x):\n    breakpoint()\n    return x / 2")
    cell = "%%distributed -d 1 --monitor off\ny = half(3)\nz = y + 1"
    shown = typed(notebook, cell, "w", "p x", "n", "n", "n", "p y", "n")
    assert shown.error is None, shown.text
    assert "-> return x / 2" in shown.stdout
    assert "--Return--" in shown.stdout
    assert "-> z = y + 1" in shown.stdout
    assert "1.5\n" in shown.stdout
    assert "IPython" not in shown.text
    assert notebook("z").value == "2.5"
    assert notebook("%%distributed -d 1 --monitor off\nimport sys\nprint(sys.gettrace())").stdout == "None\n"


@pytest.mark.thorough
def test_inprocess(notebook: Notebook) -> None:
    """ipykernel's own hook passes breakpoints over while no debugger is attached."""
    notebook("import sys; hook = sys.breakpointhook\ndef f(x):\n    breakpoint()\n    return x + 1")
    cell = "%%distributed --engine inprocess --monitor off\na = 1\nbreakpoint()\na = 2\nb = f(a)"
    shown = typed(notebook, cell, "p a", "n", "p a", "c", "p x", "c")
    assert shown.error is None, shown.text
    assert [line for line in shown.stdout.splitlines() if line in ("1", "2")] == ["1", "2", "2"]
    assert notebook("a, b, sys.breakpointhook is hook, sys.gettrace()").value == "(2, 3, True, None)"
    left = typed(notebook, cell, "q")
    assert left.error is not None
    assert left.error.ename == "KeyboardInterrupt"
    end = typed(notebook, cell, "n", "n", "n", "n", "n")  # past the end of the cell
    assert end.error is None, end.text
    assert notebook("sys.gettrace()").value is None
    assert "breakpoint() is passed over" in notebook(cell).stdout
    attached = "import debugpy; debugpy.is_client_connected = lambda: True\n"
    notebook(attached)
    kept = notebook("%%distributed --engine inprocess --monitor off\nprint(sys.breakpointhook is hook)")
    assert "True\n" in kept.stdout


def test_where_with_locals(notebook: Notebook) -> None:
    notebook(TRAIN + "\nclass Own:\n    def __repr__(self): raise RuntimeError\nown = Own()")
    code = """
import time
def wait(batch, names):
    small, text, many, held = rank * 2, 'x' * 500, list(range(100)), own
    print('epoch 0', flush=True)
    for _ in range(600):
        time.sleep(0.05)
for x, y in loader:
    wait(x, {'a': y}) if rank == 1 else (print('epoch 0'), barrier())
"""
    run = notebook.in_background(code)
    time.sleep(0.5)
    shown = notebook("%distributed where --locals").stdout
    assert "rank 0:\n" in shown
    _, _, second = shown.partition("rank 1:\n")
    assert ", in wait\n" in second, shown
    for line in (
        "small = 2",
        "batch = Tensor (16, 4) float32 cpu",
        "names = {'a': Tensor (16,) int64 cpu}",
        "held = <Own>",
    ):
        assert f"      {line}\n" in second, shown
    assert "x = Tensor (16, 4) float32 cpu" in shown
    assert max(map(len, shown.splitlines())) < 220
    assert "in wait" in notebook("%distributed where").stdout
    assert " = Tensor" not in notebook("%distributed where").stdout
    notebook.kernel.run("import nbtrain; nbtrain.background().kill()")
    notebook.kernel.wait(run)
    assert "--locals is for %distributed where" in notebook.refused("%%distributed --locals\n1")
    notebook("%%distributed -d 2 --monitor off\npass")
    assert "no cell runs" in notebook("%distributed where --locals").stdout


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed --stage 2"])
def test_detect_anomaly_names_the_line_of_the_forward(notebook: Notebook, strategy: str) -> None:
    notebook(TRAIN)
    loss = "out = model(x)\n    bad = torch.sqrt(-1 - out * out)\n    loss = bad.sum()"
    loop = LOOP.replace("loss = F.cross_entropy(model(x), y)", loss)
    shown = notebook.kernel.run(f"%%distributed -s {strategy} -d 2 --monitor off --detect-anomaly{loop}")
    assert shown.error is not None
    assert "SqrtBackward0' returned nan values" in shown.error.evalue
    told = shown.text[shown.text.index("Error detected in SqrtBackward0.") :].splitlines()
    assert re.fullmatch(r"  Cell In\[\d+\], line 4, in <module>", told[1])
    assert told[2] == "    bad = torch.sqrt(-1 - out * out)"
    assert "IPython" not in shown.text
    notebook(f"%%distributed -s {strategy} -d 2 --monitor off{loop}")  # not any more


@pytest.mark.thorough
def test_profile(notebook: Notebook) -> None:
    notebook(TRAIN + "\nimport json; loader = DataLoader(data, batch_size=8)")
    shown = notebook("%%distributed -d 2 --monitor off --profile 2" + LOOP)
    assert "profile of 2 steps on 2 ranks: nbtrain-output/trace-In" in shown.stdout
    assert "operator" in shown.stdout
    assert "PythonDispatchMode" not in shown.stdout  # nbtrain counts no operations meanwhile
    assert "waited for other ranks: rank 0 " in shown.stdout
    rows = [line for line in shown.stdout.splitlines() if line.startswith(("aten::", "gloo", "Optimizer", "auto"))]
    assert 3 < len(rows) <= 10
    path = shown.stdout.split("on 2 ranks: ")[1].split()[0]
    notebook(f"trace = json.load(open({path!r}))['traceEvents']")
    assert notebook("sorted({event['pid'] for event in trace})").value == "[0, 1]"
    names = "sorted(event['args']['name'] for event in trace if event['name'] == 'process_name')"
    assert notebook(names).value == "['rank 0', 'rank 1']"
    layers = "[sum(e['pid'] == r and e['name'] == 'aten::linear' for e in trace) for r in (0, 1)]"
    assert notebook(layers).value == "[4, 4]"  # two layers, two steps
    short = notebook("%%distributed -d 2 --monitor off --profile 2\nx = 1")
    assert "ended before its second step" in short.stdout
    assert "--profile" in notebook.refused("%distributed --profile 2")
