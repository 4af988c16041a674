"""What people do around a training step, each as a few lines that fit in several places of a loop.

Fields: {w} a parameter of two dimensions or more, {o} another one, {l} a layer, {c} a number near one, {n} a number of
this edit's own, for names. What is put into `result` is compared, and so are `ema1`, `start2`, `kept3` …
"""

# ruff: noqa: E501 — a template is one line
from __future__ import annotations

from dataclasses import dataclass

AFTER = "step zero end bottom notebook"
"""where weights may be written without harm to a backward"""
ALWAYS = f"top epoch batch loss grad {AFTER}"
BEGIN = "setup top notebook"


@dataclass(frozen=True, slots=True)
class Edit:
    name: str
    text: str
    at: str
    """names of places, of which one is drawn"""
    first: str = ""
    """what has to be there before the loop: in the notebook, or at the top of the cell"""
    smooth: bool = False
    """only where gradients of gradients can be had"""
    whole: str = ""
    """what does it with complete tensors, if it is not the same in a block `with whole(…)`"""
    whole_at: str = ""
    """the place of that, if it is another"""
    whole_first: str = ""
    """what that needs at the top of the cell"""


ALL = "for p in model.parameters()"
QUIET = "with torch.no_grad():\n    "
HALVED = "with whole(gradients=True):\n    if {}.grad is not None: {}.grad.mul_(0.5)"
SEEN = "with whole(gradients=True): result['{}{{n}}'] = {}.grad is not None"

WRITES = (
    Edit("all weights multiplied, no_grad", f"{QUIET}{ALL}: p.mul_({{c}})", f"top epoch batch {AFTER}"),
    Edit("all weights multiplied, .data", f"{ALL}: p.data.mul_({{c}})", f"top epoch batch {AFTER}"),
    Edit("weights given new .data", f"{ALL}: p.data = p.data * {{c}}", f"top {AFTER}"),
    Edit("weights clamped", f"{ALL}: p.data = p.data if p.is_complex() else p.data.clamp(-0.4, 0.4)", f"top {AFTER}"),
    Edit("a row written, .data", "{w}.data[0] = 0.25", f"top batch {AFTER}"),
    Edit("a row written, no_grad", f"{QUIET}{{w}}[0].zero_()", f"top batch {AFTER}"),
    Edit("a column written", "{w}.data[:, 1:3] *= 0.5", f"top {AFTER}"),
    Edit("one number written", f"{QUIET}{{w}}[1, 2] = 0.3", f"top {AFTER}"),
    Edit("filled", "{o}.data.fill_(0.1)", f"top {AFTER}"),
    Edit("zeroed, no_grad", f"{QUIET}{{o}}.zero_()", f"top {AFTER}"),
    Edit("added to, no_grad", f"{QUIET}{{w}}.add_(0.01 * {{w}})", f"top {AFTER}"),
    Edit("augmented assignment", f"{QUIET}{{w}} *= {{c}}", f"top {AFTER}"),
    Edit("weights drawn, init.normal_", "nn.init.normal_({w}, std=0.3)", f"top {AFTER}"),
    Edit("weights drawn, init.xavier_uniform_", "nn.init.xavier_uniform_({w})", f"top {AFTER}"),
    Edit("weights drawn, init.orthogonal_", "nn.init.orthogonal_({w}) if {w}.dim() == 2 and not {w}.is_complex() else None", f"top {AFTER}"),
    Edit("weights drawn, .data.normal_", "{w}.data.normal_(0, 0.3)", f"top {AFTER}"),
    Edit("weights drawn, uniform_", f"{QUIET}{{o}}.uniform_(-0.3, 0.3)", f"top {AFTER}"),
    Edit("noise added, randn_like", f"{ALL}: p.data.add_(torch.randn_like(p), alpha=0.01)", f"top {AFTER}"),
    Edit("noise added, a generator", f"generator = torch.Generator().manual_seed(i)\n{QUIET}{ALL}: p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.01)", "step zero"),
    Edit("a layer's reset_parameters", "{l}.reset_parameters()", f"top {AFTER}"),
    Edit("model.apply of an initialisation", "model.apply(lambda m: nn.init.constant_(m.bias, 0.01) if isinstance(m, nn.Linear) and m.bias is not None else None)", f"top {AFTER}"),
    Edit("constant initialisation", "nn.init.constant_({o}, 0.2)", f"top {AFTER}"),
    Edit("scaled to a norm", f"{QUIET}{{w}}.div_({{w}}.norm().clamp(min=1.0))", f"top {AFTER}"),
    Edit("max norm of each row", "{w}.data.renorm_(2, 0, 0.7) if not {w}.is_complex() else None", f"top {AFTER}"),
    Edit("decay by hand", f"{QUIET}{ALL}: p.sub_(0.01 * p)", f"top {AFTER}"),
    Edit("flipped", "{w}.data.copy_({w}.data.flip(0))", f"top {AFTER}"),
    Edit("the weights of a state_dict scaled and loaded", "model.load_state_dict({{k: v * {c} if v.is_floating_point() else v for k, v in model.state_dict().items()}})", f"top {AFTER}"),
    Edit("a state_dict edited in place", f"{QUIET}for k, v in model.state_dict().items():\n        if v.is_floating_point(): v.mul_({{c}})", f"top {AFTER}"),
    Edit("parameters_to_vector and back", "vector{n} = nn.utils.parameters_to_vector([p for p in model.parameters() if not p.is_complex()]).detach()\nnn.utils.vector_to_parameters(vector{n} * {c}, [p for p in model.parameters() if not p.is_complex()])", f"top {AFTER}"),
    Edit("a mask for pruning", "{w}.data.mul_(kept{n})", "step zero end", first="kept{n} = ({w}.detach().abs() > 0.05).to({w}.dtype)"),
    Edit("a mask from the weights themselves", f"{QUIET}{{w}}.mul_({{w}}.abs() > 0.05)", f"top {AFTER}"),
    Edit("_foreach on weights", f"{QUIET}torch._foreach_mul_([*model.parameters()], {{c}})", f"top {AFTER}"),
    Edit("swapped with a copy", "held = {w}.data.clone(); {w}.data.copy_(kept{n}); kept{n}.copy_(held); del held", f"{AFTER}", first="kept{n} = {w}.detach().clone() * 0.5"),
    Edit("lerp toward the start", f"{QUIET}for p, s in zip(model.parameters(), start{{n}}): p.lerp_(s, 0.1)", "step zero end", first="start{n} = [p.detach().clone() for p in model.parameters()]"),
    Edit("lookahead, by hand", "if i % 2:\n    for p, s in zip(model.parameters(), start{n}):\n        s.add_(p.data - s, alpha=0.5); p.data.copy_(s)", "step zero", first="start{n} = [p.detach().clone() for p in model.parameters()]"),
    Edit("buffers written", "for b in model.buffers():\n    if b.is_floating_point(): b.mul_({c})", f"top {AFTER}"),
    Edit("absolute values", "{o}.data.copy_({o}.data.abs())", f"top {AFTER}"),
)  # fmt: skip

