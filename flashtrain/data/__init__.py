"""Text to batches: where text comes from, how it becomes tokens on disk, and how tokens become packed samples.

In the order the text travels: `text_files` (FilesSource: files to documents), `tokenizers` (make_tokenizer; the kinds
are in `bpe`, `wordpiece` and `huggingface_tokenizer`, on `library_tokenizer`), `token_cache` (open_or_build,
OpenTokens), `packing` (split_documents, PackedSamples, Batch), `loader` (StepSampler, ResumableLoader) and `datamodule`
(TextDataModule), the LightningDataModule that puts them together and is all that most programs need.

Text may come otherwise: `sources` says what a source is and has the standard library's, `hub_source` (HubSource) reads
datasets. So may tokens: `token_files` (TokenFiles: somebody else's), `mixture` (MixtureSource: several sources by
weight), `streaming` and `text_stream` (StreamingDataModule: without a token file).

Masked language models read the same token file in samples of their real lengths: `masking` (Pieces, split_pieces,
mask_tokens, MaskedBatch), `masked_samples` (MaskedSamples), `token_budget` (Cost, share_out, TokenBudgetPlan),
`token_budget_sampler` (TokenBudgetSampler) and `masked_datamodule` (MaskedTextDataModule), which puts these together.

Conversations are rows of a `chat_source` (ChatFiles, ChatDataset, ChatSource), become tokens with marks by a
`chat_template` (ChatTemplate), and rows with labels by `chat_samples` (ChatSamples); `chat_datamodule` (ChatDataModule)
puts these together.

Classifiers read `labelled_rows` of files or a dataset as `labelled_documents` (LabelledDocuments, LabelledSamples), or
made-up `cue_documents` (CueDocuments, best_micro_f1). Those of sequences read `sequences` (Sequences, SequenceSource,
SequenceDataModule).
"""
