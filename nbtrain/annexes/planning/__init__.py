"""Estimates what training a model takes before it is trained: a profile of the model, and a plan for each strategy."""
