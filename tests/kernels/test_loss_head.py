"""linear_cross_entropy: torch's cross-entropy of a linear layer, without all its logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from flashtrain_kernels import LINEAR_CROSS_ENTROPY, linear_cross_entropy
from flashtrain_kernels.loss_head import TOKEN_LOSSES


def inputs(tokens=23, embed=8, rows=20, vocab_size=17, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, embed, dtype=dtype, generator=draw).requires_grad_()
    weight = torch.randn(rows, embed, dtype=dtype, generator=draw).requires_grad_()
    labels = torch.randint(vocab_size, (tokens,), generator=draw)
    labels[::5] = -100
    return hidden, weight, labels


def expected(hidden, weight, labels, vocab_size):
    logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    logits = logits.masked_fill(torch.arange(len(weight)) >= vocab_size, -torch.inf)
    return F.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


@settings(max_examples=25)
@given(
    tokens=st.integers(0, 40),
    chunk=st.none() | st.integers(1, 50),
    padding=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_are_torchs_whatever_the_pieces(tokens, chunk, padding, seed):
    hidden, weight, labels = inputs(tokens, vocab_size=20 - padding, seed=seed)
    ours = linear_cross_entropy(hidden, weight, labels, vocab_size=20 - padding, chunk=chunk)
    theirs = expected(hidden, weight, labels, 20 - padding)
    torch.testing.assert_close(ours, theirs)
    wanted = torch.autograd.grad(3 * theirs, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(3 * ours, (hidden, weight)), wanted)


def test_any_leading_dimensions_and_the_sum():
    hidden, weight, labels = inputs(24)
    mean = linear_cross_entropy(hidden.view(2, 3, 4, 8), weight, labels.view(2, 3, 4))
    total = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    torch.testing.assert_close(mean * (labels != -100).sum(), total)


def test_where_no_label_counts_the_loss_and_its_gradients_are_zero():
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_softcap_bounds_the_logits_as_gemma_2_has_it(chunk):
    hidden, weight, labels = inputs()
    logits = 2 * torch.tanh(F.linear(hidden, weight) / 2)
    theirs = F.cross_entropy(logits, labels)
    ours = linear_cross_entropy(hidden, weight, labels, chunk=chunk, softcap=2.0)
    torch.testing.assert_close(ours, theirs)
    wanted = torch.autograd.grad(theirs, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(ours, (hidden, weight)), wanted)


def test_a_weight_that_is_frozen_costs_no_gradient():
    hidden, weight, labels = inputs()
    expected_gradient = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden)
    loss = linear_cross_entropy(hidden, weight.detach(), labels)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden), expected_gradient)
    _, _, dweight = LINEAR_CROSS_ENTROPY(
        hidden.detach(), weight.detach(), labels, 20, -100, 8, True, 0.0, True
    )
    assert dweight.numel() == 0
    torch.library.opcheck(
        LINEAR_CROSS_ENTROPY, (hidden, weight.detach(), labels, 17, -100, 8, True, 3.0, True)
    )


@pytest.mark.parametrize("label", [17, 20, -3])
def test_a_label_that_is_no_token_is_refused_as_by_torchs_own(label):
    hidden, weight, labels = inputs()
    labels[3] = label
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(F.linear(hidden, weight)[..., :17].flatten(0, -2), labels.flatten())
    with pytest.raises(RuntimeError, match="labels must be 0 to 16, or -100"):
        linear_cross_entropy(hidden, weight, labels, vocab_size=17)


def test_without_gradients_none_are_computed():
    hidden, weight, labels = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, vocab_size=17)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected(hidden, weight, labels, 17).detach())
    _, dhidden, dweight = LINEAR_CROSS_ENTROPY(
        hidden.detach(), weight.detach(), labels, 17, -100, 8, False
    )
    assert dhidden.numel() == dweight.numel() == 0


def test_under_autocast_the_products_are_in_its_type_and_the_weights_gradient_in_the_weights():
    hidden, weight, labels = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, labels, vocab_size=17, chunk=4)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(
        ours, expected(hidden.bfloat16(), weight.bfloat16(), labels, 17), rtol=1e-5, atol=1e-5
    )
    assert [gradient.dtype for gradient in torch.autograd.grad(ours, (hidden, weight))] == [
        torch.float32
    ] * 2


def test_the_operator_passes_torchs_checks_and_compiles_whole():
    hidden, weight, labels = inputs(dtype=torch.float32)
    torch.library.opcheck(LINEAR_CROSS_ENTROPY, (hidden, weight, labels, 17, -100, 8, True))
    compiled = torch.compile(
        lambda *tensors: linear_cross_entropy(*tensors, vocab_size=17, chunk=8),
        fullgraph=True,
        backend="aot_eager",
    )
    ours, theirs = compiled(hidden, weight, labels), expected(hidden, weight, labels, 17)
    wanted = torch.autograd.grad(theirs, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(ours, (hidden, weight)), wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction):
    hidden, weight, labels = inputs()
    loss = (linear_cross_entropy(hidden, weight, labels, reduction=reduction) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative|differentiate twice"):
        gradient.sum().backward()


def of_each(hidden, weight, labels, vocab_size, softcap=0.0):
    """The losses that torch computes of all logits."""
    logits = F.linear(hidden, weight)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits[:, :vocab_size], labels, reduction="none")


@settings(max_examples=25)
@given(
    tokens=st.integers(0, 40),
    chunk=st.none() | st.integers(1, 50),
    padding=st.integers(0, 5),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 99),
)
def test_losses_of_tokens_have_torchs_gradients_whatever_is_computed_of_them(
    tokens, chunk, padding, softcap, seed
):
    hidden, weight, labels = inputs(tokens, vocab_size=20 - padding, seed=seed)
    upstream = torch.randn(
        tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    options = {"vocab_size": 20 - padding, "chunk": chunk, "softcap": softcap}
    ours = linear_cross_entropy(hidden, weight, labels, **options, reduction="none")
    theirs = of_each(hidden, weight, labels, 20 - padding, softcap)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    assert not ours[labels == -100].any()
    wanted = torch.autograd.grad(theirs, (hidden, weight), upstream)
    got = torch.autograd.grad(ours, (hidden, weight), upstream)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_losses_of_tokens_add_up_to_the_sum_and_have_the_labels_shape():
    hidden, weight, labels = inputs(24)
    each = linear_cross_entropy(
        hidden.view(2, 3, 4, 8), weight, labels.view(2, 3, 4), reduction="none"
    )
    assert each.shape == (2, 3, 4)
    total = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    torch.testing.assert_close(each.sum(), total)
    wanted = torch.autograd.grad(total, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(each.sum(), (hidden, weight)), wanted)


def test_no_gradient_reaches_the_states_of_an_ignored_label_whatever_is_made_of_its_loss():
    hidden, weight, labels = inputs()
    each = linear_cross_entropy(hidden, weight, labels, vocab_size=17, reduction="none")
    upstream = torch.ones_like(each).masked_fill(labels == -100, torch.inf)
    dhidden, dweight = torch.autograd.grad(each, (hidden, weight), upstream)
    assert not dhidden[labels == -100].any()
    assert dweight.isfinite().all()


def test_losses_of_tokens_under_autocast_are_in_float32_and_a_frozen_weight_has_no_gradient():
    hidden, weight, labels = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_cross_entropy(
            hidden, weight, labels, vocab_size=17, chunk=4, reduction="none"
        )
        alone = linear_cross_entropy(
            hidden, weight.detach(), labels, vocab_size=17, chunk=4, reduction="none"
        )
    assert ours.dtype == torch.float32
    torch.testing.assert_close(
        ours, of_each(hidden.bfloat16(), weight.bfloat16(), labels, 17), rtol=1e-5, atol=1e-5
    )
    gradients = torch.autograd.grad(ours.square().sum(), (hidden, weight))
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 2
    torch.testing.assert_close(
        torch.autograd.grad(alone.square().sum(), hidden), gradients[:1], atol=0, rtol=0
    )


def test_the_operator_of_losses_of_tokens_passes_torchs_checks_and_compiles_whole():
    hidden, weight, labels = inputs(dtype=torch.float32)
    torch.library.opcheck(TOKEN_LOSSES, (hidden, weight, labels, 17, -100, 8, None, 3.0))
    given = hidden.detach(), weight.detach(), labels, 17, -100, 8
    for frozen in (False, True):
        torch.library.opcheck(TOKEN_LOSSES, (*given, torch.randn(23), 3.0, frozen))
    compiled = torch.compile(
        lambda *tensors: (
            linear_cross_entropy(*tensors, vocab_size=17, chunk=8, reduction="none").square().mean()
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    ours, theirs = (
        compiled(hidden, weight, labels),
        of_each(hidden, weight, labels, 17).square().mean(),
    )
    wanted = torch.autograd.grad(theirs, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(ours, (hidden, weight)), wanted)


def test_the_backward_of_losses_of_tokens_counts_the_product_that_it_computes_again():
    hidden, weight, labels = inputs()
    with FlopCounterMode(display=False) as counted:
        linear_cross_entropy(hidden, weight, labels, reduction="none").sum().backward()
    assert counted.get_total_flops() == 2 * 23 * 20 * 8 * (1 + 3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"weight": torch.zeros(5, 3)},
            ValueError,
            r"\(\.\.\., E\) and \(V, E\), not \(4, 2\) and \(5, 3\)",
        ),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, ValueError, "labels"),
        ({"labels": torch.zeros(4)}, TypeError, "labels must be int64, not torch.float32"),
        ({"vocab_size": 6}, ValueError, "vocab_size must be 1 to 5"),
        ({"chunk": 0}, ValueError, "chunk must be 1 or more"),
        ({"reduction": "max"}, ValueError, "reduction must be mean, sum or none, not 'max'"),
    ],
)
def test_mistakes_are_named(change, error, words):
    call = {
        "hidden": torch.zeros(4, 2),
        "weight": torch.zeros(5, 2),
        "labels": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(error, match=words):
        linear_cross_entropy(**{**call, **change})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "rows", "chunk"), [(5000, 50304, 1024), (300, 1000, None), (1, 515, 1)]
)
def test_on_a_gpu_the_error_is_that_of_torchs_own(path, tokens, rows, chunk):
    hidden = torch.randn(tokens, 256, device="cuda").requires_grad_()
    weight = (torch.randn(rows, 256, device="cuda") * 0.1).requires_grad_()
    labels = torch.randint(rows - 7, (tokens,), device="cuda")
    labels[1::7] = -100
    exact_inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = F.linear(*exact_inputs)
    logits = logits.masked_fill(torch.arange(rows, device="cuda") >= rows - 7, -torch.inf)
    exact = F.cross_entropy(logits, labels)
    wanted = torch.autograd.grad(exact, exact_inputs)

    def errors(loss):
        return [
            ((got - want).norm() / want.norm()).item()
            for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True)
        ] + [(loss - exact).abs().item()]

    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, labels, vocab_size=rows - 7, chunk=chunk)
        logits = F.linear(hidden, weight).float()
        logits = logits.masked_fill(torch.arange(rows, device="cuda") >= rows - 7, -torch.inf)
        theirs = F.cross_entropy(logits, labels)
    for our_error, their_error in zip(errors(ours), errors(theirs), strict=True):
        assert our_error <= 2 * their_error + 1e-4

    upstream = torch.randn(tokens, device="cuda")
    exact_each = F.cross_entropy(F.linear(*exact_inputs)[:, : rows - 7], labels, reduction="none")
    wanted = torch.autograd.grad(exact_each, exact_inputs, upstream.double())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        each = linear_cross_entropy(
            hidden, weight, labels, vocab_size=rows - 7, chunk=chunk, reduction="none"
        )
        their_each = F.cross_entropy(
            F.linear(hidden, weight).float()[:, : rows - 7], labels, reduction="none"
        )
    got, theirs = (
        torch.autograd.grad(one, (hidden, weight), upstream) for one in (each, their_each)
    )
    for a, b, exact in zip((each, *got), (their_each, *theirs), (exact_each, *wanted), strict=True):
        assert (a - exact).norm() <= 2 * (b - exact).norm() + 1e-4 * exact.norm()
