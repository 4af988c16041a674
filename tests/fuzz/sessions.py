"""A notebook in this process with real ranks: an IPython shell, the extension, a session."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from nbtrain.exchange.names.cell_names import own
from nbtrain.notebook.magics import extension
from tests.support.shells import bare_shell


class Live:
    """Cells are run one after another; the namespace is emptied between two notebooks, the ranks stay."""

    def __init__(self, shell: Any, options: str) -> None:
        self.shell = shell
        self.options = options
        self.shown = ""

    @property
    def namespace(self) -> dict[str, Any]:
        return self.shell.user_ns  # type: ignore[no-any-return]

    def clear(self) -> None:
        for name in own(self.namespace):
            del self.namespace[name]
        self.shell.user_ns.pop("_", None)

    def run(self, text: str, distributed: bool) -> BaseException | None:
        """What the cell raised."""
        cell = f"%%distributed {self.options}\n{text}" if distributed else text
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            result = self.shell.run_cell(cell, store_history=False)
        self.shown = out.getvalue()
        return result.error_before_exec or result.error_in_exec  # type: ignore[no-any-return]


@contextlib.contextmanager
def live(options: str) -> Iterator[Live]:
    with bare_shell() as shell:
        extension.load(shell, doctor=lambda: "")
        yield Live(shell, options)
        shell.user_ns.clear()
