"""Which weights optimizer=muon orthogonalises, and how it updates experts
that one parameter stacks."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny_training import TinyModel
from torch import nn

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_model import transformers_decoder
from flashtrain.run.fitting import SameCheckpoint
from flashtrain.training.optimizers import adamw, inner_matrices, muon, parameter_groups

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_LOW_RANKS = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
KINDS = {
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        **_LOW_RANKS,
    }
    | {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    "llama4_text": {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48},
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
}


def decoder(kind: str, folder: Path):
    sizes = {
        name: SIZES[name]
        for name in SIZES
        if kind != "gpt2" or name.endswith(("vocab_size", "token_id"))
    }
    transformers.AutoConfig.for_model(kind, **{**sizes, **KINDS[kind]}).save_pretrained(folder)
    torch.manual_seed(0)
    model = transformers_decoder(config=str(folder))
    model.materialise(torch.device("cpu"))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for number in range(count):
        tokens = (torch.arange(16).view(2, 8) * (number + 1)) % 61
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_all_matrices_between_embeddings_and_head_are_muons(kind: str, tmp_path: Path) -> None:
    model = decoder(kind, tmp_path)
    outer = {
        id(model.output_weight),
        *(id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)),
    }
    chosen = {id(one) for one in inner_matrices(model)}
    for name, one in model.named_parameters():
        inside = one.dim() >= 2 and id(one) not in outer and not name.endswith("bias")
        assert (id(one) in chosen) == inside, name
    optimizer = muon(model, lr=1e-2)
    given = [id(one) for group in optimizer.param_groups for one in group["params"]]
    assert sorted(given) == sorted(id(one) for one in model.parameters())
    before = {name: one.clone() for name, one in model.named_parameters() if id(one) in chosen}
    step(model, optimizer)
    assert all(
        (one != before[name]).any() for name, one in model.named_parameters() if name in before
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_decays_is_what_transformers_trainer_lets_decay(kind: str, tmp_path: Path) -> None:
    model = decoder(kind, tmp_path)
    names = {id(one): name for name, one in model.named_parameters()}
    decayed, plain = (
        [names[id(one)] for one in group["params"]] for group in parameter_groups(model, 0.1)
    )
    theirs = transformers.Trainer.get_decay_parameter_names(None, model.module)
    tied = {"lm_head.weight"} if kind == "gpt2" else set()
    # Vectors have none here.
    assert set(decayed) == {name for name in theirs if not name.endswith(".sinks")} - tied
    assert sorted(decayed + plain) == sorted(names.values())


class Experts(nn.Module):
    """Three experts' matrices in one parameter, their biases in another, and a router."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(3, 12, 8))
        self.up_bias = nn.Parameter(torch.randn(3, 12))
        self.router = nn.Parameter(torch.randn(3, 8))
        self.inside = nn.Linear(8, 6)


def test_each_expert_is_updated_as_torchs_muon_updates_a_matrix() -> None:
    ours = Experts()
    alone = [one.detach().clone().requires_grad_() for one in ours.up]
    optimizer = muon(ours, lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.Muon(alone, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for number in range(3):
        gradient = torch.randn(3, 12, 8, generator=torch.Generator().manual_seed(number))
        ours.up.grad = gradient.clone()
        for one, of_one in zip(alone, gradient, strict=True):
            one.grad = of_one.clone()
        optimizer.step()
        theirs.step()
    assert torch.equal(ours.up, torch.stack(alone))
    names = {id(one): name for name, one in ours.named_parameters()}
    assert [names[id(one)] for one in inner_matrices(ours)] == ["up", "router", "inside.weight"]


def test_a_matrix_may_be_stored_transposed() -> None:
    plain, turned = nn.Linear(12, 8, bias=False), transformers.pytorch_utils.Conv1D(8, 12)
    turned.weight.data.copy_(plain.weight.data.T)
    gradient = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    plain.weight.grad, turned.weight.grad = gradient, gradient.T.contiguous()
    for one in (plain, turned):
        muon(nn.Sequential(one, nn.LayerNorm(8)), lr=1e-2).step()
    # bfloat16's rounding of an update.
    torch.testing.assert_close(turned.weight.T, plain.weight, rtol=0, atol=1e-3)


def test_a_mixture_of_experts_goes_on_from_its_states_exactly(tmp_path: Path) -> None:
    whole = decoder("mixtral", tmp_path)
    part = copy.deepcopy(whole)
    optimizer = muon(whole, lr=1e-2)
    step(whole, optimizer, 2)
    part.load_state_dict(whole.state_dict())
    resumed = muon(part, lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, one in ((whole, optimizer), (part, resumed)):
        step(model, one, 3)
    for ours, exact in zip(part.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("same", [True, False])
def test_a_checkpoint_of_other_groups_is_refused_with_the_reason(
    same: bool, tmp_path: Path
) -> None:
    model = TinyModel()
    optimizer = adamw(model)
    state = optimizer.state_dict()
    if not same:  # as a version that took one more of the vectors for a matrix
        one, other = (group["params"] for group in state["param_groups"])
        one.append(other.pop())
    torch.save({"optimizer_states": [state]}, tmp_path / "last.ckpt")
    trainer = SimpleNamespace(optimizers=[optimizer])
    if same:
        SameCheckpoint(tmp_path / "last.ckpt").on_fit_start(trainer, None)
    else:
        with pytest.raises(UserError, match=r"last\.ckpt.*older version.*weights=RUN"):
            SameCheckpoint(tmp_path / "last.ckpt").on_fit_start(trainer, None)
