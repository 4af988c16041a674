"""What is common to the files for `sbatch` that nbtrain writes."""

from __future__ import annotations

from collections.abc import Sequence

TIME = "04:00:00"
"""A user changes it; without one a queue may give minutes, or wait for days."""


def head(name: str, nodes: int, wishes: Sequence[str]) -> str:
    """The lines that sbatch reads. `wishes`: its options for what each node is to have."""
    asked = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", *wishes, f"--time={TIME}"]
    return "".join(f"#SBATCH {wish}\n" for wish in asked)
