"""The Long Range Arena: its tasks, Pathfinder and Path-X, their training in
stages, tables and figures."""
