"""`breakpoint()` in a cell of `--engine inprocess`: the notebook's own debugger, as `%debug` has it.

ipykernel imports debugpy, which takes `sys.breakpointhook` for itself and passes every breakpoint over while no
debugger is attached. So its hook stays where JupyterLab's debugger is, and is replaced for a cell without one.
"""

from __future__ import annotations

import inspect
import sys
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbtrain.compat import kernel
from nbtrain.notebook.debugging.input_line import NO_INPUT

HIDDEN = ["nbtrain.*", "IPython.*", "contextlib"]
"""modules that `n` and `s` do not stop in"""


@contextmanager
def breakpoints(shell: Any) -> Iterator[None]:
    """Inside, `breakpoint()` asks in the notebook's input line, and nothing is traced afterwards."""
    if is_attached():
        yield
        return
    hook, traced = sys.breakpointhook, sys.gettrace()
    sys.breakpointhook = _Breakpoints(shell)
    try:
        yield
    except BdbQuit:
        raise KeyboardInterrupt("left the debugger; what the cell did until then is in the notebook") from None
    finally:
        sys.breakpointhook = hook
        sys.settrace(traced)


def is_attached() -> bool:
    """Whether a debugger of a front end is: JupyterLab's panel, or VS Code's."""
    debugpy: Any = sys.modules.get("debugpy")
    return debugpy is not None and bool(debugpy.is_client_connected())


class _Breakpoints:
    """What `breakpoint()` calls."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._said = False

    def __call__(self, *_: object, **__: object) -> None:
        if kernel.takes_input(getattr(self._shell, "kernel", None)):
            frame = inspect.currentframe()
            self._shell.debugger_cls(skip=HIDDEN).set_trace(frame and frame.f_back)
        elif not self._said:
            self._said = True
            print(f"breakpoint() is passed over: {NO_INPUT}")
