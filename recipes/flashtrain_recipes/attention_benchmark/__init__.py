"""Measurements of attention alone: `python -m flashtrain recipe=attention-benchmark`.

cases.py and baselines/ say what is measured, turns.py how.
"""
