"""Gradients that a cell sees or makes by itself, before ranks have averaged them.

gradients_between_cells.py  backward in one cell, step in the next; the kernel's side: sync/waiting_gradients.py
by_autograd_grad.py         gradients by `torch.autograd.grad`
local_gradient_hooks.py     hooks that see a rank's own gradient
redundant_work.py           all ranks compute the same
summed_losses.py            losses whose mean over ranks is not that of one process
"""
