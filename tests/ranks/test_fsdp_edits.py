"""Edits by hand under fsdp: each line gives what it gives in one process, whole weights, states and random numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.strategies.fsdp import FSDP, given_memory
from nbtrain.strategies.kit.clipping import clip_norm
from nbtrain.strategies.kit.row_shards import whole
from nbtrain.worker.random_states.default_generators import capture
from nbtrain.worker.ranks import loop_fixes
from tests.support.bench import make_runtime
from tests.support.fsdp import Stage
from tests.support.ranks import run_on_ranks

DRAWS = [
    "nn.init.trunc_normal_(w, std=0.02)",
    "w.data.bernoulli_(torch.full_like(w, 0.5))",
    "w.data.random_(3, 10)",
    "w.data.t().normal_()",
    "result = F.dropout(w.detach(), 0.5)",
    "result = torch.normal(w.detach(), 1.0)",
    "g = torch.Generator().manual_seed(4); w.data.normal_(generator=g); result = torch.randn(3, generator=g)",
    "w.data[1:3].normal_()",
    "w.grad.normal_()",
    "F.dropout(w.data, 0.5, True, True)",
    "opt.step(); opt.state[w]['exp_avg'].uniform_()",
]
WRITES = [
    "nn.init.eye_(w)",
    "w.data[1:3].zero_()",
    "w.grad[1:3].zero_()",
    "nn.init.dirac_(w.data.view(7, 5, 1))",
    "w.data[[1, 3]] = 2",
    "w.data[w.data > 0] = 0",
    "w.data[1:3].normal_()",
    "w.grad[1:3].mul_(2)",
    "model[0].bias.data[-1] += 3",
    "w.data.triu_()",
    "w.data.cumsum_(0)",
]
NEW = ["result = w.new_ones(7, 5) + torch.ones(7, 5)", "result = w.new_full((2, 2), 3.) @ torch.ones(2, 2)"]
DATA = [
    "w.data = torch.ones(7, 5)",
    "nn.utils.vector_to_parameters(torch.arange(66.), model.parameters())",
    "opt.step(); opt.state[w]['exp_avg'].data = torch.ones(7, 5)",
]
MIXED = [
    "w.data.mul_(torch.arange(35.).view(7, 5))",
    "w.data.mul_(torch.arange(5.))",
    "w.grad.mul_(torch.full((7, 5), 3.))",
    "opt.step(); opt.state[w]['exp_avg'].mul_(torch.arange(5.))",
    "w.data *= torch.arange(35.).view(7, 5)",
    "w.data[1:3].mul_(torch.full((2, 5), 2.))",
    "w.data[torch.arange(7) > 3] = 7.",
    "w.grad = torch.ones(7, 5)",
    "torch.add(w.data, torch.ones(7, 5), out=w.data)",
    "w.data.copy_(torch.arange(5.))",
    "w.data.masked_fill_((torch.arange(40).view(8, 5) % 3 > 0)[1:], 0.)",
    "torch._foreach_mul_([p.data for p in model.parameters()], [torch.full(p.shape, 2.) for p in model.parameters()])",
    "result = w.detach() * torch.ones(7, 5)",
    "result = torch.where(torch.eye(7, 5) > 0, w.detach(), 0)",
    "result = torch.ones(7, 5).mul_(0.9).add_(w.data, alpha=0.1)",
    "result = torch.linalg.svdvals(w.detach()) + w.detach().quantile(0.5)",
    "result = w.detach().flatten().topk(3).values",
]
MEMORY = [
    "result = torch.tensor(w.tolist())",
    "result = torch.tensor(w.detach().numpy())",
    "result = torch.tensor(np.asarray(w.grad))",
    "result = w.data.new(2, 3).fill_(1)",
    "result = st.load(st.save(model.state_dict()))['0.weight']",
]
PENALTIES = [
    "(leaf * 2 + 0.01 * sum(p.abs().sum() for p in model.parameters())).backward()",
    "(leaf + 0.01 * sum(p.norm() for p in model.parameters()) + w.mean() + w.t()[0].sum()).backward()",
    "F.mse_loss(w, torch.ones(7, 5)).backward()",
    "F.linear(torch.ones(2, 5), w, model[0].bias).square().sum().backward()",
    "torch.cat([p.flatten() for p in model.parameters()]).square().mean().backward()",
    "w.grad = torch.autograd.grad(model(torch.ones(2, 5)).sum() + w.norm(), [*model.parameters()])[0]",
    "result, = torch.autograd.grad(w.square().sum(), w)",
    "(model(torch.ones(2, 5)).sum() + w.norm()).backward(inputs=iter([w, model[2].bias])); opt.step()",
    "torch.autograd.backward(model(torch.ones(2, 5)).sum(), None, None, False, None, w)",
    "half = {n: p * 0.5 for n, p in model.named_parameters()}\n"
    "torch.func.functional_call(model, half, torch.ones(2, 5)).sum().backward()",
    "half = {n: p * 0.5 for n, p in model.named_parameters()}\n"
    "torch.func.functional_call(model, parameter_and_buffer_dicts=half, args=torch.ones(2, 5)).sum().backward()",
]
METHODS = [
    "model[0].twice()",
    "model[0].scaled(2); opt.step()",
    "model[0].step_of(opt)",
    "model[0].renew(); opt.step(); result = model(torch.ones(2, 5)).detach()",
]
KEPT = [
    "d = w.data; w.data = torch.ones(7, 5); opt.step(); result = d.clone()",
    "d = w.data; w.data = w.data * 2; d.mul_(3); result = d.clone()",
    "v = w.data * 2; w.data = v; v.add_(1); opt.step(); result = v.clone()",
    "t = w.data; w.data = w.grad.data; w.grad.data = t; opt.step()",
    "held = {n: p.data for n, p in model.named_parameters()}\n"
    "for p in model.parameters(): p.data = p.data * 0.5\n"
    "result = model(torch.ones(2, 5)).detach()\n"
    "for n, p in model.named_parameters(): p.data = held[n]\n"
    "opt.step()",
    "model(torch.ones(2, 5)); w.data = torch.ones(7, 5); result = model(torch.ones(2, 5)).detach()",
    "r = w.data[1]; r.data = torch.ones(5); r.mul_(2); result = r.clone()",
    "with torch.no_grad(): r = w[1]\n" + "w.data = w.data * 2; result = r.clone()",
    "copied = copy.deepcopy(model); result = copied[0].weight.detach().clone()",
    "result = copy.deepcopy(w.data[1])",
    "model.to('cpu').float(); model(torch.ones(2, 5)).sum().backward(); opt.step()",
    "w.data_ptr(); model.float(); opt.step()",
    "s = w.data[0:1]; w.data.add_(1); v = w.data[1:2]; v.data = s; result = v.clone()",
    "a = w.data * 1; b = a * 2; s = b[0:7]; b.add_(1); w.data = s",
]
ROWS = [
    "r = w.data[1]; opt.step(); result = r.clone()",
    "r = w.data[1]; opt.step(); r.mul_(2)",
    "r = w.data[1]; opt.step(); result = torch.tensor([float(r[2]), float(f'{r[0]:.5f}')])",
    "r = w.data[1]; model[0].twice(); result = torch.tensor(r.tolist())",
    "r = w.data[1]; w.data[1] = r * 2 + 1; w.data[2] = r; result = r.clone()",
    "r = w.data[1:4]; s = r[1]; opt.step(); s.mul_(2); result = r.clone()",
    "r, q = w.data[1], w.data[1]; r.mul_(2); result = q + torch.ones(5)",
    "r = w.grad[1]; model(torch.ones(2, 5)).sum().backward(); result = r.clone()",
    "r = w.data[2:4]; opt.step(); r[r > 0] = 0",
    "w.data[1].detach().mul_(2); w.data[2].unsqueeze(0).data.mul_(2); w.data[1:3].t().mul_(2)",
    "w.data.split(2)[1].zero_(); w.data.diagonal().fill_(9); w.data.unfold(0, 2, 2)[1].zero_()",
    "r = w.data[1]; torch.add(r, 1, out=r); torch._foreach_mul_([r], 2.)",
    "w.data[1:3, [0, 2]] = 5; w.data[4:6][:, 1:3] = w.data[1:3, 0:2]",
    "nn.init.orthogonal_(w); w.data.view_as(torch.ones(35))[3:5].zero_()",
    "r = w.data[0:3]; w.data.mul_(2); result = r.T + r.data.t()",
    "r = w.data[0:3]; opt.step(); result = torch.ones(2, 5) @ r.T",
    "w.data[:1].squeeze().zero_(); w.data[1:2].squeeze(0).fill_(3)",
    "result = w.data[:1].squeeze().expand(2, 5) + 1",
    # each rank has other objects in between: no id of one that is gone may be taken for another's
    "dist = torch.distributed\nmore = 1 + (dist.get_rank() if dist.is_initialized() else 0)\n"
    "for i in range(40):\n"
    "    kept = [torch.ones(1)[0] for _ in range(i % 5 * more)]\n"
    "    w.data[4:6][:, 1:3] = w.data[1:3, 0:2] + i",
]


NO_SCHEMA = [
    "torch.atleast_2d(w.data).mul_(2); torch.atleast_3d(w.data)[0].mul_(3)",
    "F.dropout(w.data, 0.5, False).mul_(2); F.alpha_dropout(w.grad, 0.5).add_(1); result = w.data.clone()",
    "r, o = torch.broadcast_tensors(w.data, torch.zeros(7, 5)); w.data.mul_(2); result = r + o; r[1] = 0",
    "r, s = torch.broadcast_tensors(w.data, b.detach()[:1]); s = s + 0; r.add_(1); b.data.add_(1); result = r + s",
    "a, c = torch.atleast_2d(w.data, b.data); w.data.mul_(2); c.mul_(3); result = a @ torch.ones(5, 2)",
    "r = w.data.unsafe_chunk(2)[1]; opt.step(); r.zero_(); w.data.to_dense().mul_(2)",
    "F.dropout(w, 0.5, False).square().sum().backward()",
    "with torch.inference_mode(): F.dropout(w, 0.5, False).mul_(2); result = F.normalize(w) + F.softmax(w, 0)",
    "with torch.inference_mode(): r, d = w[1], w.detach(); w.mul_(2); r.mul_(2); result = d + w[0] + F.softmax(r, 0)",
    "torch.sort(w.data.clone(), 1, out=(w.data, torch.empty(7, 5, dtype=torch.long)))",
    "result = torch.add(torch.ones(7, 5), w.data, out=w.data); torch.add(w.data, 1, out=torch.empty(7, 5))",
]
"""Functions that show what they are given without saying so, and those that write to more than one place."""


FEW_ROWS = [
    "result = torch.stack([p.grad.abs().max() for p in model.parameters()] + [b.grad.max(), b.grad.argmin()])",
    "result = torch.stack([torch.linalg.vector_norm(w.grad, math.inf), b.grad.norm(), b.grad.std(), b.grad.mean()])",
    "result = nn.utils.get_total_norm([p.grad for p in model.parameters()], math.inf)",
    "result = F.mse_loss(w.detach(), w.grad) + F.smooth_l1_loss(w.detach(), w.grad) + F.huber_loss(b.grad, b.grad * 2)",
    "result = b.detach().cumsum(0) + b.detach().sort().values; b.data += b.detach().softmax(0)",
    "(F.mse_loss(w, w.detach() * 2) + b.max() + b.square().sum()).backward()",
]
"""on more ranks than the last layer has rows"""


class Own(nn.Linear):
    """With methods that read and write its weights."""

    def twice(self) -> None:
        self.weight.data.mul_(2)

    def renew(self) -> None:
        self.weight.data = torch.ones(7, 5) * 0.5

    def scaled(self, by: float) -> None:
        self.weight.data.mul_(by)

    def step_of(self, opt: torch.optim.Optimizer) -> None:
        (self.weight**2).sum().backward()
        opt.step()


def numbers(stage: Stage, line: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Own(5, 7), nn.Tanh(), nn.Linear(7, 3))
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    prepared = stage.set_up([model], [opt])
    prepared.enter()
    x, y = stage.batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    torch.manual_seed(3)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "model": model, "opt": opt, "w": model[0].weight}
    names |= {"math": math, "b": model[2].bias}
    names |= {"np": np, "copy": copy, "st": safetensors.torch, "leaf": torch.ones((), requires_grad=True)}
    exec(line, names)
    found = [t for p in model.parameters() for t in (p.detach(), p.grad, *opt.state.get(p, {}).values())]
    found += [names["result"]] if "result" in names else []
    found = [whole(t) if isinstance(t, DTensor) else t for t in found]
    prepared.leave()
    return [*found, torch.randn(2)]


def on_a_rank(rank: int, lines: list[str]) -> list[list[torch.Tensor]]:
    return [[t.clone() for t in numbers(Stage(True), line)] for line in lines]


@pytest.mark.sample(first=4)
@pytest.mark.parametrize(
    "kind", ["DRAWS", "WRITES", "NEW", "METHODS", "DATA", "MIXED", "MEMORY", "PENALTIES", "KEPT", "ROWS", "NO_SCHEMA"]
)
def test_as_in_one_process(kind: str) -> None:
    lines: list[str] = globals()[kind]
    wanted = [numbers(Stage(False), line) for line in lines]
    for found in run_on_ranks(on_a_rank, lines):
        for line, have, want in zip(lines, found, wanted, strict=True):
            same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(have, want, strict=True)]
            assert all(same), (line, same)


def test_where_ranks_have_different_numbers_of_rows() -> None:
    wanted = [numbers(Stage(False), line) for line in FEW_ROWS]
    for found in run_on_ranks(on_a_rank, FEW_ROWS, world_size=4):
        torch.testing.assert_close(found, wanted)


PARTS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "LSTM": lambda: (nn.LSTM(5, 7, 2, batch_first=True), (torch.randn(3, 4, 5),)),
    "GRU": lambda: (nn.GRU(5, 7, bidirectional=True), (torch.randn(4, 3, 5),)),
    "GRUCell": lambda: (nn.GRUCell(5, 7), (torch.randn(3, 5),)),
    "MultiheadAttention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(3, 4, 8),) * 3),
    "TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.0), (torch.randn(3, 4, 8),)),
    "Embedding": lambda: (nn.Embedding(9, 5), (torch.tensor([[1, 2], [8, 1]]),)),
    "Conv1d": lambda: (nn.Conv1d(3, 4, 3), (torch.randn(2, 3, 8),)),
    "ConvTranspose2d": lambda: (nn.ConvTranspose2d(3, 4, 3), (torch.randn(2, 3, 5, 5),)),
    "BatchNorm1d": lambda: (nn.BatchNorm1d(6), (torch.randn(5, 6),)),
    "GroupNorm": lambda: (nn.GroupNorm(2, 6), (torch.randn(5, 6, 3),)),
    "Bilinear": lambda: (nn.Bilinear(3, 4, 5), (torch.randn(2, 3), torch.randn(2, 4))),
    "PReLU": lambda: (nn.PReLU(6), (torch.randn(5, 6),)),
    "weight_norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)), (torch.randn(3, 5),)),
}


class Box(nn.Module):
    """A unit; what is inside of it is called by itself."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.last = nn.Linear(4, 3)

    def forward(self, *args: Any) -> Any:
        return self.part(*args)


