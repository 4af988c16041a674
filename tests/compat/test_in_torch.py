"""What nbtrain/compat relies on in torch and no name tells: one small test for each thing."""

from __future__ import annotations

import copy
import logging
import os
import threading
from abc import ABC
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, new_class
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental import proxy_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from nbtrain.compat import (
    autograd_engine,
    compiler,
    cuda,
    dtensor,
    extensions,
    fake_tensors,
    function_modes,
    internals,
    layers,
    loaders,
    modules,
    optimizers,
    pickling,
    pytree,
    tensors,
)
from nbtrain.compat.replaced_functions import FUNCTIONAL_CALL, WRAP
from tests.support.ranks import run_on_ranks

T = TypeVar("T")

# --- engine --------------------------------------------------------------------------------------


def in_hook(see: Any, **options: Any) -> Any:
    """What `see` returns in the middle of a backward."""
    x, found = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: found.append(see()))
    y.sum().backward(**options)
    return found[0]


def test_a_backward_is_told_from_what_is_around_it() -> None:
    assert not autograd_engine.in_backward()
    assert in_hook(autograd_engine.in_backward) is True
    assert not autograd_engine.in_backward()
    elsewhere: list[bool] = []

    def see() -> None:
        thread = threading.Thread(target=lambda: elsewhere.append(autograd_engine.in_backward()))
        thread.start()
        thread.join()

    in_hook(see)
    assert elsewhere == [False]


def test_a_graph_says_what_was_added_up_and_what_it_was_divided_by() -> None:
    out, y = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, -100, 2])
    weight = torch.tensor([1.0, 2.0, 4.0])
    mean, total = F.cross_entropy(out, y), F.cross_entropy(out, y, reduction="sum")
    assert not autograd_engine.was_summed(mean.grad_fn)
    assert autograd_engine.was_summed(total.grad_fn)
    assert autograd_engine.summed_shape(out.sum().grad_fn) == (4, 3)
    assert autograd_engine.summed_shape(mean.grad_fn) == ()
    assert autograd_engine.divisor(mean.grad_fn) == 3
    assert autograd_engine.divisor(F.cross_entropy(out, y, weight).grad_fn) == 7
    assert autograd_engine.divisor(F.nll_loss(out[None].transpose(1, 2), y[None]).grad_fn) == 3
    assert autograd_engine.divisor(total.grad_fn) is None
    assert autograd_engine.divisor((total / 4).grad_fn) == 4
    assert autograd_engine.divisor((total / torch.tensor(5.0)).grad_fn) == 5
    assert autograd_engine.divisor((out / weight).grad_fn) is None
    doubled = (total * 2).grad_fn
    assert autograd_engine.node_name(doubled) in autograd_engine.LINEAR
    assert autograd_engine.factors(doubled) == [2.0]
    assert autograd_engine.node_name((total / 4).grad_fn) in autograd_engine.DIVISIONS
    smoothed = F.cross_entropy(out, y, label_smoothing=0.1).grad_fn
    names = {autograd_engine.node_name(node) for node, _ in smoothed.next_functions}
    assert {autograd_engine.node_name(smoothed), *names} <= autograd_engine.LINEAR
    assert autograd_engine.is_linear(mean.mean().grad_fn)
    assert not autograd_engine.is_linear(out.mean().grad_fn)


AVERAGED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], int | None]] = {
    "all": (lambda out, t: out.mean(), 12),
    "a dimension": (lambda out, t: out.mean(0), 4),
    "the last": (lambda out, t: out.mean(-1, keepdim=True), 3),
    "all dimensions": (lambda out, t: out.mean((0, -1)), 12),
    "no dimension": (lambda out, t: out.mean(()), 12),
    "a number": (lambda out, t: out.sum().mean(-1), 1),
    "some": (lambda out, t: out[t > 0.5].mean(), 6),
    **{
        function.__name__: (function, 12)
        for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss,
                         F.binary_cross_entropy_with_logits, F.poisson_nll_loss)
    },
    "probabilities": (lambda out, t: F.binary_cross_entropy(out.sigmoid(), t), 12),
    "the target's graph": (lambda out, t: F.mse_loss(t, out), 12),
    "targets that are probabilities": (F.cross_entropy, 4),
    "a sum": (lambda out, t: F.mse_loss(out, t, reduction="sum"), None),
    "each": (lambda out, t: F.mse_loss(out, t, reduction="none"), None),
    "targets, which divisor knows": (lambda out, t: F.cross_entropy(out, t.argmax(1)), None),
    "no mean": (lambda out, t: out.square(), None),
}  # fmt: skip


@pytest.mark.parametrize("name", AVERAGED)
def test_a_graph_says_how_many_a_mean_is_over(name: str) -> None:
    loss, wanted = AVERAGED[name]
    out = torch.randn(4, 3, requires_grad=True)
    assert autograd_engine.averaged(loss(out, torch.arange(12.0).reshape(4, 3) / 11).grad_fn) == wanted


def test_a_mean_of_another_version_is_none() -> None:
    for name in ("MeanBackward0", "MeanBackward1", "DivBackward1", "MseLossBackward0"):
        node = SimpleNamespace(
            name=lambda name=name: name, next_functions=((SimpleNamespace(), 0),), _saved_reduction=1
        )
        assert autograd_engine.averaged(node) is None
        assert not autograd_engine.is_linear(node)


def test_a_function_is_known_by_its_node() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 2

    doubled: Any = Doubled.apply(torch.ones(2, requires_grad=True))  # type: ignore[no-untyped-call]
    assert autograd_engine.is_of(Doubled, doubled.grad_fn)
    assert not autograd_engine.is_of(Doubled, (doubled * 2).grad_fn)


def test_whether_the_graph_is_kept() -> None:
    assert in_hook(autograd_engine.keeps_graph) is False
    assert in_hook(autograd_engine.keeps_graph, retain_graph=True) is True


