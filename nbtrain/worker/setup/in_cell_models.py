"""Sets up models that a cell makes, as soon as an optimizer is made for them or gets their parameters.

`for fold in folds: model = Net(); optimizer = Adam(model.parameters())` is an ordinary loop. Its models are set up like
those of the notebook: an optimizer knows its parameters, and the modules that own them are noted when they register
them. All ranks make their optimizers in the same order, as they do everything that needs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from nbtrain.compat import modules
from nbtrain.compat.intercept import Listeners
from nbtrain.strategies.base import is_lazy

Held = dict[int, ref[nn.Module]]


class InCellModels:
    """Which modules own which parameters and children, of those made while a cell runs."""

    def __init__(self, active: Callable[[], bool], set_up: Callable[[list[nn.Module], Optimizer], None]) -> None:
        """`set_up`: called with the models that own a new optimizer's parameters, and the optimizer."""
        self.active = active
        self.set_up = set_up
        self._owners: Held = {}
        self._parents: Held = {}
        self._being_made: Optimizer | None = None

    def begin(self) -> None:
        self._owners.clear()
        self._parents.clear()

    def listen(self, listeners: Listeners) -> None:
        listeners.hook(register_module_parameter_registration_hook(self._note(self._owners)))
        listeners.hook(register_module_module_registration_hook(self._note(self._parents)))
        listeners.listen("torch.nn.Module.__setstate__", "in_cell_models", self._copied)
        listeners.listen("torch.optim.Optimizer.__init__", "in_cell_models", self._init)
        listeners.listen("torch.optim.Optimizer.add_param_group", "in_cell_models", self._add)

    def models(self, parameters: Iterable[Any]) -> list[nn.Module]:
        """The outermost modules that hold these parameters, of those made in the cell."""
        found: dict[int, nn.Module] = {}
        for parameter in parameters:
            owner = _holder(self._owners, parameter, modules.PARAMETERS)
            while owner is not None and (parent := _holder(self._parents, owner, modules.CHILDREN)) is not None:
                owner = parent
            if owner is not None:
                found[id(owner)] = owner
        return list(found.values())

    def alike(self, models: Iterable[nn.Module], ready: Callable[[Any], bool]) -> list[nn.Module]:
        """Copies of these models that the cell made before the optimizer, as for an average of the weights: models of
        the same shapes that are not set up. In the order in which they were made."""
        shapes = [[p.shape for p in model.parameters()] for model in models]
        apart = [owner() for owner in self._owners.values()]
        own = [p for module in apart if module is not None for p in module.parameters(recurse=False)]
        others = self.models(p for p in own if not ready(p))
        return [one for one in others if [p.shape for p in one.parameters() if not is_lazy(p)] in shapes]

    def _note(self, held: Held) -> Callable[[nn.Module, str, Any], None]:
        def registered(module: nn.Module, name: str, item: Any) -> None:
            if item is not None and self.active():
                _hold(held, item, module)

        return registered

    def _copied(self, old: Callable[..., None]) -> Callable[..., None]:
        """For `copy.deepcopy(model)`, which registers nothing."""

        def setstate(module: nn.Module, state: Any) -> None:
            old(module, state)
            if self.active():
                for held, items in (
                    (self._owners, modules.parameters(module)),
                    (self._parents, modules.children(module)),
                ):
                    for item in items.values():
                        if item is not None:
                            _hold(held, item, module)

        return setstate

    def _init(self, old: Callable[..., None]) -> Callable[..., None]:
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            outer, self._being_made = self._being_made, optimizer
            try:
                old(optimizer, *args, **kwargs)
            finally:
                self._being_made = outer
            self._look(optimizer)

        return init

    def _add(self, old: Callable[..., None]) -> Callable[..., None]:
        def add(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            old(optimizer, *args, **kwargs)
            if self._being_made is not optimizer:
                self._look(optimizer)

        return add

    def _look(self, optimizer: Optimizer) -> None:
        if self.active():
            self.set_up(self.models(p for group in optimizer.param_groups for p in group["params"]), optimizer)


def _hold(held: Held, item: Any, module: nn.Module) -> None:
    held.pop(id(item), None)  # to keep the order in which they were made
    held[id(item)] = ref(module)


def _holder(held: Held, item: Any, table: str) -> nn.Module | None:
    """The module that holds it; None also where the id is another object's by now."""
    found = held.get(id(item))
    module = found() if found is not None else None
    if module is None or not any(one is item for one in getattr(module, table).values()):
        return None
    return module
