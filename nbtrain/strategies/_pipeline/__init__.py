"""The parts of the strategy `pipeline`."""