READS = (
    Edit("reads the norm of all weights", "result['norm{n}'] = sum(p.detach().norm() ** 2 for p in model.parameters()).sqrt().item()", f"{ALWAYS} setup"),
    Edit("reads the largest weight", "result['max{n}'] = max(p.abs().max().item() for p in model.parameters())", ALWAYS),
    Edit("copies weights into a dict", "result['copies{n}'] = {{n: p.detach().clone() for n, p in model.named_parameters()}}", ALWAYS),
    Edit("copies weights into a list", "kept{n} = [p.data.clone() for p in model.parameters()]", ALWAYS),
    Edit("reads one row", "result['row{n}'] = {w}[0].tolist()", ALWAYS),
    Edit("reads a mean", "result.setdefault('mean{n}', []).append({w}.abs().mean().item())", ALWAYS),
    Edit("reads as numpy", "result['numpy{n}'] = float(abs({w}.detach().cpu().numpy()).sum())", ALWAYS),
    Edit("counts what is positive", "result['positive{n}'] = int(({o}.detach().abs() > 0.1).sum())", ALWAYS),
    Edit("a product of a weight", "result['gram{n}'] = ({w}.detach().flatten(1) @ {w}.detach().flatten(1).mT).abs().sum().item()", ALWAYS),
    Edit("singular values", "result['svd{n}'] = torch.linalg.svdvals({w}.detach().flatten(1)).tolist()", ALWAYS),
    Edit("a string of a weight", "result['text{n}'] = f'{{{o}.detach().abs().sum():.2f}}'", ALWAYS),
    Edit("all weights in one vector", "result['vector{n}'] = torch.cat([p.detach().flatten() for p in model.parameters() if not p.is_complex()]).abs().mean().item()", ALWAYS),
    Edit("shapes and counts", "result['counts{n}'] = [(str(p.dtype), tuple(p.shape), p.numel(), p.stride(), p.is_leaf, p.requires_grad) for p in model.parameters()]", ALWAYS),
    Edit("tensors made from a weight", "result['made{n}'] = ({w}.new_ones(2).sum() + torch.zeros_like({w}).sum() + {w}.new_zeros(3).sum()).abs().item()", ALWAYS),
    Edit("state_dict kept and compared", "result['changed{n}'] = sum((model.state_dict()[k].float() - v.float()).norm().item() for k, v in start{n}.items() if not v.is_complex())", AFTER, first="start{n} = copy.deepcopy(model.state_dict())"),
    Edit("distance from the start", "result['moved{n}'] = sum((p.detach() - s).norm().item() for p, s in zip(model.parameters(), start{n}))", AFTER, first="start{n} = [p.detach().clone() for p in model.parameters()]"),
    Edit("weights compared with torch.equal", "result['equal{n}'] = torch.equal({w}, {w}.detach().clone())", ALWAYS),
    Edit("weights sorted", "result['top{n}'] = {w}.detach().abs().flatten().topk(3).values.tolist()", ALWAYS),
    Edit("a histogram", "result['histogram{n}'] = torch.histc({w}.detach().abs().float(), 4, 0, 2).tolist()", "top step end bottom notebook"),
    Edit("cosine between weights", "result['cosine{n}'] = F.cosine_similarity({w}.detach().abs().flatten()[:6], {w}.detach().abs().flatten()[-6:], dim=0).item()", ALWAYS),
    Edit("the learning rate and state read", "result['state{n}'] = sum(v.abs().sum().item() for s in opt.state.values() for v in s.values() if torch.is_tensor(v))", f"top {AFTER}"),
    Edit("gradients' norm kept as a tensor", "result.setdefault('tensors{n}', []).append({w}.detach().norm())", ALWAYS),
    Edit("weights stacked", "result['stacked{n}'] = torch.stack([p.detach().abs().mean() for p in model.parameters()])", ALWAYS),
)  # fmt: skip

