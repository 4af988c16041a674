"""Each option of a `%%distributed` line is in a script, refused, or said: none is dropped without a word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.annexes.export import line_options
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.machine import registry
from nbtrain.notebook.magics.line import strategy_flags
from nbtrain.notebook.magics.line.options import OPTIONS
from tests.support.kernels import ROOT
from tests.support.shells import Notebook, notebook

WRITTEN = frozenset(
    {"strategy", "devices", "precision", "split_batches", "no_sampler", "detect_anomaly", "keep",
     "background"}
)  # fmt: skip
"""options that a script does. Of `keep` and `background`: it is not compared with weights that are not at home"""
SAID = frozenset({"accelerator", "nodes", "oversubscribe", "save_every", "log_to", "profile", "output"})
"""options that a script goes without, which `notes` says"""
NOTHING: dict[str, str] = {
    "engine": "torchrun starts the processes",
    "hosts": "torchrun is started on each machine; the note on --nodes says how",
    "python": "that of the script is the one it is started with",
    "sbatch": "--slurm of export writes a file, which has these lines",
    "start": "torchrun starts fresh interpreters",
    "save_to": "where --save-every saves, which is said",
    "keep_last": "what --save-every keeps, which is said",
    "hang_after": "it only shows where ranks wait",
    "debug_ranks": "it is about a notebook's prompt",
    "detach": "a script needs no notebook",
    "until": "the queue that runs a script has a limit of its own",
    "monitor": "there is no cell to show it below",
    **dict.fromkeys(
        ("compare", "verify", "steps", "find_batch", "find_model", "grow", "memory", "bandwidth"),
        "a trial measures a cell; the script is the cell itself",
    ),
    **dict.fromkeys(("locals", "batch"), "it belongs to another verb"),
}
"""options that do not change what is trained → why"""

OF_STRATEGY: dict[str, dict[str, str]] = {
    "single": {},
    "ddp": {"bucket_mb": "written", "comm_dtype": "written"},
    "zero1": {"bucket_mb": "written", "comm_dtype": "written"},
    "fsdp": {
        "sharding": "written", "replicas": "written", "wrap": "written", "comm_dtype": "written",
        "cpu_offload": "refused", "limit_all_gathers": "said",
    },
}  # fmt: skip
"""a strategy's own options → what becomes of them. Those of deepspeed are in the config, which is written"""
CELLS = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(32, 4)), 4, shuffle=True)
model = nn.Linear(4, 2); opt = torch.optim.SGD(model.parameters(), 0.1)"""
LOOP = """for epoch in range(2):
    for x, in data:
        opt.zero_grad(); model(x).sum().backward(); opt.step()"""


@pytest.fixture
def nb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.chdir(tmp_path)
    with notebook() as found:
        found.run(CELLS)
        found.run("%distributed -s ddp -d 2")
        yield found


def script(nb: Notebook, line: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What is written, but for its first line, which is the options; and what is said."""
    nb.run(f"%%distributed {line}\n{LOOP}")
    capsys.readouterr()
    nb.run("%distributed export --force train.py")
    said = "\n".join(one for one in capsys.readouterr().out.splitlines() if "also trained" not in one)
    return Path("train.py").read_text().partition("\n")[2], said


def test_each_option_is_in_one_table() -> None:
    tables = [WRITTEN, line_options.REFUSED, SAID, NOTHING]
    names = [name for table in tables for name in table]
    assert sorted(names) == sorted(one.name for one in OPTIONS)


@pytest.mark.parametrize("strategy", OF_STRATEGY)
def test_each_option_of_a_strategy_is_in_the_table(strategy: str) -> None:
    found = strategy_flags.by_field(registry.STRATEGIES[strategy].load())
    assert found.keys() == OF_STRATEGY[strategy].keys()


