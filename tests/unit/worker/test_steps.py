"""Steps, samples and positions are counted; accumulation makes one step of K calls; interruption falls between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nbtrain.base.errors import NotPrepared, NotSupported, UsageError
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.worker.loop.steps import Stage
from nbtrain.worker.runtime import Runtime
from tests.support.bench import make_runtime

SPEC = RunSpec(pool=PoolSpec())


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    here = make_runtime()
    here.install()
    here.begin(SPEC, {})
    yield here
    here.end(True)
    here.uninstall()


def make(samples: int = 10, batch_size: int = 4) -> tuple[nn.Linear, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return (
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        DataLoader(TensorDataset(torch.randn(samples, 2)), batch_size),
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_counts_and_positions(runtime: Runtime) -> None:
    model, optimizer, loader = make()
    checks = DataLoader(TensorDataset(torch.randn(3, 2)), 1)
    places = []
    for _ in range(2):
        for (x,) in loader:
            for _ in checks:
                break
            for _ in checks:
                pass
            step(model, optimizer, x)
            place = runtime.steps.progress()
            places.append((place.done, place.total, place.epoch))
    assert places == [(1, 3, 0), (2, 3, 0), (3, 3, 0), (1, 3, 1), (2, 3, 1), (3, 3, 1)]
    assert runtime.steps.count == 6
    assert runtime.steps.throughput().steps == 6
    assert runtime.steps.throughput().samples == 2 * 10 + 6 * 4
    last = runtime.steps.progress()
    assert (last.done, last.total) == (3, 3)


def test_a_loop_over_steps_is_none_over_epochs(runtime: Runtime) -> None:
    _, _, loader = make()
    batches, seen = iter(loader), []
    for _step in range(7):
        try:
            next(batches)
        except StopIteration:
            batches = iter(loader)
            next(batches)
        place = runtime.steps.progress()
        seen.append((place.done, place.epoch, place.epochs))
    assert seen == [(done, epoch, None) for epoch in range(3) for done in (1, 2, 3)][:7]


def test_two_optimizers_make_one_step_per_batch(runtime: Runtime) -> None:
    model, one, loader = make()
    two = torch.optim.SGD(model.parameters(), 0.1)
    for (x,) in loader:
        step(model, one, x)
        step(model, two, x)
    assert runtime.steps.count == 3


def test_interruption_falls_between_steps(runtime: Runtime) -> None:
    model, optimizer, loader = make()
    seen: list[int] = []
    runtime.steps.ended = lambda: seen.append(runtime.steps.count)
    for (x,) in loader:
        step(model, optimizer, x)
        step(model, optimizer, x)
    assert seen == [2, 4, 6], "with a loader: when the next batch is wanted"
    seen.clear()
    for _ in range(3):
        step(model, optimizer, torch.ones(1, 2))
    assert seen == [7, 8], "without: when the next backward begins"

    def stop() -> None:
        raise KeyboardInterrupt

    runtime.steps.ended = stop
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, torch.ones(1, 2))
    assert runtime.steps.count == 9


def test_without_a_loader_a_step_is_over_when_every_optimizer_had_its_turn(runtime: Runtime) -> None:
    model, judge, _ = make()
    maker = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(1, 2)
    seen: list[int] = []
    runtime.steps.ended = lambda: seen.append(runtime.steps.calls)
    for _ in range(4):
        step(model, judge, x)
        step(model, maker, x)
    assert seen == [4, 6], "the first round is over when the judge steps once more"
    seen.clear()
    for _ in range(3):
        step(model, judge, x)
    assert seen == [8, 10], "after a change of habits it is one step late"
    del judge, maker
    gc.collect()
    seen.clear()
    fresh = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        step(model, fresh, x)
    assert seen == [13]


def test_what_an_earlier_cell_left_half_done_does_not_shift_the_steps(runtime: Runtime) -> None:
    """It may have run on one rank only, or have been stopped there between the turns of two optimizers."""
    model, judge, _ = make()
    maker = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(1, 2)
    step(model, judge, x)
    for _ in range(2):
        runtime.end(True)
        runtime.begin(SPEC, {"model": model, "judge": judge, "maker": maker})
        seen: list[int] = []
        runtime.steps.ended = lambda seen=seen: seen.append(runtime.steps.calls)  # type: ignore[misc]
        for _ in range(3):
            step(model, judge, x)
            step(model, maker, x)
        step(model, judge, x)
        assert seen == [2, 4, 6]


def test_a_loader_in_another_thread_runs_ahead_of_the_steps(runtime: Runtime) -> None:
    """It may be asked in the middle of a step, and what was raised there would be lost with its thread."""
    model, optimizer, loader = make()
    seen: list[int] = []
    runtime.steps.ended = lambda: seen.append(runtime.steps.calls)
    step(model, optimizer, torch.ones(1, 2))
    with ThreadPoolExecutor(1) as threads:
        batches = threads.submit(list, loader).result()
        assert not seen
        iterator = threads.submit(iter, loader).result()
        for (x,) in batches:
            assert not runtime.steps.loading, "no loader of the main thread's says when a step is over"
            step(model, optimizer, x)
        del iterator
    assert seen == [2, 3]  # by the backwards: with this one it is one late, as any first step without a loader


def test_a_broken_off_loader_is_let_go(runtime: Runtime) -> None:
    _, _, loader = make()
    iterator = iter(loader)
    next(iterator)
    assert runtime.steps.loading
    del iterator
    assert not runtime.steps.loading


@pytest.mark.parametrize("zero_first", [True, False])
def test_accumulation_is_the_large_batch(runtime: Runtime, zero_first: bool) -> None:
    """7 batches of 2, three at a time: 6 + 6 + 2 samples, the last one a step by itself."""
    model, optimizer, loader = make(14, 2)
    other, reference, large = make(14, 6)
    for (x,) in large:
        step(other, reference, x)
    runtime.end(True)
    runtime.begin(RunSpec(pool=PoolSpec(), accumulate=3), {"model": model, "optimizer": optimizer})
    before = model.weight.detach().clone()
    for i, (x,) in enumerate(loader, 1):
        if zero_first:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        assert torch.equal(model.weight, before) == (i < 3)
    torch.testing.assert_close(model.weight, other.weight)
    assert runtime.steps.count == 3
    runtime.end(True)
    assert "step" not in vars(optimizer)


def test_a_group_broken_off_is_dropped_with_the_cell(runtime: Runtime) -> None:
    model, optimizer, loader = make()
    runtime.end(True)
    runtime.begin(RunSpec(pool=PoolSpec(), accumulate=2), {"model": model, "optimizer": optimizer})
    for (x,) in loader:
        step(model, optimizer, x)
        break
    assert model.weight.grad is not None
    runtime.end(True)
    assert model.weight.grad is None
    assert runtime.steps.count == 0
    runtime.begin(SPEC, {"model": model, "optimizer": optimizer})
    step(model, optimizer, torch.ones(1, 2))
    assert runtime.steps.count == 1


def test_accumulation_and_an_optimizer_nobody_set_up(runtime: Runtime) -> None:
    model, optimizer, _ = make()
    runtime.end(True)
    runtime.begin(RunSpec(pool=PoolSpec(), accumulate=2), {})
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(NotPrepared, match="setup\\(model, optimizer\\)"):
        optimizer.step()
    runtime.in_cell_models.setup(model, optimizer)
    step(model, optimizer, torch.ones(1, 2))
    assert runtime.steps.count == 0


def test_accumulation_with_a_scaler_is_refused(runtime: Runtime) -> None:
    model, optimizer, _ = make(8, 2)
    runtime.end(True)
    runtime.begin(RunSpec(pool=PoolSpec(), accumulate=2), {"model": model, "optimizer": optimizer})
    loss = model(torch.ones(1, 2)).sum()
    assert torch.amp.GradScaler("cpu", enabled=False).scale(loss) is loss
    with pytest.raises(NotSupported, match="--precision 16-mixed"):
        torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss)


@contextmanager
def accumulating(
    runtime: Runtime, every: int, model: nn.Module, optimizer: torch.optim.Optimizer, **objects: Any
) -> Iterator[list[str]]:
    """A cell with this option; what it says is in the list afterwards."""
    runtime.end(True)
    notes: list[str] = []
    runtime.begin(RunSpec(pool=PoolSpec(), accumulate=every), {"model": model, "optimizer": optimizer, **objects})
    try:
        yield notes
    finally:
        notes += runtime.end(True)
        runtime.begin(SPEC, {})


class Stream(IterableDataset[Any]):
    """Samples whose number nobody knows."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randn(self.samples, 2))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_refuses_closures(runtime: Runtime, kind: Any, scaled: bool) -> None:
    """Before anything is computed: no batch of the group is in the weights."""
    model, _, loader = make()
    optimizer = kind(model.parameters(), 0.1)
    before, calls = model.weight.detach().clone(), 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with accumulating(runtime, 4, model, optimizer):
        for (x,) in loader:  # noqa: B007
            with pytest.raises(NotSupported, match=r"loss\.backward\(\); optimizer\.step\(\)"):
                if scaled:
                    torch.amp.GradScaler("cpu", enabled=False).step(optimizer, closure)
                else:
                    optimizer.step(closure=closure)
            break
    assert calls == 0
    assert torch.equal(model.weight, before)
    if kind is torch.optim.SGD:
        (x,) = next(iter(loader))
        optimizer.step(closure)
        assert calls == 1, "the gate is open after the cell"


