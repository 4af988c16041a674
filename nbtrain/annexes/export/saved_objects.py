"""Objects that only exist by the history of a notebook, and are saved beside the script."""

from __future__ import annotations

import ast
import builtins
import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.annexes.export.source import Exported, Source
from nbtrain.annexes.export.statements import Statement
from nbtrain.base.errors import UsageError


class Missing:
    """Names that are read and that no statement binds. `known`: names that a script has itself."""

    def __init__(
        self, source: Source, statements: Iterable[Statement], known: frozenset[str], result: Exported
    ) -> None:
        self.source, self.result = source, result
        self.known = self.bound = known | frozenset(dir(builtins))
        self.later = self.bound.union(*(statement.binds for statement in statements))

    def before(self, statement: Statement, text: str = "") -> list[str]:
        """Lines that such names need before this statement, and its text."""
        if isinstance(statement.node, ast.Delete):
            there = statement.reads <= self.bound
            self.bound = (self.bound - statement.reads) | self.known
            return [text] if there else []
        bound = self.later if statement.defines else self.bound
        lines = [line for name in sorted(statement.reads - bound - statement.binds) for line in self._line(name)]
        self.bound |= statement.binds
        return [*lines, text] if text else lines

    def _line(self, name: str) -> list[str]:
        self.bound |= {name}
        self.later |= {name}
        if name not in self.source.namespace:
            self.result.notes.append(
                f"{name}: no cell makes it, and the notebook has none; the script has to say what it is"
            )
            return []
        value = self.source.namespace[name]
        if isinstance(value, type(builtins)):
            return [f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else "")]
        why = "no cell that was run makes it"
        if (trained := trained_in(name, value, why)) is not None:
            raise UsageError(
                f"export: {name} is needed, {why}, and its {type(trained).__name__} is not saved, as it would be with "
                f"the weights of today: run a cell of the notebook that makes {name}, then the %%distributed cell, and "
                "export that"
            )
        self.result.saved[name] = pickle.dumps(value)  # by itself: its class is there when it is read
        self.result.notes.append(f"{name} is saved beside the script: {why}")
        where = f"os.path.join(os.path.dirname(os.path.abspath(__file__)), {self.source.objects!r})"
        return ["import pickle", f"{name} = pickle.loads(torch.load({where}, weights_only=False)[{name!r}])"]


def trained_in(name: str, value: Any, why: str = "") -> Any:
    """A model, an optimizer or a weight in a value."""
    parts = _Parts()
    try:
        parts.dump(value)
    except Exception as error:  # whatever its class raises
        raise UsageError(f"export: {name} is needed, {why}, and it cannot be saved: {error}") from None
    return parts.trained


class _Parts(pickle.Pickler):
    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.trained: Any = None

    def persistent_id(self, value: Any) -> None:
        weights = isinstance(value, nn.Module) and bool(value.state_dict())
        if weights or isinstance(value, Optimizer) or (isinstance(value, torch.Tensor) and value.requires_grad):
            self.trained = value if self.trained is None else self.trained
