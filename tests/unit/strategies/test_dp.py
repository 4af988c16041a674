"""dp: a batch is cut over the devices of one process; what the loop gets is what one device gives."""

from __future__ import annotations

import copy
import enum
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.specs import RankInfo
from nbtrain.strategies.base import Component
from nbtrain.strategies.dp import DP, PreparedDP
from nbtrain.strategies.dp.threads import Threads

X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(7) % 3


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@contextmanager
def spread(*models: nn.Module, devices: int = 2) -> Iterator[PreparedDP]:
    """As in a cell."""
    strategy = DP(DP.Options())
    strategy.place = RankInfo(
        rank=0, world_size=1, local_rank=0, device="cpu", threads=1, devices=("cpu",) * devices
    )  # fmt: skip
    prepared = strategy.set_up(Component(modules={str(i): model for i, model in enumerate(models)}))
    assert isinstance(prepared, PreparedDP)
    before = threading.active_count()
    prepared.enter()
    try:
        yield prepared
    finally:
        prepared.leave()
        assert threading.active_count() == before
        assert not any("_call_impl" in vars(model) for model in models)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def is_cut(output: torch.Tensor) -> bool:
    return output.grad_fn is not None and output.grad_fn.name() == "CatBackward0"


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("devices", [2, 3, 9])
def test_a_batch_that_cannot_be_divided_evenly(devices: int) -> None:
    model = net()
    F.cross_entropy(model(X), Y).backward()
    wanted = gradients(model)
    with spread(model, devices=devices) as prepared:
        for _ in range(3):
            output = model(X)
            assert is_cut(output)
            F.cross_entropy(output, Y).backward()
            assert same(gradients(model), wanted)
        assert len(prepared.threads._workers) == min(devices, len(X)) - 1
        assert not is_cut(model(X[:1]))
        assert model(X[:0]).shape == (0, 3)


