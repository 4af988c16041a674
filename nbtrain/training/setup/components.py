"""Groups models, optimizers and schedulers into components, and has the strategy set each one up.

The unit is not a model: one optimizer may hold two models and a temperature, two optimizers may share one model.
Components that are set up are kept; one that grew (a new layer, a new optimizer) is closed and set up again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbtrain.compat.dtensor import is_divided
from nbtrain.errors import NotPrepared
from nbtrain.exchange.kinds.checksum import checksum
from nbtrain.strategies.base import Component, Piece, Prepared, Strategy, is_lazy
from nbtrain.training.ranks.collectives import equalise
from nbtrain.training.setup.meta_init import MetaInit, is_blank
from nbtrain.training.setup.replace_references import replace_references
from nbtrain.training.setup.validate_strategy import set_up

Replaced = Callable[[Sequence[tuple[Any, Any]]], None]

PREPARABLE = (nn.Module, Optimizer, LRScheduler, DataLoader)
"""The types of objects that `Runtime.prepare` takes."""


@dataclass(slots=True)
class SetUpComponent:
    """One component as it was set up."""

    prepared: Prepared
    objects: frozenset[int]
    """ids of modules, optimizers and schedulers"""
    parameters: list[torch.Tensor]
    """kept alive, so that ids are not used again"""
    layout: list[tuple[int, torch.dtype, torch.Size]]

    def ids(self) -> set[int]:
        return {id(p) for p in self.parameters}


class Components:
    """All components that are set up on a rank."""

    def __init__(
        self,
        strategy: Strategy,
        device: torch.device,
        world_size: int,
        replaced: Replaced = replace_references,
        precision: str = "32",
    ) -> None:
        """`replaced`: called with the pairs (old, new) of replaced tensors."""
        self.strategy = strategy
        self.precision = precision
        self.replaced = replaced
        self.device = torch.device("cpu") if strategy.moves else device
        self.world_size = world_size
        self.kept: list[SetUpComponent] = []
        self.ready: set[int] = set()
        self.known: WeakKeyDictionary[Optimizer, list[tuple[int, int]]] = WeakKeyDictionary()
        self._last: tuple[Mapping[str, object], list[Any]] | None = None
        self._inside = False

    @property
    def prepared(self) -> list[Prepared]:
        return [kept.prepared for kept in self.kept]

    def prepare(self, objects: Mapping[str, object]) -> None:
        """Set up what is new or has grown. Collective; the same objects in the same order on every rank."""
        if self.strategy.hands_off:
            return
        # Mostly the very same objects as in the last cell, and none of them has grown. The objects are compared, not
        # the mappings: those may be the same on some ranks only.
        if self._last is not None and _same(self._last[0], objects) and self._last[1] == _layout(objects):
            return
        for component in _components(objects, [kept.prepared.component for kept in self.kept]):
            self._set_up(component)
        self._last = objects, _layout(objects)

    def enter(self) -> None:
        """Before a cell runs. Collective."""
        self._inside = True
        self.strategy.enter()
        self._enter()

    def leave(self) -> None:
        """After a cell: models look as the notebook knows them."""
        if self._inside:
            self._inside = False
            with ExitStack() as every:  # all of them, also where one does not end as it should
                every.callback(self.strategy.leave)
                for prepared in reversed(self.prepared):
                    every.callback(prepared.leave)

    def _enter(self) -> None:
        for prepared in self.prepared:
            prepared.enter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In the middle of a cell: as after `leave`, but nothing is lost. Collective."""
        inside, self._inside = self._inside, False
        try:
            for prepared in self.prepared if inside else ():
                prepared.pause()
            yield
        finally:
            if inside:
                self._inside = True
                self._enter()

    def pieces(self) -> list[tuple[torch.Tensor, Piece]]:
        """Tensors that are different in the notebook, each with its piece; not while a cell runs."""
        return [pair for prepared in self.prepared for pair in prepared.pieces()]

    def models(self) -> list[nn.Module]:
        """All models that are set up."""
        return [module for prepared in self.prepared for module in prepared.component.modules.values()]

    def forget(self, whole: bool = True) -> None:
        """Close everything that was set up. `whole`: what is in pieces is put together again, which is collective."""
        self.leave()
        for kept in self.kept[:]:
            self.close(kept, whole)

    def retire(self, held: Callable[[object], bool]) -> None:
        """Forget objects that are no longer `held`, like the old model when a notebook makes it anew."""
        for kept in self.kept[:]:
            component = kept.prepared.component
            groups = (component.modules, component.optimizers, component.schedulers)
            gone = [(group, name) for group in groups for name, item in group.items() if not held(item)]
            for group, name in gone:
                kept.objects -= {id(group.pop(name))}  # another object may have this id by then
            if not (component.modules or component.optimizers):
                self.close(kept, False)

    def sweep(self, models: bool = True) -> None:
        """Forget what nobody else references: a cell may make models and optimizers in a loop, one after another.
        `models`: also models in pieces, for which the garbage collector runs."""
        self._last = None
        for kept in self.kept[:]:
            component = kept.prepared.component
            groups: tuple[dict[str, Any], ...] = (component.modules, component.optimizers, component.schedulers)
            held = [(group, name, id(item), ref(item)) for group in groups for name, item in group.items()]
            hold_again = kept.prepared.release_modules() if models else None
            for group in groups:
                group.clear()
            if hold_again is not None:
                kept.prepared = Prepared(component)  # stays if what was set up is found with its modules
                gc.collect()
                kept.prepared = hold_again() or kept.prepared
            for group, name, number, reference in held:
                item = reference()
                if item is None:
                    kept.objects -= {number}
                else:
                    group[name] = item
                del item
            if not (component.modules or component.optimizers or component.loose):
                self.close(kept, False)

    def is_ready(self, optimizer: Optimizer) -> bool:
        """Whether all of its parameters are set up."""
        return all(id(p) in self.ready for group in optimizer.param_groups for p in group["params"])

    def divides(self, optimizer: Optimizer) -> bool:
        """Whether the strategy has to learn of this optimizer: its parameters are in pieces, so its state will be, or
        it was given another model's parameters."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for kept in self.kept:
            if any(one is optimizer for one in kept.prepared.component.optimizers.values()):
                return not ({id(p) for p in held} <= kept.ids() and kept.prepared.knows(optimizer))
        return any(map(is_divided, held)) or any(
            kept.prepared.divides_gradients and not kept.ids().isdisjoint(map(id, held)) for kept in self.kept
        )

    def in_pieces(self, model: nn.Module) -> bool:
        return any(map(is_divided, model.parameters()))

    def guard(self, optimizer: Optimizer) -> None:
        """Before a step: raise on every rank if a parameter that it trains was not set up."""
        groups = [group["params"] for group in optimizer.param_groups]
        held = [(len(group), id(group[-1]) if group else 0) for group in groups]  # another list is another model's
        if self.known.get(optimizer) == held:
            return
        loose = [p for group in groups for p in group if id(p) not in self.ready]
        for prepared in self.prepared:
            prepared.about_to_step(optimizer)
        if not loose:
            self.known[optimizer] = held
        elif any(p.grad is not None for p in loose):
            count = "1 parameter" if len(loose) == 1 else f"{len(loose)} parameters"
            raise NotPrepared(
                f"{type(optimizer).__name__} trains {count} on {self.world_size} ranks without having been set up, so "
                "that every rank would train a model of its own. Was it made inside the cell? Then write before the "
                "loop:\n    model, optimizer = setup(model, optimizer)"
            )

    def _set_up(self, component: Component) -> None:
        groups = (component.modules, component.optimizers, component.schedulers)
        objects = frozenset(id(item) for group in groups for item in group.values())
        parameters = component.parameters()
        layout = [(id(p), p.dtype, p.shape) for p in parameters]
        ids = {id(p) for p in parameters}
        old = [kept for kept in self.kept if kept.ids() & ids or kept.objects & objects]
        if not self.strategy.moves:
            move_to_device(component, self.device)
        if len(old) == 1 and old[0].layout == layout:
            if old[0].objects == objects and all(map(old[0].prepared.knows, component.optimizers.values())):
                return
            if self._grown(old[0], component):
                old[0].objects = objects
                self.known.clear()
                return
        with self.paused():
            for kept in old:
                self.close(kept)
            blanks = MetaInit.of(component)
            wanted = self.strategy.empty_weights
            if blanks is not None and wanted == "filled":
                self._tell(blanks.fill(self.device))
            elif blanks is not None and wanted == "hollow":
                self._tell(blanks.hollow(self.device))
            equalise([*component.parameters(), *component.buffers()], checksum)
            prepared = set_up(self.strategy, component, self.precision)
            self._tell(prepared.replaced)
            if blanks is not None and wanted != "filled":
                self._tell(blanks.deal_out(prepared, self.device))
            parameters = component.parameters()  # some may be others by now
            layout = [(id(p), p.dtype, p.shape) for p in parameters]
            self.kept.append(SetUpComponent(prepared, objects, parameters, layout))
        self.ready |= {id(p) for p in parameters}
        self.known.clear()

    def _grown(self, kept: SetUpComponent, component: Component) -> bool:
        """Whether only optimizers or schedulers are new, and the strategy has added them."""
        if list(kept.prepared.component.modules.values()) != list(component.modules.values()):
            return False
        with self.paused():
            done = kept.prepared.grow(component)
            if done:
                kept.prepared.component = component
                self._tell(kept.prepared.replaced)
        return done

    def _tell(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Report replaced tensors."""
        if pairs:
            self.replaced(pairs)
            pairs.clear()  # they keep the old tensors alive

    def close(self, kept: SetUpComponent, whole: bool = True) -> None:
        if self._inside:
            kept.prepared.leave()
        if whole:
            kept.prepared.close()
            self._tell(kept.prepared.replaced)
        else:
            kept.prepared.drop()
        self.kept.remove(kept)
        self.ready -= kept.ids()
        self.known.clear()
        self._last = None


