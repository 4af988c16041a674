"""DeepSpeed behind the plain loop: the numbers of one process, the user's objects, and what is refused."""

import contextlib
import copy
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import DeepSpeed
from tests.support.absent import absent
from tests.support.deepspeed import (  # noqa: F401
    SHARDED,
    Batches,
    Tied,
    batches,
    deepspeed_here,
    distance,
    make,
    mse,
    weights_of,
)
from tests.support.ranks import run_on_ranks

Clip = Callable[[list[torch.Tensor]], Any]


def plain_loop(model: Tied, optimizer: Any, scheduler: Any, data: Batches, clip: Clip) -> list[torch.Tensor]:
    """Two steps, then two of two micro-batches each, then one by the model's own method."""
    norms = []
    for i, (x, y) in enumerate(data):
        gathered = i in (2, 4)
        half = 0.5 if 2 <= i < 6 else 1.0
        loss = mse(model(x), y) if i < 6 else model.training_step(x, y)
        (loss * half).backward()
        if gathered:
            continue
        norms.append(clip(list(model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return norms


def by_torch(parameters: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.05)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": torch.as_tensor(value).clone()
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }


def assembled(prepared: Any) -> dict[int, torch.Tensor]:
    """Every tensor that is in pieces, put together from all ranks; each number is spoken for once."""
    found = {}
    for tensor, piece in prepared.pieces():
        whole, spoken = torch.zeros(piece.shape.numel(), dtype=torch.float64), torch.zeros(piece.shape.numel())
        for (start, stop), part in zip(piece.ranges(), piece.read(), strict=True):
            assert part.shape == (stop - start,)
            assert part.dtype == piece.dtype
            whole[start:stop] += part
            spoken[start:stop] += 1
        dist.all_reduce(whole)
        dist.all_reduce(spoken)
        assert bool((spoken == 1).all())
        assert tensor.shape == piece.shape
        found[id(tensor)] = whole.view(piece.shape)
    return found


def shape_of(model: nn.Module, optimizer: Any) -> list[Any]:
    """What the notebook knows of them, but for the numbers."""
    hooks = [k for k in vars(model) if k.endswith("_hooks")]
    return [
        type(model), [sorted(vars(m)) for m in model.modules()], [vars(p) for p in model.parameters()],
        [[len(vars(m)[k]) for k in hooks] for m in model.modules()],
        [(type(m), type(m._parameters), list(m._parameters)) for m in model.modules()],
        [(id(g), id(g["params"]), [id(p) for p in g["params"]]) for g in optimizer.param_groups],
        sorted(vars(optimizer)), [(p.shape, p.dtype, p.grad) for p in model.parameters()],
    ]  # fmt: skip


def two_cells(rank: int, stage: int, options: dict[str, Any], count: int) -> dict[str, Any]:
    model, optimizer, scheduler = make()
    plain_loop(model, optimizer, scheduler, batches(2), by_torch)  # the notebook had begun
    optimizer.zero_grad()
    known = {key: value for s in optimizer.state.values() for key, value in s.items()}
    held = {(name, key): value for name, p in model.named_parameters() for key, value in optimizer.state[p].items()}
    before, threads = shape_of(model, optimizer), set(threading.enumerate())
    component = Component({"model": model}, {"optimizer": optimizer}, {"scheduler": scheduler})
    prepared: Any = DeepSpeed(DeepSpeed.Options(stage=stage, **options)).set_up(component)
    assert shape_of(model, optimizer) == before
    steps: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda o, a, k: steps.append(o))
    norms: list[torch.Tensor] = []
    for cell in range(2):
        prepared.enter()
        assert isinstance(model, Tied)
        assert optimizer.param_groups[0]["params"][0] is model.emb.weight
        mine = [(x[rank::count], y[rank::count]) for x, y in batches(7, 2 + 7 * cell)]
        norms += plain_loop(model, optimizer, scheduler, mine, lambda ps: prepared.clip(ps, 0.05, 2.0))
        prepared.leave()
        assert shape_of(model, optimizer) == before
    handle.remove()
    assert steps == [optimizer] * 10
    assert set(known) == {"step", "exp_avg", "exp_avg_sq"}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            assert held[name, key] is value
            assert value.shape == (p.shape if key != "step" else ())
    tensors = assembled(prepared)
    names = {id(p): name for name, p in model.named_parameters()}
    names |= {id(v): f"{n}.{k}" for n, p in model.named_parameters() for k, v in optimizer.state.get(p, {}).items()}
    pieces = {names[key]: value for key, value in tensors.items()}
    counts = {f"{n}.step": optimizer.state[p]["step"].clone() for n, p in model.named_parameters() if p.requires_grad}
    local = sum(part.numel() for _, piece in prepared.pieces() for part in piece.read())
    for tensor, piece in prepared.pieces():  # the notebook has changed something
        if tensor is model.scale:
            piece.fill(torch.full((8,), 0.5))
    prepared.enter()
    with torch.no_grad():
        changed = model(batches(1)[0][0])
    prepared.leave()
    prepared.close()
    assert shape_of(model, optimizer) == before
    assert set(threading.enumerate()) == threads
    closed = weights_of(model)
    with torch.no_grad():
        again = model(batches(1)[0][0])
    return {
        "pieces": pieces, "counts": counts, "norms": [float(n) for n in norms], "local": local, "closed": closed,
        "state": state_of(model, optimizer), "changed": (changed, again),
        "lr": [g["lr"] for g in optimizer.param_groups],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "options", "count"),
    [(1, {}, 2), (2, {}, 4), (3, {"config": SHARDED}, 2), (2, {"contiguous_gradients": False}, 2)],
)
def test_two_cells_are_one_process(stage: int, options: dict[str, Any], count: int) -> None:
    model, optimizer, scheduler = make()
    plain_loop(model, optimizer, scheduler, batches(2), by_torch)
    optimizer.zero_grad()
    norms = [n for c in (2, 9) for n in plain_loop(model, optimizer, scheduler, batches(7, c), by_torch)]
    weights, state = weights_of(model), state_of(model, optimizer)
    answers = run_on_ranks(two_cells, stage, options, count, world_size=count)
    for answer in answers:
        wanted = {**weights, **state}
        # Frozen layers are in pieces under stage 3 alone; elsewhere they are whole, and nobody's.
        pieces = {**answer["pieces"], **answer["counts"]}
        assert {n for n in wanted if n not in pieces} <= {"blocks.1.weight", "blocks.1.bias"}
        assert distance(pieces, {n: wanted[n] for n in pieces}) < 1e-5
        assert answer["norms"] == pytest.approx([float(n) for n in norms], abs=1e-5)
        assert answer["lr"] == pytest.approx([g["lr"] for g in optimizer.param_groups])
        assert distance(answer["closed"], {**weights, "scale": torch.full((8,), 0.5)}) < 1e-5
        assert distance(answer["state"], state) < 1e-5
        assert torch.allclose(*answer["changed"], atol=1e-6)
    total = sum(value.numel() for value in answers[0]["pieces"].values())
    assert sum(answer["local"] for answer in answers) == total
    assert max(answer["local"] for answer in answers) < total / count * 1.35


