"""What a random notebook once got wrong, one test each: cells, and the promise that they end as in one process."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest
import torch

from tests.fuzz.form import difference, form_of
from tests.fuzz.programs import PRELUDE, OneProcess
from tests.fuzz.sessions import Live, live


@pytest.fixture(scope="module")
def session() -> Iterator[Live]:
    with live("-d 1 -s none --monitor off") as found:
        assert found.run("pass", True) is None  # the ranks are there before the first test looks around
        yield found


@pytest.fixture
def alike(session: Live) -> Iterator[Alike]:
    session.clear()
    yield Alike(session)
    session.clear()


class Alike:
    """`alike(notebook=..., ranks=...)`: cells in this order, here and in one process; both must end the same."""

    def __init__(self, session: Live) -> None:
        self.session = session
        self.one = OneProcess()
        self(notebook=PRELUDE)

    def __call__(self, **cells: str) -> None:
        for side, cell in cells.items():
            text = textwrap.dedent(cell).strip()
            streams = torch.get_rng_state()
            assert self.one.run(text) is None, text
            torch.set_rng_state(streams)  # both draw the same numbers, and one process has one stream
            error = self.session.run(text, distributed=side.startswith("ranks"))
            assert error is None, f"{error!r}\n{self.session.shown}"
            where = difference(form_of(self.one.namespace), form_of(self.session.namespace))
            assert where is None, f"after\n{text}\n{where}"


def test_a_function_with_more_defaults_than_arguments(alike: Alike) -> None:
    alike(ranks="def f(): return 1", notebook="f.__defaults__ = ([],)", ranks_again="f.__defaults__[0].append(1)")


def test_what_a_cell_raised_is_no_name_of_the_notebook(session: Live, alike: Alike) -> None:
    assert isinstance(session.run("raise ValueError('no')", distributed=True), ValueError)
    assert "exception" not in session.namespace


def test_an_enum_keeps_the_second_names_of_its_members(alike: Alike) -> None:
    alike(ranks="import enum\nclass Way(enum.Enum): ON = 1; AHEAD = 1", notebook="way = Way.AHEAD")


def test_members_of_an_enum_have_what_its_init_gave_them(alike: Alike) -> None:
    alike(
        notebook="""
            import enum
            class Planet(enum.Enum):
                EARTH = (5.9, 6.3)
                def __init__(self, mass, radius): self.mass, self.sizes = mass, [radius]
        """,
        ranks="Planet.EARTH.sizes.append(Planet.EARTH.mass); Planet.EARTH.moons = 1",
        ranks_again="del Planet.EARTH.moons",
    )


def test_a_function_gets_another_name_and_other_code(alike: Alike) -> None:
    alike(notebook="def f(): return 1\ndef g(): return 2", ranks="f.__name__ = 'other'; f.__code__ = g.__code__")
    assert alike.session.namespace["f"]() == 2


def test_a_class_may_hold_an_array(alike: Alike) -> None:
    alike(notebook="class Net: mean = np.arange(3.)", ranks="mean = Net.mean", ranks_again="Net.mean += 1")


def test_what_is_noted_on_a_tensor(alike: Alike) -> None:
    alike(notebook="w = torch.ones(2); o = torch.nn.Linear(2, 2)", ranks="w.sum()", notebook_again="w.decay = [False]")
    alike(ranks="w.decay.append(1); o.weight.first = w.decay", notebook="w.decay.append(2)", ranks_again="del w.decay")


def test_an_object_that_the_cell_changed_and_then_let_go_of(alike: Alike) -> None:
    alike(notebook="hist = [1]; logs = {'hist': hist}; x = [0]; y = (x,)")
    alike(ranks="hist.append(2); hist = []; x.append(1); del x")
    alike(ranks="logs['hist'].append(3); hist = [logs, hist]; y[0].append(2)")


def test_a_generic_class(alike: Alike) -> None:
    alike(
        ranks="""
            class Box(typing.Generic[typing.TypeVar('T')]):
                left: int = 1
                def bump(self): self.left += 1
        """,
        ranks_again="box = Box()",
    )
    alike(notebook="Box.size = 3; box.bump()", ranks="box.bump(); Box.size += 1")


def test_a_name_that_the_cell_assigns_and_deletes(alike: Alike) -> None:
    alike(notebook="a = 0; b = 1", ranks="a = 2; del a\nif b > 1:\n    b = 2; del b")
