"""The settings: one dataclass for each config group, with its defaults and checks."""
