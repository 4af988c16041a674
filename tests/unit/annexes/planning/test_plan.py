"""The plan: a row for every way of training, what fits, what is recommended and why, and how it is shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.annexes.planning.plan import guide, plan_table
from nbtrain.annexes.planning.plan.plan import Plan, Planned
from nbtrain.annexes.planning.plan.plan_rows import make
from nbtrain.annexes.planning.profile.profile import profile
from nbtrain.annexes.planning.profile.recompute import recomputed, repeated
from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.strategies import presets
from nbtrain.strategies.base import Strategy
from nbtrain.strategies.memory_estimate import Estimate, Profile, World
from tests.support.planned import PLANNED, recomputing
from tests.support.plans import GB, on, plan, some_profile
from tests.support.shells import Notebook, notebook

ROOT = Path(__file__).resolve().parents[4]


# ---------------------------------------------------------------- rows


def test_every_strategy_and_every_preset_that_differs_is_a_row() -> None:
    names = {row.strategy for row in plan(64 * GB).rows}
    assert names >= {name for name in registry.STRATEGIES if name not in ("none", "deepspeed")}
    differ = {name for name, preset in presets.PRESETS.items() if preset.options}
    assert differ - names <= {"fsdp_cpu_offload"}, "on a CPU it is fsdp"
    assert not names & {"ddp_spawn", "ddp_notebook", "sequential", "tpu", "none"}


def test_a_rows_figures_are_the_strategys_own() -> None:
    made = plan(64 * GB)
    ddp = made.row("ddp")
    assert ddp.estimate == registry.strategy("ddp").load()().estimate(made.profile, World(ranks=4))
    assert ddp.line == "--strategy ddp --devices 4"
    again = made.row("ddp", recompute=True)
    assert (again.name, again.line) == (
        "ddp + --checkpoint-activations Block",
        "--strategy ddp --checkpoint-activations Block --devices 4",
    )
    assert again.estimate.activations < 0.3 * ddp.estimate.activations


@pytest.mark.slow
def test_what_is_not_installed_is_a_row_with_its_remedy_and_is_not_loaded() -> None:
    told = in_fresh_python(
        "import sys\n"
        "from tests.support.plans import plan, GB\n"
        "row = plan(GB).row('xla')\n"
        "print(row.estimate, row.fits, 'nbtrain.strategies.xla' in sys.modules, row.available)"
    )
    assert told.strip() == "None None False torch_xla is not installed: pip install torch_xla"


def test_who_takes_more_devices_says_so() -> None:
    made = plan(64 * GB, ranks=1)
    pipeline, hybrid = made.row("pipeline"), made.row("fsdp_hybrid")
    assert pipeline.available == "needs 2 devices: write --devices 2"
    assert hybrid.available == "needs 4 devices: write --devices 4"


def test_what_asks_for_a_word_of_the_users_is_never_recommended() -> None:
    asking = [row for row in plan(64 * GB).rows if row.asks]
    assert all("nvme" in row.strategy for row in asking)
    assert not {row.name for row in asking} & {row.name for row in plan(64 * GB).usable}


class Sparing(Strategy):
    """Needs next to nothing."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        share: int = 100

    def estimate(self, profile: Profile, world: World) -> Estimate | None:
        peak = profile.parameters // self.options.share
        return Estimate(
            parameters=peak, gradients=0, optimizer=0, activations=0, buffers=0, kept=peak, peak=peak, sent=world.ranks,
            notes=("it knows the answer",),
        )  # fmt: skip


class Silent(Strategy):
    pass


class Broken(Strategy):
    def estimate(self, profile: Profile, world: World) -> Estimate | None:
        raise ZeroDivisionError("integer division or modulo by zero")


class Refusing(Strategy):
    def estimate(self, profile: Profile, world: World) -> Estimate | None:
        raise UsageError("net has too few layers: write --devices 2")


def test_strategies_of_the_notebook_are_rows_with_or_without_an_estimate() -> None:
    own = {"Sparing": Sparing, "half": Sparing(share=2), "Silent": Silent, "Broken": Broken, "Refusing": Refusing}
    made = make(some_profile(), on(GB), own=own)
    rows = {row.name: row for row in made.rows if row.name in own}
    assert rows["Sparing"].fits
    assert rows["Sparing"].note == "it knows the answer"
    assert peak(rows["half"]) == 50 * peak(rows["Sparing"])
    assert rows["Silent"].note == "not known: it has no estimate(profile, world)"
    assert rows["Silent"].fits is None
    assert rows["Broken"].note == "its estimate failed: ZeroDivisionError: integer division or modulo by zero"
    assert rows["Refusing"].available == "net has too few layers: write --devices 2"
    shown = repr(made)
    assert "Not available: Refusing (net has too few layers: write --devices 2)" in shown
    assert "its estimate failed" in shown


