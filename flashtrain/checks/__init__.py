"""Checks that a model's tokens see what they should, and nothing else: flashtrain.check,
mode=check."""
