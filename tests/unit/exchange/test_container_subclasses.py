"""Classes below list, dict, set and deque, ordered dicts and simple namespaces are edited in place like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sides import Sides, namespace, run

NOTEBOOK = """
    import collections, types
    class Loud:
        def on_epoch_end(self): return len(self)
    class History(Loud, dict):
        def __init__(self, name): self.name, self.calls = name, 0
        def __setitem__(self, key, value): raise RuntimeError('nobody asked')
        def log(self, **values):
            self.calls += 1
            for k, v in values.items(): dict.setdefault(self, k, []).append(v)
    class Stack(list):
        __slots__ = ('top',)
        def append(self, x): super().append(x); self.top = x
    class Tags(set): pass
    class Window(collections.deque): pass
    class Groups(collections.defaultdict): pass
    class Words(collections.Counter): pass
    class Layers(collections.OrderedDict): pass
    history = History('first'); stack = Stack([1]); tags = Tags({'a'}); window = Window([1, 2], maxlen=3)
    groups = Groups(list); words = Words('aab'); layers = Layers(x=1, y=2)
    ordered = collections.OrderedDict(b=1, a=2); ordered.version = {'b': 1}
    space = types.SimpleNamespace(lr=0.1, seen=[])
    holder = [history, stack, tags, window, groups, words, layers, ordered, space]
"""

EDITS = {
    "a dict with attributes": ("history.log(loss=1)", "(history, history.calls, history.name)"),
    "a list with slots": ("stack.append(5)", "(stack, stack.top)"),
    "a set": ("tags.add('b')", "sorted(tags)"),
    "a deque": ("window.extend([7, 8])", "(list(window), window.maxlen)"),
    "a defaultdict": ("groups['k'].append(1)", "(groups, groups.default_factory)"),
    "a counter": ("words.update('bbc')", "(words, words['nothing'])"),
    "an ordered dict below": ("layers.move_to_end('x')", "list(layers.items())"),
    "an ordered dict's order": ("ordered.move_to_end('b')", "(list(ordered.items()), ordered.version)"),
    "an ordered dict's attribute": ("ordered.version['c'] = 3; ordered.more = 1", "(ordered.version, ordered.more)"),
    "a namespace": ("space.lr *= 2; space.seen.append(space.lr)", "(space.lr, space.seen)"),
}


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    found = Sides(tmp_path, ranks=2)
    yield found
    found.close()


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("where", ["on the ranks", "in the notebook"])
def test_an_edit_is_seen_and_made_in_place(sides: Sides, edit: str, where: str) -> None:
    change, look = EDITS[edit]
    sides.run(NOTEBOOK)
    sides.distributed("pass")
    before = [id(thing) for thing in sides("holder")]
    twins = [id(thing) for thing in sides.there("holder", 1)]
    assert sides.unsent() == []
    if where == "on the ranks":
        sides.distributed(change)
    else:
        sides.run(change)
        assert sides.unsent()
        sides.out()
        assert repr(sides.there(look, 1)) == repr(sides(look))
    alone = namespace()
    run(NOTEBOOK, alone)
    run(change, alone)
    assert repr(sides(look)) == repr(eval(look, alone))
    assert [id(thing) for thing in sides("holder")] == before
    assert [id(thing) for thing in sides.there("holder", 1)] == twins
    assert sides.unsent() == []


def test_what_the_ranks_make_comes_home_whole(sides: Sides) -> None:
    sides.run("import collections, torch")
    sides.distributed("""
        class Stack(list): pass
        stack = Stack([1]); stack.itself = stack; stack.append(stack)
        state = torch.nn.BatchNorm1d(2).state_dict()
    """)
    assert sides("stack.itself is stack and stack[1] is stack and type(stack) is Stack")
    assert sides("state._metadata['']['version']") == 2
    assert sides.unsent() == []


def test_a_large_one_is_compared_by_content(sides: Sides) -> None:
    sides.run("""
        class Log(list): pass
        log = Log(range(10000)); log.unit = 's'
    """)
    sides.distributed("log[5000] = -1")
    assert sides("log[5000], log[-1], log.unit, type(log) is Log") == (-1, 9999, "s", True)
    sides.distributed("log.unit = 'ms'")
    assert sides("log[5000], log.unit, len(log)") == (-1, "ms", 10000)
    assert sides.unsent() == []


def test_a_class_with_a_pickle_of_its_own_keeps_it(sides: Sides) -> None:
    sides.run("""
        class Guarded(dict):
            def __reduce__(self): return Guarded, ({'made': 'by itself'},)
        guarded = Guarded(a=1)
    """)
    sides.out()
    assert sides.there("guarded") == {"made": "by itself"}
