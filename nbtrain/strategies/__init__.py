"""What ranks do together to train one model: one package for each strategy, on what they share (`kit/`)."""
