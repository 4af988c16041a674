"""A number of a rank's own that a cell writes into what ranks train together is one sentence, under every strategy that
keeps pieces; the same number on all ranks is what it is in one process."""

# ruff: noqa: E501 — a line of a cell is one line
from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain.machine import registry
from tests.fuzz.common_edits import CommonEdit
from tests.fuzz.player import Player
from tests.fuzz.verdicts import Oracle, judge
from tests.support.absent import absent

pytestmark = [pytest.mark.limit(300), pytest.mark.thorough]

OWN = "c = 0.5 + 0.1 * (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)\n"
ALIKE = "c = 0.5\n"
OF_BOTH = "c = 0.55\n"

WROTE = "the ranks wrote different numbers"
AT_THE_END = "rank 1 differs from rank 0 in the numbers that it wrote"
STEPPED = "the ranks come to optimizer.step() with different"
DIFFERS = "rank 1 differs from rank 0 in model."
HELD = "with whole(model, gradients=True)"
"""needed for the same number on all ranks, too"""
SET_TO_NONE = "optimizer.zero_grad()"
"""is what the sentence names"""
MEAN = "the ranks' mean is taken"
RIGHT = ""
"""rank 0's is taken"""

EACH = "for p in model.parameters():"
STATES = "kept = copy.deepcopy(opt.state_dict())\nfor s in kept['state'].values(): {}\nopt.load_state_dict(kept)\ndel kept, s"
FILLED = STATES.format("s['exp_avg'] = torch.full_like(s['exp_avg'], 0.01 * c)")
COUNTED = STATES.format("s['step'] = torch.tensor(10. * c)")
LOADED = "model.load_state_dict({k: v * c for k, v in model.state_dict().items()})"
GIVEN = f"{EACH} p.grad = torch.full_like(p, 0.01 * c)"
CLIPPED = "nn.utils.clip_grad_norm_(model.parameters(), 0.1 * c{})"
NORM = "model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).eval(), nn.Tanh(), nn.Linear(8, 3))\nopt = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)"

COPIES = {"zero1": DIFFERS, "sharded": DIFFERS, "deepspeed_stage_1": DIFFERS, "deepspeed_stage_2": DIFFERS}
STEPS = {"zero1": STEPPED, "sharded": STEPPED, "deepspeed_stage_3": RIGHT}
GRADIENTS = {"zero1": MEAN, "sharded": MEAN, "deepspeed": HELD}

ROWS = {
    "states that are loaded": (FILLED, "epoch", {}),
    "counts that are loaded": (COUNTED, "epoch", {}),
    "tensors that are loaded as states": (STATES.format("s['exp_avg'] = torch.full(s['exp_avg'].shape, 0.01 * c)"), "epoch", {}),
    "states that are loaded last": (FILLED, "after", {"": AT_THE_END}),
    "the limit of a clipping": (CLIPPED.format(""), "gradients", {"zero1": STEPPED}),
    "the limit of a clipping to another norm": (CLIPPED.format(", 1.0"), "gradients", {"zero1": STEPPED}),
    "the limit of a clipping to the largest": (CLIPPED.format(" * 0.1, float('inf')"), "gradients", {"zero1": STEPPED}),
    "the limit of the last clipping": (f"if (epoch, i) == (1, 3): {CLIPPED.format(' * 0.1')}", "gradients", {"": AT_THE_END, "zero1": STEPPED, "sharded": WROTE, "deepspeed": WROTE}),
    "weights that are loaded": (LOADED, "epoch", COPIES),
    "weights that are loaded last": (LOADED, "after", {"": AT_THE_END, **COPIES}),
    "weights multiplied": (f"{EACH} p.data.mul_(c)", "between", COPIES | STEPS),
    "weights multiplied by a tensor": (f"{EACH} p.data.mul_(torch.full_like(p, c))", "between", COPIES | STEPS),
    "weights multiplied on one rank": (f"{EACH} p.data.mul_(c) if c > 0.5 else None", "between", COPIES | STEPS | {"deepspeed_stage_3": "the ranks have gone different ways"}),
    "weights multiplied in a block": (f"from nbtrain import whole\nwith whole(model), torch.no_grad():\n    {EACH} p.mul_(c)", "between", {"": "the ranks have made different numbers of model.0.weight"}),
    "gradients multiplied": (f"{EACH} p.grad.mul_(c)", "gradients", {"zero1": STEPPED, "sharded": HELD, "deepspeed": HELD}),
    "gradients multiplied by a tensor": (f"{EACH} p.grad.mul_(torch.full(p.shape, c))", "gradients", {"zero1": STEPPED, "sharded": HELD, "deepspeed": HELD, "fsdp": "with a tensor that differs between ranks"}),
    "gradients given by hand": (GIVEN, "gradients", GRADIENTS),
    "gradients given by hand, without a backward": (f"opt.zero_grad()\n{GIVEN}", "gradients", GRADIENTS),
    "gradients given by hand, before a backward": (GIVEN, "loss", GRADIENTS | {"deepspeed": MEAN}),
    "gradients set to None on one rank": ("if c > 0.5: opt.zero_grad()", "gradients", {"": SET_TO_NONE, "ddp": AT_THE_END, "pipeline": "the ranks have gone different ways"}),
    "one of them": ("if c > 0.5: model[2].bias.grad = None", "gradients", {"": SET_TO_NONE, "ddp": AT_THE_END}),
    "gradients of the step before, on one rank": ("if c > 0.5: continue", "between", {"ddp": AT_THE_END, "deepspeed": "the last step's gradients were not set to None"}),
    "gradients of some batches, on one rank": ("if c > 0.5 and i == 1: opt.zero_grad()\nif i % 2 == 0: continue", "gradients", {"": SET_TO_NONE, "ddp": AT_THE_END, "pipeline": "the ranks have gone different ways"}),
    "running statistics": ("model[1].running_mean.fill_(c)", "between", {"": DIFFERS, "pipeline": WROTE}),
    "running statistics that are given": ("model[1].running_mean = torch.full((8,), c)", "between", {"": DIFFERS}),
}  # fmt: skip
"""(what the cell writes with its number `c`, where, the sentence by strategy: that of the longest name it begins with)"""

STRATEGIES = [
    "ddp", "zero1", "sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "pipeline",
]  # fmt: skip


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as found:
        yield found


def wanted(name: str, sentences: dict[str, str]) -> str:
    return sentences[max((one for one in sentences if name.startswith(one)), key=len)]


@pytest.mark.sample("pipeline")
@pytest.mark.parametrize("name", STRATEGIES)
def test_numbers_of_a_ranks_own(name: str, oracle: Oracle) -> None:
    if not all(map(find_spec, registry.strategy(name.split("_")[0]).needs.packages)):
        absent(f"{name} is not installed")
    found = {}
    with Player(name) as ranks:
        for what, (text, place, sentences) in ROWS.items():
            if name == "ddp" and name not in sentences:  # of what lies whole on each rank
                continue
            notebook = NORM if "statistics" in what else ""
            sentence = wanted(name, {"": WROTE, **sentences})
            for number in (OWN, ALIKE):
                cells, in_one_process = (
                    CommonEdit("", c + text, place, notebook=notebook).program()
                    for c in (number, OF_BOTH if number is OWN and sentence == MEAN else number)
                )
                verdict = judge(*oracle.recall(in_one_process), ranks.play(cells))
                said = sentence if number is OWN or sentence == HELD else RIGHT
                right = verdict.word == "right" if said in (RIGHT, MEAN) else said in verdict.why
                if not right or verdict.word == "wrong":
                    found[what, number] = said, verdict.word, verdict.why
    assert found == {}
