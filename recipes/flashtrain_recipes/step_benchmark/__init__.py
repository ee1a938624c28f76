"""Measurements of whole training steps: `python -m flashtrain recipe=gpt2-speed` and recipe=context-speed.

cases.py: a model at a context and batch. training_step.py: one optimiser step, and what a baseline is that makes them.
baselines/: those of GPT-2. turns.py: how a case is measured, of any model; run.py: the benchmark of GPT-2, and what
those of BERT, of transformers' decoders and of the Long Range Arena have in common with it. command_cost.py: the
training command beside the bare loop. plain_training.py: PyTorch alone. figures.py: comparisons, tables, the figure.
"""