def test_the_end_of_a_backward_comes_once_and_after_all_gradients() -> None:
    x, y = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    found: list[bool] = []
    asked: list[int] = []

    def ask(grad: torch.Tensor) -> None:
        if not asked:
            asked.append(1)
            autograd_engine.after_backward(lambda: found.append(x.grad is not None and y.grad is not None))

    for one in (x, y):
        one.register_hook(ask)
    (x * y).sum().backward()
    assert found == [True]
    (x * y).sum().backward()
    assert found == [True]


def test_hooks_on_what_is_saved() -> None:
    assert not autograd_engine.saves_by_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert autograd_engine.saves_by_hooks()
    assert not autograd_engine.saves_by_hooks()


def test_inside_of_a_functional_transform() -> None:
    found: list[bool] = []

    def see(x: torch.Tensor) -> torch.Tensor:
        found.append(autograd_engine.in_functional_transform())
        return x.sum()

    torch.func.vmap(see)(torch.ones(2, 2))
    torch.func.grad(see)(torch.ones(2))
    assert found == [True, True]
    assert not autograd_engine.in_functional_transform()


def test_what_torch_traces() -> None:
    found: list[bool] = []

    def see(x: torch.Tensor) -> torch.Tensor:
        found.append(autograd_engine.is_traced())
        return x.sum()

    proxy_tensor.make_fx(see)(torch.ones(2))
    torch.func.grad(see)(torch.ones(2))
    assert found == [True, False]


def test_what_torch_follows_and_where_it_does_not() -> None:
    x, found = torch.ones(2), []

    def see(given: torch.Tensor) -> torch.Tensor:
        with autograd_engine.outside_transforms():
            found.append((autograd_engine.in_functional_transform(), autograd_engine.is_plain(x * 2)))
        found.append((autograd_engine.is_followed(), autograd_engine.is_plain(given * x)))
        return given.sum()

    for transform in (torch.func.grad, torch.func.vmap, torch.func.vjp, torch.func.jvp):
        called = transform(see, *{torch.func.vjp: (x,), torch.func.jvp: ((x,), (x,))}.get(transform, ()))
        if callable(called):
            called(x)
        assert found == [(False, True), (True, False)], transform
        found.clear()
    with torch.autograd.forward_ad.dual_level():
        assert autograd_engine.is_followed()
    assert not autograd_engine.is_followed()


ONE, LINE = torch.ones(2), nn.Linear(2, 1)
COME_TO = {
    WRAP[0]: (
        lambda: torch.func.grad(torch.sum)(ONE),
        lambda: torch.func.vjp(torch.sum, ONE),
        lambda: torch.func.jacrev(torch.sum)(ONE),
        lambda: torch.func.hessian(torch.sum)(ONE),
    ),
    WRAP[1]: (lambda: torch.func.vmap(torch.sum)(ONE[None]),),
    FUNCTIONAL_CALL: (
        lambda: torch.func.functional_call(LINE, dict(LINE.named_parameters()), ONE),
        lambda: torch.func.functional_call(
            module=LINE, parameter_and_buffer_dicts=[{"weight": LINE.weight}, {"bias": LINE.bias}], args=(ONE,)
        ),
        lambda: torch.nn.utils.stateless.functional_call(LINE, parameters_and_buffers={}, args=ONE),
    ),
}


@pytest.mark.filterwarnings("ignore:.*functional_call:FutureWarning")
@pytest.mark.parametrize(("path", "which"), [(path, i) for path, calls in COME_TO.items() for i in range(len(calls))])
def test_where_torch_func_takes_its_tensors(path: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights in one dict, whichever way they are given."""
    old, given = internals.find(path), []
    monkeypatch.setattr(path, lambda *args, **kwargs: given.append(args) or old(*args, **kwargs))
    COME_TO[path][which]()
    assert given
    for module, weights, *_ in given if path == FUNCTIONAL_CALL else ():
        assert (module, type(weights)) == (LINE, dict)


def test_a_dual_number_is_made_by_one_function() -> None:
    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    found: list[str] = []
    with torch.autograd.forward_ad.dual_level():
        torch.autograd.forward_ad.make_dual(torch.ones(2).as_subclass(Seen), torch.ones(2))
        assert autograd_engine.MAKE_DUAL in found
    found.clear()
    torch.func.jvp(torch.sum, (torch.ones(2).as_subclass(Seen),), (torch.ones(2),))
    assert autograd_engine.MAKE_DUAL in found


def test_the_graph_below_a_tensor() -> None:
    x = torch.ones(2, requires_grad=True)
    names = [node.name() for node in autograd_engine.nodes_below((x * 2 + x).sum())]
    assert sorted(names) == ["AddBackward0", "MulBackward0", "SumBackward0", "torch::autograd::AccumulateGrad"]
    assert list(autograd_engine.nodes_below(torch.ones(2))) == []


def test_what_a_transform_differentiates_is_known_again() -> None:
    weight, mapped = torch.ones(2, requires_grad=True), torch.ones(3, 2)
    found: list[Any] = []

    def inner(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found.append(
            (
                autograd_engine.unwrapped(w) is weight,
                autograd_engine.is_plain(autograd_engine.unwrapped(x)),
                autograd_engine.is_plain(w),
            )
        )
        return (w * x).sum()

    torch.func.grad(inner)(weight, mapped)
    torch.func.vmap(torch.func.grad(inner), (None, 0))(weight, mapped)
    assert found == [(True, True, False), (True, False, False)]
    assert autograd_engine.unwrapped(weight) is weight
    assert autograd_engine.unwrapped("w") == "w"


def not_compiled(rank: int, folder: str) -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    assert extensions.compiled("nbtrain_has_none") is None
    assert extensions.its.check() == []


def test_an_extension_that_was_not_compiled(tmp_path: Path) -> None:
    """In another process: setuptools, which torch imports for it, leaves its traces."""
    run_on_ranks(not_compiled, str(tmp_path), world_size=1)


def test_an_ordinary_node_gathers_no_unit() -> None:
    """Those of FSDP2 are in test_on_ranks."""
    assert not autograd_engine.is_unit_gatherer((torch.ones(2, requires_grad=True) * 2).grad_fn)


class Refuses(torch.Tensor):
    """Cannot be copied from."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise RuntimeError("write `it's` \n above")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_what_load_state_dict_has_caught_is_known() -> None:
    state = {"weight": torch.zeros(2, 2).as_subclass(Refuses), "bias": torch.zeros(2)}
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 2).load_state_dict(state)
    assert modules.said_while_loading(caught.value) == "write `it's` \n above"
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 3).load_state_dict(nn.Linear(2, 2).state_dict())
    assert modules.said_while_loading(caught.value) == ""


