"""Small models of every kind that people train, on data of 32 samples and three classes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A class `Net` and its data. `model(x)` gives a number for each of three classes."""

    body: str
    """the class's methods"""
    data: str = "X = torch.randn(32, 6)"
    made: str = "model = Net()"
    weight: str = "first.weight"
    """the path of a parameter of at least two dimensions"""
    other: str = "head.bias"
    """the path of another one"""
    layer: str = "first"
    """the path of a layer that has a `weight` and `reset_parameters`"""
    smooth: bool = True
    """a gradient with respect to `x` can be had, and gradients of that"""


def _init(*lines: str) -> str:
    return "    def __init__(self):\n        super().__init__()\n" + "".join(f"        {line}\n" for line in lines)


def _forward(*lines: str) -> str:
    return (
        "    def features(self, x):\n"
        + "".join(f"        {line}\n" for line in lines)
        + "    def forward(self, x):\n        return self.head(self.features(x))\n"
    )


TOKENS = "X = torch.randint(11, (32, 5))"
IMAGES = "X = torch.randn(32, 2, 6, 6)"
SERIES = "X = torch.randn(32, 5, 6)"

ARCHITECTURES: dict[str, Architecture] = {
    "layers": Architecture(
        body=_init("self.first = nn.Linear(6, 8)", "self.second = nn.Linear(8, 8)", "self.head = nn.Linear(8, 3)")
        + _forward("return torch.tanh(self.second(torch.tanh(self.first(x))))")
    ),
    "Sequential": Architecture(
        body="", made="model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))",
        weight="0.weight", other="4.bias", layer="0",
    ),
    "repeated blocks": Architecture(
        body=_init(
            "self.first = nn.Linear(6, 8)",
            "self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3))",
            "self.head = nn.Linear(8, 3)",
        )
        + _forward("x = self.first(x)", "for block in self.blocks:", "    x = x + block(x)", "return x"),
        weight="blocks.1.1.weight",
        other="blocks.0.0.weight",
        layer="blocks.2.1",
    ),
    "frozen BatchNorm": Architecture(
        body=_init("self.first = nn.Linear(6, 8)", "self.norm = nn.BatchNorm1d(8)", "self.head = nn.Linear(8, 3)")
        + "    def train(self, mode=True):\n        super().train(mode)\n"
        "        self.norm.eval()\n        return self\n" + _forward("return torch.relu(self.norm(self.first(x)))"),
        made="model = Net().train()",
    ),
    # Every sample stands there twice, once for each rank, so the statistics of a share are those of the whole. The
    # running variance is not: it is that of a population, of which a share is a smaller sample.
    "BatchNorm": Architecture(
        body=_init(
            "self.first = nn.Linear(6, 8)", "self.norm = nn.BatchNorm1d(8, momentum=0.0)", "self.head = nn.Linear(8, 3)"
        )
        + _forward("return torch.relu(self.norm(self.first(x)))"),
        data="X = torch.randn(16, 1, 6).expand(16, 2, 6).reshape(32, 6)",
    ),
    "SyncBatchNorm": Architecture(
        body=_init("self.first = nn.Linear(6, 8)", "self.norm = nn.BatchNorm1d(8)", "self.head = nn.Linear(8, 3)")
        + _forward("return torch.relu(self.norm(self.first(x)))"),
        made="model = nn.SyncBatchNorm.convert_sync_batchnorm(Net())",
        smooth=False,
    ),
    "GroupNorm and convolutions": Architecture(
        body=_init(
            "self.first = nn.Conv2d(2, 4, 3, padding=1)",
            "self.norm = nn.GroupNorm(2, 4)",
            "self.second = nn.Conv2d(4, 4, 3)",
            "self.head = nn.Linear(4, 3)",
        )
        + _forward("return self.second(F.silu(self.norm(self.first(x)))).mean((2, 3))"),
        data=IMAGES,
        other="norm.weight",
    ),
    "embedding, tied": Architecture(
        body=_init(
            "self.embed = nn.Embedding(11, 6)",
            "self.mix = nn.Linear(6, 6)",
            "self.out = nn.Linear(6, 11, bias=False)",
            "self.out.weight = self.embed.weight",
            "self.head = nn.Linear(11, 3)",
        )
        + _forward("return self.out(torch.tanh(self.mix(self.embed(x).mean(1))))"),
        data=TOKENS,
        weight="embed.weight",
        layer="mix",
        smooth=False,
    ),
    "embedding with padding": Architecture(
        body=_init(
            "self.embed = nn.Embedding(11, 8, padding_idx=0)",
            "self.norm = nn.LayerNorm(8)",
            "self.head = nn.Linear(8, 3)",
        )
        + _forward("return self.norm(self.embed(x).mean(1))"),
        data=TOKENS,
        weight="embed.weight",
        layer="embed",
        smooth=False,
    ),
    "LSTM": Architecture(
        body=_init("self.first = nn.LSTM(6, 7, batch_first=True)", "self.head = nn.Linear(7, 3)")
        + _forward("return self.first(x)[0][:, -1]"),
        data=SERIES,
        weight="first.weight_hh_l0",
    ),
    "GRU with a state of its own": Architecture(
        body=_init("self.first = nn.GRU(6, 7, batch_first=True)", "self.head = nn.Linear(7, 3)")
        + "    def begin(self, count):\n"
        "        return next(self.parameters()).new_zeros(1, count, 7)\n"
        + _forward("return self.first(x, self.begin(len(x)))[1][0]"),
        data=SERIES,
        weight="first.weight_ih_l0",
    ),
    "attention": Architecture(
        body=_init(
            "self.first = nn.Linear(6, 8)",
            "self.attend = nn.MultiheadAttention(8, 2, batch_first=True)",
            "self.norm = nn.LayerNorm(8)",
            "self.head = nn.Linear(8, 3)",
        )
        + _forward("x = self.first(x)", "return self.norm(x + self.attend(x, x, x, need_weights=False)[0]).mean(1)"),
        data=SERIES,
        weight="attend.in_proj_weight",
        other="norm.bias",
    ),
    "TransformerEncoder": Architecture(
        body=_init(
            "self.embed = nn.Embedding(11, 8)",
            "layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)",
            "self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)",
            "self.head = nn.Linear(8, 3)",
            "self.register_buffer('positions', torch.linspace(-1, 1, 5)[:, None])",
        )
        + _forward("return self.encoder(self.embed(x) + self.positions).mean(1)"),
        data=TOKENS,
        weight="embed.weight",
        layer="encoder.layers.0.linear1",
        smooth=False,
    ),
    "unused and frozen": Architecture(
        body=_init(
            "self.frozen = nn.Linear(6, 6).requires_grad_(False)",
            "self.first = nn.Linear(6, 8)",
            "self.spare = nn.Linear(5, 5)",
            "self.head = nn.Linear(8, 3)",
        )
        + _forward("return torch.tanh(self.first(self.frozen(x)))"),
        other="frozen.weight",
    ),
    "ParameterList": Architecture(
        body=_init(
            "self.factors = nn.ParameterList([nn.Parameter(torch.randn(6, 6) * 0.4) for _ in range(3)])",
            "self.first = nn.Linear(6, 8)",
            "self.scales = nn.ParameterDict({'a': nn.Parameter(torch.ones(())), 'b': nn.Parameter(torch.ones(1))})",
            "self.head = nn.Linear(8, 3)",
        )
        + _forward(
            "for w in self.factors:",
            "    x = torch.tanh(x @ w)",
            "return self.first(x) * self.scales['a'] + self.scales['b']",
        ),
        weight="factors.1",
        other="scales.a",
    ),
    "bare parameters": Architecture(
        body=_init(
            "self.w = nn.Parameter(torch.randn(6, 9) * 0.4)",
            "self.b = nn.Parameter(torch.zeros(9))",
            "self.first = nn.Linear(9, 7)",
            "self.head = nn.Linear(7, 3)",
            "self.register_buffer('calls', torch.zeros((), dtype=torch.long))",
        )
        + _forward(
            "self.calls += 1",
            "y = x @ self.w",
            "y += self.b",
            "return F.linear(torch.tanh(y), self.first.weight, self.first.bias)",
        ),
        weight="w",
        other="b",
    ),
    "complex": Architecture(
        body=_init(
            "self.first = nn.Linear(6, 8, dtype=torch.complex64)",
            "self.second = nn.Linear(8, 8, dtype=torch.complex64)",
            "self.head = nn.Linear(8, 3)",
        )
        + _forward("return torch.tanh(self.second(self.first(x.to(torch.complex64))).abs())"),
        smooth=False,
    ),
    "double": Architecture(
        body=_init("self.first = nn.Linear(6, 8)", "self.second = nn.Linear(8, 8)", "self.head = nn.Linear(8, 3)")
        + _forward("return torch.tanh(self.second(torch.tanh(self.first(x))))"),
        data="X = torch.randn(32, 6, dtype=torch.double)",
        made="model = Net().double()",
    ),
    "weight_norm": Architecture(
        body=_init(
            "self.first = nn.Linear(6, 8)",
            "self.second = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))",
            "self.head = nn.Linear(8, 3)",
        )
        + _forward("return torch.tanh(self.second(torch.tanh(self.first(x))))"),
        other="second.bias",
    ),
    "checkpointed": Architecture(
        body=_init("self.first = nn.Linear(6, 8)", "self.second = nn.Linear(8, 8)", "self.head = nn.Linear(8, 3)")
        + _forward(
            "h = torch.utils.checkpoint.checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=False)",
            "return torch.tanh(h)",
        ),
        smooth=False,
    ),
    "one layer twice": Architecture(
        body=_init("self.first = nn.Linear(6, 6)", "self.again = self.first", "self.head = nn.Linear(6, 3)")
        + _forward("return torch.tanh(self.again(torch.tanh(self.first(x)))) + x")
    ),
}  # fmt: skip
"""In the order of how often they are drawn: shrinking goes towards the first."""
