"""One attention layer over several devices: `python -m flashtrain recipe=long-context-benchmark`.

cases.py and baselines/ say what is measured; run.py starts ranks (launch.py) that measure it (turns.py, passes.py).
"""
