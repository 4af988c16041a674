"""How torch compiles C++ extensions, as DeepSpeed has it do when an op is first used."""

from __future__ import annotations

import sys

from nbtrain.compat.internals import Internals

its = Internals("torch")

RUN_NINJA = "torch.utils.cpp_extension._run_ninja_build"
"""Runs the compilers in this process's session, silently until they have ended."""

its.takes(RUN_NINJA, "build_directory", "verbose", "error_prefix")

LOCK = "lock"
"""The file with which a process locks an extension's folder while it compiles. Others wait until it is gone: for ever
if that process was killed."""


def check() -> list[str]:
    """What the installed version lacks. The module is not imported for it, as it brings setuptools with it."""
    return its.check() if "torch.utils.cpp_extension" in sys.modules else []
