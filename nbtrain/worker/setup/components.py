"""Groups models, optimizers and schedulers into components, and has the strategy set each one up.

The unit is not a model: one optimizer may hold two models and a temperature, two optimizers may share one model.
Components that are set up are kept; one that grew (a new layer, a new optimizer) is closed and set up again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbtrain.base.errors import NotPrepared, NotSupported
from nbtrain.base.when_imported import if_imported
from nbtrain.compat.compiler import steps_outside_graphs
from nbtrain.compat.dtensor import is_divided
from nbtrain.compat.intercept import Listeners
from nbtrain.exchange.kinds.checksum import checksum
from nbtrain.strategies.base import (
    ALL,
    Component,
    HoldsModules,
    Piece,
    Prepared,
    Promises,
    Shards,
    Strategy,
    pieces_of,
)
from nbtrain.strategies.kit.component_tensors import buffers_of, named_parameters
from nbtrain.strategies.kit.memory_left_behind import Memory
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.ranks import loop_fixes
from nbtrain.worker.ranks.collectives import equalise, gather
from nbtrain.worker.setup.component_form import component_layout, layout_of, same_objects, tensors_in_state
from nbtrain.worker.setup.component_groups import belonging_to, components_in, tables_of
from nbtrain.worker.setup.replace_references import replace_references
from nbtrain.worker.setup.set_up_component import (
    HELD_BY_SOME,
    TRIES,
    SetUpComponent,
    blanks_of,
    check_groups,
    complete_gradients,
    knows,
    move_to_device,
    prepared_by,
    refuse_lazy,
    refuse_renormed,
    released,
    replaced_by,
    views_of,
)

Replaced = Callable[[Sequence[tuple[Any, Any]]], None]

PREPARABLE = (nn.Module, Optimizer, LRScheduler, DataLoader)
"""The types of objects that `Runtime.prepare` takes."""
RECENT = 4
"""Cells whose objects are known to be set up still."""


class Components(Part):
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
        self.device = torch.device("cpu") if strategy.facts.moves else device
        self.world_size = world_size
        self.kept: list[SetUpComponent] = []
        self.ready: set[int] = set()
        self.known: WeakKeyDictionary[Optimizer, list[tuple[int, int]]] = WeakKeyDictionary()
        self._recent: list[tuple[Mapping[str, object], list[Any]]] = []
        """what was prepared for the last cells, the latest last, and its layout; nothing was set up or closed since"""
        self.made_in_cell = False
        """some were set up that the cell has made"""
        self.inside = False
        """a cell runs, and nothing is being set up"""
        self.alike = False
        """ranks that have everything compute the same: `with whole(…)`"""
        self._running = ExitStack()
        self._uncompiled: ExitStack | None = None
        """while a cell runs one that sends in a step"""
        self._out_of_reach: WeakSet[Prepared] = WeakSet()
        """set up before this cell, which leads to none of their objects"""

    @property
    def prepared(self) -> list[Prepared]:
        return [kept.prepared for kept in self.kept]

    @property
    def reached(self) -> list[Prepared]:
        """What the cell can have changed without a step: what its names lead to, and what was set up in it."""
        return [prepared for prepared in self.prepared if prepared not in self._out_of_reach]

    def prepare(self, objects: Mapping[str, object]) -> None:
        """Set up what is new or has grown. Collective; the same objects in the same order on every rank."""
        if self.strategy.facts.hands_off:
            return
        # Mostly the very same objects as in one of the last cells (they train and evaluate in turns), and none of them
        # has grown. The objects are compared, not the mappings: those may be the same on some ranks only.
        layout = layout_of(objects)
        at = next((at for at, (before, _) in enumerate(self._recent) if same_objects(before, objects)), None)
        if at is not None and self._recent[at][1] == layout:
            if at == len(self._recent) - 1:
                return
            self._recent.append(self._recent.pop(at))
        else:
            for component in components_in(objects, [kept.prepared.component for kept in self.kept]):
                self._set_up(component)
            others = [one for i, one in enumerate(self._recent) if i != at]
            self._recent = [*others, (objects, layout_of(objects))][-RECENT:]
        named = set(map(id, objects.values()))
        out_of_reach = WeakSet(kept.prepared for kept in self.kept if named.isdisjoint(kept.objects))
        # What a cell sets up itself comes to what its names lead to.
        self._out_of_reach = out_of_reach & self._out_of_reach if self.inside else out_of_reach

    def listen(self, listeners: Listeners) -> None:
        if self.world_size > 1 and not self.strategy.facts.hands_off:
            loop_fixes.listen(listeners, lambda: self.inside, lambda: self.inside and not self.alike)

    def begin(self, cell: Cell) -> list[str]:
        """Returns what the strategy says of how it has set components up, each once."""
        self.made_in_cell = False
        self.enter()
        said: list[str] = []
        for kept in self.kept:
            said += kept.prepared.notes
            kept.prepared.notes = []
        return list(dict.fromkeys(said))

    def end(self, ok: bool) -> None:
        if self.made_in_cell and ok:  # what one rank has held longer than the others is not compared
            self.sweep(models=False)
        self.leave()

    def enter(self) -> None:
        """Before a cell runs. Collective."""
        self.inside = True
        self._running.enter_context(self.strategy.running())
        self._enter()

    def leave(self) -> None:
        """After a cell: models look as the notebook knows them."""
        if self.inside:
            self.inside = False
            with ExitStack() as every:  # all of them, also where one does not end as it should
                every.push(self._running.pop_all())
                if self._uncompiled is not None:
                    every.callback(self._compile_again)
                for prepared in reversed(self.prepared):
                    every.callback(prepared.leave)

    def _enter(self) -> None:
        optimizers: list[Optimizer] = []
        for prepared in self.prepared:
            prepared.enter()
            if not prepared.promises.steps_alone:
                optimizers += prepared.component.optimizers.values()
        if optimizers:
            self._compile_again()
            self._uncompiled = ExitStack()
            self._uncompiled.enter_context(steps_outside_graphs(optimizers))

    def _compile_again(self) -> None:
        if self._uncompiled is not None:
            self._uncompiled.close()
            self._uncompiled = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, in the middle of a cell, everything is as after `leave`, but nothing is lost. Collective."""
        inside = self.inside
        try:
            self.pause()
            yield
        finally:
            if inside:
                self.go_on()

    def pause(self) -> None:
        """Until `go_on`."""
        inside, self.inside = self.inside, False
        for prepared in self.prepared if inside else ():
            prepared.leave(pause=True)

    def go_on(self, together: bool = True) -> None:
        """`together`: all ranks come here; if not, the cell is at its end. Collective if so."""
        self.inside = True
        if together:
            self._enter()

    def set_up_again(self, kept: SetUpComponent, gone: Sequence[str], made: Mapping[str, Optimizer]) -> None:
        """In a pause: its form has changed. `gone`: names of its optimizers that others have taken the place of;
        `made`: those. Collective."""
        component = kept.prepared.component
        dropped = [component.optimizers[name] for name in gone]
        names = [name for name, one in component.schedulers.items() if any(one.optimizer is o for o in dropped)]
        self.close(kept, amid=True)
        for table, few in ((component.optimizers, gone), (component.schedulers, names)):
            for name in few:
                del table[name]
        objects = {**component.modules, **component.optimizers, **component.schedulers, **made}
        for one in components_in(objects, [other.prepared.component for other in self.kept]):
            self._set_up(one)

    def pieces(self) -> list[tuple[torch.Tensor, Piece]]:
        """Tensors that are different in the notebook, each with its piece; not while a cell runs."""
        return [pair for prepared in self.prepared for pair in pieces_of(prepared)]

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
        self._recent = [one for one in self._recent if all(map(held, one[0].values()))]
        for kept in self.kept[:]:
            component = kept.prepared.component
            gone = [(group, name) for group in tables_of(component) for name, item in group.items() if not held(item)]
            for group, name in gone:
                kept.objects -= {id(group.pop(name))}  # another object may have this id by then
            if not (component.modules or component.optimizers):
                self.close(kept, False)

    def sweep_together(self, models: bool) -> None:
        """Where no rank has the whole of a model, the same on every rank, which is collective. A thread that looks at
        where a rank is may hold a frame, and what that holds, a moment longer."""
        of_all = any(released(one) for one in self.prepared)
        for pause in (0.0, *TRIES):
            time.sleep(pause)
            self.sweep(models or pause > 0)
            if not of_all or len(set(gather(tuple(len(kept.objects) for kept in self.kept)))) == 1:
                return
        raise NotSupported(HELD_BY_SOME)

    def sweep(self, models: bool = True) -> None:
        """Forget what nobody else references: a cell may make models and optimizers in a loop, one after another.
        `models`: also models in pieces, for which the garbage collector runs."""
        self._recent.clear()
        for kept in self.kept[:]:
            component = kept.prepared.component
            tables = tables_of(component)
            held = [(table, name, id(item), ref(item)) for table in tables for name, item in table.items()]
            holds = kept.prepared if models else None
            hold_again = holds.release_modules() if isinstance(holds, HoldsModules) else None
            del holds
            for table in tables:
                table.clear()
            if hold_again is not None:
                kept.prepared = Prepared(component)  # stays if what was set up is found with its modules
                kept.prepared.promises = ALL  # there is nothing to train any more
                gc.collect()
                kept.prepared = hold_again() or kept.prepared
            for table, name, number, reference in held:
                item = reference()
                if item is None:
                    kept.objects -= {number}
                else:
                    table[name] = item
                del item
            if not (component.modules or component.optimizers or component.loose):
                self.close(kept, False)

    def is_ready(self, optimizer: Optimizer) -> bool:
        """Whether all of its parameters are set up."""
        return all(id(p) in self.ready for p in belonging_to(optimizer))

    def divides(self, optimizer: Optimizer) -> bool:
        """Whether the strategy has to learn of this optimizer: its parameters are in pieces, so its state will be, or
        it was given another model's parameters, or another optimizer's state."""
        held = belonging_to(optimizer)
        for kept in self.kept:
            if any(one is optimizer for one in kept.prepared.component.optimizers.values()):
                return not ({id(p) for p in held} <= kept.ids() and knows(kept.prepared, optimizer))
        given = [value for *_, value in tensors_in_state(optimizer)]
        stand_in = if_imported("nbtrain.strategies.kit.owned_tensors", "StandIn") or ()
        return any(is_divided(one) or isinstance(one, stand_in) for one in (*held, *given)) or any(
            not (kept.prepared.promises.any_optimizer or kept.ids().isdisjoint(map(id, held))) for kept in self.kept
        )

    def guard(self, optimizer: Optimizer) -> None:
        """Before a step: raise on every rank if a parameter that it trains was not set up."""
        groups = [group["params"] for group in optimizer.param_groups]
        held = [(len(group), id(group[-1]) if group else 0) for group in groups]  # another list is another model's
        if self.known.get(optimizer) == held:
            return
        loose = [p for p in belonging_to(optimizer) if id(p) not in self.ready]
        for prepared in self.prepared:
            check_groups(prepared, optimizer)
        if not loose:
            self.known[optimizer] = held
        elif any(p.grad is not None for p in loose):
            count = "1 parameter" if len(loose) == 1 else f"{len(loose)} parameters"
            raise NotPrepared(
                f"{type(optimizer).__name__} trains {count} on {self.world_size} ranks without having been set up, so "
                "that every rank would train a model of its own. Was it made or copied inside the cell? Write before "
                "the loop:\n    model, optimizer = setup(model, optimizer)"
            )

    def _set_up(self, component: Component) -> None:
        objects = frozenset(id(item) for group in tables_of(component) for item in group.values())
        layout = component_layout(component)
        ids = set(map(id, component.parameters()))
        old = [kept for kept in self.kept if kept.ids() & ids or kept.now() & objects]
        if not self.strategy.facts.moves:
            move_to_device(component, self.device)
        if len(old) == 1 and old[0].layout == layout:
            if old[0].objects == objects and all(knows(old[0].prepared, one) for one in component.optimizers.values()):
                return
            if self._grown(old[0], component):
                old[0].objects = objects
                self.known.clear()
                return
        if self.world_size > 1 and not self.strategy.facts.hands_off:
            refuse_lazy(component)
            if self.strategy.facts.batch_per != "pool":
                refuse_renormed(component)
        inside = self.inside
        follow = views_of(named_parameters(component)) if inside and self.world_size > 1 else None
        with self.paused():
            for kept in old:
                self.close(kept, amid=inside)
            blanks = blanks_of(component)
            wanted = self.strategy.facts.empty_weights
            if blanks is not None and wanted == "filled":
                self._tell(blanks.fill(self.device))
            elif blanks is not None and wanted == "hollow":
                self._tell(blanks.hollow(self.device))
            equalise([*component.parameters(), *buffers_of(component)], checksum)
            memory = Memory(named_parameters(component))
            prepared = prepared_by(self.strategy, component, self.precision, self.world_size)
            own = getattr(prepared, "inner", prepared)  # in 16 bits
            if self.world_size == 1 and own.promises == Promises() and not isinstance(own, Shards):
                own.promises = ALL
            self._tell(replaced_by(prepared))
            if blanks is not None and wanted != "filled":
                self._tell(blanks.deal_out(prepared, self.device))
            parameters = component.parameters()  # some may be others by now
            memory.left(still=parameters)
            self.kept.append(SetUpComponent(prepared, objects, parameters, component_layout(component)))
        self.ready |= {id(p) for p in parameters}
        self.known.clear()
        if follow is not None:
            follow(named_parameters(component), self.replaced)

    def _grown(self, kept: SetUpComponent, component: Component) -> bool:
        """Whether only optimizers or schedulers are new, and the strategy has added them."""
        prepared = kept.prepared
        if list(prepared.component.modules.values()) != list(component.modules.values()):
            return False
        if not isinstance(prepared, Shards):
            return False
        with self.paused():
            done = prepared.grow(component)
            if done:
                prepared.component = component
                self._tell(prepared.replaced)
        return done

    def _tell(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Report replaced tensors."""
        if pairs:
            self.replaced(pairs)
            pairs.clear()  # they keep the old tensors alive

    def close(self, kept: SetUpComponent, whole: bool = True, amid: bool = False) -> None:
        """`amid`: in a pause of a cell, where gradients may wait for a step."""
        if self.inside:
            kept.prepared.leave()
        if amid:
            complete_gradients(kept.prepared)
        kept.prepared.close(whole)
        if whole:
            self._tell(replaced_by(kept.prepared))
        self.kept.remove(kept)
        self.ready -= kept.ids()
        self.known.clear()
        self._recent.clear()
