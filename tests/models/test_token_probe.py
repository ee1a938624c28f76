"""What lets tokens see each other beside shared attention is found; what computes
token by token is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import flashtrain
from flashtrain.integrations import huggingface_context, register_with_transformers
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.attention_functions import AttentionOptions, flash_attention
from flashtrain.models.token_probe import probe
from flashtrain_kernels import flash_attn_kvpacked_func, flash_attn_qkvpacked_func

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
import huggingface_models as tiny

TOKENS, VOCABULARY, WIDTH = 13, 61, 32


def found(states: Callable[[Tensor], object]) -> str | None:
    """Where another token moves if the first and the last of a row change."""
    return probed(states)[1]


def probed(states: Callable[[Tensor], object]) -> tuple[int, str | None]:
    torch.manual_seed(0)
    row = torch.randint(1, VOCABULARY, (1, TOKENS))
    other = row.clone()
    other[:, [0, -1]] -= 1
    return probe(lambda changed: states(other if changed else row), TOKENS, slice(1, -1))


class Model(nn.Module):
    """An embedding, (B, S, E) -> (B, S, E), one flashtrain.Attention and a head."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.mixer = nn.Embedding(VOCABULARY, WIDTH), mixer
        self.attention, self.head = flashtrain.Attention(WIDTH, 4, 2), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x)
        return self.head(x + self.mixer(x))


