"""Every function of torch of a weight that another rank has: what it gives in one process, or one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.compat import pytree
from nbtrain.strategies.base import Component
from nbtrain.strategies.pipeline import Pipeline
from tests.support.ranks import run_on_ranks
from tests.support.torch_functions import compared, played, tried

NOT_ALIKE = "slice_inverse", "lstsq"
"""One shows memory beside the tensor, the other solves what has many solutions."""


def on_a_rank(rank: int, calls: list[tuple[str, str]]) -> list[Any]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(5, 7))
    prepared = Pipeline(Pipeline.Options()).set_up(Component({"m": model}))
    prepared.enter()
    answers = played([p for p in model.parameters() if p.ndim > 1], calls)
    prepared.leave()
    prepared.close()
    return answers


def what_works(rank: int, calls: list[tuple[str, str]]) -> list[Any]:
    held = [nn.Linear(5, 7).weight, nn.Linear(5, 7).weight]
    return [answer if isinstance(answer, list) else None for answer in played(held, calls)]


@pytest.mark.thorough
@pytest.mark.limit(300)
def test_functions_give_what_they_give_in_one_process() -> None:
    calls = [call for call in tried() if not call[0].endswith(NOT_ALIKE)]
    (wanted,) = run_on_ranks(what_works, calls, world_size=1, timeout=120)
    pairs = [(call, want) for call, want in zip(calls, wanted, strict=True) if want is not None]
    works = [call for call, _ in pairs]
    apart, refused = compared(works, [want for _, want in pairs], run_on_ranks(on_a_rank, works, timeout=200))
    assert not apart, "\n".join(apart[:40])
    assert len(refused) < 30, sorted(refused)


Call = Callable[[Any, Any], Any]
CALLS: tuple[Call, ...] = (
    lambda w, v: torch.from_numpy(numpy.asarray(w.detach()).copy()),
    lambda w, v: w.detach().numpy().sum(),
    lambda w, v: 7.5 in w,
    lambda w, v: w[1, :2],
    lambda w, v: w[w > 0],
    lambda w, v: w.__setitem__((0, slice(2)), v[1, :2]),
    lambda w, v: w.data.mul_(v.data),
    lambda w, v: w.lerp_(v, 0.3),
    lambda w, v: torch.cat([w, v]),
    lambda w, v: [one.sum() for one in w],
    lambda w, v: [one.mul_(2).sum() for one in torch.broadcast_tensors(w.data, torch.zeros(4, 4))[:1]],
    lambda w, v: [one.sum() + w.data.mul_(2).sum() + one.mean() for one in torch.atleast_3d(w.data, v.data)],
    lambda w, v: nn.functional.dropout(w.data, 0.5, False).mul_(2).sum(),
    lambda w, v: torch.atleast_2d(w, v)[1].square().sum(),
    lambda w, v: w.chunk(2)[1],
    lambda w, v: w.t().mul_(2).sum() + w.mT.contiguous().mul_(2).sum(),
    lambda w, v: w.norm() + torch.norm(v, dim=0).sum() + torch.linalg.norm(w),
    lambda w, v: (w.T @ v - torch.eye(4)).square().sum(),
    lambda w, v: nn.init.kaiming_normal_(w),
    lambda w, v: nn.init.orthogonal_(w),
    lambda w, v: w.bernoulli_(0.5),
    lambda w, v: torch.linalg.svd(w)[1] + w.diagonal(),
    lambda w, v: nn.functional.linear(torch.ones(2, 4), w),
    lambda w, v: w.to(torch.float64) + v.to("cpu"),
    lambda w, v: (float(w.data[0, 0]), f"{w[0, 0]:.3f}", str(w.data[1]), isinstance(w, nn.Parameter)),
    lambda w, v: (w.stride(), w.is_contiguous(), w.t().stride(), w[1:].is_contiguous(), w.t().is_contiguous()),
)


def outcome(call: Call, model: Any, graph: bool) -> str:
    """With what it leaves, what autograd follows, and where random numbers stand afterwards."""
    torch.manual_seed(1)
    with torch.set_grad_enabled(graph):
        try:
            found = call(model[0].weight, model[1].weight)
        except RuntimeError as error:  # torch's own: a leaf cannot be written to
            return type(error).__name__
    leaves = [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
    seen = [one.detach().clone() for one in leaves], [p.detach().clone() for p in model.parameters()]
    return str(([] if leaves else found, *seen, graph and [one.requires_grad for one in leaves], torch.rand(1)))


def _played(rank: int) -> list[str]:
    wrong = []
    for turned in (False, True):
        for number, call in enumerate(CALLS):
            torch.manual_seed(0)
            alone: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
            if turned:  # the other rank's is the first
                alone = nn.Sequential(*reversed(alone))
            for graph in (False, True):
                one, model = copy.deepcopy(alone), copy.deepcopy(alone)
                prepared = Pipeline(Pipeline.Options(balance="1,2" if turned else "2,1")).set_up(
                    Component({"m": model})
                )
                prepared.enter()
                try:
                    found = outcome(call, model, graph)
                finally:
                    prepared.leave()
                expected = outcome(call, one, graph)
                if found != expected:
                    wrong.append(f"{number}: {found} and not {expected}")
    return wrong


def test_what_people_write_gives_what_it_gives_in_one_process() -> None:
    for wrong in run_on_ranks(_played):
        assert wrong == []


def _refused(rank: int) -> list[str]:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prepared = Pipeline(Pipeline.Options()).set_up(Component({"m": model}))
    prepared.enter()
    w, v = model[0].weight, model[1].weight
    said = []
    for way in (
        lambda: w.data.t_(),
        lambda: w.data.set_(v.data),
        lambda: torch.add(w, v, out=w.data),
        lambda: w.storage(),
        lambda: w.share_memory_(),
    ):
        try:
            way()
        except NotSupported as error:
            said.append(str(error))
        else:
            said.append(f"{len(said)} is not refused")
    prepared.leave()
    return said


def test_what_is_not_known_is_refused_with_the_line() -> None:
    for said in run_on_ranks(_refused):
        assert [one for one in said if "`with whole(m[0].weight): …`" not in one] == []
