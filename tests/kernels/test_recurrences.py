"""Recurrences and short convolutions equal their definitions, token by token in
float64, within each document."""

from __future__ import annotations

import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flashtrain_kernels import recurrences
from flashtrain_kernels.recurrences import Rows, SharedRows, fla

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
    return decayed_sum(x * dt[..., None], A * dt, B, C) + D[:, None] * x


def selective_scan(x, dt, B, C, A, D):
    state, out = torch.zeros(A.shape, **DOUBLE), []
    for t in range(len(x)):
        state = (A * dt[t, :, None]).exp() * state + (dt[t] * x[t])[:, None] * B[t]
        out.append(state @ C[t] + D * x[t])
    return torch.stack(out)


def decayed_sum(v, g, k, q):
    k, q = (one.repeat_interleave(v.shape[1] // one.shape[1], 1) for one in (k, q))
    state, out = torch.zeros(v.shape[1], k.shape[2], v.shape[2], **DOUBLE), []
    for t in range(len(v)):
        state = g[t].exp()[:, None, None] * state + torch.einsum("hk,hv->hkv", k[t], v[t])
        out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out)


def convolution(x, weight, bias):
    """One document: (S, D); torch's own convolution."""
    padded = F.pad(x.T, (weight.shape[1] - 1, 0))[None]
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))[0].T


def number(*sizes: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    return torch.empty(*sizes, **DOUBLE).uniform_(low, high)


def scanned(x, dt, B, C, A, D, rows):
    return recurrences.selective_scan(x.mT, dt.mT, A, B.mT, C.mT, rows, D).mT


OURS = {
    "convolution": lambda x, *given: recurrences.short_convolution(x.mT, *given, silu=True).mT,
    "delta rule": lambda *given: recurrences.gated_delta_rule(*given, normalize=True),
    "delta rule by channels": lambda *given: recurrences.gated_delta_rule(*given, normalize=True),
    "decayed sum": recurrences.decayed_sum,
    "state space": lambda x, dt, B, C, A, D, rows: recurrences.state_space(x, dt, A, B, C, rows, D),
    "selective scan": scanned,
}


def case(kind: str, *shape: int):
    """(ours, the definition for one document, tensors (B, S, ...), parameters), with
    decays that reach far."""
    torch.manual_seed(0)
    x, q, k, decay = (number(*shape, *sizes) for sizes in ((4, 6), (2, 8), (2, 8), (4,)))
    decay = (decay - 1) / 20  # -0.1 to 0
    by_channel = number(*shape, 4, 8, low=-0.1, high=0)
    small = (
        number(*shape, 6),
        number(*shape, 6, low=0, high=0.5),
        number(*shape, 3),
        number(*shape, 3),
    )
    definition, tensors, parameters = {
        "convolution": (convolution, small[:1], [number(6, 7), number(6)]),
        "delta rule": (delta_rule, [q, k, x, decay, number(*shape, 4, low=0)], []),
        "delta rule by channels": (delta_rule, [q, k, x, by_channel, number(*shape, 4, low=0)], []),
        "decayed sum": (decayed_sum, [x, decay, k, q], []),
        "state space": (
            state_space,
            [x, -5 * decay, k, q],
            [number(4, low=-0.2, high=0), number(4)],
        ),
        "selective scan": (selective_scan, small, [number(6, 3, low=-0.2, high=0), number(6)]),
    }[kind]
    return OURS[kind], definition, list(tensors), parameters


KINDS = list(OURS)


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
    found, wanted = (
        torch.autograd.grad((each * weights).sum(), leaves) for each in (out, expected)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing_and_the_result_has_the_input_s_type(kind):
    ours, _, tensors, parameters = case(kind, 1, sum(LENGTHS))
    rows, single = Rows(positions(LENGTHS)), [x.float() for x in (*tensors, *parameters)]
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(*single, rows)
        assert (
            ours(*(x.bfloat16() for x in tensors), *single[len(tensors) :], rows).dtype
            == torch.bfloat16
        )
    torch.testing.assert_close(found, ours(*single, rows), rtol=0, atol=0)
    torch.testing.assert_close(
        found.double(), ours(*tensors, *parameters, rows), rtol=1e-4, atol=1e-4
    )


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


def document_rows(cu_seqlens: Tensor) -> Rows:
    return Rows(positions(cu_seqlens.diff().tolist()))


# Functions of fla-core 0.6.0's signatures, in so far as they are used, computed by our plain forms.
def causal_conv1d(x, weight=None, bias=None, residual=None, *, activation=None, cu_seqlens=None):
    out = plain("convolution")._shifted(
        x.mT, weight, bias, document_rows(cu_seqlens), activation == "silu"
    )
    return out.mT, None


def chunk_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, *,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None,
):  # fmt: skip
    rows = document_rows(cu_seqlens)
    assert output_final_state == (initial_state is not None)
    given = q, k, v, g.to(q.dtype), beta, rows, use_qk_l2norm_in_kernel, initial_state
    return plain("delta_rule")._chunked(*given)


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, *,
    cu_seqlens=None,
):  # fmt: skip
    assert q.shape[2] == k.shape[2] == v.shape[2]  # it has no groups
    given = v, g.to(v.dtype), k, q, document_rows(cu_seqlens), initial_state
    out, final = plain("linear_recurrence")._chunked(*given)
    return out * (scale or q.shape[3] ** -0.5), final


