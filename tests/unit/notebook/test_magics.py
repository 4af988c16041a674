"""The magics in a real shell: what a cell asks the session for, what is refused in one line, and where lines are."""

from __future__ import annotations

import ast
import linecache
import subprocess
import sys
import traceback
from collections.abc import Iterator

import IPython
import pytest
from IPython.core.interactiveshell import InteractiveShell

import nbtrain
from nbtrain.base.errors import CellSyntaxError, UsageError
from nbtrain.base.specs import PoolSpec
from nbtrain.notebook.magics import extension
from nbtrain.strategies.base import Strategy
from tests.support.shells import Notebook, Recorder, bare_shell, notebook


@pytest.fixture
def nb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what these tests expect is a machine of cores
    with notebook() as found:
        yield found


# What is run


def test_a_bare_cell_has_good_defaults(nb: Notebook) -> None:
    spec = nb.spec("%%distributed\nx = 1")
    assert spec.pool == PoolSpec(devices=("cpu",) * spec.pool.world_size)
    assert spec.strategy == ("ddp" if spec.pool.world_size > 1 else "single")
    assert (spec.options, spec.accumulate, spec.sampler, spec.ranks) == ({}, 1, True, None)


def test_auto_is_single_on_one_device_and_ddp_on_several(nb: Notebook) -> None:
    assert nb.spec("%%distributed -d 1\npass").strategy == "single"
    assert nb.spec("%%distributed -d 3\npass").strategy == "ddp"
    assert nb.spec("%%distributed -d 3 -s none\npass").strategy == "none"


def test_whoever_takes_one_device_gets_one_unless_more_were_asked_for(nb: Notebook) -> None:
    assert nb.spec("%%distributed -s single\npass").pool.world_size == 1
    spec = nb.spec("%%distributed --engine inprocess\npass")
    assert (spec.pool.engine, spec.pool.world_size, spec.strategy) == ("inprocess", 1, "single")
    says = nb.complaint("%%distributed -s single -d 4\npass")
    assert says == "--strategy single takes one device and --devices 4 is 4: write --devices 1, or --strategy ddp"
    says = nb.complaint("%%distributed --engine inprocess -d 2\npass")
    assert says == "--engine inprocess takes one device and --devices 2 is 2: write --devices 1, or --engine local"


def test_every_option_arrives(nb: Notebook) -> None:
    line = "-d 2 --start spawn --accumulate 4 --split-batches --no-sampler --oversubscribe --output all --monitor off"
    spec = nb.spec(f"%%distributed {line}\npass")
    assert (spec.pool.start, spec.pool.oversubscribe) == ("spawn", True)
    assert (spec.accumulate, spec.split_batches, spec.sampler) == (4, True, False)
    assert (spec.output, spec.monitor) == ("all", "off")


def test_braces_are_not_expanded(nb: Notebook) -> None:
    assert "assign it to a variable" not in nb.complaint("%%distributed --accumulate {n}\npass", n=3)
    assert nb.spec("%%distributed --accumulate n -d 1\npass", n=3).accumulate == 3


# Defaults and verbs


