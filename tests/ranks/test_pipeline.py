"""`pipeline` on real ranks against one process: Sequentials, blocks, tied weights, odd batches, two models."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.strategies.base import Component
from nbtrain.strategies.pipeline import Pipeline
from nbtrain.strategies.pipeline.cut_stages import cut_evenly
from tests.support.ranks import run_on_ranks

SIZES = (8, 7, 9, 1)
Around = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=mask)
        return x + self.back(F.gelu(self.wide(h)))


class Language(nn.Module):
    """Tied weights, a parameter of its own, a mask that all blocks get, a skip over all of them."""

    def __init__(self, direct: bool = False) -> None:
        super().__init__()
        self.direct = direct
        self.embed = nn.Embedding(11, 8)
        self.place = nn.Parameter(torch.randn(5, 8) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        if not direct:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        _, length = tokens.shape
        assert length <= len(self.place)
        x = self.embed(tokens)
        x += self.place[:length]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        first = x
        for block in self.blocks:
            x = block(x, mask)
        x = x + 0.1 * first
        out = F.linear(x, self.embed.weight) + self.head(x) if self.direct else self.head(x)
        return out if targets is None else F.cross_entropy(out.flatten(0, 1), targets.flatten())


class Looks(Language):
    """At numbers, to decide."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        if self.embed(tokens).max() > 1e9:
            raise AssertionError
        return super().forward(tokens, targets)


class Counting(Language):
    """Its own calls, before it computes with their number; `late`: after that."""

    calls: torch.Tensor
    table: torch.Tensor

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.ones(3))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        read = self.table[0] if self.late else 1.0
        self.calls += 1
        self.table.mul_(2).sub_(0.5)
        self.table[1] = 3.0
        return super().forward(tokens, targets) / (self.calls + self.table.sum() + read)


class Halved(torch.autograd.Function):
    """Halves gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad / 2


class Estimated(Language):
    """By a function with a backward of its own, in its own forward: what it is given by layers, and a weight."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = Halved.apply(self.embed(tokens) + self.place)  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x = block(x, None)
        return F.linear(x, Halved.apply(self.head.weight))  # type: ignore[no-untyped-call]


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 16),
        nn.BatchNorm1d(16).eval(),
        nn.Tanh(),
        nn.Linear(16, 4),
    )


class InTraining(nn.Linear):
    """As one with dropout it does something else in training, but the same each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (0.5 if self.training else 1.0)


def normalised() -> nn.Module:
    """By spectral norms of both kinds, which go on once a call."""
    layers = list(chain().children())
    layers[0] = InTraining(5, 16)
    nn.utils.spectral_norm(layers[0])
    nn.utils.parametrizations.spectral_norm(layers[2])
    nn.utils.parametrizations.spectral_norm(layers[5])
    return nn.Sequential(*layers)


def of_language(model: nn.Module, size: int, draw: torch.Generator) -> torch.Tensor:
    x, y = (torch.randint(11, (size, 5), generator=draw) for _ in range(2))
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def own_loss(model: nn.Module, size: int, draw: torch.Generator) -> torch.Tensor:
    x, y = (torch.randint(11, (size, 5), generator=draw) for _ in range(2))
    loss: torch.Tensor = model(x, targets=y)
    return loss


def under_autocast(model: nn.Module, size: int, draw: torch.Generator) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return of_language(model, size, draw)


def checkpointed(model: nn.Module, size: int, draw: torch.Generator) -> torch.Tensor:
    x, y = (torch.randint(11, (size, 5), generator=draw) for _ in range(2))
    out: torch.Tensor = checkpoint(model, x, use_reentrant=False)
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def of_chain(model: nn.Module, size: int, draw: torch.Generator) -> torch.Tensor:
    x, y = torch.randn(size, 5, generator=draw), torch.randint(4, (size,), generator=draw)
    return F.cross_entropy(model(x), y)


def summed(model: nn.Module, size: int, draw: torch.Generator) -> torch.Tensor:
    x, y = (torch.randint(11, (size, 5), generator=draw) for _ in range(2))
    y[:, 2:] = y[:, 2:].where(torch.rand(size, 3, generator=draw) < 0.5, -100)  # left out, more of some samples
    out: torch.Tensor = model(x, targets=y)
    return out


class Alike(Language):
    """Returns how much each sample of the batch is like each other one."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        found = super().forward(tokens).mean(1)
        return found @ found.T


def contrasted(model: nn.Module, size: int, draw: torch.Generator) -> torch.Tensor:
    x = torch.randint(11, (size, 5), generator=draw)
    return F.cross_entropy(model(x), torch.arange(size))


