"""Text, tokens, conversations and labelled samples become packed, resumable batches.

A text travels from a source (`sources.TextSource`) through a tokenizer (`tokenizers`) to
tokens on disk (`token_cache`), which `packing` cuts into samples and `loader` reads in an
order that can be resumed. For each kind of training a LightningDataModule, such as
TextDataModule, puts these together.
"""
