"""What all benchmarks share. run.py: a run of any of them, under a time limit; a benchmark gives it cases and measures
one at a time. measuring.py: clocks, the time that a case may take, whose turn it is.
"""
