"""Keeps what is known of a run, while it goes on and afterwards, in bounded memory; views show it."""
