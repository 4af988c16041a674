"""Which weight a tensor shows that a strategy makes in its place, where its memory does not tell."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

Form = tuple[Any, Any, int]
"""size, strides and offset of a part of a whole that lies in order"""
_shown: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note(tensor: torch.Tensor, p: torch.Tensor, form: Form | None = None) -> None:
    """`form`: None: it shows all of it."""
    _shown[tensor] = p, form


def forget(tensor: torch.Tensor) -> None:
    _shown.pop(tensor, None)


def shown_by(tensor: torch.Tensor) -> tuple[torch.Tensor, Form | None] | None:
    found: tuple[torch.Tensor, Form | None] | None = _shown.get(tensor) if _shown else None
    return found
