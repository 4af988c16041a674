# %%
"""LoRA as peft does it: layers replaced by name, the base frozen, only adapters saved, merged at the end."""

import math
import os
import shutil
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randint(11, (24, 6))
loader = DataLoader(TensorDataset(x, x.sum(1) % 3), batch_size=8, shuffle=True)
adapter_file = os.path.join(tempfile.mkdtemp(), "adapter_model.pt")


# %%
class LoraLinear(nn.Module):
    def __init__(self, base_layer, r=2, lora_alpha=4):
        super().__init__()
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, base_layer.out_features, bias=False)})
        self.scaling = {"default": lora_alpha / r}
        nn.init.kaiming_uniform_(self.lora_A["default"].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B["default"].weight)
        self.merged = False

    def forward(self, x):
        result = self.base_layer(x)
        if self.merged:
            return result
        adapted = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return result + adapted * self.scaling["default"]

    def merge(self):
        self.base_layer.weight.data += (self.lora_B["default"].weight @ self.lora_A["default"].weight) * self.scaling[
            "default"
        ]
        self.merged = True


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, h):
        scores = self.q_proj(h) @ self.k_proj(h).transpose(1, 2) / math.sqrt(h.size(-1))
        return self.norm(h + self.out(scores.softmax(-1) @ self.v_proj(h)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.score = nn.Linear(8, 3)

    def forward(self, input_ids):
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        return self.score(h.mean(1))


def get_peft_model(model, target_modules):
    for p in model.parameters():
        p.requires_grad = False
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.split(".")[-1] in target_modules:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.split(".")[-1], LoraLinear(module))
    for p in model.score.parameters():  # modules_to_save
        p.requires_grad = True
    return model


model = get_peft_model(Classifier(), {"q_proj", "v_proj"})
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2, eps=1e-4)


def get_peft_model_state_dict(model):
    return {k: v for k, v in model.state_dict().items() if "lora_" in k or k.startswith("score")}


# %% distributed
model.train()
for epoch in range(2):
    for input_ids, labels in loader:
        loss = F.cross_entropy(model(input_ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
torch.save(get_peft_model_state_dict(model), adapter_file)

# %%
state = torch.load(adapter_file)
result = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "saved": state, "trainable": trainable}

# %% distributed
with torch.no_grad():
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.merge()

# %%
result["merged"] = model.state_dict()
shutil.rmtree(os.path.dirname(adapter_file))
