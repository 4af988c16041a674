"""What callbacks have in common."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from nbtrain.errors import UsageError

MODES = ("min", "max")


class Callback:
    """Called as `on_train_epoch_end(trainer, module)` and so on, on every rank. What it keeps in `self` comes home.

    `before_fit(trainer, module, data, train_loader)`, where there is one, is called in the notebook before the first
    fit of a module, and may return another loader.
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
class Place:
    """Where a number stands that a search finds: an attribute, or a hyperparameter that was saved."""

    holder: Any
    name: str

    def set(self, value: Any) -> None:
        if isinstance(self.holder, MutableMapping):
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)


def place_of(names: tuple[str, ...], module: Any, data: Any) -> Place:
    for owner in (module, data):
        for holder in (owner, getattr(owner, "hparams", None)):
            for name in names:
                if name in holder if isinstance(holder, MutableMapping) else hasattr(holder, name):
                    return Place(holder, name)
    raise UsageError(f"neither the module nor its hyperparameters have {' or '.join(names)}, which a search would set")
