"""Pathfinder: are the two marked tips joined by one of the dashed curves? Images made from a seed, stored as strokes.

`parameters` (PathfinderParameters, of_side), `walk` (the generator, compiled by numba), `store` (ensure,
PathfinderImages), `strokes` (Strokes), `raster` (rasterise: strokes to grey pixels on any device) and `settings`
(PathfinderSettings). Importing them imports no numba: that happens where images are generated.
"""
