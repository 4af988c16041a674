"""Fits in this process, as a script has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbtrain
from nbtrain.errors import UsageError


class Net(nbtrain.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch_idx)
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), 0.1)


def loader(samples: int = 64, **given: Any) -> DataLoader[Any]:
    torch.manual_seed(0)
    x = torch.randn(samples, 4)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 8, **given)


def trainer(folder: Path, **given: Any) -> Any:
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "enable_progress_bar": False,
    }
    return nbtrain.Trainer(**usual | given)


@pytest.mark.parametrize("by_closure", [False, True])
def test_gradients_that_no_optimizer_steps_are_no_part_of_the_norm(tmp_path: Path, by_closure: bool) -> None:
    """Nothing zeroes those of the backbone: they pile up."""

    class Closure(torch.optim.SGD):
        def step(self, closure: Any) -> Any:
            return super().step(closure)

    class Head(Net):
        def configure_optimizers(self) -> Any:
            return (Closure if by_closure else torch.optim.SGD)(self.head.parameters(), 0.1)

    net, alone = Head(), Net()
    trainer(tmp_path, max_epochs=10, gradient_clip_val=0.1).fit(net, loader())
    optimizer = torch.optim.SGD(alone.head.parameters(), 0.1)
    for _ in range(10):
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(alone.head(alone.backbone(x)), y).backward()
            nn.utils.clip_grad_norm_(alone.head.parameters(), 0.1)
            optimizer.step()
    assert torch.allclose(net.head.weight, alone.head.weight)


def test_a_loss_that_is_not_a_number_is_said_in_bf16_and_left_out_by_the_scaler_of_fp16(tmp_path: Path) -> None:
    class Nan(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * float("nan")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    for precision in (None, "bf16-mixed", "bf16-true", "16-true"):
        with pytest.raises(UsageError, match="the loss is NaN in epoch 0, batch 0"):
            trainer(tmp_path, max_epochs=1, precision=precision).fit(Nan(), loader())
    net = Nan()
    trainer(tmp_path, max_epochs=1, precision="16-mixed").fit(net, loader())
    assert net.seen == list(range(8))
    assert bool(net.head.weight.isfinite().all())
