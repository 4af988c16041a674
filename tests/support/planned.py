"""Three models whose memory is planned, estimated and measured: what each of them is made of is different.

A transformer is blocks and a wide output, a convolutional net is activations and running means, a perceptron weights.
`size` is the width of each: 1 B parameters are `transformer(2048, depth=20, vocabulary=16_000)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.worker.precision.activation_checkpointing import ActivationCheckpointing

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.before(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.past: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.past = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.first_norm(self.first(x)), inplace=True)
        return F.relu(self.second_norm(self.second(inner)) + self.past(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        blocks: list[nn.Module] = []
        for stage in range(3):
            for i in range(depth):
                before = width << (stage - 1 if stage and not i else stage)
                blocks.append(Residual(before, width << stage, stride=2 if stage and not i else 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width << 2, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def transformer(size: int = 64, depth: int = 2, heads: int = 4, vocabulary: int = 512, length: int = 64) -> Transformer:
    """`size` is a multiple of `heads`. The batch is tokens, and the tokens that follow."""
    return Transformer(size, depth, heads, vocabulary, length)


def resnet(size: int = 16, depth: int = 1, classes: int = 10) -> ResNet:
    return ResNet(size, depth, classes)


def mlp(size: int = 256, depth: int = 3, inputs: int = 32, classes: int = 10) -> nn.Sequential:
    inner: list[nn.Module] = []
    for i in range(depth):
        inner += [nn.Linear(size if i else inputs, size), nn.ReLU()]
    return nn.Sequential(*inner, nn.Linear(size, classes))


def transformer_batch(samples: int = 8, vocabulary: int = 512, length: int = 64) -> Batch:
    words = torch.randint(vocabulary, (samples, length + 1))
    return words[:, :-1].clone(), words[:, 1:].clone()


def resnet_batch(samples: int = 8, side: int = 32, classes: int = 10) -> Batch:
    return torch.randn(samples, 3, side, side), torch.randint(classes, (samples,))


def mlp_batch(samples: int = 8, inputs: int = 32, classes: int = 10) -> Batch:
    return torch.randn(samples, inputs), torch.randint(classes, (samples,))


def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of any of them."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


class Planned(NamedTuple):
    model: Callable[..., nn.Module]
    """of a size"""
    batch: Callable[..., Batch]
    """of a number of samples"""


PLANNED: Mapping[str, Planned] = {
    "transformer": Planned(transformer, transformer_batch),
    "resnet": Planned(resnet, resnet_batch),
    "mlp": Planned(mlp, mlp_batch),
}


def billion() -> Transformer:
    """1.07 billion parameters; to be made inside of `nbtrain.empty()` or on the device meta."""
    return transformer(2048, depth=20, heads=16, vocabulary=16_000, length=512)


@contextmanager
def recomputing(kind: str, model: nn.Module) -> Iterator[None]:
    """Blocks of this class compute their activations again in the backward."""
    again = ActivationCheckpointing()
    again.choose((kind,), [model])
    again.on()
    try:
        yield
    finally:
        again.off()
