"""`nbtrain.Trainer`: for a module with a `training_step` and no loop.

It writes the loop that a user would have written (`trainer.loop()` shows it) and runs it as a cell, so that strategies,
precision, checkpoints, Stop and the dashboard are those of every cell. Arguments and methods have Lightning's names.
"""
