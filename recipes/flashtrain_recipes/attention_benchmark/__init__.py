"""Measurements of attention: `python -m flashtrain recipe=attention-benchmark`; and of all benchmarks the settings
(settings.py) and the mode, with the rules of who heeds which (spec.py).

cases.py: what is measured. inputs.py: tensors and masks. peers/: the implementations, ours among them. reference.py:
the same in float64. one_case.py lets every implementation take turns; warm.py calls everything once before
rows=as-called; measure.py is the benchmark; figures.py shows what was found, beside the paper's values.
"""
