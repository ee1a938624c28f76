"""Triton kernels for sm_80 and later: every feature, clear before fast. Nothing here is imported before it is needed.

forward.py and backward.py hold the kernels and the functions `forward` and `backward` that launch them; tiles.py the
helpers they share; launch.py one launch as data; aot.py compiles a launch for a GPU that need not be there.
"""
