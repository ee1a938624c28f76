"""Attention kernels for sm_90 (H100, H200), written in Gluon: TMA loads, wgmma, and warps that each do one job.

Imported only where such a GPU is used. What these kernels do not serve, the portable ones do.
"""
