"""What `predict` returns: a list, or files where it is more than memory should hold."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nbtrain.compat.pytree import tree_leaves, tree_map_only


class InFile:
    """The prediction of one batch, on disk."""

    def __init__(self, path: Path, prediction: Any) -> None:
        self.path = str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            pickle.dump(prediction, file, protocol=pickle.HIGHEST_PROTOCOL)

    def read(self) -> Any:
        with open(self.path, "rb") as file:
            return pickle.load(file)


class Predictions(Sequence[Any]):
    """Predictions in the loader's batches and order; each is read from its file when it is asked for."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: Any) -> Any:
        item = self._items[at]
        if isinstance(at, slice):
            return Predictions(item)
        return item.read() if isinstance(item, InFile) else item

    def __repr__(self) -> str:
        folder = next((Path(item.path).parent for item in self._items if isinstance(item, InFile)), "")
        return f"<predictions of {len(self)} batches in {folder}>"


class RankPredictions:
    """Those of this rank's batches. What is more than `most` bytes goes to files in `folder`."""

    def __init__(self, folder: Path, most: int) -> None:
        self.items: list[Any] = []
        self.left = most
        """bytes"""
        self._folder = folder

    def add(self, number: int, prediction: Any) -> None:
        """`number`: the batch's."""

        on_cpu = tree_map_only(torch.Tensor, lambda part: part.detach().cpu(), prediction)
        self.left -= sum(getattr(leaf, "nbytes", 0) or sys.getsizeof(leaf) for leaf in tree_leaves(on_cpu))
        beyond = self.left < 0
        self.items.append(InFile(self._folder / f"batch-{number:08}.pickle", on_cpu) if beyond else on_cpu)


def as_sequence(items: list[Any]) -> Any:
    return Predictions(items) if any(isinstance(item, InFile) for item in items) else items
