"""Whether a strategy fits the installed packages: asked before it is set up, by `%distributed strategies` and by the
doctor. What does not fit is told in one line, with a strategy and a version that do."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module

from nbtrain.compat import versions
from nbtrain.errors import VersionMismatch

EVERYWHERE = ("engine", "groups", "layers", "loaders", "modules", "optimizers", "tensors")
"""The files that every strategy needs but `none`, which touches nothing."""


@functools.cache
def lacks(file: str) -> tuple[str, ...]:
    """What the installed version lacks of what one file here uses."""
    return tuple(import_module(f"nbtrain.compat.{file}").check())


def package_of(file: str) -> str:
    name: str = import_module(f"nbtrain.compat.{file}").its.package
    return name


def refusal(strategy: str, files: Sequence[str], instead: str = "") -> str:
    """Why this strategy cannot be run with what is installed here; empty if it can. `instead`: one that can."""
    for file in files:
        if found := lacks(file):
            return _sentence(strategy, package_of(file), found[0], instead)
    return ""


def refuse(strategy: str, files: Sequence[str], instead: str = "") -> None:
    if found := refusal(strategy, files, instead):
        raise VersionMismatch(found)


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
