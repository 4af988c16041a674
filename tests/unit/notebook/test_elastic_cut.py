"""Where the cell of an elastic run goes on."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch

from nbtrain.base.errors import UsageError
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.run.elastic_cell import check_loops, cut
from nbtrain.notebook.run.elastic_run import GoesOn, Stretches

CELL = """\
import time
losses = []
for epoch in resumable(range(3)):
    losses.append(epoch)
losses.append(-1)
for x in resumable(loader):
    losses.append(time)
"""


def cell(code: str) -> Cell:
    return Cell(source=code, code=code, filename="<cell>", first_line=1, number=1)


def at(code: str, ordinal: int, reads: tuple[str, ...], **namespace: Any) -> tuple[str, int]:
    place = pickle.dumps([{"ordinal": ordinal, "index": 1}])
    found = cut(cell(code), place, lambda one: Captured(hard=reads), namespace)
    return found.cell.code.strip(), found.line


@pytest.mark.parametrize(("ordinal", "line"), [(0, 3), (1, 6)])
def test_what_stands_before_the_loop_is_not_done_again(ordinal: int, line: int) -> None:
    code, found = at(CELL, ordinal, ("losses", "loader", "time"), losses=[], loader=[], time=1)
    assert found == line
    assert code.startswith(CELL.splitlines()[line - 1])


def test_lines_keep_their_numbers() -> None:
    found = cut(cell(CELL), pickle.dumps([{"ordinal": 1, "index": 0}]), lambda one: Captured(), {})
    assert found.cell.code.splitlines()[found.line - 1] == "for x in resumable(loader):"
    assert pickle.loads(found.place) == [{"ordinal": 0, "index": 0}]  # it is the first loop of what is left


def test_ranks_that_change_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place is one in what the ranks were running, which is the end of the cell after the first change."""
    run = RunSpec(pool=PoolSpec(devices=("cpu",) * 2), save_to="nowhere")
    monkeypatch.setattr(Stretches, "_pool_now", lambda self: self.run.pool)
    names = {"losses": [], "loader": [], "time": 1}
    stretches = Stretches(run, cell(CELL), names, lambda one: Captured(hard=tuple(names)))
    for ordinal, index in ((1, 2), (0, 5)):
        stretches.go_on(GoesOn("a machine has joined", 3, pickle.dumps([{"ordinal": ordinal, "index": index}])))
        assert stretches.cell.code.strip().startswith("for x in resumable(loader):")
        assert stretches.run.resume is not None
        assert pickle.loads(stretches.run.resume[1]) == [{"ordinal": 0, "index": index}]
    stretches.go_on(GoesOn("rank 1 died", 0, None))
    assert stretches.cell.code.strip().startswith("for x in resumable(loader):"), "where it was at the last change"


def test_what_has_not_come_home_is_made_again() -> None:
    assert at(CELL, 0, ("losses", "time"), losses=[]) == (CELL.strip(), 0)


def test_what_the_body_sets_anew_in_the_middle_of_an_item_is_told() -> None:
    code = "for e in resumable(range(3)):\n    total = 0\n    for x in loader:\n        total += x"
    place = [{"ordinal": 0, "index": 1, "loaders": [{"seen": 4}]}]
    assert cut(cell(code), pickle.dumps(place), lambda one: Captured(), {}).anew == ("total",)
    place[0]["loaders"] = [{"seen": 0}]
    assert cut(cell(code), pickle.dumps(place), lambda one: Captured(), {}).anew == ()


def test_what_counts_a_batch_before_its_backward_is_told() -> None:
    above, below = "n += 1; seen[x] = 1; a.append(x)", "b.append(x); opt.step(); m += 1"
    train = f"{above}\n        loss = f(x)\n        loss.backward(); {below}"
    loops = f"    for x in loader:\n        {train}\n    for x in others:\n        c.append(x)"
    code = f"for e in resumable(range(3)):\n{loops}"
    found = cut(cell(code), pickle.dumps([{"ordinal": 0, "index": 1}]), lambda one: Captured(), {})
    assert found.counted == ("a", "n", "seen")


def fit() -> None:
    for _ in resumable(range(3)):  # type: ignore[name-defined]  # noqa: F821
        pass


@pytest.mark.parametrize(("code", "said"), [
    ("for x in loader: pass", "for epoch in resumable"),
    ("fit()", "in the cell itself"),
    ("if 1:\n    for i in resumable([1]): pass", "in the cell itself"),
    ("for e in resumable(range(3)):\n    for i, x in enumerate(loader): pass", "step += 1 in it"),
    ("for i, x in enumerate(resumable(loader)): pass", "step += 1 in it"),
    ("for e in resumable(range(3)):\n    x = next(it)", "for x, y in loader"),
    ("s = DistributedSampler(d)\nfor x in resumable(DataLoader(d, sampler=s)): pass", "leave it out"),
    ("for e in resumable(range(3)):\n    for x in loader:\n        if e: opt.step()", "--accumulate K"),
])  # fmt: skip
def test_what_cannot_go_on_as_if_nothing_had_been_is_refused(code: str, said: str) -> None:
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    with pytest.raises(UsageError, match=re.escape(said)):
        check_loops(cell(code), Captured(hard=("fit",) if "fit" in code else ()), {"fit": fit, "opt": opt})


def test_what_can_is_not() -> None:
    check_loops(cell(CELL), Captured(), {})
    nested = "for e in resumable(range(3)):\n    for x in resumable(loader): pass\n    if e: sched.step()"
    check_loops(cell(nested), Captured(), {"sched": object()})
