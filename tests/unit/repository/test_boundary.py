"""What other packages keep to themselves is touched in nbtrain/compat alone, and their functions are replaced in
nbtrain/intercept.py alone."""

from __future__ import annotations

import pytest

from tests.support.boundary import assigned, private, sources

WORDS = {
    **dict.fromkeys(("_v2", "_v3"), "how names of NVML's public functions end: they have versions"),
    "__i": "how Python's operators that work in place begin: __iadd__",
}
"""Strings that look like the names of something private, and are none. string → why"""

SETTINGS = {
    "torch.backends.cudnn.benchmark": "torch documents it as a switch to set",
    "torch.backends.cudnn.deterministic": "torch documents it as a switch to set",
    "sys.stdout": "Python documents that another file may stand there",
    "sys.stderr": "Python documents that another file may stand there",
    "sys.__stdout__": "a rank has no other: what a cell puts back is to go to the notebook, too",
    "sys.__stderr__": "a rank has no other: what a cell puts back is to go to the notebook, too",
    "sys.breakpointhook": "Python documents it as a hook to set",
    "pdb.set_trace": "on a rank nobody can type, so pdb asks in the notebook: as with input",
    "sys.{name}": "the last error, which Python sets and a rank takes away again",
    "deepspeed.runtime.zero.partition_parameters.Init.param_id": "a counter of DeepSpeed's, which ranks compare",
    "torch.utils.hooks.RemovableHandle.next_id": "the counter that numbers hooks: those that came over keep theirs",
    "torch.optim.optimizer.{name}": "tables of hooks, empty for a step on copies, and then torch's own again",
    "builtins.input": "nobody can type on a rank, whose process has no other use; a kernel sets it, too",
    "getpass.getpass": "the same",
    "importlib.machinery.SourceFileLoader.path_stats": "Python's: a rank knows from it which files it has read, also "
    "between cells, for as long as its process lives",
    "importlib.machinery.SourceFileLoader.exec_module": "Python's: what a local file made is noted",
    "lightning_utilities.core.rank_zero.rank_zero_only.rank": "its documentation has users set it",
    "builtins.{name}": "nbtrain's own names, which a rank's cells know without importing them",
}
"""What is made to be set. path → why"""


def test_what_others_keep_to_themselves_is_touched_in_compat_alone() -> None:
    found = [one for path, source in sources("nbtrain/compat/") for one in private(source, path, WORDS)]
    assert not found, "\n" + "\n".join(map(str, found))