def _set_to_none(p: torch.Tensor) -> None:
    p.grad = None


def _zero(p: torch.Tensor) -> None:
    if p.grad is not None:
        p.grad.zero_()


def _replace(p: torch.Tensor) -> None:
    p.grad = torch.zeros_like(p)


@pytest.mark.parametrize("clear", [_set_to_none, _zero, _replace])
@pytest.mark.parametrize("first", [True, False])
def test_accumulation_misses_gradients_that_are_cleared_by_hand(runtime: Runtime, clear: Any, first: bool) -> None:
    model, optimizer, loader = make()
    before, batches = model.weight.detach().clone(), 0
    with accumulating(runtime, 3, model, optimizer), pytest.raises(UsageError, match=r"Write optimizer\.zero_grad\(\)"):
        for (x,) in loader:
            batches += 1
            if first:
                [clear(p) for p in model.parameters()]
            model(x).square().mean().backward()
            optimizer.step()
            if not first:
                [clear(p) for p in model.parameters()]
    assert batches == 2
    assert torch.equal(model.weight, before)


def test_accumulation_misses_gradients_that_autograd_grad_has_overwritten(runtime: Runtime) -> None:
    model, optimizer, loader = make()
    with accumulating(runtime, 3, model, optimizer), pytest.raises(UsageError, match="without a backward"):
        for (x,) in loader:
            found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            for p, gradient in zip(model.parameters(), found, strict=True):
                p.grad = gradient
            optimizer.step()