def test_options_that_the_user_has_set_count_for_their_strategy() -> None:
    given = {"fsdp": {"sharding": "SHARD_GRAD_OP"}}
    row = make(some_profile(), on(GB), given=given).row("fsdp")
    other = plan(GB).row("fsdp_shard_grad_op")
    assert row.estimate == other.estimate
    assert row.line == "--strategy fsdp --sharding SHARD_GRAD_OP --devices 4"


# ---------------------------------------------------------------- what is recommended


@pytest.mark.parametrize("room", [64 * GB, 3 * GB, 2400 * 10**6, 1500 * 10**6, 700 * 10**6])
def test_the_fastest_that_fits_is_recommended(room: int) -> None:
    made = plan(room)
    best = made.recommended
    assert best.fits
    at = guide.place(*best.way)
    assert at is not None
    faster = [row for way in guide.ORDER[:at] if (row := made.row(way.name, way.recompute)) is not None]
    assert all(row.available or row.fits is False or row.tight for row in faster if row.strategy != "single")
    assert best.why.count(".") >= 1
    assert best.name in best.why


def test_with_room_it_is_ddp_and_with_one_device_single() -> None:
    best = plan(64 * GB).recommended
    assert best.line == "--strategy ddp --devices 4"
    assert best.why.startswith("ddp needs 3.15 GB per rank of the 64 GB that it may use; it is the ")
    assert "it is the fastest on several devices, as it gathers no weights; a rank sends " in best.why
    best = plan(64 * GB, ranks=1).recommended
    assert best.line == "--strategy single --devices 1"


def test_the_reason_names_what_does_not_fit() -> None:
    best = plan(3 * GB).recommended
    assert best.why.startswith("ddp needs 3.15 GB per rank, and may use 3 GB. ")
    assert "is the fastest that fits" in best.why


def test_what_fits_barely_gives_way_to_what_fits_well() -> None:
    made = plan(3200 * 10**6)
    ddp, best = made.row("ddp"), made.recommended
    assert ddp.tight
    assert best.strategy != "ddp"
    assert "barely, 99 %" in repr(made)


def test_one_rank_alone_has_the_memory_of_all() -> None:
    made = make(some_profile(activations=100), on(300 * 10**6, alone=2 * GB))
    best = made.recommended
    assert best.strategy == "single"
    assert "one rank alone has all memory" in best.why


