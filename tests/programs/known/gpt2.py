# %%
"""Hugging Face's GPT-2: Conv1D, a tied head, the causal mask as a buffer, reentrant checkpointing, Trainer's loop."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(5)
VOCAB, LENGTH = 19, 6


class Texts(Dataset):
    def __init__(self, n):
        self.examples = torch.randint(VOCAB, (n, LENGTH)).tolist()

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, i):
        return {"input_ids": self.examples[i], "labels": list(self.examples[i])}


def default_data_collator(features):
    return {k: torch.tensor([f[k] for f in features]) for k in features[0]}


train_dataloader = DataLoader(Texts(24), batch_size=4, shuffle=True, collate_fn=default_data_collator)


# %%
class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.2)

    def forward(self, x):
        size_out = x.size()[:-1] + (self.bias.numel(),)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class GPT2Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.c_out = Conv1D(2 * width, width), Conv1D(width, 2 * width)
        mask = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)).view(1, LENGTH, LENGTH)
        self.register_buffer("bias", mask, persistent=False)

    def forward(self, hidden_states):
        query, key, value = self.c_attn(self.ln_1(hidden_states)).split(hidden_states.size(-1), dim=2)
        scores = query @ key.transpose(-1, -2) / query.size(-1) ** 0.5
        T = query.size(-2)
        scores = torch.where(self.bias[:, :T, :T], scores, torch.full([], torch.finfo(scores.dtype).min))
        hidden_states = hidden_states + self.c_proj(scores.softmax(-1) @ value)
        return hidden_states + self.c_out(F.gelu(self.c_fc(self.ln_2(hidden_states)), approximate="tanh"))


class GPT2LMHeadModel(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList([GPT2Block() for _ in range(3)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        self.gradient_checkpointing = True

    def forward(self, input_ids, labels=None):
        hidden_states = self.wte(input_ids) + self.wpe(torch.arange(input_ids.size(1)))
        for block in self.h:
            if self.gradient_checkpointing and self.training:
                hidden_states = checkpoint(block, hidden_states, use_reentrant=True)
            else:
                hidden_states = block(hidden_states)
        logits = self.lm_head(self.ln_f(hidden_states))
        if labels is None:
            return (logits,)
        shifted, wanted = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return F.cross_entropy(shifted.view(-1, VOCAB), wanted.view(-1)), logits

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens=3):
        for _ in range(max_new_tokens):
            input_ids = torch.cat([input_ids, self(input_ids[:, -LENGTH:])[0][:, -1:].argmax(-1)], dim=1)
        return input_ids


model = GPT2LMHeadModel()
gradient_accumulation_steps, max_grad_norm, num_training_steps, num_warmup_steps = 2, 1.0, 6, 1
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def lr_lambda(current_step):
    if current_step < num_warmup_steps:
        return float(current_step + 1) / float(num_warmup_steps + 1)
    return max(0.0, float(num_training_steps - current_step) / float(max(1, num_training_steps - num_warmup_steps)))


lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
state = {"global_step": 0, "epoch": 0.0}

# %% distributed
model.zero_grad()
for epoch in range(2):
    model.train()
    for step, inputs in enumerate(train_dataloader):
        loss = model(**inputs)[0] / gradient_accumulation_steps
        loss.backward()
        if (step + 1) % gradient_accumulation_steps == 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            lr_scheduler.step()
            model.zero_grad()
            state["global_step"] += 1
            state["epoch"] = epoch + (step + 1) / len(train_dataloader)

# %% distributed
model.eval()
generated = model.generate(torch.arange(4).view(2, 2))

# %%
result = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "state": state,
    "generated": generated,
    "scheduler": copy.deepcopy(lr_scheduler.get_last_lr()),
}
