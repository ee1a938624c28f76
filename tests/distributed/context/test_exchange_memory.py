"""What sharing attention takes of a rank's memory, by method."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashtrain.distributed.context import all_gather, local_attention, ring, ulysses
from flashtrain.distributed.context.exchange_memory import SUM_BYTES, exchange_bytes, state_bytes
from flashtrain.distributed.context.layouts import contiguous
from flashtrain.distributed.context.local_attention import Saved, Scores
from flashtrain.distributed.context.local_mask import FULL, BandCall, LocalMasks
from flashtrain.distributed.context.methods import AUTO, METHODS, choose_method
from flashtrain.distributed.context.needed_keys import needed_keys
from flashtrain.distributed.context.traffic import Sizes
from flashtrain.distributed.context.transfers import Transfer
from flashtrain_kernels import masks, recurrences
from flashtrain_kernels.recurrences import Rows, SharedRows, fla


def needed(method: str, held: int, degree: int, heads: int = 16, kv_heads: int = 4) -> int:
    return exchange_bytes(choose_method(method, Sizes(degree, heads, kv_heads, 64, held)))


def test_one_rank_exchanges_nothing():
    assert needed(AUTO, 1024, 1) == 0


@pytest.mark.parametrize("method", METHODS)
def test_it_is_proportional_to_the_tokens_held(method):
    heads = 12 if method == "hybrid" else 16
    assert needed(method, 4096, 8, heads) == 4 * needed(method, 1024, 8, heads)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made within it held at once; views of `given` are none."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.held = self.most = 0
        self.known = {x.untyped_storage()._cdata for x in given}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage()._cdata not in self.known
            ):
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.held += storage.nbytes()
                self.most = max(self.most, self.held)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, which: int, size: int) -> None:
        self.known.discard(which)
        self.held -= size


@pytest.fixture(autouse=True)
def zeros(monkeypatch) -> None:
    """The kernel and the exchange give zeros."""

    def of_kernel(*tensors: torch.Tensor, **_: Any) -> Any:
        if len(tensors) > 3:
            return [torch.zeros_like(x) for x in tensors[1:4]]
        return torch.zeros_like(tensors[0]), torch.zeros(
            1, tensors[0].shape[2], tensors[0].shape[1]
        )

    monkeypatch.setattr(
        all_gather.dist, "all_to_all_single", lambda *_, **__: SimpleNamespace(wait=lambda: None)
    )
    monkeypatch.setattr(all_gather.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(local_attention, "attention_forward", of_kernel)
    monkeypatch.setattr(local_attention, "attention_backward", of_kernel)


def given(held: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """q, out, dout, k and v of a rank."""
    return [
        torch.zeros(1, held, number, 64, dtype=torch.bfloat16)
        for number in (heads,) * 3 + (kv_heads,) * 2
    ]


@pytest.mark.parametrize("kv_heads", [1, 4, 16])
def test_a_ring_holds_what_is_estimated_and_no_more_in_its_forward(
    kv_heads: int, monkeypatch
) -> None:
    """Three ranks as one sees them: what it receives is as large as what it sends."""

    def sent_on(_: Any, tensors: list[torch.Tensor], step: int, tag: int) -> Transfer:
        return Transfer([torch.zeros_like(x) for x in tensors], tensors, [])

    monkeypatch.setattr(ring.Ring, "_send_on", sent_on)
    (q, out, dout, k, v), lse = given(2048, 16, kv_heads), torch.zeros(1, 16, 2048)
    three = ring.Ring(None, [(BandCall(slice(0, 2048), 2048, FULL),)] * 3)
    with Peak(q, k, v) as forward:
        three.forward(q, k, v, Scores(0.1))
    with Peak(dout, q, k, v, out, lse) as backward:
        three.backward(Saved(dout, q, k, v, out, lse), Scores(0.1))
    # The kernel gives dQ here in the type of q, and is estimated to sum it in float32.
    estimated = needed("ring", 2048, 3, kv_heads=kv_heads) - q.numel() * SUM_BYTES + q.nbytes
    assert backward.most == pytest.approx(estimated, rel=0.02)
    assert forward.most <= estimated * 1.02


@pytest.mark.parametrize(
    ("heads", "kv_heads", "most"), [(32, 8, 1.02), (16, 16, 1.02), (12, 12, 1.02), (32, 4, 1.1)]
)
@pytest.mark.parametrize("rows", [1, 1 << 30], ids=["in pieces", "at once"])
def test_ulysses_holds_what_is_estimated(
    heads: int, kv_heads: int, most: float, rows: int, monkeypatch
) -> None:
    """Four ranks as one sees them. One key head a rank: its gradients are summed, which
    the estimate rounds up."""
    monkeypatch.setattr(ulysses, "PIECE_ROWS", rows)
    mask = masks.causal(8192)
    group = SimpleNamespace(size=4, rank=0, parts=lambda degree: (None, None))
    method = ulysses.Ulysses(contiguous(mask, 4), group, LocalMasks(mask, 1, 64, torch.bfloat16), 4)
    (q, out, dout, k, v), lse = given(2048, heads, kv_heads), torch.zeros(1, heads // 4, 8192)
    with Peak(dout, q, k, v, out, lse) as backward:
        method.backward(Saved(dout, q, k, v, out, lse), Scores(0.125))
    estimated = needed("ulysses", 2048, 4, heads, kv_heads)
    assert backward.most <= estimated <= most * backward.most


@pytest.mark.parametrize("begins", [[1229], [1229, 6144]], ids=["together", "half copied apart"])
def test_an_all_gather_of_seen_keys_takes_at_most_the_estimate_of_all(begins: list[int]) -> None:
    """Two ranks as each sees them."""
    # All of the second rank's queries see the first rank's keys, or, where another document
    # begins, half of them.
    mask = masks.document(
        torch.bucketize(torch.arange(8192), torch.tensor(begins), right=True)[None], causal=True
    )
    layout = contiguous(mask, 2)
    (q, out, dout, k, v), lse = given(4096, 16, 4), torch.zeros(1, 16, 4096)
    for rank in range(2):
        local_masks = LocalMasks(mask, 1, 64, torch.bfloat16)
        group = SimpleNamespace(group=None, size=2, rank=rank)
        method = all_gather.AllGatherNeeded(layout, group, local_masks, needed_keys(layout, mask))
        with Peak(dout, q, k, v, out, lse) as backward:
            method.backward(Saved(dout, q, k, v, out, lse), Scores(0.125))
        # Dq as in the ring.
        assert backward.most <= needed("all-gather", 4096, 2) - q.numel() * SUM_BYTES + q.nbytes


class Kernel(torch.autograd.Function):
    """A kernel of fla-core's, which saves its inputs, as far as memory is concerned."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial):
        ctx.save_for_backward(q, k, v, g, beta, initial)
        documents = 1 if initial is None else len(initial)
        final = v.new_zeros(documents, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
        return torch.zeros_like(v), final


def kernel(q, k, v, g, beta=None, *, initial_state=None, **_):
    return Kernel.apply(q, k, v, g, beta, initial_state)


def bytes_saved(compute) -> int:
    """Bytes of the storages that autograd saves of compute()."""
    saved = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compute()
    return sum(one.nbytes() for one in saved.values())


@pytest.mark.parametrize("operator", ["delta rule", "decayed sum"])
def test_what_states_that_pass_leave_until_the_backward_is_estimated(operator, monkeypatch):
    names = {"gated_delta_rule": "chunk_gated_delta_rule", "kda": "chunk_kda"}
    for name, function in {**names, "simple_gla": "chunk_simple_gla"}.items():
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", SimpleNamespace(**{function: kernel}))
    monkeypatch.setattr(fla, "serves", lambda operator, x: None)
    held, heads, groups, keys, values = 4096, 4, 2, 32, 32
    whole = torch.cat([torch.arange(length) for length in (3000, 1000, 4192)])[None]
    place = torch.arange(2 * held)
    tokens = torch.stack((torch.cat((place[:2048], place[6144:])), place[2048:6144]))[None]

    def number(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(1, held, *sizes, dtype=dtype, requires_grad=True)

    q, k, v = number(groups, keys), number(groups, keys), number(heads, values)
    g, beta = number(heads, dtype=torch.float32), number(heads)
    if operator == "delta rule":
        passed, columns = heads * keys * (keys + values), heads * keys
        run = lambda rows: recurrences.gated_delta_rule(q, k, v, g, beta, rows)  # noqa: E731
    else:
        passed, columns = heads * keys * (1 + values), heads * values
        run = lambda rows: recurrences.decayed_sum(v, g, k, q, rows)  # noqa: E731
    positions = whole[:, tokens[0, 0]]
    shared = SharedRows(positions, whole, tokens, 0, lambda x: torch.stack((x, x)))
    added = bytes_saved(lambda: run(shared)) - bytes_saved(lambda: run(Rows(positions)))
    estimated, _ = state_bytes(passed, columns, Sizes(2, 1, 1, 1, held, 2), 1)
    assert 0.9 * added < estimated < 1.1 * added
