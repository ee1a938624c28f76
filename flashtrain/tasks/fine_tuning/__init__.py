"""task=fine_tuning: BERT with a head for labels of whole texts or of their tokens (recipes finetune, long-document).

settings.py: `finetune.*`. splits.py: documents of each part, made up, of files or of a dataset. build.py: data, model
and task of the settings; steps.py: what a step holds. run.py: one training. plan.py, rows.py, evaluate.py, weights.py:
as masked_text has them. study.py: a training for each context, with figures.py: score against context.
"""
