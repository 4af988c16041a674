"""The ranks have the notebook's surroundings, and run what is on the disk: modules and packages that changed, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

pytestmark = pytest.mark.thorough


class Files:
    """Modules in the notebook's folder. A file's time does not help to tell two texts of one second apart."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.made: list[Path] = []

    def __call__(self, name: str, text: str) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        self.made.append(path)
        return path


@pytest.fixture
def files(shared_kernel: Kernel) -> Iterator[Files]:
    made = Files(shared_kernel.home)
    yield made
    names = {path.relative_to(made.home).parts[0].removesuffix(".py") for path in made.made}
    shared_kernel.run(
        f"import sys\nfor n in list(sys.modules):\n    if n.partition('.')[0] in {names}: del sys.modules[n]"
    )
    for path in made.made:
        path.unlink(missing_ok=True)
    shared_kernel.run("%distributed stop")


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Notebook:
    return Notebook(shared_kernel, first="")


def test_a_rank_that_came_in_place_of_another_has_them_too(notebook: Notebook, tmp_path: Path) -> None:
    notebook(f"import os, signal, torch; home = os.getcwd(); os.chdir({str(tmp_path)!r}); os.environ['WHERE'] = 'here'")
    told = "%%distributed -d 2 --output all\nprint(os.getcwd(), os.environ.get('WHERE'), torch.get_default_dtype())"
    notebook(told)
    notebook.fails("%%distributed -d 2\nif rank: os.kill(os.getpid(), signal.SIGKILL)\nbarrier()")
    changes = "os.chdir('/'); os.environ['WHERE'] = 'there'; torch.set_default_dtype(torch.float64)"
    notebook(f"%%distributed -d 2\n{changes}")
    assert notebook(told).stdout.count(f"{tmp_path} here torch.float32") == 2
    notebook("os.chdir(home); del os.environ['WHERE']")
    notebook("%distributed stop")


def test_changed_module_is_loaded_again_before_the_cell_and_the_output_names_it(
    notebook: Notebook, files: Files
) -> None:
    files("tools.py", "def f(): return 1\n")
    notebook("import tools\nfrom tools import f as g")
    first = notebook("%%distributed --devices 2\nprint(tools.f(), g())")
    assert "1 1" in first.stdout
    assert "loaded again" not in first.text
    files("tools.py", "def f(): return 2\n")  # as many bytes, and within the same second
    shown = notebook("%%distributed --devices 2\nprint(tools.f(), g(), g is tools.f)").text
    assert "2 2 True" in shown
    assert [line for line in shown.splitlines() if "loaded again: tools" in line]
    assert "tools: changed on disk" in shown
    assert "importlib.reload(tools)" in shown, "the notebook itself still runs the old text, and is told so"
    assert notebook("tools.f()").value == "1"
    shown = notebook("%%distributed --devices 2\nprint(tools.f())").text
    assert "loaded again" not in shown
    assert "importlib.reload" not in shown, "said once"
    notebook("import importlib; importlib.reload(tools)")
    files("tools.py", "def f(): return 3\n")
    shown = notebook("%%distributed --devices 2\nprint(tools.f())").stdout
    assert "importlib.reload(tools)" in shown, "another change is another line"


def test_notebook_that_reloads_by_itself_is_told_nothing(notebook: Notebook, files: Files) -> None:
    files("tools.py", "def f(): return 1\n")
    notebook("%load_ext autoreload\n%autoreload 2\nimport tools")
    notebook("%%distributed\nprint('f', tools.f())")
    path = files("tools.py", "def f(): return 2\n")
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 2))  # autoreload compares seconds
    shown = notebook("%%distributed\nprint('f', tools.f())").text
    notebook("%autoreload 0")
    assert "f 2" in shown
    assert "importlib.reload" not in shown
    assert "loaded again: tools" in shown


def test_dependants_and_packages_in_the_order_of_their_imports(notebook: Notebook, files: Files) -> None:
    files("pkg/__init__.py", "from .deep import twice\n")
    files("pkg/deep.py", "from .rate import RATE\ndef twice(): return 2 * RATE\n")
    files("pkg/rate.py", "RATE = 10\n")
    files("user.py", "import pkg\nFOUND = pkg.twice()\n")
    files("apart.py", "import os\n")
    cell = "%%distributed\nimport user, apart\nfrom pkg import twice\nprint('found', user.FOUND, twice())"
    assert "found 20 20" in notebook(cell).stdout
    files("pkg/rate.py", "RATE = 50\n")
    shown = notebook(cell).text
    assert "found 100 100" in shown
    assert "loaded again: pkg.rate, pkg.deep, pkg, user" in shown


