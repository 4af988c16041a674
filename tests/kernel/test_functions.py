"""`nbtrain.run`, `predict` and the launchers of others: a function is called as a cell would call it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import ROOT, Kernel, running_kernel
from tests.support.libraries import kernel_with
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def played(command: list[str], folder: Path) -> str:
    """What a script prints. torchrun leaves its logs in a folder."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(temporary)}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


START = """
import os, nbtrain, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from nbtrain import notebook_launcher, TorchDistributor
torch.manual_seed(0)
X = torch.randn(64, 8); Y = torch.randn(64, 1); scale = 2.0
data = DataLoader(TensorDataset(X, Y), 8)
def net(): torch.manual_seed(1); return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
def alone(epochs, size):
    model = net(); opt = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(epochs):
        for at in range(0, 64, size):
            opt.zero_grad(); (scale * F.mse_loss(model(X[at:at + size]), Y[at:at + size])).backward(); opt.step()
    return model
def train(epochs, lr=0.1):
    for group in opt.param_groups: group["lr"] = lr
    for _ in range(epochs):
        for x, y in data:
            loss = scale * F.mse_loss(model(x), y); opt.zero_grad(); loss.backward(); opt.step()
    return {"loss": loss.item(), "model": model, "rank": rank}
def alike(a, b): return all(torch.allclose(p, q, atol=1e-5) for p, q in zip(a.parameters(), b.parameters()))
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        assert kernel.run("%load_ext nbtrain\n" + START, 120).error is None
        yield kernel


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(kernel, "")
    made("model = net(); opt = torch.optim.SGD(model.parameters(), 0.5)")
    yield made
    made("%distributed stop")


@pytest.mark.sample("ddp", "fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "deepspeed --stage 2", "dp", "pipeline"])
def test_a_function_is_called_as_a_cell_would_call_it(notebook: Notebook, strategy: str) -> None:
    size = 8 if strategy in ("dp", "pipeline") else 16
    said = notebook(f"found = nbtrain.run(train, 2, lr=0.1, strategy={strategy!r}, devices=2)", 120)
    assert (
        notebook(f"alike(model, alone(2, {size})), found['model'] is model, found['rank']").value == "(True, True, 0)"
    )
    assert "differ" not in said.text
    assert notebook("[name for name in globals() if name.startswith('nbtrain_')]").value == "[]"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_a_function_is_given_is_prepared(notebook: Notebook, strategy: str) -> None:
    usual = f"strategy={strategy!r}, devices=2"
    notebook("""
def fit(model, opt, loader):
    for x, y in loader:
        (scale * F.mse_loss(model(x), y)).backward()
        if opt: opt.step()
        with torch.no_grad():
            for p in model.parameters():
                if not opt: p -= 0.1 * p.grad
                p.grad = None
class Both:
    def __init__(self): self.model = net(); self.opt = torch.optim.SGD(self.model.parameters(), 0.1)
    def fit(self, loader): fit(self.model, self.opt, loader)
both, other, third = Both(), Both(), Both()""")
    notebook(f"nbtrain.run(fit, both.model, both.opt, data, {usual}); nbtrain.run(other.fit, data, {usual})")
    assert notebook("alike(both.model, alone(1, 16)), alike(other.model, alone(1, 16))").value == "(True, True)"
    if strategy == "ddp":  # without an optimizer nothing would have said that it was not prepared
        notebook(f"nbtrain.run(fit, third.model, None, data, {usual})")
        assert notebook("alike(third.model, alone(1, 16))").value == "True"


def test_what_a_function_closes_over_and_returns(notebook: Notebook) -> None:
    notebook("""
def make(factor):
    inner = nn.Linear(8, 1)
    def sums(*, more=0):
        with torch.no_grad(): inner.weight.add_(1.0)
        return factor * inner.weight.sum().item() + more, world_size
    return sums, inner
