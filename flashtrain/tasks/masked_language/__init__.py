"""task=masked_language_model: BERT trained to find masked tokens (recipe=bert), and its speed (recipe=bert-speed).

settings.py: `bert.*` and `masked.*`. steps.py: what a step holds. build.py: model, data and task of the settings.
run.py: one training. plan.py, rows.py, evaluate.py: mode=plan, summary rows, mode=evaluate and export. weights.py: a
trained BERT back from a run, an export or Hugging Face. speed.py with speed_case.py, speed_batches.py,
speed_contenders.py and speed_tables.py: whole training steps beside Hugging Face's BERT.
"""