def multiplied(rank: int, stage: int) -> float:
    """What was gathered is to count half: as when a loader ends in the middle of a group."""
    results = []
    torchs_own = nn.functional.linear
    for factor in (1.0, 0.5):
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        prepared: Any = DeepSpeed(DeepSpeed.Options(stage=stage, config=SHARDED)).set_up(
            Component({"m": model}, {"o": optimizer})
        )
        was = model.weight.detach().clone()
        if stage == 3:
            torch.manual_seed(0)
            was = nn.Linear(4, 4, bias=False).weight.detach()
        assert nn.functional.linear is torchs_own
        prepared.enter()
        assert (nn.functional.linear is torchs_own) == (stage != 3)
        model(torch.ones(2, 4)).mean().backward()
        prepared.rescale([], factor)
        optimizer.step()
        prepared.leave()
        assert nn.functional.linear is torchs_own
        prepared.close()
        results.append((model.weight.detach() - was).norm().item())
    return results[1] / results[0]


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_gradients_can_be_scaled(stage: int) -> None:
    assert run_on_ranks(multiplied, stage) == pytest.approx([0.5, 0.5], rel=1e-4)


def low_precision(rank: int, stage: int, precision: str, count: int, one: bool) -> dict[str, torch.Tensor]:
    model, optimizer, _ = make()
    prepared: Any = None
    if not one:
        strategy = DeepSpeed(DeepSpeed.Options(stage=stage, config=SHARDED))
        prepared = strategy.set_up(Component({"model": model}, {"optimizer": optimizer}), precision)
        prepared.enter()
    for x, y in batches(4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=one):
            out = model(x[rank::count])
        assert one or out.dtype == torch.float32
        mse(out.float(), y[rank::count]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if prepared:
        prepared.leave()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        prepared.close()
    return weights_of(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_sixteen_bits(stage: int) -> None:
    wanted = low_precision(0, stage, "", 1, True)
    full = weights_of(make()[0])
    assert distance(wanted, full) > 1e-3
    (mixed, _) = run_on_ranks(low_precision, stage, "bf16-mixed", 2, False)
    assert distance(mixed, wanted) < 1e-3
    (true, _) = run_on_ranks(low_precision, stage, "bf16-true", 2, False)
    assert distance(true, wanted) < 2e-2
    # Frozen weights have not been rounded, and masters have more digits than sixteen bits hold.
    assert torch.equal(true["blocks.1.weight"], full["blocks.1.weight"])
    assert not torch.equal(true["emb.weight"], true["emb.weight"].bfloat16().float())


def refused(rank: int) -> dict[str, str]:
    """Each of these is a sentence, on every rank alike."""
    found: dict[str, str] = {}

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        try:
            yield
        except (NotSupported, UsageError) as error:
            found[name] = str(error)

    def prepared(model: nn.Module, optimizer: Any, stage: int = 2, precision: str = "32", **options: Any) -> Any:
        component = Component({"model": model}, {"optimizer": optimizer})
        one: Any = DeepSpeed(DeepSpeed.Options(stage=stage, **options)).set_up(component, precision)
        one.enter()
        return one

    model, optimizer, _ = make()
    x, y = batches(1)[0]
    strategy = DeepSpeed(DeepSpeed.Options())
    with noted("two optimizers"):
        strategy.set_up(Component({"m": model}, {"a": optimizer, "b": torch.optim.SGD(model.parameters(), 0.1)}))
    with noted("compiled 3"):
        compiled = torch.compile(model, backend="eager")
        DeepSpeed(DeepSpeed.Options(stage=3)).set_up(Component({"m": compiled}, {"a": optimizer}))
    with noted("loose"):
        strategy.set_up(Component({"m": model}, {"a": optimizer}, loose={"a[3]": torch.zeros(1)}))
    for name in ("LBFGS", "Adafactor"):
        inner = make()[0]
        with noted(name):
            prepared(inner, getattr(torch.optim, name)(inner.parameters()))
    with noted("fp16"):
        strategy.set_up(Component({"m": model}, {"a": optimizer}), "16-mixed")
    with noted("cpu checkpointing"):
        DeepSpeed(DeepSpeed.Options(cpu_checkpointing=True)).set_up(Component({"m": model}, {"a": optimizer}))
    for stage in (1, 3):
        one = prepared(*make()[:2], stage=stage, config=SHARDED)
        inner = one.component.modules["model"]
        with noted(f"submodule {stage}"):
            inner.blocks[0](torch.ones(2, 8))
        with noted(f"by hand {stage}"):
            mse(inner(x), y).backward()
            inner.scale.grad = torch.ones_like(inner.scale)
            one.parts.user.step()
        one.close(False)
        one = prepared(*make()[:2], stage=stage, config=SHARDED)
        inner = one.component.modules["model"]
        with noted(f"whole model recomputed {stage}"), one.backward():
            torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).sum().backward()
        one.close(False)
        one = prepared(*make()[:2], stage=stage, config=SHARDED)
        inner = one.component.modules["model"]
        mse(inner(x), y).backward()
        assert inner.scale.grad.shape == inner.scale.shape
        with noted(f"looked at {stage}"):
            inner.scale.grad.norm()
        with noted(f"edited {stage}"):
            inner.scale.grad /= 2
        with noted(f"thawed {stage}"):
            inner.blocks[1].requires_grad_(True)
            one.parts.user.step()
        inner.blocks[1].requires_grad_(False)
        with noted(f"clip value {stage}"):
            one.clip(list(inner.parameters()), 1.0, None)
        one.close(False)
    one = prepared(*make()[:2], stage=3, config=SHARDED)
    inner = one.component.modules["model"]
    assert sum(p.numel() for p in inner.parameters()) == sum(p.numel() for p in make()[0].parameters())
    assert torch.equal(inner.scale.detach(), make()[0].scale.detach())
    out = inner(x)
    mse(out, y).backward(retain_graph=True)
    with noted("retain_graph 3"), one.backward():
        out.sum().backward()
    with noted("a copy 3"):
        copy.deepcopy(inner)
    with noted("assigned 3"):
        inner.load_state_dict(inner.state_dict(), assign=True)
    one.close(False)
    return found


def test_what_it_cannot_do_is_a_sentence() -> None:
    (found, other) = run_on_ranks(refused)
    assert found == other
    words = {
        "two optimizers": "a and b train parameters of the same model, and DeepSpeed's engine has one optimizer",
        "compiled 3": "write compiled = torch.compile(model) in the cell",
        "loose": "parameters that no module owns",
        "LBFGS": "of LBFGS that is not known",
        "Adafactor": "of Adafactor that is not known",
        "fp16": "no half precision on the CPU",
        "cpu checkpointing": "moves activations from a GPU",
        "a copy 3": "with whole(model): ema = copy.deepcopy(model)",
        "assigned 3": "leave assign out, or write `with whole(model, optimizer): model.load_state_dict(",
        "retain_graph 3": "a forward can be used by one backward only",
    }
    for stage in (1, 3):
        words |= {
            f"submodule {stage}": "was called directly, past DeepSpeed's engine",
            f"by hand {stage}": "assigned by hand",
            f"whole model recomputed {stage}": "checkpoint its blocks",
            f"thawed {stage}": "with whole(model): layer.requires_grad_(…)",
            f"clip value {stage}": "with whole(model, gradients=True): nn.utils.clip_grad_value_(",
            f"looked at {stage}": "clip_grad_norm_ returns their norm",
            f"edited {stage}": "with whole(model, gradients=True): …",
        }
    assert found.keys() == words.keys()
    assert [name for name in words if words[name] not in found[name]] == []


def clipped_twice(model: Tied, optimizer: Any, data: Batches, clip: Clip, around: Callable[[], Any]) -> list[float]:
    """Each backward's gradients, and then those of both."""
    norms = []
    for (x, y), (u, v) in zip(data[::2], data[1::2], strict=True):
        for one, other in ((x, y), (u, v)):
            with around():
                mse(model(one), other).backward()
            norms.append(float(clip(list(model.parameters()))))
        norms.append(float(clip(list(model.parameters()))))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def clips(rank: int, stage: int) -> dict[str, Any]:
    model, optimizer, _ = make()
    component = Component({"model": model}, {"optimizer": optimizer})
    prepared: Any = DeepSpeed(DeepSpeed.Options(stage=stage, config=SHARDED)).set_up(component)
    prepared.enter()
    mine = [(x[rank::2], y[rank::2]) for x, y in batches(4)]
    clip = functools.partial(prepared.clip, max_norm=0.05, norm_type=2.0)
    norms = clipped_twice(model, optimizer, mine, clip, prepared.backward)
    with prepared.backward():
        mse(model(mine[0][0]), mine[0][1]).backward()
    optimizer.step()
    before = weights_of(model) if stage == 2 else {}
    optimizer.zero_grad()
    optimizer.step()  # on nothing
    assert not before or distance(weights_of(model), before) == 0
    prepared.leave()
    prepared.close()
    return {"norms": norms}


@pytest.mark.sample("2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_is_of_what_there_is_then(stage: int) -> None:
    model, optimizer, _ = make()
    norms = clipped_twice(model, optimizer, batches(4), by_torch, contextlib.nullcontext)
    for found in run_on_ranks(clips, stage):
        assert found["norms"] == pytest.approx(norms, rel=1e-5)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.late, self.never = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, sometimes: bool, late: bool) -> torch.Tensor:
        x = self.used(x)
        x = self.sometimes(x) if sometimes else x
        return self.late(x) if late else x  # type: ignore[no-any-return]


def idle_layer(rank: int, stage: int, options: dict[str, Any], count: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """One layer is reached from the fourth step on, another one in every other step, and its bias is left out by hand;
    a third never. In three cells."""
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    options = {"config": SHARDED, **options}
    prepared: Any = None
    if count > 1:
        component = Component({"m": model}, {"o": optimizer})
        prepared = DeepSpeed(DeepSpeed.Options(stage=stage, **options)).set_up(component)
    grads = []
    for cell in range(3):
        if prepared:
            prepared.enter()
        for i in range(2 * cell, 2 * cell + 2):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(i))[rank::count]
            with prepared.backward() if prepared else contextlib.nullcontext():
                model(x, i % 2 == 0, i > 2).square().mean().backward()
            grads.append([name for name, p in model.named_parameters() if p.grad is None])
            if i == 4:
                model.sometimes.bias.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=i not in (1, 2))  # zeros are stepped
        if prepared:
            prepared.leave()
    if prepared:
        prepared.close()
    return weights_of(model) | state_of(model, optimizer), grads


