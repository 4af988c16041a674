"""Whether a strategy fits the installed packages: asked before it is set up, by `%distributed strategies` and by the
doctor. What does not fit is told in one line, with a strategy and a version that do."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import TracebackType

from nbtrain.compat import versions
from nbtrain.errors import VersionMismatch

EVERYWHERE = ("engine", "groups", "layers", "loaders", "modules", "optimizers", "tensors")
"""The files that every strategy needs but `none`, which touches nothing."""


def lacks(file: str) -> tuple[str, ...]:
    """What the installed version lacks of what one file here uses: some microseconds, once the package is imported."""
    return tuple(import_module(f"nbtrain.compat.{file}").check())


def package_of(file: str) -> str:
    name: str = import_module(f"nbtrain.compat.{file}").its.package
    return name


def refusal(strategy: str, files: Sequence[str], instead: str = "", look: bool = True) -> str:
    """Why this strategy cannot be run with what is installed here; empty if it can. `instead`: one that can. Without
    `look` no package is imported to find out: what is asked is its version, as far as it is not torch."""
    for file in files:
        package = package_of(file)
        if (look or package == "torch") and (found := lacks(file)):
            return _sentence(strategy, package, found[0], instead)
        if not look and versions.is_older(package):
            return _sentence(strategy, package, "it is too old", instead)
    return ""


def explain(error: BaseException | None) -> None:
    """An error that looks as if a package had changed under nbtrain says so, if one here is newer than any that was
    tried."""
    if not isinstance(error, (AttributeError, ImportError, NameError, TypeError, VersionMismatch)):
        return
    if not isinstance(error, VersionMismatch) and not _is_ours(error.__traceback__):
        return
    for package in versions.TRIED:
        if versions.is_newer(package) and f"{package} up to" not in str(error):
            here, newest = versions.installed(package), versions.newest(package)
            error.args = (f"{error}. {PIN.format(package=package, here=here, newest=newest)}",)


PIN = 'nbtrain was run with {package} up to {newest}, and here is {here}: pip install "{package}=={newest}"'


def _is_ours(trace: TracebackType | None) -> bool:
    """The line that raised is nbtrain's, and not the one that calls a replaced function for the user."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return where.startswith("nbtrain.") and where != "nbtrain.intercept"


def _sentence(strategy: str, package: str, lack: str, instead: str) -> str:
    here, newest, oldest = versions.installed(package), versions.newest(package), versions.oldest(package)
    if versions.is_newer(package):
        since = f"that has changed since {package} {newest}, the newest that nbtrain was run with"
    elif versions.is_older(package):
        since = f"nbtrain was run with {package} {oldest} and newer"
    else:
        since = f"nbtrain was run with {package} {', '.join(versions.TRIED.get(package, ()))}"
    ways = [f"write --strategy {instead}"] if instead else []
    if newest:
        ways.append(f'install one that was: pip install "{package}=={newest}"')
    return f"{strategy} does not fit {package} {here}: {lack}; {since}. " + ", or ".join(ways).capitalize()
