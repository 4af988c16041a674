"""The strategy picker, without a page: what is chosen, the line that comes of it, what its buttons do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import nn

import nbtrain
from nbtrain.annexes.planning.compare.comparison import Comparison
from nbtrain.annexes.planning.compare.receipt import Receipt
from nbtrain.annexes.planning.picker import options_form
from nbtrain.annexes.planning.picker.notebook_model import PlanSettings
from nbtrain.annexes.planning.picker.picker_state import PickerState, ranks_of
from nbtrain.annexes.planning.picker.training_loop import loop, resized
from nbtrain.annexes.planning.plan.device_memory import DeviceMemory
from nbtrain.annexes.planning.plan.plan import Plan
from nbtrain.annexes.planning.plan.plan_rows import make
from nbtrain.annexes.planning.profile.model_and_batch import find_model_and_batch
from nbtrain.base.errors import UsageError
from nbtrain.base.specs import PoolSpec
from nbtrain.machine import host, registry
from nbtrain.notebook.magics.extension import state_here
from nbtrain.notebook.magics.line.parse import Request, parse
from nbtrain.notebook.magics.line.resolve import Chosen
from nbtrain.notebook.magics.state import MagicsState
from tests.support.shells import notebook as shell_notebook

STATE = {"__name__": "__main__"}


class FakeModel:
    """In place of the notebook's: real plans, of a machine with so much memory; notes what it was asked to measure."""

    def __init__(self, limit: int = 10**9) -> None:
        self.limit = limit
        self.measured: list[tuple[str, list[tuple[str, str]]]] = []
        self.verified: list[tuple[str, str]] = []
        self.model: Any = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8))

    def plan(self, settings: PlanSettings) -> Plan:
        if self.model is None:
            raise UsageError("name a model")
        names = {"model": self.model, "x": torch.ones(settings.batch or 16, 64)}
        count = ranks_of(settings.devices, 2)
        at = DeviceMemory.of(PoolSpec(devices=("cpu",) * count), settings.precision)
        each = tuple(replace(one, bytes=self.limit) for one in at.each)
        at = replace(at, each=each, alone=replace(at.alone, bytes=self.limit))
        return make(find_model_and_batch(names).profile(at.precision), at, goal=settings.goal, loss=settings.loss)

    def cell(self) -> str:
        return "nothing is run"

    def measure(
        self, candidates: Sequence[tuple[str, str]], goal: str, told: Callable[[Comparison], None]
    ) -> Comparison:
        self.measured.append((goal, list(candidates)))
        found = Comparison.of(candidates, steps=5).with_row(0, state="done", samples_per_second=7.0, memory=(1, 2))
        told(found)
        return found

    def verify(self, name: str, line: str, told: Callable[[Receipt], None]) -> Receipt:
        self.verified.append((name, line))
        found = Receipt(line=line, strategy=name, ranks=2, state="equal")
        told(found)
        return found


@pytest.fixture
def state() -> Iterator[MagicsState]:
    with shell_notebook():
        found = state_here()
        assert found is not None
        yield found


Picking = Callable[..., PickerState]


@pytest.fixture
def picking(state: MagicsState) -> Picking:
    def make(line: str = "--devices 2", model: FakeModel | None = None) -> PickerState:
        made = PickerState(state, model or FakeModel(), state.read(line))
        made.begin()
        return made

    return make


def card(choice: PickerState, name: str) -> dict[str, Any]:
    (found,) = (one for one in choice.data()["cards"] if one["name"] == name)
    return dict(found)


def test_what_is_recommended_is_chosen_until_somebody_chooses(picking: Picking) -> None:
    choice = picking()
    assert choice.line() == "--strategy ddp --devices 2"
    choice.do({"kind": "set", "name": "goal", "value": "model"})
    choice.do({"kind": "set", "name": "loss", "value": "small"})
    best = choice.data()["plan"]["recommended"]
    assert best not in ("ddp", None)
    assert choice.line() == f"--strategy {best} --devices 2"
    choice.do({"kind": "take", "line": "--strategy zero1 --devices 2"})
    choice.do({"kind": "set", "name": "goal", "value": "speed"})
    assert choice.line() == "--strategy zero1 --devices 2"
    assert choice.data()["plan"]["recommended"] == "ddp"
    assert [one["name"] for one in choice.data()["cards"] if one["recommended"]] == ["ddp"]


