"""Benchmark of attention alone: `python -m flashtrain recipe=attention-benchmark`.

cases.py and baselines/ define what is measured, turns.py how.
"""
