"""Measurements of whole training steps: `python -m flashtrain recipe=gpt2-speed` and recipe=context-speed.

case.py: one model at one context and precision of weights. training_step.py: forward, backward, clipping and optimiser
of any implementation. contenders.py: the implementations, of which plain_gpt.py (PyTorch alone), hugging_face.py and
ours.py (what recipe=gpt2 trains, with the memory settings that memory_choice.py gives it) are the kinds. measure.py
lets them take turns; command_cost.py runs the command itself beside the bare loop; run.py is the whole run; tables.py
and figures.py show what it found, beside the paper's values.
"""