def test_the_line_form_sets_defaults(nb: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    nb.run("%distributed -d 3 --output all")
    assert capsys.readouterr().out == "from now on: --devices 3 --output all\n"
    nb.run("%distributed --output rank0")
    assert capsys.readouterr().out == "from now on: --devices 3 --output rank0\n"
    assert nb.spec("%%distributed\npass").pool.world_size == 3
    assert nb.spec("%%distributed -d 2\npass").pool.world_size == 2


def test_a_default_that_cannot_be_is_refused_and_changes_nothing(nb: Notebook) -> None:
    nb.run("%distributed -d 3")
    assert "did you mean dp or ddp?" in nb.complaint("%distributed -d 2 -s dpd")
    assert "there is no option --devcies; did you mean --devices?" in nb.complaint(
        "%distributed -s Mine --devcies 2", Mine=type("Mine", (Strategy,), {})
    )
    assert nb.spec("%%distributed\npass").pool.world_size == 3


def test_verbs(nb: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    nb.run("%distributed status")
    nb.run("%distributed stop")
    assert capsys.readouterr().out.count("no ranks are running") == 2
    assert nb.recorders == []
    nb.run("%distributed start --devices 2 --start spawn")
    assert nb.session.calls == [PoolSpec(start="spawn", devices=("cpu", "cpu"))]
    assert "from now on: --devices 2 --start spawn" in capsys.readouterr().out
    assert nb.spec("%%distributed\npass").pool == nb.session.calls[0]
    nb.run("%distributed restart")
    nb.run("%distributed stop")
    assert nb.session.calls[1:] == ["restart", "stop"]
    nb.run("%distributed status")
    nb.run("%distributed doctor")
    assert capsys.readouterr().out == "all is well\nin good health\n"


@pytest.mark.parametrize(("line", "says"), [
    ("%distributed statuss", "there is no verb 'statuss'; did you mean status?"),
    ("%distributed zzz", "there is no verb 'zzz'; there are status, start, stop, "),
    ("%distributed stop now", "stop takes no arguments, and got 'now'"),
    ("%distributed stop -d 2", "stop has no option --devices; it takes none"),
    ("%distributed start --output all", "start has no option --output; it takes --devices, --accelerator, "),
    ("%%distributed status\npass", "status is a verb and stands on a line of its own: %distributed status"),
    ("%distributed stat", "there is no verb 'stat'; did you mean status or start?"),
    ("%distributed ddp", "there is no verb 'ddp'; write --strategy ddp"),
    ("%%distributed 4\npass", "%%distributed takes options only, not '4'; write --devices 4"),
    ("%%distributed ddp\npass", "%%distributed takes options only, not 'ddp'; write --strategy ddp"),
    ("%%distributed --compare ddp zero1\npass",
     "%%distributed takes options only, not 'zero1'; write --compare ddp,zero1"),
    ("%%distributed -n 2\npass", "there is no option -n; did you mean --devices? (%distributed help"),
    ("%%distributed --nproc_per_node 2\npass", "there is no option --nproc-per-node; did you mean --devices?"),
    ("%distributed start --gpus 2", "start has no option --gpus; did you mean --devices?"),
    ("%%distributed\n\n   \n", "there is no code below %%distributed; write the training loop there"),
    ("%%distributed\n# nothing yet\n", "there are only comments below %%distributed"),
    ("%%rank\npass", "which ranks? Write %%rank 0 or %%rank 0,2 or %%rank 0-2"),
    ("%%rank 0-2 -d 2\npass", "there is no rank 2: ranks are 0 to 1; --devices asks for more"),
])  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_starts_nothing(nb: Notebook, line: str, says: str) -> None:
    assert nb.complaint(line).startswith(says)
    assert nb.recorders == []


def test_an_option_of_another_tool_in_a_comparison(nb: Notebook) -> None:
    says = nb.complaint("%%distributed --compare ddp --ranks 2\npass")
    assert says == "there is no option --ranks under ddp; did you mean --devices?"


@pytest.mark.parametrize("line", ["%distributed help", "%distributed -h", "%%distributed --help\npass"])
def test_who_looks_for_help_finds_the_manual(nb: Notebook, capsys: pytest.CaptureFixture[str], line: str) -> None:
    nb.run(line)
    said = capsys.readouterr().out
    assert said.startswith("Run this cell on every rank")
    assert "--strategy" in said
    assert "doctor" in said
    assert nb.recorders == []


def test_an_error_of_the_session_is_one_line_too(nb: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Recorder, run: object, cell: object) -> None:
        raise UsageError("not today")

    monkeypatch.setattr(Recorder, "run", refuse)
    assert nb.complaint("%%distributed\npass") == "not today"


# Ranks


def test_rank_uses_the_ranks_of_the_last_cell(nb: Notebook) -> None:
    last = nb.spec("%%distributed -d 4 -s none\npass")
    spec = nb.spec("%%rank 0, 2-3\npass")
    assert (spec.ranks, spec.pool, spec.strategy) == ((0, 2, 3), last.pool, "none")
    assert nb.complaint("%%rank 1,4\npass").startswith("there is no rank 4: ranks are 0 to 3")
    nb.run("%distributed stop")
    assert nb.spec("%%rank 0 -d 2\npass").pool.world_size == 2


# Lines and syntax


@pytest.mark.parametrize("above", ["", "\n\n"])
@pytest.mark.parametrize("below", ["", "\n\n"])
def test_lines_are_counted_as_the_editor_counts_them(nb: Notebook, above: str, below: str) -> None:
    raw = f"{above}%%distributed -d 1\n{below}def f():\n    return 1\n"
    cell = nb.cell(raw)
    assert cell.source == "def f():\n    return 1\n"
    assert linecache.getline(cell.filename, cell.first_line) == "def f():\n"
    assert raw.splitlines()[cell.first_line - 1] == "def f():"


def test_a_cell_below_another_cell_magic(nb: Notebook) -> None:
    cell = nb.cell("%%time\n%%distributed -d 1\nx = 1\n")
    assert (cell.source, cell.first_line) == ("x = 1\n", 3)


def test_a_cell_run_by_a_program(nb: Notebook) -> None:
    cell = nb.cell("get_ipython().run_cell_magic('distributed', '-d 1', 'x = 1\\n')")
    assert (cell.source, cell.first_line, cell.number) == ("x = 1\n", 2, None)
    assert linecache.getline(cell.filename, 2) == "x = 1\n"


def test_the_number_is_the_one_beside_the_cell(nb: Notebook) -> None:
    nb.run("x = 1")
    assert [nb.cell("%%distributed -d 1\npass").number for _ in range(2)] == [2, 3]
    nb.shell.run_cell("%%distributed -d 1\npass", store_history=False).raise_error()
    assert nb.session.runs[-1][1].number is None


def test_a_traceback_through_the_cell_shows_its_lines(nb: Notebook) -> None:
    cell = nb.cell("%%distributed -d 1\n\ndef f():\n    1 / 0\n")
    code = compile("\n" * (cell.first_line - 1) + cell.source, cell.filename, "exec")
    exec(code, nb.shell.user_ns)
    with pytest.raises(ZeroDivisionError) as caught:
        nb.shell.user_ns["f"]()
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.lineno, frame.line) == (4, "1 / 0")
    if IPython.version_info >= (8,):
        assert nb.shell.compile.format_code_name(cell.filename) == ("Cell", "In[1]")


@pytest.mark.parametrize(("body", "line"), [
    ("x = 1\ny =\n", 3), ("\nif x:\npass\n", 4), ("%time 1\nfor\n", 3), ("break\n", 2), ("return 1\n", 2),
    ("x = 'open\n", 2),
])  # fmt: skip
def test_a_syntax_error_is_shown_at_its_line_before_anything_starts(
    nb: Notebook, body: str, line: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = nb.error(f"%%distributed -d 2\n{body}")
    assert type(error) is CellSyntaxError
    assert f"line {line} of the cell" in str(error)
    shown = capsys.readouterr().out
    assert f"line {line}\n" in shown
    assert "SyntaxError" in shown or "IndentationError" in shown
    assert "run_cell_magic" not in shown
    assert nb.recorders == []


def test_magics_and_await_are_no_syntax_errors(nb: Notebook) -> None:
    body = "import asyncio\nawait asyncio.sleep(0)\n!echo hello\nfiles = !ls\n%time 1\n[i async for i in f()]\n"
    assert nb.cell(f"%%distributed -d 1\n{body}").source == body


# Loading and unloading


def test_the_manual_is_made_of_the_table(nb: Notebook) -> None:
    for magic in (nb.shell.find_cell_magic("distributed"), nb.shell.find_line_magic("distributed")):
        text = magic.__doc__
        assert "-d, --devices SPEC" in text
        assert "--monitor auto|widget|html|text|off" in text
        assert "%%distributed -s ddp" in text
        assert "start [options]" in text
    assert "%%rank 0-2" in nb.shell.find_cell_magic("rank").__doc__


def test_unloading_leaves_nothing_and_stops_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    def public(shell: InteractiveShell) -> object:
        manager = shell.magics_manager
        return (
            {kind: sorted(found) for kind, found in manager.magics.items()},
            sorted(vars(manager.user_magics)),
            {name: len(found) for name, found in shell.events.callbacks.items()},
        )

    with bare_shell() as shell:
        before = public(shell)
        nb = Notebook(shell)
        extension.load(shell, open_session=nb.open_session, doctor=str)
        nb.run("%%distributed -d 1\npass")
        capsys.readouterr()
        extension.unload(shell)
        assert nb.session.calls == ["close"]
        assert "the ranks were stopped" in capsys.readouterr().out
        assert public(shell) == before


@pytest.mark.slow
def test_loading_again_starts_afresh(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_shell() as shell:
        shell.extension_manager.load_extension("nbtrain")
        shell.extension_manager.load_extension("nbtrain")
        shell.run_cell("%distributed -d 2").raise_error()
        shell.extension_manager.reload_extension("nbtrain")
        capsys.readouterr()
        shell.run_cell("%distributed").raise_error()
        assert "defaults: none set" in capsys.readouterr().out
        shell.extension_manager.unload_extension("nbtrain")
        assert shell.find_cell_magic("distributed") is None


def test_magics_of_others_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def theirs(line: str, cell: str) -> str:
        return "theirs"

    with bare_shell() as shell:
        for name in ("distributed", "rank"):
            shell.register_magic_function(theirs, magic_kind="cell", magic_name=name)
        nb = Notebook(shell)
        extension.load(shell, open_session=nb.open_session, doctor=str)
        said = capsys.readouterr().out
        assert "%%distributed belongs to" in said
        assert "write %%nbtrain instead" in said
        assert shell.run_cell_magic("distributed", "", "pass") == "theirs"
        assert nb.spec("%%nbtrain -d 3\npass").pool.world_size == 3
        assert nb.cell("%%nbtrain_rank 1\npass").first_line == 2
        extension.unload(shell)
        assert shell.find_cell_magic("distributed") is theirs
        assert shell.find_cell_magic("nbtrain") is None


@pytest.mark.slow
def test_loading_loads_nothing_that_takes_time() -> None:
    """How long it takes is measured in bench_start."""
    code = (
        "import sys; from IPython.core.interactiveshell import InteractiveShell as S\n"
        "from traitlets.config import Config; c = Config(); c.HistoryManager.enabled = False\n"
        "s = S.instance(config=c); before = set(sys.modules); s.extension_manager.load_extension('nbtrain')\n"
        "news = sorted({name.partition('.')[0] for name in set(sys.modules) - before})\n"
        "print((news, s.find_cell_magic('distributed') is not None))"
    )
    news, found = ast.literal_eval(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert found
    assert "nbtrain" in news
    assert not {"torch", "numpy", "zmq", "cloudpickle", "anywidget", "ipywidgets", "pandas"} & set(news)


# Names of the ranks


def test_names_of_the_ranks_are_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"nbtrain\.rank exists on the ranks only.* inside a %%distributed cell"):
        from nbtrain import rank  # noqa: F401
    monkeypatch.setattr("builtins.rank", 3, raising=False)
    from nbtrain import rank as mine

    assert mine == 3
    assert "rank" not in nbtrain.__all__