def test_hooks_are_counted() -> None:
    before = modules.hooks_made()
    torch.nn.Linear(1, 1).register_forward_hook(lambda *_: None).remove()
    assert modules.hooks_made() == before + 1


# --- fake ----------------------------------------------------------------------------------------


def test_who_asks_for_numbers_where_there_are_none_is_told_from_others() -> None:
    with fake_tensors.FakeTensorMode() as mode:
        x = torch.ones(3)
        assert isinstance(x, fake_tensors.FakeTensor)
        assert fake_tensors.current_mode() is mode
        with pytest.raises(fake_tensors.ASKED_FOR_A_NUMBER):
            x.sum().item()
        with pytest.raises(Exception) as numbers:
            x.sum().item()
        with pytest.raises(Exception) as sizes:
            x.nonzero()
        with pytest.raises(Exception) as shapes:
            x @ torch.ones(4)
    for caught in (numbers, sizes):
        assert fake_tensors.wants_numbers(caught.value)
        assert fake_tensors.is_of_shapes(caught.value)
    assert not fake_tensors.wants_numbers(shapes.value)
    assert fake_tensors.current_mode() is None


def test_what_cannot_be_done_without_numbers_is_said_under_a_name() -> None:
    assert fake_tensors.LOGGER in logging.Logger.manager.loggerDict
    with fake_tensors.quiet():
        assert logging.getLogger(fake_tensors.LOGGER).disabled
    assert not logging.getLogger(fake_tensors.LOGGER).disabled


class Sees(fake_tensors.DispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(operation)
        return operation(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name == "__get__":
            name = function.__self__.__name__
        self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_modes_are_counted_and_can_be_left_out() -> None:
    assert (fake_tensors.dispatch_modes(), fake_tensors.function_modes()) == (0, 0)
    with Sees() as mode, Calls():
        assert (fake_tensors.dispatch_modes(), fake_tensors.function_modes()) == (1, 1)
        torch.ones(2)
        seen = len(mode.operations)
        assert seen > 0
        with fake_tensors.without_modes():
            torch.ones(2)
        assert len(mode.operations) == seen
    assert (fake_tensors.dispatch_modes(), fake_tensors.function_modes()) == (0, 0)


def test_an_operation_says_what_it_writes_to() -> None:
    with Sees() as mode:
        torch.ones(2).add_(1)
        torch.ones(1).item()
    writing, reading = mode.operations[-3], mode.operations[-1]
    assert fake_tensors.packet_of(writing) is torch.ops.aten.add_
    assert fake_tensors.schema_of(writing).arguments[0].alias_info.is_write
    assert reading is fake_tensors.READS_A_NUMBER
    assert not any(one.alias_info for one in fake_tensors.schema_of(reading).arguments)
    assert fake_tensors.schema_of(len) is None
    assert fake_tensors.packet_of(len) is len


def test_a_mode_is_told_by_name_who_only_asks_or_switches() -> None:
    x = torch.ones(2)
    for function in (lambda: tensors.is_view(x), torch.no_grad().__enter__):
        with Calls() as mode, torch.enable_grad():
            mode.names.clear()
            try:
                function()
                names = {*mode.names}
            finally:
                torch.set_grad_enabled(True)
        assert names
        assert names <= fake_tensors.ASKS_OF_FORM | fake_tensors.SWITCHES, names
    with Calls() as mode, torch.autocast("cpu", dtype=torch.bfloat16):
        pass
    assert {*mode.names} <= fake_tensors.SWITCHES


def test_attention_and_networks_that_are_one_operation() -> None:
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    with Sees() as mode:
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    seen = {fake_tensors.packet_of(one) for one in mode.operations}
    for backward in (False, True):
        (packet,) = fake_tensors.attention_on_cpu(backward)
        assert packet in seen
    assert fake_tensors.packets("no_such_operation") == []
    assert fake_tensors.whole_networks()
    assert fake_tensors.packets("add", "mul") == [torch.ops.aten.add, torch.ops.aten.mul]


# --- compiler ------------------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Any:
    """`compile` with a back end that needs no C++ compiler, and what it was given."""
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    yield lambda function: torch.compile(function, backend=keep), graphs
    torch.compiler.reset()


def test_what_is_outside_of_graphs_is_called_as_it_is(compiled: Any) -> None:
    compile, graphs = compiled
    found: list[bool] = []

    @compiler.outside_graphs
    def outside(x: torch.Tensor) -> torch.Tensor:
        found.append(torch.compiler.is_compiling())
        return x + 1

    result = compile(lambda x: outside(x * 3) * 2)(torch.ones(2))
    assert result.tolist() == [8.0, 8.0]
    assert found == [False]
    assert len(graphs) == 2
    assert compiler.is_loaded()
    assert compiler.has_compiled()


@pytest.mark.parametrize("marks", [False, True])
def test_a_marked_method_is_no_part_of_its_callers_graph(compiled: Any, marks: bool) -> None:
    compile, graphs = compiled

    def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    if marks:
        compiler.mark_outside_graphs(call)
    module = type("Plain", (nn.Module,), {"__call__": call})()
    assert compile(lambda x: module(x * 3) * 2)(torch.ones(2)).tolist() == [8.0, 8.0]
    assert (len(graphs) > 1) == marks


def test_steps_that_are_not_compiled(compiled: Any) -> None:
    compile, graphs = compiled
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 1.0)
    found: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(torch.compiler.is_compiling()))

    def step() -> None:
        optimizer.step()

    weight.grad = torch.ones(2)
    with compiler.steps_outside_graphs([optimizer]):
        for way in (optimizer.step, step):
            compile(way)()
    assert not graphs
    assert found == [False, False]
    assert weight.tolist() == [-1.0, -1.0]
    torch.compiler.reset()
    compile(optimizer.step)()
    assert graphs


