"""`nbtrain.history()` and `%distributed history`: keeps what earlier runs were, and what they logged."""
