"""C++ extensions that torch has compiled, as DeepSpeed has it do when an op is first used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("torch", only_if_loaded="torch.utils.cpp_extension")  # it brings setuptools with it

_FOLDER = "torch.utils.cpp_extension._get_build_directory"
"""Where an extension of this name is, or would be, compiled."""
_IMPORT = "torch.utils.cpp_extension._import_module_from_library"
"""Imports it from there, without asking ninja whether its sources have changed."""

its.takes(_FOLDER, "name", "verbose")
its.takes(_IMPORT, "module_name", "path", "is_python_module")


def compiled(name: str) -> Any:
    """The extension of this name, if it was compiled on this machine; else None."""
    from torch.utils import cpp_extension

    folder = cpp_extension._get_build_directory(name, False)
    if not (Path(folder) / f"{name}.so").exists():
        return None
    return cpp_extension._import_module_from_library(name, folder, True)
