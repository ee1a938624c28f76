"""What can be set: one dataclass a config group, with its checks and its defaults."""