LOSSES = (
    Edit("L2 penalty", "loss = loss + 0.01 * sum(p.abs().square().sum() for p in model.parameters())", "loss"),
    Edit("L1 penalty", "loss = loss + 1e-3 * sum(p.abs().sum() for p in model.parameters())", "loss"),
    Edit("penalty of one weight", "loss = loss + 0.01 * {w}.norm()", "loss"),
    Edit("penalty through a product", "loss = loss + 0.01 * ({w}.flatten(1) @ {w}.flatten(1).mT).abs().square().sum()", "loss"),
    Edit("penalty by the distance from the start", "loss = loss + 0.1 * sum((p - s).abs().square().sum() for p, s in zip(model.parameters(), start{n}))", "loss", first="start{n} = [p.detach().clone() for p in model.parameters()]"),
    Edit("a weight used in the loss with the output", "loss = loss + 0.1 * (out * {w}.abs().flatten()[:3]).mean()", "loss"),
    Edit("a second forward in the loss", "loss = loss + 0.1 * model(x).square().mean()", "loss"),
    Edit("consistency with a detached output", "loss = loss + 0.1 * (out - out.detach().roll(1, 1)).square().mean()", "loss"),
    Edit("features called by themselves", "loss = loss + 0.1 * model.features(x).square().mean() if hasattr(model, 'features') else loss", "loss"),
    Edit("distillation from a copy", "loss = loss + 0.1 * (out - teacher{n}(x).detach()).square().mean()", "loss", first="teacher{n} = copy.deepcopy(model).eval().requires_grad_(False)"),
    Edit("functional_call with other weights", "loss = loss + 0.1 * torch.func.functional_call(model, {{k: v * 0.9 for k, v in model.named_parameters()}}, (x,)).square().mean()", "loss", whole="loss = loss + 0.1 * torch.func.functional_call(twin{n}, {{k: v * 0.9 for k, v in model.named_parameters()}}, (x,)).square().mean()", whole_first="with whole(): twin{n} = copy.deepcopy(model)"),
    Edit("gradient penalty on the input", "loss = loss + 0.1 * torch.autograd.grad(loss * len(x), x, create_graph=True)[0].square().flatten(1).sum(1).mean()", "loss", smooth=True),
    Edit("autograd.grad of one weight, looked at", "result['slope{n}'] = torch.autograd.grad(loss, {w}, retain_graph=True)[0].shape", "loss"),
    Edit("uncertainty weight, a parameter beside the model", "loss = loss * torch.exp(-kept{n}) + kept{n}", "loss", first="kept{n} = nn.Parameter(torch.zeros(()))\nopt.add_param_group({{'params': [kept{n}], 'lr': 0.01}})", whole="loss = loss * torch.exp(-model.kept{n}) + model.kept{n}", whole_first="with whole():\n    model.kept{n} = nn.Parameter(torch.zeros(())); opt.add_param_group({{'params': [model.kept{n}], 'lr': 0.01}})"),
)  # fmt: skip

