"""Applies the notebook's settings of Python and of libraries (warnings, print options, rcParams) on the ranks.

They go one way: what a cell on the ranks changes of them ends with it. Nothing is imported to read them.
"""

from __future__ import annotations

import decimal
import locale
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from nbtrain.compat import pandas, python, tensors
from nbtrain.exchange.kinds.containers import same_items

Settings = dict[str, Any]
_OF_THE_SCREEN = frozenset(("backend", "backend_fallback", "interactive", "toolbar", "timezone"))
"""Of matplotlib's: how figures get to the notebook is each side's own."""


def _warnings() -> list[Any]:
    return list(warnings.filters)


def _set_warnings(wanted: Any) -> None:
    """A rank's own filters come first: they concern what only a rank does."""
    own = [entry for entry in (*_own_filters, *python.own_filters) if entry not in wanted]
    warnings.resetwarnings()  # so that Python looks at them anew
    warnings.filters[:] = [*own, *wanted]  # type: ignore[index]  # a list, which typeshed does not say


_own_filters: list[Any] = []
"""a rank's filters before the notebook's were applied"""


def _logging() -> dict[str, int]:
    manager = logging.root.manager
    levels = {
        name: logger.level
        for name, logger in list(manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {"": logging.root.level, " ": manager.disable, **levels}


def _set_logging(wanted: Any) -> None:
    for name, level in _logging().items():
        if name not in wanted and level:
            logging.getLogger(name).setLevel(logging.NOTSET)
    for name, level in wanted.items():
        if name == " ":
            logging.disable(level)
        else:
            logging.getLogger(name or None).setLevel(level)


def _set_locale(wanted: str) -> None:
    locale.setlocale(locale.LC_ALL, wanted)


def _decimal() -> Any:
    context = decimal.getcontext().copy()
    context.clear_flags()
    return context.__reduce__()[1]


def _set_decimal(wanted: Any) -> None:
    decimal.setcontext(decimal.Context(*wanted))


def _numpy() -> Any:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "get_printoptions"):
        return None
    shown = numpy.get_printoptions()
    return numpy.geterr(), {name: value for name, value in shown.items() if name != "override_repr"}


def _set_numpy(wanted: Any) -> None:
    numpy: Any = sys.modules["numpy"]
    numpy.seterr(**wanted[0])
    numpy.set_printoptions(**wanted[1])


def _set_torch(wanted: Any) -> None:
    import torch

    torch.set_printoptions(**wanted)


def _set_pandas(wanted: Any) -> None:
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an option that goes out of use: the notebook has warned of it
        for name in (pandas.options() or {}).keys() - wanted.keys():
            pd.reset_option(f"^{name}$")
        for name, value in wanted.items():
            pd.set_option(name, value)


def _matplotlib() -> dict[str, Any] | None:
    matplotlib: Any = sys.modules.get("matplotlib")
    if matplotlib is None or not hasattr(matplotlib, "rcParamsDefault"):
        return None
    default = matplotlib.rcParamsDefault
    values = list(dict.values(matplotlib.rcParams))
    if not same_items(values, _drawn[0]):
        differing = {
            name: value
            for name, value in dict.items(matplotlib.rcParams)
            if name not in _OF_THE_SCREEN and not name.startswith("webagg") and value != dict.get(default, name)
        }
        _drawn[:] = values, differing
    params: dict[str, Any] = _drawn[1]
    return params


_drawn: list[Any] = [[], {}]
"""values at the last look, and those that differ from the defaults"""


def _set_matplotlib(wanted: Any) -> None:
    import matplotlib

    default: Any = matplotlib.rcParamsDefault
    for name in (_matplotlib() or {}).keys() - wanted.keys():
        dict.__setitem__(matplotlib.rcParams, name, dict.get(default, name))
    for name, value in wanted.items():
        dict.__setitem__(matplotlib.rcParams, name, value)


_KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "warnings": (_warnings, _set_warnings),
    "logging": (_logging, _set_logging),
    "locale": (lambda: locale.setlocale(locale.LC_ALL), _set_locale),
    "decimal": (_decimal, _set_decimal),
    "numpy": (_numpy, _set_numpy),
    "torch": (tensors.print_options, _set_torch),
    "pandas": (pandas.options, _set_pandas),
    "matplotlib": (_matplotlib, _set_matplotlib),
}
LIBRARIES = frozenset(("numpy", "torch", "pandas", "matplotlib"))


def read() -> Settings:
    """This process's settings, of the libraries that are loaded."""
    settings: Settings = {}
    for name, (look, _) in _KINDS.items():
        with suppress(Exception):  # a library of another version
            value = look()
            if value is not None:
                settings[name] = value
    return settings


def note_own_filters() -> None:
    """On a rank, before the notebook's settings are applied."""
    _own_filters[:] = warnings.filters


def put(wanted: Mapping[str, Any]) -> dict[str, Exception]:
    """Apply these; returns failures by name. A library is imported only where its settings differ from its defaults."""
    failed = {}
    for name, value in wanted.items():
        if name in LIBRARIES and name not in sys.modules and (not value or name in ("numpy", "torch")):
            continue
        look, change = _KINDS[name]
        try:
            now = look()
            if name == "warnings":
                now = [entry for entry in now if entry in value or entry not in (*_own_filters, *python.own_filters)]
            if now != value:
                change(value)
        except Exception as error:  # of a library, and reported
            failed[name] = error
    return failed
