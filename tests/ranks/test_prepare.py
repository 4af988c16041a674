"""What hangs together is set up once, kept, set up again when it grows, and guarded when nobody set it up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.base.errors import NotPrepared, NotSupported, UsageError
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.strategies.base import Component, Prepared, Strategy
from nbtrain.strategies.kit.same_on_ranks import differing, digest, far_apart
from nbtrain.strategies.none import NoStrategy
from nbtrain.strategies.single import Single
from nbtrain.worker.ranks.collectives import equalise, gather, reduce
from nbtrain.worker.runtime import Runtime
from nbtrain.worker.setup.components import Components
from nbtrain.worker.setup.set_up_component import move_to_device
from tests.support.bench import make_runtime
from tests.support.ranks import run_on_ranks

CPU = torch.device("cpu")


class Noting(Strategy):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__(self.Options())
        self.closed = 0

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        noting = self

        class Noted(Prepared):
            def backward(self, sync: bool = True) -> AbstractContextManager[float]:
                return nullcontext(1.0)

            def close(self, whole: bool = True) -> None:
                noting.closed += 1

        return Noted(component)


@pytest.fixture
def components() -> Iterator[Components]:
    shop = Components(Noting(), CPU, 1)
    yield shop
    shop.forget()


def names(shop: Components) -> list[tuple[list[str], list[str], list[str], list[str]]]:
    return [
        ([*one.component.modules], [*one.component.optimizers], [*one.component.schedulers], [*one.component.loose])
        for one in shop.prepared
    ]


def sgd(*parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for part in parameters for p in part], 0.1)


def test_components(components: Components) -> None:
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    warmth = nn.Parameter(torch.zeros(()))
    both, other = sgd(a.parameters(), b.parameters(), [warmth]), sgd(c.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(both, 1)
    criterion = nn.CrossEntropyLoss()
    everything = {"a": a, "b": b, "c": c, "both": both, "other": other, "schedule": schedule, "criterion": criterion}
    components.prepare(everything)
    assert names(components) == [
        (["a", "b"], ["both"], ["schedule"], ["both[4]"]),
        (["c"], ["other"], [], []),
    ]


def test_what_nobody_holds_is_let_go_of(components: Components) -> None:
    """A notebook makes its model and optimizer anew, cell after cell."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    components.prepare({"model": model, "opt": sgd(model.parameters()), "other": other})
    components.retire(lambda item: item is model)
    assert names(components) == [(["model"], [], [], [])]
    assert components.strategy.closed == 1  # type: ignore[attr-defined]
    new = sgd(model.parameters())
    components.prepare({"model": model, "opt": new})
    assert names(components) == [(["model"], ["opt"], [], [])]
    assert components.prepared[0].component.optimizers["opt"] is new
    components.retire(lambda item: False)
    assert components.prepared == []
    assert components.ready == set()


def test_what_is_prepared_is_kept_and_what_grows_is_set_up_again(components: Components) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = sgd(model.parameters())
    components.prepare({"model": model, "optimizer": optimizer, "other": other})
    first, second = components.prepared
    components.prepare({"model": model})
    components.prepare({"again": model, "optimizer": optimizer})
    assert components.prepared == [first, second]
    components.prepare({"new": torch.optim.Adam(model.parameters())})
    assert components.strategy.closed == 1  # type: ignore[attr-defined]
    assert names(components)[1] == (["model"], ["optimizer", "new"], [], [])
    assert components.prepared[0] is second
    model.half()
    components.prepare({"model": model})
    assert components.strategy.closed == 2, "buckets of the old dtype are of no use"  # type: ignore[attr-defined]
    components.forget()
    assert components.prepared == []
    assert components.ready == set()


def test_the_same_mapping_again_is_looked_at_for_what_grew_in_it(components: Components) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    objects = {"model": model, "optimizer": sgd(model.parameters())}
    components.prepare(objects)
    first = components.prepared
    components.prepare(objects)
    assert components.prepared == first
    model.append(nn.Linear(2, 2))
    components.prepare(objects)
    assert components.prepared != first
    assert set(map(id, model.parameters())) <= components.ready
    components.forget()
    components.prepare(objects)
    assert len(components.prepared) == 1, "forgotten means to be set up again"


def test_an_optimizer_of_lazy_layers_is_refused_until_they_have_their_sizes() -> None:
    components = Components(Noting(), CPU, 2)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    objects = {"model": lazy, "opt": torch.optim.SGD(lazy.parameters(), 0.1)}
    with pytest.raises(NotSupported, match="opt holds parameters of lazy layers"):
        components.prepare(objects)
    lazy(torch.ones(2, 4))
    components.prepare(objects)
    assert components.is_ready(objects["opt"])  # type: ignore[arg-type]
    components.forget()


@pytest.mark.gpu
def test_place_moves_in_place() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    identities = [*map(id, model.parameters()), *map(id, model.buffers())]
    card = torch.device("cuda", 0)
    move_to_device(Component(modules={"model": model}, optimizers={"optimizer": optimizer}), card)
    assert identities == [*map(id, model.parameters()), *map(id, model.buffers())]
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {card}
    assert {p.grad.device for p in model.parameters() if p.grad is not None} == {card}
    state = optimizer.state[model[0].weight]
    assert (state["exp_avg"].device, state["step"].device) == (card, CPU)


