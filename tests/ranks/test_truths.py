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


def test_what_a_cell_raised_is_no_name_of_the_notebook(session: Live, alike: Alike) -> None:
    assert isinstance(session.run("raise ValueError('no')", distributed=True), ValueError)
    assert "exception" not in session.namespace


def test_a_function_gets_another_name_and_other_code(alike: Alike) -> None:
    alike(notebook="def f(): return 1\ndef g(): return 2", ranks="f.__name__ = 'other'; f.__code__ = g.__code__")
    assert alike.session.namespace["f"]() == 2


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


MOVED = "w = torch.ones(4); v = w[:2]; o = torch.arange(4.)"


def test_a_tensor_that_got_other_memory_in_the_notebook_leaves_its_view_behind(alike: Alike) -> None:
    alike(
        notebook=MOVED, ranks="w; v", notebook_2="w.data = torch.zeros(4)", ranks_2="w; v", ranks_3="w[0] = 3; v[1] = 4"
    )


def test_a_tensor_that_got_other_memory_on_the_ranks_leaves_its_view_behind(alike: Alike) -> None:
    alike(notebook=MOVED, ranks="w.data = torch.zeros(4); v", notebook_2="w[0] = 3", ranks_2="v[1] = 4; w")


def test_a_tensor_that_got_the_memory_of_another_shares_it(alike: Alike) -> None:
    alike(notebook=MOVED, ranks="w; o", notebook_2="w.data = o[1:3]", ranks_2="w[0] = 7")
    alike(ranks="v.data = w", notebook="w[1] = 9", ranks_2="o[1] = 5; v[1] = 6; w")


def test_weights_laid_into_one_vector_stay_views_of_it(alike: Alike) -> None:
    alike(notebook="net = torch.nn.Linear(3, 2)\nflat = torch.nn.utils.parameters_to_vector(net.parameters()).detach()")
    alike(
        ranks="net", notebook="torch.nn.utils.vector_to_parameters(flat, net.parameters())", ranks_2="flat.mul_(2); net"
    )
    alike(ranks="net.half(); old = net.weight.data", notebook="net.weight.data[0] = 1", ranks_2="old")


def test_a_named_tuple_whose_class_leads_to_one_of_its_own(alike: Alike) -> None:
    alike(notebook="C = collections.namedtuple('C', 'left right', defaults=(1, 2))\ndef f(x=C(), *, k=0): return x")
    alike(notebook="C.bump = f", ranks="C.bump.__defaults__[0].left")


def test_what_a_class_holds_is_seen_through_its_view(alike: Alike) -> None:
    alike(notebook="class C: z = 1\nclass D(C): pass\nd = [vars(C), vars(D)]", ranks="d; C.z = 4; D.z = 5")
    alike(notebook="assert d[0]['z'] == 4 and d[1]['z'] == 5", ranks="assert d[0]['z'] == 4; C.z = 6")


def test_views_of_arrays_of_objects_show_their_array(alike: Alike) -> None:
    alike(notebook="a = np.array([1, 'a', None, [2]], dtype=object); b = a[1:]", ranks="b[0] = [3]; c = a[::-1]")
    alike(notebook="c[0] = 7; a[1].append(4)", ranks="a[2] = 'z'; c", ranks_2="d = np.full((2, 3), None).T; e = d[1:]")
    alike(notebook="d[1, 0] = 9", ranks="e[0, 1] = 8; b = a[:2]", notebook_2="b[1] = 0")


def test_what_was_written_before_a_tensor_got_other_memory_is_seen_by_those_that_show_it(alike: Alike) -> None:
    alike(notebook="a = torch.arange(8.); b = a[2:6]", ranks="a[3] = 5; a.data = a.data.clone(); a[4] = 6")


def test_memory_that_a_tensor_left_keeps_what_the_notebook_wrote_elsewhere_in_it(alike: Alike) -> None:
    alike(ranks="a = torch.arange(8.); b = a[2:6]", notebook="a[0] = 5", ranks_2="b[1] = 7; b.data = b.data.clone()")


def test_what_changed_before_its_holder_let_go_of_it_comes_home(alike: Alike) -> None:
    alike(notebook="a = [1]; b = {'k': a}; net = torch.nn.Linear(2, 2); old = net.weight", ranks="a; b; net")
    alike(ranks="b['k'].append(0); b.clear()")
    alike(ranks="net.weight.data.mul_(2); net.weight = torch.nn.Parameter(torch.ones(2, 2)); net")
