"""What is known of a run, and what shows it; never loads torch.

feed/       keeps what is known of a run, in bounded memory
views/      shows a run while it goes on
runs/       earlier runs: `nbtrain.history()`
beacon/     shows a kernel's ranks to other processes
server/     the page of all pools, served by Jupyter's server
svg/        draws curves as one SVG
"""
