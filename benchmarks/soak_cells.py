"""What the soak does to a notebook: each act is a few cells, and checks what they left behind.

    for name, act in cycle(dice):
        act(notebook, dice)

Two cells in three are texts that the kernel has never seen, as with somebody who edits and runs again.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Iterator

from tests.support.kernels import Error, Kernel, Result

RANKS = 4
THE_ONE_THAT_DIES = 3
"""Always the same: the others are as old as the soak, and show what stays."""

START = f"""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist, time, gc, os, ctypes, sys, linecache
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
X = torch.randn(256, 16); Y = (X.sum(1) > 0).long()
data = TensorDataset(X, Y)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
opt = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(data, batch_size=8, shuffle=True)
done = [0]
%distributed --devices {RANKS} --monitor off
"""
STANDARD = "%%distributed\nF.cross_entropy(model(X[:8]), Y[:8]).backward(); opt.step(); opt.zero_grad(); done[0] += 1"


class Notebook:
    """One kernel, and how its cells are run."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.cells = 0
        self.ran: list[tuple[str, Result]] = []
        """texts of cells, and what they have shown; whoever has seen them empties it"""

    def __call__(self, code: str) -> Result:
        result = self.run(self._text(code))
        if result.error is not None:
            raise RuntimeError(f"{code}\n{result.text}")
        return result

    def run(self, text: str) -> Result:
        """As it stands there."""
        return self.kernel.wait(self._start(text), timeout=120)

    def fails(self, code: str) -> Error:
        error = self.run(self._text(code)).error
        if error is None:
            raise RuntimeError(f"this should have raised:\n{code}")
        return error

    def begun(self, code: str, until: str) -> Result:
        """A cell that has said this, and goes on."""
        result = self._start(self._text(code))
        self.kernel.wait_for(lambda: until in result.text or result.done, timeout=120)
        if result.done:
            raise RuntimeError(f"it ended:\n{code}\n{result.text}")
        return result

    def ended(self, result: Result) -> Error:
        error = self.kernel.wait(result, timeout=120).error
        if error is None:
            raise RuntimeError(f"this should have raised:\n{result.text}")
        return error

    def value(self, expression: str) -> str:
        return self(f"print({expression})").stdout.strip()

    def pids(self) -> dict[int, int]:
        """rank → its process"""
        shown = self("%distributed status").stdout
        return {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+):.* process (\d+)", shown)}

    def _text(self, code: str) -> str:
        return code if (self.cells + 1) % 3 == 0 else f"{code}\n# {self.cells + 1}"

    def _start(self, text: str) -> Result:
        self.cells += 1
        result = self.kernel.start(text)
        self.ran.append((text, result))
        return result


def ddp(nb: Notebook, dice: random.Random) -> None:
    before = int(nb.value("done[0]"))
    nb("%%distributed -s ddp\nfor x, y in loader:\n"
       "    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad(); done[0] += 1")  # fmt: skip
    steps = 256 // 8 // RANKS
    assert int(nb.value("done[0]")) == before + steps


def by_hand(nb: Notebook, dice: random.Random) -> None:
    nb("%%distributed -s none\nfor i in range(4):\n"
       "    F.cross_entropy(model(X[rank::world_size]), Y[rank::world_size]).backward()\n"
       "    for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= world_size\n"
       "    opt.step(); opt.zero_grad()\n    done[0] += 1")  # fmt: skip


def some_ranks(nb: Notebook, dice: random.Random) -> None:
    chosen = sorted(dice.sample(range(RANKS), dice.randint(1, 2)))
    nb(f"%%rank {','.join(map(str, chosen))}\nonly_here = [rank, float(model(X).sum())]")
    assert int(nb.value("only_here[0]")) == chosen[0]
    nb("del only_here")


def evaluation(nb: Notebook, dice: random.Random) -> None:
    nb("%%distributed\nwith torch.no_grad():\n"
       "    right = reduce(sum(float((model(x).argmax(1) == y).sum()) for x, y in loader), 'sum')")  # fmt: skip
    assert 0 <= float(nb.value("float(right)")) <= 256


def new_names(nb: Notebook, dice: random.Random) -> None:
    size = dice.choice([10, 10_000, 1_000_000])
    nb(f"%%distributed\nfresh = {{'a': torch.ones({size}), 'b': list(range(100))}}; other = torch.zeros({size // 2})\n"
       "view = other[1:3]")  # fmt: skip
    assert int(nb.value("int(fresh['a'].sum())")) == size
    nb("%%distributed\nfresh['a'] += 1; fresh['c'] = fresh['a'] * 2")
    nb("del fresh, other, view")


def kept(nb: Notebook, dice: random.Random) -> None:
    nb("%%distributed --keep big\nbig = [torch.full((1000, 50), float(rank)) for _ in range(10)]")
    nb("%%distributed\ntotal = float(sum(b.sum() for b in big))")
    assert nb.value("len(big.pull()), len(big.per_rank())") == f"10 {RANKS}"
    nb("del big" if dice.random() < 0.5 else "big = big.pull()\ndel big")


