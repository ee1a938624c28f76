"""The implementations of attention over several devices, one file for each."""