def _same(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    return before is now or [(name, id(item)) for name, item in before.items()] == [
        (name, id(item)) for name, item in now.items()
    ]


def _layout(objects: Mapping[str, object]) -> list[Any]:
    """What must be unchanged for everything to be still set up."""
    found: list[Any] = []
    for item in objects.values():
        if isinstance(item, nn.Module):
            tensors = (p for p in (*item.parameters(), *item.buffers()) if not is_lazy(p))
            found += [(id(p), p.dtype, p.shape, p.device) for p in tensors]
        elif isinstance(item, Optimizer):
            found += [id(p) for group in item.param_groups for p in group["params"]]
    return found


def move_to_device(component: Component, device: torch.device) -> None:
    """Move parameters, gradients, buffers and optimizer state to the device, in place: tensors keep their identity."""
    for tensor in (*component.parameters(), *component.buffers()):
        if tensor.device != device and not (is_blank(tensor) or is_divided(tensor)):
            tensor.data = tensor.data.to(device)
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(device)
    for optimizer in component.optimizers.values():
        for group in optimizer.param_groups:
            counts_there = group.get("capturable") or group.get("fused")
            for p in group["params"]:
                state = optimizer.state.get(p) or {}
                for key, value in state.items():
                    # torch keeps step counts on the CPU unless a kernel reads them
                    there = isinstance(value, torch.Tensor) and (key != "step" or counts_there)
                    if not there or is_divided(value):  # the strategy says where its rows wait
                        continue
                    if (moved := value.to(device)) is not value:
                        state[key] = moved


def _components(objects: Mapping[str, object], before: list[Component]) -> list[Component]:
    """The connected components of `objects`, merged with those of `before` that they are connected to."""
    modules = {name: item for name, item in objects.items() if isinstance(item, nn.Module)}
    optimizers = {name: item for name, item in objects.items() if isinstance(item, Optimizer)}
    schedulers = {name: item for name, item in objects.items() if isinstance(item, LRScheduler)}
    links = _Links()
    for component in before:
        everything = (*component.modules.values(), *component.optimizers.values(), *component.loose.values())
        links.join([*map(id, everything), *map(id, component.parameters()), *map(id, component.buffers())])
    for module in modules.values():
        links.join([id(module), *map(id, module.parameters()), *map(id, module.buffers())])
    for optimizer in optimizers.values():
        links.join([id(optimizer), *(id(p) for group in optimizer.param_groups for p in group["params"])])
    for scheduler in schedulers.values():
        if isinstance(getattr(scheduler, "optimizer", None), Optimizer):
            links.join([id(scheduler), id(scheduler.optimizer)])

    found: dict[int, Component] = {}
    touched = set()
    for component in before:  # first, so that names stay what they were
        for item in (*component.modules.values(), *component.optimizers.values(), *component.loose.values()):
            target = found.setdefault(links.root(id(item)), Component())
            _merge(target, component)
            break
    for name, module in modules.items():
        if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            root = links.root(id(module))
            touched.add(root)
            _add(found.setdefault(root, Component()).modules, name, module)
    for name, optimizer in optimizers.items():
        root = links.root(id(optimizer))
        touched.add(root)
        _add(found.setdefault(root, Component()).optimizers, name, optimizer)
    for name, scheduler in schedulers.items():
        root = links.root(id(scheduler))
        if root in found:
            touched.add(root)
            _add(found[root].schedulers, name, scheduler)
    chosen = [found[root] for root in found if root in touched]
    for component in chosen:
        _find_loose(component)
    return chosen


def _find_loose(component: Component) -> None:
    """Parameters that an optimizer holds and no module owns."""
    component.loose = {}
    owned = set(map(id, component.parameters()))
    for name, optimizer in component.optimizers.items():
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if id(p) not in owned:
                owned.add(id(p))
                component.loose[f"{name}[{i}]"] = p


def _merge(target: Component, other: Component) -> None:
    for attribute in ("modules", "optimizers", "schedulers"):
        for name, item in getattr(other, attribute).items():
            _add(getattr(target, attribute), name, item)


def _add(table: dict[str, Any], name: str, item: Any) -> None:
    """Once, under the first name it came with; another object of that name gets a number."""
    if any(item is other for other in table.values()):
        return
    free, number = name, 2
    while free in table:
        free, number = f"{name} ({number})", number + 1
    table[free] = item


class _Links:
    """Which ids belong together (union-find)."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def root(self, key: int) -> int:
        while (parent := self.parent.setdefault(key, key)) != key:
            self.parent[key] = key = self.parent[parent]
        return key

    def join(self, keys: list[int]) -> None:
        first = self.root(keys[0])
        for key in keys[1:]:
            self.parent[self.root(key)] = first