def classes(nb: Notebook, dice: random.Random) -> None:
    """Defined anew each time, used on the ranks, and dropped."""
    nb("class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.f = nn.Linear(16, 2)\n"
       "    def forward(self, x): return self.f(x)\n"
       "def step(net, o):\n    F.cross_entropy(net(X), Y).backward(); o.step(); o.zero_grad()\n"
       "net = Net(); o = torch.optim.SGD(net.parameters(), 0.1)")  # fmt: skip
    nb("%%distributed\nfor i in range(3): step(net, o)")
    if dice.random() < 0.5:
        nb("%%distributed\nclass There(nn.Module):\n    def forward(self, x): return x * 2\nthere = There()")
        assert nb.value("type(there).__name__") == "There"
        nb("del There, there")
    nb("del net, o, Net, step")


def edits(nb: Notebook, dice: random.Random) -> None:
    """Between two cells the notebook changes what the ranks hold."""
    nb("with torch.no_grad(): model[0].weight.mul_(0.999)")
    nb(STANDARD)
    if dice.random() < 0.3:
        nb("model[2] = nn.Linear(64, 2); opt = torch.optim.AdamW(model.parameters(), 1e-3)")
    else:
        nb("opt.param_groups[0]['lr'] *= 0.999; X += 0")
    nb(STANDARD)


def prints(nb: Notebook, dice: random.Random) -> None:
    lines = dice.choice([10, 1000])
    shown = nb(f"%%distributed\nfor i in range({lines}): print('line', i, 'of', rank)\nos.system('echo from a shell')")
    assert f"line {lines - 1} of 0" in shown.stdout
    nb("%%distributed --output all\nprint('x' * 1000)\nprint(rank, file=sys.stderr)")


def workers(nb: Notebook, dice: random.Random) -> None:
    nb("%%distributed\nfor x, y in DataLoader(data, batch_size=16, num_workers=1):\n"
       "    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()\n    done[0] += 1")  # fmt: skip


def one_raises(nb: Notebook, dice: random.Random) -> None:
    """Its peers wait for it."""
    before = nb.value("done[0]")
    guilty = dice.randrange(RANKS)
    error = nb.fails(f"%%distributed\nF.cross_entropy(model(X), Y).backward(); opt.step(); done[0] += 1\n"
                     f"if rank == {guilty}: raise ValueError('no')\nbarrier()")  # fmt: skip
    assert error.ename == "ValueError", error
    assert nb.value("done[0]") == before


def recovered(nb: Notebook, dice: random.Random) -> None:
    before = int(nb.value("done[0]"))
    nb.fails("%%distributed\nfor i in range(5):\n    F.cross_entropy(model(X[:8]), Y[:8]).backward()\n"
             "    opt.step(); opt.zero_grad(); done[0] += 1\n1 / 0")  # fmt: skip
    nb("%distributed recover")
    assert int(nb.value("done[0]")) == before + 5


def stopped(nb: Notebook, dice: random.Random) -> None:
    nb("count = [0]")
    running = nb.begun("%%distributed\nwhile True:\n"
                       "    F.cross_entropy(model(X[:8]), Y[:8]).backward(); opt.step(); opt.zero_grad()\n"
                       "    done[0] += 1; count[0] += 1; time.sleep(0.002)\n"
                       "    if count[0] == 3: print('going')", "going")  # fmt: skip
    nb.kernel.interrupt()
    assert nb.ended(running).ename == "KeyboardInterrupt"
    assert int(nb.value("count[0]")) >= 3


def killed(nb: Notebook, dice: random.Random) -> None:
    before = nb.value("done[0]")
    victim = nb.pids()[THE_ONE_THAT_DIES]
    running = nb.begun("%%distributed\nprint('going')\ndone[0] += 1\nwhile True: time.sleep(0.05); barrier()", "going")
    os.kill(victim, signal.SIGKILL)
    assert nb.ended(running).ename == "RankDied"
    assert nb.value("done[0]") == before
    nb(STANDARD)
    assert nb.pids()[THE_ONE_THAT_DIES] != victim


def looks(nb: Notebook, dice: random.Random) -> None:
    nb("%distributed where")
    nb("%distributed check")
    nb("from IPython.display import display")
    nb("%%distributed\nfrom IPython.display import display\ndisplay({'a': 1})\ndone")


ACTS: dict[str, tuple[Callable[[Notebook, random.Random], None], int]] = {
    "training under ddp": (ddp, 3),
    "training by hand": (by_hand, 1),
    "a cell on some ranks": (some_ranks, 1),
    "evaluation": (evaluation, 1),
    "new names, dropped again": (new_names, 2),
    "objects that stay on the ranks": (kept, 1),
    "classes and functions defined anew": (classes, 1),
    "edits in the notebook": (edits, 2),
    "printing": (prints, 1),
    "loader workers": (workers, 1),
    "an error on one rank": (one_raises, 1),
    "recover": (recovered, 1),
    "Stop": (stopped, 1),
    "a rank is killed": (killed, 1),
    "where, check, display": (looks, 1),
}
"""name → what to do, how often in a cycle"""


def cycle(dice: random.Random) -> Iterator[tuple[str, Callable[[Notebook, random.Random], None]]]:
    """All of them, in a random order."""
    todo = [(name, act) for name, (act, often) in ACTS.items() for _ in range(often)]
    dice.shuffle(todo)
    return iter(todo)
