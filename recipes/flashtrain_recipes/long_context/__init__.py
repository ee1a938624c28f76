"""Studies of longer contexts: `python -m flashtrain recipe=gpt2-long`."""
