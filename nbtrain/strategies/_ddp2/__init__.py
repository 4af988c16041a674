"""The parts of the strategy `ddp2`."""
