"""Context parallelism: exact attention over sequences that are sharded among devices."""