def test_a_compiled_module_and_its_call(compiled: Any) -> None:
    compile, graphs = compiled
    plain = nn.Linear(2, 2)
    model = compile(plain)
    assert modules.compiled(model) is plain
    assert modules.compiled(plain) is None
    assert modules.compiled_parts(nn.Sequential(plain, model)) == [model]
    assert modules.is_compiled_class(type(model))
    assert not modules.is_compiled_class(type(plain))
    assert callable(modules.compiled_by(model))
    assert [modules.uncompiled_path(name) for name in model.state_dict()] == [*plain.state_dict()]
    other = copy.copy(model)
    vars(other)[modules.CHILDREN] = {"_orig_mod": nn.Linear(2, 2)}
    modules.recompile_call(other)
    inner, x = modules.compiled(other), torch.ones(1, 2)
    torch.testing.assert_close(other(x), inner(x))
    assert not torch.equal(other(x), model(x))
    assert graphs
    assert getattr(plain, modules.COMPILED_CALL) is None
    plain.compile(backend="eager")
    assert vars(plain)[modules.COMPILED_CALL] is not None


# --- cuda ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bases", [(nn.Module,), (ABC, nn.Module), (Generic[T], nn.Linear)])
def test_a_class_before_that_of_a_module(bases: Any) -> None:
    class First:
        def forward(self, *args: Any) -> str:
            return "first"

    cls = new_class("Cls", bases, exec_body=lambda body: body.update(size=3))
    module = cls(2, 2) if issubclass(cls, nn.Linear) else cls()
    module.__class__ = modules.class_before(First, cls, "Both", {"more": 1})
    assert (module(1), module.size, module.more, type(module).__name__) == ("first", 3, 1, "Both")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_an_error_for_want_of_a_card_is_known() -> None:
    with pytest.raises(Exception, match=r"CUDA|NVIDIA") as raised:
        torch.zeros(1).cuda()
    assert cuda.asked_for_a_card(raised.value)
    assert not cuda.asked_for_a_card(ValueError())


# --- layers --------------------------------------------------------------------------------------


def test_norm_layers_have_one_class() -> None:
    for norm in (nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2), nn.LazyBatchNorm2d()):
        assert isinstance(norm, layers.NormLayer)
    assert not isinstance(nn.LayerNorm(2), layers.NormLayer)
    layers.check_input(nn.SyncBatchNorm(2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="at least 2D input"):
        layers.check_input(nn.SyncBatchNorm(2), torch.ones(3))


class Loud(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return "loud"

    def forward(self, x: int, more: int = 0) -> int:
        return x + more


def test_spectral_norms_are_known_and_go_on_by_their_iterations() -> None:
    for norm in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        layer = norm(nn.Linear(4, 5))
        ((part, found),) = [(part, found) for part in layer.modules() for found in layers.power_iterations(part)]
        before = [buffer.clone() for buffer in part.buffers(recurse=False)]
        found.n_power_iterations = 0
        layer(torch.ones(2, 4))
        assert all(map(torch.equal, before, part.buffers(recurse=False)))
        found.n_power_iterations = 1
        with torch.no_grad():
            for weight in layer.parameters():  # of those it was made for it may know the norm to the last bit
                weight.normal_()
        layer(torch.ones(2, 4))
        assert not any(map(torch.equal, before, part.buffers(recurse=False)))


def test_a_call_below_the_class_goes_through_hooks() -> None:
    module = Loud()
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    module.register_forward_hook(lambda module, args, out: out * 10)
    assert module(1) == "loud"
    assert layers.call_as_torch_does(module, 1, more=1) == 30


def test_hooks_of_all_optimizers_are_passed_by() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    heard: list[int] = []
    handle = register_optimizer_step_pre_hook(lambda *_: heard.append(1))
    try:
        optimizers.unhooked(torch.optim.SGD)(optimizer)
        assert not heard
        optimizer.step()
        assert heard
    finally:
        handle.remove()
    assert optimizers.without_hooks(vars(optimizer)).keys() >= {"param_groups", "state", "defaults"}
    assert not any("hooks" in name for name in optimizers.without_hooks(vars(optimizer)))


def test_a_schedule_says_what_it_is_made_of() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=5) for _ in range(2)]
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])
    assert optimizers.inner_schedules(both) == parts
    assert optimizers.milestones(both) == [5]
    assert optimizers.inner_schedules(parts[0]) == []


def test_what_a_view_shows() -> None:
    tensor = torch.zeros(4)
    assert tensors.shown_by(tensor) is tensor
    assert tensors.shown_by(tensor[1:].view(3, 1)) is tensor


