"""What gloo ranks find of transformers models under context parallelism, for
test_huggingface_ranks.py.

    python huggingface_ranks.py FOLDER

Two and four ranks write FOLDER/two/RANK.json and FOLDER/four/RANK.json: {case: {what: largest
error}}, where an error is relative to the largest entry of one process's loss or gradient.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from ranks import end, fork, report
from torch import Tensor, nn

from flashtrain.distributed.context.batch import shard_batch
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.methods import METHODS
from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_loss import balance_of
from flashtrain.models.sharded_sequence import use_sharded_sequence

VOCABULARY, ROWS, LENGTH = 29, 2, 45  # odd: no number of ranks divides it
LAYOUTS = ("balanced", "zigzag", "contiguous")


def _sizes(heads: int, **changes: Any) -> dict[str, Any]:
    """Of a model like Llama; heads: of 4 numbers each, two of keys and values."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 4 * heads, "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, **changes,
    }  # fmt: skip


_BOTH = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


def _gpt2(heads: int) -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=4 * heads, n_layer=2, n_head=heads,
        attn_pdrop=0.2,
        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def _llama(**rope: Any) -> Any:
    longest = 16 if rope["rope_type"] == "dynamic" else 64
    changes = {"rope_parameters": {**_ROPE, **rope}, "max_position_embeddings": longest}
    return lambda heads: transformers.LlamaConfig(**_sizes(heads, **changes))


def _llama4(heads: int) -> Any:
    return transformers.Llama4TextConfig(
        **_sizes(heads), intermediate_size_mlp=24, num_local_experts=2, num_experts_per_tok=1,
        attention_chunk_size=7, no_rope_layers=[1, 0],
    )  # fmt: skip


def _gemma4(heads: int) -> Any:
    """Heads of other sizes in every other layer."""
    sizes = _sizes(heads, **_BOTH, global_head_dim=8, vocab_size_per_layer_input=VOCABULARY)
    return transformers.Gemma4TextConfig(**sizes, hidden_size_per_layer_input=8)


