"""Benchmarks of training steps of transformers' decoders: recipe=hf-speed, and at long
contexts recipe=hf-long."""
