"""The mixers of model.pattern that keep states equal their papers' equations, token by token in
float64; documents do not see each other, and tokens one by one give what the whole gives."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig, MemorySavings
from flashtrain.models.layer_spec import layer_of
from flashtrain_kernels import masks
from flashtrain_kernels.recurrences import Rows

KINDS = ["retention", "lightning", "gla", "norm_attention", "delta", "mamba2"]
HEADS, DIM, TOKENS = 2, 16, 70  # more than a chunk of 64


def build(
    pattern: list[str], context: int = 128, family: str = "llama", dropout: float = 0.0
) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size(
        "demo",
        family,
        vocab_size=61,
        context=context,
        layers=2,
        width=HEADS * DIM,
        heads=HEADS,
        pattern=pattern,
        dropout=dropout,
    )
    return Decoder(config, attention="sdpa", residual="weights").double().eval()


def mixed(kind: str) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A mixer with large random weights, (1, S, E) tokens, and what it makes of them."""
    mixer = build([kind]).blocks[0].mixer
    for one in mixer.parameters():
        if one.dim() == 2:
            torch.nn.init.normal_(one, std=0.3)
    x = torch.randn(1, TOKENS, HEADS * DIM, dtype=torch.float64)
    positions = torch.arange(TOKENS)[None]
    return mixer, x[0], mixer(x, positions=positions, mask=Rows(positions))[0].detach()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(0, 1)  # (H, S, D)


def normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def joined(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1)


def decay_matrix(log_decay: Tensor) -> Tensor:
    """D (H, S, S): prod of the decays after token m up to n where n >= m, else 0; (H, S) given."""
    total = log_decay.cumsum(1)
    return (total[:, :, None] - total[:, None]).exp().tril()


def rotated(x: Tensor) -> Tensor:
    """x_n e^(i n theta), pairs (i, i + D/2)."""
    theta = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    turn = torch.polar(torch.ones(()).double(), torch.arange(TOKENS)[:, None] * theta)
    pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn
    return torch.cat((pairs.real, pairs.imag), -1)


def test_retention_is_equation_5_and_its_gate_equation_8_of_the_retentive_network():
    mixer, x, out = mixed("retention")
    gate, q, k, v = mixer.inputs(x).chunk(4, -1)
    gamma = torch.tensor([1 - 2.0**-5, 1 - 2.0**-6]).double()
    decays = decay_matrix(gamma.log()[:, None].expand(-1, TOKENS))
    retained = (rotated(heads(q)) @ rotated(heads(k)).mT * decays) @ heads(v)
    expected = mixer.output(F.silu(gate) * joined(normed(retained)))
    torch.testing.assert_close(out, expected)


def test_lightning_attention_is_its_papers_masked_product_with_alibis_slopes():
    mixer, x, out = mixed("lightning")
    gate, q, k, v = mixer.inputs(x).chunk(4, -1)
    slopes = torch.tensor([2.0**-4, 2.0**-8]).double()  # ALiBi's of two heads
    decays = decay_matrix(-slopes[:, None].expand(-1, TOKENS))
    read = (heads(F.silu(q)) @ heads(F.silu(k)).mT * decays) @ heads(F.silu(v))
    torch.testing.assert_close(out, mixer.output(gate.sigmoid() * normed(joined(read))))


def test_gated_linear_attention_is_its_papers_recurrence_with_one_gate_a_head_and_its_root_of_16():
    mixer, x, out = mixed("gla")
    gate, *parts, alpha = mixer.inputs(x).split([HEADS * DIM] * 4 + [HEADS], -1)
    q, k, v = map(heads, parts)
    state, read = torch.zeros(HEADS, DIM, DIM).double(), []
    for t in range(TOKENS):
        kept = alpha[t].sigmoid() ** (1 / 16)
        state = kept[:, None, None] * state + k[:, t, :, None] * v[:, t, None]
        read.append((q[:, t, None] @ state)[:, 0])
    expected = mixer.output(F.silu(gate) * joined(normed(torch.stack(read, 1))))
    torch.testing.assert_close(out, expected)


def test_norm_attention_is_transnormers_norm_of_q_times_kv_without_a_denominator():
    mixer, x, out = mixed("norm_attention")
    q, k, v = mixer.inputs(x).chunk(3, -1)
    scores = (heads(1 + F.elu(q)) @ heads(1 + F.elu(k)).mT).tril()
    torch.testing.assert_close(out, mixer.output(normed(joined(scores @ heads(v)))))


