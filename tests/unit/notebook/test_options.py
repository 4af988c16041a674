"""What a line means: words, values, and one line for everything that is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.notebook.magics.line import strategy_flags, values
from nbtrain.notebook.magics.line.options import BY_FLAG, BY_NAME
from nbtrain.notebook.magics.line.parse import parse, parse_ranks
from nbtrain.notebook.magics.line.split_line import Word, split
from nbtrain.notebook.magics.line.suggestions import OF_OTHERS, similar, similar_flag
from nbtrain.notebook.magics.line.values import DeviceSpec
from nbtrain.strategies.base import Strategy
from tests.support.shells import Halves, Notebook, notebook


@pytest.fixture
def nb() -> Iterator[Notebook]:
    with notebook() as found:
        yield found


def test_words_keep_quotes_and_brackets() -> None:
    line = "-d \"0, 1\" --wrap [A, B] --x='a b'  # two of them"
    assert [word.text for word in split(line)] == ["-d", '"0, 1"', "--wrap", "[A, B]", "--x='a b'"]
    assert split('"0, 1"')[0].plain == "0, 1"


def test_words_that_are_not_closed() -> None:
    with pytest.raises(UsageError, match=r"is not closed: \] is missing"):
        split("-d [1, 2")
    assert [word.text for word in split('-s "dd', unfinished=True)] == ["-s", '"dd']


@pytest.mark.parametrize(("typed", "value", "quoted"), [
    ("4", 4, False), ("-1", -1, False), ('"4"', "4", True), ("'0, 2'", "0, 2", True), ("1,3", "1,3", False),
    ("[1, 3]", [1, 3], False), ("auto", "auto", False), ("free:2", "free:2", False), ("None", None, False),
    ("n", 3, False), ("text", "0,1", True), ("both", [0, 1], False),
])  # fmt: skip
def test_devices_as_the_table_of_the_manual_says(typed: str, value: Any, quoted: bool) -> None:
    variables = {"n": 3, "text": "0,1", "both": (0, 1)}
    assert parse(f"--devices {typed}", variables).value("devices") == DeviceSpec(value, quoted)
    assert parse(f"-d={typed}", variables).value("devices") == DeviceSpec(value, quoted)


@pytest.mark.parametrize(("line", "says"), [
    ("--devices", r"--devices needs a value: -d, --devices SPEC"),
    ("-d --no-sampler", r"-d needs a value"),
    ("-d=", "no value behind the ="),
    ("-d 2 --devices 3", "--devices is given twice"),
    ("-d two", r"the notebook has no 'two'"),
    ("--engine lokal", r"--engine is one of local, inprocess, .*; did you mean local\?"),
    ("--start cold", "--start is one of warm, spawn, fork"),
    ("--accumulate 0", "whole number, 1 or more"),
    ("--accumulate True", "whole number, 1 or more"),
    ("--accumulate much", "whole number, 1 or more"),
    ("--no-sampler 3", "--no-sampler is a switch and takes no value"),
    ("-s ddpp", r"no such strategy; did you mean ddp or ddp2\?$"),
    ("-s zzz", r"no such strategy; there are auto, none, single, dp, ddp, ddp2"),
    ("-s number", "number is a int, not a strategy"),
    ("-s DDP", r"no such strategy; did you mean ddp\?$"),
    ("-s fs", r"no such strategy; did you mean fsdp"),
    ("-d2", r"^-d2: write -d 2$"),
    ("-sddp", r"^-sddp: write -s ddp$"),
    ("--precision fp16", r"; did you mean 16-mixed\?$"),
    ("--precision BF16-mixed", r"; did you mean bf16-mixed\?$"),
    ("-s off", r"^-s off: write -s auto to take the option back$"),
    ("--devices none", "write --devices auto to take the option back$"),
    ("--precision default", "write --precision 32 to take the option back$"),
    ("--hang-after off", "write --hang-after 60 to take the option back$"),
    ("--scale-lr none", "write --scale-lr off to take the option back$"),
])  # fmt: skip
def test_a_wrong_line_is_one_line(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse(line, {"number": 1})
    assert "\n" not in str(caught.value)


def test_values_may_be_names_of_the_notebook() -> None:
    found = parse("--accumulate k --output where -s which", {"k": 4, "where": "all", "which": "ddp"})
    assert (found.value("accumulate"), found.value("output"), found.value("strategy")) == (4, "all", "ddp")


@pytest.mark.parametrize("option", ["scale_lr", "save_every", "keep", "log_to", "checkpoint_activations", "hosts"])
def test_what_does_nothing_unless_it_is_given_is_taken_back_with_off(option: str) -> None:
    found = parse(f"--{option} off", {})
    assert option in found.given
    assert found.value(option) == BY_NAME[option].default


@pytest.mark.parametrize(("typed", "names", "hint"), [
    ("stat", ["status", "start", "stop"], "; did you mean status or start?"),
    ("statuss", ["status", "start", "stop"], "; did you mean status?"),
    ("FSDP", ["fsdp", "fsdp_cpu"], "; did you mean fsdp?"),
    ("--dev", ["--devices", "--debug-ranks"], "; did you mean --devices?"),
    ("-x", ["-s", "--xyz"], ""),
    ("s", ["status", "start"], ""),
])  # fmt: skip
def test_what_begins_like_it_comes_first(typed: str, names: list[str], hint: str) -> None:
    assert similar(typed, names) == hint


def test_a_moment_is_so_much_from_now_or_a_clocks() -> None:
    for typed, seconds in (("11h45m", 42_300), ("45s", 45)):
        at = parse(f"--until {typed}", {}).value("until")
        assert 0 <= time.time() + seconds - at < 5
    at = parse("--until 7:30", {}).value("until")
    assert datetime.fromtimestamp(at).strftime("%H:%M:%S") == "07:30:00"
    assert 0 < at - time.time() <= 86_400 + 3_600
    for typed in ("25:00", "500", "soon"):
        with pytest.raises(UsageError, match=f"--until {typed}: --until takes a time from now"):
            parse(f"--until {typed}", {})


def test_options_of_other_tools_are_options_here() -> None:
    assert set(OF_OTHERS.values()) <= set(BY_FLAG)
    for typed, meant in OF_OTHERS.items():
        assert similar_flag(typed, BY_FLAG) == f"; did you mean {meant}?"
    assert similar_flag("--ranks", ["--start"]) == ""


def test_a_switch_is_taken_back_with_off() -> None:
    assert parse("--oversubscribe", {}).value("oversubscribe") is True
    assert parse("--oversubscribe off", {}).value("oversubscribe") is False
    assert parse("--split_batches", {}).value("split_batches") is True


@pytest.mark.parametrize(
    ("typed", "ranks"),
    [("0", (0,)), ("2,0", (0, 2)), ("0-2", (0, 1, 2)), ("0, 2-3", (0, 2, 3)), ("1,1", (1,)), ("[0,1]", (0, 1))],
)
def test_ranks(typed: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(parse(typed, {}).words) == ranks


@pytest.mark.parametrize("typed", ["", "two", "2-0", "0,,1", "1.5"])
def test_ranks_that_are_none(typed: str) -> None:
    with pytest.raises(UsageError, match="0-2"):
        parse_ranks(parse(typed, {}).words)


def test_flags_are_the_fields_of_options() -> None:
    found = strategy_flags.flags_of(Halves)
    assert list(found) == ["--bucket", "--ratio", "--wrap", "--mode", "--label", "--eager", "--no-eager"]
    assert found["--mode"].choices == ("full", "grad")


@pytest.mark.parametrize(("typed", "word", "value"), [
    ("--bucket", "30", 30),
    ("--bucket", "size", 7),
    ("--bucket", "2e8", 200_000_000),
    ("--ratio", "1", 1.0),
    ("--wrap", "Block", frozenset({Word})),
    ("--wrap", "Block,Other", frozenset({Word, Strategy})),
    ("--wrap", "{Block}", frozenset({Word})),
    ("--wrap", "space.inner", frozenset({Strategy.Options})),
    ("--mode", "grad", "grad"),
    ("--label", "run", "run"),
    ("--label", "None", None),
    ("--label", "size", "size"),
    ("--eager", None, True),
    ("--eager", "off", False),
    ("--no-eager", None, False),
])  # fmt: skip
def test_a_flag_takes_what_its_field_is(typed: str, word: str | None, value: Any) -> None:
    class space:
        inner = Strategy.Options

    variables = {"size": 7, "Block": Word, "Other": Strategy, "space": space}
    flag = strategy_flags.flags_of(Halves)[typed]
    found = strategy_flags.read(typed, None if word is None else Word(word), flag, variables)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("typed", "word", "says"), [
    ("--bucket", "much", r"--bucket much: --bucket takes int; the notebook has no 'much'"),
    ("--bucket", None, r"--bucket needs a value \(int\)"),
    ("--bucket", "True", "takes int"),
    ("--bucket", "2.5", "takes int"),
    ("--bucket", "1e999", "takes int"),
    ("--mode", "graad", r"takes full\|grad; did you mean grad\?"),
    ("--eager", "perhaps", "write --eager or --no-eager"),
    ("--ratio", "f(1)", "assign it to a variable first"),
])  # fmt: skip
def test_a_flag_says_what_it_takes(typed: str, word: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        strategy_flags.read(typed, None if word is None else Word(word), strategy_flags.flags_of(Halves)[typed], {})


def clashes(strategies: Mapping[str, type]) -> list[str]:
    """Flags that do not mean the same under every strategy that has them: same word, another type."""
    seen: dict[str, tuple[str, strategy_flags.Flag]] = {}
    found: list[str] = []
    for name, strategy in strategies.items():
        for typed, flag in strategy_flags.flags_of(strategy).items():
            other, known = seen.setdefault(typed, (name, flag))
            if (known.field, known.type) != (flag.field, flag.type):
                found.append(f"{typed} is {known.kind} under {other} and {flag.kind} under {name}")
    return found


def test_flags_of_different_strategies_mean_the_same() -> None:
    assert clashes({name: entry.load() for name, entry in registry.strategies().items()}) == []


def test_a_clash_of_flags_is_found() -> None:
    class Other(Strategy):
        @dataclass(frozen=True, kw_only=True)
        class Options:
            bucket: str = "large"
            ratio: float = 0.9

    found = clashes({"halves": Halves, "other": Other})
    assert found == ["--bucket is int under halves and str under other"]


def test_a_strategy_may_not_take_a_word_of_the_table() -> None:
    class Greedy(Strategy):
        @dataclass(frozen=True, kw_only=True)
        class Options:
            devices: int = 1

    with pytest.raises(UsageError, match=r"Greedy.Options.devices cannot be a flag"):
        strategy_flags.flags_of(Greedy)


class Writer:
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...


def test_a_writer_is_known_by_its_name(nb: Notebook) -> None:
    assert nb.spec("%%distributed -d 1 --log-to w\npass", w=Writer()).log_to == "w"
    assert nb.spec("%%distributed -d 1\npass").log_to == ""
    nb.run("%distributed --log-to w")
    assert nb.spec("%%distributed -d 1\npass").log_to == "w"
    assert nb.spec("%%distributed -d 1 --log-to None\npass").log_to == ""


def test_what_is_no_writer_is_said_before_anything_starts(nb: Notebook) -> None:
    assert nb.complaint("%%distributed --log-to w\npass") == (
        "--log-to w: --log-to takes a name of the notebook, and it has no 'w'"
    )
    assert nb.complaint("%%distributed --log-to w\npass", w=3).startswith(
        "--log-to w: w is a int; --log-to takes the name"
    )
    assert "w is the class Writer" in nb.complaint("%%distributed --log-to w\npass", w=Writer)
    nb.run("%distributed --log-to w", w=Writer())
    assert "it has no 'w'" in nb.complaint("del w\nget_ipython().run_cell_magic('distributed', '-d 1', 'pass')")
    assert nb.recorders == []


def test_options_of_a_strategy_of_the_notebook(nb: Notebook) -> None:
    spec = nb.spec("%%distributed -s Mine -d 2 --bucket 5 --wrap Block\npass", Mine=Halves, Block=Word)
    assert (spec.strategy, spec.options) == ("Mine", {"bucket": 5, "wrap": frozenset({Word})})


def test_an_object_brings_its_options_and_flags_change_them(nb: Notebook) -> None:
    mine = Halves(Halves.Options(bucket=9, mode="grad"))
    spec = nb.spec("%%distributed -s mine -d 2 --bucket 5\npass", mine=mine)
    assert spec.options["bucket"] == 5
    assert spec.options["mode"] == "grad"


def test_an_unknown_option_names_the_known_ones(nb: Notebook) -> None:
    says = nb.complaint("%%distributed -s Mine --buckt 5\npass", Mine=Halves)
    assert says == "there is no option --buckt; did you mean --bucket? (%distributed help is the manual)"
    says = nb.complaint("%%distributed -s Mine --zzz 5\npass", Mine=Halves)
    assert says == "there is no option --zzz (%distributed help is the manual)"
    assert nb.recorders == []


@pytest.mark.parametrize(("typed", "value"), [
    ("25GB/s", 25e9), ("100Gbit/s", 12.5e9), ("100Gb/s", 12.5e9), ("3.2TB/s", 3.2e12), ("25", 25e9),
    (" 25 GB/s ", 25e9), ("100Gbps", 12.5e9), ("10GiB/s", 10 * 2**30), (".5GB", 5e8), ("800 MB/s", 8e8),
    ("200gbit/s", 25e9), ("1e0", None), ("25gb/s", None), ("0", None), ("-1GB/s", None), ("fast", None), ("", None),
    ("25GB/h", None), ("nan", None),
])  # fmt: skip
def test_a_bandwidth_as_it_is_typed(typed: str, value: float | None) -> None:
    if value is not None:
        assert values.bandwidth("--bandwidth", Word(typed), {}) == pytest.approx(value)
        return
    with pytest.raises(UsageError, match=r"GB/s or \d+Gbit/s"):
        values.bandwidth("--bandwidth", Word(typed), {})
