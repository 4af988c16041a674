"""Tab on the magic's line, through IPython's own completer (matchers are of another kind before 8.6)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nbtrain.magics import extension
from nbtrain.registry import ENGINES
from tests.support.shells import Halves, Notebook, bare_shell, completions, notebook


@pytest.fixture
def nb() -> Iterator[Notebook]:
    with notebook() as found:
        found.shell.user_ns["Mine"] = Halves
        yield found


def test_option_names(nb: Notebook) -> None:
    assert completions(nb.shell, "%%distributed --st|") == ["--start", "--steps", "--strategy"]
    assert completions(nb.shell, "%%distributed -s ddp --dev|") == ["--devices"]
    every = completions(nb.shell, "%%distributed |")
    assert {"--devices", "--monitor", "--no-sampler", "--share-eval"} <= set(every)


def test_an_option_is_offered_once(nb: Notebook) -> None:
    assert completions(nb.shell, "%%distributed --start warm --st|") == ["--steps", "--strategy"]
    assert completions(nb.shell, "%%distributed -s ddp --st|") == ["--start", "--steps"]


def test_choices(nb: Notebook) -> None:
    assert completions(nb.shell, "%%distributed --engine |") == sorted(ENGINES)
    assert completions(nb.shell, "%distributed join --nodes 2 --h|") == ["--hours"]
    assert completions(nb.shell, "%distributed export --s|") == ["--slurm"]
    assert completions(nb.shell, "%%distributed --monitor h|") == ["html"]
    assert completions(nb.shell, "%%distributed --output=f|") == ["--output=files"]


def test_strategies_and_those_of_the_notebook(nb: Notebook) -> None:
    assert {"Mine", "auto", "ddp", "none", "single"} <= set(completions(nb.shell, "%%distributed -s |"))
    assert completions(nb.shell, "%%distributed --strategy M|") == ["Mine"]


def test_lists_go_on_behind_a_comma(nb: Notebook) -> None:
    nb.shell.user_ns.update(model=1, more=2)
    assert completions(nb.shell, "%%distributed --compare z|") == ["zero1"]
    assert "ddp,zero1" in completions(nb.shell, "%%distributed --compare ddp,z|")
    assert "ddp,ddp" not in completions(nb.shell, "%%distributed --compare ddp,d|")
    assert completions(nb.shell, "%%distributed --keep mo|") == ["model", "more"]
    assert completions(nb.shell, "%%distributed --keep model,mo|") == ["model,more"]
    assert completions(nb.shell, "%distributed plan --batch mo|") == ["model", "more"]


def test_runs_of_the_history(nb: Notebook) -> None:
    assert completions(nb.shell, "%distributed history a|") == ["all"]


def test_flags_of_the_chosen_strategy(nb: Notebook) -> None:
    assert completions(nb.shell, "%%distributed -s Mine --bu|") == ["--bucket"]
    assert completions(nb.shell, "%%distributed -s Mine --mode |") == ["full", "grad"]
    assert "--bucket" not in completions(nb.shell, "%%distributed -s none --bu|")


def test_verbs(nb: Notebook) -> None:
    assert completions(nb.shell, "%distributed st|") == ["start", "status", "stop", "strategies"]
    assert completions(nb.shell, "x = 1\n%distributed doc|") == ["doctor"]
    assert completions(nb.shell, "%distributed start --e|") == ["--engine"]
    assert completions(nb.shell, "%distributed start --out|") == []
    assert completions(nb.shell, "%distributed pl|") == ["plan"]
    nb.shell.user_ns.update(Model=torch.nn.Linear(1, 1), Mean=1.0)
    assert completions(nb.shell, "%distributed plan M|") == ["Model"]
    assert completions(nb.shell, "%distributed plan Mine --ba|") == ["--bandwidth", "--batch"]
    assert completions(nb.shell, "%distributed plan Mine --out|") == []


def test_ranks(nb: Notebook) -> None:
    nb.run("%%distributed -d 3\npass")
    assert {"0", "1", "2"} <= set(completions(nb.shell, "%%rank |"))
    assert completions(nb.shell, "%%rank 0,|") == ["0,1", "0,2"]
    assert completions(nb.shell, "%%rank 0 --mon|") == ["--monitor"]


def test_only_on_the_magics_own_line(nb: Notebook) -> None:
    assert "--start" not in completions(nb.shell, "%%distributed\n--st|")
    assert "--start" not in completions(nb.shell, "%%time --st|")
    assert "--start" not in completions(nb.shell, "%%distributed # --st|")


def test_nothing_is_left_when_unloaded() -> None:
    with bare_shell() as shell:
        extension.load(shell, doctor=str)
        assert completions(shell, "%%distributed --dev|") == ["--devices"]
        extension.unload(shell)
        assert completions(shell, "%%distributed --dev|") == []
        hooks = shell.strdispatchers.get("complete_command")
        assert not hooks or not [key for key in hooks.strs if "distributed" in key or "rank" in key]


def test_ranks_of_the_debugger(nb: Notebook) -> None:
    nb.shell.run_line_magic("distributed", "-d 3")
    assert completions(nb.shell, "%distributed debug |") == ["0", "1", "2"]
    assert completions(nb.shell, "%distributed deb|") == ["debug"]
    assert completions(nb.shell, "%distributed where --l|") == ["--locals"]
    assert completions(nb.shell, "%%distributed --debug-ranks |") == ["all", "first"]
