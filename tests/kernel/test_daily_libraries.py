"""Layers and models of libraries that people use daily: made from code, trained by a loop of a few lines as one process
trains them. No model is fetched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.libraries import kernel_with
from tests.support.notebook import Notebook

PARTS = {
    "einops": """
from einops.layers.torch import EinMix, Rearrange, Reduce
model = nn.Sequential(Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4), nn.Linear(48, 16),
    EinMix("b t c -> b t d", weight_shape="c d", c=16, d=8), Reduce("b t d -> b d", "mean"), nn.Linear(8, 3))
data = torch.randn(24, 3, 8, 8), torch.randint(3, (24,))
def loss_of(x, y): return F.cross_entropy(model(x), y)
""",
    "x-transformers": """
from x_transformers import Decoder, TransformerWrapper
layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8)
model = TransformerWrapper(num_tokens=16, max_seq_len=8, attn_layers=layers)
data = torch.randint(16, (24, 8)), torch.randint(16, (24, 8))
def loss_of(x, y): return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
""",
    "PyTorch Geometric": """
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool
class Graphs(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.second, self.head = GCNConv(4, 8), GATConv(8, 8), nn.Linear(8, 3)
    def forward(self, x):
        edges = torch.cat([EDGES + 5 * i for i in range(len(x))], 1)
        nodes = self.second(self.first(x.flatten(0, 1), edges).relu(), edges)
        return self.head(global_mean_pool(nodes, torch.arange(len(x)).repeat_interleave(5)))
EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
model = Graphs()
data = torch.randn(24, 5, 4), torch.randint(3, (24,))
def loss_of(x, y): return F.cross_entropy(model(x), y)
""",
    "sentence-transformers": """
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling
class Words(nn.Module):
    def __init__(self): super().__init__(); self.table = nn.Embedding(16, 8)
    def forward(self, features): return {**features, "token_embeddings": self.table(features["input_ids"])}
model = SentenceTransformer(modules=[Words(), Pooling(8), Normalize()], device="cpu")
data = torch.randint(16, (24, 6)), torch.randn(24, 8)
def loss_of(x, y):
    made = model({"input_ids": x, "attention_mask": torch.ones_like(x)})["sentence_embedding"]
    return 1 - F.cosine_similarity(made, y).mean()
""",
    "diffusers": """
from diffusers import DDPMScheduler, UNet2DModel
model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8),
    norm_num_groups=4, attention_head_dim=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"))
noise = DDPMScheduler(num_train_timesteps=10)
data = torch.randn(24, 1, 8, 8), torch.randn(24, 1, 8, 8)
def loss_of(x, y):
    at = (x[:, 0, 0, 0].abs() * 3).long().clamp(0, 9)
    return F.mse_loss(model(noise.add_noise(x, y, at), at).sample, y)
""",
}
START = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
{parts}
start = {{key: value.clone() for key, value in model.state_dict().items()}}
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
loader = DataLoader(TensorDataset(*data), 12)
"""
LOOP = """
for x, y in loader:
    loss_of(x, y).backward()
    opt.step()
    opt.zero_grad()
"""


CLEAN = """
import glob, os, shutil, tempfile
for file in glob.glob(tempfile.gettempdir() + "/torch_geometric*"): os.remove(file)  # it writes a file for each layer
shutil.rmtree(tempfile.gettempdir() + "/__pycache__", ignore_errors=True)
"""


@pytest.fixture(scope="module")
def daily() -> Iterator[Kernel]:
    with kernel_with("daily", "hugging_face") as kernel:
        yield kernel


@pytest.mark.sample("einops-ddp")
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    ("parts", "strategy"),
    [
        pytest.param(parts, strategy, id=f"{name}-{strategy}")
        for (name, parts), strategy in zip(PARTS.items(), itertools.cycle(("ddp", "fsdp")))
    ],
)
def test_a_model_of_a_library_trains_as_in_one_process(daily: Kernel, parts: str, strategy: str) -> None:
    notebook = Notebook(daily, START.format(parts=parts))
    notebook(f"{LOOP}alone = model.state_dict(); alone = {{key: alone[key].clone() for key in alone}}")
    notebook("model.load_state_dict(start); opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)\n"
             "loader = DataLoader(TensorDataset(*data), 6)")  # fmt: skip
    shown = notebook(f"%%distributed -s {strategy} -d 2\n{LOOP}", 120).text
    assert "differ" not in shown, shown
    apart = "max(float((alone[key] - value).abs().max()) for key, value in model.state_dict().items())"
    assert notebook(f"{apart} < 1e-5").value == "True"
    assert notebook("all(map(torch.equal, start.values(), model.state_dict().values()))").value == "False"
    notebook(f"%distributed stop\n{CLEAN}")
