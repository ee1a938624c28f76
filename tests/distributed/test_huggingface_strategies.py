"""Two gloo ranks train a transformers model as one process does, each reading its
own part of the weights."""

from __future__ import annotations

import pytest
import torch
from huggingface_fitting import LORA, SIZES, fit
from ranks import of_ranks

pytestmark = pytest.mark.integration

SCENARIOS = {
    "ddp": (False, True),
    "fsdp": (False, True),
    "random": (False, False),
    "lora": (True, True),
}
SCENARIOS["lora-ddp"] = SCENARIOS["lora"]
WHOLE = {"model.embed_tokens.weight": 61 * 32, "model.layers.0.mlp.up_proj.weight": 48 * 32}


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_have_the_losses_and_weights_of_one_process(
    name: str, huggingface_strategies, tmp_path
) -> None:
    ranks = of_ranks(huggingface_strategies / name, 2)
    lora, read = SCENARIOS[name]
    alone = fit(tmp_path, huggingface_strategies / "origin" if read else None, lora=lora)
    both = [
        (one + other) / 2 for one, other in zip(ranks[0]["losses"], ranks[1]["losses"], strict=True)
    ]
    assert both == pytest.approx(alone.losses, abs=1e-10)
    weights = torch.load(huggingface_strategies / name / "weights.pt")
    expected = alone.model.state_dict()
    assert weights.keys() == expected.keys()
    for key, value in weights.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-10, msg=key)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, huggingface_strategies) -> None:
    for rank in of_ranks(huggingface_strategies / name, 2):
        assert rank["parts"] == rank["losses"]


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("fsdp", 2), ("lora", 2), ("random", 0)])
def test_no_rank_reads_more_than_the_part_that_it_keeps(
    name: str, ranks: int, huggingface_strategies
) -> None:
    for rank in of_ranks(huggingface_strategies / name, 2):
        for tensor, size in WHOLE.items():
            # 61 rows over two ranks are 31 and 30.
            assert rank["reads"].get(tensor, 0) <= (
                0 if ranks == 0 else size / ranks + SIZES["hidden_size"]
            )
        assert bool(rank["reads"]) == (ranks > 0)


def test_a_checkpoint_of_adapters_holds_nothing_else(huggingface_strategies) -> None:
    (kept, _) = (rank["kept"] for rank in of_ranks(huggingface_strategies / "lora", 2))
    assert kept
    assert all(".lora_A." in name or ".lora_B." in name for name in kept)
    saved = torch.load(huggingface_strategies / "lora" / "whole" / "last.ckpt", weights_only=True)
    assert sorted(saved["state_dict"]) == sorted(f"model.{name}" for name in kept)
    assert {
        value.shape[0] for name, value in saved["state_dict"].items() if ".lora_A." in name
    } == {LORA["r"]}


@pytest.mark.parametrize("name", ["lora", "lora-ddp"])
def test_two_ranks_go_on_from_adapters_as_one_process_does(
    name: str, huggingface_strategies, tmp_path
) -> None:
    folder = huggingface_strategies / name
    start = folder / "whole" / "last.ckpt"
    alone = fit(tmp_path, huggingface_strategies / "origin", lora=True, start=start, max_steps=3)
    one, other = (rank["anew"] for rank in of_ranks(folder, 2))
    both = [(mine + its) / 2 for mine, its in zip(one, other, strict=True)]
    assert both == pytest.approx(alone.losses, abs=1e-10)
    begun = fit(tmp_path, huggingface_strategies / "origin", lora=True, max_steps=1)
    assert alone.losses[0] < begun.losses[0]
