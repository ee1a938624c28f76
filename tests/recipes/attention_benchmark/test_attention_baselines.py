"""The implementations: those of this machine agree, those that are not here say so,
flash-attn's get its arguments."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from flashtrain_recipes.attention_benchmark import reference
from flashtrain_recipes.attention_benchmark.baselines import all_baselines
from flashtrain_recipes.attention_benchmark.baselines.flash_attn import (
    FlashAttn,
    FlashAttn3,
    FlashAttn4,
)
from flashtrain_recipes.attention_benchmark.baselines.ours import FlashtrainPortable
from flashtrain_recipes.attention_benchmark.baselines.pytorch import (
    Flex,
    VarlenAttn,
    make_block_mask,
    score_function,
)
from flashtrain_recipes.attention_benchmark.cases import Case, document_lengths
from flashtrain_recipes.attention_benchmark.inputs import Context, make_sets
from flashtrain_recipes.attention_benchmark.reference import expected
from flashtrain_recipes.harness.baseline import choose

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DOCUMENTS = document_lengths(256)
CASES = [
    Case(2, 4, 64, 16, "full", dtype_name="float32"),
    Case(2, 4, 64, 16, "causal", kv_heads=2, dtype_name="float32"),
    Case(1, 2, 32, 16, "causal", seqlen_k=48, dtype_name="float32"),
    Case(1, 2, 64, 16, "window-9", dtype_name="float32"),
    Case(1, 2, 64, 16, "window-9-5", dtype_name="float32"),
    Case(2, 2, 256, 16, "causal-document", documents=DOCUMENTS, dtype_name="float32"),
    Case(1, 2, 256, 16, "causal-document-zigzag", documents=DOCUMENTS, dtype_name="float32"),
    Case(1, 2, 64, 24, "causal", value_dim=16, dtype_name="float32"),
    Case(1, 2, 256, 24, "causal-varlen", value_dim=16, documents=DOCUMENTS, dtype_name="float32"),
    Case(2, 2, 256, 16, "document", documents=DOCUMENTS, dtype_name="float32"),
    Case(1, 2, 256, 16, "causal-varlen", documents=DOCUMENTS, dtype_name="float32"),
    Case(1, 2, 256, 16, "varlen", documents=DOCUMENTS, dtype_name="float32"),
    Case(1, 2, 64, 16, "prefix-lm", dtype_name="float32"),
    Case(1, 2, 64, 16, "shared-question", dtype_name="float32"),
    Case(1, 2, 256, 16, "global-window", dtype_name="float32"),
    Case(1, 2, 64, 16, "causal", softcap=2.0, dtype_name="float32"),
    Case(1, 2, 64, 16, "causal", features=("ALiBi",), dtype_name="float32"),
    Case(1, 2, 64, 16, "full", features=("bias gradient",), dtype_name="float32"),
    Case(2, 4, 64, 16, "causal", kv_heads=2, features=("sinks",), dtype_name="float32"),
    Case(1, 2, 64, 16, "causal", features=("deterministic",), dtype_name="float32"),
    Case(1, 2, 512, 16, "block-random", density=0.5, dtype_name="float32"),
    Case(1, 2, 512, 16, "block-butterfly", dtype_name="float32"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_implementation_of_this_machine_gives_the_references_answer(
    case: Case, monkeypatch
) -> None:
    monkeypatch.setitem(reference._CHUNK, "cpu", 20 * case.seqlen_k)  # several pieces
    context = Context(case, CPU)
    one = make_sets(case, CPU, 0, 0)[0]
    wanted = expected(case, one, context)
    baselines, _ = choose(all_baselines("cpu"), None, CPU)
    tried = [one for one in baselines if one.applies(case) and one.refuses(case) is None]
    assert ({"flashtrain"} if case.needs else {"flashtrain", "standard"}) <= {
        one.name for one in tried
    }
    for baseline in tried:
        out = baseline.attend(case, context)(one)
        gradients = torch.autograd.grad(out, one.leaves, one.dout)
        assert all(
            found.shape == leaf.shape for found, leaf in zip(gradients, one.leaves, strict=True)
        )
        assert wanted.error(out.detach()) < 2e-5, baseline.title
        assert wanted.gradient_error(*gradients[:3]) < 2e-5, baseline.title
        dq, dk, dv = gradients[:3]
        assert wanted.gradient_error(dq, dk * 1.01, dv) > 0.005  # a wrong one shows


def test_the_portable_kernels_are_planned_for_a_gpu_that_is_elsewhere(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert FlashtrainPortable().missing(GPU) is None


def test_a_package_that_is_not_installed_is_missing_on_a_gpu_too(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "cannot be imported" in str(FlashAttn().missing(GPU))


class FakeFlashAttn:
    """A module with flash-attn's functions, which write down what they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.given: dict[str, object] = {}
        module = types.ModuleType(name)

        def flash_attn_func(q, k, v, **options):
            self.given = options
            return q, None

        def flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, **options
        ):
            self.given = {
                "bounds": cu_seqlens_q.tolist(),
                "longest": max_seqlen_q,
                "shape": tuple(q.shape),
                **options,
            }
            return q

        module.flash_attn_func = flash_attn_func
        module.flash_attn_varlen_func = flash_attn_varlen_func
        for parent in ("flash_attn", name):
            monkeypatch.setitem(sys.modules, parent, module)


def call(baseline, case: Case):
    one = make_sets(case, CPU, 0, 0)[0]
    return baseline.attend(case, Context(case, CPU))(one), one


