"""Pathfinder: are the two marked tips joined by one of the dashed curves? Images made from a seed, stored as strokes.

`parameters` (PathfinderParameters, of_side), `store` (ensure, PathfinderImages), `records` (Strokes) and `drawing`
(rasterise: strokes to grey pixels on any device; changes of training images). There are two drawings, each with its
generator (`walk`, compiled by numba): `original`, a package of its own, and smooth, in the modules here. Importing them
imports no numba: that happens where images are generated.
"""
