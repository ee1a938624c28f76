"""task=fine_tuning: BERT with a head for labels of whole texts or of their tokens (recipes
finetune, long-document)."""
