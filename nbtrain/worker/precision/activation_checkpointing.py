"""`--checkpoint-activations Block`: what a `Block` computes is not kept for the backward, but computed again there.

While a cell runs, the `forward` of the classes that were named is one that goes through `torch.utils.checkpoint`; then
each class has its own again. The class is changed and not the modules, because

- a module stays what the notebook knows: `type(block) is Block`, nothing is added to its `__dict__`, and a copy or a
  pickle of it made in the cell is an ordinary `Block`. (A `forward` of the instance would be copied with it, and the
  copy would compute with the weights of the original.)
- a strategy may put modules into subclasses of its own before or after (`fully_shard` does), which inherit it. Hooks
  of modules run outside of it, so what a strategy gathers before a forward is there when it is repeated.
- putting it on and taking it off costs the same for a model of a thousand blocks as for one.

It is on only while user code runs: the exchange looks at classes before and after.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from nbtrain.base.errors import UsageError
from nbtrain.worker.parts import Cell, Part

FLAG = "--checkpoint-activations"


class ActivationCheckpointing(Part):
    """Replaces the forward of classes: `choose` them by their names, then `on`, and at last `off`."""

    def __init__(self, several: bool = True) -> None:
        self.several = several
        self._names: tuple[str, ...] = ()
        self._chosen: dict[type[nn.Module], None] = {}
        self._met: Counter[str] = Counter()
        self._undo: list[Callable[[], None]] = []
        self._is_on = False
        self._within = threading.local()
        self._whole = ""
        """the name of a whole model's class, if it was given"""

    def begin(self, cell: Cell) -> None:
        names = () if cell.hands_off else cell.run.checkpoint_activations
        if names or self._names:
            self.choose(names, cell.models)
            self.on()

    def end(self, ok: bool) -> None:
        if self._is_on:
            self.off()

    def advice(self, names: Mapping[str, object], stepped: bool) -> dict[str, str]:
        return {"checkpoints": self.whole()} if stepped and self._whole and self.several else {}

    def choose(self, names: tuple[str, ...], modules: Iterable[nn.Module]) -> None:
        """`names`: of classes; `modules`: what the cell uses. Raises `UsageError` for a name that none of them has."""
        self.off()
        self._names, self._whole = names, ""
        self._chosen.clear()
        self._met.clear()
        self.learn(modules)

    def learn(self, modules: Iterable[nn.Module]) -> None:
        """Find the named classes in these models, and in those that the cell sets up."""
        if not self._names:
            return
        modules = list(modules)
        parts = {id(part): part for module in modules for part in module.modules()}
        self._met.update(type(part).__name__ for part in parts.values())
        if not self._met:  # the cell will make them
            return
        for name in self._names:
            if name not in self._met:
                there = ", ".join(f"{other} ({count})" for other, count in self._met.items())
                raise UsageError(f"{FLAG} {name}: no module here is a {name}; there are {there}")
        for part in parts.values():
            if type(part).__name__ in self._names:
                if "forward" in vars(part):
                    raise UsageError(
                        f"{FLAG} {type(part).__name__}: one of them has a forward of its own that was set on the "
                        "object; give it a class whose method it is"
                    )
                self._chosen.setdefault(type(part))
        within = {id(part) for module in modules for part in list(module.modules())[1:]}
        roots = [type(module).__name__ for module in modules if id(module) not in within]
        self._whole = next((name for name in roots if name in self._names), self._whole)
        if self._is_on:
            self.on()

    def whole(self) -> str:
        """Advice where a whole model is computed again at once."""
        if not self._whole:
            return ""
        blocks = [f"{name} ({count})" for name, count in self._met.items() if count > 1 and name not in self._names]
        there = f": {', '.join(blocks)}" if blocks else ""
        return (
            f"{FLAG} {self._whole} names the whole model: all of it is computed again at once, so no memory is saved, "
            f"and a forward is lost. Name classes that it has several of{there}"
        )

    def on(self) -> None:
        """Replace the forwards. May be called twice."""
        self.off()
        self._is_on = True
        # One may inherit from another: all are looked up before any is replaced.
        for cls, forward in [(cls, cls.forward) for cls in self._chosen]:
            self._replace(cls, self._recomputed(forward))

    def off(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._is_on = False

    def _replace(self, cls: type[nn.Module], new: Callable[..., Any]) -> None:
        own = vars(cls).get("forward")

        def undo() -> None:
            if vars(cls).get("forward") is not new:  # the cell has written another method
                return
            if own is None:
                type.__delattr__(cls, "forward")
            else:
                type.__setattr__(cls, "forward", own)

        # Past a metaclass of the user's; what stands in the class keeps its place, which the exchange compares.
        type.__setattr__(cls, "forward", new)
        self._undo.append(undo)

    def _recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        within = self._within

        @wraps(forward)
        def recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(module, *args, **kwargs)
            if torch.compiler.is_compiling():  # it marks what is to be recomputed, and keeps no count of the depth

                def marked(*args: Any) -> Any:
                    return forward(module, *args, **kwargs)

                return checkpoint(marked, *args, use_reentrant=False)
            # Inside of another one it would be computed a third time; and `super().forward` is a part of one.
            if getattr(within, "one", False) or type(module).forward is not recomputed:
                return forward(module, *args, **kwargs)

            def again(*args: Any) -> Any:
                within.one = True
                try:
                    return forward(module, *args, **kwargs)
                finally:
                    within.one = False

            # It is computed to its end. To stop where the last number that is needed has been made, torch raises an
            # exception through the forwards, and hooks of strategies would take that for a failure.
            with set_checkpoint_early_stop(False):
                return checkpoint(again, *args, use_reentrant=False)

        return recomputed
