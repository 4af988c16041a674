"""What is said once, of learning rates and logged numbers; `--scale-lr`, `log(sync=True)`, `gather(of=)`, and what is
not said of loop variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from nbtrain.worker.precision.activation_checkpointing import ActivationCheckpointing
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

LOOP = "for x, y in loader:\n    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()\n"
FRESH = """
torch.manual_seed(0)
model = net(); opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
loader = DataLoader(data, batch_size=12)
"""
ARITHMETIC = (
    "each step now uses 2 batches. If you chose learning rate 0.1 for one process, consider 0.2 (linear rule, SGD) or "
    "0.141 (square-root rule, Adam): --scale-lr linear or sqrt"
)


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook(FRESH)
    yield notebook
    notebook("%distributed stop")


@pytest.mark.thorough
def test_the_arithmetic_is_said_once_and_not_to_those_who_have_it(notebook: Notebook) -> None:
    quiet = ("-s ddp -d 2 --scale-lr linear", "-s single -d 1", "-s ddp -d 2 --split-batches", "-s none -d 2")
    for line in quiet:
        assert "If you chose learning rate" not in notebook(f"%%distributed {line}\n{LOOP}").text, line
    assert ARITHMETIC in notebook(f"%%distributed -s ddp -d 2\n{LOOP}").text
    notebook("%distributed stop")
    for line in ("-s ddp -d 2", "-s fsdp -d 2 --accumulate 2"):
        assert "If you chose learning rate" not in notebook(f"%%distributed {line}\n{LOOP}").text


RULES = {"": 1.0, "linear": 2.0, "sqrt": 2**0.5}


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "sharded", "fsdp", "horovod", "deepspeed --stage 2"])
def test_the_rate_is_scaled_under_every_strategy_and_stays_the_notebooks(notebook: Notebook, strategy: str) -> None:
    weights = "torch.cat([p.detach().reshape(-1) for p in model.parameters()])"
    for rule, factor in RULES.items():
        notebook(f"{FRESH}start = opt.param_groups[0]['lr']")
        option = f"--scale-lr {rule}" if rule else ""
        shown = notebook(f"%%distributed -s {strategy} -d 2 {option}\n{LOOP}", 120)
        assert (f"= {0.1 * factor:.4g}" in shown.text) == bool(rule)
        assert notebook("opt.param_groups[0]['lr']").value == "0.1"
        notebook(
            f"ranks = {weights}{FRESH}opt.param_groups[0]['lr'] *= {factor}; loader = DataLoader(data, 24)\n{LOOP}"
        )
        assert notebook(f"float((ranks - {weights}).abs().max()) < 1e-5").value == "True", rule


def test_a_rate_that_is_a_tensor_a_schedule_and_two_optimizers(notebook: Notebook) -> None:
    notebook(f"""{FRESH}
parts = list(model.parameters()); seen = []
one = torch.optim.SGD(parts[:2], 0.1); two = torch.optim.Adam(parts[2:], torch.tensor(0.5), foreach=False)
plan = torch.optim.lr_scheduler.StepLR(one, 1, 0.5)
""")
    notebook("""%%distributed -s ddp -d 2 --scale-lr linear
one.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
two.register_step_pre_hook(lambda o, *_: seen.append(float(o.param_groups[0]["lr"])))
for x, y in loader:
    F.cross_entropy(model(x), y).backward(); one.step(); two.step(); plan.step(); one.zero_grad(); two.zero_grad()
    if len(seen) == 4: break