GRADIENTS = (
    Edit("clip_grad_norm_", "result.setdefault('norms{n}', []).append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))", "grad"),
    Edit("clip_grad_norm_, largest", "result.setdefault('norms{n}', []).append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=float('inf'))))", "grad"),
    Edit("clip_grad_norm_ of one layer", "nn.utils.clip_grad_norm_({l}.parameters(), 0.05)", "grad"),
    Edit("clip_grad_norm_ of the optimizer's parameters", "nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g['params']], 0.1)", "grad"),
    Edit("clip_grad_value_", "nn.utils.clip_grad_value_([p for p in model.parameters() if not p.is_complex()], 0.01)", "grad"),
    Edit("get_total_norm", "result['total{n}'] = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))", "grad"),
    Edit("norm of gradients by hand", "result['gnorm{n}'] = sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None).sqrt().item()", "grad"),
    Edit("gradients scaled in place", f"{ALL}:\n    if p.grad is not None: p.grad.mul_(0.5)", "grad"),
    Edit("gradients replaced", f"{ALL}:\n    if p.grad is not None: p.grad = p.grad * 0.5", "grad"),
    Edit("gradients clamped", f"{ALL}:\n    if p.grad is not None and not p.is_complex(): p.grad.data.clamp_(-0.01, 0.01)", "grad"),
    Edit("one gradient set to None", "{w}.grad = None", "grad"),
    Edit("one gradient zeroed", "{w}.grad.zero_()", "grad"),
    Edit("a row of a gradient zeroed", "{w}.grad[0] = 0", "grad"),
    Edit("decay added to gradients", f"{ALL}:\n    if p.grad is not None: p.grad.add_(p.detach(), alpha=0.01)", "grad"),
    Edit("signs of gradients", f"{ALL}:\n    if p.grad is not None: p.grad = p.grad.sgn()", "grad"),
    Edit("gradients centred", f"{ALL}:\n    if p.grad is not None and p.dim() > 1: p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))", "grad"),
    Edit("gradients kept and added in the next step", "for q, p in enumerate(model.parameters()):\n    if p.grad is not None:\n        now{n} = p.grad.clone()\n        p.grad.add_(memory{n}.get(q, 0), alpha=0.5); memory{n}[q] = now{n}", "grad", first="memory{n} = {{}}"),
    Edit("gradients copied into result", "result['gradient{n}'] = {w}.grad.detach().clone()", "grad"),
    Edit("nan_to_num_ on gradients", f"{ALL}:\n    if p.grad is not None: torch.nan_to_num_(torch.view_as_real(p.grad) if p.is_complex() else p.grad)", "grad"),
    Edit("adaptive clipping", f"{ALL}:\n    if p.grad is not None:\n        most = 0.1 * p.detach().norm().clamp(min=1e-3)\n        if p.grad.norm() > most: p.grad.mul_(most / p.grad.norm())", "grad"),
    Edit("a gradient written without a backward", "{o}.grad = torch.full_like({o}, 0.1)", "grad"),
    Edit("zero_grad after the backward, then a second backward", "opt.zero_grad(); F.cross_entropy(model(x), y).backward()", "grad"),
    Edit("a second backward of another loss", "(0.1 * model(x).square().mean()).backward()", "grad"),
    Edit("gradients zeroed in place", "opt.zero_grad(set_to_none=False)", "zero top epoch", whole="opt.zero_grad()"),
    Edit("model.zero_grad()", "model.zero_grad()", "zero top epoch batch"),
    Edit("gradients set to None by hand", f"{ALL}: p.grad = None", "zero top epoch"),
    Edit("a weight's gradient hook", "hook{n} = {w}.register_hook(lambda g: g * 0.5)", f"{BEGIN} epoch", whole=HALVED.format("{w}", "{w}"), whole_at="grad"),
    Edit("gradients averaged over layers", "g = sum(p.grad.abs().mean() for p in model.parameters() if p.grad is not None).item(); result['mean{n}'] = g", "grad"),
)  # fmt: skip