def test_memory_stands_against_the_room(picking: Picking) -> None:
    shown = card(picking(), "ddp")["shown"]
    # 18,696 numbers of four bytes
    assert shown["memory"]["parameters"] == shown["memory"]["gradients"] == 74_784
    assert 0.99 * 10**9 < shown["room"] <= 10**9
    assert shown["fits"] is True
    assert card(picking(model=FakeModel(limit=350_000)), "ddp")["shown"]["fits"] is False


def test_what_cannot_be_used_says_why_and_what_helps(picking: Picking) -> None:
    choice = picking("--devices 1")
    assert card(choice, "pipeline")["reason"] == "needs 2 ranks: set Ranks to 2"
    if registry.lacking(registry.STRATEGIES["xla"].needs):
        assert "pip install torch_xla" in card(choice, "xla")["reason"]
    names = [bool(one["reason"]) for one in choice.data()["cards"]]
    assert names == sorted(names), "what can be used comes first"
    choice.do({"kind": "set", "name": "ranks", "value": "2"})
    assert card(choice, "pipeline")["reason"] == ""
    choice.do({"kind": "take", "line": "--strategy pipeline"})
    choice.do({"kind": "set", "name": "ranks", "value": "1"})
    assert "set Ranks to 2" in choice.data()["wrong"]
    assert choice.data()["line"] == ""


def test_one_device_is_written_for_what_takes_one(picking: Picking) -> None:
    choice = picking("--devices 4")
    choice.do({"kind": "take", "line": "--strategy single --devices 1"})
    assert choice.line() == "--strategy single --devices 1"
    choice.do({"kind": "take", "line": "--strategy fsdp --devices 4"})
    assert choice.line() == "--strategy fsdp --devices 4"


def test_options_become_flags_and_estimates(picking: Picking) -> None:
    choice = picking()
    choice.do({"kind": "take", "line": "--strategy fsdp --devices 2"})
    before = card(choice, "fsdp")["shown"]["memory"]["peak"]
    choice.do({"kind": "option", "name": "wrap", "value": "Linear"})
    choice.do({"kind": "option", "name": "limit_all_gathers", "value": "off"})
    assert choice.line() == "--strategy fsdp --devices 2 --wrap Linear --no-limit-all-gathers"
    assert choice.data()["line"] == f"%%distributed {choice.line()}"
    choice.do({"kind": "option", "name": "limit_all_gathers", "value": "on"})
    choice.do({"kind": "option", "name": "sharding", "value": "NO_SHARD"})
    assert choice.line() == "--strategy fsdp --devices 2 --sharding NO_SHARD --wrap Linear"
    assert card(choice, "fsdp")["shown"]["memory"]["peak"] > before, "the estimate is of what was typed"
    choice.do({"kind": "take", "line": "--strategy ddp"})
    assert choice.line() == "--strategy ddp --devices 2", "options of the other strategy are gone"


def test_what_is_wrong_with_an_option_is_said(picking: Picking) -> None:
    choice = picking()
    choice.do({"kind": "take", "line": "--strategy ddp"})
    choice.do({"kind": "option", "name": "bucket_mb", "value": "many"})
    assert choice.data()["wrong"].startswith("--bucket-mb many: --bucket-mb takes ")
    assert choice.data()["line"] == ""
    choice.do({"kind": "use"})
    assert choice.data()["said"][1] == "bad"
    choice.do({"kind": "option", "name": "bucket_mb", "value": ""})
    assert choice.data()["wrong"] == "--bucket-mb needs a value; the usual one is 25"
    choice.do({"kind": "option", "name": "bucket_mb", "value": "5"})
    assert choice.line() == "--strategy ddp --devices 2 --bucket-mb 5"
    choice.do({"kind": "set", "name": "ranks", "value": "none"})
    assert choice.data()["said"] == ["ranks must be a whole number, 1 or more, not 'none'", "bad"]
    choice.do({"kind": "take", "line": "--strategy fsdp_hybrid"})
    assert "replicas" in choice.data()["wrong"]
    choice.do({"kind": "option", "name": "replicas", "value": "2"})
    assert choice.line() == "--strategy fsdp_hybrid --devices 2 --replicas 2"


