"""Benchmark of one attention layer over several devices: `python -m flashtrain
recipe=long-context-benchmark`.

cases.py and baselines/ define what is measured; run.py starts the ranks (launch.py), which measure
(turns.py, passes.py).
"""
