"""Measurements: of attention (`python -m flashtrain recipe=attention-benchmark`), of attention over several devices
(context/), and of whole training steps (steps/).

names.py and settings.py say what can be asked for; start.py picks the benchmark that a recipe names; session.py is the
frame of a run that measures.

Attention: presets.py turns the settings into cases (case.py: one shape, mask and set of features; masks.py: which pairs
it computes); inputs.py draws the tensors; peers/ holds the implementations, ours among them; reference.py computes the
same in float64; clock.py times; measure.py lets every implementation take turns at one case; run.py is the whole run;
figures.py and published.py draw it beside the paper's values.
"""
