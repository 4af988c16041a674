"""How cloudpickle takes functions and classes apart and makes them again. cloudpickle 3.0 to 3.1."""

from __future__ import annotations

from typing import Any

import cloudpickle.cloudpickle as cp

from nbtrain.compat.internals import Internals

its = Internals("cloudpickle")

its.members(
    "cloudpickle.cloudpickle",
    *("_should_pickle_by_reference", "_extract_code_globals", "_enum_getnewargs", "_class_getnewargs"),
    *("_make_skeleton_enum", "_make_skeleton_class", "_enum_getstate"),
)


def goes_by_name(obj: Any) -> bool:
    """Whether the other side can import this function or class."""
    return bool(cp._should_pickle_by_reference(obj))


def globals_in(code: Any) -> Any:
    """The names of globals that this code and the functions in it use."""
    return cp._extract_code_globals(code)


def enum_arguments(cls: type) -> Any:
    """(bases, name, qualname, members, module, tracker id, extra)"""
    return cp._enum_getnewargs(cls)


def class_arguments(cls: type) -> Any:
    """(metaclass, name, bases, keywords, tracker id, extra)"""
    return cp._class_getnewargs(cls)


def make_enum(bases: Any, name: str, qualname: str, members: Any, module: str) -> Any:
    return cp._make_skeleton_enum(bases, name, qualname, members, module, None, None)


def make_class(meta: Any, name: str, bases: Any, body: Any) -> Any:
    """Make a class without its body, which comes afterwards and may refer to the class."""
    return cp._make_skeleton_class(meta, name, bases, body, None, None)


def enum_body(cls: type) -> dict[str, Any]:
    """What stands in the class, without what Python makes of its members."""
    body: dict[str, Any] = cp._enum_getstate(cls)[0]
    return body


def of_numpy() -> list[Any]:
    """How numpy's arrays and numbers are made anew, for `torch.serialization.safe_globals`: those of plain dtypes."""
    try:
        import numpy
    except ImportError:
        return []
    kinds = {type(numpy.dtype(code)) for code in numpy.typecodes["AllInteger"] + numpy.typecodes["AllFloat"] + "?USMm"}
    makers: list[Any] = [numpy.empty(0).__reduce__()[0], numpy.float64(0).__reduce__()[0]]
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")  # of numpy 1, and of 2
    named = [(made, f"{module}.{made.__name__}") for made in makers for module in modules]
    return [numpy.ndarray, numpy.dtype, *kinds, *named]