@pytest.mark.sample("1-options0")
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (3, {}), (2, {"contiguous_gradients": False})])
def test_a_parameter_without_a_gradient_stays_as_it_is(stage: int, options: dict[str, Any]) -> None:
    """It is not decayed, keeps its momentum, and its steps are not counted."""
    wanted, grads = idle_layer(0, stage, options, 1)
    for found, missing in run_on_ranks(idle_layer, stage, options, 2):
        assert missing == grads
        assert distance(found, wanted) < 1e-5


def idle_on_one(rank: int, stage: int) -> str:
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared: Any = DeepSpeed(DeepSpeed.Options(stage=stage)).set_up(Component({"m": model}, {"o": optimizer}))
    prepared.enter()
    with prepared.backward():
        model(torch.ones(2, 4), rank == 0, rank == 1).sum().backward()
    with pytest.raises(NotSupported, match="on another rank other parameters") as raised:
        optimizer.step()
    return str(raised.value)


def test_ranks_that_reach_other_layers_are_told() -> None:
    first, second = run_on_ranks(idle_on_one, 1)
    assert "m.late.weight, m.late.bias, m.never.weight, … got no gradient" in first
    assert "m.sometimes.weight" in second


def idle_with_a_config(rank: int) -> None:
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}
    prepared: Any = DeepSpeed(DeepSpeed.Options(config=config)).set_up(Component({"m": model}, {"o": optimizer}))
    prepared.enter()
    with prepared.backward():
        model(torch.ones(2, 4), True, True).sum().backward()
    with pytest.raises(NotSupported, match=r"m.never.weight, m.never.bias got no gradient .* Freeze them"):
        optimizer.step()


