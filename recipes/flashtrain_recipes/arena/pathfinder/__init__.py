"""Pathfinder, the task of telling whether two marked tips lie on one dashed curve. Images
are stored as strokes, the positions of their dashes (records.py).

Generated images equal, pixel by pixel, those of the original program (Linsley et al. 2018), given
the same random numbers. numba is imported only where images are generated.
"""