MODELS = {
    "llama": lambda heads: transformers.LlamaConfig(**_sizes(heads)),
    "qwen3": lambda heads: transformers.Qwen3Config(**_sizes(heads)),
    "mistral": lambda heads: transformers.MistralConfig(**_sizes(heads, sliding_window=6)),
    "gemma3": lambda heads: transformers.Gemma3TextConfig(**_sizes(heads, **_BOTH)),
    "gemma2": lambda heads: transformers.Gemma2Config(
        **_sizes(heads, **_BOTH, attn_logit_softcapping=2.0)
    ),
    "gpt_oss": lambda heads: transformers.GptOssConfig(
        **_sizes(heads, **_BOTH), num_local_experts=2, num_experts_per_tok=1
    ),
    "olmo2": lambda heads: transformers.Olmo2Config(**_sizes(heads)),
    "gpt2": _gpt2,
}
# How positions become angles, masks of chunks, layers that differ, and a loss of more than labels.
MORE = {
    "llama, dynamic": _llama(rope_type="dynamic"),
    "llama, yarn": _llama(rope_type="yarn"),
    "llama, llama3": _llama(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "llama4": _llama4,
    "gemma4": _gemma4,
    "mixtral": lambda heads: transformers.MixtralConfig(
        **_sizes(heads), num_local_experts=4, output_router_logits=True, router_aux_loss_coef=3.0
    ),
}
BATCHES = ("plain", "packed", "packed, no cache", "padded", "lengths")


class Case(NamedTuple):
    model: str
    method: str
    layout: str = "balanced"
    batch: str = "packed"
    degree: int = 4

    def __str__(self) -> str:
        return f"{self.model}, {self.method}, {self.layout}, {self.batch}, {self.degree} ranks"

    @property
    def heads(self) -> int:
        return 6 if self.method == "hybrid" else 4


def cases() -> Iterator[Case]:
    """As many that each model meets each method and layout, and most batches."""
    for number, (model, method) in enumerate(itertools.product(MODELS, METHODS)):
        layout, batch = (
            LAYOUTS[number % 3],
            BATCHES[(number + number // len(BATCHES)) % len(BATCHES)],
        )
        yield Case(model, method, layout, batch)
        if method != "hybrid" and number % 3 == 0:
            yield Case(model, method, layout, batch, 2)
    for number, model in enumerate(MORE):
        yield Case(model, METHODS[number % 4], "contiguous", BATCHES[number % 2])


def batch_of(kind: str) -> dict[str, Any]:
    """Rows of documents of odd lengths; labels at the token that predicts them, of which
    some count for nothing."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(2, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.2, -100)
    labels[:, :14] = -100  # of a rank of four all, where tokens are sharded in their order
    given: dict[str, Any] = {"input_ids": text[:, :-1], "labels": labels}
    lengths = [[7, 23, 15], [1, 2, 42]]
    if kind.startswith("packed"):
        given["position_ids"] = torch.stack(
            [torch.cat([torch.arange(n) for n in row]) for row in lengths]
        )
    if kind == "packed, no cache":
        given["use_cache"] = False
    if kind == "padded":
        given["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
        given["attention_mask"][0, :5] = given["attention_mask"][1, 40:] = 0
        given["labels"] = labels.masked_fill(given["attention_mask"] == 0, -100)
    if kind == "lengths":
        bounds = torch.tensor([0, *(n for row in lengths for n in row)]).cumsum(0).int()
        given.update(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=42, max_length_k=42)
    return given


@cache
def model_of(name: str, heads: int) -> nn.Module:
    """In float64 and in training; parameters with ordinary values, so that attention matters."""
    torch.manual_seed(0)
    config = {**MODELS, **MORE}[name](heads)
    config._experts_implementation = "eager"  # transformers' grouped product knows no float64
    config._attn_implementation = register_with_transformers()
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter) + (1.0 if parameter.dim() == 1 else 0.0)
    return model


def loss_and_gradients(
    model: nn.Module, given: dict[str, Any], weight: Any = 1.0
) -> dict[str, Tensor]:
    """The mean loss of a batch, and each parameter's gradient of it; `weight` times."""
    model.zero_grad()
    torch.manual_seed(7)  # attention's dropout is the first rank's draw
    labels = given.pop("labels")
    output, balance = model(**given), balance_of(model)
    loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    if balance is not None:
        loss = loss + balance.coefficient * balance.loss(output.router_logits, ROWS)
    loss = weight * loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@cache
def one_process(name: str, heads: int, batch: str) -> dict[str, Tensor]:
    return loss_and_gradients(model_of(name, heads), batch_of(batch))


def errors(case: Case, group: ContextGroup) -> dict[str, float]:
    """How far the mean over the ranks is from one process."""
    exact = one_process(case.model, case.heads, case.batch)
    part, sequence = shard_batch(
        batch_of(case.batch), group, layout=case.layout, method=case.method
    )
    with use_sharded_sequence(sequence):
        found = loss_and_gradients(model_of(case.model, case.heads), part, sequence.weight)
    kinds = len(sequence._ready)
    wrong: dict[str, float] = {"kinds of attention": kinds}
    floor = 0.01 * max(float(x.abs().max()) for x in exact.values())
    # All in one message: one for each parameter takes longer than the model.
    sums = torch.cat([found.get(name, torch.zeros_like(x)).flatten() for name, x in exact.items()])
    dist.all_reduce(sums, group=group.group)
    for (name, x), total in zip(
        exact.items(), sums.split([x.numel() for x in exact.values()]), strict=True
    ):
        scale = max(float(x.abs().max()), floor)
        wrong[name] = float((total.view_as(x) / group.size - x).abs().max()) / scale
    return wrong


def quiet_and_exact() -> None:
    """Some norms of transformers, and its losses, compute in float32 whatever their model is:
    in a rank they do not."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def rank(folder: Path, mine: list[Case]) -> None:
    quiet_and_exact()
    dist.init_process_group("gloo")
    group = ContextGroup()
    found = {str(case): errors(case, group) for case in mine}
    report(folder, found)
    end()


def import_models() -> None:
    """What every rank would import again: transformers reads a model's code when
    the first one is made."""
    register_with_transformers()
    with torch.device("meta"):
        for config in {**MODELS, **MORE}.values():
            transformers.AutoModelForCausalLM.from_config(config(4))


def main(folder: Path) -> None:
    import_models()
    for name, degree in (("two", 2), ("four", 4)):
        fork(degree, rank, folder / name, [case for case in cases() if case.degree == degree])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
