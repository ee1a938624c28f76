"""The kernels with the rest of torch on a GPU: torch.compile, no kernel compiled for a new length, nothing that waits
for the device, activation checkpointing, and mistakes found before a launch."""

import pytest
import torch
from attention_cases import Case
from gpu_checks import DEVICE, NEEDS_GPU, assert_same
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashtrain_kernels as fk
from flashtrain_kernels import ops, replay
from flashtrain_kernels.backends.hopper import backend as hopper
from flashtrain_kernels.backends.portable import tile_table

pytestmark = NEEDS_GPU
BF16 = torch.bfloat16


def of_documents(qkv, ids, seed):
    mask = fk.masks.document(fk.documents_from_ids(ids), causal=True)
    return fk.flash_attn_qkvpacked_func(qkv, mask=mask) * 2


def of_packed_sequences(qkv, ids, seed):
    cu_seqlens = torch.stack([ids[0, 0] * 0, ids.shape[1] // 3 + ids[0, 0] * 0, ids.shape[1] + ids[0, 0] * 0]).int()
    q, k, v = qkv[0].unbind(1)
    return fk.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, q.shape[0], q.shape[0], causal=True) * 2


def with_dropout(qkv, ids, seed):
    return fk.flash_attn_func(*qkv.unbind(2), 0.3, causal=True, window_size=(30, 0), dropout_seed=seed) * 2


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
        "forward": forward.forward_kernel, "dq": dq.dq_kernel, "dkdv": dkdv.dkdv_kernel, "plan": plan.plan_kernel,
        "summary": plan.summary_kernel, "rows": dq.rows_kernel, "both": backward.both_kernel,
    }  # fmt: skip
    if hopper.unavailable(torch.device(DEVICE)) is None:
        from flashtrain_kernels.backends.hopper import backward_kernel, backward_rows
        from flashtrain_kernels.backends.hopper import forward as hopper_forward

        kernels |= {
            "hopper forward": hopper_forward.forward_kernel, "hopper backward": backward_kernel.backward_kernel,
            "hopper prepare": backward_rows.prepare_kernel, "hopper finish": backward_rows.finish_kernel,
        }  # fmt: skip
    return {
        name: sum(len(caches[0]) for caches in kernel.device_caches.values()) for name, kernel in kernels.items()
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (50, 3)}, {"dropout_p": 0.2}], ids=str)
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

    # Each class of lengths may have a tile of its own: up to SHORT keys, and on Hopper GPUs up to 2,048 and beyond.
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


@pytest.fixture
def launches(monkeypatch):
    """How often a kernel was launched."""
    from flashtrain_kernels.backends.portable.launch import Launch

    seen = []
    launch = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (seen.append(1), launch(self))[1])
    return seen


@pytest.mark.parametrize(
    ("named", "given", "mistake"),
    [
        ("cu_seqlens_q must end", {"cu": [0, 100, 401]}, ValueError),
        ("cu_seqlens_q must not decrease", {"cu": [0, 300, 200]}, ValueError),
        ("cu_seqlens_q must start", {"cu": [1, 300, 400]}, ValueError),
        ("max_seqlen_q", {"cu": [0, 300, 400], "longest": 299}, ValueError),
        ("cu_seqlens_q", {"cu_device": "cpu"}, ValueError),
        ("q is float64", {"dtype": torch.float64}, TypeError),
        ("k", {"k_device": "cpu"}, ValueError),
        ("bias", {"bias": torch.zeros(400)}, ValueError),
        ("alibi_slopes", {"alibi_slopes": torch.zeros(4)}, ValueError),
        ("dropout_seed", {"dropout_p": 0.1, "dropout_seed": torch.zeros(3).long()}, ValueError),
        ("dropout_p", {"dropout_p": 1.0}, ValueError),
        ("window_size", {"window_size": (-2, 0)}, ValueError),
        ("mask.queries", {"mask": fk.masks.causal(400)}, ValueError),
    ],
)
def test_a_mistake_is_found_before_a_launch(named, given, mistake, launches):
    given = dict(given)
    cu = torch.tensor(given.pop("cu", [0, 100, 400]), dtype=torch.int32).to(given.pop("cu_device", DEVICE))
    longest = given.pop("longest", 400)
    q = torch.zeros(400, 4, 64, device=DEVICE, dtype=given.pop("dtype", BF16))
    k = q.to(given.pop("k_device", DEVICE))
    with pytest.raises(mistake, match=f"^{named}"):
        fk.flash_attn_varlen_func(q, k, k, cu, cu, longest, longest, **given)
    assert not launches
    torch.cuda.synchronize()


@pytest.fixture
def forward_calls(monkeypatch):
    """How often the forward really runs, replayed or not."""
    seen = []
    forward, replayed = ops.forward, replay.Replay.__call__

    def counted(again, tensors):
        seen.extend([1] * (len(again.results) == 2))  # out, lse
        return replayed(again, tensors)

    monkeypatch.setattr(replay.Replay, "__call__", counted)
    monkeypatch.setattr(ops, "forward", lambda *args: (seen.append(1), forward(*args))[1])
    return seen


@pytest.mark.parametrize("keeps", [False, True])
def test_checkpointing_recomputes_the_same_and_may_keep_the_outputs_instead(keeps, forward_calls):
    inputs = Case(2, 333, 461, 4, 4, 64).inputs(BF16, DEVICE)

    def layer(*x):
        return fk.flash_attn_func(*x, 0.3, causal=True, dropout_seed=5) * 1.0

    wanted = torch.autograd.grad(layer(*inputs).float().sum(), inputs)
    forward_calls.clear()
    more = {"context_fn": lambda: create_selective_checkpoint_contexts(fk.FORWARDS)} if keeps else {}
    out = checkpoint(layer, *inputs, use_reentrant=False, **more)
    got = torch.autograd.grad(out.float().sum(), inputs)
    assert len(forward_calls) == (1 if keeps else 2)
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert_same(one, other, added=number == 0 and hopper.unavailable(torch.device(DEVICE)) is None)


def test_vmap_gives_each_samples_gradients():
    q, k, v = (torch.randn(3, 2, 133, 4, 64, device=DEVICE, dtype=BF16) for _ in range(3))

    def loss(q, k, v):
        return fk.flash_attn_func(q, k, v, causal=True).float().square().sum()

    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for sample in range(3):
        inputs = [x[sample].clone().requires_grad_() for x in (q, k, v)]
        wanted = torch.autograd.grad(loss(*inputs), inputs)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one[sample], other, atol=1e-2, rtol=1e-2)
