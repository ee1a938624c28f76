"""Triton kernels for sm_80 and later, which serve every call."""
