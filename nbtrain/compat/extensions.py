"""torch's compiling of extensions, which DeepSpeed does when an op is first used."""

from __future__ import annotations

import sys

from nbtrain.compat.internals import Internals

its = Internals("torch")

RUN_NINJA = "torch.utils.cpp_extension._run_ninja_build"
"""Runs the compilers, in this process's session, and says nothing until they have ended."""

its.takes(RUN_NINJA, "build_directory", "verbose", "error_prefix")

LOCK = "lock"
"""The file in an extension's folder by which one process compiles it. Who finds it there waits until it is gone, for
ever if whoever made it was killed."""


def check() -> list[str]:
    """Nothing before it is imported: it brings setuptools with it."""
    return its.check() if "torch.utils.cpp_extension" in sys.modules else []
