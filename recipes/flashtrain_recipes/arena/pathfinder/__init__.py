"""Pathfinder: are the two marked tips joined by one of the dashed curves? Images made from a seed, stored as strokes.

Images are those of the task's own program (Linsley et al. 2018), made anew: equal to its pixels, given the same random
numbers. Only where images are generated numba is imported.
"""
