"""The version of flashtrain."""

__version__ = "0.1.0"
