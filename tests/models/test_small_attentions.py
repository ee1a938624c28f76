"""KDGQA, DGQA and MFA equal their formulas in float64, decode as they read, and start from the
weights of plain attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.changed_layers import with_layers
from flashtrain.models.factorized import FactorizedSpec
from flashtrain.models.key_driven import heads_by_norms
from flashtrain.models.layer_spec import layer_of
from flashtrain.training.optimizers import adamw
from flashtrain_kernels import masks

EMBED, HEADS, DIM = 48, 6, 8
PATTERNS = {
    "kdgqa": ("kdgqa", {"kv_heads": 2}),
    "dgqa": ("kdgqa:0.99", {"kv_heads": 2}),
    "mfa": ("mfa:3x32x16", {}),
    "mfa-kr": ("mfa:3x32x16-kr", {}),
    "rotary kdgqa": ("kdgqa", {"kv_heads": 2, "family": "llama"}),
    "rotary mfa": ("mfa:3x32x16", {"family": "llama"}),
}
ALL = pytest.mark.parametrize("name", PATTERNS)


def build(pattern: str, family: str = "gpt2", attention: str = "sdpa", **sizes) -> Decoder:
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": EMBED, "heads": HEADS, **sizes}
    config = DecoderConfig.of_size(
        "demo", family, vocab_size=61, context=64, pattern=[pattern], **sizes
    )
    model = Decoder(config, attention=attention, residual="weights").double().eval()
    for name, one in model.named_parameters():
        if name.endswith(("qkv.weight", "down.weight", "up.weight")):
            torch.nn.init.normal_(one, std=0.2)
    return model


def named(name: str, **changes) -> Decoder:
    pattern, sizes = PATTERNS[name]
    return build(pattern, **{**sizes, **changes})


def tokens(length: int = 40) -> torch.Tensor:
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))


def uneven(model: Decoder, first: float = 3.0) -> Decoder:
    """Of two key heads the first has `first` times the norm of the second."""
    for block in model.blocks:
        keys = block.mixer.qkv.weight[HEADS * DIM : (HEADS + 2) * DIM].unflatten(0, (2, DIM))
        with torch.no_grad():
            keys /= keys.flatten(1).norm(dim=1)[:, None, None]
            keys[0] *= first
    return model


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v of (H, S, D) under the causal rule."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(
    ("norms", "counts"),
    [
        ([1.0, 1.0, 1.0, 1.0], [3, 3, 3, 3]),
        ([1.0, 2.0, 1.0, 2.0], [2, 4, 2, 4]),
        ([3.0, 1.0, 1.0, 1.0], [6, 2, 2, 2]),
        ([1.1, 1.0, 1.0, 0.9], [3, 3, 3, 3]),  # 3.3, 3, 3, 2.7: the largest remainder is rounded up
        ([100.0, 1.0, 1.0, 1.0], [12, 0, 0, 0]),
    ],
)
def test_key_heads_get_query_heads_in_proportion_to_their_norms(norms, counts):
    """The allocation of KDGQA, arXiv 2408.08454; equal norms give grouped-query attention's."""
    found = heads_by_norms(torch.tensor(norms), 12)
    assert found.bincount(minlength=4).tolist() == counts
    assert torch.equal(found, found.sort().values)


def test_kdgqa_is_attention_of_each_query_head_to_the_key_head_that_the_norms_give_it():
    mixer = uneven(build("kdgqa", kv_heads=2)).blocks[0].mixer
    x = torch.randn(20, EMBED, dtype=torch.float64)
    q, k, v = mixer.qkv(x).unflatten(-1, (-1, DIM)).transpose(0, 1).split([HEADS, 2, 2])
    of = [0, 0, 0, 0, 1, 1]  # norms of 3 to 1 round 4.5 and 1.5 to 5 and 1, or to 4 and 2
    shares = heads_by_norms(torch.tensor([3.0, 1.0]), HEADS)
    assert shares.bincount().tolist() in ([5, 1], [4, 2])
    of = shares.tolist()
    expected = torch.stack([causal(q[h], k[g], v[g]) for h, g in enumerate(of)], 1).flatten(1)
    torch.testing.assert_close(mixer(x[None])[0], mixer.output(expected))