def test_edit_made_while_the_importing_cell_runs_is_seen(notebook: Notebook, files: Files) -> None:
    path = files("tools.py", "def f(): return 1\n")
    notebook(f"%%distributed\nimport tools\nopen({str(path)!r}, 'w').write('def f(): return 2\\n')\nprint(tools.f())")
    assert "2" in notebook("%%distributed\nimport tools\nprint(tools.f())").stdout.splitlines()


def test_module_that_cannot_be_loaded_again_is_named_and_the_cell_does_not_run(
    notebook: Notebook, files: Files
) -> None:
    files("tools.py", "def f(): return 1\n")
    files("user.py", "from tools import f\n")
    notebook("%%distributed --devices 2\nimport user\nran = 1")
    files("tools.py", "def f(): return 2\nnonsense\n")
    for _ in range(2):  # not only the first time
        refusal = notebook.kernel.run("%%distributed --devices 2\nran = 2").text.strip().splitlines()[-1]
        assert "'tools'" in refusal
        assert "line 2" in refusal
        assert "nonsense" in refusal
    assert notebook("ran").value == "1"
    files("tools.py", "def f(: return 2\n")
    shown = notebook.kernel.run("%%distributed --devices 2\nran = 2").text
    assert "SyntaxError" in shown
    assert "Traceback" not in shown
    files("tools.py", "def f(): return 4\n")
    shown = notebook("%%distributed --devices 2\nimport user\nprint('f', user.f())").text
    assert "f 4" in shown
    assert "loaded again: tools, user" in shown


def test_deleted_module_goes_on_and_one_that_was_missing_is_found(notebook: Notebook, files: Files) -> None:
    path = files("tools.py", "def f(): return 1\n")
    notebook("%%distributed\nimport tools")
    path.unlink()
    shown = notebook("%%distributed\nimport tools\nprint('f', tools.f())").text
    assert "f 1" in shown
    assert "'tools' is gone from the disk" in shown
    assert "gone" not in notebook("%%distributed\nprint('f')").text, "said once"
    files("tools.py", "def f(): return 2\n")
    assert "f 2" in notebook("%%distributed\nimport tools\nprint('f', tools.f())").stdout
    assert notebook.fails("%%distributed\nimport later").ename == "ModuleNotFoundError"
    files("later.py", "x = 7\n")
    assert "x 7" in notebook("%%distributed\nimport later\nprint('x', later.x)").stdout


BLOCK = """
import enum
import torch.nn as nn
class Colour(enum.Enum):
    RED = 1
class Block(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0 + {0}
    class Inner:
        def says(self): return {0}
def scale(): return {0}
"""


def test_what_lives_on_a_rank_becomes_the_new_text(notebook: Notebook, files: Files) -> None:
    files("block.py", BLOCK.format(1))
    notebook(
        "import torch, block\nfrom block import Block, Colour, scale\n"
        "class Mine(Block):\n    def forward(self, x): return super().forward(x) + 1000\n"
        "model = Block(2, 2); mine = Mine(2, 2)\n"
        "opt = torch.optim.SGD([*model.parameters(), *mine.parameters()], 1.0)\n"
        "held = {'f': scale, 'l': [scale, Colour.RED], 'inner': Block.Inner()}\n"
        "def use(f=scale): return f()\n"
        "def outer():\n    f = scale\n    return lambda: f()\n"
        "closed = outer()"
    )
    cell = (
        "%%distributed --devices 2\n"
        "out = model(torch.ones(1, 2)), mine(torch.ones(1, 2))\n"
        "made = Block.Inner() if made is None else made\n"
        "print(int(out[0].sum()), int(out[1].sum()), held['f'](), held['l'][0](), closed(), held['inner'].says())\n"
        "print(isinstance(model, block.Block), isinstance(mine, Block), held['l'][1] is Colour.RED, made.says())\n"
    )
    notebook("made = None")
    assert "2 2002 1 1 1 1\nTrue True True 1" in notebook(cell).stdout
    files("block.py", BLOCK.format(2))
    shown = notebook(cell).stdout
    assert "4 2004 2 2 2 2\nTrue True True 2" in shown
    # the notebook's own objects are still of the notebook's own, old class, and training them comes home
    notebook("import copy; before = copy.deepcopy(model.state_dict())")
    notebook("%%distributed --devices 2\nmodel.weight.grad = torch.ones(2, 2); opt.step()")
    assert notebook("type(model) is Block, bool((model.weight != before['weight']).all())").value == "(True, True)"


