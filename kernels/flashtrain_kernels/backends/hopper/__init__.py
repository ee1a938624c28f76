"""Attention kernels for sm_90 (H100, H200), written in Gluon: TMA loads, wgmma,
and specialised warps."""
