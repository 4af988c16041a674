"""What models compute in: what torch's own autocast and GradScaler give, under a plain loop, on one rank and on two."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.machine import registry
from nbtrain.strategies.base import Component, Prepared, Strategy, share_of
from nbtrain.strategies.none import NoStrategy
from nbtrain.strategies.single import Single
from nbtrain.worker.precision.autocast import NUMBER_FORMATS
from nbtrain.worker.precision.low_precision_weights import (
    LowPrecisionPrepared,
    LowPrecisionStrategy,
    LowPrecisionWeights,
)
from nbtrain.worker.runtime import Runtime
from tests.support.bench import make_runtime
from tests.support.ranks import run_on_ranks

HUGE = 3e38
"""what makes gradients overflow, whatever the scale"""


def runtime(precision: str, strategy: Strategy | None = None, rank: int = 0, world_size: int = 1) -> Runtime:
    return make_runtime(rank, world_size, strategy or Single(Single.Options()), precision=precision)


@contextmanager
def cell(here: Runtime, *, accumulate: int = 1, notes: list[str] | None = None, **objects: Any) -> Iterator[None]:
    """What runs inside is a cell that uses these objects."""
    here.install()
    ok = False
    try:
        here.begin(RunSpec(pool=PoolSpec(), accumulate=accumulate), objects)
        yield
        ok = True
    finally:
        told = here.end(ok)
        if notes is not None:
            notes += told


@pytest.fixture
def make() -> Iterator[Callable[..., Runtime]]:
    """Runtimes, uninstalled when the test is over."""
    made: list[Runtime] = []

    def new(*args: Any, **kwargs: Any) -> Runtime:
        made.append(runtime(*args, **kwargs))
        return made[-1]

    yield new
    for one in made:
        one.uninstall()


def net(seed: int = 0, wide: int = 32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, wide), nn.GELU(), nn.LayerNorm(wide), nn.Linear(wide, 4))


def batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    return [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(count)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, boost: float = 1.0) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y) * boost


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_bf16_mixed_is_autocast_around_the_forward(make: Callable[..., Runtime]) -> None:
    mine, theirs = net(), net()
    ours, plain = adam(mine), adam(theirs)
    losses, expected = [], []
    with cell(make("bf16-mixed"), mine=mine, ours=ours):
        for x, y in batches(4):
            loss = loss_of(mine, x, y)
            loss.backward()
            ours.step(), ours.zero_grad()
            losses.append(loss.item())
            assert loss.dtype == torch.float32
    for x, y in batches(4):
        with torch.autocast("cpu", torch.bfloat16):
            out = theirs(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        loss.backward()
        plain.step(), plain.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    assert equal(mine, theirs)
    assert all(p.dtype == torch.float32 for p in mine.parameters())


class Held(NamedTuple):
    out: torch.Tensor
    name: str


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    more: dict[str, list[torch.Tensor]]


class Talkative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def forward(self, x: torch.Tensor, shape: str = "tensor") -> Any:
        h = self.layer(x)
        self.seen.append(h.dtype)
        if shape == "raise":
            raise ValueError("no")
        if shape == "tuple":
            return Held(h, "held"), [h, 3]
        if shape == "object":
            return Answer(h, {"all": [h]})
        return h


def test_what_is_returned_is_in_32_bits_whatever_it_is_in(make: Callable[..., Runtime]) -> None:
    model, x = Talkative(), torch.randn(2, 8)
    with cell(make("bf16-mixed"), model=model):
        (held, several), answer = model(x, "tuple"), model(x, shape="object")
        encoded = model.encode(x)
        criterion = nn.BCELoss()(torch.sigmoid(model(x)), torch.ones(2, 8))  # torch refuses it under autocast
    assert set(model.seen) == {torch.bfloat16}
    found = [held.out, several[0], answer.logits, answer.more["all"][0], encoded, criterion]
    assert {t.dtype for t in found} == {torch.float32}
    assert (held.name, several[1]) == ("held", 3)
    assert torch.equal(encoded, encoded.bfloat16().float())  # and was computed in 16


def test_an_error_in_a_forward_leaves_nothing_on(make: Callable[..., Runtime]) -> None:
    model, x = Talkative(), torch.randn(2, 8)
    here = make("bf16-mixed")
    with cell(here, model=model):
        with pytest.raises(ValueError, match="no"):
            model(x, "raise")
        assert not torch.is_autocast_enabled("cpu")
        assert model(x).dtype == torch.float32
    model.seen.clear()
    model(x)  # the cell is over
    assert model.seen == [torch.float32]
    here.uninstall()
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_a_copy_made_in_the_cell_has_nothing_of_it(make: Callable[..., Runtime]) -> None:
    model, x = Talkative(), torch.randn(2, 8)
    with cell(make("bf16-mixed"), model=model):
        model(x)
        average = copy.deepcopy(model)
        packed = pickle.dumps(model)
        average(x)
        made = Talkative()
        made(x)
        with torch.autocast("cpu", torch.float16):  # the cell's own only nests
            assert model(x).dtype == torch.float32
    assert average.seen[-1] == made.seen[-1] == torch.bfloat16
    for one in (average, pickle.loads(packed), made, model):
        assert not one._forward_hooks
        assert not one._forward_pre_hooks
        assert vars(one).keys() == vars(Talkative()).keys()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again(make: Callable[..., Runtime], precision: str, reentrant: bool) -> None:
    """Within a model, and called from outside."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = net(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, again: bool) -> torch.Tensor:
            h = checkpoint(self.first, x, use_reentrant=reentrant) if again else self.first(x)
            return self.second(h + torch.zeros(4))

    model = Deep()
    optimizer = adam(model)
    x = torch.randn(4, 8, requires_grad=True)
    found = []
    with cell(make(precision), model=model, optimizer=optimizer):
        for again in (False, True):
            optimizer.zero_grad()
            (model(x, again).mean() / 8).backward()
            (checkpoint(model.first, x, use_reentrant=reentrant).mean() / 8).backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_models(make: Callable[..., Runtime]) -> None:
    mine, theirs = net(), net()
    x, _ = batches(1)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(x).float()
    compiled = torch.compile(mine, backend="eager", fullgraph=True)
    with cell(make("bf16-mixed"), mine=mine):
        assert torch.equal(compiled(x), expected)
        compiled(x).sum().backward()
    assert torch.equal(compiled(x), theirs(x))


