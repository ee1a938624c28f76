"""Measurements of whole training steps: `python -m flashtrain recipe=gpt2-speed` and recipe=context-speed.

training_step.py: what has steps: forward, backward, clipping and optimiser of any implementation; and GPT-2 as a case.
measure.py lets implementations take turns, and run.py is the benchmark of them, for GPT-2 here, for BERT and the Long
Range Arena elsewhere. contenders.py: by which implementations; plain_training.py is PyTorch alone. command_cost.py runs
the command itself beside the bare loop; figures.py shows what was found, beside the paper's values.
"""
