"""The next token of a text: the loss of decoders."""
