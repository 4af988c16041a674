"""The parts of the strategy `sharded`."""
