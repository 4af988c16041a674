"""The versions that nbtrain was run with, and how the installed ones compare. docs/environments.md has the dates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata

TRIED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.8.0", "2.9.1", "2.10.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    "deepspeed": ("0.19.8",),
    "fairscale": ("0.4.13",),
    "horovod": ("0.28.1",),
}
"""Oldest first. `make compat` runs the tests with one of them; a test compares with the documentation's table."""


def installed(package: str) -> str:
    """Its version, without what a build adds (`+cpu`); empty where it is not installed."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def newest(package: str) -> str:
    """The newest version that was tried; empty where nbtrain keeps no list."""
    return TRIED.get(package, ("",))[-1]


def oldest(package: str) -> str:
    return TRIED.get(package, ("",))[0]


def is_older(package: str) -> bool:
    """Whether the installed version is older than any that was tried."""
    here, known = installed(package), oldest(package)
    return bool(here and known) and release(here) < release(known)


def is_newer(package: str) -> bool:
    """Whether the installed version is newer than any that was tried."""
    here, known = installed(package), newest(package)
    return bool(here and known) and release(here) > release(known)


def release(version: str) -> tuple[int, ...]:
    """The numbers before any letter: `2.15.0rc1` is (2, 15, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
