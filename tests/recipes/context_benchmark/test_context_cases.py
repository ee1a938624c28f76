"""What can be asked of recipe=long-context-benchmark, and what it then measures; no rank is started."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.command.compose import compose_settings
from flashtrain.distributed.context import local_attention
from flashtrain.distributed.context.layout import LAYOUTS
from flashtrain.distributed.context.ways import WAYS
from flashtrain.errors import UserError
from flashtrain.training.hardware import detect_hardware
from flashtrain_kernels import masks
from flashtrain_recipes.attention_benchmark.settings import (
    CONTEXT_IMPLEMENTATIONS,
    CONTEXT_LAYOUTS,
    CONTEXT_WAYS,
    MASKS,
    NOT_OVER_DEVICES,
    BenchmarkSettings,
    parse_shape,
)
from flashtrain_recipes.context_benchmark.contenders import (
    ContextCase,
    cases,
    heavy_tailed_lengths,
    only_communicating,
    our_contenders,
)
from flashtrain_recipes.context_benchmark.launch import started_by_torchrun
from flashtrain_recipes.context_benchmark.peers import peers
from flashtrain_recipes.context_benchmark.rows import Rates
from flashtrain_recipes.context_benchmark.run import ContextBenchmark, job_of

RECIPE = "recipe=long-context-benchmark"
CPU = detect_hardware("cpu")


def asked(*words: str):
    return compose_settings([RECIPE, *words])


def case(mask: str = "causal", length: int = 64, shape: str = "4/2x16", degree: int = 2) -> ContextCase:
    words = BenchmarkSettings(name="context", masks=[mask], seqlens=[length], shapes=[shape], dtype="float32")
    (found,) = cases(words, [degree])
    return found


def test_names_are_those_of_the_ways_and_layouts_there_are() -> None:
    assert CONTEXT_WAYS == WAYS
    assert tuple(LAYOUTS) == CONTEXT_LAYOUTS
    everyone = [*our_contenders(None, None), *peers()]
    assert tuple(dict.fromkeys(one.name for one in everyone)) == CONTEXT_IMPLEMENTATIONS
    assert len({one.title for one in everyone}) == len(everyone)


@pytest.mark.parametrize(
    ("setting", "given", "said"),
    [
        ("ways", ["rings"], "'ring'"), ("layouts", ["zigzag"], "head-tail"), ("masks", ["block-random"], "window-L"),
        ("masks", ["casual"], "'causal'"), ("shapes", ["16"], "32/8x128"), ("shapes", ["16/3x64"], "heads"),
        ("degrees", [1], "degrees"), ("degrees", [], "degrees"), ("implementations", ["rings"], "plain-all-gather"),
        ("min_seconds", -1, "min_seconds"),
    ],
)  # fmt: skip
def test_a_mistaken_word_is_refused_before_anything_is_started(setting: str, given: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        BenchmarkSettings(name="context", **{setting: given}).check()


def test_a_machine_that_is_too_small_for_every_degree_says_so() -> None:
    with pytest.raises(UserError, match="Possible: a degree of 2 to"):
        job_of(asked("benchmark.degrees=[512]"), CPU)
    job, line = job_of(asked("benchmark.degrees=[512,2]"), CPU)
    assert (job.degrees, job.size) == ([2], 2)
    assert line.startswith("degrees 512 are left out: on a CPU there may be")


def test_torchruns_ranks_are_counted(monkeypatch) -> None:
    assert not started_by_torchrun()
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("WORLD_SIZE", "8"), ("RANK", "3")):
        monkeypatch.setenv(name, value)
    job, line = job_of(asked("benchmark.degrees=[2,4,16]"), CPU)
    assert (job.degrees, job.size) == ([2, 4], 8)
    assert line == "degrees 16 are left out: torchrun started 8 ranks"


def test_cases_are_every_shape_mask_length_and_degree_the_shorter_lengths_first() -> None:
    words = {"shapes": ["16x128", "32/8x128"], "masks": ["causal", "full"], "seqlens": [4096, 1024]}
    found = cases(BenchmarkSettings(name="context", **words), [2, 4])
    assert len(found) == 2 * 2 * 2 * 2
    assert str(found[0]) == "causal, 1024 tokens, 16x128, 2 ranks"
    assert str(found[-1]) == "full, 4096 tokens, 32/8x128, 4 ranks"
    assert parse_shape("32/8x128") == (32, 8, 128)


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask not in NOT_OVER_DEVICES and "-L" not in mask])
def test_every_static_mask_has_a_mask_of_the_whole_sequence(mask: str) -> None:
    one = case(mask, 96)
    assert one.mask.dense().sum() == one.pairs
    assert one.flops == 14 * 4 * 16 * one.pairs


@given(st.integers(1, 70_000), st.integers(0, 5))
def test_documents_fill_the_sequence_whatever_its_length(total: int, seed: int) -> None:
    lengths = heavy_tailed_lengths(total, seed)
    assert sum(lengths) == total
    assert min(lengths) >= 1
    assert lengths == heavy_tailed_lengths(total, seed)


def test_all_to_all_computes_alike_in_every_layout_and_is_measured_in_one() -> None:
    titles = [one.title for one in our_contenders(["all-to-all", "ring"], ["head-tail", "contiguous"])]
    assert titles == ["all-to-all, head-tail", "ring, head-tail", "ring, contiguous"]


def test_ways_that_heads_do_not_divide_into_are_refused_in_a_line() -> None:
    by_way = {one.way: one for one in our_contenders(None, ["balanced"])}
    twelve = case(shape="12x64", degree=8)
    assert "12 heads on 8 ranks" in by_way["all-to-all"].refuses(twelve)
    assert by_way["hybrid"].refuses(twelve) is None
    assert by_way["hybrid"].computing_together(twelve) == 4


def test_peers_take_the_masks_and_lengths_they_know_and_say_why_not() -> None:
    def taken(one: ContextCase) -> dict[str, str | None]:
        return {peer.title: peer.refuses(one) for peer in peers()[1:] if peer.applies(one)}

    zigzag, flash = "ring-flash-attention zigzag, head-tail", "torch context_parallel, FlashAttention-2, head-tail"
    assert taken(case("causal"))[flash] is None
    assert taken(case("causal"))[zigzag] == "no float32"
    assert taken(case("causal", 63))[flash] == "63 tokens are no multiple of 4"
    assert "torch context_parallel, cuDNN, contiguous" in taken(case("full"))
    assert set(taken(case("prefix-lm")).values()) == {"no such mask"}
    assert "ring-flash-attention Llama 3, contiguous" in taken(case("causal-document"))


def test_ring_flash_attention_is_called_with_its_own_names(monkeypatch) -> None:
    """Against a stand-in with its functions' arguments: the package needs a GPU."""
    seen: dict[str, dict] = {}

    def zigzag_ring_flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, group=None):
        seen["zigzag"] = {"causal": causal, "scale": softmax_scale, "group": group}
        return q

    def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, world_size):
        seen["prepare"] = {"bounds": cu_seqlens.tolist(), "rank": rank, "world_size": world_size}
        return cu_seqlens, cu_seqlens, 7, 9, slice(0, 5)

    def llama3_flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice,
        dropout_p=0.0, softmax_scale=None, causal=False, group=None,
    ):  # fmt: skip
        seen["llama3"] = {"longest": (max_seqlen_q, max_seqlen_k), "slice": local_k_slice, "causal": causal}
        return q

    functions = [zigzag_ring_flash_attn_func, llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func]
    monkeypatch.setitem(sys.modules, "ring_flash_attn", SimpleNamespace(**{each.__name__: each for each in functions}))
    team = SimpleNamespace(group=SimpleNamespace(group="ranks"), rank=1, size=2, device=torch.device("cpu"))
    q = torch.zeros(1, 32, 4, 16)
    by_way = {peer.way.rsplit(" ", 1)[-1]: peer for peer in peers() if peer.name == "ring-flash-attention"}
    for way, mask in (("zigzag", "causal"), ("3", "causal-document")):
        attend = by_way[way].attend(SimpleNamespace(case=case(mask), team=team), q, q, q)
        assert attend(q, q, q).shape == q.shape
    assert seen["zigzag"] == {"causal": True, "scale": 0.25, "group": "ranks"}
    assert seen["prepare"]["bounds"][-1] == 64
    assert seen["llama3"] == {"longest": (7, 9), "slice": slice(0, 5), "causal": True}


