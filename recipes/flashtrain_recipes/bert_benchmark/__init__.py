"""Whole training steps of BERT, flashtrain's next to Hugging Face's: `python -m flashtrain recipe=bert-speed`."""
