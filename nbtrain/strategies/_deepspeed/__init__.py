"""The parts of the strategy `deepspeed`. DeepSpeed itself is imported where it is used, and nowhere before."""