def test_presets_are_variants_of_their_strategy(picking: Picking) -> None:
    choice = picking()
    variants = {one["name"]: one for one in card(choice, "fsdp")["variants"]}
    assert {"fsdp", "fsdp_cpu_offload", "fsdp_shard_grad_op", "fsdp_hybrid"} <= set(variants)
    choice.do({"kind": "take", "line": variants["fsdp_cpu_offload"]["line"]})
    shown = card(choice, "fsdp")
    assert shown["chosen"]
    assert shown["shown"]["name"] == "fsdp_cpu_offload"
    usual = {one["field"]: one["usual"] for one in choice.data()["options"]}
    assert usual["cpu_offload"] == "on", "what the preset says is nothing that has to be written"
    assert choice.line() == "--strategy fsdp_cpu_offload --devices 2"
    choice.do({"kind": "option", "name": "cpu_offload", "value": "off"})
    assert choice.line() == "--strategy fsdp_cpu_offload --devices 2 --no-cpu-offload"


def test_use_sets_the_defaults_and_nothing_of_another_strategy_stays(picking: Picking, state: MagicsState) -> None:
    state.set_defaults(state.read("--strategy fsdp --cpu-offload --precision bf16-mixed --hang-after 5"))
    choice = picking("--devices 2")
    assert choice.line() == "--strategy fsdp --devices 2 --precision bf16-mixed --cpu-offload"
    choice.do({"kind": "take", "line": "--strategy fsdp"})
    choice.do({"kind": "set", "name": "precision", "value": "32"})
    assert choice.line() == "--strategy fsdp --devices 2 --precision 32", "a default has to be taken back"
    choice.do({"kind": "use", "written": "next"})
    words, tone = choice.data()["said"]
    assert tone == "good"
    assert words == (
        "The line is in the next cell. Every %%distributed cell now runs with --strategy fsdp --devices 2 "
        "--precision 32"
    )
    assert set(state.defaults.given) == {"strategy", "devices", "precision", "hang_after"}
    assert state.defaults.own == {}
    run = state.devices.run(Request(), state.defaults, state.notebook)
    assert (run.strategy, run.pool.world_size, run.precision, dict(run.options)) == ("fsdp", 2, "32", {})


def test_every_line_of_the_plan_can_be_taken_and_used(picking: Picking, state: MagicsState) -> None:
    choice = picking()
    seen = 0
    for one in choice.data()["cards"]:
        for variant in one["variants"]:
            if one["reason"] or variant["reason"]:
                continue
            choice.do({"kind": "take", "line": variant["line"]})
            data = choice.data()
            assert [each["name"] for each in data["cards"] if each["chosen"]] == [one["name"]], variant
            if not data["wrong"]:
                seen += 1
                state.devices.run(state.read(choice.line()), Request(), state.notebook)
    assert seen > 10


def test_a_batch_of_another_size_is_planned_for(picking: Picking) -> None:
    choice = picking()
    before = card(choice, "ddp")["shown"]["memory"]["activations"]
    assert choice.data()["note"] == ""
    choice.do({"kind": "set", "name": "batch", "value": "1600"})
    assert card(choice, "ddp")["shown"]["memory"]["activations"] > 20 * before
    choice.do({"kind": "set", "name": "ranks", "value": 0})
    assert "ranks must be a whole number, 1 or more, not 0" in choice.data()["said"][0]
    assert choice.data()["note"] == (
        "Planned for batches of 1,600. The notebook's have 16: make the loader with batch_size=1600."
    )
    choice.do({"kind": "set", "name": "batch", "value": None})
    assert card(choice, "ddp")["shown"]["memory"]["activations"] == before


