"""What other packages keep to themselves is touched in nbtrain/compat alone, and their functions are replaced in
nbtrain/compat/intercept.py alone."""

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
    found = [one for path, source in sources("nbtrain/compat/intercept.py") for one in assigned(source, path, SETTINGS)]
    assert not found, "\n" + "\n".join(map(str, found))


@pytest.mark.parametrize(("source", "what"), [
    # imports
    ("from torch._subclasses.fake_tensor import FakeTensor", "torch._subclasses.fake_tensor.FakeTensor"),
    ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
    ("import torch._dynamo", "torch._dynamo"),
    ("import _ctypes", "_ctypes"),
    ("from nbtrain.base.humanize import _flag", "_flag"),
    # attributes
    ("import torch\ntorch._C._current_graph_task_id()", "torch._C._current_graph_task_id"),
    ("import torch.nn as n\nn.Module._call_impl(m)", "torch.nn.Module._call_impl"),
    ("import sys\nsys._getframe(1)", "sys._getframe"),
    ("for m in found:\n    m._parameters.clear()", "m._parameters"),
    ("from torch import nn\nclass M(nn.Module):\n    def f(self): return self._buffers", "self._buffers"),
    ("class A(B):\n    def _f(self): return super()._f()", "super()._f"),
    # strings
    ('getattr(x, "_local_tensor", None)', "_local_tensor"),
    ('attrgetter("inner._state")', "inner._state"),
    ('name.replace("_orig_mod.", "")', "_orig_mod."),
    ('"torch._dynamo" in sys.modules', "torch._dynamo"),
    ('find(f"{FOLDER}._state")', "._state"),
    ('class A:\n    def f(self): return getattr(self, "_hidden")', "_hidden"),
    ("f(_private=1)", "_private"),
])  # fmt: skip
def test_private_names_are_found(source: str, what: str) -> None:
    assert any(what in one.what for one in private(source)), private(source)


@pytest.mark.parametrize(("source", "what"), [
    ("import torch\ntorch.compile = f", "torch.compile is set"),
    ("import torch.distributed as dist\ndist.a, x = f, 1", "torch.distributed.a is set"),
    ("import torch\ndel torch.compile", "torch.compile is deleted"),
    ("from x import D\nsetattr(D, '__str__', f)", "x.D.__str__ is set"),
    ("from x import D\ndelattr(D, '__str__')", "x.D.__str__ is deleted"),
    ("from x import D\nvars(D)['a'] = 1", "x.D.a is set"),
    ("from x import D\nD.__dict__.update(a=1)", "x.D is changed by update()"),
    ("import x\nfor x.a in y: pass", "x.a is set"),
])  # fmt: skip
def test_what_is_set_of_others_is_found(source: str, what: str) -> None:
    assert any(one.what.startswith(what) for one in assigned(source)), assigned(source)
