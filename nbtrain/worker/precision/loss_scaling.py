"""`16-mixed` behind a plain `loss.backward()`: dynamic loss scaling, as torch's GradScaler does it.

A backward starts from gradients times the scale, and divides what it has left in `.grad` by it: **outside of a backward
no gradient is scaled**, so clipping, logging, editing by hand and accumulation need no help. (Hooks on tensors run
inside: they see what they see under a GradScaler.) Gradients that are not finite are noted per optimizer; its next
step, on all ranks, finds no gradients and does nothing, so that counters like Adam's stand still. Then the scale is
halved; after 2000 steps without such a one it is doubled. A GAN's two steps are one, as where `scaler.update()` is
called once per batch. Scales are powers of two: nothing is rounded.

What a backward leaves gradients in: parameters of the models that the cell has called and of its optimizers, and other
leaves, which are looked for in the graph outside of models (each model's outputs say what lies before it).

Where the cell brings a GradScaler of its own, that one scales, and this one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported
from nbtrain.compat import dtensor
from nbtrain.compat.intercept import Listeners
from nbtrain.compat.tensors import multiply, sparse_values, unscale
from nbtrain.strategies.kit.call_arguments import all_tensors, scaled_starts, with_closure
from nbtrain.worker.loop.steps import OptimizerRound, Steps
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.ranks import collectives

BEFORE = "nbtrain: what lies before the model"
FIRST, LARGEST = 2.0**16, 2.0**126


class LossScaling(Part):
    """Scales losses and unscales gradients. One per runtime: the scale is carried from cell to cell."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.several = False
        """all ranks take every step"""
        self.scale = FIRST
        self.interval = 2000
        """steps without an overflow after which the scale is doubled"""
        self.good = 0
        """steps since the scale was changed"""
        self._in_backward = False
        self._reset((), on=False)

    # --- per cell --------------------------------------------------------------------------------

    def begin(self, cell: Cell) -> None:
        self.several = cell.several and cell.managed
        self._reset(cell.optimizers)

    def _reset(self, optimizers: Iterable[Optimizer], on: bool = True) -> None:
        self.on = on
        self.skipped = 0
        self.users_scaler = False
        """the cell uses a GradScaler of its own"""
        self._optimizers: WeakSet[Optimizer] = WeakSet(optimizers)
        self._round = OptimizerRound(self._optimizers)
        self._ends = self.steps.ends
        self._waiting = self._bad = False
        self._models: WeakSet[nn.Module] = WeakSet()
        """those whose parameters are known"""
        self._parameters: dict[int, ref[torch.Tensor]] = {}
        self._inner: list[torch.Tensor] = []
        """what stands for parameters of the model that is being called, under `functional_call`"""
        self._watched: list[ref[torch.Tensor]] = []
        """intermediate results with `retain_grad()`"""
        self._layout: list[Any] = []
        self._groups: dict[int, int] = {}
        """id of a parameter → the group it is in; 0 where no optimizer has it"""
        self._held: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
        self._found: dict[int, list[torch.Tensor]] = {}
        """group → flags, more than zero where some gradient was not finite"""
        self._spent: set[int] = set()
        """groups whose optimizers have stepped since"""
        self._stash: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def end(self, ok: bool) -> list[str]:
        self.on = self._in_backward = False
        for stash in self._stash.values():  # a step that raised
            _put_back(stash)
        self._update()
        told = []
        if self.users_scaler:
            told.append("the cell scales its losses with a GradScaler of its own, so --precision 16-mixed did not")
        if self.skipped:
            told.append(
                f"{self.skipped:,} of {self.steps.calls + self.skipped:,} steps were skipped: gradients overflowed in "
                f"float16; loss scale is now {self.scale:.0f}"
            )
        self._reset((), on=False)  # keeps nothing of the cell alive
        return told

    def listen(self, listeners: Listeners) -> None:
        listeners.listen("torch.amp.GradScaler.scale", "scaling", self._scaler)
        listeners.listen("torch.optim.Optimizer.zero_grad", "scaling", self._zero_grad)
        listeners.listen("torch.Tensor.retain_grad", "scaling", self._retain_grad)
        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            listeners.hook(register(lambda *_: self.look_again()))

    def look_again(self) -> None:
        """Parameters were added: ask every model for its parameters again."""
        self._models.clear()

    # --- around the call of a model ------------------------------------------------------------------------

    def before_model(self, model: nn.Module) -> None:
        """Before the outermost call of a model: learn its parameters."""
        self._inner = []
        if not self.on or (model in self._models and next(model.parameters()).is_leaf):
            return
        parameters = list(model.parameters())
        self._learn(p for p in parameters if p.is_leaf)
        self._inner = [p for p in parameters if not p.is_leaf]  # of `functional_call`: made of others
        if not self._inner:
            self._models.add(model)

    def after_model(self, given: Any, returned: Any) -> None:
        """After that call: mark the outputs' nodes with what lies before the model."""
        if not self.on or not torch.is_grad_enabled():
            return
        before = [get_gradient_edge(t).node for t in all_tensors((given, self._inner)) if t.requires_grad]
        for tensor in all_tensors(returned):
            node: Any = tensor.grad_fn
            if node is not None and node not in before:
                node.metadata[BEFORE] = before

    # --- what torch calls ------------------------------------------------------------------------

    def backward(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.autograd.backward` that starts from scaled gradients, and unscales what it leaves."""

        def scaled(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            # A gradient that is to be differentiated again is a result, not something to be divided in place.
            again = kwargs.get("create_graph", args[1] if len(args) > 1 else False)
            if not self.on or self.users_scaler or self._in_backward or again:
                return old(tensors, grad_tensors, *args, **kwargs)
            self._turn()
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            starts = scaled_starts(roots, grad_tensors, self.scale)
            if starts is None:
                return old(tensors, grad_tensors, *args, **kwargs)
            leaves = [*_leaves(roots), *(t for t in (watched() for watched in self._watched) if t is not None)]
            with torch.no_grad():
                for _, gradients in self._gradients(leaves):
                    multiply(gradients, self.scale)
            self._in_backward = True
            try:
                return old(roots, starts, *args, **kwargs)
            finally:
                self._in_backward = False
                self._unscale(leaves)

        return scaled

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hide gradients that overflowed from this step. Returns new arguments for `step`, or None."""
        if not self.on or self.users_scaler:
            return None
        if self._in_backward:
            raise NotSupported(
                f"--precision 16-mixed: {type(optimizer).__name__} steps inside of a backward, where gradients are "
                "scaled; step after loss.backward(), or take --precision bf16-mixed"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._look(optimizer)
            return None
        if isinstance(optimizer, torch.optim.LBFGS):
            raise NotSupported(
                "--precision 16-mixed: LBFGS goes on from the gradients of one evaluation to the next, so that none of "
                "them can be left out when it overflows; take --precision bf16-mixed"
            )

        def looked(closure: Any) -> Any:
            def evaluate() -> Any:
                loss = closure()
                self._look(optimizer)
                return loss

            return evaluate

        return with_closure(args, kwargs, looked)

    def after_step(self, optimizer: Optimizer) -> bool:
        """Whether the step was skipped."""
        if not self.on or self.users_scaler:
            return False
        stash = self._stash.pop(id(optimizer), None)
        self._spent |= self._held.get(optimizer, set())
        if self._round.has(optimizer):
            self._update()
        self._round.stepped(optimizer)
        self._waiting = True
        if stash is None:
            return False
        _put_back(stash)
        self._bad = True
        self.skipped += 1
        return True

    def _scaler(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if self.on and scaler.is_enabled():
                self.users_scaler = True
            return old(scaler, *args, **kwargs)

        return scale

    def _zero_grad(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            old(optimizer, *args, **kwargs)
            for group in self._held.get(optimizer, ()):
                self._found.pop(group, None)

        return zero_grad

    def _retain_grad(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def retain_grad(tensor: torch.Tensor) -> None:
            old(tensor)
            if self.on and not tensor.is_leaf:
                self._watched = [reference for reference in self._watched if reference() is not None]
                self._watched.append(ref(tensor))

        return retain_grad

    # --- gradients -------------------------------------------------------------------------------

    def _gradients(self, leaves: Iterable[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """(group, gradients of one device and dtype), of the known parameters and of `leaves`."""
        self._deal()
        by_place: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
        known = [tensor for reference in self._parameters.values() if (tensor := reference()) is not None]
        here = set(map(id, known))
        known += {id(leaf): leaf for leaf in leaves if id(leaf) not in here}.values()
        for tensor in known:
            gradient = tensor.grad
            if gradient is None:
                continue
            if type(gradient) is not torch.Tensor and dtensor.is_divided(gradient):
                gradient = dtensor.local(gradient)
            if gradient.is_sparse:
                gradient = sparse_values(gradient)
            where = self._groups.get(id(tensor), 0), gradient.device, gradient.dtype
            by_place.setdefault(where, []).append(gradient)
        for (group, _, _), gradients in by_place.items():
            yield group, gradients

    @torch.no_grad()
    def _unscale(self, leaves: Iterable[torch.Tensor]) -> None:
        self._found.pop(0, None)
        for group in self._spent:
            self._found.pop(group, None)
        self._spent.clear()
        for group, gradients in self._gradients(leaves):
            device = gradients[0].device
            flags = self._found.setdefault(group, [])
            flag = next((flag_there for flag_there in flags if flag_there.device == device), None)
            if flag is None:
                flags.append(flag := torch.zeros(1, device=device))
            share = torch.full((1,), 1 / self.scale, device=device)
            unscale(gradients, flag, share)

    def _learn(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            self._parameters[id(parameter)] = ref(parameter)

    def _deal(self) -> None:
        """Note which optimizer has which parameter, if that has changed."""
        optimizers = list(self._optimizers)
        groups = [(id(o), [(len(g["params"]), id(g["params"][-1])) for g in o.param_groups if g["params"]])
                  for o in optimizers]  # fmt: skip
        if groups == self._layout:
            return
        self._layout = groups
        self._groups.clear()
        self._found.clear()
        for number, optimizer in enumerate(optimizers, 1):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._learn(parameters)
            self._held[optimizer] = {self._groups.setdefault(id(p), number) for p in parameters}

    def _look(self, optimizer: Optimizer) -> None:
        """Before a step: if any gradient on any rank is not finite, take all of them away."""
        if optimizer in self._optimizers:
            groups = self._held.get(optimizer, set())
        else:  # made in this cell, so that its parameters were nobody's
            self._optimizers.add(optimizer)
            groups = {0}
        bad = any(bool(flag.item()) for group in groups for flag in self._found.get(group, ()))
        if self.several:
            bad = bool(collectives.reduce(float(bad), "max"))
        if bad:
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._stash[id(optimizer)] = [(p, p.grad) for p in held]
            for p in held:
                p.grad = None

    # --- the scale -------------------------------------------------------------------------------

    def _turn(self) -> None:
        """A backward begins: update the scale if the last step is over."""
        if self._round.complete or self.steps.ends != self._ends:
            self._update()
        left = {
            self._groups.get(key, 0)
            for key, parameter in self._parameters.items()
            if (tensor := parameter()) is not None and tensor.grad is not None
        }
        self._found = {group: flags for group, flags in self._found.items() if group in left}

    def _update(self) -> None:
        self._ends = self.steps.ends
        if not self._waiting:
            return
        if self._bad:
            self.scale, self.good = self.scale / 2, 0
        else:
            self.good += 1
            if self.good >= self.interval:
                self.scale, self.good = min(self.scale * 2, LARGEST), 0
        self._waiting = self._bad = False


def _put_back(stash: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give parameters their gradients again, where the loop has not set others."""
    for parameter, gradient in stash:
        if parameter.grad is None:
            parameter.grad = gradient


def _leaves(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What a backward from here leaves gradients in, without looking into models."""
    leaves = []
    seen = set()
    nodes: list[Any] = [get_gradient_edge(root).node for root in roots if root.requires_grad]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            leaves.append(node.variable)
        elif (before := node.metadata.get(BEFORE)) is not None:
            nodes += before
        else:
            nodes += [behind for behind, _ in node.next_functions]
    return leaves