HOOKS = (
    Edit("forward hook that changes the output", "hook{n} = {l}.register_forward_hook(lambda m, a, o: o * 0.9 if torch.is_tensor(o) else o)", BEGIN),
    Edit("forward hook that counts", "hook{n} = {l}.register_forward_hook(lambda m, a, o: result.__setitem__('hooked{n}', True))", BEGIN),
    Edit("forward pre-hook that changes the input", "hook{n} = model.register_forward_pre_hook(lambda m, a: (a[0] * 0.9,) if a[0].is_floating_point() else a)", BEGIN),
    Edit("forward hook with kwargs", "hook{n} = model.register_forward_hook(lambda m, a, k, o: o * 0.9, with_kwargs=True, always_call=True)", BEGIN),
    Edit("full backward hook", "hook{n} = {l}.register_full_backward_hook(lambda m, i, o: result.__setitem__('backward{n}', len(o)))", BEGIN),
    Edit("full backward hook that changes gradients", "hook{n} = model.register_full_backward_hook(lambda m, i, o: tuple(g * 0.5 if g is not None else None for g in i))", BEGIN),
    Edit("full backward pre-hook", "hook{n} = model.register_full_backward_pre_hook(lambda m, o: tuple(g * 0.5 for g in o))", BEGIN),
    Edit("hook that outlives and is removed", "hook{n}.remove()", "end bottom notebook", first="hook{n} = {l}.register_forward_hook(lambda m, a, o: o * 0.9 if torch.is_tensor(o) else o)"),
    Edit("post-accumulate hook that scales", "hook{n} = {w}.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])", BEGIN, whole=HALVED.format("{w}", "{w}"), whole_at="grad"),
    Edit("post-accumulate hook that counts", "hook{n} = {w}.register_post_accumulate_grad_hook(lambda p: result.__setitem__('seen{n}', True))", BEGIN, whole=SEEN.format("seen", "{w}"), whole_at="grad"),
    Edit("gradient hook that scales", "hook{n} = {o}.register_hook(lambda g: g * 0.5)", BEGIN, whole=HALVED.format("{o}", "{o}"), whole_at="grad"),
    Edit("gradient hook that counts", "hook{n} = {o}.register_hook(lambda g: result.__setitem__('gradient hook{n}', True))", BEGIN, whole=SEEN.format("gradient hook", "{o}"), whole_at="grad"),
    Edit("hook on the output", "out.register_hook(lambda g: g * 0.5)", "loss"),
    Edit("step post-hook of the optimizer", "hook{n} = opt.register_step_post_hook(lambda o, a, k: result.__setitem__('post{n}', result.get('post{n}', 0) + 1))", BEGIN),
    Edit("step pre-hook of the optimizer", "hook{n} = opt.register_step_pre_hook(lambda o, a, k: result.__setitem__('pre{n}', result.get('pre{n}', 0) + 1))", BEGIN),
    Edit("step post-hook that writes weights", "def after{n}(o, a, k):\n    with torch.no_grad():\n        for g in o.param_groups:\n            for p in g['params']: p.mul_(0.99)\nhook{n} = opt.register_step_post_hook(after{n})", BEGIN),
    Edit("step pre-hook that edits gradients", "def before{n}(o, a, k):\n    for g in o.param_groups:\n        for p in g['params']:\n            if p.grad is not None: p.grad.mul_(0.5)\nhook{n} = opt.register_step_pre_hook(before{n})", BEGIN, whole="def before{n}(o, a, k):\n    with whole(gradients=True):\n        for p in [p for g in o.param_groups for p in g['params']]:\n            if p.grad is not None: p.grad.mul_(0.5)\nhook{n} = opt.register_step_pre_hook(before{n})"),
    Edit("hook of the optimizer's state_dict", "hook{n} = opt.register_state_dict_post_hook(lambda o, s: s.__setitem__('more', 1))\nresult['more{n}'] = opt.state_dict().get('more')", BEGIN),
    Edit("hook before the optimizer's state is loaded", "hook{n} = opt.register_load_state_dict_pre_hook(lambda o, s: result.__setitem__('loaded{n}', True))\nopt.load_state_dict(opt.state_dict())", BEGIN),
    Edit("hook of the model's state_dict", "hook{n} = model.register_state_dict_post_hook(lambda m, s, p, l: s.__setitem__('more', torch.ones(1)))\nresult['keys{n}'] = sorted(model.state_dict())\nhook{n}.remove()", BEGIN),
    Edit("hook after the model's state is loaded", "hook{n} = model.register_load_state_dict_post_hook(lambda m, k: result.__setitem__('model loaded{n}', True))\nmodel.load_state_dict(model.state_dict())", BEGIN),
    Edit("global forward hook", "hook{n} = nn.modules.module.register_module_forward_hook(lambda m, a, o: o * 0.9 if isinstance(m, nn.Linear) else None)", "top"),
    Edit("global step hook", "from torch.optim.optimizer import register_optimizer_step_post_hook\nhook{n} = register_optimizer_step_post_hook(lambda o, a, k: result.__setitem__('global{n}', True))", "top"),
)  # fmt: skip

