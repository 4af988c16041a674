"""Blocks of `with whole(…)`: each is to be right under every strategy, as in one process, where it does nothing."""

# ruff: noqa: E501 — a line of a cell is one line
from __future__ import annotations

from tests.fuzz.common_edits import IN_PLACE_OF, WHOLE, CommonEdit

__all__ = ["IN_PLACE_OF", "MORE", "WITHOUT"]

MORE = (
    CommonEdit("weights written", "with whole(model), torch.no_grad():\n    model[0].weight[1, 2:4] = 0.25; u, _, v = torch.linalg.svd(model[2].weight, full_matrices=False); model[2].weight.copy_(u @ v)", "epoch", notebook=WHOLE),
    CommonEdit("a forward inside", "with whole(model), torch.no_grad(): result['all'] = model(X).abs().mean().item()", "epoch", notebook=WHOLE),
    CommonEdit("batch norm of all ranks, in training", "with whole(model), torch.no_grad():\n    norm = nn.SyncBatchNorm(6); norm(X); result['variance'] = norm.running_var.clone()\ndel norm", "epoch", notebook=WHOLE),
    CommonEdit("one of two layers", "with whole(model[4]):\n    with torch.no_grad(): model[4].weight[0].clamp_(-0.1, 0.1); result['rank'] = int(torch.linalg.matrix_rank(model[4].weight))", "between", notebook=WHOLE),
    CommonEdit("parameters by themselves", "for q in model.parameters():\n    with whole(q) as q, torch.no_grad(): q.div_(q.norm(dim=0, keepdim=True).clamp(min=1))", "epoch", notebook=WHOLE),
    CommonEdit("a list of parameters from before", "with whole(held), torch.no_grad():\n    for q in held: q.sub_(q.mean())", "between", "held = [p for p in model.parameters() if p.ndim > 1]", notebook=WHOLE),
    CommonEdit("nothing named", "with whole():\n    for s in opt.state.values(): s['exp_avg_sq'].clamp_(min=1e-6)\n    with torch.no_grad(): model[0].bias.fill_(0.1)", "between", notebook=WHOLE),
    CommonEdit("nested", "with whole(model[0]):\n    with whole(model[2], opt):\n        with torch.no_grad(): model[2].weight.add_(model[0].weight.sum())\n        opt.state[model[2].weight]['exp_avg'].zero_()\n    with torch.no_grad(): model[0].weight[0] = 0", "epoch", notebook=WHOLE),
    CommonEdit("in a function that returns", "result['f'] = f()", "between", "def f():\n    with whole(model):\n        with torch.no_grad(): model[0].weight[0, 0] += 1\n        return model[0].weight[0, 0].item()", notebook=WHOLE),
    CommonEdit("in a generator", "result['g'] = list(g())", "epoch", "def g():\n    with whole(model):\n        for p in model.parameters(): yield p.detach().sum().item()", notebook=WHOLE),
    CommonEdit("a generator that is closed", "h = g(); result['g'] = next(h); h.close()", "epoch", "def g():\n    with whole(model[0]), torch.no_grad():\n        model[0].weight[0, 0] = 0.5; yield 1; yield 2", notebook=WHOLE),
    CommonEdit("an exception inside", "try:\n    with whole(model), torch.no_grad(): model[0].weight[0] = 0.2; 1 / 0\nexcept ZeroDivisionError: result['caught'] = True", "between", notebook=WHOLE),
    CommonEdit("in inference mode", "with torch.inference_mode():\n    with whole(model): model[0].weight.mul_(0.9); result['s'] = model[0].weight.sum().item()", "between", notebook=WHOLE),
    CommonEdit("one object for two blocks, one in the other", "with w:\n    with w: model[0].weight.data.mul_(0.9)\n    model[2].weight.data.mul_(0.9)", "between", "w = whole(model)", notebook=WHOLE),
    CommonEdit("drawn anew", "with whole(model[2]): model[2].reset_parameters(); nn.init.orthogonal_(model[2].weight)", "before", notebook=WHOLE),
    CommonEdit("drawn anew, where ranks draw apart", "with whole(model): model[2].weight.data.normal_(0, 0.3); model[0].bias.data.add_(torch.randn_like(model[0].bias))", "between", "torch.manual_seed(3)", notebook=WHOLE),
    CommonEdit("numbers drawn by their shape, where ranks draw apart", "with whole(model), torch.no_grad():\n    model.register_buffer('r', torch.randn(3))\n    for p in model.parameters(): p.add_(0.01 * torch.randn(p.shape))", "epoch", notebook=WHOLE),
    CommonEdit("an optimizer that goes on from the state of another", "with whole(model, opt):\n    new = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4); new.load_state_dict(opt.state_dict()); opt = new\ndel new", "epoch", notebook=WHOLE),
    CommonEdit("a layer and its optimizer made in the loop", "if epoch == 0:\n    with whole(model, opt): model[4] = nn.Linear(8, 3); opt = torch.optim.SGD(model.parameters(), lr=0.05)", "epoch", notebook=WHOLE),
    CommonEdit("the memory of two exchanged", "with whole(model): model[0].bias.data, model[2].bias.data = model[2].bias.data, model[0].bias.data", "epoch", notebook=WHOLE),
    CommonEdit("other memory", "with whole(model): w = model[2].weight; w.data = w.data.t(); model[0].bias.data = w.data[1].clone()", "epoch", notebook=WHOLE),
    CommonEdit("other memory, beside gradients", "with whole(model, gradients=True): model[0].bias.data = model[0].bias.data * 0.9", "gradients", notebook=WHOLE),
    CommonEdit("state dicts", "with whole(): sd, od = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())", "epoch", notebook=WHOLE),
    CommonEdit("loaded inside", "with whole(): model.load_state_dict(sd); opt.load_state_dict(od)", "after", "with whole(): sd, od = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())", notebook=WHOLE),
    CommonEdit("state thrown away", "with whole(opt): opt.state.clear()", "epoch", notebook=WHOLE),
    CommonEdit("states that change places", "with whole(opt):\n    b = opt.state; p, q, r = model[0].bias, model[2].bias, model[2].weight\n    b[p]['exp_avg'], b[q]['exp_avg'] = b[q]['exp_avg'], b[p]['exp_avg']\n    b[r]['exp_avg'], b[r]['exp_avg_sq'] = b[r]['exp_avg_sq'], b[r]['exp_avg'].abs()", "epoch", notebook=WHOLE),
    CommonEdit("entries of states that change places", "with whole(opt): p, q = model[0].bias, model[2].bias; opt.state[p], opt.state[q] = opt.state[q], opt.state[p]", "epoch", notebook=WHOLE),
    CommonEdit("states loaded in another order", "with whole(opt):\n    sd = opt.state_dict(); sd['state'][1], sd['state'][3] = sd['state'][3], sd['state'][1]; opt.load_state_dict(sd)", "epoch", notebook=WHOLE),
    CommonEdit("gradients of some, and None", "with whole(model[0], gradients=True):\n    model[0].weight.grad = None if i % 2 else model[0].weight.grad.sign()", "gradients", notebook=WHOLE),
    CommonEdit("gradients that change places", "with whole(model, gradients=True): model[0].bias.grad, model[2].bias.grad = model[2].bias.grad, model[0].bias.grad", "gradients", notebook=WHOLE),
    CommonEdit("in a hook before each step", "", "between", notebook=WHOLE + "\ndef pre(o, a, k):\n    with whole(model), torch.no_grad(): model[0].weight.mul_(0.99)\nhook = opt.register_step_pre_hook(pre)"),
    CommonEdit("in a hook after each step", "", "between", notebook=WHOLE + "\ndef post(o, a, k):\n    with whole(model), torch.no_grad(): model[0].weight.mul_(0.99)\nhook = opt.register_step_post_hook(post)"),
    CommonEdit("a loader that shuffles, inside", "with whole(model), torch.no_grad(): result['e'] = sum(model(a).abs().mean().item() for a, b in shuffled)", "epoch", notebook=WHOLE + "\nshuffled = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)"),
    CommonEdit("gradients of inputs, a jacobian and a hessian", "with whole(model):\n    a = X[:3].clone().requires_grad_(); result['slope'] = torch.autograd.grad(model(a).sum(), a)[0].abs().sum().item()\n    result['j'] = torch.func.jacrev(model)(X[0]).sum().item(); result['h'] = torch.func.hessian(lambda a: model(a).sum())(X[0]).abs().sum().item()", "epoch", notebook=WHOLE),
    CommonEdit("a penalty's gradients, by torch.autograd.grad", "with whole(model, gradients=True):\n    for p, g in zip(model.parameters(), torch.autograd.grad(sum(q.square().sum() for q in model.parameters()), [*model.parameters()])): p.grad.add_(g, alpha=0.01)", "gradients", notebook=WHOLE),
    CommonEdit("between a forward and its backward", "with whole(): result['rank'] = torch.linalg.svdvals(model[2].weight).sum().item() + model[0].weight.norm().item()", "loss", notebook=WHOLE),
    CommonEdit("a copy called with other weights", "loss = loss + 0.1 * torch.func.functional_call(twin, {k: v * 0.9 for k, v in model.named_parameters()}, (x,)).square().mean()", "loss", "with whole(model): twin = copy.deepcopy(model)", notebook=WHOLE),
    CommonEdit("a model and its optimizer copied, and trained", "model, opt = setup(model, opt)", "before", "with whole(): model, opt = copy.deepcopy((model, opt))", notebook=WHOLE),
    CommonEdit("a weight beside the model", "loss = loss * torch.exp(-model.tail) + model.tail", "loss", "with whole(model, opt):\n    if not hasattr(model, 'tail'): model.tail = nn.Parameter(torch.zeros(())); opt.add_param_group({'params': [model.tail], 'lr': 0.01})", notebook=WHOLE),
    CommonEdit("a compiled model", "with whole(model), torch.no_grad(): result['all'] = compiled(X).abs().mean().item()", "epoch", "compiled = torch.compile(model, backend='eager')", notebook=WHOLE),
    CommonEdit("pruned, and a new optimizer", "with whole(model, opt): prune.l1_unstructured(model[2], 'weight', 0.3); opt = torch.optim.SGD(model.parameters(), lr=0.05)", "before", notebook=WHOLE + "\nfrom torch.nn.utils import prune"),
    CommonEdit("untied, and a new optimizer", "with whole(model, opt): model[4].weight = nn.Parameter(model[2].weight.detach().clone()); opt = torch.optim.SGD(model.parameters(), lr=0.05)", "before", notebook=WHOLE + "\nmodel[4] = nn.Linear(8, 8); model[4].weight = model[2].weight; opt = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)"),
    CommonEdit("adapters, and an optimizer of them alone", "with whole(model, opt):\n    model.requires_grad_(False); model[2] = Lora(model[2]); opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, eps=1e-4)", "before", notebook=WHOLE + "\nclass Lora(nn.Module):\n    def __init__(self, base):\n        super().__init__(); self.base = base; self.a = nn.Parameter(torch.randn(2, 8) * 0.1); self.b = nn.Parameter(torch.zeros(8, 2))\n    def forward(self, x): return self.base(x) + x @ self.a.T @ self.b.T"),
    CommonEdit("add_param_group inside", "with whole(model, opt):\n    if epoch == 0 and len(opt.param_groups) == 1: opt.add_param_group({'params': [*model[0].parameters()], 'lr': 0.02})", "epoch", notebook=WHOLE + "\nopt = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=0.01, eps=1e-4)"),
    CommonEdit("a state dict that is taken out, and loaded below", "model.load_state_dict(sd)", "epoch", "with whole(model): sd = model.state_dict()", WHOLE),
    CommonEdit("one that is written below", "with torch.no_grad():\n    for v in sd.values(): v.mul_(0.9)\n    result['n'] = sum(v.norm().item() for v in sd.values())", "epoch", "with whole(model): sd = model.state_dict()", WHOLE),
    CommonEdit("one that a notebook is left with", "del x, y", "after", "with whole(model): sd = model.state_dict()", WHOLE),
    CommonEdit("parameters, rows and a transposed weight that are taken out", "with torch.no_grad():\n    for p in held[:2]: p.mul_(0.9)\n    held[2][1] = 0.5; result['n'] = [p.norm().item() for p in held]", "epoch", "with whole(model): held = [model[0].weight, model[2].weight.data, model[2].bias.data[2:5], model[4].weight.detach().T]", notebook=WHOLE),
    CommonEdit("an optimizer's state dict that is taken out, and loaded below", "if epoch == 0:\n    with whole(opt): od = opt.state_dict()\nelse: opt.load_state_dict(od)", "epoch", notebook=WHOLE),
)  # fmt: skip

