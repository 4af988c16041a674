"""Activations that are computed again: less is kept, and every number stays what it was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nbtrain.base.errors import UsageError
from nbtrain.notebook.magics.line.options import BY_NAME
from nbtrain.notebook.magics.line.parse import parse
from nbtrain.worker.precision.activation_checkpointing import ActivationCheckpointing
from tests.support.ranks import run_on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.dropout(self.inner(x))


class Wide(Block):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale=scale).tanh()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Wide()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


class Nested(nn.Module):
    """Blocks within layers, each of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Outer(), Outer(), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


@contextmanager
def recomputing(model: nn.Module, *names: str) -> Iterator[ActivationCheckpointing]:
    recompute = ActivationCheckpointing()
    recompute.choose(names, [model])
    recompute.on()
    try:
        yield recompute
    finally:
        recompute.off()


def step(model: nn.Module, dtype: torch.dtype | None = None, run: Any = None) -> tuple[list[torch.Tensor], int, list]:
    """Gradients; bytes kept between forward and backward, each storage once; the state of the random stream."""
    torch.manual_seed(3)
    x = torch.randn(32, 16, requires_grad=True)
    own = {getattr(p, "_local_tensor", p).untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with saved, torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = (model if run is None else run)(x).square().mean()
    loss.backward()
    return [x.grad, *(p.grad for p in model.parameters())], sum(kept.values()), torch.get_rng_state().tolist()


@pytest.mark.sample(first=3)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("names", [("Block", "Wide"), ("Outer",), ("Outer", "Block", "Wide", "Linear")])
def test_less_is_kept_and_gradients_are_the_same_to_the_last_bit(names: tuple[str, ...], dtype: Any) -> None:
    model = Nested()
    plain, much, stream = step(model, dtype)
    with recomputing(model, *names):
        again, little, after = step(model, dtype)
    assert all(map(torch.equal, plain, again))
    assert after == stream
    assert little < much / 5
    assert step(model, dtype)[1] == much


def test_the_outermost_is_computed_twice_and_not_what_is_in_it_thrice() -> None:
    model, calls = Nested(), []
    model.first.blocks[0].inner.register_forward_pre_hook(lambda *_: calls.append(1))
    with recomputing(model, "Outer", "Block", "Sequential"):
        step(model)
    assert len(calls) == 2


def test_hooks_see_whole_forwards_only() -> None:
    """A strategy's hooks take a forward that is left by an exception for a failure."""
    model, seen = Nested(), []
    for block in model.first.blocks:
        block.inner.register_forward_hook(lambda module, args, output: seen.append(output), always_call=True)
    with recomputing(model, "Outer"):
        step(model)
    assert len(seen) == 4
    assert all(isinstance(output, torch.Tensor) for output in seen)


def test_without_gradients_nothing_is_computed_again() -> None:
    model = Nested()
    with recomputing(model, "Outer"), torch.no_grad():
        assert model(torch.randn(2, 16)).grad_fn is None


def test_modules_and_their_copies_stay_what_they_are() -> None:
    model, own = Nested(), vars(Block)["forward"]
    names = [list(vars(cls)) for cls in (Block, Wide)]
    with recomputing(model, "Block", "Wide"):
        block = model.first.blocks[0]
        assert type(block) is Block
        assert "forward" not in vars(block)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            next(twin.parameters()).zero_()
        torch.save(model, file := io.BytesIO())
        again = pickle.loads(pickle.dumps(model))
        x = torch.randn(2, 16)
        model.eval(), twin.eval(), again.eval()
        assert not torch.equal(model(x), twin(x))  # it computes with weights of its own
        assert torch.equal(model(x), again(x))
    assert vars(Block)["forward"] is own
    assert [list(vars(cls)) for cls in (Block, Wide)] == names
    file.seek(0)
    assert type(torch.load(file, weights_only=False).first.blocks[0]) is Block


def test_a_subclass_made_by_a_strategy_inherits_it() -> None:
    model = Nested()
    with recomputing(model, "Block"):
        for module in model.modules():
            if type(module) is Block:
                module.__class__ = type("Sharded", (Block,), {})
        little = step(model)[1]
    assert little < step(model)[1]


def test_a_compiled_model_recomputes_too() -> None:
    torch.compiler.reset()
    model = Nested().eval()  # the compiler draws dropout in an order of its own
    plain, _, _ = step(model)
    with recomputing(model, "Outer", "Block"):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        again, _, _ = step(model, run=compiled)
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other)
    torch.compiler.reset()


def sharded(rank: int, dtype: torch.dtype | None) -> tuple[int, int]:
    torch.manual_seed(0)
    model = Nested()
    plain, _, _ = step(model, dtype)
    for block in [model.first, model.second]:
        fully_shard(block)
    fully_shard(model)
    much = step(model, dtype)[1]
    with recomputing(model, "Block", "FSDPOuter", "Linear"):
        again, little, _ = step(model, dtype)
    for one, other in zip(plain[1:], again[1:], strict=True):
        assert isinstance(other, DTensor)
        torch.testing.assert_close(one, other.full_tensor())
    return little, much


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_under_fully_shard_numbers_stay_and_less_is_kept(dtype: Any) -> None:
    for little, much in run_on_ranks(sharded, dtype):
        assert little < much


def test_models_that_the_cell_makes_are_met_when_they_are_set_up() -> None:
    recompute = ActivationCheckpointing()
    recompute.choose(("Outer",), [])
    recompute.on()
    recompute.learn([model := Nested()])
    little = step(model)[1]
    recompute.off()
    assert little < step(model)[1]


def test_a_name_that_no_module_has() -> None:
    with pytest.raises(
        UsageError, match=r"Blok: no module here is a Blok; there are Nested \(1\), Outer \(2\), .*Block \(2"
    ):
        ActivationCheckpointing().choose(("Blok",), [Nested()])
    model = Nested()
    model.head.forward = lambda x: x  # type: ignore[assignment,method-assign]
    with pytest.raises(UsageError, match="a forward of its own"):
        ActivationCheckpointing().choose(("Linear",), [model])


@pytest.mark.parametrize(
    ("typed", "names"),
    [("Block,Wide", ("Block", "Wide")), ("[Kind, Later]", ("Block", "Later")), ("nn.Linear", ("Linear",)),
     ("several", ("Block", "Wide")), ("text", ("Outer",))],
)  # fmt: skip
def test_what_may_be_written(typed: str, names: tuple[str, ...]) -> None:
    notebook = {"Kind": Block, "nn": nn, "several": (Block, Wide), "text": "Outer"}
    assert parse(f"--checkpoint-activations {typed}", notebook).value("checkpoint_activations") == names
    assert BY_NAME["checkpoint_activations"].default == ()
