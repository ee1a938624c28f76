"""The harness that all benchmarks share: a benchmark defines its cases, its baselines and
the columns of its rows."""
