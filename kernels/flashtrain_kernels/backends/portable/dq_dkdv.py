"""dK, dV and dQ in one launch: programs of the one kernel fill the multiprocessors that the other's last ones leave.

In two launches the second waits until the first has run out, with part of the GPU idle. Here both need the queries'
terms (rows.py) beforehand.
"""

import triton
import triton.language as tl

from .dkdv import dkdv_kernel
from .dq import dq_kernel
from .launch import NOT_SPECIALISED


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def both_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_gb,
    stride_gs,
    stride_gh,
    stride_dqb,
    stride_dqs,
    stride_dqh,
    dk_ptr,
    dv_ptr,
    stride_dkb,
    stride_dks,
    stride_dkh,
    stride_dvb,
    stride_dvs,
    stride_dvh,
    scale,
    bias_ptr,
    stride_bb,
    stride_bh,
    stride_bq,
    stride_bk,
    slopes_ptr,
    stride_slopes,
    seed_ptr,
    mask_ptr,
    mask_plane,
    stride_mask,
    positions_ptr,
    stride_positions,
    table_ptr,
    stride_tb,
    stride_th,
    stride_tr,
    list_ptr,
    dq_table_ptr,
    dq_stride_tb,
    dq_stride_th,
    dq_stride_tr,
    dq_list_ptr,
    heads,
    seqlen_q,
    seqlen_k,
    band_left,
    band_right,
    scale_log2,
    cap_in,
    cap_log2,
    threshold,
    keep_scale,
    programs_dkdv,
    programs_dq,
    F: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K_DKDV: tl.constexpr,
    BLOCK_Q_DKDV: tl.constexpr,
    TILES_DKDV: tl.constexpr,
    BLOCK_K_DQ: tl.constexpr,
    BLOCK_Q_DQ: tl.constexpr,
    TILES_DQ: tl.constexpr,
):
    """The grid's second axis chooses the kernel, dK/dV first, as it takes longer; a program past its kernel's count has
    nothing to do."""
    if tl.program_id(1) == 1:
        if tl.program_id(0) < programs_dq:
            dq_kernel(
                q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, lse2_ptr, lse2_ptr, lse2_ptr, delta_ptr,
                dq_ptr, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb,
                stride_vs, stride_vh, stride_gb, stride_gs, stride_gh, 0, 0, 0, stride_dqb,
                stride_dqs, stride_dqh, scale, bias_ptr, stride_bb, stride_bh, stride_bq, stride_bk,
                slopes_ptr, stride_slopes, seed_ptr, mask_ptr, mask_plane, stride_mask,
                positions_ptr, stride_positions, dq_table_ptr, dq_stride_tb, dq_stride_th,
                dq_stride_tr, dq_list_ptr, heads, seqlen_q, seqlen_k, band_left, band_right,
                scale_log2, cap_in, cap_log2, threshold, keep_scale, False, True, F, GROUP,
                TILES_DQ, HEAD_DIM, BLOCK_D, BLOCK_Q_DQ, BLOCK_K_DQ, PRECISION,
            )  # fmt: skip
    else:
        if tl.program_id(0) < programs_dkdv:
            dkdv_kernel(
                q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, stride_qb,
                stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
                stride_vh, stride_gb, stride_gs, stride_gh, stride_dkb, stride_dks, stride_dkh,
                stride_dvb, stride_dvs, stride_dvh, scale, bias_ptr, stride_bb, stride_bh,
                stride_bq, stride_bk, slopes_ptr, stride_slopes, seed_ptr, mask_ptr, mask_plane,
                stride_mask, positions_ptr, stride_positions, table_ptr, stride_tb, stride_th,
                stride_tr, list_ptr, heads, seqlen_q, seqlen_k, band_left, band_right, scale_log2,
                cap_in, cap_log2, threshold, keep_scale, F, GROUP, TILES_DKDV, HEAD_DIM, BLOCK_D,
                BLOCK_Q_DKDV, BLOCK_K_DKDV, PRECISION,
            )  # fmt: skip
