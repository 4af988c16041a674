"""How often files and folders are looked at for modules that have changed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbtrain.worker.modules.installed_packages import InstalledPackages
from nbtrain.worker.modules.local_modules import LocalModules


def counted(function: Callable[..., Any], counter: Counter[str]) -> Callable[..., Any]:
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        counter[str(path)] += 1
        return function(path, *args, **kwargs)

    return call


def test_looking_asks_once_for_each_file_and_folder_when_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [f"local_module_{index}" for index in range(20)]
    modules = LocalModules()
    packages = InstalledPackages()
    try:
        for name in names:
            (tmp_path / f"{name}.py").write_text("x = 1\n")
            __import__(name)

        def look() -> Any:
            return modules.refresh({}), packages.look(modules.as_read)

        assert look() == (([], []), [])
        asked, read = Counter[str](), Counter[str]()
        with monkeypatch.context() as patched:
            for name, counter in (("stat", asked), ("scandir", read)):
                patched.setattr(os, name, counted(getattr(os, name), counter))
            patched.setattr("builtins.open", counted(open, read))
            look()
        assert asked == Counter([*(path for path, _ in modules._files.values()), *sys.path])
        assert {str(tmp_path / f"{name}.py") for name in names} <= set(asked)
        assert not read
        (tmp_path / f"{names[3]}.py").write_text("x = 22\n")
        assert modules.refresh({}) == ([names[3]], [])
        assert sys.modules[names[3]].x == 22
    finally:
        modules.close()
        for name in names:
            sys.modules.pop(name, None)
