# %%
"""Hugging Face's Bert for masked words: tied decoder, a mask, dicts in and an output class out, checkpointing."""

from collections import OrderedDict
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(3)
VOCAB, LENGTH, MASK = 23, 8, 1


class MaskedWords(Dataset):
    def __init__(self, n):
        words = torch.randint(3, VOCAB, (n, LENGTH))
        self.labels = torch.full_like(words, -100)
        self.input_ids = words.clone()
        for i in range(n):
            at = torch.randperm(LENGTH - 2)[:2]
            self.labels[i, at], self.input_ids[i, at] = words[i, at], MASK
        self.attention_mask = torch.ones_like(words)
        self.attention_mask[::2, -2:] = 0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {k: getattr(self, k)[i] for k in ("input_ids", "attention_mask", "labels")}


train_dataloader = DataLoader(MaskedWords(24), batch_size=8, shuffle=True)
eval_dataloader = DataLoader(MaskedWords(8), batch_size=4)


# %%
class ModelOutput(OrderedDict):
    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@dataclass
class MaskedLMOutput(ModelOutput):
    loss: torch.Tensor = None
    logits: torch.Tensor = None


class BertLayer(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense, self.LayerNorm = nn.Linear(width, width), nn.LayerNorm(width)
        self.intermediate, self.output = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.LayerNorm2, self.heads = nn.LayerNorm(width), heads

    def forward(self, hidden_states, attention_mask):
        B, T, C = hidden_states.shape
        q, k, v = (
            f(hidden_states).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / (C // self.heads) ** 0.5 + attention_mask
        context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)
        hidden_states = self.LayerNorm(self.dense(context) + hidden_states)
        return self.LayerNorm2(self.output(F.gelu(self.intermediate(hidden_states))) + hidden_states)


class BertEncoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layer = nn.ModuleList([BertLayer() for _ in range(layers)])
        self.gradient_checkpointing = False

    def forward(self, hidden_states, attention_mask):
        for layer_module in self.layer:
            if self.gradient_checkpointing and self.training:
                hidden_states = torch.utils.checkpoint.checkpoint(
                    layer_module.__call__, hidden_states, attention_mask, use_reentrant=False
                )
            else:
                hidden_states = layer_module(hidden_states, attention_mask)
        return hidden_states


class BertForMaskedLM(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, width, padding_idx=0)
        self.position_embeddings = nn.Embedding(LENGTH, width)
        self.register_buffer("position_ids", torch.arange(LENGTH).unsqueeze(0), persistent=False)
        self.LayerNorm = nn.LayerNorm(width)
        self.encoder = BertEncoder()
        self.decoder = nn.Linear(width, VOCAB, bias=False)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.decoder.bias = self.bias
        self.decoder.weight = self.word_embeddings.weight

    def gradient_checkpointing_enable(self):
        self.encoder.gradient_checkpointing = True

    def get_extended_attention_mask(self, attention_mask, dtype):
        return (1.0 - attention_mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden_states = self.word_embeddings(input_ids) + self.position_embeddings(self.position_ids)
        hidden_states = self.LayerNorm(hidden_states)
        mask = self.get_extended_attention_mask(attention_mask, hidden_states.dtype)
        logits = self.decoder(self.encoder(hidden_states, mask))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))
        return MaskedLMOutput(loss=loss, logits=logits)


model = BertForMaskedLM()
model.gradient_checkpointing_enable()
named, no_decay = list(model.named_parameters()), ["bias", "LayerNorm"]
optimizer = torch.optim.AdamW(
    [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ],
    lr=1e-2, eps=1e-4,
)  # fmt: skip
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 8))
perplexities = []

# %% distributed
for epoch in range(2):
    model.train()
    for step, batch in enumerate(train_dataloader):
        batch = {k: v.to("cpu") for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    model.eval()
    losses = []
    for step, batch in enumerate(eval_dataloader):
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(outputs.loss.repeat(4))
    perplexities.append(torch.exp(torch.mean(torch.cat(losses))).item())

# %%
result = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "perplexities": perplexities}
