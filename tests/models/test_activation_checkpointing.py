"""Less memory for activations, the same losses and gradients: every kind of checkpointing,
chunks and offloading."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.models import (
    Decoder,
    DecoderConfig,
    MemorySavings,
    activation_checkpointing,
    decoder,
)
from flashtrain.models.activation_checkpointing import CHECKPOINTING, compile_lean
from flashtrain_kernels import dispatch

LAYERS = 2
SAVINGS = {
    "selective": MemorySavings("selective"),
    "full": MemorySavings("full"),
    "chunks": MemorySavings("none", ffn_chunk=5, loss_chunk=7),
    "selective, chunks": MemorySavings("selective", ffn_chunk=5),
    "full, chunks, offload": MemorySavings("full", offload=True, ffn_chunk=5),
    "selective, offload": MemorySavings("selective", offload=True),
    "selective, one layer": MemorySavings("selective", layers=1),
}


def build(
    attention: str,
    savings: MemorySavings,
    family: str = "llama",
    dropout: float = 0.0,
    layers: int = LAYERS,
) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", family, vocab_size=50, context=16, dropout=dropout)
    model = Decoder(config.changed(layers=layers, embed=32, ffn=48), attention=attention).double()
    model.save_memory(savings)
    return model


def operators(attention: str):
    """Flash through its operators, as on a GPU: left alone, a CPU has torch's
    attention in their place."""
    return dispatch.force("reference") if attention == "flash" else nullcontext()


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: Decoder, loss=None, mask=None) -> list[torch.Tensor]:
    torch.manual_seed(2)
    value = (loss or model.loss)(tokens(), tokens().roll(-1, 1), mask=mask)
    return [value, *torch.autograd.grad(value, list(model.parameters()))]


def assert_equal(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, exact, atol=1e-11, rtol=0)


class Counted(TorchDispatchMode):
    """Counts the calls of every operator by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))

    def attention(self) -> int:
        """How often attention was computed forward."""
        ours = ("flashtrain_kernels::forward", "flashtrain_kernels::forward_qkvpacked")
        torchs = "aten::_scaled_dot_product_flash_attention_for_cpu"
        return sum(self.calls[name] for name in (*ours, torchs))


# --- the same result ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "family"),
    [("flash", "gpt2"), ("flash", "llama"), ("sdpa", "gpt2"), ("standard", "llama")],
)
@pytest.mark.parametrize("name", SAVINGS)
def test_losses_gradients_and_dropped_weights_stay(name, attention, family, mask_of_lengths):
    packed = mask_of_lengths([5, 7], [12])
    for mask, dropout in ((None, 0.3), (packed, 0.0), (packed, 0.3)):
        with operators(attention):
            exact = loss_and_gradients(
                build(attention, MemorySavings(), family, dropout), mask=mask
            )
            assert_equal(
                loss_and_gradients(build(attention, SAVINGS[name], family, dropout), mask=mask),
                exact,
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention", "dropout"),
    [
        ("selective, chunks", "flash", 0.3),
        ("selective, one layer", "flash", 0.0),
        ("full", "flash", 0.0),
        ("full", "standard", 0.3),
    ],
)
def test_the_loss_compiles_whole(name, attention, dropout, mask_of_lengths):
    torch.compiler.reset()
    mask = mask_of_lengths([5, 7], [12]) if name == "full" else None
    with operators(attention):
        model = build(attention, SAVINGS[name], dropout=dropout)
        compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager", dynamic=False)
        ours = loss_and_gradients(model, compiled, mask)
        assert_equal(ours, loss_and_gradients(model, mask=mask))


def test_blocks_compile_by_themselves_in_one_graph_for_all_layers_and_the_hooks_stay_outside(
    mask_of_lengths,
):
    torch.compiler.reset()
    model = build("sdpa", SAVINGS["full, chunks, offload"], layers=10)
    mask = mask_of_lengths([5, 7], [12])
    exact = loss_and_gradients(model, mask=mask)
    graphs: list[object] = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    model.compile_blocks(fullgraph=True, dynamic=False, backend=count)
    assert_equal(loss_and_gradients(model, mask=mask), exact)
    assert len(graphs) == 1
    with torch.no_grad():
        # With a cache the shapes differ from token to token: not compiled.
        model(tokens(), cache=model.new_cache())
    assert len(graphs) == 1


# --- what is kept, and what is computed again -----------------------------------------------------


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize(("kind", "times"), [("none", 1), ("selective", 1), ("full", 2)])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_selective_computes_attention_once_and_full_twice(kind, times, attention, family):
    with operators(attention), Counted() as counted:
        loss_and_gradients(build(attention, MemorySavings(kind), family))
    assert counted.attention() == times * LAYERS


