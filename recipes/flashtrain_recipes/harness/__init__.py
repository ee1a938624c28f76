"""The one harness of all benchmarks: a family gives its cases, its baselines and the columns of its tables.

baseline.py: what a case and a baseline are. turns.py: one case measured, baselines taking turns. clock.py: time and
memory on a GPU or a CPU. rows.py: rows, and comparisons between them. benchmark.py: a run, case after case.
run_folder.py: what it leaves on disk, also when it is stopped.
spec.py: mode=benchmark. settings.py: the settings of all benchmarks.
"""
