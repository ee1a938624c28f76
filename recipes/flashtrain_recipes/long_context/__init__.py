"""What a longer context is worth: `python -m flashtrain recipe=gpt2-long`, and `mode=passkey`.

settings.py says what can be asked for. windows.py chooses held-out text, scoring.py has a model predict the same last
tokens of each window with as much before them as its context holds, bootstrap.py gives intervals over documents,
compare.py turns losses into rows with a verdict, published.py holds the paper's Table 4, tables.py and figures.py show
both; evaluate.py scores a run; study.py is the whole comparison: train each length in a process of its own, score,
report. passkey.py hides a number in a long text and asks for it; passkey_run.py is that mode.
"""
