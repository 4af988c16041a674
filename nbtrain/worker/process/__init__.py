"""A rank's process: how it starts, what it is connected to, how it ends."""
