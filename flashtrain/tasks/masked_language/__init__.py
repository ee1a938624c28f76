"""task=masked_language_model: BERT trained to find masked tokens (recipe=bert, bert-lamb)."""
