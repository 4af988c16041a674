"""What a notebook holds of a training: weights, buffers, the states of optimizers and schedulers, what was collected.

Gradients stay on ranks and are left out. Everything stands below its path, as a tensor or as plain data.
"""

from __future__ import annotations

import re
from typing import Any

import torch

WATCHED = re.compile(r"(model|judge|teacher|opt|sched|ema|avg|result|history|start|kept|best|memory|vector)\d*")
ACCURACY = 1e-4
NOISE = 30
"""A value may differ by so many times what it changes by where all weights begin a rounding error away."""

Held = dict[str, Any]


def held(namespace: dict[str, Any]) -> Held:
    walk = _Walk()
    names = sorted(name for name in namespace if WATCHED.fullmatch(name))
    names.sort(key=lambda name: not isinstance(namespace[name], torch.nn.Module))  # they name the parameters
    for name in names:
        walk.visit(name, namespace[name])
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found: Held = {}
        self.first: dict[int, str] = {}
        self.alive: list[Any] = []

    def visit(self, path: str, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, str, torch.dtype, torch.Size)):
            self.found[path] = value if not isinstance(value, (torch.dtype, torch.Size)) else str(value)
        elif isinstance(value, (float, complex)):
            kind = torch.complex128 if isinstance(value, complex) else torch.double
            self.found[path] = torch.tensor(value, dtype=kind)
        elif isinstance(value, torch.Tensor):
            self.tensor(path, value)
        elif isinstance(value, torch.nn.Module):
            self.module(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizer(path, value)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            for key, part in value.state_dict().items():
                if key not in ("lr_lambdas", "_get_lr_called_within_step"):
                    self.visit(f"{path}.{key}", part)
            self.found[f"{path} of"] = self.first.get(id(value.optimizer), "another optimizer")
        elif isinstance(value, dict):
            self.found[f"{path} keys"] = sorted(map(str, value))
            for key, part in value.items():
                self.visit(f"{path}[{key!r}]", part)
        elif isinstance(value, (list, tuple)):
            self.found[f"{path} length"] = len(value)
            for number, part in enumerate(value):
                self.visit(f"{path}[{number}]", part)
        else:
            self.found[path] = f"a {type(value).__name__}"

    def tensor(self, path: str, value: torch.Tensor) -> None:
        self.first.setdefault(id(value), path)
        self.alive.append(value)
        learns = value.requires_grad and value.is_leaf
        self.found[f"{path} kind"] = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {learns}"
        if self.first[id(value)] != path:
            self.found[f"{path} is"] = self.first[id(value)]
        self.found[path] = value.detach().clone().cpu()

    def module(self, path: str, module: torch.nn.Module) -> None:
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, p in tensors:
            self.tensor(f"{path}.{name}", p)
            if p.requires_grad:
                self.found[f"{path}.{name} hooks"] = [
                    len(getattr(p, hooks, None) or ()) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")
                ]
        for name, part in module.named_modules():
            hooks = {k: len(v) for k, v in vars(part).items() if "_hooks" in k and isinstance(v, dict) and v}
            self.found[f"{path}.{name} as"] = f"{type(part).__name__}, training {part.training}, hooks {hooks}"
            for key, value in vars(part).items():
                if key.startswith("note"):
                    self.visit(f"{path}.{name}.{key}", value)

    def optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        self.first[id(optimizer)] = path
        self.found[f"{path} as"] = type(optimizer).__name__
        hooks = {k: len(v) for k, v in vars(optimizer).items() if "_hooks" in k and isinstance(v, dict) and v}
        self.found[f"{path} hooks"] = {k: n for k, n in hooks.items() if "profile" not in k}
        for number, group in enumerate(optimizer.param_groups):
            at = f"{path}.param_groups[{number}]"
            for key, value in group.items():
                if key != "params":
                    self.visit(f"{at}.{key}", value)
            self.found[f"{at} keys"] = sorted(group)
            self.found[f"{at} parameters"] = [self.first.get(id(p), "one that no model has") for p in group["params"]]
        for p, state in optimizer.state.items():
            if not state:  # reading makes one
                continue
            name = self.first.get(id(p), "one that no model has") if isinstance(p, torch.Tensor) else str(p)
            self.found[f"{path}.state of {name} keys"] = sorted(map(str, state)) if isinstance(state, dict) else "?"
            if not any(isinstance(v, list) for v in state.values()):  # LBFGS keeps its past, which is steep
                for key, value in state.items():
                    self.visit(f"{path}.state of {name}.{key}", value)


def differences(wanted: Held, found: Held, unsteady: Held | None = None) -> list[str]:
    """Lines; none if they are the same but for rounding. `unsteady`: `wanted`, begun a rounding error away."""
    lines = [f"{path} is missing: {_short(wanted[path])}" for path in wanted if path not in found]
    lines += [f"{path} is there: {_short(found[path])}" for path in found if path not in wanted]
    for path in [path for path in wanted if path in found]:
        one, other = wanted[path], found[path]
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
            noise = unsteady.get(path) if unsteady else None
            if (line := _apart(one, other, noise)) is not None:
                lines.append(f"{path} {line}")
        elif type(one) is not type(other) or (isinstance(one, torch.Tensor) or one != other):
            lines.append(f"{path} is {_short(other)}; in one process {_short(one)}")
    return lines


def _apart(one: torch.Tensor, other: torch.Tensor, noise: Any) -> str | None:
    if not one.numel() or torch.equal(one, other):
        return None
    left, right = _wide(one), _wide(other)
    if not torch.equal(left.isfinite(), right.isfinite()):
        return "has NaN or infinities" if not right.isfinite().all() else "has none of the NaN that one process has"
    left, right = left[left.isfinite()], right[right.isfinite()]
    if not left.numel():
        return None
    allowed = ACCURACY * left.abs().max() + 1e-8
    if isinstance(noise, torch.Tensor) and noise.shape == one.shape:
        steady = (_wide(noise) - _wide(one)).abs()
        allowed = allowed + NOISE * steady[steady.isfinite()].max() if steady.isfinite().any() else allowed
    off = (left - right).abs().max()
    if off <= allowed:
        return None
    return f"is off by {off:.3g}, where the largest is {left.abs().max():.3g}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def _short(value: Any) -> str:
    return f"{value!r:.120}".replace("\n", " ")