def test_the_configs_optimizer_needs_all_gradients() -> None:
    run_on_ranks(idle_with_a_config)


def grown(rank: int) -> tuple[bool, bool, float]:
    """A scheduler comes later; a layer is thawed between cells; a copy is a plain model; a teacher has no optimizer."""
    model, optimizer, _ = make()
    strategy = DeepSpeed(DeepSpeed.Options(stage=2))
    prepared: Any = strategy.set_up(Component({"m": model}, {"o": optimizer}))
    prepared.enter()
    copied = copy.deepcopy(model)
    prepared.leave()
    scheduler = CosineAnnealingLR(optimizer, 5)
    kept = prepared.grow(Component({"m": model}, {"o": optimizer}, {"s": scheduler}))
    other = prepared.grow(Component({"m": model, "n": nn.Linear(1, 1)}, {"o": optimizer}))
    model.blocks[1].requires_grad_(True)
    prepared.enter()
    was = model.blocks[1].weight.detach().clone()
    x, y = batches(1)[0]
    mse(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    prepared.leave()
    prepared.close()
    assert type(copied) is Tied
    assert not any(vars(p) for p in copied.parameters() if isinstance(p, nn.Parameter))
    teacher = strategy.set_up(Component({"teacher": nn.Linear(2, 2)}))
    teacher.enter()
    teacher.leave()
    teacher.close()
    return kept, other, (model.blocks[1].weight - was).abs().max().item()


def test_what_comes_later() -> None:
    for kept, other, moved in run_on_ranks(grown):
        assert kept
        assert not other
        assert moved > 0


def configured(rank: int) -> tuple[list[str], list[float], bool]:
    """The config makes the optimizer and the scheduler."""
    model, optimizer, _ = make()
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 2},
        },
    }
    prepared: Any = DeepSpeed(DeepSpeed.Options(config=config)).set_up(Component({"m": model}, {"o": optimizer}))
    hooks: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda o, a, k: hooks.append(o))
    was = weights_of(model)
    prepared.enter()
    for x, y in batches(3):
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.leave()
    handle.remove()
    assert hooks == [optimizer] * 3
    pieces = [tensor for tensor, _ in prepared.pieces()]
    assert all(any(tensor is p for p in model.parameters()) for tensor in pieces)
    prepared.close()
    return prepared.notes, [g["lr"] for g in optimizer.param_groups], distance(weights_of(model), was) > 0


