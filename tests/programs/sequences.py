# %%
"""Sequences of different lengths: a GRU over packed sequences, a Dataset class, a collate function of its own."""

import random
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

random.seed(4)
torch.manual_seed(4)
Batch = namedtuple("Batch", "tokens lengths labels")
PAD = 0


# %%
class Vocabulary:
    def __init__(self, letters):
        self.index = {letter: i + 1 for i, letter in enumerate(letters)}

    def __len__(self):
        return len(self.index) + 1

    def encode(self, word):
        return torch.tensor([self.index[letter] for letter in word])


class Brackets(Dataset):
    """Words of brackets: is the number of the open ones larger?"""

    def __init__(self, count, vocabulary):
        self.vocabulary = vocabulary
        self.words = ["".join(random.choices("()[]", k=random.randint(3, 12))) for _ in range(count)]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        word = self.words[i]
        more = word.count("(") + word.count("[") > len(word) / 2
        return self.vocabulary.encode(word), int(more)


def collate(items):
    sequences, labels = zip(*items)
    lengths = torch.tensor([len(s) for s in sequences])
    return Batch(pad_sequence(sequences, batch_first=True, padding_value=PAD), lengths, torch.tensor(labels))


vocabulary = Vocabulary("()[]")
train_set, test_set = Brackets(512, vocabulary), Brackets(128, vocabulary)
train_loader = DataLoader(train_set, batch_size=64, shuffle=True, collate_fn=collate)


# %%
class Reader(nn.Module):
    def __init__(self, vocabulary_size, embedding=8, hidden=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding, padding_idx=PAD)
        self.gru = nn.GRU(embedding, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, 2)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, state = self.gru(packed)
        return self.out(torch.cat([state[0], state[1]], dim=1))


model = Reader(len(vocabulary))
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
history = []


def train(epochs):
    for _ in range(epochs):
        running = 0.0
        for batch in train_loader:
            logits = model(batch.tokens, batch.lengths)
            loss = F.cross_entropy(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            running += loss.item() * len(batch.labels)
        history.append({"epoch": len(history), "loss": running / len(train_set)})


# %% distributed
train(epochs=3)


# %%
def accuracy():
    model.eval()
    hits = 0
    with torch.no_grad():
        for batch in DataLoader(test_set, batch_size=32, collate_fn=collate):
            hits += (model(batch.tokens, batch.lengths).argmax(1) == batch.labels).sum().item()
    model.train()
    return hits / len(test_set)


accuracies = [accuracy()]

# %% distributed
for group in optimizer.param_groups:
    group["lr"] *= 0.5
train(epochs=2)

# %%
accuracies.append(accuracy())
embedded = model.embedding.weight.detach().clone()
history[-1]["accuracy"] = accuracies[-1]
