"""The kernels with the rest of torch on a GPU: torch.compile, no kernel compiled for a new length,
nothing that waits for the device."""

import pytest
import torch
from attention_cases import Case
from gpu_checks import DEVICE, NEEDS_GPU

import flashtrain_kernels as fk
from flashtrain_kernels.backends.hopper import backend as hopper
from flashtrain_kernels.backends.portable import tile_table

pytestmark = NEEDS_GPU
BF16 = torch.bfloat16


def of_documents(qkv, ids, seed):
    mask = fk.masks.document(fk.documents_from_ids(ids), causal=True)
    return fk.flash_attn_qkvpacked_func(qkv, mask=mask) * 2


def of_packed_sequences(qkv, ids, seed):
    cu_seqlens = torch.stack(
        [ids[0, 0] * 0, ids.shape[1] // 3 + ids[0, 0] * 0, ids.shape[1] + ids[0, 0] * 0]
    ).int()
    q, k, v = qkv[0].unbind(1)
    return (
        fk.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, q.shape[0], q.shape[0], causal=True
        )
        * 2
    )


def with_dropout(qkv, ids, seed):
    return (
        fk.flash_attn_func(*qkv.unbind(2), 0.3, causal=True, window_size=(30, 0), dropout_seed=seed)
        * 2
    )


@pytest.mark.parametrize("attend", [of_documents, of_packed_sequences, with_dropout])
def test_torch_compile_takes_the_whole_graph_and_changing_lengths(attend):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    seed = torch.tensor([5, 0, 0], device=DEVICE)
    with torch._dynamo.config.patch(error_on_recompile=True):
        # Several tiles each: torch specialises on a size of 1, as a plan of a single tile has.
        for length in (300, 384, 1001):
            qkv = torch.randn(2, length, 3, 4, 64, device=DEVICE, dtype=BF16, requires_grad=True)
            ids = torch.arange(length, device=DEVICE).expand(2, length) // 50
            wanted, got = attend(qkv, ids, seed), compiled(qkv, ids, seed)
            torch.testing.assert_close(got, wanted)
            weight = torch.randn_like(wanted)
            torch.testing.assert_close(
                torch.autograd.grad(got, qkv, weight), torch.autograd.grad(wanted, qkv, weight)
            )  # fmt: skip


def variants() -> dict[str, int]:
    """How many times each kernel is compiled so far, in this process."""
    from flashtrain_kernels.backends.portable import backward, dkdv, dq, forward, plan

    kernels = {
        "forward": forward.forward_kernel, "dq": dq.dq_kernel, "dkdv": dkdv.dkdv_kernel,
        "plan": plan.plan_kernel,
        "summary": plan.summary_kernel, "rows": dq.rows_kernel, "both": backward.both_kernel,
    }  # fmt: skip
    if hopper.unavailable(torch.device(DEVICE)) is None:
        from flashtrain_kernels.backends.hopper import backward_kernel, backward_rows
        from flashtrain_kernels.backends.hopper import forward as hopper_forward

        kernels |= {
            "hopper forward": hopper_forward.forward_kernel,
            "hopper backward": backward_kernel.backward_kernel,
            "hopper prepare": backward_rows.prepare_kernel,
            "hopper finish": backward_rows.finish_kernel,
        }  # fmt: skip
    return {
        name: sum(len(caches[0]) for caches in kernel.device_caches.values()) for name,
        kernel in kernels.items()
    }  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (50, 3)}, {"dropout_p": 0.2}], ids=str
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_changing_length_compiles_no_new_kernel(packed, options):
    def attend(length):
        if packed:
            x = torch.randn(length, 4, 64, device=DEVICE, dtype=BF16, requires_grad=True)
            cu = torch.tensor([0, length // 3, length], device=DEVICE, dtype=torch.int32)
            out = fk.flash_attn_varlen_func(x, x, x, cu, cu, length, length, **options)
        else:
            x = torch.randn(2, length, 4, 64, device=DEVICE, dtype=BF16, requires_grad=True)
            out = fk.flash_attn_func(x, x, x, **options)
        torch.autograd.grad(out.float().sum(), x)

    # Each class of lengths may have a tile of its own: up to SHORT keys, and on Hopper GPUs up
    # to 2,048 and beyond.
    for length in (64, tile_table.SHORT + 64, 4096):
        attend(length)
    before = variants()
    assert any(before.values())
    for length in (1, 2, 3, 16, 17, 100, 129, 1024, 1025, 5000):
        attend(length)
        assert variants() == before, length


def test_nothing_waits_for_the_device_once_cu_seqlens_are_known():
    q, k, v = Case(2, 333, 333, 4, 4, 64).inputs(BF16, DEVICE)
    bias = torch.randn(1, 4, 1, 333, device=DEVICE, dtype=BF16, requires_grad=True)
    ids = torch.arange(333, device=DEVICE).expand(2, 333) // 100
    cu = torch.tensor([0, 100, 333], device=DEVICE, dtype=torch.int32)

    def calls():
        mask = fk.masks.document(ids, causal=True)
        return [
            fk.flash_attn_func(q, k, v, 0.3, mask=mask, dropout_seed=5),
            fk.flash_attn_func(q, k, v, 0.3, causal=True, bias=bias),
            fk.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 333, 333, causal=True),
        ]

    calls()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = sum(out.float().sum() for out in calls())
        torch.autograd.grad(loss, (q, k, v, bias))
    finally:
        torch.cuda.set_sync_debug_mode(before)