def plain(name: str):
    return sys.modules[f"flashtrain_kernels.recurrences.{name}"]


@pytest.fixture
def library(monkeypatch):
    """fla-core's modules, and tensors that it serves."""
    functions = {"modules.causal_conv1d": causal_conv1d, "ops.simple_gla": chunk_simple_gla}
    functions |= {"ops.gated_delta_rule": chunk_rule, "ops.kda": chunk_rule}
    for name, function in functions.items():
        module = types.ModuleType(f"fla.{name}")
        module.causal_conv1d = module.chunk_gated_delta_rule = module.chunk_kda = (
            module.chunk_simple_gla
        ) = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fla, "serves", lambda operator, x: None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "selective scan"])
def test_the_library_s_kernels_get_what_the_plain_form_computes(kind, library, monkeypatch):
    ours, _, tensors, parameters = case(kind, 2, sum(LENGTHS))
    given = (
        *(x.float() for x in (*tensors, *parameters)),
        Rows(torch.cat([positions(LENGTHS), positions([200, 37])])),
    )
    found = ours(*given)
    monkeypatch.setattr(fla, "serves", lambda operator, x: "not here")
    torch.testing.assert_close(found, ours(*given), rtol=1e-5, atol=1e-5)


class Gathered(torch.autograd.Function):
    """Of devices that are threads here: (R, ...); the gradient is the sum of all devices'."""

    @staticmethod
    def forward(ctx, devices, rank, x):
        ctx.devices, ctx.rank = devices, rank
        return torch.stack(devices.exchanged(rank, x))

    @staticmethod
    def backward(ctx, dout):
        return None, None, sum(each[ctx.rank] for each in ctx.devices.exchanged(ctx.rank, dout))