def by_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, boosts: list[float], clip: float | None, interval: int = 2000
) -> tuple[list[float], float, int]:
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    losses, skipped = [], 0
    for (x, y), boost in zip(batches(len(boosts)), boosts, strict=True):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y) * boost
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, scaler.get_scale(), skipped


@pytest.mark.parametrize(("clip", "interval"), [(None, 2000), (0.1, 2000), (None, 3)])
def test_16_mixed_is_autocast_and_a_grad_scaler(
    make: Callable[..., Runtime], clip: float | None, interval: int
) -> None:
    """Whose scale grows after so many good steps."""
    boosts = [0.1] * 4 + [10.0] + [0.1] * 6 if interval == 3 else [1.0, 30.0, 1.0, 1e4, 1e4, 1.0, HUGE, 1.0]
    mine, theirs = net(), net()
    ours, plain = adam(mine), adam(theirs)
    here = make("16-mixed")
    assert here.scaling is not None
    here.scaling.interval = interval
    losses: list[float] = []
    notes: list[str] = []
    data = batches(len(boosts))
    for part in (slice(0, 5), slice(5, None)):  # two cells: the scale lives on
        with cell(here, notes=notes, mine=mine, ours=ours):
            for (x, y), boost in zip(data[part], boosts[part], strict=True):
                loss = loss_of(mine, x, y, boost)
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(mine.parameters(), clip)
                ours.step(), ours.zero_grad()
                losses.append(loss.item())
    expected, scale, skipped = by_torch(theirs, plain, boosts, clip, interval)
    assert losses == expected
    assert equal(mine, theirs)
    assert here.scaling.scale == scale
    assert skipped
    assert (scale > 2.0**16) == (interval == 3)
    said = [note.split(" were skipped")[0] for note in notes]
    assert sum(int(text.split()[0]) for text in said) == skipped
    if interval > 3:
        assert notes[-1].endswith(f"gradients overflowed in float16; loss scale is now {scale:.0f}")
    assert [s["step"].item() for s in ours.state.values()] == [s["step"].item() for s in plain.state.values()]


