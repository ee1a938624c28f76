"""A step whose attention the devices do not share is refused, before its gradients change a weight."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode
from unshared_models import UNSHARED, ByHand

import flashtrain
from flashtrain.distributed.context.attention_check import AttentionCheck
from flashtrain.distributed.context.layouts import contiguous
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.errors import UserError
from flashtrain.models.attention_functions import flash_attention
from flashtrain.models.sharded_sequence import use_sharded_sequence
from flashtrain_kernels import flash_attn_kvpacked_func, flash_attn_qkvpacked_func, masks

HELD, SEQUENCE, ROWS = 12, 24, 3


@pytest.mark.parametrize("name", UNSHARED)
def test_a_model_whose_attention_is_its_own_is_refused_at_its_first_step(two, name):
    """On both ranks: no step is taken."""
    for said in (rank[name] for rank in two["unshared"]):
        assert said.startswith("0 steps: ")
        assert "own device's part" in said
    if name == "a layer of a Llama on our attention":
        assert "transformers' LlamaAttention: attention of 23 keys" in said


def test_one_without_attention_is_refused_in_validation_too_and_trains_where_told_so(two):
    for rank in two["unshared"]:
        assert "a validation step in which no attention is shared by the 2 devices" in rank["validated"]
        assert all(map(math.isfinite, rank["unchecked"]))


def test_a_step_that_steps_its_optimiser_itself_is_refused_before_it_does(two):
    for refused, steps, shared in two["unshared_by_hand"]:
        assert "0 steps: a training step in which no attention is shared" in refused
        assert steps == 0
        assert shared == "2 steps"


MORE = "tokens see each other by more than shared attention"


def test_a_registered_model_with_a_recurrence_is_refused_and_says_how_to_declare_it(two):
    for rank in two["mixing"]:
        assert rank["recurrence"].startswith(f"0 steps: a training step in which {MORE} (stack in the step itself)")
        assert "declare shares_sequences = True in the class of the model" in rank["recurrence"]
        assert rank["without"] == rank["declared"] == "2 steps"


def test_more_than_attention_is_refused_before_an_optimiser_steps_and_in_validation(two):
    for rank in two["mixing"]:
        refused, steps = rank["by hand"]
        assert f"0 steps: a training step in which {MORE}" in refused
        assert steps == 0
        assert f"a validation step in which {MORE} (cumsum in FSDPMixing.mixer)" in rank["validated"]


def test_the_probe_leaves_no_trace(two):
    """Losses with dropout and noise, counts, lists, metrics, logs and frozen parts: as where nothing is probed."""
    for rank in two["mixing"]:
        probed, known = rank["watched"]
        assert probed == known
        assert probed[1] == len(probed[2]) == 2
        assert probed[5] == ["decoder.embedding"]


def sequence(degree: int = 2) -> ContextSequence:
    group: Any = SimpleNamespace(size=degree, rank=0, data_group=None)
    return ContextSequence(contiguous(masks.causal(SEQUENCE), degree), group, tokens=ROWS * SEQUENCE)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def sdpa(queries: int, keys: int, rows: int = ROWS, bias: torch.Tensor | None = None) -> torch.Tensor:
    q, k = tokens(rows, 2, queries, 8), tokens(rows, 2, keys, 8)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=bias)


OWN = {
    "sdpa": lambda: sdpa(HELD, HELD),
    "sdpa of a row without its last token": lambda: sdpa(HELD - 1, HELD - 1),
    "sdpa with a token before the row": lambda: sdpa(HELD, HELD + 1),
    "sdpa of rows one after the other": lambda: sdpa(ROWS * HELD, ROWS * HELD, rows=1),
    "sdpa with a bias": lambda: sdpa(HELD, HELD, bias=tokens(1, 2, HELD, HELD)),
    "one query of a pooling": lambda: sdpa(1, HELD),
    "without gradients": torch.no_grad()(lambda: sdpa(HELD, HELD)),
    "flex attention": lambda: flex_attention(*[torch.randn(1, 2, HELD, 16)] * 3),
    "by hand": lambda: ByHand()(tokens(ROWS, HELD, 8)),
    "the framework's": lambda: flash_attention(*[tokens(ROWS, HELD, 2, 8)] * 3, causal=True, scale=1.0),
    "packed projections": lambda: flash_attn_qkvpacked_func(tokens(ROWS, HELD, 3, 2, 8)),
    "packed keys and values": lambda: flash_attn_kvpacked_func(tokens(ROWS, HELD, 2, 8), tokens(ROWS, HELD, 2, 2, 8)),
}  # fmt: skip
OTHER = {
    "within a token": lambda: sdpa(4, 4, rows=ROWS * HELD),
    "to an image": lambda: sdpa(HELD, 5),
    "of an image": lambda: sdpa(5, 5),
    "to the whole sequence, which was gathered": lambda: sdpa(HELD, SEQUENCE),
    "choice of an expert": lambda: torch.softmax(tokens(ROWS, HELD, 4), -1),
    "choice of as many experts as tokens": lambda: torch.softmax(tokens(ROWS * HELD, HELD), -1),
    "loss": lambda: F.cross_entropy(tokens(ROWS * HELD, 29), torch.zeros(ROWS * HELD, dtype=torch.long)),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_to_a_devices_own_part_is_refused(name):
    with pytest.raises(UserError, match="only its own device's part"), AttentionCheck(sequence(), "training"):
        OWN[name]()


@pytest.mark.parametrize("name", OTHER)
def test_attention_to_anything_else_is_not(name):
    with AttentionCheck(sequence(), "training"):
        OTHER[name]()


def test_compiled_code_stays_compiled_and_what_it_shares_is_counted():
    torch.compiler.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    function = torch.compile(lambda x: x.sin() * 2, backend=backend)
    x = torch.randn(4)
    with AttentionCheck(sequence(), "training") as check:
        assert torch.equal(function(x), x.sin() * 2)
    assert len(compiled) == 1
    function(x)
    assert len(compiled) == 1  # the first step's code serves the next
    assert check.shared == 0


def strategy(degree: int, **options: Any) -> flashtrain.ContextParallelStrategy:
    own = flashtrain.ContextParallelStrategy(degree, timeout_seconds=None, **options)
    own.sequence = sequence(degree)
    own._lightning_module = pl.LightningModule()
    return own


def test_only_the_first_step_of_a_kind_is_watched():
    own = strategy(2)
    watching = []

    def step() -> None:
        mode = _get_current_dispatch_mode()
        watching.append(mode is not None)
        if isinstance(mode, AttentionCheck):
            mode.shared += 1

    for kind in ("validation", "training", "training", "validation"):
        own._step(kind, step)
    assert watching == [True, True, False, False]


def test_a_training_step_that_is_passed_over_leaves_the_next_to_be_watched():
    own = strategy(2)
    own._step("training", lambda: None)
    with pytest.raises(UserError, match="a training step in which no attention is shared"):
        own._step("training", lambda: torch.ones(()))


@pytest.mark.parametrize(("degree", "options"), [(1, {}), (2, {"check_attention": False})])
def test_one_device_and_whoever_says_so_are_not_watched(degree, options):
    assert strategy(degree, **options)._step("training", _get_current_dispatch_mode) is None


def test_an_own_part_is_refused_in_later_steps_too_where_our_own_code_is_asked():
    from flashtrain.integrations.huggingface_attention import attention

    q = torch.randn(1, 2, HELD, 8)
    with (
        use_sharded_sequence(sequence()),
        pytest.raises(UserError, match="Identity: attention of 12 keys"),
    ):
        attention(torch.nn.Identity(), q, q, q, None)
    with use_sharded_sequence(sequence(degree=1)):
        attention(torch.nn.Identity(), q, q, q, None)
