"""What a block `with whole(…)` does on a rank, from its beginning to its end (whole.py says what it is)."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import RunSpec
from nbtrain.strategies.base import Shards
from nbtrain.strategies.kit.collective_calls import WHOLE, told
from nbtrain.strategies.kit.component_tensors import named_parameters
from nbtrain.strategies.kit.same_on_ranks import differing
from nbtrain.worker.loop.shared_board import STEP
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
from nbtrain.worker.setup.taken_tensors import Taken, TakenGradient, give_up, hand_over

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


class Blocks:
    """The blocks of a rank, of which several may be open."""

    def __init__(
        self,
        components: Components,
        settle: Callable[[], None],
        within: Callable[[], int],
        set_up: Callable[[list[nn.Module], Optimizer], None],
        one_process: Callable[[], AbstractContextManager[None]],
        blocks: list[list[Shown]],
        later: list[tuple[list[nn.Module], Optimizer]],
        taken: list[TakenGradient],
    ) -> None:
        """What `WholeTensors` was given; and `blocks`: what is shown in those that are open, the innermost last;
        `later`: models and optimizers that a block has made; `taken`: gradients that the last has shown."""
        self.components, self.settle, self.within, self.set_up = components, settle, within, set_up
        self.one_process, self.blocks, self.later, self.taken = one_process, blocks, later, taken
        self._draws = ExitStack()
        self._alike: list[ExitStack] = []
        """the same, of the outermost block where no tensor is in pieces"""
        self._guard = ReadGuard(components)
        self._forget()

    def _forget(self) -> None:
        self._kept: list[tuple[SetUpComponent, Any, list[torch.Tensor]]] = []
        """those in pieces; their forms at first, and their tensors, held so that no id is used again"""
        self._tensors: list[Shown] = []
        self._gradients: list[ShownGradient] = []
        self._taken: list[Taken] = []
        self._taken_alike = False
        self._guard.taken.forget()

    def end(self, ok: bool) -> None:
        """The cell is over."""
        if self._alike:
            self._draw_apart()
        while self.blocks:
            self._leave(self.blocks[-1], together=ok)

    # --- a block begins --------------------------------------------------------------------------

    def enter(self, cell: RunSpec, objects: list[Any], gradients: bool) -> Callable[[bool], None] | None:
        """Returns what ends the block, where several ranks train what is named."""
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
        self.components.alike = True
        return lambda together: self._draw_apart()

    def _draw_apart(self) -> None:
        self.components.alike = False
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
        left = left_behind(one.prepared.component for one in changed)
        self._taken += self._guard.taken.of([one for one in shown if id(one.now) not in left])
        self._taken_alike = not any(differing([torch.tensor(len(self._taken))], wire()))
        self.taken += map(TakenGradient, (one for one in shown if isinstance(one, ShownGradient)))
        with torch.no_grad():
            self._restore(shown, left)
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
        made = {f"{type(new).__name__}#{i}": new for i, (_, new) in enumerate(self.later)}
        one_only = isinstance(kept.prepared, Shards) and kept.prepared.stepped_by is not None
        self.components.set_up_again(kept, superseded(kept.prepared.component, made.values(), one_only), made)

    def _go_on(self, together: bool, settled: bool = False) -> None:
        """The outermost block is over, or the one around this goes on."""
        if self.blocks:
            return self._guard.on(self._tensors, self._gradients)
        taken, alike = self._taken, self._taken_alike
        self._forget()
        later = self.later[:]
        self.later.clear()
        self._draws.close()
        self.components.go_on(together)
        if together:
            hand_over(taken, alike, self.components.replaced)
        for models, optimizer in later if settled else ():
            self.set_up(models, optimizer)

    def _restore(self, shown: list[Shown], left: Container[int] = ()) -> None:
        """What is in pieces stands where it stood. `left`: ids of what belongs to no model any more."""
        pairs = [(item.stands, item.tensor) for item in shown if item.stands is not None]
        held = [(ref(item.now), item.name) for item in shown if item.stands is not None and id(item.stands) not in left]
        for item in reversed(shown):
            item.restore(left)
        self.components.replaced([pair for pair in pairs if id(pair[0]) not in left])
        del pairs
        for reference, name in held:  # a variable of a function has it still
            if (stands := reference()) is not None:
                give_up(stands, name)


def _everything_in(kept: SetUpComponent) -> set[int]:
    component = kept.prepared.component
    return set(map(id, [*tensors_of(component), *component.optimizers.values()]))
