"""Text to batches: where text comes from, how it becomes tokens on disk, and how tokens become packed samples.

Public names, in the order the text travels: `sources` (TextSource, StandardLibrarySource, FilesSource, HubSource,
make_source), `tokenizers` (Tokenizer, TokenizerSpec, ByteTokenizer, BPETokenizer, gpt2_tokenizer, make_tokenizer,
load_tokenizer), `token_cache` (TokenCache, open_or_build), `split` (Split, split_documents), `packing`
(PackedSamples), `sampler` (StepSampler), `loader` (ResumableLoader), `batch` (Batch) and `datamodule`
(TextDataModule), the LightningDataModule that puts them together and is all that most programs need.

Masked language models read the same token file in samples of their real lengths: `pieces` (Pieces, split_pieces),
`special_tokens` (SpecialTokens), `masking` (mask_tokens), `masked_samples` (MaskedSamples), `masked_batch`
(MaskedBatch), `balance` (Cost, share_out), `token_budget` (TokenBudgetPlan), `token_budget_loader` (TokenBudgetLoader)
and `masked_datamodule` (MaskedTextDataModule), which puts these together.

Classifiers read `labelled_documents` (LabelledDocuments, LabelledSamples): from files or a dataset (`labelled_files`),
or made up (`cue_documents`: CueDocuments, best_micro_f1); or words with labels (`token_labels`), in the tokens of
weights from Hugging Face (`wordpiece`: WordPieceTokenizer).
"""
