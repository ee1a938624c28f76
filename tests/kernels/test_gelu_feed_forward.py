"""gelu_feed_forward: the plain formula, however it is computed."""

import pytest
import torch
import torch.nn.functional as F

from flashtrain_kernels import cublaslt, feed_forward, gelu_feed_forward


def plain(x, up, up_bias, down, down_bias):
    return F.linear(F.gelu(F.linear(x, up, up_bias), approximate="tanh"), down, down_bias)


def inputs(dtype=torch.float64, device="cpu", rows=(2, 5), embed=8, ffn=24):
    sizes = ((*rows, embed), (ffn, embed), (ffn,), (embed, ffn), (embed,))
    scales = (1, embed**-0.5, 1, ffn**-0.5, 1)
    return [
        (torch.randn(size, dtype=dtype, device=device) * scale).requires_grad_()
        for size, scale in zip(sizes, scales, strict=True)
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_output_and_gradients_are_the_plain_formulas(compiled):
    ours = (
        torch.compile(gelu_feed_forward, fullgraph=True, backend="aot_eager")
        if compiled
        else gelu_feed_forward
    )
    tensors = inputs()
    got, want = ours(*tensors), plain(*tensors)
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(want)
    wanted = torch.autograd.grad((want * weights).sum(), tensors)
    torch.testing.assert_close(torch.autograd.grad((got * weights).sum(), tensors), wanted)


def test_under_autocast_it_is_what_linear_layers_are_there():
    tensors = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = gelu_feed_forward(*tensors), plain(*tensors)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(got.float().sum(), tensors))


def test_the_operators_pass_torchs_checks():
    x, up, up_bias, down, _ = (tensor.detach() for tensor in inputs(rows=(5,)))
    torch.library.opcheck(torch.ops.flashtrain_kernels.linear_gelu.default, (x, up, up_bias))
    inner = torch.randn(5, 24, dtype=torch.float64)
    torch.library.opcheck(
        torch.ops.flashtrain_kernels.product_times_gelu_gradient.default, (x, down, inner)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "embed", "ffn"),
    [((1000,), 768, 3072), ((3, 37), 64, 136), ((1,), 8, 8), ((4096,), 1024, 4096)],
)
def test_on_a_gpu_gelu_is_part_of_the_products_and_no_less_exact(
    path, monkeypatch, dtype, rows, embed, ffn
):
    used = []
    for name in ("linear_gelu", "product_times_gelu_gradient"):
        original = getattr(cublaslt, name)
        monkeypatch.setattr(
            cublaslt,
            name,
            lambda *a, original=original, name=name: (used.append(name), original(*a)),
        )

    def squared_errors(function, tensors, wanted):
        with torch.autocast("cuda", dtype=dtype):
            out = function(*tensors)
        got = [out, *torch.autograd.grad(out.float().square().sum(), tensors)]
        return torch.stack(
            [((a - b).norm() / b.norm()).square() for a, b in zip(got, wanted, strict=True)]
        )

    # Eight numbers round as they happen to: their errors are compared over many draws.
    draws = 64 if embed == 8 else 1
    ours = theirs = 0.0
    for _ in range(draws):
        tensors = inputs(torch.float32, "cuda", rows, embed, ffn)
        exact_tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
        exact = plain(*exact_tensors)
        wanted = [exact, *torch.autograd.grad(exact.square().sum(), exact_tensors)]
        ours = ours + squared_errors(gelu_feed_forward, tensors, wanted)
        theirs = theirs + squared_errors(plain, tensors, wanted)
    assert used == ["linear_gelu", "product_times_gelu_gradient"] * draws
    assert ((ours / draws).sqrt() <= 1.5 * (theirs / draws).sqrt() + 1e-4).all()


@pytest.mark.gpu
def test_on_hopper_gpus_the_products_take_the_algorithms_that_were_fastest(path):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("measured on Hopper GPUs only")
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    gelu_feed_forward(
        x, *(tensor.detach() for tensor in inputs(x.dtype, "cuda", embed=1024, ffn=4096)[1:])
    )
    # The library's own choice for this backward was a kernel for older GPUs, 1.7 times as slow.
    for transposed, epilogue in ((True, cublaslt._GELU_AUX_BIAS), (False, cublaslt._DGELU)):
        plan = cublaslt._plan(x.device, x.dtype, (4096, 32768, 1024), transposed, epilogue)
        assert cublaslt._kind(plan.choice) in cublaslt._FASTEST[epilogue]


@pytest.mark.gpu
def test_sizes_that_no_fused_product_takes_run_all_the_same(path):
    tensors = inputs(torch.bfloat16, "cuda", (50,), 12, 20)
    torch.testing.assert_close(gelu_feed_forward(*tensors), plain(*tensors), rtol=2e-2, atol=2e-2)


def test_only_16_bit_tensors_on_a_gpu_are_fused():
    assert not feed_forward._is_fused(torch.zeros(4, 8, dtype=torch.bfloat16), 8, 16)
