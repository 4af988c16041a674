"""The exchange as a whole: every edit is seen and nothing else, both sides stay one, and what fails leaves no trace."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.base.errors import CannotTravel
from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.graph.rank_paths import RankPaths
from nbtrain.exchange.kinds.base import Handle, Kind
from tests.support.sides import Sides

OBJECTS = """
import collections, numpy as np, pandas as pd, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
class Net(nn.Module):
    scale = 2.0
    def __init__(self):
        super().__init__(); self.a = nn.Linear(3, 3); self.norm = nn.BatchNorm1d(3)
        self.log = []; self.cfg = {'deep': [1]}
    def forward(self, x): return self.norm(self.a(x)) * self.scale
class Data(Dataset):
    def __init__(self): self.rows = [1., 2., 3., 4.]
    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return self.rows[i]
def pure(v): return v * 2
def hook(m, i, o): return o + 1
net = Net(); opt = torch.optim.AdamW(net.parameters(), fused=True)
sched = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
side = nn.Linear(2, 2).requires_grad_(False); frozen = side.weight.numpy(); tail = side.weight[1]
src = np.arange(6.); alias = torch.from_numpy(src); part = src[2:4]; x = torch.randn(6, 3)
arr = np.arange(8, dtype='f4'); rec = np.zeros(3, dtype=[('n', 'i4'), ('v', 'f8', 2)]); rng = np.random.default_rng(3)
hist = []; cfg = {'k': [1], 'hist': hist}; bag = {1, 2}
ring = collections.deque([1, 2], maxlen=3); raw = bytearray(b'abc')
df = pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']}); data = Data()
loader = DataLoader(data, batch_size=2)
net(x).sum().backward(); opt.step(); opt.zero_grad(); hooks = []
def numbers(t): return str(t.dtype), t.requires_grad, t.detach().double().tolist()
def look():
    params = dict(net.named_parameters()); small = torch.ones(1, 2).to(side.weight.dtype)
    held = [[name for p in group['params'] for name, q in params.items() if p is q] for group in opt.param_groups]
    return repr([
        [(name, numbers(p)) for name, p in params.items()],
        [(name, numbers(b)) for name, b in net.named_buffers()],
        [type(m).__name__ + str(m.training) for m in net.modules()], net.log, net.cfg,
        getattr(net, 'epoch', None), Net.scale,
        held, [group['lr'] for group in opt.param_groups], [numbers(v) for s in opt.state.values() for v in s.values()],
        sched.last_epoch, sched.get_last_lr(), len(net.a._forward_hooks), side(small).tolist(),
        numbers(side.weight), frozen.tolist(), numbers(tail), src.tolist(), numbers(alias), part.tolist(), arr.tolist(),
        rec.tolist(), rng.bit_generator.state, hist, cfg, sorted(bag), list(ring), bytes(raw), df.to_dict(), data.rows,
        getattr(data, 'note', None), hist is cfg['hist'], loader.dataset is data, sched.optimizer is opt])
