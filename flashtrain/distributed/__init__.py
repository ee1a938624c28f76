"""Training on several devices: DDP, FSDP2, and context parallelism (in `context`)."""
