"""fsdp against one process on the same global batches: the same loops, the same numbers, a part of the memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.compat import fsdp2
from nbtrain.strategies.base import Component, Prepared, Shards, multiply, pieces_of
from nbtrain.strategies.fsdp import FSDP
from nbtrain.strategies.kit.saved_pieces import with_full_tensors
from tests.support.fsdp import Block, Numbers, Stage, TiedNet, clip, net, numbers, on_ranks, optimizer_with_state, same
from tests.support.ranks import run_on_ranks


def assembled(prepared: Prepared) -> list[torch.Tensor]:
    """What the notebook would get: everybody's pieces, in one place."""
    found = []
    for tensor, piece in prepared.pieces():
        assert tensor.shape == piece.shape
        full = torch.full((piece.shape.numel(),), torch.nan, dtype=piece.dtype)
        parts = list(zip(piece.ranges(), piece.read(), strict=True))
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, parts)
        for (start, stop), part in (one for parts in everybody for one in parts):
            assert full[start:stop].isnan().all()  # nobody else has spoken for it
            full[start:stop] = part
        assert not full.isnan().any()
        found.append(full.view(piece.shape))
    return found


# --- the cases: each runs on ranks and in one process ----------------------------------------------


def in_place(stage: Stage) -> Numbers:
    """`x += …` on what a unit gave, which is a view: the graph is another one afterwards."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
            self.place = nn.Parameter(torch.zeros(2, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(torch.stack([x, -x], dim=1))
            x += self.place
            x = self.head(x)
            x *= 2
            return x.mean(dim=1)

    torch.manual_seed(1)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared = stage.set_up([model], [optimizer])
    prepared.enter()
    for x, y in stage.batches(3):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.leave()
    return numbers(prepared)


def plain(stage: Stage) -> Numbers:
    """Two cells of a plain loop: state from before, a schedule, clipping, losses that are logged."""
    model = net()
    optimizer = optimizer_with_state(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    prepared = stage.set_up([model], [optimizer], [schedule])
    norms = []
    for _ in range(2):
        prepared.enter()
        for x, y in stage.batches(4):
            F.cross_entropy(model(x), y).backward()
            norms.append(float(f"{clip(prepared, model.parameters(), 0.3):.6f}"))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        prepared.leave()
    return numbers(prepared, norms=norms)


def accumulation(stage: Stage) -> Numbers:
    """By hand; then without `sync`, its last group cut short and counted otherwise."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared = stage.set_up([model], [optimizer])
    prepared.enter()
    first, second, third, fourth = stage.batches(4)
    for x, y in (first, second):
        (F.cross_entropy(model(x), y) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    with prepared.backward(False):
        for x, y in (first, third):
            (F.cross_entropy(model(x), y) / 4).backward()
    (prepared.rescale if isinstance(prepared, Shards) else multiply)(
        model.parameters(), 4 / 3
    )  # as when a loader ends early
    (F.cross_entropy(model(fourth[0]), fourth[1]) / 3).backward()
    clip(prepared, model.parameters(), 0.05, float("inf"))
    optimizer.step()
    prepared.leave()
    return numbers(prepared)


def own_methods(stage: Stage) -> Numbers:
    """Methods that run layers, parts called by themselves, a backward inside of a method."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared = stage.set_up([model], [optimizer])
    prepared.enter()
    for x, y in stage.batches(3):
        model.contrastive(x, y).backward()
        model.first(x).square().mean().backward()
        model.blocks[1].inner(torch.tanh(model.first(x))).square().mean().backward()
        optimizer.step()
        model.zero_grad()
        model.training_step(x, y)
        optimizer.step()
        out = model(x)
        with torch.no_grad():
            model(x + 1)
        optimizer.zero_grad()
        model.zero_grad()  # between forward and backward
        F.cross_entropy(out, y).backward()
        with torch.no_grad():
            model(x)  # gathers once more, before the step
        optimizer.step()
        optimizer.zero_grad()
    if stage.rank == 0:
        model.describe()  # gathers nothing: the others need not come
    prepared.leave()
    return numbers(prepared)


def shared_encoder(stage: Stage) -> Numbers:
    """Two models that share a part, of which neither contains the other; one is called, then both."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
    one, two = nn.Sequential(body, nn.Linear(6, 3)), nn.Sequential(body, nn.Linear(6, 3))
    optimizer = torch.optim.Adam([*one.parameters(), *two[1].parameters()], lr=1e-2)
    prepared = stage.set_up([one, two], [optimizer])
    prepared.enter()
    for x, y in stage.batches(3):
        F.cross_entropy(one(x), y).backward()
        F.cross_entropy(one(x) + two(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.leave()
    return numbers(prepared)


def after_errors(stage: Stage) -> Numbers:
    """A forward that raises inside of a unit and is caught; then a cell that ends in the middle of a backward."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = stage.set_up([model], [optimizer])
    prepared.enter()
    x, y = stage.batches(1)[0]
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 4))
        handle = model.blocks[0].inner.register_forward_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = F.cross_entropy(Cut.apply(model.encode(x)[:, :3]), y) + model(x).mean()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    prepared.leave()
    optimizer.zero_grad()
    prepared.enter()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    prepared.leave()
    return numbers(prepared)


class Skipping(nn.Module):
    """Uses one half of its parameters or the other, by its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.halves[int(x[0, 0] > 0)]
        return half(x) * self.gain if x.shape[1] == 5 else x


def unused(stage: Stage) -> Numbers:
    """Ranks that use other parameters than their peers, parameters that nobody uses: those keep None."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Sequential(Skipping(), nn.Tanh()), nn.Sequential(Skipping(), nn.Tanh()), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    prepared = stage.set_up([model], [optimizer])
    prepared.enter()
    for signs in ((1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (1.0, 1.0)):
        total = 0.0
        for side in (0, 1):  # the whole batch in one process: one sign after the other
            if stage.count == 1 or stage.rank == side:
                torch.manual_seed(side)
                x, y = torch.randn(4, 5).abs() * signs[side], torch.randint(0, 3, (4,))
                (F.cross_entropy(model(x), y) * stage.count / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.leave()
    return numbers(prepared, total=total)


def _raise(*args: Any) -> None:
    raise ZeroDivisionError


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


CASES = [plain, accumulation, own_methods, shared_encoder, after_errors, unused, in_place]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_like_one_process(case: Callable[[Stage], Numbers]) -> None:
    same(case)


def test_like_one_process_on_ranks_that_divide_unevenly() -> None:
    same(plain, 3)


@pytest.mark.sample(first=1)
@pytest.mark.parametrize(
    "options",
    [
        {"sharding": "SHARD_GRAD_OP"},
        {"sharding": "HYBRID_SHARD", "replicas": 2},
        {"sharding": "NO_SHARD"},
        {"cpu_offload": True},
        {"limit_all_gathers": False},
        {"wrap": "Block,Linear"},
    ],
    ids=str,
)
def test_options_change_no_numbers(options: dict[str, Any]) -> None:
    same(plain, 4 if "replicas" in options else 2, **options)
    if options.keys() & {"sharding", "limit_all_gathers"} and "replicas" not in options:
        same(own_methods, **options)


def one_step(stage: Stage) -> tuple[TiedNet, torch.optim.Optimizer, Prepared]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared = stage.set_up([model], [optimizer])
    prepared.enter()
    x, y = stage.batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return model, optimizer, prepared


def pieces_are_the_whole(stage: Stage) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = net()
    optimizer = optimizer_with_state(model)
    kept = copy.deepcopy([p.detach() for p in model.parameters() if p.ndim])
    state = [
        optimizer.state[p][key].clone()
        for group in optimizer.param_groups
        for p in group["params"]
        for key in ("exp_avg", "exp_avg_sq")
        if p.ndim
    ]
    prepared = stage.set_up([model], [optimizer])
    assert {id(new) for _, new in prepared.replaced} >= {id(t) for t, _ in prepared.pieces()}
    found = assembled(prepared)
    torch.testing.assert_close(found, kept + state, rtol=0, atol=0)
    for i, (_, piece) in enumerate(prepared.pieces()):  # every rank takes its own out of the whole
        piece.fill(torch.arange(piece.shape.numel(), dtype=torch.float32).view(piece.shape) + i)
    filled = assembled(prepared)
    prepared.close()
    assert all(not isinstance(p, DTensor) for p in model.parameters())
    pairs = zip([p for p in model.parameters() if p.ndim], filled, strict=False)
    assert all(torch.equal(p, full) for p, full in pairs)
    assert model.last.weight is model.first.weight
    return found, filled


@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (4, {"sharding": "HYBRID_SHARD", "replicas": 2})])
def test_pieces_are_the_whole(world_size: int, options: dict[str, Any]) -> None:
    found = on_ranks(pieces_are_the_whole, world_size=world_size, **options)
    for _, filled in found:
        for i, tensor in enumerate(filled):
            assert torch.equal(tensor, torch.arange(tensor.numel()).view(tensor.shape) + float(i))


def looks(model: nn.Module) -> list[Any]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return [
        (type(part), list(vars(part)), {key: list(value) for key, value in vars(part).items() if "_hooks" in key})
        for part in model.modules()
        if all(hasattr(part, table) for table in tables)
    ]


def between_cells(stage: Stage) -> None:
    model = net()
    handle = model.head.register_forward_hook(lambda module, args, out: out * 2)
    before = looks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    group, held = optimizer.param_groups[0], optimizer.param_groups[0]["params"]
    prepared = stage.set_up([model], [optimizer])
    backward, grad = torch.autograd.backward, torch.autograd.grad
    for _ in range(2):
        assert looks(model) == before
        prepared.enter()
        assert isinstance(model, TiedNet)
        assert (type(model) is TiedNet, type(model).__name__) == (False, "TiedNet")
        model.note = "of the cell's own"  # type: ignore[assignment]
        model(stage.batches(1)[0][0])
        prepared.leave()
        del model.note
        assert (torch.autograd.backward, torch.autograd.grad) == (backward, grad)
        assert optimizer.param_groups[0] is group
        assert group["params"] is held
    assert looks(model) == before
    handle.remove()
    prepared.enter()
    prepared.leave()
    prepared.close(False)
    assert all(not value for _, _, tables in looks(model) for value in tables.values())
    again = net()
    old = [ref(p) for p in again.parameters() if p.ndim]
    prepared = stage.set_up([again])
    prepared.replaced.clear()
    assert {one() for one in old} == {None}  # nobody but the caller held what was cut
    prepared.close()


def test_between_cells_everything_looks_as_before() -> None:
    on_ranks(between_cells)


def between(stage: Stage) -> bool:
    """Whether weights are whole between forward and backward."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    prepared = stage.set_up([model], [torch.optim.Adam(model.parameters())])
    prepared.enter()
    loss = model(torch.randn(2, 64)).square().mean()
    groups = [group for tree in prepared.trees for group in tree.groups()]  # type: ignore[attr-defined]
    whole = {group.is_unsharded for group in groups}
    loss.backward()
    prepared.leave()
    return whole == {True}


@pytest.mark.parametrize(("sharding", "whole"), [("FULL_SHARD", False), ("SHARD_GRAD_OP", True)])
def test_what_is_gathered_between_forward_and_backward(sharding: str, whole: bool) -> None:
    assert on_ranks(between, sharding=sharding) == [whole] * 2


def refused(stage: Stage) -> list[str]:
    model, _, prepared = one_step(stage)
    x, _ = stage.batches(1)[0]
    told = []
    x.requires_grad_()
    with pytest.raises(NotSupported) as error:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    told.append(str(error.value))
    (slope,) = torch.autograd.grad(model(x).sum(), x)  # this can be done
    assert slope.shape == x.shape
    with pytest.raises(NotSupported) as error:
        model.__reduce_ex__(2)
    handle = model.head.weight.register_hook(lambda grad: grad / 2)
    with pytest.raises(NotSupported) as error, prepared.backward():
        pass
    handle.remove()
    told.append(str(error.value))
    prepared.leave()
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        hooked = nn.Linear(2, 2)
        getattr(hooked.weight, hook)(lambda grad: None)
        with pytest.raises(NotSupported) as error:
            stage.set_up([hooked], [])
        told.append(str(error.value))
    with pytest.raises(NotSupported) as error:
        stage.set_up([nn.LazyLinear(3)], [])
    told.append(str(error.value))
    with pytest.raises(NotSupported) as error:
        stage.set_up([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())], [])
    told.append(str(error.value))
    return told


def test_what_cannot_be_is_refused_with_what_can() -> None:
    for told in on_ranks(refused):
        assert all("fsdp" in text and ("with whole(" in text or "ddp" in text) for text in told), told


def saved(stage: Stage) -> Any:
    model, optimizer, prepared = one_step(stage)
    nothing = {"step": 3}
    assert with_full_tensors(nothing, 0) is nothing
    found = with_full_tensors({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, 0)
    prepared.leave()
    prepared.close()
    if stage.rank:
        assert found["model"]["head.weight"] is None
        return None
    assert found["step"] == 3
    assert found["model"]["last.weight"] is found["model"]["first.weight"]
    torch.testing.assert_close(dict(found["model"]), dict(model.state_dict()), rtol=0, atol=0)
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(found["optimizer"])
    for p, state in optimizer.state.items():
        assert all(torch.equal(value, again.state[p][key]) for key, value in state.items())
    return found["optimizer"]["param_groups"][0]["lr"]


@pytest.mark.parametrize("options", [{}, {"sharding": "HYBRID_SHARD", "replicas": 2}], ids=str)
def test_state_dicts_are_whole_on_rank_0(options: dict[str, Any]) -> None:
    assert on_ranks(saved, world_size=4, **options) == [1e-2, None, None, None]


def for_each(rank: int, options: dict[str, Any]) -> None:
    """What every rank writes by itself: weights, and what was computed from them."""
    stage, model, square = Stage(True, **options), net(), nn.Linear(7, 7, bias=False)
    wanted = [p.detach().clone() for p in (model.first.weight, square.weight)]
    prepared = stage.set_up([model, square])
    prepared.enter()
    w, s = model.first.weight.detach(), square.weight.detach()
    held = {"w": w, "tied": model.last.weight, "norm": w.norm(), "mean": w.mean(0), "s": s, "t": s.t()}
    told = mock.patch.object(dist, "broadcast_object_list", side_effect=dist.broadcast_object_list)
    with told as called:
        found = with_full_tensors(held)
    assert called.call_count == 1, "not once for each rank"
    assert found["tied"] is found["w"]
    one, two = wanted
    for key, whole in {"w": one, "norm": one.norm(), "mean": one.mean(0), "s": two, "t": two.t()}.items():
        torch.testing.assert_close(found[key], whole)
    for key, value in with_full_tensors(held, to=1).items():
        assert value is None if rank != 1 and key not in ("norm", "mean") else torch.equal(value, found[key])
    prepared.leave()


@pytest.mark.parametrize("options", [{}, {"sharding": "HYBRID_SHARD", "replicas": 2}], ids=str)
def test_every_rank_may_have_what_is_in_pieces_whole(options: dict[str, Any]) -> None:
    run_on_ranks(for_each, options, world_size=4)


def grown(stage: Stage) -> bool:
    model, _, prepared = one_step(stage)
    prepared.leave()
    more = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    more.state[model.head.weight]["momentum_buffer"] = torch.ones(3, 5)
    larger = Component(prepared.component.modules, {**prepared.component.optimizers, "more": more})
    assert prepared.grow(larger)
    assert [new.shape for _, new in prepared.replaced] == [(3, 5)]
    assert more.state[model.head.weight]["momentum_buffer"] is prepared.replaced[0][1]
    assert not prepared.grow(Component({"other": nn.Linear(2, 2)}))
    return torch.equal(assembled(prepared)[-1], torch.ones(3, 5))


def test_another_optimizer_joins() -> None:
    assert on_ranks(grown) == [True, True]


def exchanged(stage: Stage) -> bool:
    """A layer that takes over the parameters of another, as `convert_sync_batchnorm` makes them."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    prepared = stage.set_up([model])
    prepared.enter()
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    prepared.leave()
    same = prepared.grow(prepared.component)
    prepared.close()
    return same or any(isinstance(p, DTensor) for p in model.parameters())


def test_a_model_with_another_layer_is_set_up_again() -> None:
    assert on_ranks(exchanged) == [False, False]


def release_modules(stage: Stage) -> list[bool]:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    other = net()
    both = stage.set_up([model]), stage.set_up([other])
    for prepared in both:
        prepared.enter()
    for x, y in stage.batches(1):
        (F.cross_entropy(model(x), y) + F.cross_entropy(other(x), y)).backward()
    alive, shape = ref(model), list(model.parameters())
    del model
    found = []
    for prepared in both:
        modules = dict(prepared.component.modules)
        prepared.component.modules.clear()
        hold_again = prepared.release_modules()
        del modules
        gc.collect()
        assert hold_again is not None
        hold_again()
        found.append(bool(prepared.trees))  # type: ignore[attr-defined]
    learned = other.head.weight.grad is not None
    both[1].leave()
    return [alive() is None, len(shape) == 6, learned, *found]


def test_a_model_that_nobody_holds_is_let_go_of() -> None:
    assert on_ranks(release_modules) == [[True, True, True, False, True]] * 2


def other_layers(stage: Stage) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    prepared = stage.set_up([model], [])
    prepared.enter()
    h = torch.ones(2, 4)
    with pytest.raises(NotSupported) as error:
        model[2](model[stage.rank](h)).sum().backward()
    prepared.leave()
    return str(error.value)


def test_ranks_that_run_other_layers_are_told_so() -> None:
    assert all("the ranks ran different layers" in text for text in on_ranks(other_layers))


def in_other_dtypes(stage: Stage) -> tuple[torch.dtype, torch.dtype, float]:
    model, seen = net(), []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = stage.set_up([model], [optimizer])
    prepared.enter()
    x, y = stage.batches(1)[0]
    out = model(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    assert model.head.weight.dtype == torch.float32
    prepared.leave()
    return seen[0], out.dtype, loss.item()


def test_comm_dtype() -> None:
    for dtype, computed in (("none", torch.float32), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        for inside, outside, loss in on_ranks(in_other_dtypes, comm_dtype=dtype):
            assert (inside, outside) == (computed, torch.float32)
            assert 0 < loss < 5


def ahead(stage: Stage) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))
    prepared = stage.set_up([model], [])
    counts = []
    model[1].register_forward_hook(lambda *_: counts.append(_gathered_ahead(model)))
    prepared.enter()
    model(torch.randn(2, 4)).sum().backward()
    prepared.leave()
    return counts[0]


def _gathered_ahead(model: Any) -> int:
    groups = [group for unit in model for group in fsdp2.groups(fsdp2.state(unit))]
    return sum(group._all_gather_result is not None for group in groups)


def test_limit_all_gathers() -> None:
    assert on_ranks(ahead) == [0, 0]
    assert on_ranks(ahead, limit_all_gathers=False) == [2, 2]


def test_one_rank_is_an_ordinary_model() -> None:
    model = net()
    prepared = FSDP(FSDP.Options()).set_up(Component({"model": model}))
    prepared.enter()
    assert type(model) is TiedNet
    assert not list(pieces_of(prepared))
    prepared.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sharding": "HYBRID_SHARD"}, "needs --replicas N"),
        ({"replicas": 2}, "--replicas is for --sharding HYBRID_SHARD"),
        ({"wrap": 0}, "at least one parameter"),
        ({"wrap": 2.5}, "it takes classes or their names"),
        ({"wrap": (Block, 3)}, "it takes classes or their names"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        FSDP.Options(**options)


def wrong(stage: Stage) -> str:
    with pytest.raises(UsageError) as error:
        stage.set_up([net()], [])
    return str(error.value)


def test_options_that_do_not_fit() -> None:
    assert "3 ranks cannot be divided into 2" in on_ranks(wrong, world_size=3, sharding="HYBRID_SHARD", replicas=2)[0]
    assert "has no such part; it has Block, Linear" in on_ranks(wrong, wrap="Blok")[0]


def test_replicas_are_nodes_where_nobody_says_otherwise() -> None:
    hybrid: dict[str, Any] = {"sharding": "HYBRID_SHARD"}
    assert FSDP.Options.for_nodes(hybrid, 2) == {**hybrid, "replicas": 2}
    assert FSDP.Options.for_nodes({**hybrid, "replicas": 4}, 2)["replicas"] == 4
    assert FSDP.Options.for_nodes({}, 2) == {}