def test_equal_norms_are_uniform_grouped_query_attention():
    model = uneven(build("kdgqa", kv_heads=2), first=1.0)
    plain = build("full", kv_heads=2)
    plain.load_state_dict(
        {name.replace("kdgqa", "attention"): one for name, one in model.state_dict().items()}
    )
    torch.testing.assert_close(model(tokens()), plain(tokens()))


def test_dgqa_averages_the_norms_of_each_steps_weights_once_however_often_a_layer_is_computed():
    model = build("kdgqa:0.99", kv_heads=2).float().train()
    model.save_memory(type(model.savings)(checkpointing="full"))
    mixer, optimizer = model.blocks[0].mixer, adamw(model, lr=0.1)
    average = None
    for _ in range(4):
        weight = mixer.qkv.weight[HEADS * DIM : (HEADS + 2) * DIM]
        norms = weight.detach().unflatten(0, (2, -1)).flatten(1).norm(dim=1)
        average = norms if average is None else 0.99 * average + 0.01 * norms
        for part in tokens().split(1):  # two micro-batches, each layer computed twice
            model.loss(part, part).backward()
        torch.testing.assert_close(mixer.head_map.norms[0], average)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()(tokens())
    torch.testing.assert_close(mixer.head_map.norms[0], average)


@pytest.mark.parametrize("shared", [False, True])
def test_mfa_is_softmax_of_low_rank_queries_over_one_key_head(shared):
    """arXiv 2412.19255: q_c = norm(x S_q) Q_c, k = x S_k, v = x S_v or, with key reuse, k; Step-3
    norms the queries' latent (2507.19427)."""
    mixer = build("mfa:3x32x16-kr" if shared else "mfa:3x32x16").blocks[0].mixer
    x = torch.randn(20, EMBED, dtype=torch.float64)
    parts = (x @ mixer.qkv.down.weight.T).split([16, 32] if shared else [16, 32, 32], -1)
    latent, k = F.rms_norm(parts[0], (16,), mixer.qkv.norm.weight, 1e-5), parts[1]
    heads = [causal(latent @ up.T, k, parts[-1]) for up in mixer.qkv.up.weight.split(32)]
    torch.testing.assert_close(mixer(x[None])[0], mixer.output(torch.cat(heads, -1)))


@ALL
def test_tokens_one_by_one_give_what_the_whole_gives(name):
    model, rows = named(name), tokens()
    cache = model.new_cache()
    parts = [model(rows[:, :9], cache=cache)]
    parts += [model(rows[:, t : t + 1], cache=cache) for t in range(9, 40)]
    torch.testing.assert_close(torch.cat(parts, 1)[..., :61], model(rows)[..., :61])
    stored = {
        one.data_ptr(): one.shape[2] * one.shape[3]
        for layer in cache.layers
        for one in (layer.keys, layer.values)
    }
    width = {"mfa": 64, "mfa-kr": 32}.get(name.split()[-1], 2 * 2 * DIM)
    assert sum(stored.values()) == 2 * width


@ALL
@pytest.mark.parametrize("attention", ["sdpa", "standard", "flash"])
def test_packed_documents_do_not_see_each_other(name, attention):
    model, rows = named(name, attention=attention), tokens()
    ids = (torch.arange(40) >= 17).long().expand(2, -1)
    positions = torch.cat((torch.arange(17), torch.arange(23)))[None].expand(2, -1)
    packed = model(rows, positions=positions, mask=masks.document(ids, causal=True))[..., :61]
    torch.testing.assert_close(packed[:, :17], model(rows[:, :17])[..., :61])
    torch.testing.assert_close(packed[:, 17:], model(rows[:, 17:])[..., :61])


@ALL
def test_recomputed_and_compiled_layers_give_the_same_loss_and_gradients(name):
    torch.compiler.reset()  # of the layers that other tests compiled
    found = []
    for compiled in (False, True):
        model = named(name).float().train()
        if compiled:
            model.save_memory(type(model.savings)(checkpointing="full"))
            model.compile_blocks(backend="eager", fullgraph=True)
        loss = model.loss(tokens(), tokens())
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*found)