def test_where_nothing_fits_it_is_said_what_would_help() -> None:
    made = plan(GB // 100)
    assert made.recommended is None
    assert made.why.startswith("Nothing fits: ")
    assert made.why in repr(made)
    activations = make(some_profile(activations=100 * GB), on(GB))
    assert activations.recommended is None
    assert "a smaller batch needs less" in activations.why


def test_the_machines_memory_counts_where_parts_are_kept_there() -> None:
    class Hosted(Sparing):
        def estimate(self, profile: Profile, world: World) -> Estimate | None:
            return Estimate(
                parameters=1, gradients=0, optimizer=0, activations=0, buffers=0, kept=1, peak=1, sent=1, host=GB
            )

    def fits(host: int | None) -> bool | None:
        row = make(some_profile(), on(GB, kind="cuda", host=host), own={"Hosted": Hosted}).row("Hosted")
        return row.fits

    assert (fits(2 * GB), fits(GB // 2), fits(0), fits(None)) == (True, False, False, True)


def test_where_no_room_is_left_nothing_fits_and_where_none_is_known_nobody_says() -> None:
    made = plan(0)
    assert {row.fits for row in made.usable} == {False}
    assert made.recommended is None
    assert made.why.startswith("Nothing fits: ")
    assert "no memory left" in repr(made)
    json.dumps(made.data(), allow_nan=False)
    at = on(GB)
    unknown = replace(at, each=(replace(at.alone, bytes=0, known=False),) * 4, alone=replace(at.alone, known=False))
    made = make(some_profile(), unknown)
    assert {row.fits for row in made.usable} == {None}
    assert made.why.startswith("The memory of these devices is not known")
    assert "not known" in repr(made)
    limited = make(some_profile(), unknown.at_most(GB, "--memory 1GB"))
    assert ddp_of(limited).room == GB


@pytest.mark.parametrize("goal", ["batch", "model"])
def test_the_guide_gives_more_for_more_loss_of_speed(goal: str) -> None:
    made = plan(64 * GB)
    found = [made.best(goal, loss) for loss in guide.LOSSES]
    peaks = [peak(row) for row in found if row is not None]
    assert len(peaks) == 3
    assert peaks == sorted(peaks, reverse=True)
    assert all(row.why.startswith(f"For the largest {goal} with ") for row in found if row is not None)
    assert not found[0].recompute


def test_in_place_of_what_failed_comes_what_needs_less() -> None:
    made = plan(3 * GB)
    ddp = made.row("ddp")
    assert ddp is not None
    less = made.less_than(ddp)
    assert peak(less) < peak(ddp)
    assert less.fits
    roomy = plan(64 * GB)  # the estimate had said that it fits: then a little less will not do
    less = roomy.less_than(ddp_of(roomy))
    assert less is not None
    assert peak(less) < 0.75 * peak(ddp)
    tiny = plan(GB // 100)
    less = tiny.less_than(ddp_of(tiny))
    assert less is not None
    assert peak(less) == min(peak(row) for row in tiny.usable if row.strategy != "single")


# ---------------------------------------------------------------- as data, text and a page


def test_all_of_it_is_json() -> None:
    data = json.loads(json.dumps(plan(3 * GB).data()))
    best = plan(3 * GB).recommended
    assert (data["recommended"], data["why"]) == (best.name, best.why)
    rows = {row["name"]: row for row in data["rows"]}
    assert rows["ddp"]["fits"] is False
    assert rows["ddp"]["estimate"]["peak"] == peak(ddp_of(plan(GB)))
    assert rows["xla"]["available"].endswith("pip install torch_xla")


def test_the_text_marks_the_recommended_row_and_says_the_line() -> None:
    shown = repr(plan(3 * GB)).splitlines()
    best = plan(3 * GB).recommended
    assert sum(line.startswith("★ ") for line in shown) == 2
    assert f"  %%distributed {best.line}" in shown
    assert any(line.startswith("net: 96 million parameters · 32 samples per rank · AdamW") for line in shown)
    assert any(line.startswith("Not available: xla (torch_xla is not installed") for line in shown)


def test_a_stated_bandwidth_is_a_column_of_times() -> None:
    made = make(some_profile(), on(GB), bandwidth=1e9)
    ddp = ddp_of(made)
    assert made.seconds(ddp) == ddp.estimate.sent / 1e9
    assert "communication" in repr(made).splitlines()[0]
    assert "communication" not in repr(plan(GB)).splitlines()[0]


def test_the_page_says_the_same_and_shows_names_as_they_are() -> None:
    made = make(some_profile(), on(3 * GB), own={"<b>Sparing</b>": Sparing})
    shown = made._repr_html_()
    assert "<b>Sparing" not in shown
    assert all(escape(line) in shown for line in plan_table._below(made.data()))


# ---------------------------------------------------------------- recomputed activations


def test_what_recomputing_saves_is_what_a_profile_of_it_finds() -> None:
    for name in ("transformer", "resnet"):
        made = profile(PLANNED[name].model(depth=4), PLANNED[name].batch())
        kind = repeated(made)
        assert kind in ("Block", "Residual")
        model = PLANNED[name].model(depth=4)
        with recomputing(kind, model):
            real = profile(model, PLANNED[name].batch())
        assert recomputed(made, kind).activations == pytest.approx(real.activations, rel=0.2)
        assert real.activations < 0.9 * made.activations


# ---------------------------------------------------------------- in a notebook and in a program


@pytest.fixture
def nb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with notebook() as found:
        net = PLANNED["transformer"].model()
        found.shell.user_ns.update(
            net=net, optimizer=torch.optim.AdamW(net.parameters()), batch=PLANNED["transformer"].batch(8)
        )
        yield found


def test_the_verb_shows_the_plan_and_starts_nothing(nb: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    before = [p.clone() for p in nb.shell.user_ns["net"].parameters()]
    drawn = torch.get_rng_state()
    nb.run("%distributed plan net --batch batch --devices 3")
    shown = capsys.readouterr().out
    assert "%%distributed --strategy ddp --devices 3" in shown
    assert "AdamW" in shown
    assert "8 samples per rank" in shown
    assert nb.recorders == []
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(p, old) for p, old in zip(nb.shell.user_ns["net"].parameters(), before, strict=True))
    assert not nb.shell.user_ns["optimizer"].state


def test_defaults_count_and_its_own_options_are_none(nb: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    nb.run("%distributed --devices 2 --precision bf16-mixed -s fsdp --sharding SHARD_GRAD_OP")
    nb.run("%distributed plan net --batch batch")
    shown = capsys.readouterr().out
    assert "--devices 2 --precision bf16-mixed" in shown
    nb.run("%distributed plan net --batch batch --devices 5 --memory 1MB --bandwidth 1GB/s")
    shown = capsys.readouterr().out
    assert "communication" in shown
    assert "Nothing fits" in shown
    assert "--memory 1MB is what a rank may use" in shown
    assert nb.spec("%%distributed\npass").pool.world_size == 2


@pytest.mark.parametrize(("line", "says"), [
    ("%distributed plan net other", "plan takes the name of one model, not 'net other'"),
    ("%distributed plan nett --batch batch", "the notebook has no 'nett'; did you mean net?"),
    ("%distributed plan net --batch batch,z", "--batch batch,z: --batch takes a name of the notebook, and it has no"),
    ("%distributed plan net --batch batch --output all", "plan has no option --output; it takes --devices, "),
    ("%distributed plan net --batch batch --stage 2", "plan has no option --stage; it takes --devices, "),
])  # fmt: skip
def test_what_it_cannot_do_is_one_line(nb: Notebook, line: str, says: str) -> None:
    assert nb.complaint(line).startswith(says)


def test_programs_get_the_same(nb: Notebook) -> None:
    net = PLANNED["mlp"].model()
    nb.run("%distributed --devices 3")
    found = nbtrain.plan(net, PLANNED["mlp"].batch(16), optimizer=torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    assert (found.profile.samples, found.profile.optimizer, found.devices.count) == (16, "SGD", 3)
    assert found.profile.state == found.profile.gradients
    assert nbtrain.plan("net", "batch", devices=2, precision="bf16-true").devices.precision == "bf16-true"
    named = nbtrain.plan("net", "batch", devices=4, goal="model", loss="small").recommended
    assert named.strategy in guide.GUIDE["model", "small"].ways
    with pytest.raises(UsageError, match="loss='none': there are no, small, any"):
        nbtrain.plan("net", "batch", loss="none")


@pytest.mark.parametrize(("given", "says"), [
    ({"optimizer": "optimiser"}, "the notebook has no 'optimiser'; did you mean optimizer?"),
    ({"optimizer": "nosuch"}, "the notebook has no 'nosuch'; an optimizer could be optimizer"),
    ({"optimizer": "batch"}, "batch is a tuple, not a torch.optim optimizer"),
    ({"optimizer": 5}, "optimizer is an int, not a torch.optim optimizer"),
    ({"model": "nett"}, "the notebook has no 'nett'; did you mean net?"),
    ({"batch": "bach"}, "the notebook has no 'bach'; did you mean batch?"),
    ({"model": 5}, "is an int, not a model"),
    ({"batch": 5}, "is an int, not a batch"),
])  # fmt: skip
def test_names_that_a_program_gets_wrong_are_told_with_what_is_like_them(
    nb: Notebook, given: dict[str, Any], says: str
) -> None:
    nb.run("%distributed --devices 2")
    with pytest.raises(UsageError, match=re.escape(says)):
        nbtrain.plan(**{"model": "net", "batch": "batch", **given})


@pytest.mark.slow
def test_a_script_without_a_notebook_can_ask() -> None:
    told = in_fresh_python(
        "import torch, nbtrain\n"
        "net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))\n"
        "x = torch.randn(4, 64)\n"
        "found = nbtrain.plan(net, x, devices=2)\n"
        "print(found.profile.model, found.recommended.line)\n"
        "print(nbtrain.plan(devices=1).recommended.line)"
    )
    assert told.splitlines() == ["net --strategy ddp --devices 2", "--strategy single --devices 1"]


def peak(row: Planned) -> int:
    return row.estimate.peak


def ddp_of(made: Plan) -> Planned:
    row = made.row("ddp")
    assert row is not None
    return row


def in_fresh_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
