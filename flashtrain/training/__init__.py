"""The parts of a training run around its model: optimisers, checkpoints, callbacks, memory estimates and loggers.

Each works in any Lightning program; none knows Hydra.
"""
