"""The implementations of attention over several devices, a file each."""
