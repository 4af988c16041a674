from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def tree(root: Path, files: Mapping[str, object]) -> Path:
    """A tree of files below `root`, as a container may show one."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root
