"""Python's own internals. All of it is there in CPython 3.10 to 3.13."""

from __future__ import annotations

import abc
import asyncio
import functools
import gc
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import FrameType, ModuleType
from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("python")

LruCache: Any = type(functools.lru_cache(lambda: 0))
"""The class of what `lru_cache` returns has no public name."""
ABC_REGISTRY = "_abc_impl"
"""The attribute of an abstract class in which Python keeps who was registered with it."""
OF_ENUM_MEMBERS = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"})
"""What every member of an enum has."""
OF_CLASSES = frozenset({ABC_REGISTRY, "_abc_cache", "_abc_registry", "_abc_negative_cache"}) | {
    "_abc_negative_cache_version"
}
"""What Python keeps on classes, and no user wrote."""
SITE_BUILTINS = "_sitebuiltins"
"""The module of `exit`, `quit` and `copyright`."""
OF_CTYPES = "_ctypes"
"""The module of metaclasses of what ctypes makes."""
MODULES_OF_PATHS = ("pathlib", "pathlib._local")
"""Where `Path` says that it is from: in Python to 3.12, and in 3.13."""
its.members("asyncio", "_set_running_loop")
its.members("abc", "_get_dump")
its.members("sys", "_getframe", "_current_frames")


def registered(cls: type) -> list[type]:
    """The classes that were registered with this abstract one and are still there."""
    references = abc._get_dump(cls)[0]  # type: ignore[attr-defined]  # private, and so not in typeshed
    return [cls_there for reference in references if (cls_there := reference()) is not None]


def caller(depth: int = 1) -> FrameType:
    """The frame that called the function that asks, or one further out; `inspect.stack` would read all their files."""
    return sys._getframe(depth + 1)


@contextmanager
def frames_of(thread: int | None) -> Iterator[Iterator[FrameType]]:
    """The calls of another thread at this moment, innermost first, to be read inside the `with`.

    Python 3.11 makes the object of a frame when it is asked for, and may collect garbage while it does. A finalizer
    that waits lets the other thread go on and leave that very frame, and the object is of memory that is another's: the
    process crashes. So nothing is collected meanwhile. Python 3.12 collects between instructions only.
    """
    collects = sys.version_info[:2] == (3, 11) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        yield _outwards(None if thread is None else sys._current_frames().get(thread))
    finally:
        if collects:
            gc.enable()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def raw_environment() -> Any:
    """`os.environ` undecoded, for comparisons: a hundred variables in a microsecond. None where Python has none."""
    return getattr(os.environ, "_data", None)


def set_running_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """As an event loop does for itself when it begins to turn: so `asyncio.create_task` works in a cell that awaits
    nothing."""
    asyncio._set_running_loop(loop)


def put_sockets_into(directory: str) -> None:
    """Have multiprocessing put its sockets there; a directory of its own would stay when the process is killed."""
    # private, and so not in typeshed
    multiprocessing.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]


_AFTER = """
def executing(before, then):
    def exec_module(self, module):
        before(self, module)
        then(module)
    return exec_module
"""
_IMPORTS = "<frozen importlib._bootstrap_external>"
"""The file name by which Python leaves frames of its own out of tracebacks of what a file raises."""
_listeners: list[Callable[[ModuleType], None]] = []


def after_execution(then: Callable[[ModuleType], None]) -> bool:
    """Have `then` called with each module whose file Python has executed, also again. False if it is called already."""
    if not _listeners:
        names: dict[str, Any] = {}
        exec(compile(_AFTER, _IMPORTS, "exec"), names)
        loader: Any = SourceFileLoader
        loader.exec_module = names["executing"](
            loader.exec_module, lambda module: [hear(module) for hear in _listeners]
        )
    if then in _listeners:
        return False
    _listeners.append(then)
    return True


def started_mocks() -> list[tuple[Any, str]]:
    """What `unittest.mock.patch(…).start()` has put somewhere and not taken off again: the object, the name in it."""
    mock: Any = sys.modules.get("unittest.mock")  # not listed above: ranks would import it to look
    active = getattr(getattr(mock, "_patch", None), "_active_patches", ())  # those of dicts have no target
    return [(patch.target, patch.attribute) for patch in active if getattr(patch, "target", None) is not None]


own_filters: list[Any] = []
"""filters for warnings that nbtrain has set, and no cell"""


def ignore_always(message: str, category: type[Warning]) -> None:
    """Hide warnings of this process that nobody can do anything about."""
    warnings.filterwarnings("ignore", message, category)
    own_filters.append(warnings.filters[0])