STATES = (
    Edit("the optimizer's state loaded as it is", "opt.load_state_dict(opt.state_dict())", f"top {AFTER}"),
    Edit("the optimizer's state held and loaded", "opt.load_state_dict(start{n})", "end bottom", first="start{n} = copy.deepcopy(opt.state_dict())"),
    Edit("the optimizer's state copied and loaded", "opt.load_state_dict(copy.deepcopy(opt.state_dict()))", f"top {AFTER}"),
    Edit("model and optimizer saved to memory and loaded", "file = io.BytesIO(); torch.save({{'model': model.state_dict(), 'opt': opt.state_dict()}}, file); file.seek(0)\nfound = torch.load(file); model.load_state_dict(found['model']); opt.load_state_dict(found['opt']); del file, found", f"top {AFTER}"),
    Edit("the best weights kept and loaded", "model.load_state_dict(best{n})", "bottom notebook", first="best{n} = copy.deepcopy(model.state_dict())"),
    Edit("the best weights kept in the loop", "best{n} = {{k: v.detach().clone() for k, v in model.state_dict().items()}}", "step end"),
    Edit("the optimizer's state cleared", "opt.state.clear()", f"top {AFTER}"),
    Edit("the optimizer's state of one weight zeroed", "for v in opt.state[{w}].values():\n    if torch.is_tensor(v) and v.dim(): v.zero_()", "step zero end bottom"),
    Edit("the optimizer's state scaled", "for s in opt.state.values():\n    for v in s.values():\n        if torch.is_tensor(v) and v.dim(): v.mul_(0.5)", "step zero end bottom notebook"),
    Edit("the optimizer's state of one weight dropped", "opt.state.pop({w}, None)", "zero end bottom notebook"),
    Edit("the optimizer's state read", "result['momentum{n}'] = [v.abs().sum().item() for v in opt.state[{w}].values() if torch.is_tensor(v)]", "step zero end bottom notebook"),
    Edit("a new optimizer with the old state", "opt{n} = type(opt)(model.parameters(), lr=0.02)\nopt{n}.load_state_dict(opt.state_dict()) if len(opt.param_groups) == 1 else None\nopt = opt{n}", "top notebook"),
    Edit("a new optimizer", "opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)", "top epoch end bottom notebook"),
    Edit("learning rates changed", "for g in opt.param_groups: g['lr'] *= 0.5", f"epoch batch grad {AFTER}"),
    Edit("weight decay changed", "opt.param_groups[0]['weight_decay'] = 0.1", f"epoch {AFTER}"),
    Edit("a key of one's own in a group", "opt.param_groups[0]['tag'] = 'mine'", "setup top end notebook"),
    Edit("a key of one's own used", "for g in opt.param_groups: g['lr'] = 0.02 * g['scale']", "epoch batch", first="for g in opt.param_groups: g['scale'] = 0.5"),
    Edit("the scheduler of a loaded state", "sched{n}.load_state_dict(copy.deepcopy(sched{n}.state_dict())); sched{n}.step()", "end step", first="sched{n} = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)"),
    Edit("lr by a scheduler each step", "sched{n}.step()", "step", first="sched{n} = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)"),
    Edit("lr by a scheduler each epoch", "sched{n}.step()", "end", first="sched{n} = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)"),
    Edit("a scheduler with a lambda", "sched{n}.step()", "step", first="sched{n} = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))"),
    Edit("OneCycleLR", "sched{n}.step()", "step", first="sched{n} = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=60, cycle_momentum=False)"),
    Edit("ReduceLROnPlateau", "sched{n}.step(reduce(loss.item()))", "end", first="sched{n} = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=0.5)"),
    Edit("warmup, then a schedule", "sched{n}.step()", "step", first="sched{n} = torch.optim.lr_scheduler.SequentialLR(opt, [torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[3])"),
)  # fmt: skip

