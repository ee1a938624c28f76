"""One attention layer over several devices: `python -m flashtrain recipe=long-context-benchmark`.

cases.py says what is measured, baselines/ by whom. launch.py starts the ranks, which go through the cases together;
ranks.py is what each of them is, turns.py one case on all of them, passes.py the two passes of one baseline; rows.py:
what is found. run.py is the benchmark, as the command sees it, and shows what it found.
"""
