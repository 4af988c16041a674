"""sharded (FairScale): what a rank has of gradients, and norms that are those of all."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.sharded import Sharded
from tests.support.absent import absent
from tests.support.bench import Bench
from tests.support.models import net, train
from tests.support.ranks import run_on_ranks


@pytest.fixture(autouse=True, scope="module")
def _there() -> None:
    if find_spec("fairscale") is None:
        absent("FairScale is not installed", "pip install --no-build-isolation fairscale")


def _lines(rank: int, world_size: int = 2) -> dict[str, Any]:
    """What a cell sees of gradients and norms, in a loop that adds up over two backwards."""
    bench = Bench(rank, world_size, Sharded(Sharded.Options()) if world_size > 1 else None)
    bench.runtime.install()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found: dict[str, Any] = {}

    def loop() -> None:
        for x, y in bench.loader(16, 8):
            F.cross_entropy(model(x), y).backward()
        held = [p.grad for p in model.parameters() if type(p.grad) is torch.Tensor]
        found["here"] = sum(grad.numel() for grad in held)
        found["all"] = sum(p.numel() for p in model.parameters() if p.grad is not None)
        found["part"] = float(nn.utils.clip_grad_norm_(model.last.parameters(), 100.0))
        found["largest"] = float(nn.utils.clip_grad_norm_(model.parameters(), 100.0, float("inf")))
        found["norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), 100.0))
        elsewhere = [p.grad for p in model.parameters() if p.grad is not None and type(p.grad) is not torch.Tensor]
        assert bool(elsewhere) == (world_size > 1)
        for grad in elsewhere:
            with pytest.raises(NotSupported, match="with whole"):
                grad.norm()
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, bench.loader(), 1)
        state = optimizer.state_dict()["state"]
        found["state"] = {i: entry["exp_avg"] for i, entry in state.items()}
        found["steps"] = {i: float(entry["step"]) for i, entry in state.items()}

    bench.cell(loop, model=model, optimizer=optimizer)
    found["storages"] = len({p.untyped_storage().data_ptr() for p in model.parameters()})
    bench.runtime.uninstall()
    found["after"] = {name: value.clone() for name, value in model.state_dict().items()}
    found["whole"] = [value["exp_avg"].clone() for value in optimizer.state.values()]
    found["apart"] = len({p.untyped_storage().data_ptr() for p in model.parameters()})
    return found


def test_gradients_are_with_their_owners_and_norms_are_those_of_all() -> None:
    wanted = _lines(0, 1)
    both = run_on_ranks(_lines)
    assert sum(found["here"] for found in both) == both[0]["all"]
    assert max(found["here"] for found in both) < 0.7 * both[0]["all"]
    for found in both:
        for name in ("part", "largest", "norm"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-5)
        assert found["steps"] == wanted["steps"]
        for name in ("after", "state"):
            assert found[name].keys() == wanted[name].keys()
            for key, value in wanted[name].items():
                torch.testing.assert_close(found[name][key], value, rtol=1e-5, atol=1e-5)
        for value, one in zip(found["whole"], wanted["whole"], strict=True):
            torch.testing.assert_close(value, one, rtol=1e-5, atol=1e-5)
        assert found["storages"] < found["apart"], "FairScale's flat buffers are gone at the end"
