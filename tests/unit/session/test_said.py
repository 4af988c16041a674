"""Which advice applies, which variables are a loop's, and how a tensor of another device is made."""

from __future__ import annotations

import pytest
import torch

from nbtrain.events import Failed
from nbtrain.session.report import error_hints
from nbtrain.session.report.cell_report import loop_variables
from nbtrain.strategies.deepspeed import DeepSpeed
from nbtrain.training.setup import option_advice


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("for x, y in z: pass", {"x", "y"}),
        ("x = 1\nfor x in z: pass", set()),
        ("for i in z:\n    for x in i:\n        x = x + i; s = x", {"i", "x"}),
        ("for d['a'] in z: pass", set()),
        ("def f():\n    for x in z: pass", set()),
        ("[x for x in z]", set()),
        ("for x in z: pass\nwith a as x: pass", set()),
        ("for x in", set()),
        ("if a:\n    for x in z:\n        y = 1\nfor x in w: pass", {"x"}),
    ],
)
def test_which_variables_are_a_loops(code: str, found: set[str]) -> None:
    assert loop_variables(code) == found


GB = 2**30

ADVICE = {
    "nothing": (DeepSpeed.Options(), 80 * GB, set()),
    "a small card": (DeepSpeed.Options(), 11 * GB, {"buckets"}),
    "a small card, small buckets": (
        DeepSpeed.Options(allgather_bucket_size=10**7, reduce_bucket_size=10**7), 11 * GB, set(),
    ),
    "offloading": (DeepSpeed.Options(offload_optimizer="cpu"), 80 * GB, {"offload"}),
    "offloading on a CPU": (DeepSpeed.Options(offload_optimizer="cpu"), 0, set()),
    "to a disk": (DeepSpeed.Options(stage=3, offload_optimizer="nvme", nvme_path="/tmp"), 80 * GB, {"offload", "nvme"}),
}  # fmt: skip


@pytest.mark.parametrize("what", ADVICE)
def test_advice_is_given_where_it_applies(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, room, names = ADVICE[what]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"total_memory": room}))
    found = option_advice.of_options(options, torch.device("cuda" if room else "cpu"))
    assert found.keys() == names
    assert "nvme" not in found or "--nvme_dir /tmp" in found["nvme"]


@pytest.mark.parametrize(
    "text",
    [
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    ],
)
def test_a_tensor_on_another_device_is_told_how_to_be_made(text: str) -> None:
    failed = Failed(rank=0, time=0.0, name="RuntimeError", text=text, lines=())
    said = error_hints.hint(failed, {}, (), None)  # type: ignore[arg-type]
    assert "register_buffer" in said
    assert "type_as" in said
