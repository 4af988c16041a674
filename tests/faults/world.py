"""What is in a scene's notebook before a fault, and how it is described: cells that run in the kernel.

`world` names every object that counts. Loops call `mark()` when a step is done: it writes to `history` and `notes`.
Where a scene records a trajectory it also describes the world as it then is, or, where no rank has a whole one, ends
the cell after so many steps.
"""

from __future__ import annotations

from textwrap import indent

TOOLS = '''
import ctypes, hashlib, itertools, json, multiprocessing, os, random, signal, subprocess, sys, threading, time
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

def parts(value, seen=()):
    """The bytes that make a value what it is: equal only for equal values."""
    if isinstance(value, torch.Tensor):
        grad = parts(value.grad) if value.is_leaf and value.grad is not None else b""
        data = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return f"{tuple(value.shape)} {value.dtype} {value.requires_grad} ".encode() + data + grad
    if any(value is one for one in seen):
        return b"again"
    seen = (*seen, value)
    if isinstance(value, nn.Module):
        found = [*value.named_parameters(), *value.named_buffers(), ("training", value.training)]
        return b"".join(name.encode() + parts(one, seen) for name, one in found)
    if isinstance(value, (torch.optim.Optimizer, torch.amp.GradScaler)):
        return parts(value.state_dict(), seen)
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return parts({k: v for k, v in value.state_dict().items()}, seen)
    if isinstance(value, DataLoader):
        return repr((value.batch_size, value.num_workers)).encode()
    if isinstance(value, dict):
        return b"{" + b",".join(repr(k).encode() + b":" + parts(v, seen) for k, v in value.items()) + b"}"
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join(parts(v, seen) for v in value) + b"]"
    return repr(value).encode()

def told(world):
    """Each object of it by a digest."""
    return {name: hashlib.blake2b(parts(one), digest_size=6).hexdigest() for name, one in world.items()}

def seen():
    """A number of the weights, the same on all equal ranks. In pieces they show none: not each rank has the same, and
    one that waits here for one that has failed would have taken a step that is not marked."""
    return 0.0 if in_pieces else float(first.detach().sum())

class Enough(Exception):
    """So many steps were wanted."""

def mark(taken=1):
    """A step is done; `taken`: 0 where a scaler has passed over it. What it writes is the same on all equal ranks."""
    history.append(seen()); notes["taken"] += taken
    if len(history) == limit:
        raise Enough
    if recording:
        trace.append({"told": told(world), "marks": len(history), "taken": notes["taken"]})
    elif pause:
        time.sleep(pause)
'''

NODES = """
from nbtrain.engines.remote.lobby import lobby
for _ in range(%d):
    subprocess.Popen([sys.executable, "-m", "nbtrain", "node", lobby().ticket().text()],
                     stdout=subprocess.DEVNULL, start_new_session=True)  # Stop is the kernel's alone
"""

START = """
torch.manual_seed(7)
X = torch.randn(1600, 6); Y = (X.sum(1) > 0).long()
data = TensorDataset(X, Y)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.Adam(model.parameters(), 1e-2)
sched = torch.optim.lr_scheduler.StepLR(opt, 10, 0.9)
loader = DataLoader(data, batch_size=4, shuffle=True)
for _ in range(2):
    F.cross_entropy(model(X[:8]), Y[:8]).backward(); opt.step(); opt.zero_grad()
history = []
notes = {"taken": 0, "model": model, "log": history}
same, first = history, model[0].weight
world = {"model": model, "opt": opt, "sched": sched, "loader": loader, "history": history, "notes": notes,
         "same": same, "first": first}
recording, trace, pause, limit = False, [], 0.0, 0
"""
"""Two steps are taken here, so that the optimizer has a state that may be lost."""

ALONE = "torch.set_num_threads(1)\n"
"""Begins every cell on ranks: two threads for a tensor of forty numbers wait for each other on a busy machine."""

READY = "_scene_names = {*globals()}\ntorch.manual_seed(8)"

EMPTY = """
for _name in [*globals()]:
    if not _name.startswith("_") and _name not in _tools:
        del globals()[_name]
"""

LOOK = '''
def _inside(one):
    """What an object holds that has to stay the same object."""
    if isinstance(one, nn.Module):
        return [*one.parameters(), *one.buffers()]
    if isinstance(one, torch.optim.Optimizer):
        return [p for group in one.param_groups for p in group["params"]]
    if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
        return [one.optimizer]
    if isinstance(one, dict):
        return [v for v in one.values() if not isinstance(v, (int, float, str))]
    return []

def _look():
    made = [id(t) for o in world.values() if isinstance(o, torch.optim.Optimizer)
            for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    streams = repr((torch.get_rng_state().tolist(), random.getstate())).encode()
    names = sorted(name for name in {*globals()} - _scene_names if not name.startswith("_"))
    ids = {name: [id(one), id(globals().get(name)), *map(id, _inside(one))] for name, one in world.items()}
    return json.dumps({"told": told(world), "marks": len(history), "taken": notes["taken"], "ids": ids, "made": made,
                       "streams": hashlib.blake2b(streams).hexdigest(), "names": names})

_tools = {*globals()}
'''

STEP = """
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); sched.step(); opt.zero_grad()
    mark()
"""

LOOP = "for x, y in itertools.islice(loader, {steps}):" + STEP

NEXT = (
    LOOP.format(steps=5)
    + """
alike = [0] * world_size
if world_size > 1:
    dist.all_gather_object(alike, json.dumps(told(world)))
alike = len(set(alike))
"""
)
"""The cell after a fault: it trains, and says how many different worlds its ranks hold. All of them: in `gather` one
would speak for those that see the same batches."""

NEXT_IN_PIECES = (
    LOOP.format(steps=5)
    + """
with torch.no_grad(): out = model(X[:16]).tolist()
alike = [0] * world_size
dist.all_gather_object(alike, json.dumps([out, told({"history": history, "sched": sched})]))
alike = len(set(alike))
"""
)
"""The same where ranks hold pieces: each says what it is that all of them make together."""


def limited(body: str) -> str:
    """This cell, which ends well when `limit` steps are done."""
    return f"try:\n{indent(body, '    ')}\nexcept Enough: pass\n"
