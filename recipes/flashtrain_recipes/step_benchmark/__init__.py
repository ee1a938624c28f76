"""Benchmarks of whole training steps: `python -m flashtrain recipe=gpt2-speed`
and recipe=context-speed.

cases.py, training_step.py and turns.py serve every model; the rest is GPT-2's.
"""
