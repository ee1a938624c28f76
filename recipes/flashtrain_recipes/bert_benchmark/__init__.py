"""recipe=bert-speed: whole training steps of BERT, flashtrain beside Hugging Face.

cases.py: a BERT on full rows or on sequences of a text's lengths. batches.py: how these become batches. baselines/: by
which implementations. run.py: the benchmark, on step_benchmark.
"""
