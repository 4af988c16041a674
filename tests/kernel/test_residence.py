"""Twins on the ranks: any edit on either side is seen on the other, in place; what is no edit sends nothing.

One kernel and its ranks for the whole file, because what is asked is whether they are still equal after the next edit.
"""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook
from tests.support.story import play, warm_ranks

__all__ = ["warm_ranks"]

pytestmark = pytest.mark.kernel

OBJECTS = """
import builtins, collections, gc, numpy as np, pandas as pd, torch, weakref
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

SPY = """
from nbtrain.exchange import parcel as _parcel
from nbtrain.session.sync import notebook_side as _traffic
_sent, _came = [], []
def _spy(pack=_parcel.Packer.pack, Arrival=_traffic.OpenedParcel):
    def packed(self, content, readers):
        _sent.append([len(content.records), sum(b.nbytes for b in content.buffers)])
        return pack(self, content, readers)
    class Arrived(Arrival):
        def __init__(self, table, namespace, content, *a, **k):
            _came.append([len(content.records)]); super().__init__(table, namespace, content, *a, **k)
    _parcel.Packer.pack, _traffic.OpenedParcel = packed, Arrived
_spy(); del _spy
"""

MINE = (  # noqa: SIM905
    "net opt sched side frozen tail src alias part x arr rec rng hist cfg bag ring raw data loader "
        "net.a.weight net.norm.running_mean side.weight net.log net.cfg hooks").split()  # fmt: skip


@pytest.fixture(scope="module")
def room(module_kernel: Kernel, warm_ranks: None) -> Notebook:
    notebook = Notebook(module_kernel, SPY)
    notebook(OBJECTS)
    notebook("%%distributed --devices 2\nthere = look()")
    notebook(f"assert there == look()\n_mine = dict(zip({MINE!r}, map(id, [{', '.join(MINE)}])))")
    return notebook


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


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_edits_of_either_side_are_seen_on_the_other(room: Notebook, edit: str) -> None:
    first = f"{BEFORE[edit]}\n--- ranks\nlook();\n--- here\n" if edit in BEFORE else ""
    play(
        room,
        f"""{first}_was = look()
{edit}
assert look() != _was, 'this edits nothing'
--- ranks
there = look()
--- here
assert _sent[-1][0] > 0 and there == look(), (there, look())
{first}_was = look()
--- ranks
{edit}
there = look()
--- here
assert _came[-1][0] > 0 and look() != _was and there == look(), (there, look())
for _name, _id in _mine.items(): assert id(eval(_name)) == _id, _name
--- ranks
there = look()
--- here
assert there == look(), 'not equal a cell later'
""",
    )


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


@pytest.mark.parametrize("cell", NO_EDITS.values(), ids=list(NO_EDITS))
def test_what_is_no_edit_sends_nothing(room: Notebook, cell: str) -> None:
    play(room, "--- ranks\nnet.train(); opt.zero_grad(); look();")  # whatever was not yet equal is now
    play(
        room,
        f"{cell}\n--- ranks\nlook();\n--- here\nassert _sent[-1] == [0, 0], _sent[-1]\n"
        f"--- ranks\n{cell}\nlook();\n--- here\nassert _came[-1] == [0], _came[-1]\n"
        "--- ranks\nlook();\n--- here\nassert _sent[-1] == [0, 0] and _came[-1] == [0], (_sent[-1], _came[-1])",
    )


def test_identity_holds_between_names_and_cells(room: Notebook) -> None:
    check = """
assert [p is q for g in opt.param_groups[:1] for p, q in zip(g['params'], net.parameters())] == [True] * 4
assert sched.optimizer is opt and cfg['hist'] is hist and loader.dataset is data
src[5] = src[5] + 1; assert alias[5] == src[5]; part[0] += 1; assert src[2] == part[0] == alias[2]
assert layer.weight[1, 1] == seen[1, 1]; seen[1, 1] += 1; assert layer.weight[1, 1] == seen[1, 1] == row[1]
"""
    play(room, "layer = nn.Linear(2, 2).requires_grad_(False); seen = layer.weight.numpy(); row = layer.weight[1]")
    play(room, f"other = net; layers = [net.a, net.norm]\nopts = {{'main': opt}}{check}\n--- ranks\n{check}\n"
         "assert other is net and layers[0] is net.a and opts['main'] is opt\nlayers.append(net)\n"
         f"--- here\n{check}\nassert layers[2] is net is other\n--- ranks\n{check}")  # fmt: skip


def test_dropped_objects_are_dropped_on_the_ranks(room: Notebook) -> None:
    play(
        room,
        """
        class Plain: pass
        one = Plain(); kept = [Plain(), Plain()]
        extra = nn.Linear(2, 2); table = {'p': Plain()}; loop = Plain(); loop.me = loop
        big = torch.zeros(16 << 20)
        --- ranks
        builtins._watched = {n: weakref.ref(o) for n, o in
            dict(one=one, kept=kept[0], extra=extra, weight=extra.weight, table=table['p'], loop=loop, big=big).items()}
        big += 1
        import psutil, os
        builtins._before = psutil.Process().memory_info().rss
        --- here
        assert all(v == 1 for v in big[:5].tolist())
        del one, kept[0], extra, table['p'], loop, big
        gc.collect()
        --- ranks
        left = len(kept), len(table)
        --- ranks
        gc.collect()
        alive = [n for n, ref in builtins._watched.items() if ref() is not None]
        freed = (builtins._before - psutil.Process().memory_info().rss) >> 20
        --- here
        assert alive == [] and left == (1, 0), (alive, left)
        assert freed > 50, freed""",
    )
