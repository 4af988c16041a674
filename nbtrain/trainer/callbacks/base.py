"""What callbacks have in common."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from nbtrain.errors import UsageError

MODES = ("min", "max")


class Callback:
    """Called as `on_train_epoch_end(trainer, module)` and so on, on every rank. What it keeps in `self` comes home.

    `before_fit(trainer, module, data, train_loader, is_given)`, where there is one, is called in the notebook before
    the first fit of a module, and may return another loader. `is_given`: the loader was given to `fit`.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def better(mode: str, new: float, old: float, by: float = 0.0) -> bool:
    return new < old - by if mode == "min" else new > old + by


def known_mode(mode: str) -> str:
    if mode not in MODES:
        raise UsageError(f"mode={mode!r}: 'min' or 'max'")
    return mode


@dataclass(frozen=True)
class Attribute:
    """A number that a search finds: an attribute of whoever has it, or a hyperparameter that was saved."""

    holders: list[tuple[Any, str]]

    def set(self, value: Any) -> None:
        for holder, name in self.holders:
            if isinstance(holder, MutableMapping):
                holder[name] = value
            else:
                setattr(holder, name, value)


def attribute(names: tuple[str, ...], module: Any, data: Any) -> Attribute:
    """Of the module, the data module and their hyperparameters: all that have one of these names."""
    holders = [holder for owner in (module, data) for holder in (owner, getattr(owner, "hparams", None))]
    found = [(holder, name) for holder in holders for name in names if _has(holder, name)]
    if not found:
        raise UsageError(
            f"neither the module nor its hyperparameters have {' or '.join(names)}, which a search would set"
        )
    return Attribute(found)


def _has(holder: Any, name: str) -> bool:
    return name in holder if isinstance(holder, MutableMapping) else hasattr(holder, name)