sums, inner = make(3.0); before = inner.weight.sum().item()
found = nbtrain.run(sums, more=1.0, devices=2)""")
    assert notebook("abs(found[0] - 3 * (before + 8) - 1) < 1e-4, found[1]").value == "(True, 2)"
    assert notebook("round(inner.weight.sum().item() - before, 4)").value == "8.0", "what it changed is here"
    assert notebook("nbtrain.run(lambda a, b=1: a + b + rank, 1, b=5, devices=2)").value == "6"


@pytest.mark.thorough
def test_a_class_of_the_notebook_may_be_called_as_a_list_of_ipythons(notebook: Notebook) -> None:
    notebook("from dataclasses import dataclass\n@dataclass\nclass Out:\n    value: int\ndef make(): return Out(3)")
    assert notebook("found = nbtrain.run(make, devices=2); found, type(found) is Out").value == "(Out(value=3), True)"
    notebook("%%distributed -d 2\nmade = Out(4); Out.times = 2")
    assert notebook("made.value, Out.times, type(made) is Out").value == "(4, 2, True)"
    notebook("%%distributed -d 2\nclass In: kept = 5")
    assert notebook("In.kept").value == "5"
    notebook("import IPython; In = get_ipython().user_ns['_ih']; Out = get_ipython().user_ns['_oh']")
    assert (
        "'Out' in line 2 of the cell belongs to IPython" in notebook.kernel.run("%%distributed -d 2\nx = Out[1]").text
    )


def test_a_result_that_has_computed_nothing_is_said(notebook: Notebook) -> None:
    notebook("def ones():\n    yield 1\ndef other(): return (one for one in [1])\nasync def later(): return 1")
    assert "a function with yield returns a generator" in notebook.fails("nbtrain.run(ones, devices=2)").evalue
    said = notebook.fails("nbtrain.run(other, devices=2)")
    assert "the function returned a generator" in said.evalue
    assert "let the function return list(…)" in said.evalue
    assert "nbtrain_result" not in notebook.kernel.run("nbtrain.run(other, devices=2)").text
    assert "found = await function()" in notebook.fails("nbtrain.run(later, devices=2)").evalue
    assert notebook("%%distributed -d 2\nfound = await later()").error is None
    notebook("%%distributed -d 2\nlazy = ones()")
    assert "go through it in a %%distributed cell" in notebook.fails("list(lazy)").evalue


@pytest.mark.thorough
def test_what_goes_wrong_in_a_function(notebook: Notebook) -> None:
    notebook("def bad(x): raise ValueError(f'no {x}')")
    error = notebook.fails("nbtrain.run(bad, 1, devices=2)")
    assert (error.ename, error.evalue) == ("ValueError", "no 1")
    assert "def bad(x): raise" in error.traceback
    assert "nbtrain" not in error.traceback, "neither frames nor names of ours"
    assert "nbtrain_" not in notebook.fails("nbtrain.run(lambda x: bad(x), 2, devices=2)").traceback
    missing = notebook.fails("nbtrain.run(bad, devices=2)")
    assert "bad() missing 1 required positional argument" in missing.evalue
    assert "nbtrain" not in missing.traceback
    assert "nbtrain_" not in missing.traceback
    unfit = notebook.fails("nbtrain.predict(model, data, lambda m, b: bad(b), devices=2)")
    assert "def bad(x): raise" in unfit.traceback
    assert "trainer_" not in unfit.traceback
    assert "nbtrain/" not in unfit.traceback
    assert "takes a function, not int" in notebook.fails("nbtrain.run(3)").evalue
    assert "did you mean dp or ddp?" in notebook.fails("nbtrain.run(bad, strategy='dpp')").evalue
    inside = notebook("%%distributed -d 2\nnbtrain.run(bad, 1)").text
    assert "is called in an ordinary cell" in inside


@pytest.mark.sample("ddp", "fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed --stage 3", "dp", "pipeline"])
def test_predictions_are_whole_and_in_order(notebook: Notebook, strategy: str) -> None:
    given = f"strategy={strategy!r}, devices=2"
    for count in (64, 37, 3):
        notebook(f"found = nbtrain.predict(model, DataLoader(TensorDataset(X[:{count}], Y[:{count}]), 5), {given})", 60)
        assert notebook(f"torch.allclose(found, model(X[:{count}]), atol=1e-5), found.device.type").value == (
            "(True, 'cpu')"
        )


@pytest.mark.thorough
@pytest.mark.parametrize("given", ["devices=2", "strategy='none'", "strategy='dp', devices=2"])
def test_rows_of_a_shuffled_loader_stand_in_the_order_of_the_data(notebook: Notebook, given: str) -> None:
    """However the loader draws: rows are matched to samples by where they stand. Where there is no order of the data,
    for samples are repeated or have no indices, it is the loader's in one process."""
    notebook("""
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, Subset, WeightedRandomSampler
ids = TensorDataset(torch.arange(40.0)[:, None]); keep = nn.Identity()
class Backwards(Sampler):
    def __len__(self): return 40
    def __iter__(self): return iter(range(39, -1, -1))
class Bags(Sampler):
    def __len__(self): return 14
    def __iter__(self): return iter([[(at * 7 + more) % 40 for more in range(3)] for at in range(14)])
class Stream(IterableDataset):
    def __iter__(self): return iter([(torch.tensor([float(at)]),) for at in (3, 1, 2)])
def drawn(loader): return [int(at) for x, in loader for at in x.flatten()]
def of(loader, step=lambda m, b: (m(b[0]), {"x": b[0].flatten().tolist()}), **more):
    return nbtrain.predict(keep, loader, step, **more)
""")
    notebook(f"""
found = {{}}
for name, loader in dict(
    shuffled=DataLoader(ids, 3, shuffle=True), workers=DataLoader(ids, 3, shuffle=True, num_workers=2),
    generator=DataLoader(ids, 3, shuffle=True, generator=torch.Generator().manual_seed(5)),
    sampler=DataLoader(ids, 3, sampler=Backwards()), single=DataLoader(ids, None, shuffle=True),
    part=DataLoader(ids, 3, sampler=RandomSampler(ids, num_samples=10)),
    subset=DataLoader(Subset(ids, range(9, -1, -1)), 4, shuffle=True),
).items():
    rows, named = of(loader, {given})
    found[name] = rows.flatten().int().tolist(), rows.flatten().tolist() == named["x"]
""")
    in_order = {"shuffled": 40, "workers": 40, "generator": 40, "sampler": 40, "single": 40}
    for name, count in in_order.items():
        assert notebook(f"found['{name}'] == (list(range({count})), True)").value == "True", name
    assert notebook("len(found['part'][0]), found['part'][0] == sorted(found['part'][0])").value == "(10, True)"
    assert notebook("found['subset'][0]").value == str([*range(9, -1, -1)]), "by the index in the subset"
    notebook(f"""
repeated = DataLoader(ids, 3, sampler=WeightedRandomSampler(torch.ones(40), 40))
found = {{}}
for name, loader in dict(weighted=repeated, bags=DataLoader(ids, batch_sampler=Bags()), stream=DataLoader(Stream(), 2),
    batches=DataLoader(ids, 3, shuffle=True)).items():
    torch.manual_seed(3)
    rows = nbtrain.predict(keep, loader, {given}, to="batches" if name == "batches" else "tensor")
    rows = torch.cat(rows) if name == "batches" else rows
    after = torch.rand(1).item()
    torch.manual_seed(3)
    found[name] = rows.flatten().int().tolist() == drawn(loader), after == torch.rand(1).item()""")
    for name in ("weighted", "bags", "stream", "batches"):
        assert notebook(f"found['{name}']").value == "(True, True)", name


