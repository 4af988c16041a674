"""Which batch is said, which variables are a loop's, and how a tensor of another device is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbtrain.base.events import Failed
from nbtrain.notebook.report import error_hints
from nbtrain.notebook.report.cell_report import loop_variables
from nbtrain.worker.data.batch_dealing import batch_notes
from nbtrain.worker.parts import Deal


@pytest.mark.parametrize(("code", "found"), [
    ("for x, y in z: pass", {"x", "y"}),
    ("x = 1\nfor x in z: pass", set()),
    ("for i in z:\n    for x in i:\n        x = x + i; s = x", {"i", "x"}),
    ("for d['a'] in z: pass", set()),
    ("def f():\n    for x in z: pass", set()),
    ("[x for x in z]", set()),
    ("for x in z: pass\nwith a as x: pass", set()),
    ("for x in", set()),
    ("if a:\n    for x in z:\n        y = 1\nfor x in w: pass", {"x"}),
])  # fmt: skip
def test_which_variables_are_a_loops(code: str, found: set[str]) -> None:
    assert loop_variables(code) == found


def loader(size: int, **how: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8.0)), size, **how)


TRAINS = {"train": loader(2, shuffle=True), "opt": torch.optim.SGD([torch.ones(1)])}


@pytest.mark.parametrize(("objects", "notes"), [
    (TRAINS, ["batch 2 × 2 = 4"]),
    (TRAINS | {"held_out": loader(4)}, ["batch 2 × 2 = 4"]),
    (TRAINS | {"train": loader(2), "held_out": loader(2)}, ["batch 2 × 2 = 4"]),
    (TRAINS | {"train": loader(2), "held_out": loader(4)},
     [f"batch {size} × 2 = {2 * size} where it trains" for size in (2, 4)]),
    ({"held_out": loader(4)}, ["batch 4 × 2 = 8 where it trains"]),
], ids=["one", "train and validation", "of one size", "none shuffles", "an evaluation"])  # fmt: skip
def test_the_batch_of_a_step_is_said_of_loaders_that_train(objects: dict[str, Any], notes: list[str]) -> None:
    """A loop that evaluates sees its loader's own batches on every rank."""
    assert batch_notes(objects, Deal(index=0, count=2), 1, "ranks") == notes


@pytest.mark.parametrize("text", [
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
])  # fmt: skip
def test_a_tensor_on_another_device_is_told_how_to_be_made(text: str) -> None:
    failed = Failed(rank=0, time=0.0, name="RuntimeError", text=text, lines=())
    said = error_hints.hint(failed, {}, (), None)  # type: ignore[arg-type]
    assert "register_buffer" in said
    assert "type_as" in said


@pytest.mark.parametrize(("line", "text", "names", "writes", "said"), [
    ("log(loss=loss)", "log() takes no keyword arguments", ["log"], (), "`del log` gives nbtrain's."),
    ("log(loss=loss)", "'int' object is not callable", ["log"], (), "log is the notebook's own here; `del log`"),
    ("x = reduce(loss)", "'int' object is not callable", ["reduce"], (), "`del reduce` gives nbtrain's."),
    ("log(loss=loss)", "log() takes no keyword arguments", [], (), "log is the cell's own here"),
    ("log(loss=loss)", "'int' object is not callable", [], {"log"}, "log is the cell's own here"),
    ("log(loss=fit(x))", "'int' object is not callable", ["fit"], (), ""),
    ("math.log(loss=loss)", "math.log() takes no keyword arguments", ["log"], (), ""),
    ("log(loss=a + b)", "unsupported operand type(s) for +: 'int' and 'str'", ["log"], (), ""),
])  # fmt: skip
def test_a_name_that_hides_nbtrain_s_is_said(
    line: str, text: str, names: list[str], writes: set[str], said: str
) -> None:
    shown = f"Cell In[5], line 2\n      1 %%distributed -d 2\n----> 2 {line}"
    failed = Failed(rank=0, time=0.0, name="TypeError", text=text, lines=(shown,))
    found = error_hints.hint(failed, dict.fromkeys(names, 3), (), None, writes)  # type: ignore[arg-type]
    assert said in found
    assert bool(said) == bool(found)