class Mixer(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Recurrent(nn.Module):
    """A library's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Convolution(nn.Module):
    """Over three tokens, with weights as small as transformers begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        nn.init.normal_(self.inner.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


def scan(x: Tensor) -> Tensor:
    """h_t = 0.9 h_(t-1) + x_t, written into a tensor that `empty` made."""
    states, h = torch.empty_like(x), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = 0.9 * h + x[:, t]
        states[:, t] = h
    return states


def experts(x: Tensor) -> Tensor:
    """Tokens sorted by their expert, computed, and put back."""
    rows = x.flatten(0, 1)
    order = rows[:, :4].argmax(1).argsort(stable=True)
    return torch.empty_like(rows).index_copy(0, order, rows[order].tanh()).view_as(x)


def sdpa(x: Tensor, keys: Tensor | None = None, **options: Tensor) -> Tensor:
    """Of (B, S, E), with one head."""
    keys = (x if keys is None else keys)[:, None]
    return F.scaled_dot_product_attention(x[:, None], keys, keys, **options)[:, 0]


def image(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, 5 * WIDTH, dtype=x.dtype).view(1, 5, WIDTH)


def by_hand(x: Tensor, keys: Tensor | None = None) -> Tensor:
    keys = x if keys is None else keys
    return (x @ keys.transpose(1, 2) / 8).softmax(-1) @ keys


def heads(x: Tensor, *more: int) -> Tensor:
    """(B, S, ..., 2, 16), the same in all of the dimensions between."""
    return x.view(1, TOKENS, *[1 for _ in more], 2, 16).expand(-1, -1, *more, -1, -1).contiguous()


ATTENTION: dict[str, Callable[[Tensor], Tensor]] = {
    "sdpa": sdpa,
    "sdpa of a row without its last token": lambda x: F.pad(sdpa(x[:, :-1] / 4), (0, 0, 0, 1)),
    "sdpa with a token before the row": lambda x: sdpa(x / 4, F.pad(x, (0, 0, 1, 0))),
    "sdpa of rows one after the other": lambda x: sdpa(x.flatten(0, 1)[None]),
    "sdpa with a bias": lambda x: sdpa(x, attn_mask=torch.ones(1, TOKENS, TOKENS, dtype=x.dtype)),
    "one query of a pooling": lambda x: x + sdpa(x[:, 5:6], x),
    "flex attention": lambda x: (
        flex_attention(*[heads(x).transpose(1, 2)] * 3).transpose(1, 2).flatten(2)
    ),
    "attention by hand": by_hand,
    "the framework's": lambda x: flash_attention(
        *[heads(x)] * 3, AttentionOptions(causal=True, scale=1.0)
    ).flatten(2),
    "packed projections": lambda x: flash_attn_qkvpacked_func(heads(x, 3)).flatten(2),
    "packed keys and values": lambda x: flash_attn_kvpacked_func(heads(x), heads(x, 2)).flatten(2),
}
MIXING = {
    "a recurrence": lambda: Mixer(scan),
    "the layer of a library": Recurrent,
    "a convolution": Convolution,
    "the token behind": lambda: Mixer(lambda x: x.roll(-1, 1)),
    "a mean of all": lambda: Mixer(lambda x: x - x.mean(1, keepdim=True)),
    **{name: partial(Mixer, mix) for name, mix in ATTENTION.items()},
}
BY_TOKEN = {
    "nothing": nn.Identity,
    "a norm": lambda: nn.LayerNorm(WIDTH),
    "experts": lambda: Mixer(experts),
    "attention within a token": lambda: Mixer(lambda x: sdpa(x.view(-1, 4, 8)).view_as(x)),
    "attention to an image": lambda: Mixer(lambda x: sdpa(x, image(x))),
    "attention of an image": lambda: Mixer(lambda x: x + sdpa(image(x)).mean(1, keepdim=True)),
    "the choice of an expert": lambda: Mixer(
        lambda x: x * x[..., :4].softmax(-1).amax(-1, keepdim=True)
    ),
    "the choice of as many experts as tokens": lambda: Mixer(
        lambda x: x * x.flatten(0, 1)[:, :TOKENS].softmax(-1).amax(-1)[None, :, None]
    ),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*MIXING, *BY_TOKEN])
def test_what_mixes_tokens_is_found(name: str, dtype: torch.dtype) -> None:
    model = Model((MIXING | BY_TOKEN)[name]()).to(dtype).eval()
    where = found(model)
    assert (where is not None) == (name in MIXING), where
    assert where is None or " in Model" in where


def test_what_pools_tokens_by_an_attention_of_its_own_is_found_in_a_loss_too() -> None:
    """No state of a token depends on another one's, and yet the pooled one sees
    those of one device alone."""
    model = Model(nn.Identity()).eval()
    for pool in (sdpa, by_hand):
        where = found(
            lambda tokens, pool=pool: pool(torch.ones(1, 1, VOCABULARY), model(tokens)).sum()
        )
        assert where is not None
        assert "in the step itself" in where
    assert found(lambda tokens: F.cross_entropy(model(tokens)[0], tokens[0])) is None


def test_shared_attention_is_counted() -> None:
    assert probed(Model(nn.Identity()).eval()) == (1, None)
    assert probed(nn.Embedding(VOCABULARY, WIDTH)) == (0, None)


def test_what_is_compiled_is_probed_as_it_is_written_and_compiled_once() -> None:
    torch.compiler.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    embedding = nn.Embedding(VOCABULARY, WIDTH)
    mix = torch.compile(lambda x: x.cumsum(1) * 2, backend=backend)
    assert found(lambda tokens: mix(embedding(tokens))) == "cumsum in the step itself"
    assert compiled == []
    for _ in range(2):
        mix(torch.randn(4, 4))
    assert len(compiled) == 1


def test_a_convolution_is_named() -> None:
    assert found(Model(Convolution()).eval()) == "convolution in Model.mixer.inner"


def test_our_own_decoders_mix_by_attention_alone() -> None:
    for family in ("gpt2", "llama"):
        config = DecoderConfig.of_size("demo", family, vocab_size=VOCABULARY, context=64)
        model = Decoder(config).eval()
        assert found(lambda tokens, model=model: model.loss(tokens, tokens)) is None
        assert model.shares_sequences is True


def test_a_model_made_from_one_of_ours_is_not_known() -> None:
    class Changed(Decoder):
        pass

    assert (
        Changed(DecoderConfig.of_size("demo", vocab_size=VOCABULARY, context=64)).shares_sequences
        is None
    )


def of_transformers(kind: str, **sizes: object) -> nn.Module:
    config = tiny.DECODERS[kind]() if kind in tiny.DECODERS else tiny._like_llama(kind, **sizes)()
    name = register_with_transformers()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()


@pytest.mark.parametrize("kind", [*tiny.DECODERS, "mixtral"])
def test_transformers_decoders_pass_with_and_without_experts(kind: str) -> None:
    model = of_transformers(kind)
    assert found(lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False)) is None


def test_parameters_views_given_to_modules_are_probed_while_weights_are_trained() -> None:
    """DBRX's experts get views of their matrices, on whose gradients there is no hook."""
    widths = {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4}
    heads = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY}
    config = transformers.DbrxConfig(**sizes, attn_config=heads, ffn_config=widths)
    name = register_with_transformers()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    assert all(one.requires_grad for one in model.parameters())
    assert probed(lambda tokens: model(input_ids=tokens, use_cache=False).logits) == (2, None)


HYBRIDS = {
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers.0.conv"),
    "qwen3_next": (
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
        "layers.0.linear_attn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_found_without_their_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_context, "states_of", lambda kind, config: "")
    more, layer = HYBRIDS[name]
    model = of_transformers(name, **more)
    where = found(lambda tokens: model(input_ids=tokens, use_cache=False))
    assert where is not None
    assert layer in where
