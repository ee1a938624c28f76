"""Context parallelism: exact attention over sequences that are sharded among devices.

Nothing here knows Hydra; only `strategy` knows Lightning.
"""
