"""Keeps a cell from running that IPython has already begun with."""

from __future__ import annotations

import ast
from typing import Any

from IPython.core.error import InputRejected

SAID = "KeyboardInterrupt: stopped while it waited for the run in the background; the cell was not run"


class NotRun(InputRejected):
    """Shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Refusal:
    """An AST transformer that raises: IPython's callbacks cannot keep a cell from running."""

    def __init__(self, shell: Any) -> None:
        self._transformers: list[Any] = shell.ast_transformers

    def enter(self) -> None:
        """Refuse the cell that is about to run."""
        self._transformers.append(self)

    def leave(self) -> None:
        if self in self._transformers:
            self._transformers.remove(self)

    def visit(self, tree: ast.AST) -> ast.AST:
        self.leave()
        raise NotRun(SAID)