def test_rows_that_are_not_one_for_each_sample_are_told_of(notebook: Notebook) -> None:
    notebook("twice = lambda m, b: torch.cat([b[0], b[0]])\nordered = DataLoader(TensorDataset(X), 5)")
    notebook("shuffled = DataLoader(TensorDataset(X), 5, shuffle=True)")
    assert "other than one row for each sample" in notebook("nbtrain.predict(model, shuffled, twice, devices=2);").text
    assert "other than" not in notebook("nbtrain.predict(model, ordered, twice, devices=2);").text


def test_forms_of_predictions(notebook: Notebook) -> None:
    notebook("""
def step(model, batch): return {"out": model(batch[0])[:, 0], "x": batch[0][:, :2]}
frame = nbtrain.predict(model, TensorDataset(X), step, devices=2, to="pandas")
array = nbtrain.predict(model, data, devices=2, to="numpy")
batches = nbtrain.predict(model, data, devices=2, to="batches")""")
    assert notebook("list(frame.columns), len(frame), type(array).__name__, len(batches)").value == (
        "(['out', 'x_0', 'x_1'], 64, 'ndarray', 8)"
    )
    assert "takes a DataLoader or a Dataset, not Tensor" in notebook.fails("nbtrain.predict(model, X)").evalue
    assert "takes a model (torch.nn.Module), not function" in notebook.fails("nbtrain.predict(alone, data)").evalue
    assert "to='list'" in notebook.fails("nbtrain.predict(model, data, to='list')").evalue
    said = notebook(
        "ragged = nbtrain.predict(model, data, lambda m, b: b[0][:, :1 + len(b[0]) % 3 + int(b[0][0, 0] > 0)])"
    )
    assert "differ in their shapes, so that they are returned in batches" in said.text


