"""pathfinder.drawing=original: images as the task's own program draws them (Linsley et al. 2018), made anew.

`lines` and `reduction` are what that program takes from Pillow; `windows` a dash and a disc drawn by them; `tables` and
`walk` where dashes lie; `raster` whole images on any device. docs/long_range.md says where versions of it differ.
"""
