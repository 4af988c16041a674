"""Under `pipeline` a cell may call parts of a model by themselves; the gradients are those that one process gets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.owned_tensors import stand_in
from nbtrain.strategies.pipeline.autograd_calls import AutogradCalls
from nbtrain.strategies.pipeline.by_parts import ByParts
from nbtrain.strategies.pipeline.stage import StagePlace
from nbtrain.strategies.pipeline.tied_gradients import TiedGradients
from tests.support.ranks import run_on_ranks


class Pair(nn.Module):
    """Two results, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"h": torch.tanh(self.one(x)) * scale, "both": (self.other(x).detach(), x.shape), "n": 3}


class CalledInParts(nn.Module):
    """Its parts are called by themselves, and by names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.pair = Pair()
        self.inplace = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.pair(self.frozen(self.embed(ids)), scale=0.5)
        assert (found["n"], found["both"][1][-1]) == (3, 6)
        assert not found["both"][0].requires_grad
        return found["h"] * self.gain + found["both"][0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.encode(ids)
        h += 1  # what a unit returned may be edited
        return self.head(torch.relu_(self.inplace(h)))


def units_of(net: CalledInParts) -> list[nn.Module]:
    return [net.embed, net.pair, net.inplace, net.head, net.frozen]


class Staged:
    """A model whose parts are dealt out, as the strategy will have it."""

    def __init__(self, net: CalledInParts, rank: int, world: int) -> None:
        self.net = net
        units = [(unit, i % world) for i, unit in enumerate(units_of(net))]
        shared = [net.embed.weight, net.gain]
        owner = {id(p): who for unit, who in units for p in unit.parameters()}
        foreign = [p for p in net.parameters() if all(p is not s for s in shared) and owner[id(p)] != rank]
        self.own = [p for p in net.parameters() if all(p is not f for f in foreign)]
        for p in foreign:
            p.data = stand_in(p)
        place = StagePlace(torch.device("cpu"))
        self.asked = AutogradCalls(net.parameters(), place)
        self.units = ByParts(units, place)
        self.shared = TiedGradients(shared, foreign, self.own, place)
        self._plain = torch.autograd.backward

    def enter(self) -> None:
        shared = self.shared

        def backward(*args: Any, **kwargs: Any) -> None:
            """What the runtime does around each outermost backward."""
            torch.autograd.backward = self._plain
            try:
                with shared.backward():
                    self._plain(*args, **kwargs)
            finally:
                torch.autograd.backward = outer

        torch.autograd.backward = backward  # type: ignore[assignment]
        self.asked.on()
        outer = torch.autograd.backward
        self.units.enter()
        self.shared.enter()

    def leave(self) -> None:
        self.asked.off()
        torch.autograd.backward = self._plain
        self.units.leave()
        self.shared.leave()


@contextmanager
def staged(net: CalledInParts, rank: int, world: int) -> Any:
    found = Staged(net, rank, world)
    found.enter()
    try:
        yield found
    finally:
        found.leave()
    assert [type(unit) for unit in units_of(net)] == [nn.Embedding, Pair, nn.Sequential, nn.Linear, nn.Linear]


def new() -> tuple[CalledInParts, torch.Tensor]:
    torch.manual_seed(0)
    return CalledInParts(), torch.randint(11, (4, 3))


def loss_of(net: CalledInParts, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())


def plain(net: CalledInParts, ids: torch.Tensor) -> None:
    loss_of(net, ids).backward()
    loss_of(net, ids.flip(0)).backward()  # onto what is there


def two_forwards(net: CalledInParts, ids: torch.Tensor) -> None:
    first, second = loss_of(net, ids), loss_of(net, ids.flip(0))
    (first * 2 + second).backward()


def retained(net: CalledInParts, ids: torch.Tensor) -> None:
    loss = loss_of(net, ids)
    loss.backward(retain_graph=True)
    (loss * 3).backward()


def parts(net: CalledInParts, ids: torch.Tensor) -> None:
    """A part with a given tensor that wants its gradient; a term over parameters that all have."""
    h = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    found = net.inplace(net.pair(h)["h"])
    (found.square().sum() + net.gain.square().sum() + net.embed.weight.abs().sum()).backward()
    assert h.grad is not None
    net.gain.grad.add_(h.grad.sum())  # type: ignore[union-attr]
    with torch.no_grad():
        assert not net.encode(ids).requires_grad
    net.eval()
    net.encode(ids).sum().backward()


def recomputed(net: CalledInParts, ids: torch.Tensor) -> None:
    for reentrant in (False, True):
        h = net.pair(net.embed(ids))["h"]
        h = checkpoint(lambda x: torch.sigmoid(net.inplace(torch.sigmoid(net.frozen(x)))), h, use_reentrant=reentrant)
        net.head(h).sum().backward()


def for_a_given(net: CalledInParts, ids: torch.Tensor) -> None:
    """No parameter gets a gradient, and a backward after it goes on as if nothing had been."""
    h = net.embed(ids).detach().requires_grad_()
    loss = net.inplace(net.pair(h)["h"]).square().mean()
    (g,) = torch.autograd.grad(loss, h, retain_graph=True)
    assert all(p.grad is None for p in net.parameters())
    loss.backward()
    assert torch.equal(g, h.grad)  # type: ignore[arg-type]
    net.gain.grad = g.sum((0, 1))


def gradients(ways: list[Callable[..., None]]) -> list[dict[str, torch.Tensor | None]]:
    found = []
    for way in ways:
        net, ids = new()
        way(net, ids)
        found.append({name: p.grad for name, p in net.named_parameters()})
    return found


def on_a_rank(rank: int, world: int, ways: list[Callable[..., None]]) -> list[dict[str, torch.Tensor | None]]:
    found = []
    for way in ways:
        net, ids = new()
        with staged(net, rank, world) as stages:
            way(net, ids)
        own = {id(p) for p in stages.own}
        assert all(p.grad is None for p in net.parameters() if id(p) not in own)
        found.append({name: p.grad for name, p in net.named_parameters() if id(p) in own})
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_those_of_one_process(world: int) -> None:
    ways = [plain, two_forwards, retained, parts, recomputed, for_a_given]
    alone = gradients(ways)
    seen = set()
    for ranks in run_on_ranks(on_a_rank, world, ways, world_size=world):
        for way, wanted, found in zip(ways, alone, ranks, strict=True):
            for name, grad in found.items():
                seen.add(name)
                expected = wanted[name]
                assert (grad is None) == (expected is None), (way.__name__, name)
                if grad is not None and expected is not None:
                    assert torch.allclose(grad, expected, atol=1e-6), (way.__name__, name)
    assert seen == alone[0].keys()


def refusals(rank: int) -> list[str]:
    def direct(net: CalledInParts, ids: torch.Tensor) -> None:
        F.linear(net.embed(ids), net.pair.one.weight).sum().backward()

    def a_term(net: CalledInParts, ids: torch.Tensor) -> None:
        (loss_of(net, ids) + sum(p.square().sum() for p in net.parameters())).backward()

    def again(net: CalledInParts, ids: torch.Tensor) -> None:
        h = net.embed(ids).detach().requires_grad_()
        torch.autograd.grad(net.inplace(h).sum(), h, create_graph=True)

    def by_name(net: CalledInParts, ids: torch.Tensor) -> None:
        torch.autograd.grad(loss_of(net, ids), net.inplace[0].weight)

    def inputs(net: CalledInParts, ids: torch.Tensor) -> None:
        loss_of(net, ids).backward(inputs=[net.inplace[0].weight])

    def in_place(net: CalledInParts, ids: torch.Tensor) -> None:
        net.inplace[0] = nn.ReLU(inplace=True)
        net.inplace(net.embed(ids))

    def unsendable(net: CalledInParts, ids: torch.Tensor) -> None:
        net.pair(net.embed(ids), scale=1.0)
        net.pair.forward = lambda x: {"f": lambda: x}  # type: ignore[method-assign, misc, assignment]
        net.pair(net.embed(ids))

    def different(net: CalledInParts, ids: torch.Tensor) -> None:
        (loss_of(net, ids) * rank).backward()

    def hooked(net: CalledInParts, ids: torch.Tensor) -> None:
        net.pair.one.weight.register_post_accumulate_grad_hook(lambda p: None)
        loss_of(net, ids).backward()

    said = []
    for way in (direct, a_term, again, by_name, inputs, in_place, unsendable, different, hooked):
        net, ids = new()
        with staged(net, rank, 2):
            try:
                way(net, ids)
            except NotSupported as error:
                said.append(str(error))
            else:
                said.append(f"{way.__name__} was not refused")
    return said


def test_what_cannot_be_is_said_on_every_rank() -> None:
    found = run_on_ranks(refusals, world_size=2)
    words = ["used directly", "used directly", "create_graph", "by name", "by name", "in place", "cannot be sent"]
    words += ["different losses (0, ", "post_accumulate"]
    for said in found:
        for word, sentence in zip(words, said, strict=True):
            assert word in sentence
            assert "pipeline" in sentence
            assert "--strategy ddp" in sentence


def random_streams(rank: int) -> list[torch.Tensor]:
    """What a unit draws moves nobody's stream outside."""
    torch.manual_seed(0)
    unit = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    units = ByParts([(unit, 1)], StagePlace(torch.device("cpu")))
    units.enter()
    seen = [unit(torch.ones(2, 3)), unit(torch.ones(2, 3)), torch.rand(3)]
    units.leave()
    return [t.detach() for t in seen]


def test_random_numbers_outside_of_units_are_those_of_all_ranks() -> None:
    first, second = run_on_ranks(random_streams, world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
