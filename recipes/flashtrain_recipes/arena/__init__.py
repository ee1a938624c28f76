"""The Long Range Arena: its sequences, Pathfinder and Path-X, their curriculum, tables and figures."""
