"""The kernels on an NVIDIA GPU of sm_80 or later: python -m pytest -m gpu tests/kernels/test_gpu.py"""

import pytest
import torch
from attention_cases import Case, expected, ours, run
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtrain_kernels as fk
from flashtrain_kernels import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [
    Case(2, 128, 128, 4, 4, 64, causal=True),
    Case(2, 1000, 1000, 4, 2, 64, causal=True),
    Case(1, 1000, 1000, 4, 4, 128, causal=False),
    Case(1, 1023, 1023, 6, 2, 128, causal=True),
    Case(2, 1, 333, 4, 1, 64, causal=True),
    Case(2, 333, 1, 4, 1, 64, causal=False),
    Case(1, 257, 1025, 4, 4, 64, causal=True),
    Case(1, 1025, 257, 2, 2, 128, causal=True),
    Case(2, 300, 300, 2, 2, 40, causal=True),
    Case(2, 300, 300, 3, 1, 80, causal=False),
    Case(1, 130, 130, 2, 2, 1, causal=True),
    Case(1, 200, 200, 2, 1, 17, causal=True),
    Case(1, 300, 300, 2, 1, 192, causal=True),
    Case(1, 300, 300, 2, 2, 256, causal=True),
    Case(2, 1000, 1000, 4, 2, 64, causal=True, document_lengths=(1, 63, 300, 136, 500)),
    Case(2, 1000, 1000, 4, 4, 128, causal=False, document_lengths=(1, 63, 300, 136, 500)),
    Case(1, 2048, 2048, 2, 2, 64, causal=True, document_lengths=(2048,)),
]


def sdpa(q, k, v, *, causal, documents, return_lse):
    """torch's attention in the inputs' dtype with our mask; its math backend gives the error a user is used to."""
    mask = fk.masks.visible(q.shape[1], k.shape[1], causal=causal, documents=documents, device=q.device)
    empty = None if mask is None else ~mask.any(-1, keepdim=True)
    mask = None if mask is None else mask | empty
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1),
            v.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1),
            attn_mask=mask,
        )
    if empty is not None:
        out = out.masked_fill(empty, 0.0)
    return out.transpose(1, 2), torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=q.device)


