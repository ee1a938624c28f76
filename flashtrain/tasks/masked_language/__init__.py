"""task=masked_language_model: BERT trained to find masked tokens (recipe=bert, bert-lamb).

settings.py: its settings. spec.py: what a run asks of the task. build.py: model, data and task of the
settings, and a trained BERT back from a run or an export. prepare.py: one training, mode=plan, evaluate and export.
"""