@ALL
def test_files_hold_the_layers_and_generation_with_a_cache_is_that_without(name):
    from flashtrain.models.generation import generate

    model = named(name)
    assert DecoderConfig.of_plain(model.config.plain()) == model.config
    assert layer_of(model.config.layers[0].plain()) == model.config.layers[0]
    assert model.config.alike is None  # other classes than transformers'
    made = generate(model, tokens(5), 10, temperature=0)
    for length in range(5, 15):
        assert torch.equal(model(made[:, :length])[:, -1].argmax(-1), made[:, length])


def test_step_3s_intensity_of_decoding_is_128_flops_a_byte_and_its_cache_a_sixteenth_of_a_groups():
    """arXiv 2507.19427: FLOPs of attention to a cached token over its bytes, at 8 bits a number;
    64 heads of 256 over one key head, and Qwen3's 64 of 128 over four."""

    def intensity(spec: AttentionSpec) -> float:
        one_key = spec.flops(2) / 3  # of a token that sees one key on average, forward alone
        return one_key / spec.cache_width

    assert intensity(FactorizedSpec(64, 1, 256, rank=2048)) == 128
    assert intensity(AttentionSpec(64, 4, 128)) == 32
    assert intensity(FactorizedSpec(64, 1, 256, rank=2048, shared=True)) == 256


@pytest.mark.parametrize(
    ("family", "word"),
    [("gpt2", "mfa:4x256x224"), ("gpt2", "mfa:4x256x336-kr"), ("llama", "mfa:3x256x320")],
)
def test_the_documented_sizes_have_the_parameters_of_the_attention_that_they_replace(family, word):
    sizes = {"vocab_size": 50257, "context": 1024, "layers": 1}
    kv_heads = 4 if family == "gpt2" else 3
    with torch.device("meta"):
        plain, other = (
            Decoder(
                DecoderConfig.of_size("124m", family, pattern=[one], kv_heads=kv_heads, **sizes)
            )
            for one in ("full", word)
        )
    share = [
        sum(one.numel() for one in model.blocks[0].mixer.parameters()) for model in (plain, other)
    ]
    assert share[1] == pytest.approx(share[0], rel=0.015)


@pytest.mark.parametrize("pattern", ["full", "window:8", "kdgqa", "kdgqa:0.99"])
def test_weights_start_with_mean_pooled_key_heads_in_other_layers(pattern):
    """Ainslie et al. 2023: a group's key and value heads become their mean. Equal heads stay what
    they are, so that pooling them changes nothing."""
    model = build("full", kv_heads=HEADS)
    for block in model.blocks:  # heads 0-2 and 3-5 are alike
        with torch.no_grad():
            for one in (block.mixer.qkv.weight, block.mixer.qkv.bias):
                heads = one[HEADS * DIM :].unflatten(0, (2, 2, 3, DIM))
                heads.copy_(heads[:, :, :1].expand_as(heads))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    config, state = with_layers(model.config, model.state_dict(), 2, [pattern])
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    pooled = Decoder(config, attention="sdpa", residual="weights").double().eval()
    pooled.load_state_dict(state)
    assert config.layers[0].mixer.kv_heads == 2
    if pattern == "full":
        torch.testing.assert_close(pooled(tokens()), model(tokens()))
    rows = model.blocks[0].mixer.qkv.weight[HEADS * DIM :].unflatten(0, (4, 3, DIM)).mean(1)
    mixer = pooled.blocks[0].mixer
    torch.testing.assert_close(mixer.qkv.weight[HEADS * DIM :], rows.flatten(0, 1))
    pooled(tokens())


def test_weights_that_do_not_suit_the_layers_are_refused():
    model = build("full")
    for kv_heads, pattern in ((4, ["full"]), (None, ["mfa:3x32x16"]), (6, ["kdgqa"])):
        with pytest.raises(UserError, match="kv_heads"):
            with_layers(model.config, model.state_dict(), kv_heads, pattern)
    mixed = build("window:8")
    with pytest.raises(UserError, match="differ"):
        with_layers(mixed.config, mixed.state_dict(), 2, ["full"])


@pytest.mark.parametrize("word", ["mfa", "mfa:8", "mfa:0x8x8", "kdgqa:2", "kdgqa:x", "kdgqa"])
def test_a_word_without_the_sizes_that_a_layer_needs_is_refused(word):
    with pytest.raises(UserError, match=word.split(":")[0]):
        build(word)
    with pytest.raises(UserError, match="learned"):
        build("mfa:3x32x16-kr", family="llama")
