"""RULER: what a model of long context finds, follows and counts in prompts of each length."""
