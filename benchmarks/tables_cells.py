"""The notebook of the tables: a transformer, a loop like any other, and what a rank says of its memory and its pace.

On a CPU a rank's memory is its own pages (what it shares with the notebook is there once for all, and not counted), at
their most while it trains, less what the same rank had when a tiny model was trained there: interpreter, libraries,
sockets. So parameters, gradients, the optimizer's state, activations and buckets are counted, whoever made them. Blocks
are had from the system one by one while that is measured, for what the C library keeps for later would be counted, too.
On a GPU it is what torch's allocator has given away at most.
"""

MEMORY = """
def on_each_rank(value):
    "gather() asks one of those that see the same samples."
    found = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found

def pages():
    with open("/proc/self/status") as lines:
        found = (one.split(":") for one in lines)
        return {name: int(size.split()[0]) * 1024 for name, size in found if name.startswith(("Vm", "Rss"))}

def low_water():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    return pages()["RssAnon"]
"""
"""What a rank says of its memory, wherever that is measured."""

NOTEBOOK = (
    """
import ctypes, gc, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH = 256, 32

class Embed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(LENGTH, width))
    def forward(self, x):
        return self.word(x) + self.place

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 32
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ask, self.tell = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        q, k, v = (one.unflatten(-1, (self.heads, 32)).transpose(1, 2) for one in self.ask(self.first(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.tell(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))

class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.words = nn.LayerNorm(width), nn.Linear(width, WORDS)
    def forward(self, x):
        return self.words(self.norm(x))

def anew(layers, width, batch):
    global model, optimizer, loader
    torch.manual_seed(0)
    model = nn.Sequential(Embed(width), *(Block(width) for _ in range(layers)), Head(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(WORDS, (8 * batch, LENGTH + 1))
    loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=batch)

def train(steps):
    while steps > 0:
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps -= 1
            if not steps:
                break
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

def pace(seconds):
    "Steps a second, over about so many of them."
    def timed(steps):
        barrier()
        began = time.perf_counter()
        train(steps)
        return steps / reduce(time.perf_counter() - began)
    return timed(max(3, min(200, int(seconds * timed(2)))))

"""
    + MEMORY
    + """
def peak(steps):
    "Bytes of this rank at the most, while it takes so many steps."
    if torch.cuda.is_initialized():
        cards = range(torch.cuda.device_count())
        for card in cards:
            torch.cuda.reset_peak_memory_stats(card)
        train(steps)
        return max(torch.cuda.max_memory_allocated(card) for card in cards)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD; slower, and the rank keeps it
    low_water()
    train(steps)
    now = pages()
    return now["VmHWM"] - now["RssFile"] - now["RssShmem"]

def bare():
    "What this rank has without the model that is measured."
    train(2)
    return 0 if torch.cuda.is_initialized() else low_water()

def measured(seconds):
    train(1)  # the optimizer's state is made in the first step
    rate = pace(seconds) if seconds else 0.0
    return on_each_rank(peak(2 if seconds else 1)), rate
"""
)

ANEW = "anew({layers}, {width}, {batch})"
BARE = "%%distributed {line}\nfloor = on_each_rank(bare())"
MEASURED = "%%distributed {line}\nfound = measured({seconds})"
OPTIONS = "--split-batches --monitor off --keep model,optimizer"
"""One batch for all, so that every strategy does the same work; nothing is brought home after it."""
