"""What is set on an object that both sides have, beside its ordinary attributes: hooks, classes, factories.

Each edit is made in the notebook and on a rank, and the other side has to have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sides import Sides

# what is edited: the cell that makes it, the edit, what holds after it on the other side
CASES: dict[str, tuple[str, str, str]] = {
    "a hook that moves to a table that was empty": (
        """
        from torch import nn
        def g(*a): return None
        m = nn.Linear(2, 2); h = m.register_forward_hook(g)
        """,
        "h.remove(); h = m.register_forward_pre_hook(g)",
        "not m._forward_hooks and list(m._forward_pre_hooks) == [h.id] and h.hooks_dict_ref() is m._forward_pre_hooks",
    ),
    "the factory of a defaultdict": (
        "from collections import defaultdict\ndd = defaultdict(list, x=[1]); x = dd['x']",
        "dd.default_factory = None",
        "dd.default_factory is None and dd == {'x': [1]} and dd['x'] is x",
    ),
    "the factory of a large defaultdict, which is a function": (
        "from collections import defaultdict\ndd = defaultdict(int, ((i, i) for i in range(5000)))",
        "dd.default_factory = lambda: 7",
        "dd.default_factory() == 7 and len(dd) == 5000 and dd[4999] == 4999",
    ),
    "the factory of a defaultdict that leads back to it": (
        "from collections import defaultdict\ndd = defaultdict(); dd.default_factory = lambda: len(dd)",
        "dd['a']; dd['b']",
        "dd == {'a': 0, 'b': 1} and dd.default_factory() == 2",
    ),
    "the factory of a defaultdict, which its own closure leads back to": (
        """
        from collections import defaultdict
        def make():
            made = defaultdict(lambda: len(made))
            return made
        dd = make()
        """,
        "dd['a']; dd['b']",
        "dd == {'a': 0, 'b': 1} and dd.default_factory.__closure__[0].cell_contents is dd",
    ),
}


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_set_in_the_notebook(sides: Sides, case: tuple[str, str, str]) -> None:
    cell, edit, holds = case
    sides.run(cell)
    sides.distributed("")
    sides.run(edit)
    assert sides(holds)
    assert sides.unsent() != []
    sides.out()
    assert sides.there(holds)
    sides.home()
    assert sides.unsent() == sides.unsent_there() == []
    assert sides(holds)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_set_on_a_rank(sides: Sides, case: tuple[str, str, str]) -> None:
    cell, edit, holds = case
    sides.run(cell)
    sides.distributed("")
    sides.distributed(edit)
    assert sides.there(holds)
    assert sides(holds)
    assert sides.unsent() == sides.unsent_there() == []
