"""A model trained on at longer contexts, and scored beside what it was."""
