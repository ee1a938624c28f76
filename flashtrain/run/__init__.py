"""One run: its folder, devices, batching, choice of memory, training, resuming, plan and summary row."""
