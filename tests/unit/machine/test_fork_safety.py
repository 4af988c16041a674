"""What a fork of the kernel would not survive, in real processes and in trees of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain.machine import fork_safety
from tests.support.file_tree import tree

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads and open files are read from /proc")


def in_a_process(where: Path, code: str, **environ: str) -> list[str]:
    """What `why_not_fork` says in a fresh process, at each `say()`."""
    script = where / "script.py"  # a file, because torch.jit reads the source of what it compiles
    script.write_text("from nbtrain.machine.fork_safety import why_not_fork\ndef say(): print(why_not_fork())\n" + code)
    own = {"PYTHONPATH": str(Path(fork_safety.__file__).parents[2]), "PYTHONWARNINGS": "ignore"}
    env = os.environ | own | environ
    done = subprocess.run([sys.executable, str(script)], env=env, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout.splitlines()


@linux
@pytest.mark.slow
def test_worker_threads_of_torch_forbid_a_fork_and_those_of_numpy_do_not(tmp_path: Path) -> None:
    before, imported, after, pools = in_a_process(
        tmp_path,
        "import numpy; a = numpy.ones((600, 600)); a @ a\n"
        "say()\n"
        "import torch; torch.set_num_threads(2)\n"
        "say()\n"
        "a = torch.ones(600, 600); a.relu_()\n"
        "say()\n"
        "@torch.jit.script\n"
        "def later(a):\n    return torch.jit.wait(torch.jit.fork(torch.relu, a))\n"
        "later(a)\n"
        "say()\n",
    )
    assert before == imported == "None"
    assert "(1 of OpenMP)" in after
    assert "`--start warm`" in after
    assert "of torch's own pools" in pools


@linux
@pytest.mark.slow
def test_torch_with_one_thread_may_be_forked_and_a_member_of_a_group_may_not(tmp_path: Path) -> None:
    alone, member = in_a_process(
        tmp_path,
        "import torch\n"
        "a = torch.ones(600, 600); a.relu_()\n"
        "say()\n"
        "import torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "say()\n"
        "dist.destroy_process_group()\n",
        OMP_NUM_THREADS="1",
    )
    assert alone == "None"
    assert "member of a process group" in member


@linux
def test_cuda_is_seen_by_the_device_that_it_keeps_open(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-uvm"
    device.touch()
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    (tmp_path / "fd" / "7").symlink_to("/dev/nvidiactl")  # NVML opens this one as well
    assert fork_safety.cuda_initialised(tmp_path, {}, device) is None
    assert fork_safety.why_not_fork(tmp_path, {}, device) is None
    (tmp_path / "fd" / "8").symlink_to(device)
    assert fork_safety.cuda_initialised(tmp_path, {}, device) == "the CUDA driver"
    said = fork_safety.why_not_fork(tmp_path, {}, device) or ""
    assert "CUDA is initialised in this kernel (by the CUDA driver)" in said


@linux
def test_a_device_that_this_process_opens_and_closes(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-uvm"
    assert fork_safety.cuda_initialised(modules={}, device=device) is None
    with device.open("w"):
        assert fork_safety.cuda_initialised(modules={}, device=device) == "the CUDA driver"
    assert fork_safety.cuda_initialised(modules={}, device=device) is None


@linux
def test_where_a_sandbox_hides_what_threads_do_no_fork_is_risked(tmp_path: Path) -> None:
    maps = "7f00-7fff r-xp 00000000 00:00 0    /opt/torch/lib/libgomp-a34b3233.so.1"
    root = tree(tmp_path, {"maps": maps, "task/999999/comm": "python", "task/999998/comm": "ZMQbg/IO/0"})
    assert "(1 of unknown origin)" in (fork_safety.why_not_fork(root, {}) or "")