@pytest.mark.thorough
def test_a_stream_that_looks_at_its_rank_and_gives_all_the_same_is_told_of(notebook: Notebook) -> None:
    """Also where ranks compute other gradients of the same samples, by dropout."""
    notebook("""
import itertools
class Looks(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(list(zip(X, Y))) if rank >= 0 else None
class Own(torch.utils.data.IterableDataset):
    def __iter__(self): return itertools.islice(iter(list(zip(X, Y))), rank, None, world_size)
drops = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
steps = torch.optim.SGD(drops.parameters(), 0.1)
def fit(stream):
    for x, y in DataLoader(stream, 8):
        steps.zero_grad(); F.mse_loss(drops(x), y).backward(); steps.step()""")
    same = "it gives all 2 ranks the same samples"
    assert same not in notebook("nbtrain.run(fit, Own(), strategy='ddp', devices=2)").text
    assert same in notebook("nbtrain.run(fit, Looks(), strategy='ddp', devices=2)").text


def test_misspelt_arguments_of_a_launcher_are_errors(notebook: Notebook) -> None:
    assert "num_proceses" in notebook.fails("notebook_launcher(train, (1,), num_proceses=2)").evalue
    notebook("nbtrain.run(train, 1, strategy='ddp', devices=2)")
    assert "nbtrain.run calls a function" in notebook.fails("%distributed export train.py").evalue


@pytest.mark.thorough
def test_a_function_that_brings_its_own_process_group(notebook: Notebook) -> None:
    """As it is written for Databricks' TorchDistributor."""
    notebook("""
def theirs(lr, epochs=1):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    ddp = DDP(net()); opt = torch.optim.SGD(ddp.parameters(), lr)
    sampler = torch.utils.data.DistributedSampler(data.dataset, shuffle=False)
    for _ in range(epochs):
        for x, y in DataLoader(data.dataset, 8, sampler=sampler):
            opt.zero_grad(); (scale * F.mse_loss(ddp(x), y)).backward(); opt.step()
    found = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]), ddp.module
    dist.destroy_process_group()
    return found
distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
found = distributor.run(theirs, 0.1, epochs=2)""")
    # Rank r has samples r, r + 2, …: two batches of 8 are 16 samples, in the order of one process.
    assert notebook("found[:3], alike(found[3], alone(2, 16))").value == "((0, 2, 0), True)"
    assert notebook("distributor.run(theirs, 0.1)[:2]").value == "(0, 2)", "again, on the same ranks"


SCRIPT = """
import argparse, os, sys
from dataclasses import dataclass
import torch.distributed as dist
import beside
@dataclass
class Settings:
    rate: float
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float)
    parser.add_argument("name")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        said = Settings(given.rate), given.name, dist.get_world_size(), beside.VALUE, __name__, sys.argv[0]
        print("found", *said, flush=True)
    dist.barrier()  # one that has ended cannot be connected to
    dist.destroy_process_group()
    sys.exit(int(given.name == "bad") * 3)
if __name__ == "__main__":
    main()
"""