@pytest.mark.parametrize(("line", "written"), [
    ("-d 3", "torchrun --nproc-per-node 3 train.py"),
    ("-s zero1", "ZeroRedundancyOptimizer"),
    ("--precision bf16-mixed", "model.forward = _in_bf16(model.forward)"),
    ("--split-batches", "for at in range(0, len(batches), 1):"),
    ("--no-sampler", "loader._shares = (0, 1)"),
    ("--detect-anomaly", "torch.autograd.set_detect_anomaly(True)"),
    ("--bucket-mb 4", "DistributedDataParallel(held, bucket_cap_mb=4.0)"),
    ("--comm-dtype bf16", "default_hooks.bf16_compress_hook"),
    ("-s zero1 --comm-dtype fp16", "default_hooks.fp16_compress_hook"),
    ("-s fsdp --wrap Linear", "type(part).__name__ in ('Linear',)"),
    ("-s fsdp --sharding SHARD_GRAD_OP", "fully_shard(part, mesh=mesh, reshard_after_forward=False)"),
    ("-s fsdp --sharding HYBRID_SHARD --replicas 2", '(2, _WORLD_SIZE // 2), mesh_dim_names=("replicas", "ranks")'),
    ("-s fsdp --sharding NO_SHARD", "(_WORLD_SIZE, 1), mesh_dim_names="),
    ("-s fsdp --comm-dtype fp32", "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"),
    ("-s fsdp --comm-dtype bf16", "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype="),
])  # fmt: skip
def test_what_is_written(nb: Notebook, line: str, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert written not in "".join(script(nb, "", capsys))
    text, said = script(nb, line, capsys)
    assert written in text + said


@pytest.mark.parametrize(("line", "wanted"), [
    ("--accumulate 4", "write (loss / 4).backward(), and step every 4 batches"),
    ("--share-eval", "--share-eval: leave it out"),
    ("--scale-lr sqrt", "--scale-lr sqrt: write the rate in the cell"),
    ("--checkpoint-activations Linear", "call torch.utils.checkpoint in the model"),
    ("-s fsdp --cpu-offload", "hand offload_policy=CPUOffloadPolicy() to fully_shard"),
])  # fmt: skip
def test_what_is_refused(nb: Notebook, line: str, wanted: str) -> None:
    nb.run(f"%%distributed {line}\n{LOOP}")
    assert wanted in str(nb.error("%distributed export train.py"))


@pytest.mark.parametrize(("line", "wanted"), [
    ("-d 4 --nodes 2", "--nodes 2: on each machine torchrun --nnodes 2 --nproc-per-node 2"),
    ("--save-every 10", "--save-every: a script saves after the epochs"),
    ("--log-to writer", "--log-to writer: log() of the script prints alone"),
    ("--profile 3", "--profile 3: write torch.profiler.profile() around the loop"),
    ("--output all", "--output all: in the script rank 0 alone prints"),
    ("-s fsdp --no-limit-all-gathers", "--no-limit-all-gathers: fully_shard of the script gathers one unit ahead"),
])  # fmt: skip
def test_what_is_said(nb: Notebook, line: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    nb.run("class Writer:\n    def add_scalar(self, tag, value, step): pass\nwriter = Writer()")
    assert wanted in script(nb, line, capsys)[1]


@pytest.mark.parametrize(
    "line", ["--start spawn", "--hang-after 5", "--debug-ranks all", "--monitor off", "--save-to x", "--keep-last 1"]
)
def test_what_does_not_matter(nb: Notebook, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script(nb, line, capsys) == script(nb, "", capsys)


def test_where_the_script_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cards = RunSpec(pool=PoolSpec(kind="cuda", devices=("cuda:0", "cuda:0"), uuids=("a", "a"), oversubscribe=True))
    assert next(iter(line_options.notes(on_cards))).startswith("--oversubscribe: each process of a script needs a card")
    on_cpus = RunSpec(pool=PoolSpec(devices=("cpu", "cpu")))
    monkeypatch.setattr(line_options, "gpus", lambda: ())
    assert [*line_options.notes(on_cpus)] == []
    monkeypatch.setattr(line_options, "gpus", lambda: ("a card",))
    assert "a script takes GPUs where there are any" in next(iter(line_options.notes(on_cpus)))


def test_weights_that_are_not_at_home_are_not_measured(nb: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not measured" not in script(nb, "", capsys)[0]
    for line in ("--keep model", "--background"):
        assert "not measured" in script(nb, line, capsys)[0]


@pytest.mark.parametrize(("cell", "library"), [
    ("torch.manual_seed(1)", ""), ("import numpy as np\na = np.random.rand(3)", "numpy"),
    ("import numpy as np\nnp.random.seed(1); a = np.random.rand(3)", ""),
    ("import random\na = random.random()", "random"),
    ("import random\nrandom.seed(1); a = random.random()", ""),
])  # fmt: skip
def test_what_draws_without_a_seed_is_said(
    nb: Notebook, cell: str, library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nb.run(cell)
    said = script(nb, "", capsys)[1]
    assert [one.split()[4] for one in said.splitlines() if "no seed of" in one] == ([library] if library else [])


def test_a_seed_in_a_loop_is_said(nb: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    said = "a seed is set in a loop"
    for cell in (f"torch.manual_seed(1)\n{LOOP}", LOOP.replace("    for x", "    torch.manual_seed(epoch)\n    for x")):
        nb.run(f"%%distributed\n{cell}")
        capsys.readouterr()
        nb.run("%distributed export --force train.py")
        assert (said in capsys.readouterr().out) == ("(epoch)" in cell)


def test_the_script_of_the_readme_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text().partition("## Three cells")[2], re.S)
    with notebook() as nb:
        nb.run("%distributed -s ddp")
        for cell in cells[:3]:
            nb.run(cell.replace("%load_ext nbtrain\n", ""))
        nb.run("%distributed export train.py")
    assert len(Path("train.py").read_text().splitlines()) <= 150
