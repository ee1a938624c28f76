"""Recurrences and short convolutions equal their definitions, token by token in float64, within each document."""

from __future__ import annotations

import sys
import types
from importlib import metadata

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flashtrain_kernels import recurrences
from flashtrain_kernels.recurrences import Rows, fla
from flashtrain_kernels.recurrences.state_space import linear_recurrence

LENGTHS = [37, 1, 64, 5, 130]  # in one row, with a document of one token and one of a whole chunk
DOUBLE = {"dtype": torch.float64}


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def delta_rule(q, k, v, g, beta):
    """One document: (S, G, K), (S, H, V), decays (S, H) or (S, H, K), and (S, H)."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, out = torch.zeros(v.shape[1], k.shape[2], v.shape[2], **DOUBLE), []
    for t in range(len(v)):
        state = state * (g[t] if g.dim() == 3 else g[t, :, None]).exp()[..., None]
        old = torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - old))
        out.append(torch.einsum("hk,hkv->hv", q[t], state) / k.shape[2] ** 0.5)
    return torch.stack(out)


def state_space(x, dt, B, C, A, D):
    B, C = (one.repeat_interleave(x.shape[1] // one.shape[1], 1) for one in (B, C))
    state, out = torch.zeros(x.shape[1], B.shape[2], x.shape[2], **DOUBLE), []
    for t in range(len(x)):
        new = torch.einsum("hn,hp->hnp", B[t], dt[t, :, None] * x[t])
        state = (A * dt[t]).exp()[:, None, None] * state + new
        out.append(torch.einsum("hn,hnp->hp", C[t], state) + D[:, None] * x[t])
    return torch.stack(out)


def selective_scan(x, dt, B, C, A, D):
    state, out = torch.zeros(A.shape, **DOUBLE), []
    for t in range(len(x)):
        state = (A * dt[t, :, None]).exp() * state + (dt[t] * x[t])[:, None] * B[t]
        out.append(state @ C[t] + D * x[t])
    return torch.stack(out)


def lightning(q, k, v, slope):
    state, out = torch.zeros(v.shape[1], k.shape[2], v.shape[2], **DOUBLE), []
    for t in range(len(v)):
        state = (-slope).exp()[:, None, None] * state + torch.einsum("hk,hv->hkv", k[t], v[t])
        out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out)


def convolution(x, weight, bias):
    """One document: (S, D); torch's own convolution."""
    padded = F.pad(x.T, (weight.shape[1] - 1, 0))[None]
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))[0].T


