"""What is set in local modules is part of the namespace: `config.lr = 42`, on either side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import START, Notebook
from tests.support.story import play

CONFIG = """
import enum
import torch
lr = 0.1
name = "plain"
options = {"depth": 2, "sizes": [1, 2]}
seen = []
weights = torch.zeros(3)
class Config:
    width = 8
    class Inner:
        depth = 1
    def area(self): return self.width * self.width
class Holder:
    def __init__(self): self.rate = 1.0
holder = Holder()
def rate(): return lr
def count(value): seen.append(value); return len(seen)
def turn(to):
    global name
    name = to
"""


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    path = Path(shared_kernel.home) / "cfg.py"
    path.write_text(CONFIG)
    yield Notebook(shared_kernel, first="")
    shared_kernel.run(
        "import sys\nsys.modules.pop('cfg', None)\n%distributed stop\n"
        "from nbtrain.exchange.kinds.python_module_state import state_of; state_of('cfg').forget()"
    )
    path.unlink(missing_ok=True)


def test_what_is_set_in_a_module_goes_both_ways(notebook: Notebook) -> None:
    play(
        notebook,
        """
        import cfg, torch
        cfg.lr = 42
        options, seen, weights, held = cfg.options, cfg.seen, cfg.weights, cfg.holder
        cfg.Config.width = 3; cfg.Config.Inner.depth = 9
        cfg.new = [1, cfg.options]
        options["depth"] = 5
        del cfg.enum
        --- ranks
        assert cfg.rate() == 42, cfg.lr
        assert cfg.Config().area() == 9 and cfg.Config.Inner.depth == 9
        assert cfg.options == {"depth": 5, "sizes": [1, 2]}, cfg.options
        assert cfg.new[1] is cfg.options and not hasattr(cfg, "enum")
        cfg.lr = 7
        cfg.turn("by a function")
        cfg.count(3)
        cfg.options["sizes"].append(9)
        cfg.weights += 1
        cfg.holder.rate = 2.5
        cfg.Config.width = 4
        cfg.Config.fresh = "here"
        --- here
        assert cfg.lr == 7 == cfg.rate() and cfg.name == "by a function"
        assert seen is cfg.seen == [3], cfg.seen
        assert options is cfg.options and options["sizes"] == [1, 2, 9], cfg.options
        assert cfg.new[1] is options
        assert weights is cfg.weights and weights.tolist() == [1, 1, 1], weights
        assert held is cfg.holder and held.rate == 2.5
        assert cfg.Config().area() == 16 and cfg.Config.fresh == "here"
        cfg.lr = 0.1
        cfg.Config.area = lambda self: "patched"
        def rate(): return -1
        cfg.rate = rate
        seen.append(4)
        --- ranks
        assert cfg.lr == 0.1 and cfg.Config().area() == "patched" and cfg.rate() == -1 and cfg.seen == [3, 4]
        del cfg.new
        --- here
        assert not hasattr(cfg, 'new') and cfg.rate is rate""",
    )


def test_aliases_and_modules_that_only_a_cell_imports(notebook: Notebook) -> None:
    play(
        notebook,
        """
        from cfg import options, weights, holder
        --- ranks
        import cfg
        options["depth"] = 77
        assert cfg.options is options, (cfg.options, options)
        assert cfg.weights is weights and cfg.holder is holder
        cfg.lr = 5
        --- here
        import cfg
        assert cfg.lr == 5 and cfg.options is options and options["depth"] == 77
        cfg.lr = 6
        --- ranks
        assert cfg.lr == 6 and cfg.options is options and cfg.weights is weights
        weights.add_(1)
        assert float(cfg.weights.sum()) == 3
        --- here
        assert cfg.weights is weights and weights.tolist() == [1, 1, 1]""",
    )


def test_a_cell_that_failed_leaves_nothing_in_modules(notebook: Notebook) -> None:
    notebook("import cfg\ncfg.options['mine'] = 1")
    notebook("%%distributed --devices 2\nassert cfg.options == {'depth': 2, 'sizes': [1, 2], 'mine': 1}")
    notebook.fails(
        "%%distributed --devices 2\n"
        "cfg.lr = 9; cfg.options['sizes'].append(3); cfg.weights += 1; cfg.holder.rate = 5; cfg.Config.width = 0\n"
        "cfg.extra = 1\n1 / 0"
    )
    notebook(
        "%%distributed --devices 2\n"
        "assert cfg.lr == 0.1, cfg.lr\n"
        "assert cfg.options == {'depth': 2, 'sizes': [1, 2], 'mine': 1}, cfg.options\n"
        "assert cfg.holder.rate == 1.0 and cfg.Config.width == 8 and not hasattr(cfg, 'extra')\n"
        "assert float(cfg.weights.sum()) == 0"
    )


def test_edited_and_reloaded_files_go_on_working(notebook: Notebook) -> None:
    path = Path(notebook.kernel.home) / "cfg.py"
    notebook("import cfg, importlib\ncfg.lr = 42")
    notebook("%%distributed --devices 2\nassert cfg.rate() == 42")
    path.write_text(CONFIG.replace("return lr", "return lr + 1").replace('"plain"', '"other"'))
    shown = notebook("%%distributed --devices 2\nprint(cfg.rate(), cfg.name)")
    assert "43 other" in shown.stdout, "what was set stays, what was not is the new text's"
    notebook("importlib.reload(cfg)\nassert cfg.lr == 0.1")
    notebook("%%distributed --devices 2\nassert cfg.rate() == 1.1, cfg.rate()")


def test_what_cannot_travel_is_said_once_and_hinders_nobody(notebook: Notebook) -> None:
    notebook("import cfg, threading\ncfg.lock = threading.Lock()\ncfg.lr = 3")
    shown = notebook("%%distributed --devices 2\nprint('lr', cfg.lr)")
    assert "lr 3" in shown.stdout
    assert "cfg.lock, which its file did not set, stays where it is" in shown.text
    assert "cfg.lock" not in notebook("%%distributed --devices 2\nprint('lr', cfg.lr)").text
    shown = notebook("%%distributed --devices 2\nimport threading\ncfg.theirs = threading.Lock(); cfg.lr = 4")
    assert "cfg.theirs, which its file did not set, stays where it is" in shown.text
    assert notebook("cfg.lr, hasattr(cfg, 'theirs')").value == "(4, False)"


def test_ranks_that_set_different_things_are_named(notebook: Notebook) -> None:
    notebook("import cfg")
    shown = notebook("%%distributed --devices 2\ncfg.lr = rank + 1")
    assert "values differ across ranks: module cfg; kept rank 0's" in shown.text
    assert notebook("cfg.lr").value == "1"
    notebook("%%distributed --devices 2\nassert cfg.lr == 1, cfg.lr")


@pytest.mark.thorough
def test_a_file_that_was_executed_before_nbtrain_came(kernel: Kernel) -> None:
    Path(kernel.home, "cfg.py").write_text(CONFIG)
    kernel.run("import cfg\ncfg.lr = 42; cfg.Config.width = 5; cfg.seen.append(1)")
    Notebook(kernel, first="")("%%distributed --devices 2\nassert cfg.lr == 42 and cfg.Config.width == 5, cfg.lr")


def test_what_is_set_in_installed_packages_is_named_once(shared_kernel: Kernel) -> None:
    notebook = Notebook(shared_kernel, "import torch, torch.nn as nn, torch.nn.functional as F\nrelu = F.relu")
    cell = "%%distributed --devices 2\nprint(float(F.relu(torch.ones(()))))"
    assert "each process has its own" not in notebook(cell).text
    notebook(
        "F.relu = lambda x: x * 2\ndef patch(): nn.Linear.extra = 1\npatch()\n"
        "setattr(torch.backends.cudnn, 'allow_tf32', True); torch.backends.cudnn.benchmark = False"
    )
    shown = notebook(cell).text
    for one in ("torch.nn.functional.relu", "modules.linear.Linear.extra", "backends.cudnn.allow_tf32"):
        assert one in shown.partition(": set in the notebook")[0], shown
    assert "benchmark" not in shown, "which goes with each cell"
    assert "each process has its own" not in notebook(cell).text, "said once"
    notebook("F.relu = relu; del nn.Linear.extra")
    notebook("from unittest import mock\nmock.patch('torch.nn.functional.silu', lambda x: x).start()")
    notebook("before = mock.patch.object(F, 'elu'); before.start()")
    shown = notebook(cell).text
    assert "torch.nn.functional.silu, torch.nn.functional.elu: set in the notebook" in shown, shown
    notebook("mock.patch.stopall()")
    shown = notebook(f"{cell}\nF.gelu = F.silu\ndef f(): nn.ReLU.inplace = True").text
    assert "torch.nn.functional.gelu, torch.nn.modules.activation.ReLU.inplace: set on the ranks only" in shown, shown
    notebook("%distributed stop")


TRAINS = """
import torch, torch.nn as nn
model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), 0.1)
def step(x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
"""


def test_a_model_that_a_module_keeps_is_trained_as_one_process_would(kernel: Kernel) -> None:
    Path(kernel.home, "trains.py").write_text(TRAINS)
    notebook = Notebook(kernel, START)
    notebook("import trains, copy\nloader, whole = DataLoader(data, batch_size=16), DataLoader(data, batch_size=32)")
    notebook("ref = copy.deepcopy(trains.model); at = torch.optim.SGD(ref.parameters(), 0.1); w = trains.model.weight")
    for strategy in ("ddp", "fsdp", "ddp"):  # another strategy has the ranks forget
        notebook("for x, y in whole:\n    F.cross_entropy(ref(x), y).backward(); at.step(); at.zero_grad()")
        shown = notebook(f"%%distributed -d 2 -s {strategy}\nfor x, y in loader: trains.step(x, y)").text
        assert "loaded again" not in shown
        found = notebook("w is trains.model.weight, torch.allclose(ref.weight, trains.model.weight, atol=1e-6)")
        assert found.value == "(True, True)", strategy


def test_objects_that_are_not_looked_into_stay_in_what_holds_them(notebook: Notebook) -> None:
    """Functions, patterns, members of an enum: in a list that a failed cell has changed they were None afterwards."""
    path = Path(notebook.kernel.home) / "cfg.py"
    path.write_text(
        "import enum, re, torch\n"
        "class Flag(enum.IntFlag):\n    A = 1\n    B = 2\n"
        "held = [torch.relu, re.compile('a'), Flag.B, Flag.A | Flag.B]\nby_name = {'act': torch.relu}\n"
    )
    shown = "print([str(getattr(one, '__name__', one)) for one in (*cfg.held, *cfg.by_name.values(), cfg.Flag(3))])"
    notebook("import cfg")
    first = notebook(shown).stdout
    notebook("%%distributed -s ddp -d 2\npass")
    change = "cfg.held.append(cfg.Flag(3)); cfg.held[0] = cfg.by_name['act'] = torch.tanh\n"
    notebook.fails(f"%%distributed -s ddp -d 2\nimport torch\n{change}1 / 0")
    assert notebook("%%distributed -s ddp -d 2\n" + shown).stdout.splitlines()[-1] == first.strip()
    notebook(f"%%distributed -s ddp -d 2\nimport torch\n{change}")
    here = notebook(shown).stdout
    assert here.count("tanh") == 2
    assert notebook("%%distributed -s ddp -d 2\n" + shown).stdout.splitlines()[-1] == here.strip()
