"""Measurements of attention: `python -m flashtrain recipe=attention-benchmark`; and of all benchmarks the settings
(settings.py) and the mode, with the rules of who heeds which (spec.py).

cases.py: what is measured. inputs.py: tensors and masks. peers/: the implementations, ours among them. reference.py:
the same in float64. measure.py lets every implementation take turns at one case, and is the benchmark; warm.py calls
everything once before rows=as-called; figures.py shows what was found, beside the paper's values.
"""
