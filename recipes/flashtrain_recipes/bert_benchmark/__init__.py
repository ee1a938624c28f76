"""Benchmark of BERT's training steps, by flashtrain and Hugging Face: `python -m
flashtrain recipe=bert-speed`."""
