"""Triton kernels for sm_80 and later: every feature, clear before fast. Nothing here is imported before it is needed.

forward.py holds the forward kernel and `forward`, which launches it; dq.py and dkdv.py the two kernels of the backward
pass and backward.py `backward`, which launches both; tiles.py the helpers they share; launch.py one launch as data;
mask_rows.py fills masks, plan.py their plans; backend.py is what dispatch.py asks.
"""
