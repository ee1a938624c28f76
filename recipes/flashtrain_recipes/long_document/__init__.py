"""A study: documents classified at several contexts, with BERT fine-tuned at each."""