# (With full checkpointing torch's tracer takes SDPA on a CPU apart, so there is
# no operator to count.)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "attention", "again"),
    [("selective", "flash", 0), ("selective", "sdpa", 0), ("full", "flash", LAYERS)],
)
def test_compiled_code_keeps_and_computes_again_what_the_kind_says(kind, attention, again):
    torch.compiler.reset()
    attended: dict[str, int] = {}
    handed_on: list[tuple[int, ...]] = []

    def look_at(name):
        def compiler(graph, _):
            names = [str(node.target) for node in graph.graph.nodes]
            attended[name] = sum(
                "backward" not in n and ("kernels.forward" in n or "scaled_dot" in n) for n in names
            )
            if name == "forward":
                (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
                computed = [node.meta["val"] for node in outputs if node.op != "placeholder"]
                handed_on.extend(tuple(value.shape) for value in computed)
            return make_boxed_func(graph)

        return compiler

    backend = aot_autograd(
        fw_compiler=look_at("forward"),
        bw_compiler=look_at("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    with operators(attention):
        model = build(attention, MemorySavings(kind), "gpt2")
        loss_and_gradients(
            model, torch.compile(model.loss, fullgraph=True, backend=backend, dynamic=False)
        )
    assert attended == {"forward": LAYERS, "backward": again}
    assert handed_on.count((2, 12, 32)) == LAYERS  # each block's input
    kept_of_attention = sum(shape in ((2, 12, 4, 8), (2, 4, 12, 8)) for shape in handed_on)
    assert kept_of_attention == (LAYERS if kind == "selective" else 0)
    # Nothing of the feed-forward, nothing of qkv.
    assert not any(48 in shape or 96 in shape for shape in handed_on)


def kept(savings: MemorySavings, layers: int = LAYERS) -> int:
    """Bytes that autograd keeps for the backward beyond the weights, each storage counted once."""
    model = build("sdpa", savings, "gpt2", layers=layers)
    return kept_by(model, model.loss)


def kept_by(model: Decoder, loss) -> int:
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(tokens(), tokens())
    return sum(storages.values())


@pytest.mark.parametrize(("family", "less"), [("llama", 32 + 32 + 48), ("gpt2", 32 + 32)])
def test_compiled_code_saves_neither_norms_outputs_nor_a_gates_product_and_gradients_stay(
    family, less
):
    """Of each token two norms' outputs of width 32, and SwiGLU's product of width 48; GELU's
    output is that of an operator. torch.compile alone saves them."""

    def step(compile) -> tuple[int, list[torch.Tensor]]:
        torch.compiler.reset()
        with operators("flash"):
            model = build("flash", MemorySavings(), family)
            loss = compile(model.loss, backend="aot_eager_decomp_partition", dynamic=False)
            return kept_by(model, loss), loss_and_gradients(model, loss)

    (lean, ours), (whole, exact) = step(compile_lean), step(torch.compile)
    # Of 24 tokens in float64; GPT-2's positions, a few bytes, come or go.
    assert whole - lean == pytest.approx(LAYERS * 24 * less * 8, rel=0.01)
    assert all(map(torch.equal, ours, exact))


def test_each_kind_keeps_less_and_full_one_input_a_block():
    hidden = 24 * 32 * 8  # T x E in float64
    a_block = {
        kind: kept(MemorySavings(kind), layers=3) - kept(MemorySavings(kind), layers=2)
        for kind in CHECKPOINTING
    }
    assert a_block["full"] == hidden
    assert a_block["none"] > 10 * hidden
    first = MemorySavings("full", layers=1)  # a further layer stores all
    assert kept(first, layers=3) - kept(first, layers=2) == a_block["none"]
    assert kept(MemorySavings(), layers=2) - kept(first, layers=2) == a_block["none"] - hidden
    chunked = MemorySavings(ffn_chunk=5)
    assert kept(chunked, layers=3) - kept(chunked, layers=2) < a_block["none"]


@pytest.mark.parametrize(
    "savings", [MemorySavings(kind, offload=True) for kind in ("full", "selective")]
)
def test_offloading_sends_each_blocks_input_and_nothing_else_to_the_host(savings, monkeypatch):
    sent: list[torch.Size] = []

    real = activation_checkpointing._to_host
    monkeypatch.setattr(
        activation_checkpointing,
        "_to_host",
        lambda tensor: (sent.append(tensor.shape), real(tensor))[1],
    )
    monkeypatch.setattr(activation_checkpointing, "PINNED_BYTES", 256)  # several parts, and a rest
    loss_and_gradients(build("sdpa", savings))
    inputs = [shape for shape in sent if len(shape) == 3]
    assert inputs == [torch.Size([2, 12, 32])] * LAYERS
    assert all(shape.numel() == 0 for shape in sent if len(shape) != 3)


def test_the_loss_takes_as_many_tokens_at_once_as_it_is_given(monkeypatch):
    asked: list[int | None] = []
    real = decoder.linear_cross_entropy
    monkeypatch.setattr(
        decoder,
        "linear_cross_entropy",
        lambda *a, chunk, **k: (asked.append(chunk), real(*a, **k))[1],
    )
    for savings in (MemorySavings(), MemorySavings(loss_chunk=7)):
        build("sdpa", savings).loss(tokens(), tokens())
    assert asked == [None, 7]


# --- mistakes -------------------------------------------------------------------------------------


def test_savings_say_what_they_are():
    assert MemorySavings().describe() == ""
    assert (
        MemorySavings("selective", layers=9).describe()
        == "selective checkpointing in 9 of the layers"
    )
    every = MemorySavings("full", offload=True, ffn_chunk=16384, loss_chunk=2048).describe()
    assert every == (
        "full checkpointing, inputs in host memory, feed-forward by 16,384 tokens, "
        "loss by 2,048 tokens"
    )
