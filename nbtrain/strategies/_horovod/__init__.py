"""The parts of the strategy `horovod`."""