def test_communicating_alone_leaves_the_kernels_out_and_puts_them_back() -> None:
    q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
    mask, scores = masks.causal(6), local_attention.Scores(0.3)
    real = local_attention.forward, local_attention.backward
    with only_communicating():
        out, lse = local_attention.forward(q, k, k, mask, scores)
        dq, dk, _ = local_attention.backward(q, q, k, k, out, lse, mask, scores)
    assert (out.shape, lse.shape, dq.shape, dk.shape) == (q.shape, (1, 4, 6), q.shape, k.shape)
    assert not out.any()
    assert (local_attention.forward, local_attention.backward) == real
    assert local_attention.forward(q, k, k, mask, scores)[0].any()


def test_a_rate_is_that_of_the_longest_length_of_the_same_family() -> None:
    rates = Rates()
    assert rates.extrapolated(case(length=96)) is None
    rates.add(case(length=32), 1.0, 2.0)
    rates.add(case(length=64), 3.0, 5.0)
    forward, backward, length = rates.extrapolated(case(length=128))
    assert length == 64
    assert forward == pytest.approx(3 * (128 * 129) / (64 * 65))
    assert backward == pytest.approx(5 / 3 * forward)
    assert rates.extrapolated(case("full", 128)) is None


def test_plan_lists_the_cases_what_does_not_fit_them_and_what_is_missing() -> None:
    told = ContextBenchmark(
        asked("benchmark.seqlens=[64]", "benchmark.degrees=[2]", "benchmark.dtype=float32"), CPU
    ).plan()
    assert "2 cases, float32, up to 10 rounds" in told
    assert "causal, 64 tokens, 16x128, 2 ranks; without hybrid, balanced (hybrid with 16 heads" in told
    assert "left out: torch context_parallel, cuDNN, needs NVIDIA GPUs" in told
