"""Warns of, or refuses, hooks that see a rank's own gradient before it is averaged.

A hook of `register_hook` that is linear (a mask, a factor) gives what it gives in one process: that is said once. One
that runs after a gradient is accumulated is right where it steps an optimizer, before which a gradient is averaged, and
wrong where it reads or edits it. What was set in the notebook is refused; one that a cell sets, where it runs and the
weight stays as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.compat.intercept import Listeners
from nbtrain.exchange.graph.object_path import FoundObjects
from nbtrain.strategies.base import Prepared
from nbtrain.strategies.kit.gradient_average import TOO_EARLY
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.setup.components import Components

OWN_SHARE = (
    "a hook on a parameter's gradient (register_hook) sees each rank's own gradient, before it is averaged: that is "
    "right for a mask or a factor. To clip gradients or to measure them, write it between loss.backward() and "
    "optimizer.step()"
)


class LocalGradientHooks(Part):
    """Looks at the hooks on parameters."""

    def __init__(self, components: Components, speaks: bool) -> None:
        """`speaks`: whether this rank is the one that warns."""
        self.components, self.speaks = components, speaks
        self.running = self.said = False
        self._mark = object()
        """on what was looked at and needs no look again, until a cell sets a hook"""
        self.stepping: list[tuple[ref[torch.Tensor], int, Any]] = []
        """(parameter, number of the handle, hook), set by the cell"""

    def listen(self, listeners: Listeners) -> None:
        if self.components.world_size > 1:
            listeners.listen("torch.Tensor.register_hook", "hooks", self._on_gradient)
            listeners.listen("torch.Tensor.register_post_accumulate_grad_hook", "hooks", self._after)

    def begin(self, cell: Cell) -> list[str]:
        """Check hooks that the notebook has set. Returns a sentence about them; raises where they go wrong."""
        self.running, objects = not cell.hands_off, cell.objects  # found anew when anything has come from the notebook
        if isinstance(objects, FoundObjects) and objects.checked is self._mark:
            return []
        said = self.said
        for prepared in self.components.reached:
            for p in prepared.component.parameters() if not prepared.promises.hooks_see_means else ():
                before, after = tensors.hook_tables(p)
                if after and tensors.users_hooks(p, tensors.ACCUMULATED_HOOKS):
                    raise NotSupported(TOO_EARLY)
                self.said = self.said or bool(before and tensors.users_hooks(p, tensors.GRADIENT_HOOKS))
        if isinstance(objects, FoundObjects):
            objects.checked = self._mark
        return [OWN_SHARE] if self.said and not said else []

    def end(self, ok: bool) -> None:
        self.running = False
        while self.stepping:
            found, number, hook = self.stepping.pop()
            p = found()
            table = tensors.hook_table(p, tensors.ACCUMULATED_HOOKS) if p is not None else None
            if table and number in table:
                table[number] = hook

    def _on_gradient(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def register(tensor: torch.Tensor, hook: Any, *args: Any, **kwargs: Any) -> Any:
            self._mark = object()
            if not self.said and self._averaged(tensor, hook):
                self.said = True
                if self.speaks:
                    warnings.warn(OWN_SHARE, stacklevel=3)
            return old(tensor, hook, *args, **kwargs)

        return register

    def _after(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def register(tensor: torch.Tensor, hook: Any, *args: Any, **kwargs: Any) -> Any:
            self._mark = object()
            if not self._averaged(tensor, hook):
                return old(tensor, hook, *args, **kwargs)
            holding = [prepared for prepared in self.components.prepared if _holds(prepared, tensor)]
            if not all(prepared.promises.averages_before_step for prepared in holding):
                raise NotSupported(TOO_EARLY)
            handle = old(tensor, _stepping(hook), *args, **kwargs)
            self.stepping.append((ref(tensor), handle.id, hook))
            return handle

        return register

    def _averaged(self, tensor: torch.Tensor, hook: Any) -> bool:
        """Whether this is a user's hook on a parameter whose gradient is averaged."""
        if not self.running or not tensor.is_leaf or not tensors.is_users_hook(hook):
            return False
        return any(
            _holds(prepared, tensor) for prepared in self.components.prepared if not prepared.promises.hooks_see_means
        )


def _stepping(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """The hook, refused after a call in which it did not step an optimizer (a step averages first)."""

    def stepping(p: Any) -> None:
        before = tensors.version(p)
        hook(p)
        if tensors.version(p) == before and p.grad is not None:
            raise NotSupported(TOO_EARLY)

    return stepping


def _holds(prepared: Prepared, tensor: torch.Tensor) -> bool:
    return any(p is tensor for p in prepared.component.parameters())