def test_what_schemas_say_of_functions() -> None:
    facts = dtensor.facts
    assert facts("nothing of this name") == dtensor.Facts()
    assert all(facts(name).elementwise for name in ("mul", "mul_", "lerp_", "addcdiv_", "sqrt", "clamp_", "erfinv_"))
    assert not any(facts(name).elementwise for name in ("cumsum", "sum", "topk", "view", "softmax", "std", "argmax"))
    assert all(facts(name).draws for name in ("normal_", "bernoulli", "dropout", "randn_like", "multinomial"))
    assert all(facts(name).shows for name in ("view", "select", "chunk", "t", "reshape", "to", "contiguous"))
    made = ("cumsum", "sort", "topk", "linalg_svd", "cat", "mse_loss", "matmul", "index_add", "std")
    assert all(facts(name).makes for name in made)
    assert not any(facts(name).makes for name in ("mul_", "view", "index_put_", "set_", "no_such_function"))
    assert all(facts(name).writes for name in ("index_add_", "triu_", "cumsum_", "copy_", "renorm_"))
    assert not any(facts(name).writes for name in ("t_", "set_", "resize_", "squeeze_", "sort", "mul"))


def test_what_is_pickled_of_numpy_is_read_without_running_code(tmp_path: Path) -> None:
    kept = {"array": np.arange(3.0), "number": np.float64(2)}
    torch.save(kept, tmp_path / "kept.pt")
    with torch.serialization.safe_globals(pickling.of_numpy()):
        found = torch.load(tmp_path / "kept.pt", weights_only=True)
    assert (found["array"] == kept["array"]).all()
    assert found["number"] == 2


# --- loaders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_where_an_iterator_stands(workers: int) -> None:
    run_on_ranks(_stands, workers, world_size=1)  # workers leave a handler of signals in their process


def _stands(rank: int, workers: int) -> None:
    how = "fork" if workers else None
    loader = DataLoader(list(range(12)), batch_size=2, num_workers=workers, multiprocessing_context=how)
    iterator = iter(loader)
    assert isinstance(iterator, torch.utils.data.dataloader._BaseDataLoaderIter)
    assert loaders.ITERATOR.endswith("_BaseDataLoaderIter")
    assert loaders.handed_out(iterator) == 0
    assert next(iterator).tolist() == [0, 1]
    assert loaders.handed_out(iterator) == 1
    loaders.pass_over(iterator)
    assert loaders.handed_out(iterator) == 1
    loaders.set_handed_out(iterator, 2)
    assert next(iterator).tolist() == [4, 5]
    assert loaders.handed_out(iterator) == 3
    assert sum(1 for _ in iterator) == 3
    with pytest.raises(StopIteration):
        loaders.pass_over(iterator)
    loaders.end_workers(iterator)


def test_the_seed_of_its_workers() -> None:
    torch.manual_seed(3)
    iterator = iter(DataLoader(list(range(4))))
    torch.manual_seed(3)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    assert loaders.base_seed(iterator) == seed
    loaders.set_base_seed(iterator, 5)
    assert loaders.base_seed(iterator) == 5


def test_workers_that_live_on() -> None:
    run_on_ranks(_live_on, world_size=1)


def _live_on(rank: int) -> None:
    loader = DataLoader(
        list(range(8)), batch_size=2, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    assert loaders.running(loader) is None
    iterator = iter(loader)
    assert loaders.running(loader) is iterator
    assert vars(loader)[loaders.RUNNING] is iterator
    assert sum(1 for _ in iterator) == 4
    assert iter(loader) is iterator
    object.__setattr__(loader, "batch_sampler", [[7], [0]])
    loaders.take_batches_anew(loader, iterator)
    assert len([*iter(loader)]) == 2
    workers = [*iterator._workers]  # type: ignore[attr-defined]
    loaders.end_workers(iterator)
    assert not any(worker.is_alive() for worker in workers)
    assert loaders.running(DataLoader([1])) is None


def test_a_loader_is_asked_for_batches_by_a_property(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders.BATCHES, property(lambda loader: [[3], [1]]))
    assert [batch.tolist() for batch in DataLoader(list(range(4)))] == [[3], [1]]


# --- modules -------------------------------------------------------------------------------------


def test_a_modules_tables_are_what_it_has() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    linear, norm = module
    assert modules.children(module) == {"0": linear, "1": norm}
    assert [*modules.parameters(linear)] == ["weight", "bias"]
    assert [*modules.buffers(norm)] == ["running_mean", "running_var", "num_batches_tracked"]
    modules.parameters(linear)["bias"] = None  # type: ignore[assignment]
    modules.buffers(norm)["running_mean"] = torch.full((2,), 3.0)
    modules.children(module)["1"] = nn.Identity()
    assert linear.bias is None
    assert norm.running_mean.tolist() == [3.0, 3.0]
    assert isinstance(module[1], nn.Identity)
    for table, found in zip(modules.TABLES, (modules.parameters, modules.buffers, modules.children), strict=True):
        assert vars(module)[table] is found(module)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert vars(module)[modules.NOT_SAVED] == {"scratch"}


class _HidesABuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("hidden", torch.ones(1))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())


class _WalksByItself(nn.Sequential):
    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        yield "itself", self


def _tree(kind: str) -> nn.Module:
    shared, norm = nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)
    if kind == "script":
        return torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    if kind == "lstm":
        return nn.LSTM(2, 2, num_layers=2, bidirectional=True)
    model = nn.Sequential(shared, nn.Sequential(norm, shared), nn.ModuleDict({"a": norm, "b": nn.PReLU()}))
    model.register_module("nothing", None)
    model[1].tied = shared.weight
    model[1].register_parameter("none", None)
    if kind == "circle":
        model[1].up = [model]
        model[1].add_module("again", model[2])
    return {
        "hides": _HidesABuffer(),
        "walks": _WalksByItself(nn.Linear(2, 2)),
        "inner": nn.Sequential(model, _WalksByItself(nn.Linear(2, 2))),
    }.get(kind, model)


