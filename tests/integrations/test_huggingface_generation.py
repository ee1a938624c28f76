"""Hugging Face decoders generate after several prompts what they generate after each alone, and
what transformers generates."""

from __future__ import annotations

import huggingface_models as tiny
import pytest
import torch
from hybrid_models import CONFIGS, decoder, hybrid
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, MistralForCausalLM

from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_cache import HuggingFaceCache
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.models import generation
from flashtrain.models.generation import generate
from flashtrain.models.key_value_cache import cache_bytes

# Around the window of 5 tokens that the tiny models have.
LENGTHS = (9, 1, 13, 2)
PROMPTS = [tiny.tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]
TOGETHER = ["gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "mistral"]
TOGETHER += tiny.OTHER_LAYERS
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}


def by_transformers(model, prompt: list[int], new: int = 12) -> list[int]:
    ids = torch.tensor([prompt])
    named = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **named)[
        0
    ].tolist()


@torch.no_grad()
def read_anew(model, prompt: list[int], new: int = 6) -> list[int]:
    text = list(prompt)
    for _ in range(new):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch) -> None:
    monkeypatch.setattr(generation, "PIECE", 4)


@pytest.mark.parametrize("kind", TOGETHER)
def test_several_prompts_get_the_greedy_tokens_that_transformers_gives_each(kind: str) -> None:
    ours, eager = tiny.pair(kind)
    model = HuggingFaceDecoder(ours)
    assert isinstance(model.new_cache(5), HuggingFaceCache)
    together = generate(model, PROMPTS, 12, temperature=0)
    assert together == [by_transformers(eager, prompt) for prompt in PROMPTS]
    assert together == [generate(model, [prompt], 12, temperature=0)[0] for prompt in PROMPTS]


def test_a_window_that_the_class_does_not_know_drops_no_keys() -> None:
    whole = generate(HuggingFaceDecoder(tiny.pair("llama")[0]), PROMPTS, 12, temperature=0)
    left_over = HuggingFaceDecoder(tiny.pair("llama", sliding_window=5)[0])
    assert generate(left_over, PROMPTS, 12, temperature=0) == whole


def test_a_window_that_the_class_has_no_masks_of_drops_no_keys() -> None:
    """Moshi's configuration has one; transformers makes its causal masks without it."""
    sizes = {**tiny.LLAMA_LIKE, "ffn_dim": 48, "num_key_value_heads": 4, "sliding_window": 5}
    del sizes["intermediate_size"]
    torch.manual_seed(0)
    config = AutoConfig.for_model("moshi", **sizes)
    names = {"attn_implementation": register_with_transformers()}
    model = HuggingFaceDecoder(AutoModelForCausalLM.from_config(config, **names).eval())
    assert [one.mixer.window for one in model.shape.layers] == [None, None]
    wanted = [read_anew(model.module, prompt) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 6, temperature=0) == wanted


