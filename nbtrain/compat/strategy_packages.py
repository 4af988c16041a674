"""Checks that a strategy fits the installed packages: before it is set up, for `%distributed strategies` and for the
doctor. What does not fit is told in one line, with a strategy and a version that do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import TracebackType

from nbtrain.base.errors import VersionMismatch
from nbtrain.compat import tested_versions as versions

EVERYWHERE = (
    "autograd_engine", "compiler", "cuda", "fake_tensors", "groups", "layers", "loaders", "modules",
    "optimizers", "python", "pytree", "tensors",
)  # fmt: skip
"""The files that every strategy needs but `none`, which touches nothing."""


LIBRARIES = ("deepspeed", "fairscale", "horovod", "xla")
"""The files that import nothing of what they are about, not even torch, before it is used."""


def lacks(file: str) -> tuple[str, ...]:
    """What the installed version lacks of what one file here uses: some microseconds, once the package is imported."""
    return tuple(import_module(f"nbtrain.compat.{file}").its.check())


def package_of(file: str) -> str:
    name: str = import_module(f"nbtrain.compat.{file}").its.package
    return name


def refusal(strategy: str, files: Sequence[str], instead: str = "", look: bool = True) -> str:
    """Why this strategy cannot be run with what is installed here; empty if it can. `instead`: one that can. Without
    `look` nothing is imported to find out: of a package that is not, its version is asked."""
    for file in files:
        if not look and file not in LIBRARIES and "torch" not in sys.modules:
            continue
        package = package_of(file)
        if (look or package in sys.modules) and (lacking := lacks(file)):
            return _sentence(strategy, package, lacking[0], instead)
        if not look and versions.is_older(package):
            return _sentence(strategy, package, "it is too old", instead)
    return ""


def explain(error: BaseException | None) -> None:
    """Add to an error of nbtrain's own code that a package has changed, if the installed one is newer than any that was
    tried."""
    if not isinstance(error, (AttributeError, ImportError, NameError, TypeError, VersionMismatch)):
        return
    if not _is_ours(error.__traceback__) or "pip install" in str(error):
        return
    package = _touched(error.__traceback__)
    if versions.is_newer(package):
        told = PIN.format(package=package, here=versions.installed(package), newest=versions.newest(package))
        error.args = (f"{error}. {told}",)
        if isinstance(error, ImportError):  # it shows this, and not its arguments
            error.msg = error.args[0]


PIN = 'nbtrain was run with {package} up to {newest}, and here is {here}: pip install "{package}=={newest}"'


def _touched(trace: TracebackType | None) -> str:
    """The package whose file in this folder the error came through."""
    package = "torch"
    while trace is not None:
        place, _, file = trace.tb_frame.f_globals.get("__name__", "").rpartition(".")
        if place == __package__ and hasattr(sys.modules[f"{place}.{file}"], "its"):
            package = package_of(file)
        trace = trace.tb_next
    return package


def _is_ours(trace: TracebackType | None) -> bool:
    """The line that raised is nbtrain's, and not the one that calls a replaced function for the user."""
    where = ""
    while trace is not None:
        if trace.tb_frame.f_code.co_name != "__getattr__":  # of a module or class that has no such name
            where = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return where.startswith("nbtrain.") and where != "nbtrain.compat.intercept"


def _sentence(strategy: str, package: str, lack: str, instead: str) -> str:
    here, newest, oldest = versions.installed(package), versions.newest(package), versions.oldest(package)
    since = ""
    if versions.is_newer(package):
        since = f"; that has changed since {package} {newest}, the newest that nbtrain was run with"
    elif versions.is_older(package):
        since = f"; nbtrain was run with {package} {oldest} and newer"
    elif newest:
        since = f"; nbtrain was run with {package} {', '.join(versions.TRIED[package])}"
    ways = [f"write --strategy {instead}"] if instead else []
    if newest:
        ways.append(f'install one that was: pip install "{package}=={newest}"')
    return f"{strategy} does not fit {package} {here}: {lack}{since}. " + ", or ".join(ways).capitalize()
