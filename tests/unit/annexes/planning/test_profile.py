"""What a profile says of a model, and that it leaves no trace: neither in the model, nor its optimizer, nor memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import nbtrain
from nbtrain.annexes.planning.profile.profile import CannotProfile, profile
from nbtrain.base.errors import UsageError
from nbtrain.strategies.memory_estimate import Profile
from tests.support.planned import PLANNED, billion, mlp, mlp_batch, recomputing, transformer, transformer_batch


class Looks(nn.Module):
    """Its forward needs a number, which no shape has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        return out if out.sum().item() < 1e30 else out * 2


class Busy(nn.Module):
    """Writes to whatever it can."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 3)
        self.looks = looks
        self.calls = 0
        self.seen: list[Any] = []
        self.last: Any = None
        self.table = torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x)
        self.table += 1
        with torch.no_grad():
            self.up.weight.clamp_(-0.01, 0.01)
        x = nn.functional.dropout(self.norm(self.up(x)) + self.table, random.random() / 2, self.training)
        self.last = self.extra = x
        if self.looks and x.sum().item() > 1e30:
            x = x * 2
        return self.down(x)


def everything(model: nn.Module, touched: bool = False) -> list[Any]:
    """What is in a model: tensors by content and by identity, attributes, hooks. `touched`: something may have been
    written to and put back."""
    found: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            inside = list(value.items()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
            found.append((name, id(value), [(id(one[1]) if isinstance(one, tuple) else id(one)) for one in inside]))
            found.append(value if isinstance(value, int | float | str) else None)
            found.append(value.tolist() if isinstance(value, torch.Tensor) else None)
    for tensor in (*model.parameters(), *model.buffers()):
        found.append((tensor.detach().reshape(-1).tolist(), None if tensor.grad is None else tensor.grad.tolist()))
        found.append((tensor.requires_grad, len(tensor._backward_hooks or ()), touched or tensor._version))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("looks", [False, True], ids=["shapes", "real"])
def test_the_model_is_as_it_was(looks: bool, training: bool) -> None:
    model = Busy(looks).train(training)
    fired: list[Any] = []
    model.up.register_forward_hook(lambda *given: fired.append(given))
    model.down.register_full_backward_hook(lambda *given: fired.append(given))
    model.up.weight.register_hook(fired.append)
    model.down.weight.grad = torch.full_like(model.down.weight, 2.0)
    x = torch.randn(12, 6)
    before = everything(model, looks), torch.get_rng_state().tolist(), random.getstate(), x.tolist()
    found = profile(model, x)
    after = everything(model, looks), torch.get_rng_state().tolist(), random.getstate(), x.tolist()
    assert after == before
    assert fired == []
    assert any("scaled up" in note for note in found.notes) == looks


def test_the_optimizer_and_its_scheduler_are_as_they_were() -> None:
    model = mlp(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stepped: list[Any] = []
    optimizer.register_step_post_hook(lambda *given: stepped.append(given))
    attributes = {name: id(value) for name, value in vars(optimizer).items()}
    found = profile(model, mlp_batch(), optimizer)
    assert found.state
    assert not optimizer.state
    assert {name: id(value) for name, value in vars(optimizer).items()} == attributes
    assert not stepped
    assert not getattr(optimizer, "_opt_called", False)  # by which schedulers tell whether they are too early
    assert scheduler.last_epoch == 0
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
}


@pytest.mark.parametrize("steps", [0, 2], ids=["new", "used"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_state_is_what_a_real_step_makes(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> None:
    model = mlp(16, depth=2)
    x, y = mlp_batch()
    optimizer = make(model.parameters())

    def train() -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(steps):
        train()
    found = profile(model, (x, y), optimizer)
    train()
    real = {
        name: sum(t.numel() * t.element_size() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))
        for name, p in model.named_parameters()
    }
    assert {weight.name: weight.state for weight in found.weights} == real
    assert not [note for note in found.notes if "so its state counts as it is" in note]
    assert found.optimizer == type(optimizer).__name__


def test_no_optimizer_is_taken_for_adamw_and_frozen_weights_have_no_state() -> None:
    model = mlp(16)
    model[0].weight.requires_grad_(False)
    found = profile(model, mlp_batch())
    assert found.optimizer == "AdamW"
    assert any("AdamW is assumed" in note for note in found.notes)
    frozen = found.weights[0]
    assert (frozen.trains, frozen.state) == (False, 0)
    assert found.gradients == found.parameters - frozen.bytes
    assert found.moments[-1].gradients == found.gradients
    other = profile(model, mlp_batch(), torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(1000))]))
    assert other.state == found.state


def test_numbers_of_a_small_network_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    found = profile(model, torch.randn(16, 4), torch.optim.SGD(model.parameters(), lr=0.1))
    hidden, out, number = 16 * 8 * 4, 16 * 2 * 4, 4
    assert found.parameters == found.gradients == 4 * (4 * 8 + 8 + 8 * 2 + 2)
    assert found.samples == 16
    # Before ReLU's output replaces its input there are both; then the output, which its backward needs, stays.
    assert found.moments[0] == (2 * hidden, 0)
    assert [(unit.path, unit.activations, unit.output) for unit in found.units] == [
        ("0", hidden, hidden),
        ("2", out, out),
        ("", 0, out),
    ]
    assert [weight.unit for weight in found.weights] == [0, 0, 1, 1]
    # At ReLU's backward: its output and the gradients of its output and its input, with what the loop holds.
    assert found.activations == 3 * hidden + out + 2 * number
    assert found.moments[-1].gradients == found.gradients


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_shapes_say_what_numbers_do(name: str) -> None:
    planned = PLANNED[name]
    model, (x, _) = planned.model(), planned.batch(8)
    shapes, real = profile(model, x), profile(Looks(model), x)
    assert any("scaled up" in note for note in real.notes)
    assert real.activations == pytest.approx(shapes.activations, rel=0.02)
    assert real.state == shapes.state
    kept = [(unit.kind, unit.activations) for unit in shapes.units[:-1]]
    assert len(shapes.moments) == len(list(model.parameters())) + 2
    assert sum(activations for _, activations in kept) > 0.5 * shapes.moments[0].activations


def test_units_are_blocks_in_the_order_of_their_calls() -> None:
    found = profile(transformer(depth=3), transformer_batch())
    assert [unit.path for unit in found.units] == [
        *("words", "places", "blocks.0", "blocks.1", "blocks.2", "norm", "head", "")
    ]
    blocks = [unit for unit in found.units if unit.kind == "Block"]
    assert len({(unit.activations, unit.output) for unit in blocks}) == 1
    assert blocks[0].output == 8 * 64 * 64 * 4
    assert found.units[found.weights[5].unit].path == "blocks.0"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words))


def test_a_weight_that_two_layers_share_counts_once() -> None:
    found = profile(Tied(), torch.randint(50, (4, 5)))
    assert [weight.name for weight in found.weights] == ["words.weight"]
    assert found.gradients == found.moments[-1].gradients == 50 * 8 * 4
    assert found.state == 2 * 50 * 8 * 4 + 4


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Returns(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.how = how

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.layer(x)
        if self.how == "dict":
            return {"loss": nn.functional.cross_entropy(y, labels), "logits": y}
        return Output(y, [x]) if self.how == "dataclass" else (x, (y, None))


@pytest.mark.parametrize("how", ["dict", "dataclass", "tuple"])
def test_outputs_in_containers(how: str) -> None:
    x, labels = torch.randn(8, 4), torch.randint(3, (8,))
    for batch in ({"x": x, "labels": labels}, (x, labels)):
        found = profile(Returns(how), batch)
        assert found.moments[-1].gradients == found.gradients == 15 * 4
        assert found.samples == 8
    told = "what the model returns" if how == "dict" else "the mean of the model's output"
    assert told in " ".join(found.notes)


def test_what_of_a_batch_the_model_is_given_is_said() -> None:
    x, y = mlp_batch()
    found = profile(mlp(16), (x, y))
    assert "the model is called with the first of the batch's 2 parts" in found.notes
    assert "the loss is assumed to be cross_entropy" in found.notes
    named = profile(Returns("tuple"), {"x": torch.randn(8, 4), "name": ["a"] * 8})
    assert "the model gets x of the batch, as its forward names them, not name" in named.notes
    with pytest.raises(CannotProfile, match="holds no tensor"):
        profile(mlp(16), "x")


def test_recomputed_activations_are_not_kept() -> None:
    model = transformer(depth=6)
    plain = profile(model, transformer_batch())
    with recomputing("Block", model):
        again = profile(model, transformer_batch())
    of = {unit.path: unit for unit in again.units}
    assert of["blocks.1"].activations == of["blocks.1"].output
    assert again.activations < 0.6 * plain.activations
    assert all(p.grad is None for p in model.parameters())


def test_precisions() -> None:
    model, batch = transformer(depth=4), transformer_batch()

    def of(precision: str) -> Profile:
        return profile(model, batch, torch.optim.SGD(model.parameters(), momentum=0.9), precision=precision)

    full, mixed, true = of("32"), of("bf16-mixed"), of("16-true")
    assert (mixed.parameters, mixed.gradients, mixed.state) == (full.parameters, full.gradients, full.state)
    assert (true.parameters, true.gradients, true.state) == tuple(n // 2 for n in (full.parameters,) * 3)
    assert true.moments[-1].gradients == full.moments[-1].gradients // 2
    block = [next(unit for unit in one.units if unit.path == "blocks.1").activations for one in (full, mixed, true)]
    assert block[2] == pytest.approx(block[0] / 2, rel=0.1)
    assert block[2] < block[1] < block[0]
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(UsageError, match="there are 32,"):
        of("bf32")


def test_a_billion_parameters_take_no_memory() -> None:
    profile(transformer(), transformer_batch())  # whatever is imported for it
    with nbtrain.empty():
        model = billion()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = transformer_batch(8, vocabulary=16_000, length=512)
    process, most = psutil.Process(), getrusage(RUSAGE_SELF).ru_maxrss
    before = process.memory_info().rss
    found = profile(model, batch, optimizer)
    assert process.memory_info().rss - before < 50e6
    assert getrusage(RUSAGE_SELF).ru_maxrss - most < 50e3  # kB; nor was it there for a moment
    assert found.parameters > 4e9
    assert found.state == pytest.approx(2 * found.parameters, rel=1e-3)
    assert found.activations > 8e9
    assert all(p.is_meta for p in model.parameters())


def test_a_compiled_model_and_one_in_dataparallel_are_what_they_hold() -> None:
    model = mlp(16)
    plain = profile(model, mlp_batch())
    assert profile(nn.DataParallel(model), mlp_batch()) == plain
    assert profile(torch.compile(model), mlp_batch()) == plain


@pytest.mark.slow
def test_what_cannot_be_profiled_is_said_in_a_sentence() -> None:
    with pytest.raises(CannotProfile, match=r"call it with one batch first"):
        profile(nn.Sequential(nn.LazyLinear(3)), torch.randn(2, 3))
    with pytest.raises(CannotProfile, match="no trainable weights"):
        profile(nn.Linear(3, 3).requires_grad_(False), torch.randn(2, 3))
    with pytest.raises(CannotProfile, match=r"Linear cannot be run with this batch: RuntimeError.*\[2, 5\]"):
        profile(nn.Linear(3, 3), torch.randn(2, 5))
    with nbtrain.empty():
        model = Looks(nn.Linear(3, 3))
    with pytest.raises(CannotProfile, match=r"only shapes, no values.*reads values"):
        profile(model, torch.randn(2, 3))
