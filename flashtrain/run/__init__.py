"""One run of any task, from checked settings to its summary row."""
