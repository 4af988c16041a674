"""A tensor that comes to show another part of its memory, or shows it otherwise: all that share it see the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.sides import Sides, namespace, run

ROW = "z = torch.arange(6.); x = z[:3]"
SQUARE = "z = torch.arange(9.).view(3, 3); x = z[:]"
COMPLEX = "z = torch.complex(torch.arange(3.), torch.ones(3)); x = z[:]"
LARGE = "z = torch.arange(90000.).view(300, 300); x = z[:]"
EDITS = {
    "other rows": (ROW, "x.data = z[3:]"),
    "every second": (ROW, "x.data = z[::2]"),
    "fewer": (ROW, "x.data = z[4:]"),
    "set_": (ROW, "x.set_(z.untyped_storage(), 3, (3,), (1,))"),
    "as_strided_": (ROW, "x.as_strided_((3,), (1,), 2)"),
    "another type": (ROW, "x.data = z.view(torch.int32)[:3]"),
    "t_": (SQUARE, "x.t_()"),
    "transposed": (SQUARE, "x.data = z.t()"),
    "swapaxes_": (SQUARE, "x.swapaxes_(0, 1)"),
    "conjugated": (COMPLEX, "x.data = x.conj()"),
    "negated": (ROW, "x.data = torch._neg_view(x)"),
    "imaginary": (COMPLEX.replace("z[:]", "z.real"), "x.data = z.imag"),
    "a large one": (LARGE, "x.data = z.t()"),
    "written before": (ROW, "x.add_(10); x.data = z[3:]"),
    "and back": (SQUARE, "x.t_(); x.t_(); x.t_()"),
}
VIEWS = ["y = x[:]", "y = z[1:]", "y = x.detach().view(-1) if x.is_contiguous() else x"]
CELLS = ["x.sum()", "x.add_(1)", "y.mul_(3)", "z[0] = 7", "x.sum(); y.sum(); z.sum()"]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("where", ["notebook", "rank"])
@pytest.mark.parametrize("edit", EDITS)
def test_all_that_show_the_memory_are_as_in_one_process(sides: Sides, edit: str, where: str, cell: str) -> None:
    made, change = EDITS[edit]
    for number, view in enumerate(VIEWS):
        known = ["x"] if number == 1 else ["x", "y", "z"]
        one = namespace()
        for source in ("import torch; " + made, view, change, cell, "z.mul_(2)", cell):
            run(source, one)
        sides.run("import torch; " + made)
        sides.run(view)
        sides.distributed("", ["torch", *known])
        if where == "notebook":
            sides.run(change)
        else:
            sides.distributed(change, ["torch", *known, "z"])
        sides.distributed(cell, [name for name in "xyz" if name in cell])
        sides.run("z.mul_(2)")
        sides.distributed(cell, [name for name in "xyz" if name in cell])
        sides.out(["x", "y", "z"])
        for name in "xyz":
            assert same(one[name], sides(name)), name
            assert same(one[name], sides.there(name)), name
        assert sides.unsent() == []


def test_without_content(sides: Sides) -> None:
    sides.run("import torch; x = torch.empty(3, 2, device='meta'); y = x[:]")
    sides.distributed("")
    sides.run("x.t_()")
    sides.distributed("")
    assert sides("x.stride()") == sides.there("x.stride()") == (1, 2)
    assert sides.unsent() == sides.unsent_there() == []


def same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