class Mine(MistralForCausalLM):
    """A user's, in a file without masks, whose forward names no cache."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


def test_a_class_made_from_transformers_keeps_its_windows_and_its_cache() -> None:
    ours, eager = tiny.pair("mistral")
    ours.__class__ = Mine
    model = HuggingFaceDecoder(ours)
    assert [one.mixer.window for one in model.shape.layers] == [5, 5]
    wanted = [by_transformers(eager, prompt) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 12, temperature=0) == wanted


@pytest.mark.parametrize(
    ("kind", "changes"), [("llama4_text", {}), ("llama", DYNAMIC)], ids=["chunks", "dynamic rope"]
)
def test_what_cannot_decode_together_is_generated_one_by_one(kind: str, changes: dict) -> None:
    ours, eager = tiny.pair(kind, **changes)
    model = HuggingFaceDecoder(ours)
    assert type(model.new_cache(5)) is DynamicCache
    together = generate(model, PROMPTS, 12, temperature=0)
    assert together == [by_transformers(eager, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_with_states_gets_the_tokens_of_prompts_that_are_read_anew(kind: str) -> None:
    """Its rows are generated one by one, whatever transformers calls the cache or its positions."""
    model, eager = decoder(kind, torch.float32), hybrid(kind, torch.float32, "eager").eval()
    wanted = [read_anew(eager, prompt) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 6, temperature=0) == wanted
    assert by_transformers(eager, PROMPTS[0], 6) == wanted[0]


def test_a_model_without_our_attention_is_generated_one_by_one() -> None:
    eager = tiny.build("qwen2", "eager")
    wanted = [by_transformers(eager, prompt) for prompt in PROMPTS]
    assert generate(HuggingFaceDecoder(eager), PROMPTS, 12, temperature=0) == wanted


@pytest.mark.parametrize("kind", ["eager", "states", "chunks"])
def test_rows_of_equal_length_are_read_at_once_where_others_are_not(kind: str, monkeypatch) -> None:
    if kind == "states":
        model, eager = decoder("lfm2", torch.float32), hybrid("lfm2", torch.float32, "eager").eval()
    else:
        ours, eager = tiny.pair("qwen2" if kind == "eager" else "llama4_text")
        model = HuggingFaceDecoder(eager if kind == "eager" else ours)
    prompts = [*tiny.tokens(3, 7).tolist(), *tiny.tokens(2, 9).tolist()]
    wanted, rows = [by_transformers(eager, prompt) for prompt in prompts], []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda ids, **more: rows.append(len(ids)) or forward(ids, **more)
    )
    assert generate(model, prompts, 12, temperature=0) == wanted
    assert rows == [2] * 12 + [3] * 12
    # Each ends by itself, and the others go on.
    ends = [wanted[0][7 + 3], wanted[1][7 + 1]]
    found = generate(model, prompts[:3], 12, temperature=0, end_of_text=ends)
    for text, whole in zip(found, wanted[:3], strict=True):
        counts = [place + 1 for place, token in enumerate(whole[7:]) if token in ends]
        assert text == whole[: 7 + min(counts, default=12)]


def test_the_cache_has_as_many_heads_as_the_layers_that_write_to_it() -> None:
    model = HuggingFaceDecoder(tiny.pair("mimo")[0])
    written = [one.self_attn.k_proj.out_features // 8 for one in model.module.model.layers]
    assert written == [2, 1]  # its windowed layers have twice as many
    assert [one.mixer.kv_heads for one in model.shape.layers] == written


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "gemma3", "gpt_oss"])
def test_logits_of_rows_that_decode_together_are_those_of_the_rows_read_whole(kind: str) -> None:
    ours, eager = tiny.pair(kind)
    model = HuggingFaceDecoder(ours)
    cache = model.new_cache(20)
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            cache.start_row(row, len(PROMPTS))
            model(torch.tensor([prompt]), cache=cache, last_only=True)
        for step in range(4):
            positions = cache.decode([length + step for length in LENGTHS], torch.device("cpu"))
            given = torch.full((len(PROMPTS), 1), 7 + step)
            found = model(given, positions=positions, cache=cache, last_only=True)[:, 0]
            for row, prompt in enumerate(PROMPTS):
                whole = torch.tensor([prompt + list(range(7, 8 + step))])
                wanted = eager(whole).logits[0, -1]
                torch.testing.assert_close(found[row], wanted, atol=1e-5, rtol=1e-5)


def test_the_cache_has_the_bytes_that_were_planned_and_the_dtype_of_attention() -> None:
    model = HuggingFaceDecoder(tiny.pair("qwen3")[0])
    cache = model.new_cache(20)
    cache.start_row(1, 3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(torch.tensor([PROMPTS[0]]), cache=cache)
    held = [one for layer in cache.layers for one in (layer.keys, layer.values)]
    assert {one.dtype for one in held} == {torch.bfloat16}
    assert sum(one.nbytes for one in held) == 3 * cache_bytes(model.shape.layers, 20)
    assert [one.keys.shape[1] for one in cache.layers] == [5, 20]  # its window is 5 tokens