WITHOUT = (
    CommonEdit("a model that the cell has compiled", "(0.1 * compiled(x).square().mean()).backward()", "loss", "compiled = torch.compile(model, backend='eager')"),
    CommonEdit("forms of weights and views", "result['forms'] = [(p.stride(), p.is_contiguous(), p.data.mT.stride() if p.ndim > 1 else 0) for p in model.parameters()]", "before"),
    CommonEdit("forms of gradients", "result['forms'] = [(p.grad.stride(), p.grad.stride(0), p.grad.is_contiguous()) for p in model.parameters()]", "gradients"),
    CommonEdit("a model moved to where it is, beside gradients", "model.to('cpu').float()", "gradients"),
    CommonEdit("a state dict of tied weights, written", "with torch.no_grad():\n    for v in model.state_dict().values(): v.mul_(0.9)", "epoch", notebook="model[4] = nn.Linear(8, 8); model[4].weight = model[2].weight; opt = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)"),
    CommonEdit("a state dict written, and the weights after it", "with torch.no_grad():\n    for v in model.state_dict().values(): v.mul_(0.9)\n    for p in model.parameters(): p.add_(0.01)\n    model.state_dict()['2.bias'].add_(0.1)\n    result['s'] = model.state_dict()['2.bias'].sum().item()\nresult['n'] = model[0].weight.norm().item()", "epoch"),
    CommonEdit("a state dict held, and both written in turns", "held = model.state_dict()\nwith torch.no_grad():\n    model[0].weight.mul_(0.9); held['0.weight'].add_(0.01); model[0].weight.mul_(0.9)\n    held['0.weight'].mul_(1.1); result['s'] = held['0.weight'].norm().item()\ndel held", "epoch"),
    CommonEdit("a state dict whose weight gets other memory", "held = model.state_dict(); model[0].weight.data = model[0].weight.data * 0.9\nwith torch.no_grad(): held['0.weight'].zero_()\ndel held", "epoch"),
    CommonEdit("a state dict in inference mode", "with torch.inference_mode():\n    held = model.state_dict(); held['0.weight'].mul_(0.9); result['s'] = held['0.weight'].norm().item()\nresult['n'] = model[0].weight.norm().item(); del held", "epoch"),
    CommonEdit("batch norm of all ranks, of a batch that all see", "norm = nn.SyncBatchNorm(6)\nwith torch.no_grad(): norm(X); norm(x); result['variance'] = norm.running_var.clone()\ndel norm", "after"),
    CommonEdit("a closure, where a cell has left gradients", "closure()", "after", "def closure():\n    opt.zero_grad(); loss = F.cross_entropy(model(X), Y); loss.backward(); return loss\nopt.step(closure); opt.zero_grad()"),
)  # fmt: skip
"""Right under every strategy without a block, too."""