"""

MINE = (
    "[net, opt, sched, side, frozen, tail, src, alias, part, x, arr, rec, rng, hist, cfg, bag, ring, raw, data, "
    "loader, net.a.weight, net.norm.running_mean, side.weight, net.log, net.cfg, hooks]"
)
"""What stays the object that it is."""

EDITS = {
    "weights by .data": "net.a.weight.data.mul_(1.5)",
    "one element by .data": "net.a.bias.data[1] += 5",
    "a step": "net(x).sum().backward(); torch.optim.SGD(net.parameters(), 0.1).step(); net.zero_grad()",
    "a fused step": "net(x).sum().backward(); opt.step(); opt.zero_grad()",
    "statistics of BatchNorm": "net.norm(x.detach() + 1); net.zero_grad()",
    "eval": "net.eval(); net.norm.train(len(net.log) % 2 > 0); net.log.append(0)",
    "eval, and train again": "net.train(not net.training)",
    "an attribute": "net.epoch = getattr(net, 'epoch', 0) + 1",
    "a list in an attribute": "net.log.append(len(net.log))",
    "deep in an attribute": "net.cfg['deep'].append('d')",
    "freeze": "net.a.bias.requires_grad_(not net.a.bias.requires_grad)",
    "learning rate": "opt.param_groups[0]['lr'] *= 0.7",
    "scheduler": "sched.step()",
    "a new layer": "setattr(net, f'extra{len(net._modules)}', nn.Linear(2, 2).requires_grad_(False))",
    "a replaced layer": "net.head = nn.Linear(1, 2).requires_grad_(False)",
    "a removed layer": "del net.head",
    "a new parameter group": "opt.add_param_group({'params': [nn.Parameter(torch.ones(1))], 'lr': 3})",
    "an element of an array": "arr[3] = arr[3] + 1",
    "two elements exchanged": "arr[[0, 1]] = arr[[1, 0]]",
    "a list": "hist.append(len(hist))",
    "d['k'].append": "cfg['k'].append(len(cfg['k']))",
    "a key": "cfg[len(cfg)] = [hist]",
    "a removed key": "cfg.popitem()",
    "a set": "bag.add(max(bag) + 1)",
    "a deque": "ring.append(ring[-1] + 1)",
    "a bytearray": "raw.extend(b'z'); raw[0] += 1",
    "numpy's Generator": "rng.random(3)",
    "a structured array": "rec['v'][1, 0] += 1; rec[0]['n'] += 2",
    "from_numpy, by the array": "src[0] += 1",
    "from_numpy, by the tensor": "alias[1] -= 1",
    "a view of an array": "part[:] *= 2",
    "weights by numpy": "frozen[0, 0] += 1",
    "a view of weights": "tail += 1",
    "a DataFrame's cell": "df.loc[0, 'a'] += 5",
    "a DataFrame's column": "df[f'c{df.shape[1]}'] = df['a'] * 2",
    "a hook": "hooks.append(net.a.register_forward_hook(hook))",
    "a removed hook": "hooks.pop().remove()",
    "the data set": "data.rows[0] += 1; data.note = len(data.rows)",
    "patched forward": "side.forward = lambda v, n=len(hist): v * n; hist.append(0)",
    "forward put back": "del side.forward",
    "patched class": "Net.scale += 1",
    "half": "side.half()",
    "load_state_dict": "net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})",
}


BEFORE = {
    "del net.head": EDITS["a replaced layer"],
    "cfg.popitem()": "cfg['last'] = 1",
    "hooks.pop().remove()": EDITS["a hook"],
    "del side.forward": EDITS["patched forward"],
    "side.half()": "side.float()",
}
"""edit → what makes it one"""


NO_EDITS = {
    "nothing": "pass",
    "gradients": "(net.a(x).sum() * 2).backward()",
    "zero_grad": "opt.zero_grad()",
    "iterating a loader": "for batch_ in loader: pass\ndel batch_",
    "a pure function": "pure(3); pure(x); pure(arr)",
    "reading": "net.state_dict(); opt.state_dict(); df.sum(); list(cfg); src.sum(); repr(net); look()",
    "the same value again": "df.loc[0, 'a'] = df.a[0]\nwith torch.no_grad(): net.a.weight.copy_(net.a.weight.clone())",
    "evaluation": "net.eval()\nwith torch.no_grad(): net(x)\nnet.train()",
    "switched to and fro": "net.train(False); net.train(True); hist.append(1); hist.pop()",
    "deepcopy and pickle": "import copy, pickle; copy.deepcopy(net); pickle.dumps(cfg); copy.copy(data)",
}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path, ranks=3)
    yield made
    made.close()


@pytest.fixture
def room(sides: Sides) -> Sides:
    sides.run(OBJECTS)
    sides.distributed("look()")
    assert same(sides)
    return sides


def same(sides: Sides) -> bool:
    return bool(sides("look()") == sides.there("look()"))


def before(sides: Sides, edit: str) -> str:
    """How all looks when there is what this edits, on both sides."""
    if edit in BEFORE:
        sides.run(BEFORE[edit])
        sides.distributed("")
    return str(sides("look()"))


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_edits_of_either_side_are_seen_on_the_other(room: Sides, edit: str) -> None:
    was = before(room, edit)
    room.run(edit)
    assert room("look()") != was, "this edits nothing"
    assert room.unsent() != []
    room.distributed("")
    assert room.unsent() == room.unsent_there() == []
    assert same(room)
    mine = room(MINE)
    was = before(room, edit)
    assert room.distributed(edit).parcel.stream
    assert room("look()") != was
    assert room.unsent() == room.unsent_there() == []
    assert same(room)
    assert all(a is b for a, b in zip(room(MINE), mine, strict=True))


@pytest.mark.parametrize("cell", NO_EDITS.values(), ids=list(NO_EDITS))
def test_what_is_no_edit_sends_nothing(room: Sides, cell: str) -> None:
    room.distributed("net.train(); opt.zero_grad()")  # whatever was not yet equal is now
    room.run(cell)
    assert room.unsent() == []
    room.distributed(cell)
    assert room.unsent() == room.unsent_there() == []


def test_coming_home_keeps_identity_and_aliases(sides: Sides) -> None:
    sides.run(OBJECTS)
    sides.run("w = net.a.weight; view = w.detach()[0]; state = opt.state[w]['exp_avg']; deep = cfg['k']")
    cell = "net(x).sum().backward(); opt.step(); cfg['k'].append(cfg); hist.append(1.5)"
    sides.distributed(cell, ["net", "opt", "cfg", "x", "hist"])
    assert sides("net.a.weight is w and (view == w[0]).all() and opt.state[w]['exp_avg'] is state")
    assert sides("cfg['hist'] is hist and hist == [1.5] and deep[1] is cfg")
    sides.run("net(x).sum().backward(); opt.step()")


def test_a_graph_recorded_before_the_cell_raises_after_it(sides: Sides) -> None:
    sides.run("import torch\nw = torch.ones(2, requires_grad=True); y = (w * w).sum()")
    sides.distributed("w.data.add_(1)", ["w"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sides.run("y.backward()")


def test_no_other_name_is_touched(sides: Sides) -> None:
    sides.run("a = [1]; b = 2")
    sides.out()
    sides.run("c = 4")
    home = sides.distributed("a.append(2); d = 3; b = b", ["a", "b"])
    assert sides("a == [1, 2] and b == 2 and c == 4 and d == 3")
    assert home.deleted == ()
    sides.distributed("del d", ["d"])
    assert "d" not in sides.here


def test_what_a_rank_made_can_be_sent_to_it_again(three: Sides) -> None:
    three.run("out = {}")
    three.distributed("import torch\nout['t'] = torch.full((3,), float(rank)); out['l'] = [rank]; new = out['l']")
    assert three("out['t'].sum() == 0 and new is out['l']")
    three.run("out['t'] += 7; new.append('n')")
    three.distributed("seen = (out['t'].tolist(), new is out['l'], list(new))")
    assert three("seen") == ([7, 7, 7], True, [0, "n"])
    for rank in (1, 2):
        assert three.there("out['t'].tolist()", rank) == [7, 7, 7]
        assert three.there("new is out['l'] and new[1] == 'n'", rank)


def test_ranks_that_made_something_else_get_what_the_lead_made(three: Sides) -> None:
    three.run("out = []")
    three.distributed("out.append([rank] if rank < 2 else {'r': rank}); out.append({1}) if rank == 0 else None")
    three.distributed("", ["out"])
    assert [three.there("out", rank) for rank in range(3)] == [[[0], {1}]] * 3
    three.run("out[0].append('x')")
    three.distributed("", ["out"])
    assert [three.there("out", rank) for rank in range(3)] == [[[0, "x"], {1}]] * 3


def test_what_cannot_leave_the_rank_stays_behind_a_handle(three: Sides) -> None:
    three.run("box = {}")
    home = three.distributed("box['g'] = (i * 10 + rank for i in range(3)); g = box['g']")
    assert isinstance(three("g"), Handle)
    assert three("box['g'] is g")
    assert home.stayed[0][0] in ("g", "box['g']")
    assert "running frame" in home.stayed[0][1]
    three.distributed("first = next(g)", ["g"])
    assert [three.there("first", rank) for rank in range(3)] == [0, 1, 2]


def test_a_handle_whose_ranks_are_gone_is_refused(sides: Sides, tmp_path: Path) -> None:
    sides.distributed("g = (i for i in range(3))")
    other = Sides(tmp_path)
    other.here["g"] = sides("g")
    with pytest.raises(CannotTravel, match=r"^g .*are gone; make it again"):
        other.out()
    other.close()


def test_a_refused_walk_leaves_no_trace(sides: Sides) -> None:
    sides.run("a = [1]; import threading; lock = threading.Lock()")
    sides.out(["a"])
    sides.run("a.append([2]); b = [a, lock]")
    before = set(sides.notebook_side.table.nodes)
    with pytest.raises(CannotTravel):
        sides.out(["a", "b"])
    assert set(sides.notebook_side.table.nodes) == before
    sides.out(["a"])
    assert sides.there("a") == [1, [2]]


def test_what_packs_but_does_not_open_is_named_and_changes_nothing(sides: Sides) -> None:
    sides.run("""
        class Bad:
            def __getstate__(self): return {'n': 1}
            def __setstate__(self, state): raise ValueError('no way')
        class Args(Exception):
            def __init__(self, a, b): super().__init__(a)
        import collections
        a = [1]; cfg = {'deep': [a]}; d = collections.defaultdict(list)
    """)
    sides.distributed("", ["a", "cfg"])
    for make, reason in (("Bad()", "ValueError: no way"), ("Args(1, 2)", "TypeError")):
        sides.out(["a", "cfg", "Bad", "Args"])
        twin = sides.twins[0]
        exec(f"a.append(2); cfg['deep'].append({make})", twin.namespace)
        with pytest.raises(CannotTravel, match=reason) as caught:
            sides.home()
        assert str(caught.value).startswith("what cfg leads to ")
        assert sides("a == [1] and cfg == {'deep': [a]}")
        exec("a.pop(); cfg['deep'].pop()", twin.namespace)
        twin.start(list(twin.table.nodes.values()), lead=True)
    sides.out(["d", "Bad"])
    exec("d['x'] = Bad()", twin.namespace)
    with pytest.raises(CannotTravel, match=r"^what d leads to was packed"):
        sides.home()


def test_an_interrupted_walk_can_be_repeated(sides: Sides) -> None:
    sides.run("""
        class Rude:
            stop = True
            def __init__(self): self.n = 1
            def __getstate__(self):
                if Rude.stop: raise KeyboardInterrupt
                return self.__dict__
        a = [1]; r = Rude(); b = [2]
    """)
    with pytest.raises(KeyboardInterrupt):
        sides.out()
    sides.run("Rude.stop = False")
    sides.out()
    assert sides.there("a == [1] and r.n == 1 and b == [2]")


def test_what_the_notebook_drops_is_freed_on_both_sides(sides: Sides) -> None:
    sides.run("import torch\nt = torch.ones(1 << 21); keep = [1]\nclass A: pass\na = A(); a.t = t")
    sides.out()
    mine = weakref.ref(sides("a"))
    twin = weakref.ref(sides.there("a"))
    sides.run("del t, a")
    sides.out(["keep"])
    sides.notebook_side.packer.released(0, sides.twins[0].released())
    gc.collect()
    assert mine() is None
    assert twin() is None
    assert not any(sides.notebook_side.packer._readers.values())


def test_a_class_that_a_cell_defines_anew_is_freed_on_both_sides(sides: Sides) -> None:
    sides.run("class A:\n    data = bytearray(1 << 20)\na = A()")
    sides.out()
    mine, twin = weakref.ref(sides("A")), weakref.ref(sides.there("A"))
    sides.run("class A: pass\na = A()")
    sides.out()
    gc.collect()
    assert mine() is None
    assert twin() is None


def test_what_a_cell_rebinds_does_not_pile_up(sides: Sides) -> None:
    sides.run("import torch\nw = torch.ones(3); x = w; loss = None; pair = (w, [1])")
    counts = []
    for _ in range(5):
        sides.distributed("x = torch.ones(2); loss = [x.sum()]; pair = (w, [len(pair[1])])")
        counts.append((len(sides.notebook_side.table.nodes), len(sides.twins[0].table.nodes)))
    here, there = zip(*counts, strict=True)
    assert len(set(here)) == 1
    assert len(set(there[1:])) == 1
    kept = sides("pair")[1]
    sides.out()
    assert sides.there("pair[0] is w and pair[1] == [1]")
    assert sides.notebook_side.table.find(kept) is not None  # inside a tuple, which has no key of its own
    assert len(sides.twins[0].table.nodes) == here[0]


@pytest.mark.parametrize("kind", ["tensor", "list", "instance"])
@pytest.mark.parametrize("where", ["here", "there", "a name there", "deleted there"])
def test_what_is_replaced_is_freed_on_both_sides(sides: Sides, where: str, kind: str) -> None:
    new = {"tensor": "torch.ones(200)", "list": "L()", "instance": "A()"}[kind]
    sides.run(f"import torch\nclass L(list): pass\nclass A: pass\nbox = {{'t': {new}}}; a = {new}; other = [1]")
    sides.out()
    name = "a" if "name" in where or "deleted" in where else "box['t']"
    mine, twin = weakref.ref(sides(name)), weakref.ref(sides.there(name))
    edit = f"del {name}" if where == "deleted there" else f"{name} = {new}"
    if where == "here":
        sides.run(edit)
        sides.out(["box"])
    else:
        sides.distributed(edit)
    gc.collect()
    assert mine() is None
    sides.out(["other"])
    gc.collect()
    assert twin() is None
    assert sides.unsent() == sides.unsent_there() == []


def test_what_is_let_go_of_can_come_back(sides: Sides) -> None:
    """Where one side still has what the other let go of, both have it again as soon as it is used."""
    sides.run("box = {'t': [1]}; old = None")
    sides.out(["box"])
    sides.run("keep = [box['t']]; box['t'] = 0")
    sides.twins[0].namespace["_hidden"] = sides.there("box['t']")
    sides.distributed("box['t'] = _hidden", ["box"])
    assert sides("box['t']") == [1]
    sides.distributed("keep[0].append(2)", ["box", "keep"])
    assert sides("keep == [[1, 2]] and box['t'] == [1]")


def test_what_another_name_holds_is_not_let_go_of(sides: Sides) -> None:
    """A model in a container that is made anew for each cell is sent once, whatever the container is."""
    sides.run("class Box: pass\nmodel = [[1.0] * 9]; box = Box(); box.model = model")
    sides.out(["box"])
    sides.run("box = Box(); box.model = model")
    sides.out(["box"])
    there = sides.there("box.model")
    sides.run("box = None; del box")
    sides.out(["Box"])
    sides.run("box = Box(); box.model = model")
    sides.distributed("box.model[0][0] = 2.0", ["box"])
    assert sides.there("box.model") is there
    assert sides("model[0][0]") == 2.0
    sides.run("del model, box")
    sides.out(["Box"])
    assert sides.unsent() == sides.unsent_there() == []
    assert sides.twins[0].table.find(there) is None


def test_small_tensors_are_compared_together_though_one_is_let_go_of(sides: Sides) -> None:
    sides.run("import torch\nts = [torch.full((50,), float(i)) for i in range(20)]; loss = torch.ones(5)")
    for names in ["ts"], ["loss"]:
        for _ in range(3):
            sides.out(names)
    assert len(sides.notebook_side.table.bulk._chunks) == 2
    loss = weakref.ref(sides("loss"))
    sides.run("loss = None")
    sides.out(["loss"])
    gc.collect()
    assert loss() is None
    (left,) = sides.notebook_side.table.bulk._chunks.values()
    assert len(left.flats) == 20


def test_a_view_of_memory_that_the_rank_has_shows_what_the_notebook_has(sides: Sides) -> None:
    sides.run("import torch\nx = torch.arange(6.); a = x[:3]")
    sides.out(["a"])
    sides.run("x[4] = 50")
    sides.out(["x"])
    assert sides.there("x.tolist()") == [0, 1, 2, 3, 50, 5]
    sides.run("a[0] = 9")
    sides.out(["a"])
    assert sides.there("x[0]") == 9


def test_a_walk_that_only_looked_does_not_hide_a_change(sides: Sides) -> None:
    """Tensors compared together: what was looked at and not sent is still unsent."""
    sides.run("import torch\nts = [torch.full((50,), float(i)) for i in range(20)]")
    sides.out()
    for _ in range(3):
        assert sides.unsent() == []
    sides.run("ts[3] += 1")
    assert sides.unsent() == sides.unsent() == ["tensor"]
    sides.run("ts[3] -= 1")
    assert sides.unsent() == []
    sides.distributed("ts[3] += 1")
    sides.run("ts[3] -= 1")
    assert sides.unsent() == ["tensor"]


def test_many_new_objects_of_one_list_are_found_in_one_pass(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are told the way to each of them; to look for each among all takes minutes for ten thousand."""
    count = 300
    sides.run(f"import torch\nmade = [torch.ones(2) for _ in range({count})]")
    walk = Walk(sides.notebook_side.table, sides.here)
    walk.name("made", sides("made"))
    asked: list[object] = []
    identity = Kind.identity
    monkeypatch.setattr(Kind, "identity", lambda self, obj: asked.append(obj) or identity(self, obj))
    ways = RankPaths(sides.notebook_side.table, sides.here)
    found = [ways.to(node) for node in walk.added if node.kind.name == "tensor"]
    assert len({way for way in found if way is not None}) == count
    assert len(asked) <= 10 * count
    walk.undo()