def test_accumulation_goes_on_with_what_is_unused_or_frozen(runtime: Runtime) -> None:
    """A layer that only the first batch uses, one that is frozen within the group, one whose gradient is sparse, two
    backwards a batch, recomputed layers; norms are looked at before and after the step."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("always", "once", "thawed")})
    net["table"] = nn.Embedding(4, 1, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batches = 0
    with accumulating(runtime, 3, net, optimizer):
        for (x,) in DataLoader(TensorDataset(torch.randn(18, 2, requires_grad=True)), 3):
            optimizer.zero_grad()
            net["thawed"].requires_grad_(batches % 3 != 1)
            if batches % 3 == 1:
                for p in net["thawed"].parameters():
                    p.grad = None
            used = ["always"] + ["once"] * (batches % 3 == 0) + ["thawed"]
            out = sum(checkpoint(net[name], x, use_reentrant=True) for name in used)
            (out + net["table"](torch.tensor([batches % 3]))).square().mean().backward()
            net["always"](x).square().mean().backward()
            nn.utils.clip_grad_norm_(net["always"].parameters(), 0.3)
            optimizer.step()
            nn.utils.clip_grad_norm_(net["always"].parameters(), float("inf"))
            batches += 1
    assert batches == 6


def test_accumulation_cannot_take_a_batch_out_of_a_group(runtime: Runtime) -> None:
    """As for an adversarial example; another model's gradients are no part of it."""
    model, optimizer, loader = make()
    judge = nn.Linear(1, 1)
    with accumulating(runtime, 2, model, optimizer):
        seen: list[torch.Tensor] = []
        for (x,) in loader:
            judge.zero_grad()
            judge(model(x)).square().mean().backward()
            judge.zero_grad()
            if seen:
                with pytest.raises(NotSupported, match=r"by torch\.autograd\.grad"):
                    model.zero_grad()
                with pytest.raises(NotSupported, match=r"by torch\.autograd\.grad"):
                    optimizer.zero_grad()
                break
            model.zero_grad()
            assert model.weight.grad is None, "nothing of the group is there yet"
            step(model, optimizer, x)
            model.zero_grad()
            assert model.weight.grad is not None
            seen.append(x)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # an epoch is shorter than a group
