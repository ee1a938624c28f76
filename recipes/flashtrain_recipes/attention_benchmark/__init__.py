"""Measurements of attention: `python -m flashtrain recipe=attention-benchmark`; and the words and settings of all
benchmarks (names.py, settings.py), and which one a recipe names (start.py).

cases.py: what is measured. inputs.py: tensors and masks. peers/: the implementations, ours among them. reference.py:
the same in float64. measure.py lets every implementation take turns at one case; run.py is the benchmark; figures.py
shows what it found, beside the paper's values.
"""
