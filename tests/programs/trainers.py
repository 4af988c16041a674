# %%
"""A trainer written by hand: hierarchy, callbacks, early stopping, a checkpoint file, a dataclass of settings."""

import dataclasses
import enum
import os
from abc import ABC, abstractmethod
from collections import defaultdict

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm


# %%
class Mode(enum.Enum):
    MIN = "min"
    MAX = "max"


@dataclasses.dataclass
class Config:
    lr: float = 1e-2
    batch_size: int = 64
    epochs: int = 4
    hidden: tuple = (24, 12)
    seed: int = 10
    patience: int = 3
    checkpoint: str = "best.pt"
    names: list = dataclasses.field(default_factory=list)


config = Config()
torch.manual_seed(config.seed)

# %%
features, labels = load_breast_cancer(return_X_y=True)
features = torch.tensor((features - features.mean(0)) / features.std(0), dtype=torch.float32)
labels = torch.tensor(labels, dtype=torch.float32)
train_set = TensorDataset(features[:448], labels[:448])
val_x, val_y = features[448:], labels[448:]


# %%
class Callback:
    def on_epoch_end(self, trainer, metrics):
        pass


class EarlyStopping(Callback):
    def __init__(self, monitor, patience, mode=Mode.MIN):
        self.monitor, self.patience, self.mode = monitor, patience, mode
        self.best = None
        self.wait = 0

    def on_epoch_end(self, trainer, metrics):
        value = metrics[self.monitor]
        better = self.best is None or (value < self.best if self.mode is Mode.MIN else value > self.best)
        if better:
            self.best, self.wait = value, 0
        else:
            self.wait += 1
            trainer.should_stop = self.wait >= self.patience


class Checkpoint(Callback):
    def __init__(self, path):
        self.path = path
        self.saved = 0

    def on_epoch_end(self, trainer, metrics):
        torch.save({"model": trainer.model.state_dict(), "epoch": trainer.epoch}, self.path)
        self.saved += 1


class History(Callback, dict):
    def on_epoch_end(self, trainer, metrics):
        for name, value in metrics.items():
            self.setdefault(name, []).append(value)


# %%
class BaseTrainer(ABC):
    def __init__(self, model, config, callbacks=()):
        self.model = model
        self.config = config
        self.callbacks = list(callbacks)
        self.optimizer = self.configure_optimizer()
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, threshold=0.05)
        self.epoch = 0
        self.should_stop = False
        self.seen = defaultdict(int)

    def configure_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.config.lr)

    @abstractmethod
    def step(self, batch): ...

    @abstractmethod
    def validate(self): ...

    def fit(self, loader, epochs=None):
        for _ in range(epochs or self.config.epochs):
            self.model.train()
            for batch in tqdm(loader, desc=f"epoch {self.epoch}", leave=False, disable=None):
                self.optimizer.zero_grad()
                loss = self.step(batch)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.seen["batches"] += 1
            metrics = self.validate()
            self.scheduler.step(metrics["val_loss"])
            self.epoch += 1
            for callback in self.callbacks:
                callback.on_epoch_end(self, metrics)
            if self.should_stop:
                break
        return self


class BinaryTrainer(BaseTrainer):
    def step(self, batch):
        x, y = batch
        return F.binary_cross_entropy_with_logits(self.model(x).squeeze(1), y)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        logits = self.model(val_x).squeeze(1)
        return {
            "val_loss": F.binary_cross_entropy_with_logits(logits, val_y).item(),
            "val_accuracy": ((logits > 0) == val_y.bool()).float().mean().item(),
        }


def build(config):
    sizes = [features.shape[1], *config.hidden, 1]
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


model = build(config)
history = History()
stopper = EarlyStopping("val_loss", config.patience)
trainer = BinaryTrainer(model, config, [history, stopper, Checkpoint(config.checkpoint)])
train_loader = DataLoader(train_set, batch_size=config.batch_size, shuffle=True)

# %% distributed
trainer.fit(train_loader)

# %%
epochs_first = trainer.epoch
stopper.patience = 1
config = trainer.config = dataclasses.replace(config, epochs=6)

# %% distributed
trainer.fit(train_loader)

# %%
saved = torch.load(config.checkpoint)
restored = build(config)
restored.load_state_dict(saved["model"])
assert saved["epoch"] == trainer.epoch
assert trainer.model is model
assert trainer.callbacks[0] is history
assert trainer.scheduler.optimizer is trainer.optimizer
curves = {name: list(zip(range(trainer.epoch), values)) for name, values in history.items()}
os.remove(config.checkpoint)
