"""`--accumulate K` in a script: an object that counts batches, and an `if` around what ends a step."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.errors import NotSupported
from nbtrain.export.text_edits import Edits, under_condition

CODE = '''
class Accumulation:
    """The gradients of ACCUMULATE batches, or of those that are left at a loader's end, make one step: their mean."""

    def __init__(self):
        self.batches = 0
        """those whose gradients wait for a step"""
        self.last_batch = False
        """of its loader"""
        self.due = True
        """the batch whose gradients came last ends with a step"""

    def ends(self):
        """Whether the batch whose gradients come next does."""
        return self.batches + 1 >= ACCUMULATE or self.last_batch

    def backward(self, loss, *args, **kwargs):
        self.due = self.ends()
        {synchronize}(loss / ACCUMULATE).backward(*args, **kwargs)
        self.batches += 1
        if self.due and self.batches < ACCUMULATE:
            for parameter in (one for name in MODELS for one in globals()[name].parameters()):
                if parameter.grad is not None:
                    parameter.grad *= ACCUMULATE / self.batches
        if self.due:
            self.batches = 0


accumulation = Accumulation()


class Counted(OnDevice):
    """A loader that says which batch is its last."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__(), 1):
            accumulation.last_batch = number == len(self)
            yield batch
        accumulation.last_batch = False
'''
PIECES_WAIT = """for name in MODELS if WORLD_SIZE > 1 else ():
            globals()[name].set_requires_gradient_sync(self.due)
        """
"""of fully_shard"""
REPLICA_WAITS = """\
        self.require_backward_grad_sync = accumulation.ends()  # else gradients are added up on this process alone
"""
DUE = "accumulation.due"
CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def accumulated(text: str, namespace: Mapping[str, Any]) -> str:
    """The text, in which a step, and what belongs to it, is taken where it is due."""
    edits = Edits(text)
    tree = ast.parse(text)
    statements = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for scope in ast.walk(tree):
        if isinstance(scope, ast.For | ast.FunctionDef) and _backwards(scope) > 1:
            raise _refused("a loop with several backwards cannot count by them; add the losses up")
    for one in ast.walk(tree):
        if not isinstance(one, ast.Call):
            continue
        name = _name(one.func)
        if _is_backward(one):
            assert isinstance(one.func, ast.Attribute)
            loss = one.func.value
            if _name(loss) == "autograd":
                raise _refused("write loss.backward() in place of torch.autograd.backward")
            edits.around(loss, "accumulation.backward(", "")
            start = loss.end_lineno or 0, loss.end_col_offset or 0
            given: list[Any] = [*one.args, *one.keywords]
            end = (given[0].lineno, given[0].col_offset) if given else (one.end_lineno or 0, one.end_col_offset or 0)
            edits.replace(start, end, ", " if given else ")")
        elif _ends_step(one, namespace) and id(one) not in statements:
            if name not in CLIPS:
                raise _refused(f"{ast.unparse(one)} must be a statement of its own")
            limit = next((word.value for word in one.keywords if word.arg == "max_norm"), *one.args[1:2])
            edits.around(limit, "", f' if {DUE} else float("inf")')
        elif name == "step" and one.args and isinstance(_value(one.func, namespace), Optimizer):
            raise _refused("a closure has its backward inside of the step")
    return under_condition(edits.text(), DUE, lambda tree: set(_waiting(tree, False, namespace)))


def _waiting(node: ast.AST, between: bool, namespace: Mapping[str, Any]) -> Iterator[int]:
    """ids of the statements that wait for a step. `between`: two epochs, where the last batch has made one."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.Expr) and _ends_step(one.value, namespace) and not between:
            yield id(one)
        elif isinstance(one, ast.For):
            inner = [part for part in ast.walk(one) if isinstance(part, ast.For) and part is not one]
            leaves = any(isinstance(part, ast.Break) for loop in inner for part in ast.walk(loop))
            yield from _waiting(one, bool(inner) and not leaves, namespace)
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _waiting(one, False, namespace)
        else:
            yield from _waiting(one, between, namespace)


def _ends_step(node: ast.AST, namespace: Mapping[str, Any]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = _name(node.func)
    if name in CLIPS:
        return True
    if not isinstance(node.func, ast.Attribute):
        return False
    if name in ("unscale_", "update"):
        return isinstance(_value(node.func, namespace), GradScaler)
    known = _value(node.func, namespace)
    return name in ("step", "zero_grad") and (
        known is None or isinstance(known, Optimizer | LRScheduler | GradScaler | nn.Module)
    )


def _value(call: ast.AST, namespace: Mapping[str, Any]) -> Any:
    """The object whose method it is, where that is a name of the notebook."""
    held = call.value if isinstance(call, ast.Attribute) else call
    return namespace.get(held.id) if isinstance(held, ast.Name) else None


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def _backwards(scope: ast.AST) -> int:
    """Without those of loops and functions in it."""
    return sum(
        _is_backward(one) + _backwards(one)
        for one in ast.iter_child_nodes(scope)
        if not isinstance(one, ast.For | ast.FunctionDef)
    )


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _refused(why: str) -> NotSupported:
    return NotSupported(f"export with --accumulate: {why}")