def runtime(rank: int, strategy: Strategy | None = None, world_size: int = 2, seen: Any = None) -> Runtime:
    return make_runtime(rank, world_size, strategy, lambda *said: None if seen is None else seen.append(said))


SPEC = RunSpec(pool=PoolSpec(devices=("cpu", "cpu")))


def _unprepared(rank: int) -> str:
    here = runtime(rank)
    here.install()
    model = nn.Linear(2, 2)
    optimizer = sgd(model.parameters())
    here.begin(SPEC, {})
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(NotPrepared) as caught:
        optimizer.step()
    assert torch.equal(model.weight, before)
    here.in_cell_models.setup(model, optimizer)
    optimizer.step()
    model.extra = nn.Parameter(torch.ones(2))
    optimizer.param_groups[0]["params"].append(model.extra)
    model.extra.sum().backward()
    with pytest.raises(NotPrepared, match="1 parameter "):
        optimizer.step()
    here.end(False)
    other = nn.Linear(1, 1)
    other(torch.ones(1, 1)).sum().backward()
    sgd(other.parameters()).step()  # between cells nothing is guarded
    here.uninstall()
    here = runtime(rank, NoStrategy(None))
    here.install()
    here.begin(SPEC, {"model": model, "optimizer": optimizer})
    assert here.in_cell_models.setup(model) is model
    optimizer.step()
    assert here.components.prepared == []
    here.uninstall()
    return str(caught.value)


def test_the_guard_names_the_line_to_write_on_every_rank() -> None:
    for text in run_on_ranks(_unprepared):
        assert text.startswith("SGD trains 2 parameters on 2 ranks")
        assert "model, optimizer = setup(model, optimizer)" in text


def _equalised(rank: int) -> tuple[int, list[Any]]:
    shares = [torch.full((3,), float(rank)), torch.ones(2), torch.tensor(rank, dtype=torch.int32)]
    sent = equalise(shares, lambda tensor: hash(tuple(tensor.reshape(-1).tolist())))
    return sent, [tensor.tolist() for tensor in shares]


def test_only_what_differs_is_sent_to_be_equal() -> None:
    assert run_on_ranks(_equalised) == [(2, [[0.0] * 3, [1.0, 1.0], 0])] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(7,), (3, 1500)])
def test_a_digest_knows_each_number_and_its_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    first = (torch.arange(torch.Size(shape).numel()) % 2).to(dtype).reshape(shape)
    edited, moved = first.clone(), first.flatten().clone()
    edited.view(-1)[-1] = edited.view(-1)[-1] == 0
    moved[[0, 1, 2, 3]] = moved[[1, 0, 3, 2]]  # the same sum
    numbers = [int(digest(one)) for one in (first, edited, moved.view(shape), first.clone())]
    assert len(set(numbers)) == 3
    assert numbers[0] == numbers[3]


def _differ(rank: int) -> list[bool]:
    return differing([torch.ones(3), torch.tensor(float(rank)), torch.tensor([]), torch.tensor([float("nan")])], "cpu")


def test_what_differs_between_ranks() -> None:
    assert run_on_ranks(_differ) == [[False, True, False, False]] * 2


FORMS: list[tuple[torch.dtype, tuple[int, ...]]] = [
    (dtype, shape)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    for shape in ((), (7,), (1024,), (300, 400))
]


def signs_and_rounding(rank: int) -> list[list[str]]:
    """Of tensors of which rank 1 has the other sign; the last digit of another constant; or another order."""
    answers = []
    for change in (
        lambda t: t * (1 - 2 * rank),
        lambda t: torch.full_like(t, 0.3) * (1 + rank * torch.finfo(t.dtype).eps),
        lambda t: t.flip(0) if rank and t.ndim else t * (1 - 2 * rank),
    ):
        torch.manual_seed(4)
        kinds = {f"{dtype} {shape}": [change(torch.randn(shape, dtype=dtype))] for dtype, shape in FORMS}
        answers.append(far_apart(kinds, torch.device("cpu")))
    return answers


def test_tensors_are_far_apart_by_a_sign_or_a_place_and_not_by_what_is_rounded() -> None:
    for signs, rounded, places in run_on_ranks(signs_and_rounding):
        assert signs == places == [f"{dtype} {shape}" for dtype, shape in FORMS]
        assert rounded == []


def test_alone_reduce_and_gather_need_no_group() -> None:
    assert reduce(3, "sum") == 3
    assert reduce(torch.tensor([1, 2]), "mean").tolist() == [1.0, 2.0]
    assert gather("text") == ["text"]


def test_builtins_and_log() -> None:
    seen: list[Any] = []
    here = runtime(0, Single(Single.Options()), world_size=1, seen=seen)
    names = here.builtins()
    assert (names["rank"], names["world_size"], names["local_rank"], names["device"]) == (0, 1, 0, CPU)
    names["log"](loss=torch.tensor(0.5, requires_grad=True), n=2)
    assert seen == [(0, {"loss": 0.5, "n": 2.0})]
    with pytest.raises(UsageError, match=r"log\(loss=loss\)"):
        names["log"](5)
    with pytest.raises(UsageError, match="log\\(name="):
        names["log"](name="text")
    with pytest.raises(UsageError, match="one element"):
        names["log"](loss=torch.zeros(2))
