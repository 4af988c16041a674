"""The parts of the strategy `dp`."""
