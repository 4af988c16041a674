"""What a library puts on modules is taken off between cells, and put on again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nbtrain.strategies.kit.library_attachments import LibraryAttachments


def test_a_hook_that_came_under_the_same_number_stays() -> None:
    heard: list[str] = []

    def says(name: str) -> Callable[..., None]:
        return lambda *_: heard.append(name)

    layer = nn.Linear(1, 1)
    attachments = LibraryAttachments([layer])
    library = layer.register_forward_hook(says("library"))
    attachments.record()
    attachments.off()
    RemovableHandle.next_id = library.id  # the notebook's process counts by itself
    layer.register_forward_hook(says("notebook"))
    attachments.on()
    layer(torch.ones(1, 1))
    assert sorted(heard) == ["library", "notebook"]
    heard.clear()
    attachments.off()
    layer(torch.ones(1, 1))
    assert heard == ["notebook"]
