"""After a cell torch is as it was: every function, class and property of it is the object that it was before."""

from __future__ import annotations

import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from nbtrain.base.awake_time import AwakeTimeout
from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, TRAIN, Notebook

LOOK = textwrap.dedent('''
    import sys, threading, time, warnings
    warnings.simplefilter("ignore")  # torch says of old names that they are old
    from nbtrain.compat import intercept

    def attributes():
        """Of torch, all that is code: (module, name) or (module, class, name) → the object."""
        found = {}
        for module in [m for name, m in sys.modules.items() if name == "torch" or name.startswith("torch.")]:
            for name, value in list(vars(module).items()):
                if callable(value):
                    found[module.__name__, name] = value
                if isinstance(value, type) and value.__module__.startswith("torch"):
                    for inner, held in list(vars(value).items()):
                        if callable(held) or isinstance(held, (property, classmethod, staticmethod)):
                            found[module.__name__, name, inner] = held
        return found

    def later(note, file):
        def wait_and_note():
            while intercept._standing:  # the cell
                time.sleep(0.01)
            time.sleep(0.2)  # it has begun to lay aside
            note()
            open(file + str(rank), "w").close()

        threading.Thread(target=wait_and_note).start()

    def note_before():
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # by its first one torch changes the class
        sys._before = attributes()

    def note_after():
        now = attributes()
        known = {key[:2] for key in sys._before if len(key) == 3}
        sys._differ = [key for key, value in sys._before.items() if now.get(key) is not value]
        sys._differ += [key for key in now if key not in sys._before and len(key) == 3 and key[:2] in known]
''')
STRATEGIES = {
    "16-mixed": "-s ddp --precision 16-mixed",
    "bf16-true": "-s ddp --precision bf16-true --accumulate 2",
    "dp": "-s dp",
    "ddp2": "-s ddp2",
    "zero1": "-s zero1",
    "sharded": "-s sharded",
    "fsdp": "-s fsdp",
    "deepspeed 3": "-s deepspeed_stage_3",
    "pipeline": "-s pipeline",
    "horovod": "-s horovod",
}
NEEDS = {"sharded": "fairscale", "deepspeed 3": "deepspeed", "horovod": "horovod"}


def wait_for(folder: Path, name: str, ranks: int) -> None:
    patience = AwakeTimeout(30)
    while len(list(folder.glob(f"{name}*"))) < ranks:
        assert not patience.over
        time.sleep(0.02)


@pytest.mark.thorough
@pytest.mark.kernel
@pytest.mark.limit(180)
@pytest.mark.parametrize("way", STRATEGIES)
def test_a_rank_has_torch_as_it_was_after_every_cell(kernel: Kernel, way: str, tmp_path: Path) -> None:
    package = NEEDS.get(way)
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    notebook = Notebook(kernel)
    flags, ranks = STRATEGIES[way], 1 if way == "dp" else 2
    notebook(TRAIN)
    notebook(
        f"%%distributed -s {'dp' if way == 'dp' else 'none'} --devices 2\n{LOOK}\n"
        f"later(note_before, {str(tmp_path / 'before')!r})"
    )
    wait_for(tmp_path, "before", ranks)
    notebook(f"%%distributed {flags} --devices 2\n{LOOP}\nlater(note_after, {str(tmp_path / 'after')!r})")
    wait_for(tmp_path, "after", ranks)
    told = notebook(f"%%distributed {flags} --devices 2\nimport sys\nprint('differ', sys._differ)").text
    assert "differ" in told
    assert all(line.endswith("[]") for line in told.splitlines() if "differ" in line), told


@pytest.mark.kernel
def test_the_notebook_has_torch_as_it_was_after_a_rank_inside_of_it(kernel: Kernel) -> None:
    notebook = Notebook(kernel)
    notebook(TRAIN)
    notebook(f"%%distributed --engine inprocess\n{LOOP}")
    notebook(f"{LOOK}\nnote_before()")
    notebook(f"%%distributed --engine inprocess --precision bf16-mixed --accumulate 2\n{LOOP}")
    told = notebook("note_after(); print('seen', len(sys._before), sys._differ)").text
    assert told.strip().endswith("[]"), told
    assert int(told.split("seen")[1].split()[0]) > 10_000


@pytest.mark.thorough
@pytest.mark.kernel
def test_what_a_cell_inside_of_the_notebook_has_imported_is_torchs_own_afterwards(kernel: Kernel) -> None:
    notebook = Notebook(kernel)
    notebook(
        "%%distributed --engine inprocess\nfrom torch.nn.utils import clip_grad_norm_ as clip\nfrom torch import save"
    )
    notebook("import pickle; assert clip is torch.nn.utils.clip_grad_norm_ and save is torch.save; pickle.dumps(clip)")
