"""Measurements of training transformers' decoders: `python -m flashtrain recipe=hf-speed` and recipe=hf-long.

cases.py: models of true shapes with random weights. contenders.py: flashtrain's step and transformers' own, on the same
weights; run.py lets them take turns. long_steps.py: long steps by Lightning's Trainer, each in processes of its own, on
one GPU or several, and what they say of the largest context.
"""