def test_gradients_are_never_scaled_outside_of_a_backward(make: Callable[..., Runtime]) -> None:
    """Of weights, of what the model was given, of what lies before that, and of inner results that keep theirs."""
    model = net()
    for p in model.parameters():
        p.data.copy_((p.data * 64).round() / 64)
    x, delta, temperature = (
        torch.randn(16, 8, requires_grad=True),
        torch.zeros(16, 8, requires_grad=True),
        torch.ones(1),
    )
    temperature.requires_grad_()
    found = []
    for here in (None, make("16-mixed")):
        for tensor in (x, delta, temperature, *model.parameters()):
            tensor.grad = None

        def run() -> None:
            inner = (x + delta) * 2
            inner.retain_grad()
            out = model(inner)
            (nn.functional.cross_entropy(out * temperature, torch.zeros(16, dtype=torch.long))).backward()
            assert inner.grad is not None
            grads = [inner.grad, *(t.grad for t in (x, delta, temperature, *model.parameters()))]
            found.append([g.clone() for g in grads if g is not None])

        if here is None:
            run()
        else:
            with cell(here, model=model):
                run()
    assert len(found[0]) == len(found[1]) == 10
    for plain, scaled in zip(*found, strict=True):
        assert torch.allclose(plain, scaled, rtol=0.02, atol=1e-4)


def test_gradients_that_are_sparse_or_flow_through_other_weights(make: Callable[..., Runtime]) -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)
    step = torch.full((1,), 0.5, requires_grad=True)

    def run() -> list[torch.Tensor]:
        for tensor in (table.weight, step, *head.parameters()):
            tensor.grad = None
        for _ in range(2):  # what is there already is added to
            h = table(torch.tensor([1, 1, 3]))
            (inner,) = torch.autograd.grad(head(h).square().mean(), head.weight, create_graph=True)
            fast = {"weight": head.weight - step * inner, "bias": head.bias}
            (torch.func.functional_call(head, fast, h).square().mean() / 64).backward()
        return [t.grad.to_dense().clone() for t in (table.weight, step, *head.parameters()) if t.grad is not None]

    plain = run()
    with cell(make("16-mixed")):
        scaled = run()
    assert len(plain) == 4
    assert all(torch.allclose(a, b, rtol=0.02, atol=1e-3) for a, b in zip(plain, scaled, strict=True))