def test_without_a_model_there_are_cards_all_the_same(picking: Picking) -> None:
    model = FakeModel()
    model.model = None
    choice = picking(model=model)
    data = choice.data()
    assert (data["lacks"], data["plan"]) == ("name a model", None)
    assert card(choice, "fsdp")["shown"]["memory"] is None
    choice.do({"kind": "take", "line": "--strategy fsdp"})
    assert choice.line() == "--strategy fsdp --devices 2"


def test_what_is_measured(picking: Picking) -> None:
    model, told = FakeModel(), list[dict[str, Any]]()
    choice = picking(model=model)
    assert choice.data()["worth"][0] == "ddp"
    choice.do({"kind": "take", "line": "--strategy fsdp"})
    choice.do({"kind": "option", "name": "cpu_offload", "value": "on"})
    choice.tell = told.append
    choice.do({"kind": "measure", "names": ["ddp", "single", "fsdp"], "seq": 12})
    ((goal, ways),) = model.measured
    assert goal == "speed"
    assert dict(ways) == {
        "ddp": "--strategy ddp --devices 2",
        "single": "--strategy single --devices 1",
        "fsdp --cpu-offload": "--strategy fsdp --devices 2 --cpu-offload",
    }
    assert [one["busy"] for one in told] == ["measure", "measure", "measure", ""]
    assert told[0]["compared"] is None
    assert "7" in told[-1]["compared"]["table"][1]
    assert {one["answered"] for one in told} == {12}
    choice.do({"kind": "measure", "names": []})
    assert choice.data()["said"][0].startswith("Nothing is ticked")


@pytest.mark.parametrize(("paces", "recommended", "line"), [
    ({"ddp": 9.0, "single": 3.0}, "ddp", "--strategy ddp --devices 2"),
    ({"ddp": 3.0, "single": 9.0}, "single", "--strategy single --devices 1"),
    ({"ddp": 9.0, "single": 9.5}, "ddp", "--strategy ddp --devices 2"),
    ({"single": 9.0}, "single", "--strategy single --devices 1"),
    ({}, None, "--strategy ddp --devices 2"),
], ids=["as planned", "another", "too close to call", "the planned one failed", "all failed"])  # fmt: skip
def test_what_was_measured_is_recommended_under_its_settings(
    picking: Picking, monkeypatch: pytest.MonkeyPatch, paces: dict[str, float], recommended: str | None, line: str
) -> None:
    def measure(_: FakeModel, candidates: Any, goal: str, told: Any) -> Comparison:
        found = Comparison.of(candidates, steps=5, over=True)
        for at, (name, _) in enumerate(candidates):
            state = {"state": "done", "samples_per_second": paces[name]} if name in paces else {"state": "failed"}
            found = found.with_row(at, **state)
        return found

    monkeypatch.setattr(FakeModel, "measure", measure)
    choice = picking()
    choice.do({"kind": "measure", "names": ["ddp", "single"]})
    assert choice.data()["plan"]["recommended"] == recommended
    assert [one["name"] for one in choice.data()["cards"] if one["recommended"]] == [recommended] * bool(recommended)
    assert choice.line() == line
    assert ("measured" in choice.data()["plan"]["why"]) == (recommended != "ddp")
    choice.do({"kind": "set", "name": "batch", "value": 64})
    assert choice.data()["plan"]["recommended"] == "ddp", "of other batches nothing was measured"


def test_what_is_chosen_is_verified(picking: Picking) -> None:
    model, told = FakeModel(), list[dict[str, Any]]()
    choice = picking(model=model)
    choice.do({"kind": "take", "line": "--strategy fsdp"})
    choice.tell = told.append
    choice.do({"kind": "verify", "seq": 3})
    assert model.verified == [("fsdp", "--strategy fsdp --devices 2")]
    assert [one["busy"] for one in told] == ["verify", "verify", ""]
    assert told[-1]["receipt"]["state"] == "equal"
    assert "✓ equal" in told[-1]["receipt"]["text"]


