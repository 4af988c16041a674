"""The locals of a rank in the middle of a cell, in short: read by its second thread, while the first one runs.

No method of the user's is called, nor one that could wait for other ranks: tensors are told by their shape, type and
device, and objects of unknown classes by the class.
"""

from __future__ import annotations

import reprlib
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any

from nbtrain.base.events import FrameLocals
from nbtrain.compat import python
from nbtrain.worker.debugging.rank_pdb import is_hidden, is_library

FRAMES = 3
"""calls that are told, innermost first"""
NAMES = 20
"""locals of each"""
LONG = 100
"""characters of each"""
UNTOLD = ModuleType, FunctionType, type


def main_thread_locals(own: Mapping[str, Any]) -> tuple[FrameLocals, ...]:
    """What the user's innermost calls in the main thread hold. `own`: the globals of his cells."""
    with python.frames_of(threading.main_thread().ident) as frames:
        users = (
            frame for frame in frames if frame.f_globals is own or not (is_hidden(frame) or is_library(_file(frame)))
        )
        return tuple(_told(frame, own) for frame in islice(users, FRAMES))


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _told(frame: FrameType, own: Mapping[str, Any]) -> FrameLocals:
    code, values_there = frame.f_code, dict(frame.f_locals)
    if frame.f_locals is own:  # of a notebook's names, those of the statement that runs
        values_there = {name: values_there[name] for name in code.co_names if name in values_there}
    names = [name for name, value in values_there.items() if not (name.startswith("_") or isinstance(value, UNTOLD))]
    values = tuple((name, short(values_there[name])) for name in names[:NAMES])
    return FrameLocals(code.co_filename, frame.f_lineno, code.co_name, values, max(0, len(names) - NAMES))


def short(value: Any) -> str:
    """A value in one line."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # its class does as it likes
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= LONG else text[: LONG - 1] + "…"


class _Short(reprlib.Repr):
    PLAIN = (int, float, complex, str, bytes, bool, type(None), range, slice)
    HOLDERS = (list, tuple, dict, set, frozenset)

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 60, 60

    def repr1(self, x: Any, level: int) -> str:
        if type(x) in self.PLAIN:
            return super().repr1(x, level)
        if type(x) in self.HOLDERS:
            return super().repr1(x, level)
        return _tensor(x) or _array(x) or f"<{type(x).__name__}>"


_SHORT = _Short()


def _tensor(value: Any) -> str:
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return ""
    from nbtrain.compat.tensors import as_plain_tensors

    with as_plain_tensors():
        return f"{type(value).__name__} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} {value.device}"


def _array(value: Any) -> str:
    """Of numpy, pandas and others."""
    with suppress(Exception):
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype}"
    return ""
