"""What nbtrain/compat relies on in DeepSpeed, FairScale and Horovod, each on two ranks, and in torch_xla."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbtrain.compat import deepspeed as ds
from nbtrain.compat import fairscale, horovod, xla
from nbtrain.compat import tested_versions as versions
from nbtrain.compat.intercept import listening
from tests.support.ranks import on_ranks, run_on_ranks
from tests.support.wrapped import wrapped

CPU = torch.device("cpu")

deepspeed_here = pytest.mark.skipif(not versions.installed("deepspeed"), reason="deepspeed is not installed")
fairscale_here = pytest.mark.skipif(not versions.installed("fairscale"), reason="fairscale is not installed")
horovod_here = pytest.mark.skipif(not versions.installed("horovod"), reason="horovod is not installed")

# --- deepspeed -----------------------------------------------------------------------------------


def test_nodes_at_which_stage_3_gathers_are_known_by_name() -> None:
    """Whether its own are called so a gradient penalty in test_by_hand says."""

    class PreBackwardFunctionForModule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    x = torch.ones(2, requires_grad=True)
    assert ds.gathers(PreBackwardFunctionForModule.apply(x).grad_fn)  # type: ignore[no-untyped-call]
    assert not ds.gathers((x * 2).grad_fn)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layers(x),)


def engine_of(stage: int) -> Any:
    from nbtrain.strategies.deepspeed.library import as_local_rank, library, quiet

    deepspeed = library(CPU)
    assert ds.its.check() == []
    zero = {"stage": stage, "stage3_param_persistence_threshold": 1}
    config = {
        "train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero,
    }  # fmt: skip
    model = Wrapped()
    with quiet(), as_local_rank(CPU), listening(ds.SEND_WEIGHT, "deepspeed", lambda old: ds.cut_up):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config
        )
    return engine


def _a_backward(rank: int, stage: int) -> None:
    from nbtrain.strategies.deepspeed.library import as_local_rank

    engine = engine_of(stage)
    zero = engine.optimizer
    seen: list[str] = []

    def around(first: Callable[[], None]) -> Callable[[], None]:
        def begin() -> None:
            ds.expect_scaled(engine)
            first()
            assert ds.in_backward(zero)
            zero.enter_backward()  # a hook of a parameter announces it again
            ds.has_begun_once(zero)
            seen.append("begun")

        return begin

    begin = ds.around_beginning(engine, around)
    zero.unregister_grad_acc_post_hooks()

    def end() -> None:
        ds.end_backward(engine)
        seen.append("ended")

    zero.register_grad_acc_post_hook(end)
    zero.override_loss_scale(1.0)  # from now on a loss has to be multiplied
    with as_local_rank(CPU):
        (out,) = engine(torch.full((1, 3), float(rank + 1)))
        assert ds.is_marked(out)
        out.sum().backward()
    assert seen == ["begun", "ended"]
    assert not ds.in_backward(zero)
    ds.unmark(out)
    assert not ds.is_marked(out)

    begin()
    assert ds.in_backward(zero)
    ds.forget_backward(zero)
    assert not ds.in_backward(zero)
    if stage == 1:
        ds.gather_all(engine)
        mean = torch.cat([g.reshape(-1) for g in zero.averaged_gradients[0]])
        dist.all_reduce(mean)
        assert float(mean.abs().sum()) > 0
    if stage < 3:
        order = list(ds.in_order(zero, 0))
        assert order[0][1] == 0
        (flat,) = ds.whole_groups(zero)
        assert all(flat.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p, _ in order)
        assert [p.numel() for p, _ in order][:-1] == [b - a for (_, a), (_, b) in pairwise(order)]
        assert ds.is_in_one_piece(zero, 0) in (True, False)
        assert not any(ds.hangs(name) for p, _ in order for name in ("grad", "data"))
    else:
        p = engine.module.layers[0].weight
        assert any(ds.hangs(name) for name in vars(p))
        p.all_gather()
        assert p.ds_status.name == "AVAILABLE"
        assert p.shape == (4, 3)
        ds.let_go_of_whole(zero)
        assert p.ds_status.name == "NOT_AVAILABLE"
        assert not ds.is_on_disk(zero, 0)
        zero._offload_boundary_param_ids.add(1)
    ds.forget_arrivals(zero)
    assert stage < 3 or not zero._offload_boundary_param_ids
    times = ds.forget_module(engine.module)
    ds.remember_module(engine.module, times)
    assert ds.forget_module(engine.module) == times
    parameters, modules = ds.counts()
    ds.set_counts(parameters + 1, modules + 2)
    assert ds.counts() == [parameters + 1, modules + 2]


@deepspeed_here
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_of_deepspeeds_engine(stage: int) -> None:
    run_on_ranks(_a_backward, stage)


@deepspeed_here
@on_ranks
def test_deepspeed_communicates_by_what_it_is_given(rank: int) -> None:
    from nbtrain.strategies.deepspeed.library import library

    library(CPU)
    calls: list[str] = []

    def gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **others: Any) -> Any:
        calls.append("gather")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, **others)

    import deepspeed

    ds.use_group(dist.group.WORLD, gather, dist.reduce_scatter_tensor)
    both = torch.zeros(2)
    deepspeed.comm.all_gather_into_tensor(both, torch.full((1,), float(rank)))
    assert both.tolist() == [0.0, 1.0]
    assert calls == ["gather"]


# --- fairscale -----------------------------------------------------------------------------------


@fairscale_here
@on_ranks
def test_fairscale_sends_gradients_to_owners_and_weights_from_them(rank: int) -> None:
    from nbtrain.strategies.sharded.library import make_oss, make_parallel

    assert fairscale.its.check() == []
    with fairscale.quiet():
        oss_class, parallel_class = fairscale.classes()
    model = Wrapped()
    parameters: list[torch.Tensor] = list(model.parameters())
    oss = make_oss(oss_class, parameters)
    owners = fairscale.owners(oss)
    assert set(owners.values()) == {0, 1}
    parallel = make_parallel(parallel_class, parameters, [oss])
    sending = fairscale.refresh(parallel)
    assert sending.keys() == {id(p) for p in parameters}
    for p in parameters:
        p.grad = torch.full_like(p, rank + 1.0)
    fairscale.begin(parallel)
    for p in parameters:
        sending[id(p)]()
    fairscale.finish(parallel)
    for p in parameters:
        if owners[p] == rank:
            assert p.grad.unique().tolist() == [1.5]
        else:
            assert p.grad is None
    for p in parameters:
        p.grad = torch.ones_like(p)
    fairscale.begin(parallel)
    for p in parameters:
        sending[id(p)]()
    fairscale.forget(parallel)
    for p in parameters:
        p.grad = None
    fairscale.finish(parallel)  # would look at the gradients that it had to wait for
    with torch.no_grad():
        for p in parameters:
            p.fill_(float(rank))
    fairscale.send(oss)
    spans = [*fairscale.memory(oss)]
    assert all(any(start <= p.data_ptr() < stop for start, stop in spans) for p in model.parameters())
    assert all(p.unique().tolist() == [float(owners[p])] for p in parameters)


# --- horovod -------------------------------------------------------------------------------------


@horovod_here
@on_ranks
def test_what_was_sent_by_horovod_is_forgotten(rank: int) -> None:
    from nbtrain.base.specs import RankInfo
    from nbtrain.strategies.horovod.session import HorovodSession

    session = HorovodSession(RankInfo(rank=rank, world_size=2, local_rank=rank, device="cpu", threads=1))
    hvd = session.start()
    calls: list[str] = []

    def seen(name: str) -> Callable[[Any], Any]:
        def around(old: Any) -> Any:
            def call(*args: Any) -> Any:
                calls.append(name)
                return old(*args)

            return call

        return around

    with wrapped({path: seen(path) for path in (horovod.START, horovod.WAIT)}):
        hvd.init()
        kept = torch.ones(2)
        assert hvd.synchronize(hvd.allreduce_async(kept, op=hvd.Sum)).tolist() == [2.0, 2.0]
    assert calls == [horovod.START, horovod.WAIT]
    handle = hvd.allreduce_async(kept, name="forgotten", op=hvd.Sum)
    session.stop()
    horovod.forget_sent()
    assert hvd.synchronize(handle) is None  # it is not known any more


# --- xla -----------------------------------------------------------------------------------------


def test_xlas_runtime_is_told_its_place() -> None:
    pytest.importorskip("torch_xla")
    assert callable(xla.runtime().initialize_multiprocess)
