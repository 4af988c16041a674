"""What is there already when a script is written, and when it saves."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nbtrain.annexes.export import script, strategy_code
from nbtrain.base.errors import UsageError


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may be longer."""
    before, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)


@pytest.mark.parametrize("room", [0, 1000], ids=["for the script", "for its objects"])
def test_a_script_that_has_no_room_leaves_the_old_one(room: int, tmp_path: Path) -> None:
    path, objects = tmp_path / "train.py", tmp_path / "train_objects.pt"
    script.write(path, "old", {"x": 1}, objects)
    held = objects.read_bytes()
    with pytest.raises(UsageError, match=r"train\.py is not written: "), full_disk(room):
        script.write(path, "new", {"x": torch.ones(9999)}, objects)
    assert path.read_text() == "old"
    assert objects.read_bytes() == held
    assert len(os.listdir(tmp_path)) == 2


def test_what_a_script_saves_stands_beside_what_the_notebook_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {
        "os": os, "torch": torch, "_RANK": 0, "_MODELS": ("model",), "model": {"w": torch.ones(1)}, "_weights": dict,
    }  # fmt: skip
    exec(strategy_code.USES["save"], scope)
    os.mkdir("best")
    scope["save"]("best", scope["model"], full=True)
    assert "best.pt" in capsys.readouterr().out
    scope["save"](Path("new/one"))
    assert [torch.load(path)["model"]["w"].item() for path in ("best.pt", "new/one")] == [1, 1]
    assert os.listdir("best") == []
    assert os.listdir("new") == ["one"]