@pytest.mark.parametrize(("samples", "known"), [(18, True), (18, False), (6, False), (14, False)])
def test_schedules_for_an_epoch_and_for_a_batch_under_accumulation(runtime: Runtime, samples: int, known: bool) -> None:
    """Groups of four batches of two samples: some epochs end within a group."""
    from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, StepLR

    model, optimizer, _ = make()
    data: Any = TensorDataset(torch.randn(samples, 2)) if known else Stream(samples)
    batch, epoch = (
        ExponentialLR(optimizer, 0.9),
        ChainedScheduler([StepLR(optimizer, 1, 0.5), ConstantLR(optimizer, 1)]),
    )
    with accumulating(runtime, 4, model, optimizer):
        rates = []
        for _ in range(4):
            for x in DataLoader(data, 2):
                step(model, optimizer, x[0] if known else x)
                batch.step()
            epoch.step()
            rates.append(optimizer.param_groups[0]["lr"])
        steps = runtime.steps.count
    assert steps == (4 * 3 if known else 4 * samples // 2 // 4)
    assert batch.last_epoch == steps
    assert rates[-1] == pytest.approx(0.1 * 0.5**4 * 0.9**steps)


@pytest.mark.parametrize(("batches", "said"), [(8, ""), (9, "the last batch of"), (10, "the last 2 batches of")])
def test_batches_that_made_no_step_are_told(runtime: Runtime, batches: int, said: str) -> None:
    model, optimizer, _ = make()
    with accumulating(runtime, 4, model, optimizer) as notes:
        for x in DataLoader(Stream(batches * 2), 2):
            step(model, optimizer, x)
        assert runtime.steps.count == 2
    assert len(notes) == bool(said)
    assert said in "".join(notes)


def test_reentrant_checkpoints_count_once(runtime: Runtime) -> None:
    """Their backward runs another one inside: it must not be scaled a second time."""
    from torch.utils.checkpoint import checkpoint

    model, optimizer, _ = make()
    x = torch.ones(2, 2, requires_grad=True)
    model(x).mean().backward()
    expected = model.weight.grad.clone()
    optimizer.zero_grad()
    runtime.end(True)
    runtime.begin(RunSpec(pool=PoolSpec(), accumulate=2), {"model": model, "optimizer": optimizer})
    checkpoint(model, x, use_reentrant=True).mean().backward()
    torch.testing.assert_close(model.weight.grad, expected / 2)


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_a_penalty_on_gradients_of_a_small_batch_is_refused(runtime: Runtime, way: str) -> None:
    """It is not that of the large batch; a penalty on the input's gradient is."""
    model, optimizer, _ = make()
    runtime.end(True)
    runtime.begin(RunSpec(pool=PoolSpec(), accumulate=2), {"model": model, "optimizer": optimizer})
    x = torch.ones(2, 2, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = model(x).square().mean()
    with pytest.raises(NotSupported, match=r"--accumulate adds up.*leave the option out"):
        if way == "grad":
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        else:
            loss.backward(create_graph=True)


def test_a_trainer_says_what_a_loader_is_for(runtime: Runtime) -> None:
    """A validation within an epoch has its own place, and the epoch's is there again afterwards."""
    _, _, loader = make(12)
    held_out = DataLoader(TensorDataset(torch.randn(4, 2)), 1)
    stages = {loader: Stage(2, 8, most=2), held_out: Stage(2, 8, "validation")}
    runtime.steps.stage_of = lambda one: stages[one]

    def place() -> tuple[Any, ...]:
        found = runtime.steps.progress()
        return found.done, found.total, found.epoch, found.epochs, found.stage

    for at, _ in enumerate(loader):
        assert place() == (at + 1, 2, 2, 8, "")
        if at == 1:
            break
    for at, _ in enumerate(held_out):
        assert place() == (at + 1, 4, 2, 8, "validation")
    for _ in loader:
        pass
    assert place() == (2, 2, 2, 8, "")
    for _ in held_out:
        pass
    assert place() == (2, 2, 2, 8, "")


def test_a_plain_loop_that_evaluates_says_so(runtime: Runtime) -> None:
    """It is over before the epoch is, whose own place is there again afterwards."""
    model, optimizer, loader = make(8)
    held_out = DataLoader(TensorDataset(torch.randn(3, 2)), 1)

    def place() -> tuple[Any, ...]:
        found = runtime.steps.progress()
        return found.done, found.total, found.epoch, found.stage

    with torch.no_grad():
        for _ in held_out:
            pass
    assert place() == (3, 3, 0, "validation"), "nothing else was iterated"
    for epoch in range(2):
        for (x,) in loader:
            step(model, optimizer, x)
        assert place() == (2, 2, epoch, "")
        with torch.no_grad():
            for at, _ in enumerate(held_out):
                assert place() == (at + 1, 3, epoch, "validation")
        assert place() == (2, 2, epoch, "")


def test_an_iterator_that_nobody_uses_is_no_epoch(runtime: Runtime) -> None:
    """As tqdm.auto has two made, and takes one."""
    _, _, loader = make()
    seen = []
    for _ in range(3):
        held = iter(loader)
        for _ in loader:
            progress = runtime.steps.progress()
            seen.append(progress.epoch)
        progress = runtime.steps.progress()
        assert (progress.done, progress.total) == (len(held), len(held)), "not of the one that nobody uses"
        assert not runtime.steps.loading
    assert sorted(set(seen)) == [0, 1, 2]


def test_a_whole_number_beyond_all_floats_is_logged_as_inf(runtime: Runtime) -> None:
    logged: list[Any] = []
    runtime.logged.send = lambda step, numbers: logged.append(numbers)
    runtime.logged.log(large=10**400, small=-(10**400), one=1)
    assert logged == [{"large": float("inf"), "small": float("-inf"), "one": 1.0}]