def error(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], name: str) -> float:
    return (got[name].double() - wanted[name].double()).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_error_is_at_most_twice_that_of_torchs_attention(case, dtype):
    inputs = case.inputs(dtype, "cuda")
    wanted = expected(case, inputs, through_lse=False)
    got, torchs = ours(case, inputs, through_lse=False), run(sdpa, case, inputs, through_lse=False)
    for name in ("out", "dq", "dk", "dv"):
        floor = torch.finfo(dtype).eps * wanted[name].abs().max().item()
        assert error(got, wanted, name) <= 2 * error(torchs, wanted, name) + floor, name
    torch.testing.assert_close(got["lse"].double(), wanted["lse"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES[:4] + CASES[12:15], ids=str)
def test_float32_is_near_float32_accuracy(case):
    inputs = case.inputs(torch.float32, "cuda")
    wanted, got = expected(case, inputs), ours(case, inputs)
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(got[name].double(), wanted[name], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("case", [CASES[1], CASES[14]], ids=str)
def test_gradients_through_the_log_sum_exp(case):
    inputs = case.inputs(torch.bfloat16, "cuda")
    wanted, got = expected(case, inputs), ours(case, inputs)
    for name in ("dq", "dk", "dv"):
        scale = wanted[name].abs().max().item()
        assert error(got, wanted, name) <= 0.02 * scale, name


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[14]], ids=str)
def test_two_runs_are_equal_bit_for_bit(case):
    inputs = case.inputs(torch.bfloat16, "cuda")
    first = ours(case, inputs)
    for _ in range(10):
        again = ours(case, inputs)
        for name, value in first.items():
            assert torch.equal(again[name], value), name


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[8], CASES[11]], ids=str)
def test_nothing_outside_the_outputs_is_written_and_nothing_inside_is_left(case, monkeypatch):
    inputs = case.inputs(torch.bfloat16, "cuda")
    wanted = ours(case, inputs)
    buffers = []
    empty = torch.empty

    def guarded(*size, dtype=None, device=None):
        """A tensor amid 4096 elements of 12.0 on both sides, itself full of NaN."""
        shape = size[0] if isinstance(size[0], (tuple, torch.Size)) else size
        count = torch.Size(shape).numel()
        buffer = empty(count + 8192, dtype=dtype, device=device).fill_(12.0)
        inside = buffer[4096 : 4096 + count]
        inside.fill_(torch.nan)
        buffers.append((buffer, count))
        return inside.view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    out, lse = ops.FORWARD(*(x.detach() for x in inputs), None, None, case.head_dim**-0.5, case.causal)
    dout = torch.ones_like(out)
    gradients = ops.BACKWARD(
        dout, None, *(x.detach() for x in inputs), out, lse, None, None, case.head_dim**-0.5, case.causal
    )
    monkeypatch.undo()
    assert torch.equal(out, wanted["out"])
    assert not any(x.isnan().any() for x in (out, lse, *gradients))
    assert len(buffers) >= 6
    for buffer, count in buffers:
        assert buffer[:4096].eq(12.0).all()
        assert buffer[4096 + count :].eq(12.0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masked_keys_never_contribute_even_where_they_are_not_finite(head_dim, bad):
    case = Case(1, 500, 500, 2, 2, head_dim, causal=True)
    clean = case.inputs(torch.bfloat16, "cuda")
    dirty = tuple(x.detach().clone() for x in clean)
    dirty[1][:, 300, :, 3] = bad
    dirty[2][:, 300, :, 5] = bad
    dirty = tuple(x.requires_grad_() for x in dirty)
    out, wanted = fk.flash_attn_func(*dirty, causal=True), fk.flash_attn_func(*clean, causal=True)
    torch.testing.assert_close(out[:, :300], wanted[:, :300], atol=1e-2, rtol=1e-2)
    assert not out[:, 300:].isfinite().all()
    dq = torch.autograd.grad(out[:, :300].float().sum(), dirty)[0]
    assert dq[:, :300].isfinite().all()


def test_one_document_that_is_not_finite_leaves_the_others_alone():
    case = Case(1, 600, 600, 2, 1, 64, causal=True, document_lengths=(250, 350))
    clean = case.inputs(torch.bfloat16, "cuda")
    dirty = tuple(x.detach().clone() for x in clean)
    for x in dirty:
        x[:, 400, :, 2] = torch.nan
    dirty = tuple(x.requires_grad_() for x in dirty)
    wanted, got = ours(case, clean, through_lse=False), ours(case, dirty, through_lse=False)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(got[name][:, :250], wanted[name][:, :250], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("documents", [False, True])
def test_packed_equals_unpacked_bit_for_bit(documents):
    qkv = torch.randn(2, 777, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(777, device="cuda").expand(2, 777) // 200
    boundaries = fk.documents_from_ids(ids) if documents else None
    weight = torch.randn(2, 777, 4, 64, device="cuda", dtype=torch.bfloat16)
    packed = fk.flash_attn_qkvpacked_func(qkv, causal=True, documents=boundaries)
    apart = fk.flash_attn_func(*qkv.unbind(2), causal=True, documents=boundaries)
    assert torch.equal(packed, apart)
    (got,) = torch.autograd.grad((packed * weight).sum(), qkv)
    (wanted,) = torch.autograd.grad((apart * weight).sum(), qkv)
    assert torch.equal(got, wanted)


def test_torch_compile_takes_the_whole_graph_and_changing_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda qkv, documents: fk.flash_attn_qkvpacked_func(qkv, causal=True, documents=documents) * 2,
        fullgraph=True,
        dynamic=True,
    )
    for length in (100, 128, 333):
        qkv = torch.randn(2, length, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        documents = fk.documents_from_ids(torch.arange(length, device="cuda").expand(2, length) // 50)
        wanted = fk.flash_attn_qkvpacked_func(qkv, causal=True, documents=documents) * 2
        got = compiled(qkv, documents)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(
            torch.autograd.grad(got.float().sum(), qkv), torch.autograd.grad(wanted.float().sum(), qkv)
        )


def test_a_changing_length_compiles_no_new_kernel():
    from flashtrain_kernels.portable.forward import forward_kernel

    def variants() -> int:
        return sum(len(caches[0]) for caches in forward_kernel.device_caches.values())

    def attend(length):
        x = torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16)
        return fk.flash_attn_func(x, x, x, causal=True)

    attend(64)
    before = variants()
    for length in (1, 2, 16, 17, 100, 129, 1024):
        attend(length)
    assert variants() == before


def test_offsets_past_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    length = 1_000_000
    qkv = torch.zeros(1, length, 3, 12, 64, device="cuda", dtype=torch.bfloat16)  # 2.3e9 elements
    qkv[:, -512:] = torch.randn(1, 512, 3, 12, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(1, length, device="cuda", dtype=torch.int32)
    ids[:, -512:] = 1
    out = fk.flash_attn_qkvpacked_func(qkv, causal=True, documents=fk.documents_from_ids(ids))
    tail = fk.flash_attn_qkvpacked_func(qkv[:, -512:].contiguous(), causal=True)
    torch.testing.assert_close(out[:, -512:], tail, atol=1e-2, rtol=1e-2)


def test_explain_names_the_gpu_and_the_tiles():
    x = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    line = fk.explain(x, x, x)
    assert "portable" in line
    assert "sm_" in line
    assert "dK/dV" in line