def test_an_optimizer_from_the_config() -> None:
    for notes, rates, moved in run_on_ranks(configured):
        assert "the config's AdamW trains" in notes[0]
        assert len(set(rates)) == 1
        assert rates[0] > 0
        assert moved


def compile_op() -> str:
    """As a user does, about a minute, once per machine; why it cannot be."""
    line = [sys.executable, str(Path(__file__).resolve().parents[2] / ".ci" / "ops")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=500)
    return done.stderr[-300:] if done.returncode else ""


def not_compiled(rank: int, place: str) -> str:
    os.environ["TORCH_EXTENSIONS_DIR"] = place
    model, optimizer, _ = make()
    options = DeepSpeed.Options(stage=3, offload_optimizer="nvme", nvme_path=place)
    with pytest.raises(UsageError) as raised:
        DeepSpeed(options).set_up(Component({"m": model}, {"o": optimizer}))
    return str(raised.value)


def test_what_is_not_compiled_is_named_with_the_line_that_compiles_it(tmp_path: Path) -> None:
    for said in run_on_ranks(not_compiled, str(tmp_path)):
        assert "DeepSpeed's async_io is not compiled on this machine" in said
        assert "from deepspeed.ops.op_builder import AsyncIOBuilder as op; op().load()" in said
        assert "DS_BUILD_AIO=1 pip install" in said


