"""Which files nobody edits: wherever pip, a `.pth` or a source folder put them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

import nbtrain
from nbtrain.base.installed_files import is_installed


@pytest.mark.parametrize("path", [torch.__file__, nbtrain.__file__, os.__file__, pytest.__file__, "<frozen os>"])
def test_packages_and_the_standard_library_are(path: str) -> None:
    assert is_installed(path)


def test_the_folder_for_packages_of_another_python_is() -> None:
    assert is_installed("/home/me/.local/lib/python3.8/site-packages/timm/models.py")


@pytest.mark.parametrize(("made", "installed"), [
    (["timm/__init__.py", "timm-1.0.dist-info/RECORD"], True),  # pip install --target, or a .pth
    (["timm/__init__.py", "timm.egg-info/PKG-INFO"], False),  # pip install -e
    (["timm/__init__.py"], False),
])  # fmt: skip
def test_a_folder_on_the_path_is_when_pip_put_packages_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[str], installed: bool
) -> None:
    for name in made:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    module = str(tmp_path / made[0])
    assert not is_installed(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed(module) == installed
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "/nowhere"])
    assert not is_installed(module)  # where the notebook is, people write modules


def test_a_torch_that_somebody_builds_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "mine.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed(str(tmp_path / "torch" / "nn.py"))
    assert not is_installed(str(tmp_path / "mine.py"))


def test_what_notes_executed_files_may_itself_be_made_of_local_ones(tmp_path: Path) -> None:
    """It is imported when the first local file is executed, and cloudpickle here is one of those."""
    (tmp_path / "mine.py").write_text("CONFIG = {'lr': 1}\n")
    (tmp_path / "cloudpickle").symlink_to(Path(cloudpickle.__file__).parent)
    code = """
import sys
from nbtrain.exchange.local_files import local, note_executed
note_executed()
import mine
from nbtrain.exchange.kinds.python_module_state import states
assert 'cloudpickle.cloudpickle' in sys.modules and local(sys.modules['cloudpickle.cloudpickle'].__file__)
mine.CONFIG['lr'] = 2
assert {'mine', 'cloudpickle.cloudpickle'} <= {state.name for state in states()}
"""
    path = os.pathsep.join([str(tmp_path), str(Path(nbtrain.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