@pytest.mark.parametrize("kind", ["shared", "circle", "script", "lstm", "hides", "walks", "inner"])
def test_parts_and_tensors_of_a_module_are_those_that_torch_names(kind: str) -> None:
    model = _tree(kind)
    names = [name for _, part in model.named_modules() for name, _ in part._parameters.items()]
    assert modules.parameter_names(model) == names
    assert [(path, id(part)) for path, part in modules.named_parts(model)] == [
        (path, id(part)) for path, part in model.named_modules()
    ]
    held, buffered = modules.tensors_of(model)
    assert [*map(id, held)] == [*map(id, model.parameters())]
    assert [*map(id, buffered)] == [*map(id, model.buffers())]


def test_hooks_hang_in_tables() -> None:
    module = nn.Linear(2, 2)
    assert modules.call_hooks(module) == []
    after, before = (lambda module, args, out: None), (lambda module, args: None)
    module.register_forward_hook(after)
    module.register_forward_pre_hook(before)
    assert modules.call_hooks(module) == [after, before]
    module.register_full_backward_hook(lambda module, gi, go: None)
    module.register_full_backward_pre_hook(lambda module, go: None)
    assert len(modules.call_hooks(module)) == 4
    handle = nn.modules.module.register_module_forward_hook(after)
    assert len(modules.call_hooks(nn.Identity())) == 1
    handle.remove()
    tables = {name for name, held in vars(module).items() if isinstance(held, OrderedDict)}
    assert set(modules.ALL_HOOKS) <= {name for name in vars(module) if modules.is_hook_table(name)}
    assert all(isinstance(vars(module)[name], OrderedDict) for name in modules.ALL_HOOKS)
    # A table of a newer torch is known, too.
    assert {name for name in tables if "hooks" in name} == set(modules.ALL_HOOKS)
    assert not modules.is_hook_table("weight")


def test_what_stands_under_fixed_names() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    (extra,) = Extra(2, 2).state_dict().keys() - nn.Linear(2, 2).state_dict().keys()
    assert extra.endswith(modules.EXTRA_STATE)
    assert hasattr(nn.Module, modules.CALL)
    assert nn.Module.__call__ is not getattr(nn.Module, modules.CALL)
    rnn = nn.LSTM(2, 2, num_layers=2)
    flat = vars(rnn)[modules.FLAT_WEIGHTS]
    assert modules.flat_weight_names(rnn) == [name for name, _ in rnn.named_parameters()]
    assert all(one is p for one, p in zip(flat, rnn.parameters(), strict=True))
    assert all(
        reference() is one for reference, one in zip(vars(rnn)[modules.FLAT_WEIGHT_REFERENCES], flat, strict=True)
    )


def test_parametrizations_can_be_put_on_a_plain_class_again() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    module = nn.Linear(2, 2, bias=False)
    weight = module.weight.detach().clone()
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    module.__class__ = nn.Linear
    assert "weight" not in vars(module)
    modules.parametrize_again(module)
    torch.testing.assert_close(module.weight, weight * 2)
    assert torch.nn.utils.parametrize.is_parametrized(module, "weight")


def test_what_parametrize_makes_is_a_class_of_its_own() -> None:
    module = nn.Linear(2, 2)
    assert not modules.is_parametrized_class(type(module))
    assert modules.class_of(module) is nn.Linear
    assert modules.is_parametrized_class(type(torch.nn.utils.parametrizations.weight_norm(module)))
    assert modules.class_of(module) is nn.Linear


def test_parametrizations_that_are_added_and_taken_off_come_with_their_properties() -> None:
    parametrize = torch.nn.utils.parametrize
    module = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    shared = type(module)
    module.parametrizations["bias"] = parametrize.ParametrizationList([nn.ReLU()], module.bias)
    del module._parameters["bias"]
    modules.parametrize_again(module)
    assert module.bias.shape == (2,)
    assert type(module) is not shared, "a copy may have it"
    parametrize.remove_parametrizations(module, "bias")
    parametrize.remove_parametrizations(module, "weight")
    module.__class__ = shared
    modules.parametrize_again(module)
    assert type(module) is nn.Linear


def test_keys_of_hooks_are_new() -> None:
    module = nn.Linear(2, 2)
    first = modules.new_hook_key()
    handle = module.register_forward_hook(lambda module, args, out: None)
    assert first < handle.id < modules.new_hook_key()
    taken = modules.new_hook_key() + 10
    modules.reserve_hook_keys([taken])
    assert nn.Linear(1, 1).register_forward_hook(lambda *args: None).id > taken


def test_hooks_on_a_gradient_hang_in_a_table_of_ones_own() -> None:
    weight = nn.Parameter(torch.ones(2))
    table: Any = OrderedDict({3: lambda grad: grad * 2})
    tensors.put_gradient_hooks(weight, table)
    assert tensors.hook_table(weight, tensors.GRADIENT_HOOKS) is table
    weight.sum().backward()
    assert weight.grad.tolist() == [2, 2]


def test_hooks_of_strategies_are_told_from_the_users() -> None:
    def theirs(grad: torch.Tensor) -> None: ...

    theirs.__module__ = "deepspeed.runtime.engine"
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(theirs)
    mine = weight.register_hook(abs)
    assert tensors.users_hooks(weight, tensors.GRADIENT_HOOKS) == [(mine.id, abs)]
    assert tensors.users_hooks(weight, tensors.ACCUMULATED_HOOKS) == []
    assert tensors.module_of(abs) == "builtins"
    assert tensors.is_users_hook(abs)
    assert not tensors.is_users_hook(theirs)
    norm = next(iter(modules.call_hooks(torch.nn.utils.spectral_norm(nn.Linear(2, 2)))))
    assert tensors.is_users_hook(norm)
    assert not tensors.is_users_hook(norm, tensors.BY_LIBRARIES)


# --- optimizers ----------------------------------------------------------------------------------


