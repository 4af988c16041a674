"""Names for a strategy with some of its options: what they mean, what beats them, and the table that shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbtrain.base import tables
from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.notebook.magics import strategy_table
from nbtrain.notebook.magics.line.parse import parse
from nbtrain.notebook.magics.line.resolve import check_flags
from nbtrain.notebook.magics.line.strategy_flags import flags_of, read
from nbtrain.strategies import presets
from tests.support.shells import Notebook, completions, notebook

FSDP = pytest.mark.skipif("fsdp" not in registry.STRATEGIES, reason="there is no fsdp")


@pytest.fixture
def nb() -> Iterator[Notebook]:
    with notebook() as found:
        yield found


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_is_a_line_that_could_be_typed(name: str) -> None:
    """Its options exist, under its strategy, and mean what the preset says."""
    preset = presets.PRESETS[name]
    entry = registry.strategy(preset.strategy)
    try:
        loaded = entry.load()
    except ImportError as error:
        pytest.skip(str(error))
    line = parse(preset.line.replace(" N", " 2").replace(" DIR", " '/tmp'"), {})
    check_flags(line, parse("", {}), {})
    flags = flags_of(loaded)
    typed = {flags[flag].field: read(flag, word, flags[flag], {}) for flag, word in line.own.items()}
    assert preset.options.items() <= typed.items()
    made = loaded.Options(**typed)
    assert all(getattr(made, field) == value for field, value in preset.options.items())
    assert line.value("strategy") == preset.strategy


@pytest.mark.parametrize(("defaults", "line", "start"), [
    ("", "-s ddp_spawn", "spawn"),
    ("", "-s ddp_fork", "fork"),
    ("", "-s ddp_notebook", "fork"),
    ("", "-s ddp_spawn --start warm", "warm"),  # what is given beats a preset
    ("--start warm", "-s ddp_spawn", "spawn"),  # but not what was given before
    ("-s ddp_spawn", "", "spawn"),
    ("-s ddp_spawn", "--start fork", "fork"),
    ("-s ddp_spawn --start warm", "", "warm"),
    ("-s ddp_spawn", "-s ddp", "warm"),
])  # fmt: skip
def test_how_ranks_start(nb: Notebook, defaults: str, line: str, start: str) -> None:
    if defaults:
        nb.run(f"%distributed {defaults}")
    spec = nb.spec(f"%%distributed -d 2 {line}\npass")
    assert (spec.strategy, spec.pool.start) == ("ddp", start)


def test_the_ranks_of_a_preset_can_be_started_ahead(nb: Notebook) -> None:
    nb.run("%distributed -s ddp_spawn -d 2")
    nb.run("%distributed start")
    spec = nb.spec("%%distributed\npass")
    assert nb.session.calls == [spec.pool]
    assert nb.spec("%%rank 1\npass").pool == spec.pool


@FSDP
@pytest.mark.parametrize(("defaults", "line", "options"), [
    ("", "-s fsdp_shard_grad_op", {"sharding": "SHARD_GRAD_OP"}),
    ("", "-s fsdp_cpu_offload --sharding NO_SHARD", {"cpu_offload": True, "sharding": "NO_SHARD"}),
    ("", "-s fsdp_cpu_offload --no-cpu-offload", {"cpu_offload": False}),
    ("-s fsdp --sharding NO_SHARD", "-s fsdp_shard_grad_op", {"sharding": "SHARD_GRAD_OP"}),
    ("-s fsdp_shard_grad_op", "--sharding FULL_SHARD", {"sharding": "FULL_SHARD"}),
])  # fmt: skip
def test_options_of_a_preset(nb: Notebook, defaults: str, line: str, options: dict[str, Any]) -> None:
    if defaults:
        nb.run(f"%distributed {defaults}")
    spec = nb.spec(f"%%distributed -d 2 {line}\npass")
    assert (spec.strategy, dict(spec.options)) == ("fsdp", options)


@FSDP
def test_completion(nb: Notebook) -> None:
    assert completions(nb.shell, "%%distributed -s ddp_|") == ["ddp_fork", "ddp_notebook", "ddp_sharded", "ddp_spawn"]
    assert "--sharding" in completions(nb.shell, "%%distributed -s fsdp_hybrid --sh|")


def test_precisions_complete_and_have_short_names(nb: Notebook) -> None:
    offered = completions(nb.shell, "%%distributed --precision |")
    assert offered == ["16-mixed", "16-true", "32", "bf16-mixed", "bf16-true"]
    assert nb.spec("%%distributed -d 1\npass").precision == "32"
    for typed, meant in {"16": "16-mixed", "bf16": "bf16-mixed", "16-true": "16-true", "bits": "16-mixed"}.items():
        assert nb.spec(f"%%distributed -d 1 --precision {typed}\npass", bits=16).precision == meant
    assert "is one of 32, bf16-mixed, 16-mixed" in nb.complaint("%%distributed --precision 8\npass")
    refused = nb.complaint("%%distributed -s none --precision bf16\npass")
    assert refused.startswith("--precision bf16: under --strategy none nothing is touched")


def test_an_unknown_name_lists_both_kinds(nb: Notebook) -> None:
    with pytest.raises(UsageError, match=r"did you mean ddp_spawn\?$"):
        parse("-s dpd_spawn", {})
    with pytest.raises(UsageError, match=r"there are auto, none, .*the presets ddp_spawn, "):
        parse("-s zzz", {})


def test_the_table(nb: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    nb.run("%distributed strategies")
    shown = capsys.readouterr().out
    for name in (*registry.STRATEGIES, *presets.names()):
        assert f"\n{name} " in shown
    assert "-s ddp --start spawn" in shown
    assert "--bucket-mb" in shown
    ddp = next(line for line in shown.splitlines() if line.startswith("ddp "))
    assert "the last step of any rank is kept" in ddp
    if "fsdp" in registry.STRATEGIES:
        fsdp = next(line for line in shown.splitlines() if line.startswith("fsdp "))
        assert "kept, if all ranks stand at the same step" in fsdp


def test_the_table_in_a_notebook() -> None:
    page = tables.page(strategy_table.blocks({}))
    assert page.count("<table") == page.count("</table>") == 2
    assert page.count("<tr>") == 2 + len(registry.strategies()) + len(presets.names())
    assert "<code>ddp_spawn</code></td><td><span>-s</span> ddp <span>--start</span> spawn</td>" in page