""")
    assert notebook("seen, one.param_groups[0]['lr'], float(two.param_groups[0]['lr'])").value == str(
        ([0.2, 1.0, 0.1, 1.0], 0.025, 0.5)
    )


def test_where_nothing_is_touched_no_rate_is_scaled(notebook: Notebook) -> None:
    assert "--scale-lr linear: under --strategy none" in notebook.refused(
        "%%distributed -s none -d 2 --scale-lr linear\n1"
    )
    assert "batch is one process's" in notebook(f"%%distributed -d 2 --split-batches --scale-lr sqrt\n{LOOP}").text


def test_logged_numbers_are_each_ranks_own_or_the_mean(notebook: Notebook) -> None:
    shown = notebook("%%distributed -s ddp -d 2\nlog(a=rank, b=10.0 * rank, sync=True); m = 1").text
    assert "each rank's own" not in shown
    shown = notebook("%%distributed -s ddp -d 2\nlog(a=float(rank))").text
    assert "log(a=…) records one value per rank; log(a=…, sync=True) records their mean" in shown
    assert "each rank's own" not in notebook("%%distributed -s ddp -d 2\nlog(c=1.0)").text
    run = "from nbtrain import history"
    notebook("%%distributed -s ddp -d 2 --background --monitor off\nlog(a=rank, b=10.0 * rank, sync=True)")
    assert notebook(f"{run}\nr = __import__('nbtrain').background(); r.wait(); str(r.metrics)").value is not None
    assert "0.5" in notebook("print(r.metrics)").stdout


def test_variables_of_loops_may_differ(notebook: Notebook) -> None:
    shown = notebook("%%distributed -s ddp -d 2\nfor x, y in loader:\n    x = x * 1\n    last = x.sum().item()\n").text
    assert "values differ across ranks: last;" in shown
    assert "differ" not in notebook("%%distributed -s ddp -d 2\nfor x, y in loader: pass").text
    assert notebook("%%distributed -s ddp -d 2\nprint(gather(float(x.sum())))").stdout.count(",") == 1


EVALUATE = """
model.eval(); found = []
with torch.no_grad():
    for x, y in {loader}: found.append(model(x))
