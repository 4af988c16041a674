"""What cannot travel is named: its path, the line that made it, the reason and what to write instead; and `check`."""

from __future__ import annotations

import contextlib
import linecache
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

import nbtrain.engines._local.warm as warm
from nbtrain.base.errors import CannotTravel, UsageError
from nbtrain.notebook.sync import unpickle_check
from nbtrain.notebook.sync.check_report import CheckReport, check
from tests.support.hygiene import GRACE, describe, gone_within
from tests.support.sides import Sides

CELL = """\
import functools, numpy, threading, socket, sqlite3, torch
class Odd:
    def __init__(self):
        self.tricks = {"ok": 1, "guard": threading.Lock()}
odd = Odd()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 2))
        self.body[0].spy = (i for i in range(3))
net = Net()
def outer():
    s = socket.socket()
    def clo(q=threading.Event()): return s, q
    return clo
clo = outer()
class Bad:
    conn = sqlite3.connect(':memory:')
bad = Bad(); del Bad
two = {
    'l': threading.Lock(),
    'm': {
        's': threading.Lock()},
}
class Slots: __slots__ = ('g',)
sl = Slots()
sl.g = map(str, (i for i in range(3)))
class Bag(dict): pass
bag = Bag(a=[threading.Lock()], b=open('/dev/null'))
bag['c'] = (i for i in 'c')
pair = (1, [threading.Lock()])
part = functools.partial(print,
    end=threading.Lock())
grid = numpy.array([None, None])
grid[1] = threading.Lock()
"""
LINES = {
    "odd.tricks['guard']": 4, "net.body[0].spy": 10, "clo (its closure variable 's')": 13,
    "clo (default of its argument 'q')": 14, "bad (its class Bad).conn": 18, "two['l']": 21, "two['m']['s']": 23,
    "sl.g": 27, "bag['a'][0]": 29, "bag['b']": 29, "bag['c']": 30, "pair[1][0]": 31, "part.keywords['end']": 33,
    "grid.flat[1]": 34,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def nursery() -> Iterator[None]:
    """As a notebook has it: `check` asks it for a scratch process."""
    warm.warm()
    yield
    warm.close()


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    monkeypatch.setattr(linecache, "cache", {})  # a notebook of its own: other tests' cells are none of its cells
    made = Sides(tmp_path)
    yield made
    made.close()


def cell(sides: Sides, source: str, number: int = 1) -> dict[str, int]:
    """Run as a notebook's cell: `linecache` knows its text; returns what numbers its file."""
    name = f"<ipython-input-{number}-abc>"
    source = textwrap.dedent(source)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), sides.here)
    return {name: number}


def checked(sides: Sides, *names: str) -> CheckReport:
    return check(sides.here, sides.notebook_side, {}, list(names))


def test_every_culprit_has_its_path_and_the_line_that_made_it(sides: Sides) -> None:
    cell(sides, CELL)
    found = checked(sides, "odd", "net", "clo", "bad", "two", "sl", "bag", "pair", "part", "grid").findings
    sides("clo.__closure__[0].cell_contents").close()
    sides("bag['b']").close()
    sides("bad.conn").close()
    assert {one.path: one.place.line for one in found if one.place} == LINES
    assert {one.place.number for one in found if one.place} == {1}
    assert all(one.instead for one in found)


def test_the_error_of_a_cell_says_the_same(sides: Sides) -> None:
    sides.notebook_side._numbers = cell(sides, "import threading\n\nbox = {'k': [threading.Lock()]}", 7)
    with pytest.raises(CannotTravel) as caught:
        sides.out(["box"])
    path, made, instead = str(caught.value).splitlines()
    assert path.startswith("box['k'][0] (_thread.lock) cannot travel to the ranks: a lock belongs to ")
    assert made == "    made in  Cell In[7], line 3: box = {'k': [threading.Lock()]}"
    assert instead == "    instead  make it inside the cell, or leave it out in __getstate__"


def test_the_newest_cell_that_assigns_it_is_named(sides: Sides) -> None:
    cell(sides, "import threading\nbox = {}\nbox['k'] = threading.Lock()", 3)
    cell(sides, "%%time\nif True:\n    box['k'] = threading.RLock()".replace("%%time", "#"), 4)
    (found,) = checked(sides, "box").findings
    assert str(found.place) == "Cell In[4], line 3: box['k'] = threading.RLock()"