def test_the_delta_rule_is_equation_10_of_gated_delta_networks():
    mixer, x, out = mixed("delta")
    width = HEADS * DIM
    gate, qkv, a, beta = mixer.inputs(x).split([width, 3 * width, HEADS, HEADS], -1)
    qkv = F.silu(F.conv1d(F.pad(qkv.T, (3, 0)), mixer.conv1d.weight, groups=3 * width)).T
    q, k, v = map(heads, qkv.chunk(3, -1))
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    alpha = (-mixer.A_log.exp() * F.softplus(a + mixer.dt_bias)).exp()
    state, read = torch.zeros(HEADS, DIM, DIM).double(), []  # S^T (K, V)
    for t in range(TOKENS):
        key, share = k[:, t, :, None], beta[t].sigmoid()[:, None, None]
        erased = torch.eye(DIM) - share * key @ key.mT
        state = alpha[t][:, None, None] * erased @ state + share * key @ v[:, t, None]
        read.append((q[:, t, None] @ state)[:, 0] / math.sqrt(DIM))
    expected = mixer.output(joined(normed(torch.stack(read, 1))) * F.silu(gate))
    torch.testing.assert_close(out, expected)


def test_mamba2_is_equation_1_of_its_paper_with_its_step_gate_and_norm():
    mixer, x, out = mixed("mamba2")
    inner, count = 2 * HEADS * DIM, 2 * HEADS
    gate, xbc, dt = mixer.inputs(x).split([inner, inner + 2 * 128, count], -1)
    weight, bias = mixer.conv1d.weight, mixer.conv1d.bias
    xbc = F.silu(F.conv1d(F.pad(xbc.T, (3, 0)), weight, bias, groups=inner + 2 * 128)).T
    values, b, c = xbc.split([inner, 128, 128], -1)
    values, dt = values.unflatten(-1, (count, DIM)), F.softplus(dt + mixer.dt_bias)
    state, read = torch.zeros(count, DIM, 128).double(), []
    for t in range(TOKENS):
        kept = (-mixer.A_log.exp() * dt[t]).exp()[:, None, None]
        state = kept * state + (dt[t][:, None] * values[t])[..., None] * b[t]
        read.append(state @ c[t] + mixer.D[:, None] * values[t])
    read = torch.stack(read).flatten(1)
    torch.testing.assert_close(out, mixer.output(normed(read * F.silu(gate))))