def test_functions_of_others_are_replaced_in_intercept_alone() -> None:
    found = [one for path, source in sources("nbtrain/intercept.py") for one in assigned(source, path, SETTINGS)]
    assert not found, "\n" + "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("source", "what"),
    [
        # imports
        ("from torch._subclasses.fake_tensor import FakeTensor", "torch._subclasses.fake_tensor.FakeTensor"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch.x._y as z", "torch.x._y"),
        ("import _ctypes", "_ctypes"),
        ("from _thread import allocate_lock", "_thread.allocate_lock"),
        ("def f():\n    from torch._utils import flatten", "torch._utils.flatten"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import _C", "torch._C"),
        ("from nbtrain.humanize import _flag", "_flag"),
        # attributes
        ("import torch\ntorch._C._current_graph_task_id()", "torch._C._current_graph_task_id"),
        ("import torch.nn as n\nn.Module._call_impl(m)", "torch.nn.Module._call_impl"),
        ("from torch import nn\nx: nn._Thing", "torch.nn._Thing"),
        ("import sys\nsys._getframe(1)", "sys._getframe"),
        ("import nbtrain.humanize as words\nwords._flag()", "nbtrain.humanize._flag"),
        ("for m in found:\n    m._parameters.clear()", "m._parameters"),
        ("self.engine._hook()", "self.engine._hook"),
        ("f()._config['x'] = 1", "f()._config"),
        ("from torch import nn\nclass M(nn.Module):\n    def f(self): return self._buffers", "self._buffers"),
        ("class A(B):\n    def _f(self): return super()._f()", "super()._f"),
        ("class A(B): pass\nA._registry", "A._registry"),
        # strings
        ('getattr(x, "_local_tensor", None)', "_local_tensor"),
        ('setattr(x, "_opt_called", True)', "_opt_called"),
        ('hasattr(x, "_orig_mod")', "_orig_mod"),
        ('vars(m)["_modules"]', "_modules"),
        ('attrgetter("inner._state")', "inner._state"),
        ('HOOKS = ("_forward_hooks", "_backward_hooks")', "_backward_hooks"),
        ('body = {"_call_impl": call}', "_call_impl"),
        ('name.replace("_orig_mod.", "")', "_orig_mod."),
        ('"torch._dynamo" in sys.modules', "torch._dynamo"),
        ('x.startswith("torch._subclasses")', "torch._subclasses"),
        ('LOCKS = ("_thread.lock",)', "_thread.lock"),
        ('find(f"{FOLDER}._state")', "._state"),
        ('class A:\n    def f(self): return getattr(self, "_hidden")', "_hidden"),
        ("f(_private=1)", "_private"),
    ],
)
def test_private_names_are_found(source: str, what: str) -> None:
    assert any(what in one.what for one in private(source)), private(source)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import torch\ntorch.compile = f", "torch.compile is set"),
        ("from torch import nn\nnn.Module.__call__ = f", "torch.nn.Module.__call__ is set"),
        ("import torch.distributed as dist\ndist.a, x = f, 1", "torch.distributed.a is set"),
        ("from torch.optim import Optimizer as O\nO.step: Any = f", "torch.optim.Optimizer.step is set"),
        ("import deepspeed\ndeepspeed.runtime.count += 1", "deepspeed.runtime.count is set"),
        ("import torch\ndel torch.compile", "torch.compile is deleted"),
        ("def f():\n    import torch\n    torch.compile = g", "torch.compile is set"),
        ("from x import D\nsetattr(D, '__str__', f)", "x.D.__str__ is set"),
        ("from x import D\nfor name in names: setattr(D, name, f)", "x.D.{name} is set"),
        ("from x import D\ndelattr(D, '__str__')", "x.D.__str__ is deleted"),
        ("from x import D\ntype.__setattr__(D, 'a', 1)", "x.D.a is set"),
        ("from x import D\nvars(D)['a'] = 1", "x.D.a is set"),
        ("from x import D\nD.__dict__.update(a=1)", "x.D is changed by update()"),
        ("import x\nfor x.a in y: pass", "x.a is set"),
        ("import x\nwith y as x.a: pass", "x.a is set"),
        # by another name
        ("import x\none: Any = x.Y\none.a = 1", "x.Y.a is set"),
        ("import x\ndef f():\n    one = x.y\n    two = one.z\n    two.a = 1", "x.y.z.a is set"),
        ("from x import Y, Z\nfor one in (Y, Z): setattr(one, 'a', 1)", "x.Y.a is set"),
        ("import sys\nsys.modules['torch'].compile = f", "torch.compile is set"),
        ("import sys\ntorch = sys.modules.get('torch')\ntorch.compile = f", "torch.compile is set"),
        ("from importlib import import_module\nm = import_module('a.b')\nm.c = 1", "a.b.c is set"),
        ("from x import Y\ndef put(owner, name): setattr(owner, name, 1)\nput(Y, 'a')", "x.Y is given to put()"),
        ("from x import Y\nclass A:\n    def p(self, o): o.a = 1\n    def q(self): self.p(o=Y)", "x.Y is given to p()"),
    ],
)
def test_what_is_set_of_others_is_found(source: str, what: str) -> None:
    assert any(one.what.startswith(what) for one in assigned(source)), assigned(source)
