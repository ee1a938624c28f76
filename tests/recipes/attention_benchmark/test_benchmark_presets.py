"""What can be asked of the benchmark, and the cases that the answer has."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashtrain.errors import UserError
from flashtrain.report.rows import read_result
from flashtrain_recipes.attention_benchmark.cases import cases
from flashtrain_recipes.attention_benchmark.settings import MASKS, parse_mask
from flashtrain_recipes.benchmark_settings import BenchmarkSettings

RESULTS = Path(__file__).parents[3] / "recipes" / "results"
SHAPE = ("batch", "heads", "kv_heads", "seqlen_q", "head_dim", "mask", "features", "dropout")


def asked(**settings) -> list:
    given = BenchmarkSettings(name="attention", **settings)
    given.check()
    return cases(given)


@pytest.mark.parametrize(
    ("preset", "count", "file"),
    [
        ("core", 25, "anchors"),
        ("paper", 10, "paper"),
        ("features", 20, "features"),
        ("as-called", 31, "as-called"),
    ],
)
def test_a_preset_has_the_rows_that_were_published(preset: str, count: int, file: str) -> None:
    found = asked(rows=preset)
    assert len(found) == len(set(found)) == count
    known = {
        tuple(case.columns().get(name, "" if name == "features" else 0) for name in SHAPE)
        for case in found
    }
    rows = read_result(RESULTS / f"attention-{file}-h200.json").rows
    assert {
        tuple(row.get(name, "" if name == "features" else 0) for name in SHAPE)
        for row in rows
        if row.get("batch")
    } <= known


def test_wide_heads_are_measured_packed_by_positions_and_with_narrow_values() -> None:
    found = asked(rows="wide")
    assert {case.head_dim for case in found} == {192, 256, 512}
    packed = [case.mask for case in found if case.has_documents and case.kv_heads == 2]
    assert packed == ["causal-varlen", "causal-document", "causal-document-zigzag"]
    (narrow,) = (case for case in found if case.value_width < case.head_dim)
    assert (narrow.head_dim, narrow.value_width, narrow.columns()["value_dim"]) == (192, 128, 128)


def test_the_grid_is_a_product_with_a_batch_of_so_many_tokens() -> None:
    found = asked(seqlens=[128, 4096], head_dims=[64, 128], masks=["full", "window-64"])
    assert len(found) == 8
    assert {(c.seqlen_q, c.batch) for c in found} == {(128, 128), (4096, 4)}
    assert {(c.head_dim, c.heads) for c in found} == {(64, 32), (128, 16)}


def test_block_sparse_has_every_density_beside_full_attention() -> None:
    found = asked(rows="block-sparse", seqlens=[4096], head_dims=[128])
    assert [c.mask for c in found] == ["full", *["block-random"] * 5, "block-butterfly"]
    assert [c.density for c in found[1:6]] == [0.05, 0.1, 0.25, 0.5, 1.0]


def test_lengths_and_masks_choose_among_the_rows_of_a_preset() -> None:
    assert {c.seqlen_q for c in asked(rows="core", seqlens=[256, 512])} == {256, 512}
    assert len(asked(rows="core", masks=["window-1024"])) == 2
    assert max(c.seqlen_q for c in asked(rows="core", longest=4096)) == 4096
    with pytest.raises(UserError, match=r"benchmark.rows=core has no row of these"):
        asked(rows="core", seqlens=[77])


def test_every_mask_is_understood() -> None:
    for name in MASKS:
        parse_mask(name.replace("L", "32").replace("R", "16").replace("F", "24"))
    assert (parse_mask("tile-24-4").frames, parse_mask("tile-24-4").references) == (24, 4)
    assert (parse_mask("window-32").left, parse_mask("window-32").right) == (32, 0)
