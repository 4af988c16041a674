"""Sets up models that a cell makes: by `setup(...)`, or as soon as an optimizer is made for them or gets their
parameters.

`for fold in folds: model = Net(); optimizer = Adam(model.parameters())` is an ordinary loop. Its models are set up like
those of the notebook: an optimizer knows its parameters, and the modules that own them are noted when they register
them. All ranks make their optimizers in the same order, as they do everything that needs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported
from nbtrain.compat import modules
from nbtrain.compat.dtensor import is_divided
from nbtrain.compat.intercept import Listeners
from nbtrain.exchange.kinds.checksum import checksum
from nbtrain.strategies.base import is_lazy
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.precision.activation_checkpointing import ActivationCheckpointing
from nbtrain.worker.random_states.rank_random_states import Randomness
from nbtrain.worker.ranks import collectives
from nbtrain.worker.setup import whole
from nbtrain.worker.setup.components import Components

if TYPE_CHECKING:
    from nbtrain.worker.backward_and_step import BackwardAndStep
    from nbtrain.worker.checkpoints.checkpoints_of_cell import Checkpoints

Held = dict[int, ref[nn.Module]]


class InCellModels(Part):
    """Which modules own which parameters and children, of those made while a cell runs."""

    def __init__(
        self,
        components: Components,
        checkpoints: Checkpoints,
        randomness: Randomness,
        backward_and_step: BackwardAndStep,
        recompute: ActivationCheckpointing,
        low_precision: bool,
    ) -> None:
        """`low_precision`: a model is cast when it is set up, also where there is one rank."""
        self.components, self.checkpoints, self.randomness = components, checkpoints, randomness
        self.backward_and_step, self.recompute = backward_and_step, recompute
        self.listens = low_precision or components.world_size > 1
        self.active = False
        """all ranks run the cell, and the strategy sets up what it makes"""
        self._owners: Held = {}
        self._parents: Held = {}
        self._being_made: Optimizer | None = None

    def begin(self, cell: Cell) -> None:
        self.active = cell.managed and self.listens
        self._owners.clear()
        self._parents.clear()

    def end(self, ok: bool) -> None:
        self.active = False

    def listen(self, listeners: Listeners) -> None:
        if not self.listens:
            return
        listeners.hook(register_module_parameter_registration_hook(self._note(self._owners)))
        listeners.hook(register_module_module_registration_hook(self._note(self._parents)))
        listeners.listen("torch.nn.Module.__setstate__", "in_cell_models", self._copied)
        listeners.listen("torch.optim.Optimizer.__init__", "in_cell_models", self._init)
        listeners.listen("torch.optim.Optimizer.add_param_group", "in_cell_models", self._add)

    def models(self, parameters: Iterable[Any]) -> list[nn.Module]:
        """The outermost modules that hold these parameters, of those made in the cell."""
        by_id: dict[int, nn.Module] = {}
        for parameter in parameters:
            owner = _holder(self._owners, parameter, modules.PARAMETERS)
            while owner is not None and (parent := _holder(self._parents, owner, modules.CHILDREN)) is not None:
                owner = parent
            if owner is not None:
                by_id[id(owner)] = owner
        return list(by_id.values())

    def alike(self, models: Iterable[nn.Module], ready: Callable[[Any], bool]) -> list[nn.Module]:
        """Copies of these models that the cell made before the optimizer, as for an average of the weights: models of
        the same shapes that are not set up. In the order in which they were made."""
        shapes = [[p.shape for p in model.parameters()] for model in models]
        apart = [owner() for owner in self._owners.values()]
        own = [p for module in apart if module is not None for p in module.parameters(recurse=False)]
        others = self.models(p for p in own if not ready(p))
        return [model for model in others if [p.shape for p in model.parameters() if not is_lazy(p)] in shapes]

    def _note(self, held: Held) -> Callable[[nn.Module, str, Any], None]:
        def registered(module: nn.Module, name: str, item: Any) -> None:
            if item is not None and self.active:
                _hold(held, item, module)

        return registered

    def _copied(self, old: Callable[..., None]) -> Callable[..., None]:
        """For `copy.deepcopy(model)`, which registers nothing."""

        def setstate(module: nn.Module, state: Any) -> None:
            old(module, state)
            if self.active:
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
        if self.active:
            self.set_up(self.models(p for group in optimizer.param_groups for p in group["params"]), optimizer)

    # --- setting up ------------------------------------------------------------------------------

    def setup(self, *objects: Any) -> Any:
        """Prepare what was made inside the cell, with rank 0's weights: `model, optimizer = setup(model, optimizer)`.

        Collective: every rank has to call it. The very same objects are returned.
        """
        whole.refuse("setup()")
        self.recompute.learn(item for item in objects if isinstance(item, nn.Module))
        named = {f"{type(item).__name__}#{i}": item for i, item in enumerate(objects)}
        self.components.prepare(named)
        self.checkpoints.add(named)
        drawn = self.randomness
        if drawn.shared_states and not (drawn.alone or self.components.strategy.facts.hands_off):
            # Rank 0's weights count, so what it drew for them is what one process draws; the next order follows.
            state = drawn.one_process_state()
            collectives.equalise([state], checksum)
            drawn.set_one_process_state(state)
        self.backward_and_step.made(item for item in objects if isinstance(item, Optimizer))
        return objects[0] if len(objects) == 1 else objects

    def set_up(self, models: list[nn.Module], optimizer: Optimizer) -> None:
        """The cell has made this optimizer, of the parameters of these models."""
        if whole.put_off(models, optimizer):
            return
        ready = self.components.is_ready(optimizer)
        if ready and not self.components.divides(optimizer):
            self.checkpoints.add({f"{type(optimizer).__name__}#0": optimizer})
            return self.backward_and_step.made([optimizer])
        self.components.made_in_cell = True
        self.components.sweep_together(models=not ready)
        self.setup(*models, optimizer)
        copies = self.alike(models, lambda p: id(p) in self.components.ready)
        counts = collectives.gather(len(copies))
        # A copy in pieces, too: the two meet in sums, as in an average of the weights.
        if any(counts) and any(is_divided(p) for model in models for p in model.parameters()):
            if len(set(counts)) > 1:
                raise NotSupported(UNLIKE.format(name=type(models[0]).__name__))
            self.setup(*copies)
        elif len(set(counts)) == 1:  # an average may be kept on rank 0 alone
            collectives.equalise([t for copy in copies for t in (*copy.parameters(), *copy.buffers())], checksum)


UNLIKE = (
    "some ranks have made a copy of {name} that others have not: under fsdp models and their copies are divided among "
    "all ranks, together. Copy it on every rank, or use --strategy ddp"
)


def _hold(holders: Held, item: Any, module: nn.Module) -> None:
    holders.pop(id(item), None)  # to keep the order in which they were made
    holders[id(item)] = ref(module)


def _holder(holders: Held, item: Any, table: str) -> nn.Module | None:
    """The module that holds it; None also where the id is another object's by now."""
    reference = holders.get(id(item))
    module = reference() if reference is not None else None
    if module is None or not any(member is item for member in getattr(module, table).values()):
        return None
    return module
