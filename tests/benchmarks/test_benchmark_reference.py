"""The benchmark's float64 reference, against autograd on the whole matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtrain_recipes.attention_benchmark import reference
from flashtrain_recipes.attention_benchmark.cases import Case, document_lengths
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, make_sets
from flashtrain_recipes.attention_benchmark.peers.pytorch import Standard

CPU = torch.device("cpu")

CASES = [
    Case(2, 4, 48, 16, "full", dtype_name="float32"),
    Case(1, 4, 48, 16, "causal", kv_heads=2, seqlen_k=80, dtype_name="float32"),
    Case(1, 2, 48, 16, "window-7", softcap=2.0, dtype_name="float32"),
    Case(1, 3, 48, 16, "causal", alibi=True, dtype_name="float32"),
    Case(1, 2, 48, 16, "full", bias="bias gradient", dtype_name="float32"),
    Case(1, 2, 128, 16, "causal-document", documents=document_lengths(128), dtype_name="float32"),
    Case(1, 2, 512, 16, "block-random", density=0.5, dtype_name="float32"),
]


def in_float64(one: Inputs) -> Inputs:
    doubled = {name: getattr(one, name).detach().double().requires_grad_() for name in ("q", "k", "v")}
    bias = None if one.bias is None else one.bias.detach().double()
    return replace(one, **doubled, dout=one.dout.double(), bias=bias)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_what_autograd_gives_on_the_whole_matrix(case: Case, monkeypatch) -> None:
    monkeypatch.setitem(reference._PIECE, "cpu", 4 * case.seqlen_k)  # several pieces
    context = Context(case, CPU)
    one = in_float64(make_sets(case, CPU, 0, 0)[0])
    out = Standard().attend(case, context)(one)
    gradients = torch.autograd.grad(out, [one.q, one.k, one.v], one.dout)
    wanted = reference.expected(case, one, context)
    assert wanted.error(out.detach()) < 1e-12
    assert wanted.gradient_error(*gradients) < 1e-12


def test_a_wrong_gradient_shows_in_the_error() -> None:
    case = CASES[0]
    one = make_sets(case, CPU, 0, 0)[0]
    wanted = reference.expected(case, one, Context(case, CPU))
    out = Standard().attend(case, Context(case, CPU))(one)
    dq, dk, dv = torch.autograd.grad(out, [one.q, one.k, one.v], one.dout)
    assert wanted.gradient_error(dq, dk, dv) < 1e-5
    assert wanted.gradient_error(dq, dk * 1.01, dv) > 0.005


def test_sets_are_fresh_and_as_many_as_outgrow_the_cache() -> None:
    case = Case(1, 2, 64, 16, "full", dtype_name="float32")  # 24 KiB of q, k and v
    assert len(make_sets(case, CPU, 0, 0)) == 1
    sets = make_sets(case, CPU, 0, 36 * 1024)
    assert len(sets) == 3
    assert not torch.equal(sets[0].q, sets[1].q)
    assert len(make_sets(case, CPU, 0, 2**30)) == 32