class Pair(nn.Module):
    """Returns something for each sample, something for none, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.heat = nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        return {"rows": F.normalize(self.layer(batch["x"])) * scale, "heat": self.heat.exp(), "of": ("pair", 3)}


def test_a_contrastive_loss_over_the_whole_batch() -> None:
    def loss(out: dict[str, Any]) -> torch.Tensor:
        return F.cross_entropy(out["rows"] @ out["rows"].T * out["heat"], torch.arange(7))

    model = Pair()
    loss(model({"x": X}, scale=2.0)).backward()
    wanted = gradients(model)
    with spread(model):
        out = model({"x": X}, scale=2.0)
        assert is_cut(out["rows"])
        assert out["of"] == ("pair", 3)
        loss(out).backward()
        assert same(gradients(model), wanted)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lstm(x)[0]
        return found


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x), y)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.layer(x)
        return self.hidden


@pytest.mark.parametrize(("model", "given", "says"), [
    (Sequences(), (X.view(7, 1, 6).expand(7, 5, 6),), "second dimension"),
    (WithLoss(), (X, Y), "one number for the whole batch"),
    (Keeps(), (X,), "self.hidden of Keeps"),
], ids=["the batch is second", "a loss", "an attribute"])  # fmt: skip
def test_what_cannot_be_cut_is_called_whole_and_said(model: nn.Module, given: Any, says: str) -> None:
    wanted = model(*given)
    with spread(model):
        with pytest.warns(UserWarning, match=says):
            assert torch.equal(model(*given), wanted)
        assert torch.equal(model(*given), wanted)


def test_a_hook_sees_whole_batches() -> None:
    model, seen = net(), []
    model[0].register_forward_hook(lambda *call: seen.append(len(call[2])))
    with spread(model), pytest.warns(UserWarning, match="has a hook"):
        model(X)
    assert seen == [7]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.drop, self.norm = nn.LSTM(6, 4, batch_first=True), nn.Dropout(0.5), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.drop(self.lstm(x)[0][:, -1]))
        return found


def test_a_seed_says_what_dropout_leaves_out() -> None:
    model, x = Noisy(), torch.randn(8, 5, 6)
    with spread(model):
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            runs.append([model(x) for _ in range(4)])
        assert same(*runs)
        assert not torch.equal(runs[0][0], runs[0][1])
    assert model.norm.num_batches_tracked == 8  # of the first part alone, and by no look at how it can be cut


def test_gradients_of_gradients_copies_and_pickles() -> None:
    def penalty() -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        return gradients(model)

    model = net()
    wanted = penalty()
    with spread(model):
        assert is_cut(model(X))
        assert same(penalty(), wanted)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not is_cut(twin(X))
            assert torch.allclose(twin(X), model(X), atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_model_is_cut_again_as_it_was(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = net(), X.clone().requires_grad_()
    F.cross_entropy(model(X), Y).backward()
    wanted = gradients(model)
    with spread(model, model[0]):
        for _ in range(2):
            F.cross_entropy(checkpoint(model, x, use_reentrant=reentrant), Y).backward()
            assert same(gradients(model), wanted)


def test_a_compiled_model() -> None:
    model = net()
    fast = torch.compile(model, backend="eager")
    wanted = model(X)
    with spread(fast, model):
        for called in (fast, fast, model):
            output = called(X)
            assert is_cut(output)
            assert torch.allclose(output, wanted, atol=1e-6)


class Surroundings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen: set[Any] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add(
                (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
            )
        found: torch.Tensor = self.layer(x)
        if len(x) == 3 and x.sum() > 1e3:
            raise KeyError("mine")
        return found


def test_threads_are_in_the_same_surroundings() -> None:
    model = Surroundings()
    with spread(model):
        model(X)
        for around, wanted in (
            (torch.no_grad(), (False, False, False)),
            (torch.inference_mode(), (False, True, False)),
            (torch.autocast("cpu", dtype=torch.bfloat16), (True, False, True)),
        ):
            model.seen.clear()
            with around:
                output = model(X)
            assert model.seen == {wanted}
        assert output.dtype == torch.bfloat16


@pytest.mark.parametrize(("cores", "devices", "share"), [(5, 2, 2), (2, 3, 1)])
def test_parts_share_the_cores_and_the_loop_has_them_all_again(cores: int, devices: int, share: int) -> None:
    before = torch.get_num_threads()
    threads = Threads([torch.device("cpu")] * devices)
    try:
        torch.set_num_threads(cores)
        for count in (devices, 1, devices):
            assert threads.run([torch.get_num_threads] * count) == [share if count > 1 else cores] * count
            assert torch.get_num_threads() == cores
        with pytest.raises(ZeroDivisionError):
            threads.run([lambda: 1 / 0] * devices)
        assert torch.get_num_threads() == cores
        torch.set_num_threads(1)  # by the user
        assert threads.run([torch.get_num_threads] * devices) == [1] * devices
    finally:
        torch.set_num_threads(before)
        threads.close()


def test_an_error_in_a_thread_is_the_users_own() -> None:
    model = Surroundings()
    with spread(model):
        for _ in range(2):  # after the first, `seen` has something in it, and the second is tried again
            model(X)
        bad = X.clone()
        bad[-1] = 1e5
        with pytest.raises(KeyError, match="mine") as caught:
            model(bad)
        assert caught.traceback[-1].frame.code.name == "forward"
        assert is_cut(model(X))


def test_an_interrupt_ends_the_threads_too() -> None:
    threads, begun, ended = Threads([torch.device("cpu")] * 2), threading.Event(), threading.Event()

    def forever() -> None:
        begun.set()
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    def interrupted() -> None:
        assert begun.wait(10)
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        threads.run([interrupted, forever])
    assert ended.wait(5)
    threads.close()
    assert threading.active_count() == before


CONFIG = {"batch": False}


class Which(enum.Enum):
    ROWS = 1
    BATCH = 2


class Asks(nn.Module):
    """Looks at the whole batch where something says so: an argument, an attribute, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.alpha = 0.0
        self.register_buffer("flag", torch.zeros(1))
        self.calls = 0

    def forward(self, x: torch.Tensor, on: Any = False) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.calls += 1
        if isinstance(on, slice):
            return y[on]
        if callable(on):
            on = on()
        on = on in (True, Which.BATCH, frozenset({1}), range(3)) or bool(self.flag) or self.calls == 0
        on = on or CONFIG["batch"]
        return y - (float(on) + self.alpha) * y.mean(0)


def _attribute(model: Asks) -> None:
    model.alpha = 0.5


def _buffer(model: Asks) -> None:
    model.flag.fill_(1)


def _global(model: Asks) -> None:
    CONFIG["batch"] = True


def _counter(model: Asks) -> None:
    model.calls = -1


@pytest.mark.parametrize(("first", "then"), [
    (False, True),
    (Which.ROWS, Which.BATCH),
    (frozenset({0}), frozenset({1})),
    (range(2), range(3)),
    (slice(None), slice(0, 2)),
    (lambda: False, lambda: True),
    (torch.tensor(0.0), torch.tensor(1.0)),
    (False, _attribute),
    (False, _buffer),
    (False, _counter),
    (False, _global),
], ids=["bool", "enum", "set", "range", "slice", "function", "number", "attribute", "buffer", "counter",
        "global"])  # fmt: skip
def test_a_model_that_begins_to_look_at_the_whole_batch(first: Any, then: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call is cut as the first one was only where nothing says otherwise."""
    monkeypatch.setitem(CONFIG, "batch", False)
    torch.manual_seed(1)
    model = Asks()
    alone = copy.deepcopy(model)
    with spread(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in (first, then, first, then):
            if given in (_attribute, _buffer, _counter, _global):
                given(model)
                given(alone)
                given = False
            out, wanted = model(X, given), alone(X, given)
            torch.testing.assert_close(out, wanted)
