"""Strategies that nbtrain does not know: classes and objects of the notebook, and what packages announce.

The one of docs/add_a_strategy.md is taken from that page as it stands, and plays what test_parity plays.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lines import everything
from tests.support.kernels import running_kernel
from tests.support.notebook import START, TRAIN, Notebook
from tests.support.pages import blocks

pytestmark = pytest.mark.kernel
ROOT = Path(__file__).resolve().parents[2]
TOP_K = next(block.text for block in blocks(ROOT / "docs" / "add_a_strategy.md") if "class TopK" in block.text)
LOOP = """
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
"""
NUMBERS = """
def numbers(found):
    if isinstance(found, torch.nn.Module):
        return numbers(dict(found.named_parameters()))
    if isinstance(found, (list, tuple)):
        found = dict(enumerate(found))
    if isinstance(found, dict):
        return {f"{k}.{at}": v for k, one in found.items() for at, v in numbers(one).items()}
    return {"": torch.as_tensor(found).detach().clone().double()}
"""


@pytest.fixture(scope="module")
def started() -> Iterator[Notebook]:
    """With a directory of its own for what a pool keeps there, which outlives a test."""
    with tempfile.TemporaryDirectory() as folder, running_kernel(XDG_RUNTIME_DIR=folder) as kernel:
        notebook = Notebook(kernel)
        yield notebook
        notebook("%distributed stop")


@pytest.fixture
def nb(started: Notebook) -> Notebook:
    """Its names as they are at first: a test leaves others."""
    started(START + TRAIN)
    return started


# --- the page ------------------------------------------------------------------------------------


def test_the_pages_strategy_is_short() -> None:
    assert len([line for line in TOP_K.splitlines() if line.strip()]) <= 40


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("way", everything.WAYS)
def test_the_pages_strategy_has_the_numbers_of_one_process(nb: Notebook, way: str) -> None:
    nb(everything.START + NUMBERS + TOP_K)
    flags, cell, single = everything.WAYS[way]
    nb(everything.ANEW + f"reduce = float\n{single}\nwanted = {everything.TELL}\ndel reduce" + everything.ANEW)
    run = nb(f"%%distributed -s TopK --fraction 1 --devices 2 --split-batches {flags}\n{cell}")
    assert "differs from rank" not in run.text
    nb(f"found = {everything.TELL}\nassert found.keys() == wanted.keys()")
    nb("far = {at: float((found[at] - w).abs().max()) for at, w in wanted.items() if w.numel()}")
    assert nb(f"print({{at: d for at, d in far.items() if not d <= {everything.ACCURACY}}})").stdout.strip() == "{}"


def test_what_a_strategy_does_not_promise_is_said_or_refused(nb: Notebook) -> None:
    """The page's promises nothing: a hook sees a rank's own gradients, and graphs are not kept."""
    nb(TRAIN + "\n" + TOP_K)
    line = "%%distributed -s TopK --fraction 1 -d 2\n"
    seen = "model[0].weight.register_hook(lambda g: g * 1)"
    assert (
        "sees each rank's own gradient, before it is averaged" in nb(f"{line}handle = {seen}{LOOP}handle.remove()").text
    )
    after = "model[0].weight.register_post_accumulate_grad_hook(lambda p: None)"
    assert "before it is averaged" in nb.fails(f"{line}handle = {after}{LOOP}").traceback
    graphs = LOOP.replace("backward()", "backward(create_graph=True)")
    assert "under topk p.grad keeps no graph" in nb.fails(line + graphs).traceback
    nb(f"%%distributed -s TopK --fraction 1 -d 1\nhandle = {after}{graphs}handle.remove()")
    shown = nb(f"{line}opt = torch.optim.SGD(model.parameters(), 0.01){LOOP}").text
    assert "differs from rank" not in shown


@pytest.mark.thorough
def test_the_pages_strategy_trains_when_it_sends_a_tenth(nb: Notebook) -> None:
    """And what it has not sent is not lost: with nothing kept for later, the same training gets less far."""
    nb(START + TOP_K)
    nb(TOP_K.replace("self.left[p] =", "_ =").replace("TopK", "Forgetful").replace("Largest", "Lossy"))
    losses = {}
    for name in ("TopK", "Forgetful"):
        nb("torch.manual_seed(1); model = net(); opt = torch.optim.SGD(model.parameters(), 0.1); seen = []\n"
           "loader = DataLoader(data, batch_size=16)")  # fmt: skip
        run = nb(f"%%distributed -s {name} --fraction 0.1 -d 2\nfor _ in range(20):\n"
                 + textwrap.indent(LOOP, "    ") + "    seen.append(reduce(loss.item()))")  # fmt: skip
        assert "differs from rank" not in run.text
        losses[name] = eval(nb("print([sum(seen[:6]), sum(seen[-6:])])").stdout)
    assert losses["TopK"][1] < 0.5 * losses["TopK"][0]
    assert losses["TopK"][1] < losses["Forgetful"][1]


# --- classes and objects of the notebook ---------------------------------------------------------

WRONG = {
    "a class that is none": ("class S: pass", "S is the class S, not a strategy"),
    "Strategy itself": (
        "S = nbtrain.Strategy",
        "nbtrain.Strategy itself, which lets every rank train a model of its own",
    ),
    "options": (
        "class S(nbtrain.Strategy):\n    class Options:\n        k: int = 1",
        "S.Options has to be a dataclass",
    ),
    "a flag that is taken": (
        "class S(nbtrain.Strategy):\n    @dataclass(frozen=True)\n    class Options:\n        devices: int = 1",
        "S.Options.devices cannot be a flag",
    ),
    "no default": (
        "class S(nbtrain.Strategy):\n    @dataclass(frozen=True)\n    class Options:\n        k: int",
        "S needs --k, for its Options give no default",
    ),
    "a value that it refuses": (
        "class S(nbtrain.Strategy):\n    @dataclass(frozen=True)\n    class Options:\n        k: int = 1\n"
        "        def __post_init__(self): raise ValueError('one is too few')",
        "S.Options: one is too few",
    ),
    "__init__": (
        "class S(nbtrain.Strategy):\n    def __init__(self, a, b): pass",
        "S.__init__ has to take (self, options)",
    ),
    "set_up takes": (
        "class S(nbtrain.Strategy):\n    def set_up(self, component): pass",
        "S.set_up has to take (self, component, precision)",
    ),
    "set_up returns": (
        "class S(nbtrain.Strategy):\n    def set_up(self, component, precision): pass",
        "S.set_up returned NoneType: it has to return an nbtrain.Prepared",
    ),
    "Prepared": (
        "class P(nbtrain.Prepared):\n    def __init__(self, component): pass\n"
        "class S(nbtrain.Strategy):\n    def set_up(self, component, precision): return P(component)",
        "has to call super().__init__(component)",
    ),
    "nothing": ("class S(nbtrain.Strategy): pass", "Prepared has no backward, so that each of the 2 ranks would train"),
    "no backward": (
        "class P(nbtrain.Prepared): pass\n"
        "class S(nbtrain.Strategy):\n    def set_up(self, component, precision): return P(component)",
        "P has no backward",
    ),
    "Shards": (
        "class P(nbtrain.Shards): pass\n"
        "class S(nbtrain.Strategy):\n    def set_up(self, component, precision): return P(component)",
        "P is a Shards without pieces: write pieces(self)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_class_is_one_sentence(nb: Notebook, case: str) -> None:
    define, says = WRONG[case]
    nb(TRAIN + "\nimport nbtrain; from dataclasses import dataclass\n" + define)
    assert says in nb.refused("%%distributed -s S -d 2" + LOOP)


def test_what_ranks_have_apart_is_said_where_a_class_says_nothing(nb: Notebook) -> None:
    nb(TRAIN + "\nimport nbtrain\nfrom contextlib import nullcontext\n"
       "class P(nbtrain.Prepared):\n    def backward(self, sync=True): return nullcontext(1.0)\n"
       "class S(nbtrain.Strategy):\n    def set_up(self, component, precision): return P(component)")  # fmt: skip
    assert "differs from rank 0" in nb("%%distributed -s S -d 2" + LOOP).text


def test_an_error_inside_points_at_the_cells_line(nb: Notebook) -> None:
    nb("import nbtrain\nclass S(nbtrain.Strategy):\n    def set_up(self, component, precision):\n"
       "        return self.wrap(component)\n    def wrap(self, component):\n        1 / 0")  # fmt: skip
    shown = nb.fails("%%distributed -s S -d 2" + LOOP).traceback
    assert "----> 6         1 / 0" in shown
    assert "----> 4         return self.wrap(component)" in shown
    assert "nbtrain/" not in shown
    assert "raised on all 2 ranks" in shown


def test_one_of_nbtrains_own_is_built_upon(nb: Notebook) -> None:
    nb(TRAIN)
    nb("from dataclasses import dataclass\nfrom nbtrain.strategies.ddp import DDP\n"
       "class Loud(DDP):\n    'ddp, and says so'\n    @dataclass(frozen=True, kw_only=True)\n"
       "    class Options(DDP.Options):\n        word: str = 'here'\n"
       "    def set_up(self, component, precision='32'):\n"
       "        print(self.options.word, self.options.bucket_mb, self.place.world_size)\n"
       "        return super().set_up(component, precision)\nloud = Loud(word='object', bucket_mb=2.0)")  # fmt: skip
    assert "hello 3.0 2" in nb("%%distributed -s Loud -d 2 --word hello --bucket-mb 3" + LOOP).stdout
    assert "object 2.0 2" in nb("%%distributed -s loud -d 2" + LOOP).stdout
    assert nb.kernel.complete("%%distributed -s Lo") == ["Loud"]
    assert nb.kernel.complete("%%distributed -s Loud --wo") == ["--word"]
    assert "did you mean --word?" in nb.refused("%%distributed -s Loud -d 2 --wird x" + LOOP)
    (page,) = nb("%distributed strategies").displays
    (row,) = [line for line in page["text/plain"].splitlines() if line.startswith("Loud")]
    assert row.split()[1:6] == ["ddp,", "and", "says", "so", "yes"]
    assert row.endswith("--word")
    assert "<code>loud</code>" in page["text/html"]
    assert "<code>DDP</code>" not in page["text/html"]


# --- what packages announce ----------------------------------------------------------------------

PACKAGE = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "brought-along"
version = "1.0"
[tool.setuptools]
packages = ["brought_along"]
[project.entry-points."nbtrain.strategies"]
brought = "brought_along:Brought"
broken = "brought_along.broken:Broken"
gone = "brought_along:Gone"
other = "brought_along:Other"
ddp = "brought_along:Brought"
"""
MODULE = """
from dataclasses import dataclass
from nbtrain import Prepared, Strategy
from nbtrain.strategies.ddp import DDP

class Brought(DDP):
    @dataclass(frozen=True, kw_only=True)
    class Options(DDP.Options):
        colour: str = "red"
    def set_up(self, component, precision="32"):
        print("brought", self.options.colour)
        return super().set_up(component, precision)

class Other:
    pass
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package, built and installed by pip into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    (source / "brought_along").mkdir()
    (source / "pyproject.toml").write_text(PACKAGE)
    (source / "brought_along" / "__init__.py").write_text(MODULE)
    (source / "brought_along" / "broken.py").write_text("import a_module_that_is_not_there\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    ran = subprocess.run([*command, "--target", str(target), str(source)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return target


def test_a_package_brings_a_strategy(nb: Notebook, installed: Path) -> None:
    nb(f"import sys; sys.path.insert(0, {str(installed)!r})\n" + TRAIN)
    try:
        run = nb("%%distributed -s brought --colour green --bucket-mb 2 -d 2" + LOOP)
        assert "brought green" in run.stdout
        assert "brought --colour green --bucket-mb 2 · 2 ranks" in run.text
        assert "brought" not in nb("%%distributed -s ddp -d 2" + LOOP).text, "nbtrain's own name"
        assert "brought" in nb.kernel.complete("%%distributed -s bro")
        assert nb.kernel.complete("%%distributed -s brought --col") == ["--colour"]
        says = nb.refused("%%distributed -s broken -d 2" + LOOP)
        assert "the strategy broken, which the package brought-along announces as brought_along.broken:Broken" in says
        assert "ModuleNotFoundError: No module named 'a_module_that_is_not_there'" in says
        assert "cannot be loaded: AttributeError" in nb.refused("%%distributed -s gone -d 2" + LOOP)
        assert "not a subclass of nbtrain.Strategy" in nb.refused("%%distributed -s other -d 2" + LOOP)
        table = nb("%distributed strategies").displays[0]["text/html"]
        rows = dict(re.findall(r"<tr><td><code>(\w+)</code></td>(.*?)</tr>", table))
        assert "--colour" in rows["brought"]
        assert "--bucket-mb" in rows["ddp"]
        assert "a_module_that_is_not_there" in rows["broken"]
        assert "<td>no: " in rows["other"]
    finally:
        nb("sys.path.pop(0)")
