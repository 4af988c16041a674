"""Keeps a training from replacing or removing the checkpoints of another one in a folder.

A training is known by the names of its models and the shapes in them: these are the same after the kernel was started
anew, under another strategy and on other ranks. Two cells are of one training if they have a model in common, and what
they have in common is alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbtrain.errors import UsageError
from nbtrain.training.checkpoints import folder
from nbtrain.training.checkpoints.content import Content
from nbtrain.training.checkpoints.rank_parts import Described

Trained = Mapping[str, Sequence[str]]
"""name → what has the shapes of what is called so, as hashes"""


def trained(content: Content, described: Mapping[str, Described]) -> Trained:
    """What is told of it in the marker."""
    found: dict[str, list[str]] = {}
    tables = [(name, one["tensors"]) for name, one in content.tree["modules"].items()]
    tables += [(name, one["loose"]) for name, one in content.tree["optimizers"].items() if one["loose"]]
    for name, tensors in tables or [(name, {}) for kind in content.tree.values() for name in kind]:
        shapes = sorted((path, described[key].shape) for path, key in tensors.items())
        kind, made_in_the_cell, _ = name.partition("#")  # a number there counts what the cell has made
        found.setdefault(kind + made_in_the_cell, []).append(hashlib.sha256(repr(shapes).encode()).hexdigest()[:16])
    return found


def same(mine: Trained, said: Mapping[str, Any]) -> bool:
    """`said`: a marker."""
    theirs: Trained = said.get("trains") or {}
    common = mine.keys() & theirs.keys()
    return bool(common) and all(set(mine[name]) & set(theirs[name]) for name in common)


def check(to: Path, mine: Trained) -> None:
    """Raises where `--save-to` is another's."""
    for path, said in folder.at_intervals(to):
        if not same(mine, said):
            raise UsageError(
                f"{to} has checkpoints of another training: {path.name} there holds {', '.join(said['holds'])}, and "
                f"the names or shapes of models are others here ({', '.join(mine)}). They would be replaced. Give this "
                f"training a folder of its own, as in --save-to {to.name}-2, or remove what is in there"
            )