def test_a_script_of_torchrun_runs_on_the_ranks(notebook: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train it.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    line = f'%distributed run --devices 2 "{script}" --rate 0.5 "a name"'
    wanted = f"found Settings(rate=0.5) a name 2 7 __main__ {script}"
    assert wanted in notebook(line).text
    assert wanted in notebook(f'%distributed -d 2 run "{script}" --rate=0.5 "a name"').text
    assert wanted in played([*TORCHRUN, str(script), "--rate", "0.5", "a name"], tmp_path), "as under torchrun itself"
    bad = notebook.fails(f'%distributed run -d 2 "{script}" --rate 1 bad').traceback
    assert "run_script" not in bad
    wrong = tmp_path / "wrong.py"
    wrong.write_text("x = 1\ndef f(:\n")
    error = notebook.fails(f'%distributed run -d 2 "{wrong}"')
    assert (error.ename, error.evalue[:11]) == ("CellSyntaxError", "SyntaxError")
    assert "def f(:" in error.traceback
    assert "direct cause" not in error.traceback
    assert "nbtrain/" not in error.traceback
    wrong.write_text("def f():\n    1 / 0\nf()\n")
    shown = notebook.fails(f'%distributed run -d 2 "{wrong}"').traceback
    assert "1 / 0" in shown
    assert "runpy" not in shown
    assert "nbtrain" not in shown
    assert f"{script} ended with 3" in notebook.fails(f'%distributed run -d 2 "{script}" --rate 1 bad').evalue
    found = notebook(
        f'distributor = TorchDistributor(2, use_gpu=False); distributor.run({str(script)!r}, "--rate", 0.5, "a name")'
    )
    assert wanted in found.text


@pytest.mark.thorough
def test_words_of_a_script_are_expanded_as_those_of_run(notebook: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "words.py"
    script.write_text("import os, sys\nif os.environ['RANK'] == '0': print('given', sys.argv[1:])\n")
    notebook(f"folder = {str(tmp_path)!r}; lr = 0.05; words = 'a b'")
    line = "%distributed run -d 2 {folder}/words.py"
    for given, wanted in {
        "--lr {lr} --tag $words": ["--lr", "0.05", "--tag", "a", "b"],
        "--tag '{words}' {lr * 2}": ["--tag", "a b", "0.1"],
        "--json \"{'a': 1}\" $nothing": ["--json", "{'a': 1}", "$nothing"],
    }.items():
        assert f"given {wanted}" in notebook(f"{line} {given}").text
    line = f"'run -d 2 {tmp_path}/words.py {{rate}}'"
    notebook(f"def each(rate): get_ipython().run_line_magic('distributed', {line})")
    assert "given ['7']" in notebook("each(7)").text


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("%distributed run", "run takes a script"),
        ("%distributed run train", "run takes a script"),
        ("%distributed run other train.py", "'other' is none"),
        ("%distributed run nowhere.py --x 1", "there is no file nowhere.py"),
        ("%distributed run -s dpp nowhere.py", "no such strategy"),
    ],
)
def test_what_is_no_script(notebook: Notebook, line: str, wanted: str) -> None:
    assert wanted in notebook.kernel.run(line).text


PROGRAM = """{start}
import sys
if int(os.environ.get("RANK", 0)):  # each process may have drawn weights of its own
    def net():
        torch.manual_seed(2); return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
model = net(); opt = torch.optim.SGD(model.parameters(), 0.5)
def train(epochs):
    for group in opt.param_groups: group["lr"] = 0.1
    for _ in range(epochs):
        for x, y in data:
            loss = scale * F.mse_loss(model(x), y); opt.zero_grad(); loss.backward(); opt.step()
    return epochs
if __name__ == "__main__":
    def net(): torch.manual_seed(1); return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    given = dict(strategy={strategy!r}, {more})
    found = nbtrain.run(train, 2, **given)
    rows = nbtrain.predict(model, DataLoader(TensorDataset(X[:21]), 4, shuffle=True), **given)
    ordered = torch.allclose(rows, model(X[:21]), atol=1e-6)
    same = alike(model, alone(2, 8 * {batches} if {batches} else 8 * int(os.environ.get("WORLD_SIZE", 1))))
    said = f"found {{found}} {{same}} {{rows.shape[0]}} {{ordered}}"
    print(f"{{said}}\\n", end="", flush=True)  # one write, as they share a pipe
"""


def program(folder: Path, strategy: str, batches: int = 0, more: str = "") -> Path:
    script = folder / "train.py"
    script.write_text(PROGRAM.format(start=START, strategy=strategy, batches=batches, more=more))
    return script