def number(*sizes: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    return torch.empty(*sizes, **DOUBLE).uniform_(low, high)


def case(kind: str, *shape: int):
    """(ours, the definition for one document, tensors (B, S, ...), parameters), with decays that reach far."""
    torch.manual_seed(0)
    decay, x = number(*shape, 4, low=-0.1, high=0), number(*shape, 4, 6)
    q, k = number(*shape, 2, 8), number(*shape, 2, 8)
    if "delta rule" in kind:
        g = number(*shape, 4, 8, low=-0.1, high=0) if kind == "delta rule by channels" else decay

        def ours(q, k, v, g, beta, rows):
            return recurrences.gated_delta_rule(q, k, v, g, beta, rows, normalize=True)

        return ours, delta_rule, [q, k, x, g, number(*shape, 4, low=0)], []
    if kind == "state space":

        def ours(x, dt, B, C, A, D, rows):
            return recurrences.state_space(x, dt, A, B, C, rows, D)

        return ours, state_space, [x, -5 * decay, k, q], [number(4, low=-0.2, high=0), number(4)]
    if kind == "selective scan":

        def ours(x, dt, B, C, A, D, rows):
            return recurrences.selective_scan(x.mT, dt.mT, A, B.mT, C.mT, rows, D).mT

        given = [number(*shape, 6), number(*shape, 6, low=0, high=0.5), number(*shape, 3), number(*shape, 3)]
        return ours, selective_scan, given, [number(6, 3, low=-0.2, high=0), number(6)]
    if kind == "lightning":
        given = [number(*shape, 4, 8), number(*shape, 4, 8), x]
        return recurrences.lightning_attention, lightning, given, [number(4, low=0, high=0.1)]

    def ours(x, weight, bias, rows):
        return recurrences.short_convolution(x.mT, weight, bias, rows, silu=True).mT

    return ours, convolution, [number(*shape, 6)], [number(6, 7), number(6)]


KINDS = ["convolution", "delta rule", "delta rule by channels", "state space", "selective scan", "lightning"]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_each_by_itself_token_by_token_with_gradients(kind):
    rows = LENGTHS, [200, 37]
    ours, definition, tensors, parameters = case(kind, 2, sum(LENGTHS))
    leaves = [x.requires_grad_() for x in (*tensors, *parameters)]
    out = ours(*tensors, *parameters, Rows(torch.cat([positions(lengths) for lengths in rows])))
    parts = []
    for row, lengths in enumerate(rows):
        documents = zip(*(x[row].split(lengths) for x in tensors), strict=True)
        parts.append(torch.cat([definition(*document, *parameters) for document in documents]))
    expected, weights = torch.stack(parts), torch.randn(out.shape, **DOUBLE)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    found, wanted = (torch.autograd.grad((each * weights).sum(), leaves) for each in (out, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing_and_the_result_has_the_input_s_type(kind):
    ours, _, tensors, parameters = case(kind, 1, sum(LENGTHS))
    rows, single = Rows(positions(LENGTHS)), [x.float() for x in (*tensors, *parameters)]
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(*single, rows)
        assert ours(*(x.bfloat16() for x in tensors), *single[len(tensors) :], rows).dtype == torch.bfloat16
    torch.testing.assert_close(found, ours(*single, rows), rtol=0, atol=0)
    torch.testing.assert_close(found.double(), ours(*tensors, *parameters, rows), rtol=1e-4, atol=1e-4)


def test_what_another_document_holds_never_passes_not_even_nan():
    for kind in KINDS:
        ours, _, tensors, parameters = case(kind, 1, sum(LENGTHS))
        expected = ours(*tensors, *parameters, Rows(positions(LENGTHS)))
        for x in tensors:
            x[:, :37] = torch.nan
        found = ours(*tensors, *parameters, Rows(positions(LENGTHS)))
        assert torch.equal(found[:, 37:], expected[:, 37:]), kind


def test_padding_that_counts_on_is_part_of_the_document_before_it():
    rows = Rows(torch.cat([positions([5, 3]), positions([8])]))
    assert rows.bounds.tolist() == [0, 5, 8, 16]
    assert rows.packed
    assert not Rows(positions([8]).expand(2, 8)).packed


# Functions of fla-core 0.6.0's signatures, computed by our plain forms.
def document_rows(cu_seqlens: Tensor) -> Rows:
    return Rows(positions(cu_seqlens.diff().tolist()))


def causal_conv1d(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
    backend="triton", cu_seqlens=None,
):  # fmt: skip
    out = recurrences.convolution._shifted(x.mT, weight, bias, document_rows(cu_seqlens), activation == "silu")
    return out.mT, None


def chunk_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):  # fmt: skip
    rows = document_rows(cu_seqlens)
    return recurrences.delta_rule._chunked(q, k, v, g.to(q.dtype), beta, rows, use_qk_l2norm_in_kernel), None


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):  # fmt: skip
    assert q.shape[2] == k.shape[2] == v.shape[2]  # it has no groups
    out = linear_recurrence(v, g.to(v.dtype), k, q, document_rows(cu_seqlens))
    return out * (scale or q.shape[3] ** -0.5), None


@pytest.fixture
def library(monkeypatch):
    """fla-core's modules, and tensors that it serves."""
    for name, function in {
        "modules.causal_conv1d": causal_conv1d,
        "ops.gated_delta_rule": chunk_rule,
        "ops.kda": chunk_rule,
        "ops.simple_gla": chunk_simple_gla,
    }.items():
        module = types.ModuleType(f"fla.{name}")
        module.causal_conv1d = module.chunk_gated_delta_rule = module.chunk_kda = module.chunk_simple_gla = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fla, "serves", lambda operator, x: None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "selective scan"])
def test_the_library_s_kernels_get_what_the_plain_form_computes(kind, library, monkeypatch):
    ours, _, tensors, parameters = case(kind, 2, sum(LENGTHS))
    given = *(x.float() for x in (*tensors, *parameters)), Rows(torch.cat([positions(LENGTHS), positions([200, 37])]))
    found = ours(*given)
    monkeypatch.setattr(fla, "serves", lambda operator, x: "not here")
    torch.testing.assert_close(found, ours(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("operator", "versions", "capability", "reason"),
    [
        ("delta rule", {"fla-core": "0.6.0", "triton": "3.7.1"}, 9, None),
        ("delta rule", {"fla-core": "0.6.0", "triton": "3.6.0"}, 9, "refuses Triton 3.6.0 on Hopper"),
        ("state space", {"fla-core": "0.6.0", "triton": "3.4.0"}, 9, "refuses Triton 3.4.0 on Hopper"),
        ("delta rule", {"fla-core": "0.6.0", "triton": "3.3.1"}, 9, None),
        ("delta rule", {"fla-core": "0.6.0", "triton": "3.6.0"}, 8, None),
        ("delta rule by channels", {"fla-core": "0.6.0", "triton": "3.6.0"}, 9, None),
        ("convolution", {"fla-core": "0.6.0", "triton": "3.6.0"}, 9, None),
        ("convolution", {"fla-core": "0.5.2", "triton": "3.7.1"}, 9, "fla-core is 0.5.2"),
        ("convolution", {"triton": "3.7.1"}, 9, "fla-core is not installed"),
    ],
)
def test_versions_that_would_fail_in_the_first_backward_are_known_before_it(
    operator, versions, capability, reason, monkeypatch
):
    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(fla.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    found = fla.unavailable.__wrapped__(operator, torch.device("cuda"))
    assert found == reason if reason is None else reason in found
    assert "expected bfloat16" in fla.serves(operator, torch.zeros(1))
