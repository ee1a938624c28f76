"""A study (context_study.py): documents classified at several contexts, with BERT fine-tuned at each."""