def test_flash_attn_4_gets_the_window_as_two_numbers_and_its_output_is_taken(monkeypatch) -> None:
    fake = FakeFlashAttn(monkeypatch, "flash_attn.cute")
    assert FlashAttn4().missing(GPU) is None
    out, one = call(FlashAttn4(), Case(1, 2, 64, 16, "window-9", dtype_name="bfloat16"))
    assert fake.given == {"softmax_scale": 0.25, "causal": True, "window_size": (9, 0)}
    assert torch.equal(out, one.q)


def test_documents_go_to_the_varlen_function_as_one_row(monkeypatch) -> None:
    fake = FakeFlashAttn(monkeypatch, "flash_attn")
    out, one = call(
        FlashAttn(), Case(2, 2, 6, 16, "causal-document", documents=(4, 2), dtype_name="bfloat16")
    )
    assert fake.given == {
        "bounds": [0, 4, 6, 10, 12], "longest": 4, "shape": (12, 2, 16), "softmax_scale": 0.25,
        "causal": True
    }  # fmt: skip
    assert out.shape == one.q.shape


@pytest.mark.parametrize(
    ("baseline", "case", "reason"),
    [
        (FlashAttn4(), Case(1, 2, 64, 16, "causal", dropout=0.1), "no dropout"),
        (FlashAttn(), Case(1, 2, 64, 16, "causal", features=("sinks",)), "no sinks"),
        (FlashAttn4(), Case(1, 2, 64, 16, "causal", features=("sinks", "deterministic")), None),
        (all_baselines()[5], Case(1, 2, 1, 16, "full", seqlen_k=512, page=256), "no pages"),
        (FlashAttn(), Case(1, 2, 64, 16, "prefix-lm"), "no such mask"),
        (FlashAttn(), Case(1, 2, 64, 16, "full", dtype_name="float32"), "no float32"),
        (VarlenAttn(), Case(1, 2, 6, 16, "varlen", documents=(6,), softcap=1.0), "no softcap"),
    ],
)
def test_what_an_implementation_does_not_have_is_known_beforehand(
    baseline, case: Case, reason: str | None
) -> None:
    assert baseline.refuses(case) == reason


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.kind != "full" and c.seqlen_q >= 256], ids=str
)
def test_flex_attentions_block_mask_shows_the_same_pairs(case: Case) -> None:
    context = Context(case, CPU)
    mask = make_block_mask(case, context)
    query, key = torch.arange(case.seqlen_q)[:, None], torch.arange(case.seqlen_k)[None, :]
    head = torch.tensor(1)
    found = mask.mask_mod(torch.tensor(0), head, query, key)
    dense = context.dense[1] if case.is_block_sparse else context.dense
    assert torch.equal(found, dense)
    blocks = mask.to_dense()[0, -1].bool()
    by_block = dense.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).any(3).any(1)
    assert torch.equal(blocks, by_block)


def test_flex_attention_scores_as_the_reference_does() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    for case in CASES:
        if not case.needs or Flex().refuses(case):
            continue
        context, one = Context(case, CPU), make_sets(case, CPU, 0, 0)[0]
        q, k, v = (x.detach().transpose(1, 2) for x in (one.q, one.k, one.v))
        mask = make_block_mask(case, context)
        out = flex_attention(
            q, k, v, score_mod=score_function(case, one), block_mask=mask, scale=case.scale
        )
        assert expected(case, one, context).error(out.detach().transpose(1, 2)) < 1e-5


@pytest.mark.parametrize("page", [0, 256])
def test_a_cache_is_decoded_with_whether_its_keys_lie_together_or_in_shuffled_pages(
    page: int,
) -> None:
    case = Case(2, 4, 1, 16, "full", kv_heads=2, seqlen_k=768, page=page, dtype_name="float32")
    context, one = Context(case, CPU), make_sets(case, CPU, 0, 0)[0]
    wanted = expected(case, one, context)
    everyone, _ = choose(all_baselines("cpu"), None, CPU)
    tried = [one for one in everyone if one.applies(case) and one.refuses(case) is None]
    assert {one.name for one in tried} >= (
        {"flashtrain"} if page else {"flashtrain", "sdpa-math", "standard"}
    )
    for baseline in tried:
        with torch.no_grad():
            assert wanted.error(baseline.attend(case, context)(one)) < 2e-5, baseline.title


def test_the_flash_attn_packages_get_a_cache_each_in_its_own_way(monkeypatch) -> None:
    given: dict[str, dict] = {}

    def noted(name):
        return lambda q, k, v, **words: given.update({name: {**words, "pages": k.shape[:2]}}) or q

    for one in (FlashAttn(), FlashAttn3(), FlashAttn4()):
        FakeFlashAttn(monkeypatch, one.module)
        module = sys.modules[one.module]
        module.flash_attn_with_kvcache = module.flash_attn_varlen_func = noted(one.name)
        call(one, Case(2, 2, 1, 16, "full", seqlen_k=512, page=256, dtype_name="bfloat16"))
    assert {name: set(words) for name, words in given.items()} == {
        "flash-attn": {"softmax_scale", "cache_seqlens", "block_table", "pages"},
        "flash-attn-3": {"softmax_scale", "cache_seqlens", "page_table", "pages"},
        "flash-attn-4": {"softmax_scale", "seqused_k", "page_table", "pages"},
    }
    assert all(words["pages"] == (4, 256) for words in given.values())
