"""Tab on the magic's line, through IPython's own completer (matchers are of another kind before 8.6)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nbtrain.machine.registry import ENGINES
from nbtrain.notebook.magics import extension
from tests.support.shells import Halves, Notebook, bare_shell, completions, notebook


@pytest.fixture
def nb() -> Iterator[Notebook]:
    with notebook() as found:
        found.shell.user_ns["Mine"] = Halves
        yield found


@pytest.mark.parametrize(("typed", "offered"), [
    ("%%distributed --st|", ["--start", "--steps", "--strategy"]),
    ("%%distributed -s ddp --dev|", ["--devices"]),
    ("%%distributed --start warm --st|", ["--steps", "--strategy"]),  # an option is offered once
    ("%%distributed -s ddp --st|", ["--start", "--steps"]),
    ("%%distributed --engine |", sorted(ENGINES)),
    ("%%distributed --monitor h|", ["html"]),
    ("%%distributed --output=f|", ["--output=files"]),
    ("%%distributed --debug-ranks |", ["all", "first"]),
    ("%%distributed --strategy M|", ["Mine"]),
    ("%%distributed -s Mine --bu|", ["--bucket"]),
    ("%%distributed -s Mine --mode |", ["full", "grad"]),
    ("%%distributed --compare z|", ["zero1"]),
    ("%%distributed --keep mo|", ["model", "more"]),
    ("%%distributed --keep model,mo|", ["model,more"]),  # lists go on behind a comma
    ("%distributed st|", ["start", "status", "stop", "strategies"]),
    ("x = 1\n%distributed doc|", ["doctor"]),
    ("%distributed pl|", ["plan"]),
    ("%distributed deb|", ["debug"]),
    ("%distributed start --e|", ["--engine"]),
    ("%distributed start --out|", []),
    ("%distributed join --nodes 2 --h|", ["--hours"]),
    ("%distributed export --s|", ["--slurm"]),
    ("%distributed history a|", ["all"]),
    ("%distributed where --l|", ["--locals"]),
    ("%distributed plan M|", ["Model"]),
    ("%distributed plan Mine --ba|", ["--bandwidth", "--batch"]),
    ("%distributed plan Mine --out|", []),
    ("%distributed plan --batch mo|", ["model", "more"]),
])  # fmt: skip
def test_what_is_offered(nb: Notebook, typed: str, offered: list[str]) -> None:
    nb.shell.user_ns.update(model=1, more=2, Model=torch.nn.Linear(1, 1), Mean=1.0)
    assert completions(nb.shell, typed) == offered


def test_among_what_is_offered(nb: Notebook) -> None:
    every = completions(nb.shell, "%%distributed |")
    assert {"--devices", "--monitor", "--no-sampler", "--share-eval"} <= set(every)
    assert {"Mine", "auto", "ddp", "none", "single"} <= set(completions(nb.shell, "%%distributed -s |"))
    assert "ddp,zero1" in completions(nb.shell, "%%distributed --compare ddp,z|")
    assert "ddp,ddp" not in completions(nb.shell, "%%distributed --compare ddp,d|")
    assert "--bucket" not in completions(nb.shell, "%%distributed -s none --bu|")


def test_ranks(nb: Notebook) -> None:
    nb.run("%%distributed -d 3\npass")
    assert {"0", "1", "2"} <= set(completions(nb.shell, "%%rank |"))
    assert completions(nb.shell, "%%rank 0,|") == ["0,1", "0,2"]
    assert completions(nb.shell, "%%rank 0 --mon|") == ["--monitor"]
    assert completions(nb.shell, "%distributed debug |") == ["0", "1", "2"]


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
