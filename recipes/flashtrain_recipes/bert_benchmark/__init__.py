"""BERT's training steps, timed beside those of Hugging Face's BERT and of plain PyTorch."""