def wheel(where: Path, name: str, version: str) -> Path:
    """A package of one module, which does not know its own version."""
    path = where / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": f"def v(): return {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    with zipfile.ZipFile(path, "w") as file:
        for member, text in texts.items():
            file.writestr(member, text)
    return path


def install(package: Path, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--disable-pip-version-check"]
    remove(package.name.partition("-")[0], target)  # --target leaves it
    subprocess.run([*command, "--target", str(target), str(package)], check=True)


def remove(name: str, target: Path) -> None:
    for old in (*target.glob(f"{name}*"), *target.glob(f"__pycache__/{name}*")):
        shutil.rmtree(old) if old.is_dir() else old.unlink()


@pytest.mark.thorough
def test_package_that_was_replaced_or_removed_is_said_once(notebook: Notebook, tmp_path: Path) -> None:
    target = tmp_path / "site-packages"
    target.mkdir()
    install(wheel(tmp_path, "tiny", "1.0"), target)
    cell = "%%distributed --devices 2\nimport tiny\nprint('v', tiny.v())"
    try:
        notebook(f"import sys; sys.path.append({str(target)!r})")
        notebook("import tiny")
        assert "still" not in notebook(cell).text
        install(wheel(tmp_path, "tiny", "2.0"), target)
        shown = notebook(cell).text
        assert "tiny 2.0 is installed, and the ranks still run 1.0: %distributed restart" in shown
        assert shown.count("the ranks still run") == 1
        assert "tiny 2.0 is installed, and this notebook still runs 1.0: restart the kernel" in shown
        assert "v 1.0" in shown
        assert "still" not in notebook(cell).text
        nursery = "from nbtrain.engines._local import warm; warm.warm().process.pid"
        before = notebook(nursery).value
        notebook("%distributed restart")
        assert notebook(nursery).value != before, "it had imported packages too"
        shown = notebook(cell).text
        assert "v 2.0" in shown
        assert "still" not in shown
        install(wheel(tmp_path, "other", "1.0"), target)
        shown = notebook("%%distributed --devices 2\nimport other\nprint('v', other.v())").text
        assert "v 1.0" in shown, "what is new simply works"
        assert "still" not in shown
        remove("tiny", target)
        assert "tiny was removed, and the ranks still run 2.0: %distributed restart" in notebook(cell).text
    finally:
        notebook("import sys; sys.path.pop(); sys.modules.pop('tiny', None)")
        notebook("%distributed stop")


def test_package_loaded_after_it_was_replaced_is_fresh(notebook: Notebook, tmp_path: Path) -> None:
    """`%pip install -U tiny` and `import tiny` in one cell on the ranks."""
    target = tmp_path / "site-packages"
    target.mkdir()
    install(wheel(tmp_path, "small", "1.0"), target)
    new = wheel(tmp_path, "small", "2.0.0")
    try:
        notebook(f"import sys; sys.path.append({str(target)!r})")
        notebook("%%distributed --devices 1\nx = 1")
        shown = notebook(
            f"%%distributed --devices 1\nimport shutil, zipfile\n"
            f"shutil.rmtree({str(target / 'small-1.0.dist-info')!r})\n"
            f"zipfile.ZipFile({str(new)!r}).extractall({str(target)!r})\nimport small\nprint('v', small.v())"
        ).text
        assert "v 2.0.0" in shown
        shown = notebook("%%distributed --devices 1\nprint('v', small.v())").text
        assert "v 2.0.0" in shown
        assert "still" not in shown
    finally:
        notebook("import sys; sys.path.pop()")
        notebook("%distributed stop")


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("name", ["print", "open", "len"])
def test_pythons_own_names_are_put_back_and_it_is_said(notebook: Notebook, name: str) -> None:
    said = notebook(f"%%distributed -d 2\nimport builtins\nbuiltins.{name} = lambda *a, **k: 42").text
    assert f"the cell replaced {name} in the module builtins" in said
    assert f"`{name} = …`" in said
    shown = notebook(f"%%distributed -d 2\nimport builtins\nsame = type(builtins.{name}).__name__ + str(len([1]))")
    assert "replaced" not in shown.text
    assert notebook("same").text.strip() == "'builtin_function_or_method1'"
    notebook("%distributed stop")


def test_ranks_that_share_a_card_are_told_apart_for_nccl(notebook: Notebook) -> None:
    """It takes two of one machine on one card for a mistake."""
    notebook("import os; from nbtrain.base.specs import PoolSpec; PoolSpec.shares_cards = True")
    for _ in range(2):  # also when the notebook's variables have come
        found = notebook("%%distributed --devices 2\nfound = gather(os.environ['NCCL_HOSTID'])").error
        assert found is None
        assert notebook("len(set(found))").value == "2"
    notebook("%distributed stop")
