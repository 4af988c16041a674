"""Divides an optimizer's step: each rank steps the parameters that it owns.

During a step the optimizer's groups hold the rank's own parameters, outside of it all of them. So the user's own
optimizer does the work; schedulers, clipping, closures and hooks on its step find the groups that they know. One of
which it is not known that it treats each parameter by itself is not divided: every rank steps it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.strategies.base import Component, Piece, Shards
from nbtrain.strategies.kit import functional_transforms
from nbtrain.strategies.kit.call_arguments import with_closure
from nbtrain.strategies.kit.component_tensors import added, parameters_of
from nbtrain.strategies.kit.gradient_average import GradientAverage
from nbtrain.strategies.kit.per_parameter_optimizers import steps_each_alone, why_whole
from nbtrain.strategies.kit.replicated import Averaged, replicas_of
from nbtrain.strategies.kit.same_on_ranks import far_apart
from nbtrain.strategies.kit.sharded_state import ShardedState
from nbtrain.strategies.kit.step_hooks import StepHooks
from nbtrain.strategies.kit.written_numbers import FIRST, compare

METHODS = ("zero_grad", "state_dict", "load_state_dict", "add_param_group")
APART = (
    "the ranks come to optimizer.step() with different {what}, and under {strategy} one rank steps a weight for all of "
    "them: a number of a rank's own was written there (p.grad.mul_(c), the limit of a clipping). Give all ranks the "
    "same: c = reduce(c), or for random numbers torch.randn_like(p)"
)


class DividedSteps:
    """Lets each rank step what it owns. `ready(optimizer)`: called before a step. `send(optimizer)`: called after it,
    gives the owners' parameters to all ranks. Both are collective."""

    def __init__(
        self, state: ShardedState, ready: Callable[[Optimizer], None], send: Callable[[Optimizer], None]
    ) -> None:
        self.state, self.send, self.ready = state, send, ready
        self._trimmed: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        """groups that hold the rank's own parameters only, and all that they should hold"""
        self._covered: list[tuple[Optimizer, str]] = []
        """methods that are replaced meanwhile, so that they see whole groups"""
        self._hooks = StepHooks(self._trim, self._stepped, state.loaded)
        self._changed = False
        self._plain: Any = None
        """the context of a step, in which an owner's state is of ordinary tensors"""

    def enter(self, optimizers: Iterable[Optimizer]) -> None:
        """A cell is about to run, or to go on. Collective, unless it runs already."""
        if self.state.in_cell:
            return
        optimizers = list(optimizers)
        self.state.enter(optimizers)
        self._hooks.hang(optimizers)
        functional_transforms.listening.off(self)
        functional_transforms.listening.on(self)

    def leave(self, pause: bool) -> None:
        functional_transforms.listening.off(self)
        self.restore()
        self._hooks.leave(pause)
        self.state.leave()

    def restore(self) -> None:
        """Make groups complete. Called before a backward and a clipping, too: a step may have raised, and the loop
        gone on."""
        if self._plain is not None:
            self._plain.__exit__(None, None, None)
            self._plain = None
        while self._trimmed:
            group, parameters = self._trimmed.pop()
            group["params"] = parameters
        while self._covered:
            optimizer, name = self._covered.pop()
            vars(optimizer).pop(name, None)

    def _trim(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self.restore()
        self.ready(optimizer)
        if self.state.edited(optimizer):
            self.state.renew(optimizer)
        self._changed = self.state.stepping(optimizer)
        self._keep_mine(optimizer)
        return with_closure(args, kwargs, lambda closure: self._computing(optimizer, closure))

    def _computing(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def computed() -> Any:
            loss = closure()
            self.ready(optimizer)
            return loss

        return self._on_whole(optimizer, computed)

    def _keep_mine(self, optimizer: Optimizer) -> None:
        self._plain = tensors.as_plain_tensors()
        self._plain.__enter__()
        mine = (self.state.rank, None)
        for group in optimizer.param_groups:
            self._trimmed.append((group, group["params"]))
            group["params"] = [p for p in group["params"] if self.state.owner(p) in mine]
        for name in METHODS:  # a step may raise, and the loop catch it: no hook of torch's says so
            if name not in vars(optimizer):
                vars(optimizer)[name] = self._on_whole(optimizer, getattr(optimizer, name))
                self._covered.append((optimizer, name))

    def _on_whole(self, optimizer: Optimizer, function: Callable[..., Any]) -> Callable[..., Any]:
        def whole(*args: Any, **kwargs: Any) -> Any:
            self.restore()
            try:
                return function(*args, **kwargs)
            finally:
                self._keep_mine(optimizer)

        return whole

    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()
        self.send(optimizer)
        self.state.stepped(optimizer, self._changed)


class PreparedDivided(Averaged, Shards):
    """A component that is whole on every rank, but for the state of its optimizers, of which each rank steps a part."""

    promises = replace(Averaged.promises, steps_alone=False)

    def __init__(self, component: Component, sync: GradientAverage, strategy: str, owners: Mapping[int, int]) -> None:
        """`owners`: id of a parameter → the rank that steps it; every rank steps the others."""
        super().__init__(component, sync)
        self.owners = owners
        self.state = ShardedState(strategy, lambda p: self.owners.get(id(p)))
        self.steps = DividedSteps(self.state, self.before_step, self.send)
        self.stepped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """how often in this cell"""
        self.notes += why_whole(component.optimizers.values())
        for optimizer in self.divided():
            self.state.cut(optimizer)

    def divided(self) -> list[Optimizer]:
        """The optimizers that are divided: all of which it is known that they treat each parameter by itself."""
        return [optimizer for optimizer in self.component.optimizers.values() if steps_each_alone(optimizer)]

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse what ranks have written each for itself, which leaves no trace after the step: all have its owner's.
        Collective."""
        count = self.stepped[optimizer] = self.stepped.get(optimizer, 0) + 1
        if count > FIRST and count & (count - 1):
            return
        parameters = [p for p in parameters_of(optimizer) if id(p) in self.owners]
        kinds = self.to_be_the_same(parameters) | {"states": self.state.written(optimizer)}
        if parameters and (what := far_apart(kinds, parameters[0].device)):
            raise NotSupported(APART.format(what=" and ".join(what), strategy=self.state.strategy))
        if parameters:
            compare(parameters[0].device)

    def to_be_the_same(self, parameters: list[torch.Tensor]) -> dict[str, list[torch.Tensor | None]]:
        """What a step reads besides states that were edited."""
        return {"gradients": [p.grad for p in parameters], "weights": [*parameters]}

    def send(self, optimizer: Optimizer) -> None:
        """Called after a step: send the owners' parameters to all ranks. Collective."""
        raise NotImplementedError

    def enter(self) -> None:
        self.stepped.clear()
        self.steps.enter(self.divided())

    def leave(self, pause: bool = False) -> None:
        self.steps.leave(pause)
        super().leave(pause)

    def backward(self, sync: bool = True) -> AbstractContextManager[float]:
        self.steps.restore()
        return super().backward(sync)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float | None) -> torch.Tensor | None:
        self.steps.restore()
        return super().clip(parameters, max_norm, norm_type)

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        return replicas_of(self.component)

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        yield from self.state.pieces(self.divided())

    def grow(self, component: Component) -> bool:
        new, self.component = added(self.component, component), component
        self.notes += why_whole(new)
        for optimizer in filter(steps_each_alone, new):
            self.state.cut(optimizer)
        return True

    def close(self, whole: bool = True) -> None:
        if whole:
            self.state.make_whole(self.divided())
        self.leave()
        self.sync.close()
