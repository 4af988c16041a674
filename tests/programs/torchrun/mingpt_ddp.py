"""In the manner of pytorch's examples/distributed/minGPT-ddp: a Trainer, snapshots, a DistributedSampler, a scaler."""

import os
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class GPTConfig:
    vocab_size: int = 27
    block_size: int = 8
    n_embd: int = 16
    n_head: int = 2


@dataclass
class TrainerConfig:
    max_epochs: int = 2
    batch_size: int = 8
    grad_norm_clip: float = 1.0
    snapshot_path: str = ""
    save_every: int = 1


@dataclass
class Snapshot:
    model_state: dict
    optimizer_state: dict
    finished_epoch: int


class CharDataset(Dataset):
    def __init__(self, text, block_size):
        self.stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
        self.text, self.block_size = text, block_size

    def __len__(self):
        return len(self.text) - self.block_size

    def __getitem__(self, idx):
        chunk = torch.tensor([self.stoi[ch] for ch in self.text[idx : idx + self.block_size + 1]])
        return chunk[:-1], chunk[1:]


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.attn = nn.MultiheadAttention(config.n_embd, config.n_head, batch_first=True)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.tok(idx) + self.pos
        x = x + self.attn(x, x, x, need_weights=False)[0]
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, config, model, optimizer, train_set):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = DataLoader(
            train_set, config.batch_size, shuffle=False, sampler=DistributedSampler(train_set)
        )
        self.epochs_run = 0
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        try:
            snapshot = Snapshot(**torch.load(self.config.snapshot_path))
        except FileNotFoundError:
            return
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch

    def _save_snapshot(self, epoch):
        model = self.model.module if hasattr(self.model, "module") else self.model
        snapshot = Snapshot(model.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.config.snapshot_path)

    def _run_batch(self, source, targets):
        with torch.amp.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            _, loss = self.model(source, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            epoch += 1
            self.train_loader.sampler.set_epoch(epoch)
            for source, targets in self.train_loader:
                self._run_batch(source, targets)
            if self.local_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)


def main():
    init_process_group(backend="gloo")
    out = os.environ["OUT"]
    torch.manual_seed(1)
    config = GPTConfig()
    data = CharDataset("the quick brown fox jumps over the lazy dog " * 3, config.block_size)
    train_set, _ = random_split(data, [len(data) - 24, 24])
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    snapshot_path = out + ".snapshot"
    Trainer(TrainerConfig(snapshot_path=snapshot_path), model, optimizer, train_set).train()
    torch.distributed.barrier()
    again = Trainer(TrainerConfig(snapshot_path=snapshot_path, max_epochs=3), model, optimizer, train_set)
    assert again.epochs_run == 2
    again.train()
    if get_rank() == 0:
        torch.save(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), out)
    destroy_process_group()


if __name__ == "__main__":
    main()
