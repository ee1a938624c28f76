"""Text to batches: where text comes from, how it becomes tokens on disk, and how tokens become packed samples.

In the order the text travels: `text_files` (FilesSource, TextReader; `sources` says what any source is and has the
standard library's, `hub_source` has HubSource), `tokenizers`, `bpe`,
`wordpiece` and `huggingface_tokenizer` (Tokenizer, TokenizerSpec, ByteTokenizer, BPETokenizer, WordPieceTokenizer,
gpt2_tokenizer, huggingface_tokenizer, make_tokenizer, load_tokenizer), `token_builder` and `token_cache` (TokenCache,
open_or_build), `packing` (Split, split_documents, PackedSamples, Batch), `loader` (StepSampler, ResumableLoader) and
`datamodule` (TextDataModule), the LightningDataModule that puts them together and is all that most programs need.

Tokens may come otherwise, too: `token_files` (TokenFiles: somebody else's), `mixture` (MixtureSource: several sources
by weight), `streaming` and `text_stream` (StreamingDataModule: without a token file).

Masked language models read the same token file in samples of their real lengths: `masking` (Pieces, split_pieces,
mask_tokens, MaskedBatch), `masked_samples` (MaskedSamples), `token_budget` (Cost, share_out, TokenBudgetPlan),
`token_budget_loader` (TokenBudgetLoader) and `masked_datamodule` (MaskedTextDataModule), which puts these together.

Conversations are rows of a `chat_source` (ChatFiles, ChatDataset, ChatSource), become tokens with marks by a
`chat_template` (ChatTemplate), and rows with labels by `chat_samples` (ChatSamples); `chat_datamodule` (ChatDataModule)
puts these together.

Classifiers read `labelled_rows` of files or a dataset as `labelled_documents` (LabelledDocuments, LabelledSamples), or
made-up `cue_documents` (CueDocuments, best_micro_f1). Those of sequences read `sequences` (Sequences, SequenceSource,
SequenceDataModule).
"""