def test_an_optimizer_without_its_constructor_steps_and_has_hooks() -> None:
    weight = nn.Parameter(torch.ones(1))
    whole = torch.optim.SGD([weight], 0.5)
    bare = torch.optim.SGD.__new__(torch.optim.SGD)
    optimizers.make_hook_tables(bare)
    vars(bare).update(defaults=whole.defaults, param_groups=whole.param_groups, state=whole.state)
    optimizers.prepare_step(bare)
    calls: list[str] = []
    for name in ("a", "b"):
        before = bare.register_step_pre_hook(lambda *args, name=name: calls.append(f"before {name}"))
        after = bare.register_step_post_hook(lambda *args, name=name: calls.append(f"after {name}"))
        if name == "a":
            first = before
    optimizers.call_last_before_step(bare, first)
    optimizers.call_first_after_step(bare, after)
    bare.register_state_dict_post_hook(lambda optimizer, state: calls.append("state"))
    weight.grad = torch.ones(1)
    bare.step()
    bare.state_dict()
    assert calls == ["before b", "before a", "after b", "after a", "state"]
    assert weight.item() == 0.5
    assert optimizers.calls_hooks(bare)
    assert not optimizers.calls_hooks(object.__new__(torch.optim.SGD))


@pytest.mark.parametrize("says", [False, True])
def test_a_schedule_warns_of_an_optimizer_that_has_not_stepped(says: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.5)
    assert not optimizers.has_schedule_mark(optimizer.step)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizers.has_schedule_mark(optimizer.step)
    if says:
        optimizers.say_stepped(optimizer)
        schedule.step()
    else:
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            schedule.step()


def test_a_schedules_mark_can_be_made_again() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    del optimizer.step
    assert not optimizers.has_schedule_mark(optimizer.step)
    optimizers.watch_for_schedule(optimizer, schedule)
    assert optimizers.has_schedule_mark(optimizer.step)
    weight.grad = torch.ones(1)
    optimizer.step()
    schedule.step()  # warns of nothing: it was seen
    assert weight.item() == 0.5
    plateau = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.5)
    optimizers.watch_for_schedule(plateau, object())
    assert not optimizers.has_schedule_mark(plateau.step)