AVERAGES = (
    Edit("EMA by deepcopy", f"{QUIET}for a, p in zip(ema{{n}}.parameters(), model.parameters()): a.mul_(0.9).add_(p, alpha=0.1)", "step zero", first="ema{n} = copy.deepcopy(model).requires_grad_(False)"),
    Edit("EMA by deepcopy, lerp_", f"{QUIET}for a, p in zip(ema{{n}}.parameters(), model.parameters()): a.lerp_(p, 0.1)", "step zero end", first="ema{n} = copy.deepcopy(model)"),
    Edit("EMA by state_dict", f"{QUIET}for k, v in model.state_dict().items():\n        if v.is_floating_point(): ema{{n}}.state_dict()[k].mul_(0.9).add_(v, alpha=0.1)", "step zero", first="ema{n} = copy.deepcopy(model)"),
    Edit("EMA in a dict", "for k, p in model.named_parameters(): ema{n}[k].mul_(0.9).add_(p.data, alpha=0.1)", "step zero", first="ema{n} = {{k: p.detach().clone() for k, p in model.named_parameters()}}"),
    Edit("EMA in a dict, new tensors", "for k, p in model.named_parameters(): ema{n}[k] = 0.9 * ema{n}[k] + 0.1 * p.detach()", "step zero", first="ema{n} = {{k: p.data.clone() for k, p in model.named_parameters()}}"),
    Edit("EMA by _foreach", f"{QUIET}torch._foreach_lerp_([*ema{{n}}.parameters()], [*model.parameters()], 0.1)", "step zero", first="ema{n} = copy.deepcopy(model)"),
    Edit("AveragedModel", "avg{n}.update_parameters(model)", "step zero end", first="avg{n} = torch.optim.swa_utils.AveragedModel(model)"),
    Edit("AveragedModel, EMA", "avg{n}.update_parameters(model)", "step zero", first="avg{n} = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))"),
    Edit("EMA copied back", f"{QUIET}for p, a in zip(model.parameters(), ema{{n}}.parameters()): a.lerp_(p, 0.5); p.copy_(a)", "end bottom notebook", first="ema{n} = copy.deepcopy(model)"),
    Edit("EMA evaluated", "with torch.no_grad(): result['ema{n}'] = ema{n}(X[:8]).abs().sum().item()", "step end bottom notebook", first="ema{n} = copy.deepcopy(model).eval()"),
    Edit("a copy of the model kept", "best{n} = copy.deepcopy(model)", f"top {AFTER}"),
    Edit("copies of the model in a list", "kept{n}.append(copy.deepcopy(model).eval())", "end bottom notebook", first="kept{n} = []"),
    Edit("model, optimizer copied together and trained on", "model, opt = copy.deepcopy((model, opt))", "top notebook", whole="with whole(): model, opt = copy.deepcopy((model, opt))\nmodel, opt = setup(model, opt)"),
)  # fmt: skip

