"""Text to batches: where text comes from, how it becomes tokens on disk, and how tokens become packed samples.

Public names, in the order the text travels: `sources` (TextSource, StandardLibrarySource, FilesSource, HubSource,
make_source), `tokenizers` (Tokenizer, TokenizerSpec, ByteTokenizer, BPETokenizer, gpt2_tokenizer, make_tokenizer,
load_tokenizer), `token_cache` (TokenCache, open_or_build), `split` (Split, split_documents), `packing`
(PackedSamples), `sampler` (StepSampler), `loader` (ResumableLoader), `batch` (Batch) and `datamodule`
(TextDataModule), the LightningDataModule that puts them together and is all that most programs need.
"""
