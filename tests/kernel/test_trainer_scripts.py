"""A Trainer in a script: one process under `python`, several under `torchrun`, the same weights as in a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from nbtrain import registry
from tests.support.absent import absent
from tests.support.trainer import START

pytestmark = pytest.mark.thorough

SHOWN = """
import nbtrain.trainer.script_rank, nbtrain.views.text
nbtrain.trainer.script_rank.EVERY, nbtrain.views.text.QUIET = 0.01, 0  # lines of progress, as after two seconds
"""
PROGRAM = SHOWN + "ROOT = '.'\n" + START.replace("%load_ext nbtrain", "").replace("devices=2, ", "")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(folder: Path, start: list[str], ends: str, begins: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(begins + ends)
    temporary = folder / "temporary"
    temporary.mkdir()
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(temporary)}  # torchrun leaves its logs there
    return subprocess.run(
        [*start, str(path)], cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_python_runs_it_in_one_process(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        [sys.executable],
        """
net = Net(); t = trainer(devices=1); t.fit(net, data, held_out)
print(alike(net, one_process(2, size=8)), t.test(net, held_out, verbose=False)[0]["samples"])
print(len(t.predict(net, data)), hasattr(__builtins__, "log"))
""",
    )
    said = [line for line in done.stdout.splitlines() if " · " not in line and not line.startswith("0:")]
    assert said == ["True 30.0", "8 False"], done.stdout + done.stderr
    ends = [line.rpartition(" · ")[0] for line in done.stdout.splitlines() if line.startswith("done · 0:0")]
    assert [end.rpartition(" · ")[2] for end in ends] == ["8/8", "test 4/4", "predict 8/8"], done.stdout


@pytest.mark.sample("ddp", "fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed --stage 3", "pipeline"])
def test_torchrun_runs_it_on_its_processes(tmp_path: Path, strategy: str) -> None:
    for package in registry.strategy(strategy.partition(" ")[0]).needs.packages:
        if find_spec(package) is None:
            absent(f"{package} is not installed", f"pip install {package}")
    size = 8 if strategy == "pipeline" else 16
    done = run(
        tmp_path,
        TORCHRUN,
        f"""
if int(os.environ["RANK"]):
    class Net(Net):  # each process may have drawn weights of its own
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                [p.add_(1) for p in self.parameters()]
net = Net(); t = trainer(strategy={strategy!r}, max_epochs=1); t.fit(net, data, held_out)
t.max_epochs = 2; t.fit(net, data, held_out)
tested = t.test(net, held_out, verbose=False)[0]["samples"]
found = [one["index"] for one in t.predict(net, data)]
torch.manual_seed(0)
os.environ["RANK"] == "0" and print(alike(net, one_process(2, size={size})), tested, found, t.current_epoch)
if os.environ["RANK"] == "1":
    whole = sum(p.sum().item() for p in net.parameters())
    open("other", "w").write(repr(whole))
torch.distributed.barrier()
if os.environ["RANK"] == "0":
    print(abs(float(open("other").read()) - sum(p.sum().item() for p in net.parameters())) < 1e-5)
    print(sorted(os.listdir("trainer_logs")))
""",
    )
    lines = done.stdout.splitlines()
    assert lines[-3:] == [
        "True 30.0 [0, 1, 2, 3, 4, 5, 6, 7] 2",
        "True",
        "['version_0']",
    ], done.stdout + done.stderr


@pytest.mark.parametrize("start", [[sys.executable], TORCHRUN], ids=["python", "torchrun"])
def test_a_script_goes_on_from_what_it_has_saved_itself(tmp_path: Path, start: list[str]) -> None:
    """No rank saves it, so there are no random states of ranks in it."""
    size = 8 if start is not TORCHRUN else 16
    done = run(
        tmp_path,
        start,
        f"""
net = Net(); t = trainer(max_epochs=1); t.fit(net, data); t.save_checkpoint("half.ckpt")
other = Net(); again = trainer(max_epochs=2); again.fit(other, data, ckpt_path="half.ckpt")
torch.manual_seed(0)
os.environ.get("RANK", "0") == "0" and print(alike(other, one_process(2, size={size})), again.current_epoch)
""",
    )
    assert done.stdout.splitlines()[-1] == "True 2", done.stdout + done.stderr


def test_a_wrong_number_of_devices_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, TORCHRUN, "trainer(devices=4).fit(Net(), data)")
    assert done.returncode != 0
    assert "devices=4, and torchrun has started 2" in done.stderr
