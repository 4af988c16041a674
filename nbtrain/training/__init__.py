"""What goes on around a cell's loop on a rank: steps, data, precision, gradients, checkpoints. `runtime.py` owns it."""
