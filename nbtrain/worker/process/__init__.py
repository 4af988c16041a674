"""A rank's process: start, connections, interrupts, environment."""