PARTS = (
    Edit("a layer frozen", "{l}.requires_grad_(False)", "setup top epoch end bottom notebook zero"),
    Edit("a layer frozen, then thawed", "{l}.requires_grad_(epoch == 1)", "epoch"),
    Edit("a layer thawed", "{l}.requires_grad_(True)", "epoch end bottom notebook zero batch", first="{l}.requires_grad_(False)"),
    Edit("a layer frozen every other step", "{l}.requires_grad_(i % 2 == 0)", "batch"),
    Edit("requires_grad of one weight", "{w}.requires_grad = epoch > 0", "epoch"),
    Edit("a new head, a new optimizer", "model.head = nn.Linear(model.head.in_features, 3).to(model.head.weight.dtype) if hasattr(model, 'head') else None\nopt = torch.optim.SGD(model.parameters(), lr=0.05)", "top notebook bottom"),
    Edit("a new head, added to the optimizer", "if hasattr(model, 'head'):\n    model.head = nn.Linear(model.head.in_features, 3).to(model.head.weight.dtype)\n    opt.add_param_group({{'params': model.head.parameters(), 'lr': 0.02}})", "top notebook", whole="with whole():\n    if hasattr(model, 'head'):\n        model.head = nn.Linear(model.head.in_features, 3).to(model.head.weight.dtype)\n        opt = torch.optim.SGD(model.parameters(), lr=0.05)"),
    Edit("a head's weight replaced", "{l}.weight = nn.Parameter({l}.weight.detach() * 0.5) if hasattr({l}, 'weight') else None\nopt = torch.optim.SGD(model.parameters(), lr=0.05)", "top notebook"),
    Edit("add_param_group of a frozen layer", "{l}.requires_grad_(True); opt.add_param_group({{'params': [*{l}.parameters()], 'lr': 0.01}})", "top epoch notebook", first="opt = torch.optim.SGD([p for p in model.parameters() if all(p is not q for q in {l}.parameters())], lr=0.05, momentum=0.5)\n{l}.requires_grad_(False)"),
    Edit("an attribute of the model", "model.note{n} = [1, 2]", "top end bottom notebook"),
    Edit("a buffer registered", "model.register_buffer('more{n}', torch.ones(2))", "setup notebook"),
    Edit("a buffer made in the cell", "model.register_buffer('more{n}', torch.ones(2))", "top bottom"),
    Edit("a layer shared anew", "model.extra{n} = {l}", "setup notebook"),
    Edit("weights tied anew", "model.tied{n} = nn.ParameterList([{w}])", "setup notebook"),
    Edit("gradients of a layer off by no_grad", "with torch.no_grad(): out = model(x)", "batch"),
)  # fmt: skip

AROUND = (
    Edit("evaluation", "model.eval()\nwith torch.no_grad(): result.setdefault('eval{n}', []).append(model(X[:8]).abs().sum().item())\nmodel.train()", "top epoch step zero end bottom notebook"),
    Edit("evaluation, inference_mode", "with torch.inference_mode(): result['inference{n}'] = model(X).abs().mean().item()", "step zero end bottom notebook"),
    Edit("evaluation through a loader", "correct{n} = 0\nmodel.eval()\nwith torch.no_grad():\n    for a, b in valid: correct{n} += (model(a).argmax(1) == b).sum().item()\nmodel.train(); result['correct{n}'] = reduce(correct{n}, 'sum')", "end bottom", first="valid = DataLoader(TensorDataset(X, Y), batch_size=16)"),
    Edit("evaluation that leaves eval on", "model.eval()", "top end bottom notebook"),
    Edit("outputs kept", "result['outputs{n}'] = model(X[:4]).detach()", "step zero end bottom notebook"),
    Edit("losses collected", "history.append(reduce(loss.item()))", "loss grad step zero"),
    Edit("losses collected with log", "log(loss=loss)", "step zero"),
    Edit("model moved", "model.to('cpu')", f"top batch loss grad {AFTER}"),
    Edit("model cast to what it is", "model.to({w}.dtype) if not {w}.is_complex() else None", f"top {AFTER}"),
    Edit("a skipped step", "if i == 1:\n    opt.zero_grad(); continue", "grad"),
    Edit("a stop in the middle", "if i == 2: break", "zero batch"),
    Edit("a seed", "torch.manual_seed(3)", "setup top epoch notebook"),
    Edit("the saliency of an input", "a = X[:2].clone().requires_grad_() if X.is_floating_point() else X[:2]\nresult['saliency{n}'] = torch.autograd.grad(model(a).sum(), a)[0].abs().sum().item() if a.requires_grad else 0", "end bottom notebook", smooth=True),
    Edit("a jacobian by torch.func", "result['jacobian{n}'] = torch.func.jacrev(model)(X[:2]).abs().sum().item() if X.is_floating_point() else 0", "end bottom notebook", smooth=True),
    Edit("gradients by torch.func", "grads{n} = torch.func.grad(lambda w: torch.func.functional_call(model, w, (X[:4],), tie_weights=False).square().mean())({{k: p.detach() for k, p in model.named_parameters()}})\nresult['func{n}'] = sum(g.abs().sum().item() for g in grads{n}.values())", "end bottom notebook", smooth=True),
    Edit("an optimizer step too many", "opt.step()", "step zero"),
    Edit("a training mode set", "model.train()", "epoch batch"),
    Edit("a barrier", "barrier()", "end"),
)  # fmt: skip

KINDS: tuple[tuple[int, tuple[Edit, ...]], ...] = (
    (6, WRITES), (5, READS), (3, LOSSES), (5, GRADIENTS), (4, HOOKS), (5, STATES), (4, AVERAGES), (4, PARTS), (4, AROUND),
)  # fmt: skip
"""How often each kind is drawn."""
