"""Measurements of attention: `python -m flashtrain recipe=attention-benchmark`.

cases.py: what is measured. inputs.py: tensors and masks. baselines/: the implementations, ours among them.
reference.py: the same in float64. turns.py: how a case is measured; warm.py calls everything once before
rows=as-called. measure.py: the benchmark. figures.py: what was found, beside the paper's values.
"""