REFUSED = {
    "threading.Condition()": "lock", "threading.Thread()": "thread", "threading.local()": "thread",
    "queue.Queue()": "queue", "concurrent.futures.Future()": "thread", "iter({1: 2}.items().__iter__() for _ in 'a')":
    "running", "contextvars.ContextVar('a')": "context variable", "memoryview(b'abc')": "window",
    "weakref.proxy(threading)": "stands for", "asyncio.new_event_loop()": "event loop", "mmap.mmap(-1, 10)": "memory",
    "ctypes.pointer(ctypes.c_int(3))": "address", "sys._getframe()": "running frame",
    "csv.reader(['a'])": "file", "open('/dev/null')": "open file", "open('/dev/null', 'wb')": "open file",
    "zipfile.ZipFile(io.BytesIO(), 'w')": "open file", "iter(torch.utils.data.DataLoader([1]))": "running iterator",
    "ipywidgets.IntSlider()": "widget", "tqdm.tqdm([1], disable=True)": "progress bar", "zmq.Poller()": "ZeroMQ",
    "multiprocessing.Lock()": "shared", "logging.FileHandler('/dev/null')": "open file",
    "torch.jit.script(torch.nn.Linear(1, 1))": "compiled",
}  # fmt: skip
TRAVELS = (
    "lambda: 1", "logging.getLogger('a')", "torch.utils.data.DataLoader([1])", "zip([1], [2])", "weakref.ref(set())",
    "torch.nested.nested_tensor([torch.ones(2)])", "functools.lru_cache(lambda: 1)", "random.Random(1)",
    "(net := torch.nn.Linear(1, 1)).register_forward_hook(print)", "io.StringIO('a')", "contextlib.nullcontext()",
)  # fmt: skip
MODULES = (
    "threading, queue, concurrent.futures, contextvars, weakref, asyncio, mmap, ctypes, sys, csv, zipfile, io, torch, "
    "ipywidgets, tqdm, zmq, multiprocessing, logging, functools, random, contextlib"
)


@pytest.mark.parametrize("made", REFUSED)
def test_what_belongs_to_one_process_is_refused_with_the_reason(sides: Sides, made: str) -> None:
    sides.run(f"import {MODULES}\nbox = [{made}]")
    (found,) = checked(sides, "box").findings
    (obj,) = sides.here["box"]
    close = getattr(obj, "close", None)
    if close is not None and "Future" not in made:
        with contextlib.suppress(BufferError):
            close()
    assert found.path == "box[0]"
    assert REFUSED[made] in found.reason


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("made", TRAVELS)
def test_what_travels_is_not_refused(sides: Sides, made: str) -> None:
    sides.run(f"import {MODULES}\nx = {made}")
    assert checked(sides, "x")
    sides.out(["x"])
    assert type(sides.there("x")).__name__ == type(sides("x")).__name__


def test_streams_and_what_holds_them_find_the_ranks_own(sides: Sides) -> None:
    sides.run("""
        import sys, logging, functools
        out = sys.stdout; handler = logging.StreamHandler(sys.stderr); say = functools.partial(print, file=sys.stderr)
        class Plain: pass
        plain = Plain(); plain.streams = [sys.stdin]
    """)
    sides.out(["out", "handler", "say", "plain"])
    assert sides.there("handler is not None and handler.lock is not None and handler.level == 0")
    assert sides.there("handler") is not sides("handler")
    assert sides.there("handler.stream") is sides("sys.stderr")
    assert sides.there("say.keywords['file']") is sides("sys.stderr")
    assert sides.there("plain.streams[0]") is sides("sys.stdin")


def test_a_class_that_leaves_out_what_cannot_travel_is_believed(sides: Sides) -> None:
    sides.run("""
        import threading, queue
        class Mine(queue.Queue):
            def __getstate__(self): return {'kept': self.kept}
        q = Mine(); q.kept = 3
    """)
    assert checked(sides, "q")


UNOPENED = """
class Args(Exception):
    def __init__(self, a, b): super().__init__(a)
class Bad:
    def __getstate__(self): return {'n': 1}
    def __setstate__(self, state): raise ValueError('no way')
class Deep:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
    def __reduce__(self): return object.__reduce_ex__(self, 2)
one = {'deep': [Args(1, 2)]}
two = [Bad()]
three = Deep([1])
fine = Bad
"""


def test_what_packs_but_does_not_open_is_named_and_nothing_is_touched(sides: Sides) -> None:
    cell(sides, UNOPENED)
    before = dict(sides.here)
    children = set(psutil.Process().children())
    ranks_parent = psutil.Process(warm.warm().process.pid)
    report = checked(sides)
    assert {one.path for one in report.findings} == {"one['deep'][0]", "two[0]", "three"}
    said = repr(report)
    assert "no way" in said
    assert "TypeError" in said
    assert "recursi" in said
    assert "line 11: one = {'deep': [Args(1, 2)]}" in said
    assert sides.here == before
    assert set(psutil.Process().children()) <= children
    assert gone_within(GRACE, lambda: [describe(one) for one in ranks_parent.children()]) == []
    assert checked(sides, "fine")


