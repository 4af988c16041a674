"""The widget that a strategy is chosen in."""
