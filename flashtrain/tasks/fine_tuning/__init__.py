"""task=fine_tuning: BERT with a head for labels of whole texts or of their tokens (recipes finetune, long-document).

settings.py: its settings. spec.py: what a run asks of the task. splits.py: documents of each part, made up, of files or
of a dataset. prepare.py: one training and mode=plan. evaluate.py: mode=evaluate and export.
"""
