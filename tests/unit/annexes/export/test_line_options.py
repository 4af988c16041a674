"""Each option of a `%%distributed` line is in a script, refused, or said: none is dropped without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain import registry
from nbtrain.export import line_options, strategy_code
from nbtrain.magics.line import strategy_flags
from nbtrain.magics.line.options import OPTIONS
from nbtrain.specs import PoolSpec, RunSpec
from tests.support.shells import Notebook, notebook

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
    tables = [line_options.WRITTEN, line_options.REFUSED, line_options.SAID, line_options.NOTHING]
    names = [name for table in tables for name in table]
    assert sorted(names) == sorted(one.name for one in OPTIONS)


@pytest.mark.parametrize("strategy", strategy_code.FORMS)
def test_each_option_of_a_strategy_is_in_the_table(strategy: str) -> None:
    found = strategy_flags.by_field(registry.STRATEGIES[strategy].load())
    assert found.keys() == line_options.OF_STRATEGY[strategy].keys()


@pytest.mark.parametrize(("line", "written"), [
    ("-d 3", "torchrun --nproc-per-node 3 train.py"),
    ("-s zero1", "ZeroRedundancyOptimizer"),
    ("--precision bf16-mixed", "compute_in(model, torch.bfloat16)"),
    ("--accumulate 2", "ACCUMULATE = 2"),
    ("--split-batches", "SPLIT = True"),
    ("--no-sampler", "SHARE, SHARES = 0, 1"),
    ("--detect-anomaly", "torch.autograd.set_detect_anomaly(True)"),
    ("--bucket-mb 4", "super().__init__(model, bucket_cap_mb=4.0)"),
    ("--comm-dtype bf16", "COMM_DTYPE = torch.bfloat16"),
    ("-s zero1 --comm-dtype fp16", "self.register_comm_hook(None, sent_in)"),
    ("-s fsdp --wrap Linear", "WRAPPED = ('Linear',)"),
    ("-s fsdp --sharding SHARD_GRAD_OP", "fully_shard(part, mesh=mesh, reshard_after_forward=False)"),
    ("-s fsdp --sharding HYBRID_SHARD --replicas 2", '(2, WORLD_SIZE // 2), mesh_dim_names=("replicas", "ranks")'),
    ("-s fsdp --sharding NO_SHARD", "(WORLD_SIZE, 1), mesh_dim_names="),
    ("-s fsdp --comm-dtype fp32", "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"),
    ("-s fsdp --comm-dtype bf16", "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype="),
])  # fmt: skip
def test_what_is_written(nb: Notebook, line: str, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert written not in "".join(script(nb, "", capsys))
    text, said = script(nb, line, capsys)
    assert written in text + said


@pytest.mark.parametrize(("line", "wanted"), [
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


def test_weights_that_are_not_at_home_are_not_compared(nb: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    assert "NOTEBOOK = " in script(nb, "", capsys)[0]
    for line in ("--keep model", "--background"):
        assert "NOTEBOOK = " not in script(nb, line, capsys)[0]


@pytest.mark.parametrize(("before", "loop", "wanted"), [
    ("pass", LOOP.replace("model(x)", "(model(x) * random.random())"), "random"),
    ("pass", LOOP.replace("model(x)", "(model(x) + np.random.randn())"), "numpy"),
    ("def noise(x): return x + torch.randn(4)", LOOP.replace("model(x)", "model(noise(x))"), "torch"),
    ("class Rows:\n    def __getitem__(self, at): return uniform(0, 1)\nrows = Rows()", f"rows\n{LOOP}", "random"),
    ("pass", LOOP.replace("model(x)", "F.dropout(model(x))"), "dropout"),
    ("torch.randn(3)", f"order = torch.randperm(4)\n{LOOP}", ""),
])  # fmt: skip
def test_draws_of_the_loop_are_said(
    nb: Notebook, before: str, loop: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nb.run("import random\nimport numpy as np\nfrom random import uniform\nimport torch.nn.functional as F")
    nb.run(before)
    nb.run(f"%%distributed\n{loop}")
    capsys.readouterr()
    nb.run("%distributed export train.py")
    said = capsys.readouterr().out
    assert (f"nbtrain: {wanted}: each process draws for itself" in said) == bool(wanted)
    assert ("NOTEBOOK = " in Path("train.py").read_text()) == (not wanted)


def test_a_seed_in_a_loop_is_said(nb: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    said = "a seed is set in a loop"
    for cell in (f"torch.manual_seed(1)\n{LOOP}", LOOP.replace("    for x", "    torch.manual_seed(epoch)\n    for x")):
        nb.run(f"%%distributed\n{cell}")
        capsys.readouterr()
        nb.run("%distributed export --force train.py")
        assert (said in capsys.readouterr().out) == ("(epoch)" in cell)
