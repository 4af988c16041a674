"""`%distributed debug [RANK]`, and `%debug` after a distributed cell: pdb on the rank whose error was shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nbtrain.base.errors import FROM_RANKS
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState

NOTHING = "there is nothing to debug: no ranks are running"


def debug(state: MagicsState, request: Request) -> str | None:
    rank = request.argument("the number of one rank", number=True)
    if state.session is None:
        return NOTHING
    return state.session.debug(int(rank) if rank else None)


def is_from_ranks(error: BaseException | None) -> bool:
    """Whether a distributed cell has raised this, or what is shown in its place."""
    return error is not None and any(hasattr(raised, FROM_RANKS) for raised in (error, error.__context__))


class DebugMagic:
    """`%debug` in one shell: IPython's own, but for errors that ranks have raised."""

    def __init__(self, shell: Any, state: MagicsState) -> None:
        self._shell = shell
        self._state = state
        self._table = shell.magics_manager.magics["line"]
        self._original = self._table.get("debug")

    @property
    def there(self) -> bool:
        return self._original is not None

    def function(self) -> Callable[..., Any]:
        """What is to be registered."""

        def debug(line: str = "", local_ns: Any = None) -> Any:
            if line.strip() or self._state.session is None or not is_from_ranks(getattr(sys, "last_value", None)):
                return self._others(line, local_ns)
            if said := self._state.session.debug(None):
                print(said)
            return None

        debug.__doc__ = "Open pdb where the last error was raised, also on a rank of a %%distributed cell."
        debug.needs_local_scope = True  # type: ignore[attr-defined]  # IPython looks for it on functions
        return debug

    def close(self) -> None:
        if self.there:
            self._table.setdefault("debug", self._original)

    def _others(self, line: str, local_ns: Any) -> Any:
        """IPython imports the function behind it when it is looked for."""
        ours = self._table["debug"]
        self._table["debug"] = self._original
        try:
            original = self._original = self._shell.find_line_magic("debug")
        finally:
            self._table["debug"] = ours
        more = {"local_ns": local_ns} if getattr(original, "needs_local_scope", False) else {}
        return original(line, **more)
