"""Loaders that are iterated to evaluate: every rank sees all of their batches, and prints what one process prints."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.lines.playing import Ranks, kernel_of
from tests.support.bench import running

START = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(2, (48,)))
held_out = TensorDataset(torch.randn(30, 6), torch.randint(2, (30,)))
model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 2))
opt = torch.optim.SGD(model.parameters(), 0.1)
train_loader = DataLoader(data, batch_size=8, shuffle=True)
test_loader = DataLoader(held_out, batch_size=4)
"""

MNIST = """
def test(model, loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            test_loss += F.cross_entropy(out, y, reduction='sum').item()
            correct += out.argmax(1).eq(y).sum().item()
    return test_loss / len(loader.dataset), correct
found = test(model, test_loader)
"""
QUICKSTART = """
def test_loop(dataloader, model, loss_fn):
    model.eval()
    size = len(dataloader.dataset)
    num_batches = len(dataloader)
    test_loss, correct = 0, 0
    with torch.no_grad():
        for x, y in dataloader:
            pred = model(x)
            test_loss += loss_fn(pred, y).item()
            correct += (pred.argmax(1) == y).type(torch.float).sum().item()
    test_loss /= num_batches
    return test_loss, correct / size
found = test_loop(test_loader, model, nn.CrossEntropyLoss())
"""
TRANSFER = """
loaders, sizes = {'train': train_loader, 'val': test_loader}, {'train': len(data), 'val': len(held_out)}
for phase in ['train', 'val']:
    model.train() if phase == 'train' else model.eval()
    total = 0.0
    for x, y in loaders[phase]:
        opt.zero_grad()
        with torch.set_grad_enabled(phase == 'train'):
            loss = F.cross_entropy(model(x), y)
            if phase == 'train':
                loss.backward()
                opt.step()
        total += loss.item() * len(x)
    if phase == 'val':
        found = F.cross_entropy(model(held_out.tensors[0]), held_out.tensors[1]).item(), total / sizes[phase]
"""
PROGRAMS = {
    "MNIST's test()": MNIST,
    "the quickstart: its length is asked before no_grad": QUICKSTART,
    "no_grad within the loop": """
correct = 0
for x, y in test_loader:
    with torch.no_grad():
        correct += (model.eval()(x).argmax(1) == y).sum().item()
found = correct, len(test_loader)
""",
    "eval() alone": """
model.eval()
found = [model(x).argmax(1).tolist() for x, y in test_loader]
""",
    "a decorated method": """
class Trainer:
    def __init__(self): self.correct = 0
    def one(self, x, y): self.correct += (model(x).argmax(1) == y).sum().item()
    @torch.inference_mode()
    def validate(self):
        model.eval()
        for step, (x, y) in enumerate(test_loader): self.one(x, y)
        return self.correct / len(test_loader.dataset), step
found = Trainer().validate()
""",
}
GATHERED = {
    "summed": """
model.eval(); correct = 0
with torch.no_grad():
    for x, y in test_loader: correct += (model(x).argmax(1) == y).sum().item()
batches = len(test_loader)
total = reduce(correct, 'sum')
""",
    "summed by a function around it": """
def count(loader):
    correct = 0
    with torch.no_grad():
        for x, y in loader: correct += (model.eval()(x).argmax(1) == y).sum().item()
    return correct
def summed(value): return reduce(value, 'sum')
correct = count(test_loader)
total = summed(correct)
""",
    "in the loop": """
total = 0
with torch.no_grad():
    for x, y in test_loader: total += reduce((model.eval()(x).argmax(1) == y).sum().item(), op='sum')
""",
    "by torch.distributed": """
import torch.distributed as dist
hits = torch.zeros(())
with torch.no_grad():
    for x, y in test_loader: hits += (model.eval()(x).argmax(1) == y).sum()
dist.all_reduce(hits)
total = hits.item()
""",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with kernel_of(START) as found:
        yield found


@pytest.mark.sample("*-ddp")
@pytest.mark.parametrize(("name", "strategy"), [*((name, "ddp") for name in PROGRAMS), ("eval() alone", "fsdp")])
def test_an_evaluation_says_what_one_process_says(ranks: Ranks, name: str, strategy: str) -> None:
    book = ranks.notebook
    book(PROGRAMS[name] + "expected = found; model.train()")
    shown = book(f"%%distributed -s {strategy} -d 2\n{PROGRAMS[name]}\nprint('found', found)\nmodel.train()").text
    assert "different" not in shown, "each rank prints it"
    assert "differ across ranks" not in shown
    book("torch.testing.assert_close(found, expected)")


def test_the_validation_of_a_loop_that_trains_as_well(ranks: Ranks) -> None:
    """`set_grad_enabled(phase == "train")`, as in torch's tutorial of transfer learning."""
    shown = ranks.notebook(f"%%distributed -d 2\n{TRANSFER}\nsteps = len(train_loader); model.train()").text
    assert "values differ across ranks: found" not in shown
    ranks.notebook("assert abs(found[0] - found[1]) < 1e-5, found\nassert steps == 3")


@pytest.mark.parametrize("name", GATHERED)
def test_what_the_code_brings_together_itself_is_shared_out(ranks: Ranks, name: str) -> None:
    book = ranks.notebook
    book("n = 28; even = DataLoader(TensorDataset(*[t[:24] for t in held_out.tensors]), batch_size=4)")
    code = GATHERED[name].replace("test_loader", "even")
    book(f"%%distributed -d 2\n{code}\nmodel.train()")
    book("model.eval(); x, y = even.dataset.tensors\nassert total == (model(x).argmax(1) == y).sum().item(), total")
    if name == "summed":
        book("assert batches == 3")


def test_evaluations_are_shared_out_where_that_is_asked_for(ranks: Ranks) -> None:
    ranks.notebook(f"%%distributed -d 2 --share-eval\n{MNIST}\nseen = gather(len(test_loader))")
    ranks.notebook("assert seen == [4, 4]; model.train()")


SIZES = "def steps(loader): return len(loader)\n"


def loop_of(code: str, **names: Any) -> dict[str, Any]:
    """The names of a cell that one of two ranks has run, and what is said of it."""
    filename = f"<cell {hash(code)}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    names = {"torch": torch, "F": nn.functional, **names}
    with running(0, 2) as runtime:
        names["stepped"], names["runtime"] = runtime.steps.stepped, runtime
        exec(compile(code, filename, "exec"), names)
        names["notes"] = runtime.loaders.end(True)
    return names


@pytest.fixture
def learning() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    data = TensorDataset(torch.randn(16, 2), torch.zeros(16, dtype=torch.long))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    return {"model": model, "opt": opt, "loader": DataLoader(data, batch_size=2), "data": data}


TRAINING = {
    "a plain loop": "for x, y in loader:\n    F.cross_entropy(model(x), y).backward(); seen += 1",
    "in eval mode": "model.eval()\nfor x, y in loader:\n    F.cross_entropy(model(x), y).backward(); seen += 1",
    "a scaler or none": """
model.eval(); scaler = None
for x, y in loader:
    seen += 1; loss = F.cross_entropy(model(x), y)
    if scaler is None: loss.backward()
    else: scaler.scale(loss).backward()
""",
    "a teacher without gradient": """
for x, y in loader:
    with torch.no_grad(): soft = model(x)
    seen += 1; F.mse_loss(model(x), soft).backward()
""",
    "by a function": """
def one(x, y): F.cross_entropy(model(x), y).backward()
model.eval()
for x, y in loader: seen += 1; one(x, y)
""",
    "batches that are used elsewhere": """
def endless(loader):
    for batch in loader: yield batch
model.eval()
for x, y in endless(loader): seen += 1
""",
}


@pytest.mark.parametrize("code", TRAINING.values(), ids=TRAINING)
def test_loops_that_train_see_their_share(code: str, learning: dict[str, Any]) -> None:
    assert loop_of("seen = 0\n" + code, **learning)["seen"] == 4


def test_a_length_that_was_asked_too_early_is_told(learning: dict[str, Any]) -> None:
    code = "n = steps(loader)\nwith torch.no_grad():\n    for batch in loader: pass"
    notes = loop_of(SIZES + code, **learning)["notes"]
    assert any(note.startswith("len(loader) was that of a rank's share") for note in notes), notes
    assert not loop_of(code.replace("steps(", "len("), **learning)["notes"]


HELD = """
class Counter:
    correct = 0
    def count(self, x): self.correct += len(x)
    def over_all(self): return together(self.correct, "sum")
counter = Counter()
with torch.no_grad():
    for x, _ in loader: counter.count(x)
found = counter.over_all()
"""


def test_a_count_that_an_object_kept_and_that_is_summed_elsewhere_is_told(learning: dict[str, Any]) -> None:
    """The text connects it with no loop, so every rank has counted all: the sum is too large."""

    def told(code: str, reduce: Any, gather: Any = lambda value, *_: [value, value]) -> bool:
        names = {"watched": lambda runtime: runtime.loaders.evaluations.watching(reduce, gather)}
        notes = loop_of(code, **learning, **names)["notes"]
        return any("brought together what is the same on every rank" in note for note in notes)

    twice, other = (lambda value, op="mean": value * 2), (lambda value, op="mean": value * 2 + 1)
    summed = HELD.replace("together(", "watched(runtime)['reduce'](")
    gathered = HELD.replace('together(self.correct, "sum")', "watched(runtime)['gather'](self.correct)")
    assert told(summed, twice)
    assert told(summed.replace("self.correct,", "torch.tensor([self.correct, 3]),"), twice)
    assert told(gathered, twice)
    assert not told(summed, other), "the ranks' numbers differ"
    assert not told(summed.replace('"sum"', '"mean"'), twice)
    assert not told(summed.replace("torch.no_grad()", "torch.enable_grad()"), twice), "each rank has seen its share"
    assert not told(gathered, twice, lambda value, *_: [value, value + 1])


def test_an_evaluation_that_takes_long_names_the_flag(learning: dict[str, Any]) -> None:
    with running(0, 2) as runtime:
        evaluations = runtime.loaders.evaluations
        evaluations.clock = iter(range(0, 10**6, 100)).__next__
        evaluations.begin(2, False)
        with torch.no_grad():
            list(learning["loader"])
        assert any("--share-eval" in note for note in runtime.loaders.end(True))