@pytest.mark.thorough
def test_in_a_script_it_is_called_by_each_process(notebook: Notebook, tmp_path: Path) -> None:
    script = program(tmp_path, "ddp")
    for command, lines in (([sys.executable], 1), (TORCHRUN, 2)):
        assert played([*command, str(script)], tmp_path).count("found 2 True 21 True") == lines
    for _ in range(2):  # the ranks are as before
        said = notebook(f'%distributed run -d 2 "{script}"', 60).text
        assert "found 2 True 21 True" in said
        assert "nbtrain: batch 8 × 2 = 16" in said
    said = notebook.kernel.run(f'%distributed run -s ddp -d 2 "{script}"').text
    assert "leave --strategy out of the line that runs it" in said
    notebook("nbtrain.run(train, 1, devices=2)")
    assert notebook("alike(model, alone(1, 16))").value == "True", "a function runs there afterwards"


@pytest.mark.thorough
@pytest.mark.sample("fsdp", "pipeline")
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed --stage 3", "pipeline"])
def test_strategies_in_a_script(tmp_path: Path, strategy: str) -> None:
    script = program(tmp_path, strategy, 1 if strategy == "pipeline" else 2)
    assert played([*TORCHRUN, str(script)], tmp_path).count("found 2 True 21 True") == 2


@pytest.mark.thorough
def test_a_script_with_a_wrong_number_of_devices_is_refused(tmp_path: Path) -> None:
    script = program(tmp_path, "ddp", more="devices=4")
    with pytest.raises(AssertionError, match="devices=4, and torchrun has started 2"):
        played([*TORCHRUN, str(script)], tmp_path)
    script = program(tmp_path, "ddp", more="detach=True")
    with pytest.raises(AssertionError, match="this script runs in each of several processes: start it with python"):
        played([*TORCHRUN, str(script)], tmp_path)


@pytest.mark.thorough
def test_a_script_shows_how_far_it_is(tmp_path: Path) -> None:
    script = program(tmp_path, "auto")
    shown = """
from nbtrain.annexes.frameworks.functions import script_rank
from nbtrain.watch.views import text
script_rank.EVERY, text.QUIET = 0.01, 0  # lines of progress, as after two seconds
"""
    script.write_text(shown + script.read_text().replace("loss.backward();", "loss.backward(); time.sleep(0.02);", 1))
    script.write_text("import time\n" + script.read_text())
    said = played([sys.executable, str(script)], tmp_path)
    assert "found 2 True 21 True" in said
    assert any(line.startswith("done · 0:0") for line in said.splitlines()), said


@pytest.fixture(scope="module")
def with_accelerate() -> Iterator[Kernel]:
    with kernel_with("hugging_face") as kernel:
        assert kernel.run("%load_ext nbtrain\n" + START, 120).error is None
        yield kernel


@pytest.mark.thorough
def test_a_function_of_accelerates_launcher(with_accelerate: Kernel) -> None:
    """Twice on the same ranks, in another precision; the notebook's model is trained, and is its own afterwards."""
    notebook = Notebook(with_accelerate, "")
    notebook(
        """
model = net(); opt = torch.optim.SGD(model.parameters(), 0.1)
def training_loop(precision, seed=42):
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    set_seed(seed)
    accelerator = Accelerator()
    ours, steps, loader = accelerator.prepare(model, opt, data)
    for x, y in loader:
        loss = scale * F.mse_loss(ours(x), y); steps.zero_grad(); accelerator.backward(loss); steps.step()
    assert accelerator.mixed_precision == precision
    return accelerator.num_processes, len(loader)
found = notebook_launcher(training_loop, ("no",), num_processes=2, use_port="29501")""",
        120,
    )
    assert notebook("found, alike(model, alone(1, 16))").value == "((2, 4), True)"
    said = notebook("found = notebook_launcher(training_loop, ('bf16',), num_processes=2, mixed_precision='bf16')", 60)
    assert "stays on the ranks" not in said.text
    assert notebook("found, 'forward' in vars(model), model(X).shape").value == "((2, 4), False, torch.Size([64, 1]))"
    assert "num_nodes=2" in notebook.fails("notebook_launcher(training_loop, (), 2, num_nodes=2)").evalue
    notebook("%distributed stop")
