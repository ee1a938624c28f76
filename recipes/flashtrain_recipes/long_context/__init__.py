"""What a longer context is worth: `python -m flashtrain recipe=gpt2-long`, and `mode=passkey`.

spec.py says what can be asked for. evaluate.py chooses held-out text and has a run's model predict the same last
tokens of each window with as much before them as its context holds; compare.py turns losses into rows with intervals, a
verdict and the paper's values; study.py is the comparison, by context_study.py, and shows them. passkey_run.py hides a
number in a long text and asks for it.
"""