def test_a_strategy_of_the_notebook_is_a_card(picking: Picking, state: MagicsState) -> None:
    class Mine(nbtrain.Strategy):
        """Does it my way."""

        @dataclass(frozen=True, kw_only=True, slots=True)
        class Options:
            how: Literal["well", "badly"] = "well"
            share: float = 0.5
            names: tuple[str, ...] = ()

    state.notebook["mine"] = Mine
    choice = picking()
    assert card(choice, "mine")["summary"] == "defined in this notebook: Does it my way."
    choice.do({"kind": "take", "line": "--strategy mine"})
    kinds = {one["field"]: (one["kind"], one["choices"]) for one in choice.data()["options"]}
    assert kinds == {"how": ("choice", ("well", "badly")), "share": ("number", ()), "names": ("text", ())}
    choice.do({"kind": "option", "name": "how", "value": "badly"})
    choice.do({"kind": "option", "name": "names", "value": "one, two"})
    assert choice.line() == '--strategy mine --devices 2 --how badly --names "one, two"'


@pytest.mark.parametrize(
    "name", [name for name in registry.STRATEGIES if not registry.lacking(registry.STRATEGIES[name].needs)]
)
def test_every_option_has_an_input_of_its_kind_and_is_explained(name: str) -> None:
    chosen = Chosen.named(name, {})
    for one in options_form.inputs(chosen, {}):
        assert one.kind in options_form.KINDS
        assert one.help, f"{name} {one.flag} has no words below it"
        assert one.value == one.usual
        other = {"switch": "off" if one.usual == "on" else "on", "number": "3", "text": "7"}.get(
            one.kind, one.choices[-1:]
        )
        typed = {one.field: other if isinstance(other, str) else other[0]}
        again = parse(" ".join(options_form.words(options_form.inputs(chosen, typed))), {})
        assert options_form.typed_of(chosen, again.own) in (typed, {}), one.flag


@pytest.mark.parametrize(
    ("typed", "ranks"), [("4", 4), ('"0,2"', 2), ('"3"', 1), ("[0, 1, 2]", 3), ("free:2", 2), ("-1", 8), ("0", 1)]
)
def test_how_many_ranks_a_spec_is(typed: str, ranks: int) -> None:
    assert ranks_of(typed, count=8) == ranks


def test_a_batch_is_made_larger_without_touching_memory() -> None:
    batch = {"x": torch.arange(6).reshape(3, 2), "more": (torch.ones(3), [torch.tensor(1.0)])}
    small, large = resized(batch, 2), resized(batch, 10**9)
    assert small["x"].tolist() == [[0, 1], [2, 3]]
    assert large["x"].shape == (10**9, 2)
    assert large["x"][2].tolist() == [4, 5]
    assert (large["more"][0].shape, large["more"][1][0].shape) == ((10**9,), ())


@pytest.mark.parametrize("batches", ["loader", "x, y", "x"])
def test_the_loop_that_is_made_for_a_model_trains_it(batches: str) -> None:
    from itertools import islice

    names: dict[str, Any] = {**STATE, "net": nn.Linear(3, 2), "x": torch.randn(8, 3), "y": torch.randint(2, (8,))}
    names["opt"] = torch.optim.SGD(names["net"].parameters(), lr=0.1)
    if batches == "loader":
        names["loader"] = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(names["x"], names["y"]), batch_size=4
        )
    before = names["net"].weight.clone()
    code = loop(find_model_and_batch(names, "net", batches), names).replace("10**6", "3")
    exec(compile(code, "cell", "exec"), names)
    assert not torch.equal(names["net"].weight, before)
    del names["opt"]
    exec(compile(loop(find_model_and_batch(names, "net", batches), names).replace("10**6", "3"), "cell", "exec"), names)
    assert list(islice(names["net"].parameters(), 1))


def test_a_terminal_and_a_page_without_widgets_are_told_what_there_is_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    with shell_notebook() as found:
        assert "%distributed plan" in found.complaint("%distributed pick")
        monkeypatch.setattr(found.shell, "kernel", object(), raising=False)
        monkeypatch.setattr(host, "environment", lambda: "Databricks")
        told = found.complaint("%distributed pick")
        assert told.startswith("pick cannot be shown: Databricks shows no widgets of other packages; %distributed plan")
        assert "name of one model" in found.complaint("%distributed pick a b")
    with pytest.raises(UsageError, match="%load_ext nbtrain"):
        nbtrain.picker()