def test_a_setstate_that_waits_for_ever_is_given_up(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle_check, "PATIENCE", 0.3)
    sides.run("""
        import time
        class Slow:
            def __getstate__(self): return {'n': 1}
            def __setstate__(self, state): time.sleep(1000)
        slow = Slow()
    """)
    began = time.monotonic()
    checked(sides, "slow")
    assert time.monotonic() - began < 20


def test_numbers_that_opening_asks_for_are_there(sides: Sides) -> None:
    """They go only where it has failed without them."""
    sides.run("""
        import torch
        class Scaled:
            def __init__(self): self.data = torch.ones(2_000_000)
            def __getstate__(self): return {'data': self.data}
            def __setstate__(self, state):
                assert state['data'].max() == 1, 'no numbers'
                vars(self).update(state)
        class Worse(Scaled):
            def __setstate__(self, state): raise ValueError(f"largest is {float(state['data'].max())}")
        scaled = Scaled()
    """)
    assert checked(sides, "scaled")
    sides.run("worse = Worse()")
    (found,) = checked(sides, "scaled", "worse").findings
    assert found.path == "worse"
    assert "largest is 1.0" in found.reason


def test_a_module_that_the_kernel_alone_has_is_named(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_by_hand", made := ModuleType("made_by_hand"))
    exec("class Odd:\n    def __setstate__(self, state): pass\n    def __getstate__(self): return 1", vars(made))
    sides.run("from made_by_hand import Odd; odd = Odd()")
    (found,) = checked(sides, "odd").findings
    assert "No module named 'made_by_hand'" in found.reason


def test_all_is_well_in_one_line_with_the_largest_first(sides: Sides) -> None:
    sides.run("import torch, json; net = torch.nn.Linear(300, 300); data = torch.zeros(1_000_000); n = 3")
    said, own = repr(checked(sides)).splitlines()
    assert own.startswith("each process's own, and not sent: what IPython keeps of cells")
    assert said.startswith("everything can travel · 4.36 MB would be sent: data 4 MB, net 36")
    assert said.endswith("by name: torch, json")
    sides.out(["net", "data"])
    again = checked(sides)
    assert again.resident == ["net", "data"]
    sides.run("data += 1")
    assert "data" in checked(sides).sizes


def test_a_check_changes_nothing_of_what_is_sent_next(sides: Sides) -> None:
    sides.run("import torch; data = torch.zeros(1_000_000); box = [1]")
    sides.out(["data", "box"])
    sides.run("data += 1; box.append([2]); new = [box]")
    keys = set(sides.notebook_side.table.nodes)
    assert checked(sides)
    assert set(sides.notebook_side.table.nodes) == keys
    sides.out(["data", "box", "new"])
    assert sides.there("float(data[0])") == 1
    assert sides.there("box == [1, [2]] and new[0] is box")


def test_surprising_weight_is_said(sides: Sides) -> None:
    sides.run("""
        import torch, numpy as np
        small = torch.zeros(10_000_000)[:3]
        part = {'p': np.zeros(10_000_000)[5:9]}
        cache = np.zeros(4_000_000)
        def predict(): return cache.sum()
    """)
    warned = checked(sides, "small", "part", "predict").warnings
    assert len(warned) == 3
    assert warned[0].startswith("small shows 12 B of 40 MB")
    assert "small = small.clone()" in warned[0]
    assert "part['p'] = part['p'].copy()" in warned[1]
    assert warned[2].startswith("predict reads cache, so 32 MB come along")


def test_an_unknown_name_is_said(sides: Sides) -> None:
    sides.run("model = 1")
    with pytest.raises(UsageError, match="no 'modle'; did you mean 'model'"):
        checked(sides, "modle")


RAISING = {
    "__reduce_ex__": ("class Odd:\n    def __reduce_ex__(self, p): raise KeyError('why')", "Odd()"),
    "__getstate__": ("class Odd:\n    def __getstate__(self): raise KeyError('why')", "Odd()"),
}


@pytest.mark.parametrize(("classes", "made"), RAISING.values(), ids=list(RAISING))
def test_what_raises_when_it_is_looked_at_is_named(sides: Sides, classes: str, made: str) -> None:
    sides.run(f"{classes}\nholder = {{'deep': [{made}]}}")
    with pytest.raises(CannotTravel, match=r"^holder\['deep'\]\[0\] .*cannot travel"):
        sides.out(["holder"])
