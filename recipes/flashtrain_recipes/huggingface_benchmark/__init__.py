"""Training steps of transformers' decoders: `python -m flashtrain recipe=hf-speed`; at long contexts recipe=hf-long.

cases.py: models of published shapes with random weights. baselines/ and run.py: flashtrain's step and transformers'
own, in turns. long_steps.py and long_rank.py: steps at long contexts, each case in processes of its own.
"""
