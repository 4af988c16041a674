"""How torch compiles C++ extensions, as DeepSpeed has it do when an op is first used."""

from __future__ import annotations

from nbtrain.compat.internals import Internals

its = Internals("torch", only_if_loaded="torch.utils.cpp_extension")  # it brings setuptools with it

RUN_NINJA = "torch.utils.cpp_extension._run_ninja_build"
"""Runs the compilers in this process's session, silently until they have ended."""

its.takes(RUN_NINJA, "build_directory", "verbose", "error_prefix")

LOCK = "lock"
"""The file with which a process locks an extension's folder while it compiles. Others wait until it is gone: forever
if that process was killed."""