def test_a_generator_before_a_discriminator(make: Callable[..., Runtime]) -> None:
    """Two optimizers: a step of one is not skipped for the other's gradients, and two steps are one round."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    z = torch.randn(16, 4, requires_grad=True)
    g_opt, d_opt = adam(generator), adam(critic)
    here = make("16-mixed")
    counts: list[tuple[int, int, float]] = []
    assert here.scaling is not None
    with cell(here, generator=generator, critic=critic, g_opt=g_opt, d_opt=d_opt):
        for boost in (1.0, 1.0, HUGE, 1.0):
            d_opt.zero_grad()
            (critic(generator(z).detach()).mean() / 64).backward()
            d_opt.step()
            g_opt.zero_grad()
            z.grad = None
            (critic(generator(z)).mean() / 64 * boost).backward()
            if boost == 1.0:
                assert z.grad is not None
                assert z.grad.abs().max() < 1
            g_opt.step()
            steps = [next(iter(o.state.values()))["step"] for o in (d_opt, g_opt)]
            counts.append((int(steps[0]), int(steps[1]), here.scaling.scale))
            assert all(p.isfinite().all() for m in (generator, critic) for p in m.parameters())
    # What the generator's backward left in the critic's gradients was zeroed: it does not count.
    assert counts == [(1, 1, 65536), (2, 2, 65536), (3, 2, 65536), (4, 3, 32768)]
    assert here.steps.skipped == 1


def test_optimizers_made_in_the_cell_and_clipping_by_value(make: Callable[..., Runtime]) -> None:
    notes: list[str] = []
    with cell(make("16-mixed"), notes=notes):
        model = net()
        before = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, y = batches(1)[0]
        for _ in range(2):
            loss_of(model, x, y, HUGE).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.0)  # hides what is infinite
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert equal(model, before)
        loss_of(model, x, y).backward()
        optimizer.step()
        assert not equal(model, before)
    assert notes == ["2 of 3 steps were skipped: gradients overflowed in float16; loss scale is now 16384"]


@pytest.mark.parametrize("by_hand", [False, True])
def test_accumulation(make: Callable[..., Runtime], by_hand: bool) -> None:
    """One overflow spoils its whole group and no other."""
    boosts = [1.0, 1.0, HUGE, 1.0, 1.0, 1.0]
    mine, theirs = net(), net()
    ours, plain = adam(mine), adam(theirs)
    notes: list[str] = []
    with cell(make("16-mixed"), accumulate=1 if by_hand else 2, notes=notes, mine=mine, ours=ours):
        for i, ((x, y), boost) in enumerate(zip(batches(6), boosts, strict=True)):
            loss = loss_of(mine, x, y, boost)
            (loss / 2 if by_hand else loss).backward()
            if i % 2 or not by_hand:
                ours.step(), ours.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    for i, ((x, y), boost) in enumerate(zip(batches(6), boosts, strict=True)):
        with torch.autocast("cpu", torch.float16):
            out = theirs(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y) * boost / 2).backward()
        if i % 2:
            scaler.step(plain)
            scaler.update()
            plain.zero_grad()
    assert equal(mine, theirs)
    assert notes == [f"1 of 3 steps were skipped: gradients overflowed in float16; loss scale is now {2**15}"]


def test_a_closure_is_looked_at_too(make: Callable[..., Runtime]) -> None:
    model, x, y = net(), *batches(1)[0]
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with cell(make("16-mixed"), model=model, optimizer=optimizer):

        def closure(boost: float = HUGE) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y, boost)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
        assert equal(model, before)
        optimizer.step(lambda: closure(1.0))
        assert not equal(model, before)
        lbfgs = torch.optim.LBFGS(model.parameters())
        with pytest.raises(NotSupported, match="take --precision bf16-mixed"):
            lbfgs.step(lambda: closure(1.0))


def test_a_scaler_of_the_cells_own_wins(make: Callable[..., Runtime]) -> None:
    boosts = [1.0, 1e4, HUGE, 1.0]
    mine, theirs = net(), net()
    ours, plain = adam(mine), adam(theirs)
    notes: list[str] = []
    here = make("16-mixed")
    with cell(here, notes=notes, mine=mine, ours=ours):
        found = by_torch(mine, ours, boosts, 0.1)
    assert found == by_torch(theirs, plain, boosts, 0.1)
    assert equal(mine, theirs)
    assert here.steps.skipped == found[2] > 0
    assert notes == ["the cell scales its losses with a GradScaler of its own, so --precision 16-mixed did not"]


def on_two(rank: int, precision: str, strategy: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    made = registry.make_strategy(strategy, {}, {})
    here = runtime(precision, made, rank, 2)
    index, count = share_of(made, rank, 2)
    size = 16 // count
    model = net()
    optimizer = adam(model)
    notes: list[str] = []
    with cell(here, notes=notes, model=model, optimizer=optimizer):
        for i, (x, y) in enumerate(batches(6)):
            mine = slice(index * size, (index + 1) * size)
            boost = (
                HUGE if (precision, i, index) == ("16-mixed", 2, count - 1) else 1.0
            )  # one rank's overflow is everybody's
            loss_of(model, x[mine], y[mine], boost).backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9) < 100 or i == 2
            optimizer.step(), optimizer.zero_grad()
    here.uninstall()
    return model.state_dict(), notes


SEEN_TO = [
    name
    for name, entry in registry.STRATEGIES.items()
    if all(find_spec(package) for package in entry.needs.packages)
    and entry.needs.max_ranks != 1
    and not entry.needs.together
    and not entry.load().facts.hands_off
    and not entry.load().facts.own_precision
]
"""Strategies of several ranks that leave the precision to what is around them."""


@pytest.mark.parametrize(
    ("precision", "strategy"), [("bf16-mixed", "ddp"), *(("16-mixed", strategy) for strategy in SEEN_TO)]
)
def test_two_ranks_are_one_process(make: Callable[..., Runtime], precision: str, strategy: str) -> None:
    (one, notes), (other, _) = run_on_ranks(on_two, precision, strategy)
    model = net()
    optimizer = adam(model)
    said: list[str] = []
    with cell(make(precision), notes=said, model=model, optimizer=optimizer):
        for i, (x, y) in enumerate(batches(6)):
            loss_of(model, x, y, HUGE if (precision, i) == ("16-mixed", 2) else 1.0).backward()
            optimizer.step(), optimizer.zero_grad()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for name, value in model.state_dict().items():
        assert torch.allclose(one[name], value, atol=1e-2)
    skipped = "1 of 6 steps were skipped: gradients overflowed in float16; loss scale is now 32768"
    assert notes == said == [skipped] * (precision == "16-mixed")


def test_true_precision_is_a_model_in_16_bits(make: Callable[..., Runtime]) -> None:
    """Tensors stay the ones they are, what goes in and out is in 32 bits, and afterwards all is as it was."""
    mine, theirs = net(), net().bfloat16()
    for p in mine.parameters():
        p.data = p.data.bfloat16().float()
    ours, plain = adam(mine), adam(theirs)
    before = {name: (id(p), p.dtype) for name, p in mine.named_parameters()}
    here = make("bf16-true")
    losses, expected = [], []
    with cell(here, mine=mine, ours=ours):
        for x, y in batches(3):
            out = mine(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            ours.step(), ours.zero_grad()
            losses.append(loss.item())
        assert {p.dtype for p in mine.parameters()} == {torch.bfloat16}
        assert out.dtype == torch.float32
    for x, y in batches(3):
        loss = nn.functional.cross_entropy(theirs(x.bfloat16()).float(), y)
        loss.backward()
        plain.step(), plain.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    pieces = {id(tensor): piece for tensor, piece in here.components.pieces()}
    states = [s[key] for s in ours.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert pieces.keys() == {id(t) for t in (*mine.parameters(), *states)}
    for tensor in (*mine.parameters(), *states):
        piece = pieces[id(tensor)]
        assert (piece.shape, piece.dtype) == (tensor.shape, torch.float32)
        assert piece.ranges() == [(0, tensor.numel())]
        assert torch.equal(piece.read()[0], tensor.detach().float().flatten())
    weight = mine[0].weight
    pieces[id(weight)].fill(torch.full(weight.shape, 0.25))
    assert weight.dtype == torch.bfloat16
    here.uninstall()
    assert {name: (id(p), p.dtype) for name, p in mine.named_parameters()} == before
    assert {s[key].dtype for s in ours.state.values() for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    assert torch.equal(weight, torch.full(weight.shape, 0.25))
    assert torch.equal(mine[3].weight, theirs[3].weight.float())


class Recurrent(nn.Module):
    """Makes its own state, and counts in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, xs: dict[str, torch.Tensor]) -> torch.Tensor:
        h = torch.zeros(4, 8)
        for x in xs["steps"]:
            h = self.cell(x, h)
        self.calls += 1
        return self.norm(h)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_models_made_in_the_cell_and_other_dtypes(make: Callable[..., Runtime], precision: str) -> None:
    here = make(precision)
    native = net().bfloat16()
    with cell(here, native=native):
        model = Recurrent()
        optimizer = adam(model)
        assert model({"steps": torch.randn(3, 4, 8)}).dtype == torch.float32
        model({"steps": torch.randn(3, 4, 8)}).mean().backward()
        optimizer.step()
        assert torch.get_default_dtype() == torch.float32
        average = copy.deepcopy(model)
        assert average({"steps": torch.randn(3, 4, 8)}).dtype == torch.float32
        assert average.cell.weight_ih.dtype == model.cell.weight_ih.dtype
        assert model.cell.weight_ih.dtype == NUMBER_FORMATS[precision].dtype
    dtypes = {id(tensor): piece.dtype for tensor, piece in here.components.pieces()}
    assert {p.dtype for p in average.parameters()} == {torch.float32}  # and the notebook has it as it has the model
    assert dtypes[id(model.norm.running_mean)] == dtypes[id(model.cell.weight_ih)] == torch.float32
    assert id(model.calls) not in dtypes
    if precision == "16-true":
        assert dtypes[id(native[0].weight)] == torch.bfloat16
    else:
        assert id(native[0].weight) not in dtypes


