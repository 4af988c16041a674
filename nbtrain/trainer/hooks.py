"""Callbacks and the module's own hooks: who is called when, and what the module has of the trainer's numbers."""

from __future__ import annotations

from typing import Any

import torch

from nbtrain.compat.pytree import tree_map_only
from nbtrain.errors import UsageError
from nbtrain.trainer.module import has
from nbtrain.trainer.module_functions import ModuleFunctions


class Hooks(ModuleFunctions):
    """The part of a Trainer that calls what users have written for it."""

    callbacks: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.module: Any = None
        self.batch_idx = 0
        self._output: Any = None
        self._hooks: dict[str, list[Any]] = {}
        self._counted: list[str] = []
        """numbers that the module has of this trainer, and not of its own"""

    def call(self, name: str, *args: Any) -> None:
        """Callbacks first, then the module."""
        for one, is_callback in self._hooks_named(name):
            said = getattr(one, name)(*((self, self.module) if is_callback else ()), *args)
            if said == -1 and name == "on_train_batch_start":
                raise UsageError(
                    "on_train_batch_start returned -1: to end an epoch early set trainer.should_stop = True"
                )

    def _call_batch(self, when: str) -> None:
        name = f"on_{self.stage}_batch_{when}"
        if not self._hooks_named(name):
            return
        args: tuple[Any, ...] = (self._batch, self.batch_idx)
        if when == "end":
            args = (self._shown_output(), *args)
        if not self.training and self.dataloader_idx:
            args = (*args, self.dataloader_idx)
        self.call(name, *args)

    def _hooks_named(self, name: str) -> list[Any]:
        if name not in self._hooks:
            self._hooks[name] = [
                (one, one is not self.module) for one in (*self.callbacks, self.module) if has(one, name)
            ]
        return self._hooks[name]

    def numbers_of_module(self, names: list[str]) -> None:
        """Of these the module has ours, which are to be up to date."""
        self._counted = names

    def _tell_module(self) -> None:
        for name in self._counted:
            self.module.__dict__[name] = getattr(self, name)

    def _shown_output(self) -> Any:
        """What a step returned, as hooks are given it: a loss alone has its name."""
        output = self._output
        if self.training and isinstance(output, torch.Tensor):
            output = {"loss": output}
        return tree_map_only(torch.Tensor, torch.Tensor.detach, output)
