"""`with whole(model.head, optimizer):` in a cell: ordinary, complete tensors of what the ranks keep in pieces.

Inside, what is named is on every rank as the notebook knows it, whatever the strategy: the components are paused, each
tensor in pieces is put together, and at the end every rank takes its part of what has become of it. The ranks compare
their results first, so that no rank's own numbers get into a piece. What changes in form (a layer that is frozen, a new
head, another optimizer) is set up anew afterwards.

What was not named is still in pieces: whatever reads it inside raises, so that naming a part bounds memory and nothing
is computed with a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Container, ItemsView, Iterable, Iterator, ValuesView
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.base.specs import RunSpec
from nbtrain.compat.dtensor import is_divided
from nbtrain.compat.intercept import Listeners
from nbtrain.strategies.base import Shards, gradient_pieces_of
from nbtrain.strategies.kit.collective_calls import WHOLE, told
from nbtrain.strategies.kit.component_tensors import named_parameters
from nbtrain.strategies.kit.owned_tensors import full_tensor
from nbtrain.strategies.kit.same_on_ranks import differing
from nbtrain.worker.loop.shared_board import STEP
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.setup.component_form import form_of, left_behind, outline, superseded, tensors_of
from nbtrain.worker.setup.components import Components
from nbtrain.worker.setup.read_guard import ReadGuard
from nbtrain.worker.setup.set_up_component import SetUpComponent
from nbtrain.worker.setup.shown_tensors import (
    CHANGED,
    Shown,
    ShownGradient,
    check,
    ids_of,
    in_pieces,
    show,
    wire,
)

INSIDE = (
    "{what} inside of `with whole(…)`, where weights and states are shown as they are in one process, and the ranks "
    "do not work together: write it below the block"
)
ONLY_SOME = (
    "whole(…) needs every rank, and %%rank runs the cell on some: each of them has a part. Write %%distributed, or "
    "read the tensors in a cell of the notebook"
)
NESTED = (
    "whole(…, gradients=True) inside of another block: gradients are averaged before the outermost one. Say it there: "
    "with whole(…, gradients=True)"
)
ACCUMULATED = (
    "whole(…, gradients=True) with --accumulate: the loop sees the gradients of one small batch of several, and would "
    "edit them more than once: leave --accumulate out, and accumulate in the loop: `if i % 4 == 3: optimizer.step()`"
)
IN_STEP = (
    "layers, what is trained, or an optimizer's groups or states were changed inside of `with whole(…)` in a hook of "
    "optimizer.step(), and the step that is under way would not know: write the block in the loop, below the step"
)


@dataclass(slots=True, eq=False)
class Whole:
    """What `whole(…)` returns."""

    objects: list[Any]
    gradients: bool
    opened: list[Callable[[bool], None] | None] = field(default_factory=list)
    """what ends each block that was begun with it; None: there is nothing to do"""

    def __enter__(self) -> Any:
        self.opened.append(None if _installed is None else _installed.enter(self.objects, self.gradients))
        return self.objects[0] if len(self.objects) == 1 else tuple(self.objects)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (leave := self.opened.pop()) is not None:
            # Where a cell is stopped, nobody knows where the other ranks are.
            leave(kind is None or issubclass(kind, (Exception, GeneratorExit)))


def whole(*objects: Any, gradients: bool = False) -> Whole:
    """`with whole(model.head):` in a cell: inside, what is named is complete on every rank, under any strategy.

        with whole(model.head), torch.no_grad():
            model.head.weight.clamp_(-1, 1)

    Modules, parameters and optimizers can be named; an optimizer's are the tensors of its state. Nothing named: all
    models and optimizers of the cell. What is changed inside is what all ranks have afterwards. With `gradients=True`,
    between `loss.backward()` and `optimizer.step()`, `p.grad` of what is named is complete, too. All ranks have to come
    here, with the same objects.

    Random numbers of torch that are drawn inside are those of one process, on every rank. Where every rank has
    everything anyhow (`ddp`) that is all; under `single`, and outside of a distributed cell, there is nothing to do.
    """
    return Whole(_listed(objects), gradients)


def _listed(objects: Iterable[Any]) -> list[Any]:
    """Modules, tensors and optimizers; lists, dicts and iterators of them are opened, as `named_parameters()` is."""
    flat: list[Any] = []
    for item in objects:
        if isinstance(item, nn.Module | torch.Tensor | Optimizer):
            flat.append(item)
        elif isinstance(item, dict):
            flat += _listed(item.values())
        elif isinstance(item, list | tuple | set | Iterator | ValuesView | ItemsView):
            flat += _listed(part for part in item if not isinstance(part, str))
        else:
            raise UsageError(
                f"whole() takes modules, parameters and optimizers, not {type(item).__name__}: with whole(model), or "
                "with whole() for all that the cell uses"
            )
    return flat


def refuse(what: str) -> None:
    """Raise inside of a block."""
    if open_blocks:
        raise NotSupported(INSIDE.format(what=what))


open_blocks: list[list[Shown]] = []
"""what is shown that ranks keep in pieces, by blocks, the innermost last"""
_installed: WholeTensors | None = None
"""of the runtime whose listeners are in place in this process"""


def put_off(models: list[nn.Module], optimizer: Optimizer) -> bool:
    """Whether this optimizer was made inside of a block, and is set up at its end."""
    if open_blocks and _installed is not None:
        _installed.later.append((models, optimizer))
    return bool(open_blocks)


def _install(tensors: WholeTensors | None) -> None:
    global _installed
    _installed = tensors


class WholeTensors(Part):
    """The blocks of a rank's cells."""

    def __init__(
        self,
        components: Components,
        settle: Callable[[], None],
        within: Callable[[], int],
        set_up: Callable[[list[nn.Module], Optimizer], None],
        one_process: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`settle`: called before gradients are shown; `within`: BACKWARD, STEP or 0, what the rank is in the middle
        of; `set_up`: called with the models and the optimizer that a block has made, at its end; `one_process`: draws
        in there are those of one."""
        self.one_process = one_process
        self._draws = ExitStack()
        self._alike: list[ExitStack] = []
        """the same, of the outermost block where no tensor is in pieces"""
        self.components, self.settle, self.within, self.set_up = components, settle, within, set_up
        self.cell: RunSpec | None = None
        """that runs"""
        self.blocks = open_blocks
        self.later: list[tuple[list[nn.Module], Optimizer]] = []
        """models and optimizers that a block has made"""
        self._guard = ReadGuard(components)
        self._forget()

    def _forget(self) -> None:
        self._kept: list[tuple[SetUpComponent, Any, list[torch.Tensor]]] = []
        """those in pieces; their forms at first, and their tensors, held so that no id is used again"""
        self._tensors: list[Shown] = []
        self._gradients: list[ShownGradient] = []

    def listen(self, listeners: Listeners) -> None:
        _install(self)
        listeners.at_end(lambda: _install(None))

    def begin(self, cell: Cell) -> None:
        self.cell = cell.run

    def end(self, ok: bool) -> None:
        """The cell is over: a generator may have a block open still."""
        if self._alike:
            self._draw_apart()
        while self.blocks:
            self._leave(self.blocks[-1], together=ok)
        self.cell = None

    # --- a block begins --------------------------------------------------------------------------

    def enter(self, objects: list[Any], gradients: bool) -> Callable[[bool], None] | None:
        """Returns what ends the block, where several ranks train what is named."""
        cell = self.cell
        if cell is None:
            return None
        named = ids_of(objects)
        asked = [one for one in self.components.kept if not objects or not named.isdisjoint(_everything_in(one))]
        split = any(isinstance(one.prepared, Shards) for one in asked)
        kept = [one for one in self.components.kept if split and isinstance(one.prepared, Shards)]
        some = cell.ranks is not None and len(cell.ranks) < self.components.world_size
        if kept and some:
            raise NotSupported(ONLY_SOME)
        if gradients and cell.accumulate > 1:
            raise NotSupported(ACCUMULATED)
        if gradients and self.blocks:
            raise NotSupported(NESTED)
        if gradients:
            self.settle()
            for prepared in self.components.prepared:
                held = prepared.component.parameters()
                prepared.complete_gradients([p for p in held if id(p) in named] if objects else held)
        if kept:
            return self._begin(kept, named if objects else None, gradients)
        return self._draw_alike() if asked and not some and not self._alike else None

    def _draw_alike(self) -> Callable[[bool], None]:
        """All that there is to do where every rank has everything. Collective."""
        with told(WHOLE):
            draws = ExitStack()
            draws.enter_context(self.one_process())
        self._alike.append(draws)
        return lambda together: self._draw_apart()

    def _draw_apart(self) -> None:
        while self._alike:
            self._alike.pop().close()

    @torch.inference_mode(False)  # gradients are on then, which a strategy needs that sets models up
    def _begin(self, kept: list[SetUpComponent], named: set[int] | None, gradients: bool) -> Callable[[bool], None]:
        shown: list[Shown] = []
        first = not self.blocks
        self._guard.off()
        try:
            with told(WHOLE):
                if first:
                    self.components.pause()
                    self._draws.enter_context(self.one_process())
                    self._tensors, self._gradients = in_pieces(self.components.prepared)
                held = [*self._tensors, *(self._gradients if gradients else ())]
                asked = [i for i, one in enumerate(held) if named is None or id(one.now) in named]
                places = [i for i in asked if not held[i].is_open]
                show([held[i] for i in places], [*places, int(gradients)], shown)
                # The last: tuples and lists that hold a tensor in pieces hold what stands for it from here on.
                self.components.replaced([(one.tensor, one.stands) for one in shown if one.stands is not None])
        except BaseException as error:
            self._restore(shown)
            self._go_on(isinstance(error, Exception))
            raise
        self.blocks.append(shown)
        if first:
            self._kept = [(one, form_of(one.prepared.component), tensors_of(one.prepared.component)) for one in kept]
        self._guard.on(self._tensors, self._gradients)
        return partial(self._leave, shown)

    # --- a block ends ----------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _leave(self, shown: list[Shown], together: bool) -> None:
        """Every rank takes its part. `together`: all ranks come here; if not, what has become of it is dropped."""
        if not any(shown is block for block in self.blocks):
            return
        self._guard.off()
        self.blocks[:] = [block for block in self.blocks if block is not shown]
        settled = False
        try:
            with told(WHOLE):
                if together:
                    self._settle(shown)
                else:
                    self._restore(shown)
            settled = together
        finally:
            self._go_on(together, settled)

    def _settle(self, shown: list[Shown]) -> None:
        changed, made = [], []
        try:
            if not self.blocks:
                changed = [one for one, form, _ in self._kept if form_of(one.prepared.component) != form]
                made = self._made(changed)
                if changed and self.within() == STEP:
                    raise NotSupported(IN_STEP)
            news = [one.result() for one in shown]
            check(shown, news, made, {} if self.blocks else self._replicas())
        except BaseException:
            self._restore(shown)
            raise
        with torch.no_grad():
            self._restore(shown, left_behind(one.prepared.component for one in changed))
            for one, new in zip(shown, news, strict=True):
                one.take(new)
        for component in changed:
            self._set_up_again(component)

    def _made(self, changed: list[SetUpComponent]) -> list[torch.Tensor]:
        """Tensors that the block has put into components, as many on every rank. Collective."""
        known = {id(tensor) for *_, tensors in self._kept for tensor in tensors}
        made = [tensor for each in changed for tensor in tensors_of(each.prepared.component) if id(tensor) not in known]
        outlines = (outline(component.prepared.component) for component, *_ in self._kept)
        if any(differing([torch.tensor([len(changed), len(made), len(self.later), *outlines])], wire())):
            raise NotSupported(CHANGED)
        return made

    def _replicas(self) -> dict[str, torch.Tensor]:
        """Parameters that every rank has anyhow, and had when the block began."""
        divided = {id(tensor) for item in self._tensors for tensor in (item.tensor, item.now)}
        known = {id(tensor) for *_, tensors in self._kept for tensor in tensors} - divided
        named = (pair for component, *_ in self._kept for pair in named_parameters(component.prepared.component))
        return {name: p for name, p in named if id(p) in known}

    def _set_up_again(self, kept: SetUpComponent) -> None:
        for p, piece in gradient_pieces_of(kept.prepared):
            if not (is_divided(p) or piece.everywhere):
                p.grad = full_tensor(piece, p.device)
        made = {f"{type(new).__name__}#{i}": new for i, (_, new) in enumerate(self.later)}
        one_only = isinstance(kept.prepared, Shards) and kept.prepared.stepped_by is not None
        self.components.set_up_again(kept, superseded(kept.prepared.component, made.values(), one_only), made)

    def _go_on(self, together: bool, settled: bool = False) -> None:
        """The outermost block is over, or the one around this goes on."""
        if self.blocks:
            return self._guard.on(self._tensors, self._gradients)
        self._forget()
        later, self.later = self.later, []
        self._draws.close()
        self.components.go_on(together)
        for models, optimizer in later if settled else ():
            self.set_up(models, optimizer)

    def _restore(self, shown: list[Shown], left: Container[int] = ()) -> None:
        """What is in pieces stands where it stood. `left`: ids of what belongs to no model any more."""
        pairs = [(item.stands, item.tensor) for item in shown if item.stands is not None]
        for item in reversed(shown):
            item.restore(left)
        self.components.replaced([pair for pair in pairs if id(pair[0]) not in left])


def _everything_in(kept: SetUpComponent) -> set[int]:
    component = kept.prepared.component
    return set(map(id, [*tensors_of(component), *component.optimizers.values()]))