def loud(base: type, said: list[str]) -> Any:
    """An object of `base` that overrides all that can be."""

    def member(name: str) -> Callable[..., Any]:
        def call(self: object, *args: object) -> object:
            said.append(name)
            return Prepared(Component()) if name == "set_up" else ()

        return call

    names = {name: value for name, value in vars(base).items() if not name.startswith("__")}
    own = {name: member(name) if inspect.isfunction(value) else object() for name, value in names.items()}
    return type("Loud", (base,), own)(Component() if base is Prepared else object())


@pytest.mark.parametrize(("base", "around"), [(Prepared, LowPrecisionPrepared), (Strategy, LowPrecisionStrategy)])
def test_every_member_is_the_strategys_own(base: Any, around: Any) -> None:
    members = [name for name in vars(base) if not name.startswith("__")]
    assert len(members) > 4
    for name in members:
        said: list[str] = []
        inner = loud(base, said)
        outer = around(inner, LowPrecisionWeights(torch.bfloat16, 0))
        if not inspect.isfunction(vars(base)[name]):
            assert getattr(outer, name) is getattr(inner, name), name
            continue
        takes = inspect.signature(getattr(base, name)).parameters.values()
        given = [Component() if one.name == "component" else None for one in takes if one.name != "self"]
        result = getattr(outer, name)(*given)
        if inspect.isgenerator(result):
            assert list(result) == []
        assert said == [name]


def sums(rank: int, name: str) -> list[torch.Tensor]:
    """Six batches of each rank in steps of four: the last step is of two."""
    kind: Any = registry.strategies()[name].load()
    here = runtime("bf16-true", kind(kind.Options()), rank, 2)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*batches(12), strict=True)))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    with cell(here, accumulate=4, model=model, optimizer=optimizer, loader=loader):
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step(), optimizer.zero_grad()
    here.uninstall()
    return [p.detach() for p in model.parameters()]


def test_steps_of_fewer_batches_under_fsdp_are_those_under_ddp() -> None:
    (divided, _), (whole, _) = run_on_ranks(sums, "fsdp"), run_on_ranks(sums, "ddp")
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(divided, whole, strict=True))
    moved = [(p - old).abs().max() for p, old in zip(divided, net().parameters(), strict=True)]
    assert max(moved) > 2e-2


def test_what_cannot_be_says_so(make: Callable[..., Runtime]) -> None:
    with pytest.raises(UsageError, match="under this strategy nothing is touched"):
        make("bf16-mixed", NoStrategy(NoStrategy.Options()))
    with pytest.raises(UsageError, match="there are 32, bf16-mixed, 16-mixed, bf16-true, 16-true"):
        make("8-mixed")
