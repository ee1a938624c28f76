"""Pathfinder: are the two marked tips joined by one of the dashed curves? Images made from a seed, stored as strokes.

Images are those of the task's own program (Linsley et al. 2018), made anew: equal to its pixels, given the same random
numbers. `walk` (compiled by numba, with `walk_tables`) says where dashes lie, `windows` what a dash and a disc look
like, `raster` draws whole images on any device. `store` (ensure, PathfinderImages) keeps sets of them; numba is
imported where images are generated only.
"""