def called_by_itself(stage: Stage, name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    part, args = PARTS[name]()
    model = nn.Sequential(Box(part), nn.Tanh())
    opt = torch.optim.SGD(model.parameters(), 0.1)
    prepared = stage.set_up([model], [opt])
    prepared.enter()
    seen = []
    for training in (True, True, False):
        model.train(training)
        part.train(training)
        for call in (part, model[0]):  # by itself, and within the forward of its unit
            found = call(*args)
            found = found[0] if isinstance(found, tuple) else found
            found.square().mean().backward()
            seen.append(found.detach().clone())
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            found = part(*args)
            seen.append((found[0] if isinstance(found, tuple) else found).clone())
    model.to(torch.float32)  # torch exchanges the tensors, if nobody refers to them weakly
    prepared.leave()
    held = [p.detach() for p in (*model.parameters(), *model.buffers())]
    return [*seen, *(whole(p) if isinstance(p, DTensor) else p for p in held)]


def parts_on_a_rank(rank: int) -> dict[str, list[torch.Tensor]]:
    return {name: [t.clone() for t in called_by_itself(Stage(True), name)] for name in PARTS}


def test_a_part_of_a_unit_is_called_by_itself() -> None:
    wanted = {name: called_by_itself(Stage(False), name) for name in PARTS}
    for found in run_on_ranks(parts_on_a_rank):
        for name, have in found.items():
            torch.testing.assert_close(
                have, wanted[name], atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )


SHARED = [
    "flat = torch.zeros(40); w.grad = flat[:35].view(7, 5); flat.add_(1); opt.step()",
    "flat = torch.zeros(40); w.grad = flat[:35].view(7, 5); model(torch.ones(2, 5)).sum().backward()",
    "flat = torch.zeros(40); w.data = flat[:35].view(7, 5); opt.step()",
    "g = torch.ones(7, 5); w.data = g; g.mul_(5); model(torch.ones(2, 5))",
]
NOT_SHARED = [
    "flat = torch.ones(40); w.grad = flat[:35].view(7, 5); opt.step(); opt.zero_grad(); flat.add_(1)",
    "w.data = torch.ones(40)[:35].view(7, 5)",
    "g = torch.ones(7, 5); w.grad = g; w.data = g",
    "nn.utils.vector_to_parameters(torch.ones(42), model.parameters())",
]


def in_one_memory(rank: int) -> list[str]:
    model = nn.Linear(5, 7)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    prepared = Stage(True).set_up([model], [opt])
    prepared.enter()
    said = []
    for line in (*NOT_SHARED, *SHARED):
        names = {"torch": torch, "nn": nn, "model": model, "opt": opt, "w": model.weight}
        try:
            exec(line, names)
            with prepared.backward():
                model(torch.ones(2, 5)).sum().backward()
            opt.step()
        except NotSupported as error:
            given_memory.forget()
            said.append(f"{line}: {error}")
    prepared.leave()
    return said


def test_a_tensor_that_was_to_be_one_memory_with_a_parameter() -> None:
    for said in run_on_ranks(in_one_memory):
        assert [one.partition(": `")[0] for one in said] == SHARED
        assert all("are not one memory" in one for one in said)


def refused(rank: int) -> list[str]:
    stage = Stage(True)
    model = nn.Linear(5, 7)
    prepared = stage.set_up([model])
    prepared.enter()
    said = []
    for line in ("w.data.mul_(own)", "w.grad = own", "w.data[torch.arange(2) + int(own[0, 0])] = 1"):
        with pytest.raises(NotSupported) as error:
            exec(line, {"torch": torch, "w": model.weight, "own": torch.full((7, 5), float(rank))})
        said.append(str(error.value))
    with pytest.raises(ValueError, match="read-only"):
        model.weight.detach().numpy()[0] = 1
    prepared.leave()
    return said


def test_what_differs_between_ranks_is_written_to_nothing() -> None:
    for said in run_on_ranks(refused):
        assert all("differs between ranks" in one and "with whole(model0.weight" in one for one in said)


OWN = [
    "w.grad.mul_(c)",
    "w.grad *= torch.tensor(c)",
    "w.grad = w.grad * c",
    "w.data = w.data * c",
    "w.data[1] = c",
    "w.data.add_(w.grad, alpha=-c)",
    "w.data.clamp_(-c, c)",
    "clip_norm([prepared], [*model.parameters()], c, 2.0, False, print)",
    "opt.param_groups[0]['lr'] = c; opt.step()",
    "torch._foreach_mul_([p.grad for p in model.parameters()], np.float32(c))",
]


def with_own_numbers(rank: int) -> list[str]:
    model = nn.Linear(5, 7)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    prepared = Stage(True).set_up([model], [opt])
    prepared.enter()
    names = {"torch": torch, "np": np, "model": model, "opt": opt, "prepared": prepared, "w": model.weight}
    names["clip_norm"] = clip_norm
    said = []
    for c in (0.5, math.nan, 0.1 + rank):
        for line in OWN:
            model(torch.ones(2, 5)).sum().backward()
            exec(line, names | {"c": c})
            float((model.weight.detach() * c).sum())  # reading is not writing
            try:
                with prepared.backward():
                    model(torch.ones(2, 5)).sum().backward()
            except NotSupported as error:
                said.append(f"{line}: {error}")
    prepared.leave()
    return said


def test_a_rank_may_not_write_numbers_of_its_own() -> None:
    for said in run_on_ranks(with_own_numbers):
        assert [one.partition(": ")[0] for one in said] == OWN
        assert all("the ranks wrote different numbers" in one for one in said)


RAW = {
    "w.data.t_()": "with whole(model0.weight): …",
    "w.register_hook(print)\nwith prepared.backward(): model(torch.ones(2, 5)).sum()": "whole(model0.weight, gradi",
    "w.data.unsqueeze_(0)": "with whole(model0.weight): …",
    "nn.functional.embedding(torch.tensor([1]), w, max_norm=0.1)": "with whole(model0.weight): …",
    "with torch.inference_mode(): nn.functional.embedding(torch.tensor([1]), w, max_norm=0.1)": "with whole(model0.w",
    "w.grad = w.data * 2; w.grad.share_memory_()": "with whole(model0.weight, gradients=True): …",
    "torch.func.grad(lambda x: w.to_local().sum() * x)(torch.ones(()))": "write `with whole(model): …` around the line",
    "model.forward = lambda x: torch.utils.checkpoint.checkpoint(nn.Linear.forward, model, x, use_reentrant=False)\n"
    "torch.func.functional_call(model, {n: p * 2 for n, p in model.named_parameters()}, torch.ones(2, 5))": (
        "compute them with its own weights, and not with those given. Call it without the checkpoint"
    ),
    "prune.l1_unstructured(model, 'weight', 0.5); model(torch.ones(2, 5))": "with whole(model, optimizer): …",
    **dict.fromkeys((
        "model.weight = nn.Parameter(torch.ones(7, 5)); model(torch.ones(2, 5))",
        "loss = model(torch.ones(2, 5)).sum(); model.weight = nn.Parameter(torch.ones(7, 5)); loss.backward()",
        "with torch.no_grad(): model(torch.ones(2, 5))\nmodel.weight = nn.Parameter(torch.ones(7, 5))\n"
        "with torch.no_grad(): model(torch.ones(2, 5))",
        "del model.weight; model.weight = nn.Parameter(torch.ones(7, 5)); model(torch.ones(2, 5))",
        "nn.utils.parametrizations.weight_norm(model); model(torch.ones(2, 5))",
    ), "was replaced or taken away, and fsdp would go on with the one of which each rank has some rows"),
}  # fmt: skip


def failed(rank: int, line: str) -> str:
    model = Own(5, 7)
    prepared = Stage(True).set_up([model])
    prepared.enter()
    with pytest.raises((NotSupported, TypeError, RuntimeError)) as error:
        names = {"torch": torch, "nn": nn, "prune": prune}
        exec(line, names | {"model": model, "w": model.weight, "prepared": prepared})
    loop_fixes.explain(error.value, torch.device("cpu"), in_pieces=True)
    prepared.leave()
    return str(error.value)


@pytest.mark.sample(first=1)
@pytest.mark.parametrize(("line", "text"), RAW.items())
def test_what_pieces_cannot_is_said_in_a_sentence(line: str, text: str) -> None:
    assert all(text in said for said in run_on_ranks(failed, line))


INTO = [
    "buf[0] = w[0]",
    "buf[1].copy_(w[1])",
    "buf.T.add_(w)",
    "buf.diagonal().copy_(w.diagonal())",
    "buf.index_add_(0, torch.tensor([1]), w[:1])",
    "buf.add_(w @ w)",
    "buf[buf > 0] = w[buf > 0]",
    "torch._foreach_add_([w.detach(), buf], [w @ w, w @ w])",
    "(w * 2)[0].mul_(torch.ones(5))",
]


def written_into(rank: int) -> list[str]:
    model = nn.Linear(5, 5)
    prepared = Stage(True).set_up([model])
    prepared.enter()
    said = []
    for line in INTO:
        with pytest.raises(NotSupported) as error:
            exec(line, {"torch": torch, "w": model.weight, "buf": torch.zeros_like(model.weight)})
        said.append(str(error.value))
    for line in ("w[0] = 1", "w.mul_(torch.ones(5))", "torch.add(w, w @ w, out=buf)"):  # torch's own, as anywhere
        with pytest.raises(RuntimeError, match="require"):
            exec(line, {"torch": torch, "w": model.weight, "buf": torch.zeros_like(model.weight)})
    prepared.leave()
    return said


def test_what_autograd_would_have_to_follow_into_a_tensor_in_pieces_is_refused() -> None:
    for said in run_on_ranks(written_into):
        assert [one for one in said if "Compute a new tensor" not in one] == []


class Sometimes(nn.Linear):
    """With weights that a batch uses, or not, by what is in it."""

    def __init__(self) -> None:
        super().__init__(5, 7)
        self.gain, self.vain = nn.Parameter(torch.arange(7.0)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        return (h * self.gain if x.sum() > 0 else h).sum(1)


def by_name(rank: int, count: int) -> list[Any]:
    torch.manual_seed(0)
    model = Sometimes()
    prepared = Stage(count > 1).set_up([model])
    prepared.enter()
    losses = [model(x) for x in [torch.ones(2, 5), -torch.ones(2, 5)][rank::count]]
    loss, held = torch.stack(losses).mean(0), [model.weight, model.gain, model.vain]
    found: list[Any] = []
    plain = {"allow_unused": True}
    for given in (plain, {"materialize_grads": True}, plain | {"is_grads_batched": True}):
        at = torch.eye(2) if "is_grads_batched" in given else torch.ones(2)
        found += torch.autograd.grad(loss, held, at, retain_graph=True, **given)
    found += torch.autograd.grad(loss.sum(), iter(held), retain_graph=True, allow_unused=True)
    if torch.__version__ >= "2.13":
        named = torch.autograd.grad(loss.sum(), dict(enumerate(held)), retain_graph=True, allow_unused=True)
        found += [named[number] for number in range(len(held))]
    with pytest.raises(RuntimeError, match="allow_unused=True"):
        torch.autograd.grad(loss.sum(), held)
    found = [whole(t) if isinstance(t, DTensor) else t for t in found]
    prepared.leave()
    return found


def test_gradients_by_name_of_what_some_batches_use() -> None:
    wanted = by_name(0, 1)
    for found in run_on_ranks(by_name, 2):
        torch.testing.assert_close(found, wanted)


# --- where the numbers come from, on ranks whose own streams differ -----------------------------------


def drawn(rank: int, count: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draws in a cell, after a batch has set the ranks apart; and where the notebook's stream stands then."""
    runtime = make_runtime(rank, count, FSDP(FSDP.Options()) if count > 1 else None)
    torch.manual_seed(5)
    model = nn.Linear(5, 7)
    data = TensorDataset(torch.ones(8, 5))
    runtime.install()
    runtime.randomness.adopt(capture())
    runtime.begin(RunSpec(pool=PoolSpec(devices=("cpu",) * count), strategy="fsdp"), {"model": model})
    for (x,) in DataLoader(data, batch_size=4):
        model(x).sum().backward()
    nn.init.normal_(model.weight)
    model.weight.data.add_(torch.randn_like(model.weight))
    model.bias.grad.uniform_()  # type: ignore[union-attr]
    found = [model.weight.detach(), model.bias.grad]
    found = [(whole(t) if isinstance(t, DTensor) else t).clone() for t in found if t is not None]
    model.reset_parameters()
    found += [(whole(t) if isinstance(t, DTensor) else t).clone() for t in (model.weight.detach(),)]
    runtime.end(True)
    runtime.uninstall()
    own, states = torch.get_rng_state(), runtime.randomness.collect()
    torch.set_rng_state(own if rank or states is None else states["torch"])
    return found, torch.rand(3)


def test_one_process_and_ranks_draw_the_same() -> None:
    wanted, after = drawn(0, 1)
    ranks = run_on_ranks(drawn, 2)
    for found, _ in ranks:
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have, want)
    torch.testing.assert_close(ranks[0][1], after)
    assert not torch.equal(ranks[1][1], after), "dropout differs between ranks"
