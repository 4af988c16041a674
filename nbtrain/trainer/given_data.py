"""The loaders that a Trainer is given, or asks the module and its data module for."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from nbtrain.errors import UsageError
from nbtrain.trainer.combined_loader import CombinedLoader
from nbtrain.trainer.module import LIGHTNING, has


def separated(given: Any, datamodule: Any) -> tuple[Any, Any]:
    """(data module, loaders)"""
    if (
        given is not None
        and not isinstance(given, DataLoader)
        and any(hasattr(given, f"{stage}_dataloader") for stage in ("train", "val", "test", "predict"))
    ):
        return given, None
    return datamodule, given


def given_or_asked(given: Any, data: Any, model: Any, name: str, needed_by: str | None) -> Any:
    if given is not None:
        return given
    for one in (data, model):
        if one is not None and has(one, name):
            found = getattr(one, name)()
            if found is not None:
                return found
    if needed_by is None:
        return None
    raise UsageError(
        f"Trainer.{needed_by} has no data: trainer.{needed_by}(module, loader), or def {name}(self) in the module"
    )


def as_one(loader: Any) -> Any:
    """Several are one, whose batches have a part of each."""
    if type(loader).__name__ == "CombinedLoader" and type(loader).__module__.startswith(LIGHTNING):
        raise UsageError(
            "a CombinedLoader of Lightning asks for Lightning's Trainer. Give fit a dict or a list of loaders, or "
            "nbtrain.trainer.combined_loader.CombinedLoader({…}, mode=…)"
        )
    return CombinedLoader(loader) if isinstance(loader, dict | list | tuple) else loader


def as_several(loaders: Any) -> list[Any]:
    if isinstance(loaders, dict):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]


def as_written(loaders: list[Any]) -> Any:
    """A loop over one loader is written without a loop over loaders."""
    return loaders[0] if len(loaders) == 1 else loaders
