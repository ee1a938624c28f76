"""pathfinder.drawing=original: images as the task's own program draws them (Linsley et al. 2018), made anew.

`windows` are a dash and a disc, drawn by what that program takes from Pillow; `tables` and `walk` say where dashes lie;
`raster` draws whole images on any device.
"""
