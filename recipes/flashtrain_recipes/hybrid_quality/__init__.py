"""Decoders whose layers differ, trained on the same tokens and compared."""
