"""Runs a script that was exported, where nbtrain cannot be imported.

torchrun(folder, "train.py", 2)   # what its processes print
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.kernels import private_environment


def run(folder: Path, *start: str) -> str:
    """Without nbtrain: an import of it fails."""
    (folder / "nbtrain.py").write_text("raise ImportError('the script is to run without nbtrain')\n")
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(temporary)}
    environ["TORCH_EXTENSIONS_DIR"] = private_environment(folder)["TORCH_EXTENSIONS_DIR"]
    done = subprocess.run(start, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(folder: Path, script: str, ranks: int = 2, *options: str) -> str:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]
    return run(folder, *start, *options)