def test_long_strings_and_tuples_are_sent_once(sides: Sides) -> None:
    sides.run("""
        text, data, pairs = "x" * 20_000, b"y" * 20_000, tuple((i, str(i)) for i in range(300))
        held = [text, pairs]""")
    sides.distributed("made = text + 'z'; same = held[0] is text and held[1] is pairs")
    assert sides("same and made == 20_000 * 'x' + 'z' and held[0] is text and held[1] is pairs")
    assert sides.unsent() == []
    sides.run("text = 'w' * 20_000")
    assert sides.unsent() == ["frozen"]
    sides.distributed("first = text[0], held[0][0], pairs[299], len(data)")
    assert sides("first") == ("w", "x", (299, "299"), 20_000)


def test_a_name_whose_comparison_takes_long_is_told(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    sides.run("rows = [[i] for i in range(300)]; values = (1, 2); net = {'a': 1}")
    sides.out()
    sides.out()
    assert sides.notebook_side.slow == {}
    monkeypatch.setattr("nbtrain.notebook.sync.notebook_side.BUDGET", 0.0)
    sides.out(["rows", "values"])
    assert list(sides.notebook_side.slow) == ["rows"]


FROZEN_SETS = {
    "a name": ("made = frozenset({P(3)})", "P(3) in made"),
    "in a tuple": ("made = (1, frozenset({P(3)}))", "P(3) in made[1]"),
    "in a list": ("made = [frozenset({P(3), P(4)})]", "P(4) in made[0]"),
    "in a dict": ("made = {frozenset({P(3)}): 1}", "made[frozenset({P(3)})] == 1"),
    "in an object": ("made = Holder(); made.tags = frozenset({P(3)})", "P(3) in made.tags"),
    "within another": ("made = frozenset({1, (P(3), frozenset({P(4)}))})", "(P(3), frozenset({P(4)})) in made"),
    "as a field": ("made = {Q(frozenset({P(3)}))}", "Q(frozenset({P(3)})) in made"),
}


@pytest.mark.parametrize("case", FROZEN_SETS)
@pytest.mark.parametrize("known", [False, True])
def test_a_frozenset_is_made_once_its_elements_have_what_they_hash(sides: Sides, case: str, known: bool) -> None:
    makes, holds = FROZEN_SETS[case]
    sides.run("""
        from dataclasses import dataclass
        @dataclass(frozen=True)
        class P:
            x: int
        @dataclass(frozen=True)
        class Q:
            of: object
        class Holder: pass
        class Other: pass
    """)
    if known:
        sides.run("p = P(1); made = Other()")
        sides.out()
    sides.distributed(f"{makes}; count = 7")
    assert sides(holds)
    assert sides("count") == 7
    sides.run(makes.replace("made", "mine"))
    sides.out()
    assert sides.there(holds.replace("made", "mine"))
