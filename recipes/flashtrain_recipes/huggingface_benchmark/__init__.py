"""Training steps of transformers' decoders: `python -m flashtrain recipe=hf-speed`; at long contexts recipe=hf-long."""
