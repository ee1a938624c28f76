"""task=language_model: decoders trained to predict the next token of a text."""
