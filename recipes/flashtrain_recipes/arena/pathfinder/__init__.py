"""Pathfinder: are the two marked tips joined by one of the dashed curves? Images are generated and stored as strokes.

They equal, pixel by pixel, those of the task's own program (Linsley et al. 2018), given the same random numbers. numba
is imported only where images are generated.
"""
