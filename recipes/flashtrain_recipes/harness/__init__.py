"""The one harness of all benchmarks: a family gives its cases, its baselines and the columns of its rows."""