model.train()
"""
SHUFFLED = "DataLoader(data, batch_size=10, shuffle=True, num_workers={workers})"


@pytest.mark.sample(first=2)
@pytest.mark.parametrize(
    "line", ["-s ddp -d 2", "-s ddp -d 2 --share-eval", "-s fsdp -d 3", "-s single -d 1", "-s ddp2 -d 2"]
)
def test_an_evaluation_in_the_order_of_the_data_set(notebook: Notebook, line: str) -> None:
    for workers in (0, 2):
        notebook(f"held = {SHUFFLED.format(workers=workers)}\nwith torch.no_grad(): expected = model(X)")
        shown = notebook(
            f"%%distributed {line}\n{EVALUATE.format(loader='held')}all_ = gather(torch.cat(found), of=held)"
        )
        assert "values differ across ranks: all_" not in shown.text
        assert notebook("all_.shape == expected.shape and bool((all_ - expected).abs().max() < 1e-5)").value == "True"


def test_lists_are_gathered_in_order_too_and_what_is_not_known_is_said(notebook: Notebook) -> None:
    notebook("held = DataLoader(list(range(7)), 2)")
    loop = "    for n in held: found += n.tolist()\n"
    notebook(f"%%distributed -d 2 --share-eval\nfound = []\nwith torch.no_grad():\n{loop}a = gather(found, of=held)")
    assert notebook("a").value == str(list(range(7)))
    loop = "    for n in held:\n        found += n.tolist()[:1]\n"
    shown = notebook(f"%%distributed -d 2\nfound = []\nwith torch.no_grad():\n{loop}gather(found, of=held)")
    assert "rank 0 has values of 2 samples, and the loader gave it 4" in shown.text
    shown = notebook("%%distributed -d 2\ngather([1], of=held)")
    assert "gather(values, of=loader): which samples the loader has given is not known." in shown.text


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_checkpointing_the_whole_model_is_told(notebook: Notebook) -> None:
    recompute, model = ActivationCheckpointing(), TwoLayers()
    for names, modules, told in (
        (("TwoLayers",), [model], True), (("Linear",), [model], False), (("Sequential",), [model, model.layers], False),
        ((), [model], False),
    ):  # fmt: skip
        recompute.choose(names, modules)
        assert bool(recompute.whole()) == told, names
    recompute.choose(("TwoLayers",), [model])
    assert recompute.whole().endswith("Name classes that it has several of: Linear (2)")
    line = "%%distributed -s ddp -d 2 --checkpoint-activations Sequential"
    assert "names the whole model" in notebook(f"{line}\n{LOOP}").text
    assert "names the whole model" not in notebook(f"{line}\n{LOOP}").text


def test_a_metric_that_is_logged_for_each_batch_of_a_validation_is_said_once(notebook: Notebook) -> None:
    cell = f"%%distributed -s ddp -d 2\n{LOOP}with torch.no_grad():\n    for i in range(5): log(val_loss=i, sync=True)"
    said = "val_loss was logged 5 times in one step"
    assert said in notebook(cell).text
    assert said not in notebook(cell).text
    notebook("%distributed stop")
    assert "times in one step" not in notebook(f"%%distributed -s ddp -d 2\n{LOOP}    log(loss=1.0, sync=True)").text


def test_what_is_logged_without_a_step_is_in_the_history(notebook: Notebook, tmp_path: Path) -> None:
    notebook(f"%distributed stop\nimport nbtrain, os; os.environ['NBTRAIN_HISTORY'] = {str(tmp_path)!r}")
    shown = notebook("%%distributed -s none -d 2\nfor i in range(5): log(loss=i)").text
    assert "loss was logged 5 times and no optimizer took a step" in shown
    rows = notebook("print(len(nbtrain.history()[-1].metrics))").stdout
    notebook("os.environ['NBTRAIN_HISTORY'] = 'off'")
    assert rows == "10\n"


def test_batch_norm_is_said_once_where_it_trains_on_shares(notebook: Notebook) -> None:
    said = "batch norm normalises each rank's own samples"
    norm = "model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)); opt = torch.optim.SGD("
    norm += "model.parameters(), 0.1)"
    sync = "model = nn.SyncBatchNorm.convert_sync_batchnorm(model)"
    width = notebook("X.shape[1]").value
    norm = norm.replace("(8, 4)", f"({width}, 4)")
    for made, line in (
        ("", "-s ddp -d 2"), (norm, "-s single -d 1"), (f"{norm}; {sync}", "-s ddp -d 2"),
        (f"{norm}; model[1].eval()", "-s ddp -d 2"),
    ):  # fmt: skip
        notebook(f"{FRESH}{made}")
        assert said not in notebook(f"%%distributed {line}\n{LOOP}").text, (made, line)
    notebook(f"{FRESH}{norm}")
    shown = notebook(f"%%distributed -s ddp -d 2\n{LOOP}model.eval()").text
    assert f"{said}, not those of all ranks in a step." in shown
    assert "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)" in shown
    assert said not in notebook(f"%%distributed -s ddp -d 2\nmodel.train()\n{LOOP}").text


@pytest.mark.sample(first=1)
@pytest.mark.parametrize(
    ("plan", "line"), [("a", "-s ddp -d 2"), ("b", "-s fsdp -d 2"), ("c", "-s single -d 1 --accumulate 2")]
)
def test_a_schedule_that_ends_half_way(notebook: Notebook, plan: str, line: str) -> None:
    """And one that has the right number of steps, made in the cell. verify has played equal steps, and says it too."""
    made = "{plan} = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps={steps})\n"
    loop = LOOP.replace("opt.step();", "opt.step(); {plan}.step();")
    steps = notebook("steps = len(loader); steps").value
    notebook(made.format(plan=plan, steps="steps"))
    cell = f"%%distributed {line}\n{loop.format(plan=plan)}"
    if "accumulate" not in line:
        shown = notebook(cell.replace("\n", " --verify --steps 2\n", 1)).text
        assert "✗ differs" in shown
        assert f"of its {steps} steps" in shown
    shown = notebook(cell).text
    assert f"of its {steps} steps: each step uses 2 batches, so an epoch has fewer steps" in shown
    assert "of its" not in notebook(f"{FRESH}\n{made.format(plan=plan, steps='steps')}\n{cell}").text, "it is said once"
    notebook(FRESH)
    in_cell = made.format(plan="own", steps="len(loader) // 2" if "accumulate" in line else "len(loader)")
    assert "of its" not in notebook(f"%%distributed {line}\n{in_cell}{loop.format(plan='own')}").text


BY_HAND = """
probe = {made}
for x, y in loader:
    F.cross_entropy(probe(x), y).backward()
    with torch.no_grad():
        for p in probe.parameters(): p -= 0.1 * p.grad; p.grad = None
"""


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_model_of_the_cells_that_is_trained_by_hand_is_said_to_differ_or_set_up(
    notebook: Notebook, strategy: str
) -> None:
    """No optimizer tells of it, so nobody has averaged its gradients."""
    line = f"%%distributed -s {strategy} -d 2 --split-batches\ntorch.manual_seed(1)\n"
    assert "values differ across ranks: probe" in notebook(line + BY_HAND.format(made="net()")).text
    notebook("torch.manual_seed(1)\n" + BY_HAND.format(made="net()") + "one = probe.state_dict()")
    assert "differ" not in notebook(line + BY_HAND.format(made="setup(net())")).text
    same = "all(torch.allclose(v, one[k], atol=1e-6) for k, v in probe.state_dict().items())"
    assert notebook(same).value == "True"
