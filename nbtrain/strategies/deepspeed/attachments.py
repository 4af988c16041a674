"""What DeepSpeed hangs on modules and parameters, taken off between cells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nbtrain.compat import deepspeed as ds
from nbtrain.compat.modules import PARAMETERS
from nbtrain.strategies.kit.library_attachments import MISSING, Attachment, LibraryAttachments


class _EngineAttachment(Attachment):
    """DeepSpeed goes on changing what it has put there: a parameter's status, lists of submodules."""

    def off(self) -> None:
        own = vars(self.owner)
        late = {name: MISSING for name in own if ds.hangs(name) and name not in self.attributes}
        before = {name: old for name, (old, _) in self.attributes.items()} | late
        self.attributes = {name: (old, own[name]) for name, old in before.items() if name in own}
        if PARAMETERS in self.attributes:  # a dict of DeepSpeed's stands in its place
            _follow(*self.attributes[PARAMETERS])
        super().off()

    def on(self) -> None:
        if PARAMETERS in self.attributes:
            _follow(self.attributes[PARAMETERS][1], vars(self.owner)[PARAMETERS])
        super().on()


class Attachments(LibraryAttachments):
    """What DeepSpeed has put on these. Made before it is set up; `record` afterwards."""

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> None:
        super().__init__([*modules, *parameters], _EngineAttachment)
        self._by_id = {id(attachment.owner): attachment for attachment in self.attachments}

    def of(self, owner: Any) -> dict[str, Any]:
        """The attributes of a module or parameter, with what DeepSpeed has put there, also while that is off."""
        attachment = None if self.attached else self._by_id.get(id(owner))
        return {name: new for name, (_, new) in attachment.attributes.items()} if attachment else vars(owner)


def _follow(table: dict[str, Any], other: dict[str, Any]) -> None:
    """The same entries in both."""
    wanted = dict(dict.items(other))
    if list(table) != list(wanted) or any(dict.get(table, name) is not value for name, value in wanted.items()):
        dict.clear(table)
        dict.update(table, wanted)
