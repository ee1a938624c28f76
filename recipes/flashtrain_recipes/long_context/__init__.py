"""What a longer context is worth: `python -m flashtrain recipe=gpt2-long`, and `mode=passkey`."""