class Devices:
    """Threads that share rows, each with its tokens."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.given = tokens, [None] * tokens.shape[1]
        self.barrier = threading.Barrier(tokens.shape[1], timeout=60)

    def exchanged(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def each(self, function):
        """What function(rank, its tokens) returns for every rank, computed together."""
        with ThreadPoolExecutor(len(self.given)) as pool:
            return list(pool.map(function, range(len(self.given)), self.tokens[0]))


LAYOUTS = {
    "contiguous": [[(0, 119)], [(119, 237)]],
    "zigzag": [[(0, 60), (180, 237)], [(60, 180)]],
    # Runs of a token, shorter than a convolution, and unequal numbers of them.
    "many runs": [[(0, 3), (5, 6), (40, 100)], [(3, 5), (6, 7), (8, 40)], [(7, 8), (100, 237)]],
}


@pytest.mark.parametrize("by_library", [False, True], ids=["plain", "fla"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "selective scan"])
def test_devices_that_share_rows_compute_what_one_does_with_gradients(
    kind, layout, by_library, request
):
    ours, _, tensors, parameters = case(kind, 2, sum(LENGTHS))
    leaves = [x.requires_grad_() for x in tensors]
    whole = torch.cat([positions(LENGTHS), positions([200, 37])])
    expected = ours(*tensors, *parameters, Rows(whole))
    weights = torch.randn(expected.shape, **DOUBLE)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    runs = [torch.cat([torch.arange(*run) for run in mine]) for mine in LAYOUTS[layout]]
    tokens = torch.nn.utils.rnn.pad_sequence(runs, True, -1)[None]
    devices, exact = Devices(tokens), 1e-12
    if by_library:
        exact = 1e-5  # it gets the decays in float32
        request.getfixturevalue("library")

    def of_device(rank, mine):
        held, place = mine >= 0, mine.clamp(min=0)
        part = [x.detach()[:, place].requires_grad_() for x in tensors]
        gather = partial(Gathered.apply, devices, rank)
        out = ours(*part, *parameters, SharedRows(whole[:, place], whole, tokens, rank, gather))
        # What padding computes is of no use, and is passed to nobody.
        gradients = torch.autograd.grad((out * weights[:, place])[:, held].sum(), part)
        return out.detach()[:, held], [one[:, held] for one in gradients]

    for mine, (out, gradients) in zip(runs, devices.each(of_device), strict=True):
        torch.testing.assert_close(out, expected[:, mine], rtol=0, atol=exact)
        for one, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(one, other[:, mine], rtol=10 * exact, atol=10 * exact)


def test_no_nan_of_another_document_passes_from_device_to_device():
    whole = positions(LENGTHS)
    tokens = torch.arange(99).view(1, 3, 33)
    for kind in [kind for kind in KINDS if kind != "selective scan"]:
        ours, _, tensors, parameters = case(kind, 1, 99)
        expected = ours(*tensors, *parameters, Rows(whole[:, :99]))
        for x in tensors:
            x[:, :38] = torch.nan  # two documents; the first and the third one cross a border
        devices = Devices(tokens)

        def of_device(rank, mine, ours=ours, given=(tensors, parameters), devices=devices):
            gather = partial(Gathered.apply, devices, rank)
            rows = SharedRows(whole[:, mine], whole[:, :99], tokens, rank, gather)
            return ours(*(x[:, mine] for x in given[0]), *given[1], rows)

        found = torch.cat(devices.each(of_device), 1)
        torch.testing.assert_close(found[:, 38:], expected[:, 38:], rtol=0, atol=1e-12, msg=kind)


@pytest.mark.parametrize(
    ("operator", "library", "triton", "capability", "reason"),
    [
        ("delta rule", "0.6.0", "3.7.1", 9, None),
        ("delta rule", "0.6.0", "3.6.0", 9, "refuses Triton 3.6.0 on Hopper"),
        ("decayed sum", "0.6.0", "3.4.0", 9, "refuses Triton 3.4.0 on Hopper"),
        ("delta rule", "0.6.0", "3.3.1", 9, None),
        ("delta rule", "0.6.0", "3.6.0", 8, None),
        ("delta rule by channels", "0.6.0", "3.6.0", 9, None),
        ("convolution", "0.6.0", "3.6.0", 9, None),
        ("convolution", "0.5.2", "3.7.1", 9, "fla-core is 0.5.2"),
        ("convolution", None, "3.7.1", 9, "fla-core is not installed"),
        ("selective scan", "0.6.0", "3.7.1", 9, "no kernel of it"),
    ],
)
def test_versions_that_would_fail_in_the_first_backward_are_known_before_it(
    operator, library, triton, capability, reason, monkeypatch
):
    def version(name):
        if name == "fla-core" and library is None:
            raise metadata.PackageNotFoundError(name)
        return library if name == "fla-core" else triton

    monkeypatch.setattr(fla.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    found = fla.unavailable.__wrapped__(operator, torch.device("cuda"))
    assert found == reason if reason is None else reason in found
    assert "expected bfloat16" in fla.serves(operator, torch.zeros(1))