def test_the_gradient_of_norm_attention_is_bounded_as_transnormers_proposition_says():
    """A score's gradient under a denominator grows as 1 / score; under a norm it is
    at most 3 c1 c2 d / (2 sqrt(epsilon)), c1 and c2 the largest gradients and values."""
    torch.manual_seed(0)
    dim, largest = 16, {}
    values, gradient = (torch.randn(8, dim, dtype=torch.float64) for _ in range(2))
    for size in (1.0, 1e-3, 1e-6, 1e-9):
        given = torch.rand(8, 8).double() * size
        for kind, make in {
            "1 + elu": lambda s: (s / s.sum(-1, keepdim=True)) @ values,
            "norm": lambda s: F.rms_norm(s @ values, (dim,), eps=1e-5),
        }.items():
            scores = given.clone().requires_grad_()
            (found,) = torch.autograd.grad((make(scores) * gradient).sum(), scores)
            largest[kind, size] = found.abs().max().item()
    bound = 1.5 * gradient.norm(dim=-1).max() * values.norm(dim=-1).max() * dim / 1e-5**0.5
    assert all(largest["norm", size] <= bound for size in (1.0, 1e-3, 1e-6, 1e-9))
    assert largest["1 + elu", 1e-9] > 1e6 * largest["1 + elu", 1.0] > 0
    assert largest["1 + elu", 1e-9] > 10 * bound


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_one_by_one_give_what_the_whole_gives(kind):
    model = build([kind, "full"])
    rows, cache = torch.randint(0, 61, (2, 80)), model.new_cache()
    parts = [model(rows[:, :67], cache=cache)]
    parts += [model(rows[:, t : t + 1], cache=cache) for t in range(67, 80)]
    torch.testing.assert_close(torch.cat(parts, 1)[..., :61], model(rows)[..., :61])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_do_not_see_each_other_and_their_gradients_add_up(kind):
    model, rows = build([kind]), torch.randint(0, 61, (2, 80))
    ids = (torch.arange(80) >= 67).long().expand(2, -1)
    positions = torch.cat((torch.arange(67), torch.arange(13)))[None].expand(2, -1)

    def gradients(*losses: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(sum(losses), list(model.parameters())))

    given = {"positions": positions, "mask": masks.document(ids, causal=True)}
    packed = gradients(model.loss(rows, rows, **given, reduction="none").sum())
    parts = [model.loss(x, x, reduction="none").sum() for x in rows.split([67, 13], 1)]
    torch.testing.assert_close(packed, gradients(*parts))


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_and_compiled_layers_give_the_same_loss_and_gradients(kind):
    found = []
    for compiled in (False, True):
        model = build([kind]).float().train()
        if compiled:
            model.save_memory(type(model.savings)(checkpointing="full"))
            model.compile_blocks(backend="eager", fullgraph=True)
        loss = model.loss(torch.arange(40)[None], torch.arange(40)[None])
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["gla", "delta"])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputed_layers_drop_the_same_of_their_branches_again(kind, checkpointing):
    found = []
    for savings in (MemorySavings(), MemorySavings(checkpointing)):
        model = build([kind, "full"], dropout=0.3).train()
        model.save_memory(savings)
        torch.manual_seed(1)
        loss = model.loss(torch.arange(40)[None], torch.arange(40)[None])
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*found, atol=1e-11, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_counts_the_state_and_its_products_and_files_hold_it(kind):
    model = build([kind])
    spec = model.config.layers[0].mixer
    keys, count = (128, 2 * HEADS) if kind == "mamba2" else (DIM, HEADS)
    assert spec.state == count * DIM * keys
    assert spec.flops(1) == spec.flops(4096) == 3 * (6 if kind == "delta" else 4) * spec.state
    assert spec.memory(tokens=1, context=1, activation=2, attention="flash").inputs > 0
    assert layer_of(model.config.layers[0].plain()) == model.config.layers[0]
    assert DecoderConfig.of_plain(model.config.plain()) == model.config


def test_starts_are_reproducible_and_decays_begin_in_the_papers_ranges():
    for kind in ("delta", "mamba2"):
        mixer = build([kind]).blocks[0].mixer
        again = build([kind]).blocks[0].mixer
        assert torch.equal(mixer.A_log, again.A_log)
        assert ((mixer.A_log.exp() >= 1) & (mixer.A_log.exp() <= 16)).all()
        step = F.softplus(mixer.dt_bias)
        assert ((step >= 0.999e-3) & (step <= 0.1001)).all()


@pytest.mark.parametrize("word", ["retention:3", "delta:4", "mamba2:16"])
def test_a_word_with_a_value_that_the_mixer_has_not_is_refused(word):
    with pytest.raises(UserError, match=word):
        build([word])


def test_generation_without_a_kept_state_is_that_of_a_cache():
    from flashtrain.models.generation import generate

    model = build(["delta", "chunk:8", "gla"], context=64)
    prompt = torch.randint(0, 61, (2, 20))
    made = generate(model, prompt, 20, temperature=0)
    for length in range(20, 40):
        whole = model(made[:, :length])[:, -1]
        assert torch.equal(whole.argmax(-1), made[:, length])


def test_transnormer_attends_to_blocks_in_its_early_half_and_is_norm_attention_in_its_late_one():
    config = DecoderConfig.of_size("demo", "transnormer", vocab_size=61, context=256, layers=5)
    early, late = config.layers[:3], config.layers[3:]
    assert {layer.mixer.kind for layer in late} == {"norm_attention"}
    assert {layer.mixer.chunk for layer in early} == {64}
    assert all(layer.mixer.kv_heads == layer.mixer.heads for layer in early)  # not llama's
    narrow = DecoderConfig.of_size(
        "demo", "transnormer", vocab_size=61, context=256, pattern=["chunk:32", "norm_attention"]
    )
    assert narrow.layers[0].mixer.chunk == 32


def test_no_compiled_graph_spans_blocks_where_one_keeps_states():
    assert build(["full", "gla"]).recomputes_blocks
    assert not build(["full", "chunk:8"]).recomputes_blocks