CASES: dict[str, tuple[Any, Any]] = {
    "a Sequential": (chain, of_chain),
    "spectral norms": (normalised, of_chain),
    "blocks": (Language, of_language),
    "blocks, and the loss": (Language, own_loss),
    "the loss, of some tokens only": (Language, summed),
    "what only the whole batch has": (Alike, contrasted),
    "a weight that is used past its layer": (lambda: Language(direct=True), of_language),
    "a count of calls in a buffer": (Counting, of_language),
    "autocast": (Language, under_autocast),
    "a checkpoint around the model": (Language, checkpointed),
}


def made(case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = CASES[case][0]()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: str, around: Around, clip: Any, sizes: tuple[int, ...]
) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for size in sizes:
        loss = CASES[case][1](model, size, draw)
        with around():
            loss.backward()
        found += [loss.item(), float(clip(list(model.parameters()), 0.5, 2.0))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def far(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = [
        *zip(ours.parameters(), theirs.parameters(), strict=True),
        *zip(ours.buffers(), theirs.buffers(), strict=True),
    ]
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def _against_one_process(rank: int, case: str) -> tuple[float, float, int]:
    alone, plain = made(case)
    expected = train(alone, plain, case, contextlib.nullcontext, torch.nn.utils.clip_grad_norm_, SIZES)
    model, optimizer = made(case)
    prepared = Pipeline(Pipeline.Options()).set_up(Component({"model": model}, {"optimizer": optimizer}))
    prepared.enter()
    found = train(model, optimizer, case, prepared.backward, prepared.clip, SIZES)
    prepared.leave()
    kept = sum(p.untyped_storage().nbytes() for p in model.parameters())
    prepared.close()
    apart = max(abs(a - b) / max(1, abs(b)) for a, b in zip(found, expected, strict=True))  # a loss may be 200
    states = [
        float((optimizer.state[p]["momentum_buffer"] - plain.state[q]["momentum_buffer"]).abs().max())
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    return max(apart, *states), far(model, alone), kept


@pytest.mark.sample("2-*")
@pytest.mark.filterwarnings("ignore:pipeline. ")
@pytest.mark.parametrize(("ranks", "case"), [*((2, case) for case in CASES), (4, "a Sequential"), (4, "blocks")])
def test_numbers_are_those_of_one_process(ranks: int, case: str) -> None:
    found = run_on_ranks(_against_one_process, case, world_size=ranks)
    whole = sum(p.untyped_storage().nbytes() for p in made(case)[0].parameters())
    close = 1e-2 if case == "autocast" else 1e-5  # bf16 products of other shapes
    for apart, weights, kept in found:
        assert apart < close
        assert weights < close
        assert kept < 0.9 * whole


class Scaled(nn.Module):
    """A criterion that learns: too small for stages."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out * self.factor, y)


def _beside(rank: int) -> float:
    def build() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model, criterion = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)), Scaled()
        return model, criterion, torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.5)

    def loop(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer, around: Around) -> None:
        draw = torch.Generator().manual_seed(1)
        for size in (12, 12, 5):
            x, y = torch.randn(size, 5, generator=draw), torch.randint(4, (size,), generator=draw)
            out = model(x)
            loss = criterion(out, y)
            with around():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    alone, pair = build(), build()
    loop(*alone, contextlib.nullcontext)
    model, criterion, optimizer = pair
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    options = Pipeline.Options()
    both: list[Any] = [
        Pipeline(options).set_up(Component({"model": model, "criterion": criterion}, {"optimizer": optimizer})),
        Pipeline(options).set_up(Component({"other": other})),  # of another component: it takes nothing of the first
    ]
    for prepared in both:
        prepared.enter()
    loop(model, criterion, optimizer, both[0].backward)
    for prepared in both:
        prepared.leave()
        prepared.close()
    return max(far(model, alone[0]), far(criterion, alone[1]))


def test_a_criterion_that_learns_is_whole_on_every_rank() -> None:
    assert max(run_on_ranks(_beside)) < 1e-5


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _counted(rank: int, batches: int) -> list[int]:
    model = Normed()
    prepared = Pipeline(Pipeline.Options(microbatches=1)).set_up(Component({"model": model}))
    prepared.enter()
    for _ in range(batches):
        with prepared.backward():
            model(torch.randn(8, 6)).sum().backward()
    prepared.leave()
    prepared.close()
    return [int(buffer) for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")]


def test_a_norm_counts_no_batch_while_the_forward_is_written_down() -> None:
    assert run_on_ranks(_counted, 3) == [[3] * 4] * 2


def test_stages_are_cut_where_the_largest_is_smallest() -> None:
    assert cut_evenly([1.4, 12.0, 0.8, 5.3, 5.1], 2) == [2, 3]
    assert cut_evenly([1, 1, 1, 9], 3) == [1, 2, 1]
    assert cut_evenly([0, 0, 5], 3) == [1, 1, 1]


def _hooked(rank: int) -> tuple[str, list[float], torch.Tensor]:
    """What is said of a hook that comes in a cell, what it sees, and what a loop draws after it."""
    torch.manual_seed(0)
    x, model = torch.randn(4, 5), chain()
    seen: list[float] = []

    def looks(module: nn.Module, given: Any, returned: Any) -> None:
        seen.append(returned.norm().item())

    looks.__module__ = "transformers.modeling_utils"
    prepared = Pipeline(Pipeline.Options()).set_up(Component({"model": model}))
    prepared.enter()
    for part in (model[0], model[5]):  # type: ignore[index]
        part.register_forward_hook(looks)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        for _ in range(2):
            with prepared.backward():
                model(x).sum().backward()
    prepared.leave()
    prepared.close()
    return shown.getvalue(), seen, torch.rand(2)


def test_a_hook_runs_on_every_rank_and_that_is_said() -> None:
    (said, seen, drawn), (silent, also, too) = run_on_ranks(_hooked)
    assert said.count("looks of transformers.modeling_utils)") == 1
    assert silent == ""
    assert seen == also
    assert len(seen) == 4
    assert torch.equal(drawn, too)


class Two(nn.Linear):
    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(both[0]) + both[1]


def _undivided(rank: int) -> list[str]:
    tokens, x = torch.randint(11, (4, 5)), torch.randn(4, 5)
    said = []
    for case in ("looks", "applies", "late", "two", "evaluated", "replaced", "replaced in blocks"):
        models: dict[str, Any] = {"looks": Looks, "evaluated": Looks, "applies": Estimated}
        models |= {"late": lambda: Counting(late=True), "replaced in blocks": Language}
        model: Any = models.get(case, chain)().train(case != "evaluated")
        if case == "two":
            model = nn.Sequential(Two(5, 5), nn.Tanh(), nn.Linear(5, 4))
        prepared = Pipeline(Pipeline.Options()).set_up(Component({"model": model}))
        prepared.enter()
        if case == "replaced":
            model[5] = nn.Linear(16, 3)
        if case == "replaced in blocks":
            model.head = nn.Linear(8, 3)
        with pytest.raises(NotSupported) as error:
            model((x, x) if case == "two" else x if case == "replaced" else tokens)
        said.append(str(error.value))
        prepared.leave()
        prepared.close()
    return said


def test_a_forward_that_cannot_be_divided_is_one_sentence() -> None:
    first, second = run_on_ranks(_undivided)
    assert first == second
    words = ("`if self.embed(tokens).max() > 1e9:`", "`x = Halved.apply(", "`self.table.mul_(2)", "given 2 things")
    for sentence, word in zip(first, words, strict=False):
        assert word in sentence
        assert "--strategy fsdp" in sentence
    assert ["`with whole(model), torch.no_grad():`" in one for one in first[:5]] == [*[False] * 4, True]
    assert all("`with whole(model, optimizer): model[4] = nn.Linear(8, 3)`" in one for one in first[5:])


def _refused(rank: int) -> list[str]:
    found = []
    for model, options in (
        (nn.Linear(2, 2), Pipeline.Options()),
        (chain(), Pipeline.Options(balance="3,2")),
        (chain(), Pipeline.Options(balance="2,2,2")),
    ):
        with pytest.raises((NotSupported, UsageError)) as error:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            Pipeline(options).set_up(Component({"model": model}, {"optimizer": optimizer}))
        found.append(str(error.value))
    model = chain()
    prepared = Pipeline(Pipeline.Options()).set_up(Component({"model": model}))
    prepared.enter()
    with prepared.backward():
        model(torch.ones(4, 5)).sum().backward()
    parameters = list(model.parameters())
    away = parameters[-1] if rank == 0 else parameters[0]
    assert away.grad is not None
    away.grad.mul_(2)
    with pytest.raises(NotSupported, match="ddp"):
        away.grad.norm()
    prepared.leave()
    prepared.close()
    return found


def test_what_cannot_be_is_said() -> None:
    for found in run_on_ranks(_refused):
        assert "fsdp" in found[0]
        assert "5 parts" in found[1]
        assert "3 stages" in found[2]
    with pytest.raises(UsageError, match="--balance"):
        Pipeline.Options(balance="evenly")
