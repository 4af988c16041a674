"""`nbtrain.history()` and `%distributed history`: what earlier runs were, and what they logged."""
