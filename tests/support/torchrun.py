"""Runs a script that was exported, where nbtrain cannot be imported.

torchrun(folder, "train.py", 2)   # what its processes print
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.support.notebook import Notebook


def run(folder: Path, *start: str) -> str:
    """Without nbtrain: an import of it fails."""
    (folder / "nbtrain.py").write_text("raise ImportError('the script is to run without nbtrain')\n")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["GLOO_SOCKET_IFNAME"] = "lo"
    with TemporaryDirectory() as temporary:  # a short path: workers of loaders bind sockets in it
        environ["TMPDIR"] = temporary
        done = subprocess.run(start, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(folder: Path, script: str, ranks: int = 2, *options: str) -> str:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]
    return run(folder, *start, *options)


def alike(notebook: Notebook, folder: Path, by: float = 1e-6) -> bool:
    """Whether the script has trained the weights that the notebook's model has."""
    notebook("torch.save(model.state_dict(), 'notebook.pt')")
    here, there = torch.load(folder / "notebook.pt"), torch.load(folder / "trained.pt")["model"]
    return here.keys() == there.keys() and all(torch.allclose(here[name], there[name], atol=by) for name in here)
