"""The parts of the strategy `xla`."""