def test_a_schedule_that_comes_before_its_optimizer_leaves_it_its_hooks() -> None:
    """On a rank that has made none of this class yet, torch has not put the calls of hooks around its `step`."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return None

    made = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    arrived = Own.__new__(Own)
    arrived.__dict__.update(made.__dict__)
    called: list[Any] = []
    arrived.register_step_pre_hook(lambda *args: called.append(args))
    optimizers.watch_for_schedule(arrived, torch.optim.lr_scheduler.StepLR(made, 1))
    arrived.step()
    assert len(called) == 1


# --- pytree --------------------------------------------------------------------------------------


def test_trees_are_taken_apart_and_made_anew() -> None:
    tree = {"a": [1, (2.0, None)], "b": OrderedDict(c=3)}
    leaves, form = pytree.tree_flatten(tree)
    assert leaves == pytree.tree_leaves(tree) == [1, 2.0, None, 3]
    assert pytree.tree_unflatten(leaves, form) == tree
    assert pytree.tree_map(str, tree)["a"] == ["1", ("2.0", "None")]
    assert pytree.tree_map_only(int, lambda x: x + 1, tree) == {"a": [2, (2.0, None)], "b": OrderedDict(c=4)}
    assert pytree.is_container(list)
    assert pytree.is_container(OrderedDict)
    assert not pytree.is_container(set)
    assert pytree.is_named_tuple(torch.ones(2, 2).max(0)) in (True, False)
    from collections import namedtuple

    pair = namedtuple("pair", "x y")(1, 2)
    assert pytree.is_named_tuple(pair)
    assert not pytree.is_named_tuple((1, 2))
    assert pytree.tree_leaves(pair) == [1, 2]


# --- generators ----------------------------------------------------------------------------------


def test_a_state_begins_with_its_seed() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert tensors.seed_in(before).item() == 5
    numbers = torch.rand(3)
    other = before.clone()
    tensors.seed_in(other).fill_(7)
    assert torch.equal(tensors.without_seed(other), tensors.without_seed(before))
    torch.set_rng_state(other)
    assert torch.initial_seed() == 7
    assert torch.equal(torch.rand(3), numbers)


# --- tensors -------------------------------------------------------------------------------------


def test_how_tensors_are_printed() -> None:
    before = tensors.print_options()
    assert before is not None
    torch.set_printoptions(precision=2, sci_mode=False)
    try:
        assert tensors.print_options() == {**before, "precision": 2, "sci_mode": False}
    finally:
        torch.set_printoptions(**before)
    assert tensors.print_options() == before


def test_versions_views_and_memory() -> None:
    x = torch.ones(4)
    view = x[1:]
    before = tensors.version(x)
    view.add_(1)
    assert tensors.version(x) == tensors.version(view) == before + 1
    x.data.add_(1)
    assert tensors.version(x) == before + 1
    assert tensors.is_view(view)
    assert not tensors.is_view(x)
    with torch.no_grad():
        kept = x.requires_grad_()[1:]
        assert tensors.is_leaf(kept)
        x.add_(1)
    with pytest.raises(RuntimeError):
        bool(kept.is_leaf)
    assert not tensors.is_leaf(kept)
    assert tensors.is_leaf(x)
    storage = tensors.memory_id(x.untyped_storage())
    assert tensors.memory_id(view.untyped_storage()) == storage
    assert tensors.memory_id(x.clone().untyped_storage()) != storage
    empty = [torch.ones(0), torch.ones(0)]
    assert len({tensors.memory_id(one.untyped_storage()) for one in empty}) == 2
    assert tensors.of_one_memory(x, view)
    assert not tensors.of_one_memory(x, x.clone())
    assert not tensors.of_one_memory(*empty)


def test_parts_of_a_sparse_tensor_are_not_coalesced() -> None:
    with torch.sparse.check_sparse_tensor_invariants():  # torch 2.12 warns of doing without
        sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,))
    indices, values = tensors.sparse_parts(sparse)
    assert (indices.tolist(), values.tolist()) == ([[1, 1]], [2.0, 3.0])
    assert tensors.sparse_values(sparse).tolist() == [2.0, 3.0]
    assert not sparse.is_coalesced()


def test_marks_on_views() -> None:
    x = torch.tensor([1 + 2j])
    assert tensors.conjugate_view(x).is_conj()
    assert tensors.conjugate_view(tensors.conjugate_view(x).resolve_conj()).is_conj()
    assert tensors.negative_view(torch.ones(2)).is_neg()
    assert tensors.negative_view(torch.ones(2)).tolist() == [-1.0, -1.0]


def test_hooks_of_a_gradient_hang_in_tables() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert tensors.hook_tables(weight) == (None, None)
    on, after = (lambda grad: None), (lambda param: None)
    weight.register_hook(on)
    weight.register_post_accumulate_grad_hook(after)
    assert [[*(table or {}).values()] for table in tensors.hook_tables(weight)] == [[on], [after]]
    calls: list[int] = []
    for name in (tensors.GRADIENT_HOOKS, tensors.ACCUMULATED_HOOKS):
        table = tensors.hook_table(weight, name)
        assert table is not None
        table[next(iter(table))] = lambda one, name=name: calls.append(name)
    weight.sum().backward()
    assert calls == [tensors.GRADIENT_HOOKS, tensors.ACCUMULATED_HOOKS]
    assert tensors.can_have_hooks(torch.Tensor)
    assert not tensors.can_have_hooks(list)


def test_a_mode_is_told_by_name_who_asks_of_form() -> None:
    x = torch.ones(2)
    with Calls() as mode:
        tensors.version(x)
        tensors.is_view(x)
        tensors.hook_tables(x)
    assert {*mode.names} - {"_post_accumulate_grad_hooks"} <= tensors.ASKS_OF_FORM


def test_the_compiler_notes_on_a_tensor(compiled: Any) -> None:
    x = torch.ones(2)
    mark = __import__(compiler.MODULE, fromlist=["mark_dynamic"]).mark_dynamic
    mark(x, 0)
    assert vars(x)
    assert all(name.startswith(tensors.COMPILER_NOTES) for name in vars(x))


def test_a_tensor_becomes_one_of_another_class_and_a_parameter_stays_one() -> None:
    class Own(torch.Tensor):
        pass

    both = [torch.zeros(2), nn.Parameter(torch.zeros(2))]
    for _ in range(2):
        tensors.become(both, Own)
        tensors.become(both, Own)
        assert [(type(one), isinstance(one, nn.Parameter)) for one in both] == [(Own, False), (Own, True)]
        tensors.become(both)
        assert [type(one) for one in both] == [torch.Tensor, nn.Parameter]
        assert not any(vars(one) for one in both)


def test_a_tensor_gets_the_memory_of_another() -> None:
    x, new = torch.ones(2), torch.zeros(3)
    assert not tensors.has_other_owners(x)
    view = x[:1]
    assert tensors.has_other_owners(x)
    del view
    kept = id(x)
    tensors.swap_memory(x, new)
    assert (id(x), x.shape, new.shape) == (kept, (3,), (2,))


class Own(torch.Tensor):
    seen: list[Any] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs)


def test_subclasses_can_be_passed_by() -> None:
    Own.seen.clear()
    x = torch.ones(2)
    own = tensors.as_subclass_of(Own, x)
    assert type(own) is Own
    assert own.data_ptr() == x.data_ptr()
    Own.seen.clear()
    with tensors.as_plain_tensors():
        own.add(1)
    assert Own.seen == []
    own.add(1)
    assert Own.seen


def test_many_tensors_at_once() -> None:
    many = [torch.full((2, 2), 2.0), torch.full((3,), 3.0)]
    flat = tensors.flatten(many)
    assert flat.tolist() == [2.0] * 4 + [3.0] * 3
    views = tensors.unflatten(flat, many)
    assert [view.shape for view in views] == [(2, 2), (3,)]
    flat.mul_(2)
    assert views[1].detach_().tolist() == [6.0] * 3
    tensors.multiply(many, 0.5)
    assert many[0].sum() == 4
    tensors.copy(many, [torch.zeros(2, 2), torch.ones(3)])
    assert [one.sum().item() for one in many] == [0.0, 3.0]
    assert [norm.item() for norm in tensors.norms(many, 1.0)] == [0.0, 3.0]
    flag = torch.zeros(1)
    tensors.unscale(many, flag, torch.full((1,), 0.5))
    assert (many[1].tolist(), flag.item()) == ([0.5] * 3, 0.0)
    many[0][0, 0] = float("inf")
    tensors.unscale(many, flag, torch.full((1,), 0.5))
    assert flag.item() == 1.0


def test_a_guard_sees_functions_by_their_names_and_goes_in_any_order() -> None:
    seen: list[str] = []
    guard = function_modes.FunctionGuard(lambda function, arguments: seen.append(function_modes.name_of(function)))
    p = nn.Parameter(torch.zeros(2))
    guard.on()
    other = torch.device("meta")
    other.__enter__()
    guard.off()  # before the one that was put on after it
    made = torch.zeros(1)
    other.__exit__(None, None, None)
    assert made.is_meta
    assert not torch.zeros(1).is_meta
    seen.clear()
    guard.on()
    guard.on()
    p.grad = p.detach().mul(2)
    assert p.grad is not None
    guard.off()
    guard.off()
    p.add(1)
    assert seen == ["detach", "mul", "grad =", "grad"]
