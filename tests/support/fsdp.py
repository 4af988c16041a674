"""fsdp in a test: a model with all that makes it hard, a rank or the one process to compare with, their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from nbtrain.strategies.base import Component, Prepared, Strategy
from nbtrain.strategies.fsdp import FSDP
from nbtrain.strategies.kit.clipping import clip_component
from tests.support.ranks import run_on_ranks

Batch = tuple[torch.Tensor, torch.Tensor]
Numbers = dict[str, Any]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * self.gain


class TiedNet(nn.Module):
    """Tied first and last layers, repeated blocks, a layer nobody trains, parameters of the root's own."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(5, width, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.heat = nn.Parameter(torch.tensor(1.5))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = block(h)
        return self.frozen(h) @ self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x)) * self.scale * self.heat

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0].inner(torch.tanh(self.first(x)))
        return F.linear(h, self.last.weight.t())[:, :3] * self.scale

    def contrastive(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.scores(x), y) + (self.encode(x) - self.encode(-x)).square().mean()

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.first(x)[:, :3] * self.scale, y) + F.cross_entropy(self(x), y)
        loss.backward()
        return loss.detach()

    def describe(self) -> str:
        return type(self).__name__


def net() -> TiedNet:
    torch.manual_seed(1)
    return TiedNet()


def optimizer_with_state(model: TiedNet) -> torch.optim.Optimizer:
    groups = [
        {"params": list(model.blocks.parameters()), "lr": 1e-2},
        {"params": [*model.first.parameters(), *model.head.parameters(), model.scale, model.heat]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.99), weight_decay=0.1)
    for seed in range(2):
        torch.manual_seed(seed)
        F.cross_entropy(model(torch.randn(6, 5)), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


class Stage:
    """A rank, or the one process that everything is compared with."""

    def __init__(self, many: bool, **options: Any) -> None:
        self.strategy: Strategy = FSDP(FSDP.Options(**options)) if many else Strategy(None)
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)

    def batches(self, number: int, size: int = 12) -> list[Batch]:
        random = torch.Generator().manual_seed(7)
        found = []
        for _ in range(number):
            x, y = torch.randn(size, 5, generator=random), torch.randint(0, 3, (size,), generator=random)
            found.append((x[self.rank :: self.count], y[self.rank :: self.count]))
        return found

    def set_up(self, modules: Any = (), optimizers: Any = (), schedulers: Any = (), loose: Any = ()) -> Prepared:
        component = Component(
            {f"model{i}": m for i, m in enumerate(modules)},
            {f"optimizer{i}": o for i, o in enumerate(optimizers)},
            {f"scheduler{i}": s for i, s in enumerate(schedulers)},
            {f"loose{i}": p for i, p in enumerate(loose)},
        )
        return self.strategy.set_up(component)


def clip(prepared: Prepared, parameters: Iterable[torch.Tensor], norm: float, kind: float = 2.0) -> torch.Tensor:
    """As the patched `clip_grad_norm_` does it."""
    held = list(parameters)
    found = clip_component(prepared, held, norm, kind)
    return nn.utils.clip_grad_norm_(held, norm, kind) if found is None else found


def numbers(prepared: Prepared, **more: Any) -> Numbers:
    """Weights, buffers and state of a component, whole."""
    prepared.close()
    component = prepared.component
    found = dict(more)
    for where, module in component.modules.items():
        assert not any(isinstance(t, DTensor) for t in module.state_dict().values())
        found |= {f"{where}.{name}": t.detach() for name, t in module.state_dict().items()}
    for where, optimizer in component.optimizers.items():
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        for i, p in enumerate(ordered):
            found |= {f"{where}.{i}.{key}": value for key, value in optimizer.state.get(p, {}).items()}
    return found | {where: p.detach() for where, p in component.loose.items()}


def same(case: Callable[..., Numbers], world_size: int = 2, **options: Any) -> None:
    alone = case(Stage(False))
    together = run_on_ranks(_on_rank, case, options, world_size=world_size)
    for found in together:
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def on_ranks(test: Callable[..., Any], *args: Any, world_size: int = 2, **options: Any) -> list[Any]:
    return run_on_ranks(_asked, test, args, options, world_size=world_size)


def _asked(rank: int, test: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return test(Stage(True, **options), *args)


def _on_rank(rank: int, case: Callable[..., Numbers], options: dict[str, Any]) -> Numbers:
    return case(Stage(True, **options))