@pytest.mark.thorough
@pytest.mark.limit(400)
@pytest.mark.parametrize(("stage", "options"), [(2, {}), (3, {"offload_parameters": "cpu", "config": SHARDED})])
def test_offloaded_to_the_host(stage: int, options: dict[str, Any]) -> None:
    model, optimizer, scheduler = make()
    plain_loop(model, optimizer, scheduler, batches(2), by_torch)
    optimizer.zero_grad()
    for start in (2, 9):
        plain_loop(model, optimizer, scheduler, batches(7, start), by_torch)
    options = {**options, "offload_optimizer": "cpu"}
    for answer in run_on_ranks(two_cells, stage, options, 2):
        state = state_of(model, optimizer)
        assert distance(answer["state"], state) < 1e-5
        assert distance(answer["closed"], {**weights_of(model), "scale": torch.full((8,), 0.5)}) < 1e-5


def on_a_disk(rank: int, place: str, count: int) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
    options = DeepSpeed.Options(stage=3, offload_optimizer="nvme", nvme_path=place)
    prepared: Any = DeepSpeed(options).set_up(Component({"m": model}, {"o": optimizer}))
    written = 0
    for _ in range(2):
        prepared.enter()
        for i in range(2):
            x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(i))[rank::count]
            mse(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
        prepared.leave()
        written = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(place) for f in files)
    prepared.close()
    return weights_of(model), written, prepared.notes


@pytest.mark.thorough
@pytest.mark.limit(600)
def test_offloaded_to_a_disk(tmp_path: Path) -> None:
    if why := compile_op():
        absent(f"libaio is not here ({why})", "apt install libaio-dev")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
    for i in (0, 1, 0, 1):
        x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(i))
        mse(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights, written, notes in run_on_ranks(on_a_disk, str(tmp_path), 2, timeout=120):
        assert distance(weights, weights_of(model)) < 1e-5
        assert written > 2**20
        assert any("1 MiB" in note for note in notes)
    assert [f for _, _, files in os.walk(tmp_path) for f in files] == []


class Tempered(nn.Module):
    """A layer and one number that it is divided by."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(0.5), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.exp(-self.temperature)  # type: ignore[no-any-return]


def tempered(rank: int, stage: int, trained: bool, alone: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Tempered(trained=trained)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = DeepSpeed.Options(stage=stage, config=SHARDED)
    prepared = None if alone else DeepSpeed(options).set_up(Component({"model": model}, {"o": optimizer}))
    if prepared is not None:
        prepared.enter()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))[rank :: 1 if alone else 2]
    for _ in range(3):
        optimizer.zero_grad()
        mse(model(x), x).backward()
        optimizer.step()
    if prepared is not None:
        prepared.leave()
        prepared.close()
    return weights_of(model)


@pytest.mark.sample("3-True")
@pytest.mark.parametrize(("stage", "trained"), [(2, True), (3, True), (3, False)])
def test_a_parameter_without_dimensions(stage: int, trained: bool) -> None:
    """Left alone, DeepSpeed cannot send one to its ranks."""
    alone = tempered(0, stage, trained, True)
    for weights in run_on_ranks(tempered, stage, trained, False):
        assert weights["temperature"].shape == ()
        assert distance(weights, alone) < 1e-6
