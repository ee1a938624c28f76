"""Linear layers in float8: which they are, what stays as without, and where it is refused.

torchao multiplies dequantized numbers here, as a GPU of sm_89 rounds them.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from quick_settings import settings_of
from tiny_runs import TinyRuns, last_weights
from torch import nn

from flashtrain import registry
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_summary
from flashtrain.integrations.huggingface_model import transformers_decoder
from flashtrain.models import Decoder, DecoderConfig, MemorySavings
from flashtrain.tasks.batching import estimator
from flashtrain.tasks.language.plan import WORTH, plan_language
from flashtrain.training import float8
from flashtrain.training.float8 import expected_gain, float8_flops, split_linears
from flashtrain.training.hardware import detect_hardware, planned_hardware

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
HUGGING_FACE = ("model.name=huggingface", "model.vocab_rows=null", "model.config=tiny")
H200 = planned_hardware("h200", 1)
LENGTHS = [2**power for power in range(10, 21)]
LLAMA_8B_MLP, LLAMA_8B_KEYS, LLAMA_1B_QUERIES = (14336, 4096), (1024, 4096), (2048, 2048)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")  # an extra of its own, which CI does not install
    monkeypatch.setattr(float8, "EMULATE", True)
    monkeypatch.setattr(float8, "pays", lambda one, _: one.weight.shape[0] % 16 == 0)


def convert_linears(model: nn.Module, recipe: str) -> None:
    from flashtrain.training.float8_linear import convert_linears as convert

    convert(model, recipe)


def decoder(recipe: str | None = None, family: str = "llama") -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", family, vocab_size=61, context=32)
    model = Decoder(config.changed(layers=2, embed=64, ffn=96), attention="sdpa")
    if recipe is not None:
        convert_linears(model, recipe)
    return model


def learned(model: nn.Module) -> tuple[float, torch.Tensor]:
    """The loss of one batch and all gradients."""
    torch.manual_seed(1)
    tokens = torch.randint(61, (2, 33))
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    found = (
        getattr(one.grad, "full_tensor", lambda one=one: one.grad)() for one in model.parameters()
    )
    return loss.item(), torch.cat([one.flatten() for one in found])


@pytest.mark.parametrize(
    ("recipe", "size", "gains"),
    [
        ("tensorwise", LLAMA_8B_MLP, True),
        ("tensorwise", LLAMA_1B_QUERIES, True),
        ("tensorwise", LLAMA_8B_KEYS, False),
        ("rowwise", LLAMA_8B_MLP, True),
        ("rowwise", LLAMA_1B_QUERIES, False),
        ("rowwise_with_gw_hp", LLAMA_1B_QUERIES, True),
        ("tensorwise", (14344, 4096), False),  # no multiple of 16
    ],
)
def test_layers_that_are_too_small_or_no_multiple_of_16_stay(recipe, size, gains) -> None:
    rows, columns = size
    assert float8.pays(nn.Linear(columns, rows, bias=False, device="meta"), recipe) == gains


def test_the_limits_are_those_of_torchaos_filters() -> None:
    utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    sizes = [1000, 1024, 1040, 2048, 2064, 4096, 4112]
    for recipe in RECIPES[:2]:
        theirs = utils._auto_filter_for_recipe(recipe, [])
        for one in (nn.Linear(k, n, device="meta") for n in sizes for k in sizes):
            assert float8.pays(one, recipe) == theirs(one, "")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loss_and_gradients_are_close_and_the_state_dict_is_the_same(
    emulated, family, recipe
) -> None:
    plain, rounded = decoder(None, family), decoder(None, family)
    parameters = list(rounded.parameters())
    convert_linears(rounded, recipe)
    convert_linears(rounded, recipe)  # changes nothing
    assert all(one is two for one, two in zip(rounded.parameters(), parameters, strict=True))
    assert list(rounded.state_dict()) == list(plain.state_dict())
    kinds = {type(one).__name__ for one in rounded.blocks.modules() if isinstance(one, nn.Linear)}
    assert kinds == {"TrainedInFloat8"}
    assert type(rounded.blocks).__name__ == "ModuleList"
    (exact, gradients), (loss, approximate) = learned(plain), learned(rounded)
    assert loss == pytest.approx(exact, rel=2e-3)
    assert loss != exact
    # E4m3 has 3 bits after the first and e5m2 has 2: a number is off by up to 6 or 12%.
    assert (approximate - gradients).norm() < 0.12 * gradients.norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_computes_as_without_so_that_tokens_share_no_scale(emulated, recipe) -> None:
    plain, rounded = decoder().eval(), decoder(recipe).eval()
    tokens = torch.arange(7)[None]
    assert torch.equal(rounded(tokens), plain(tokens))
    layer = rounded.train().blocks[0].feed_forward.up
    x = torch.randn(2, 64)
    louder = torch.stack((x[0], 100 * x[1]))
    shares = not torch.equal(layer(x)[0], layer(louder)[0])
    assert shares == (recipe == "tensorwise")  # which context parallelism's probe would refuse


@pytest.mark.parametrize("savings", [MemorySavings("selective"), MemorySavings("full")])
def test_compiled_and_recomputed_blocks_have_the_same_gradients(emulated, savings) -> None:
    once, again = decoder("tensorwise"), decoder("tensorwise")
    again.save_memory(savings)
    again.compile_blocks(fullgraph=True, backend="aot_eager")
    (loss, expected), (same, found) = learned(once), learned(again)
    assert same == loss
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_shards_have_the_same_gradients(emulated, tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from flashtrain.distributed.sharding import shard

    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
        whole, sharded = learned(decoder("rowwise")), learned(shard(decoder("rowwise"), mesh))
    finally:
        dist.destroy_process_group()
    assert sharded[0] == whole[0]
    torch.testing.assert_close(sharded[1], whole[1], rtol=0, atol=1e-6)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}


def test_adapters_routers_and_mixers_with_decays_stay() -> None:
    with torch.device("meta"):
        model = transformers_decoder(config="llama-8b", changes={"num_hidden_layers": 1}, lora=LORA)
    chosen, others = split_linears(model, "tensorwise")
    assert {name.split(".")[-2] for name in chosen} == {
        "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert not {"lm_head"} & {*chosen, *others}
    kinds = {name.split(".")[-2] for name in others}
    assert kinds == {"k_proj", "v_proj", "lora_A", "lora_B"}
    # Frozen weights have no gradient: forward and the input's gradient are left.
    assert float8_flops(model, "tensorwise")[0] == 4 * sum(
        one.weight.numel() for one in chosen.values()
    )
    with pytest.raises(UserError, match=r"model\.float8=rowwise: no linear layer"):
        split_linears(decoder(), "rowwise")
    model.blocks[0].mlp.experts = nn.ModuleList([nn.Linear(4096, 4096, device="meta")])
    model.blocks[0].self_attn.A_log = nn.Parameter(torch.zeros(1))
    fewer, _ = split_linears(model, "tensorwise")
    assert {name.split(".")[-2] for name in fewer} == {"gate_proj", "up_proj", "down_proj"}


def test_a_hugging_face_decoder_trains_beside_its_adapters_and_is_exported(
    emulated, tmp_path: Path
) -> None:
    import transformers

    model = transformers_decoder(config="llama", changes=SIZES, lora=LORA)
    convert_linears(model, "rowwise_with_gw_hp")
    names = list(model.state_dict())
    model.materialise(torch.device("cpu"))
    assert list(model.state_dict()) == names
    base = model.blocks[0].mlp.up_proj.base_layer
    assert type(base).__name__ == "TrainedInFloat8"
    tokens = torch.randint(64, (2, 33))
    model.train().save_memory(MemorySavings("selective"))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = model.eval()(tokens)
    model.save(tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(back(tokens).logits, trained, rtol=0, atol=1e-4)


class Terminated(pl.Callback):
    """A run that is sent SIGTERM in its eighth step."""

    def on_train_batch_start(self, trainer, *_) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.integration
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_a_run_learns_as_bf16s_does_and_goes_on_exactly(
    emulated, tiny_runs: TinyRuns, recipe, caplog, monkeypatch
) -> None:
    words = ("hardware.precision=bf16-mixed", "trainer.steps=12", "model.dropout=0.1")
    words = (*words, "optimizer.learning_rate=0.0005")  # at higher ones bf16's loss has peaks
    own = (*words, f"model.float8={recipe}")
    _, plain = tiny_runs.run(f"bf16-{recipe}", *words)
    with caplog.at_level("INFO"):
        status, whole = tiny_runs.run(f"whole-{recipe}", *own)
    assert status == 0
    assert f"float8 ({recipe}): 16 linear layers in training" in caplog.text
    rows = [read_summary(one) for one in (plain, whole)]
    assert rows[1]["train_loss"] == pytest.approx(rows[0]["train_loss"], rel=5e-3)
    assert rows[1]["train_loss"] != rows[0]["train_loss"]
    monkeypatch.setitem(registry._components["callback"], "stop", lambda _: Terminated())
    _, stopped = tiny_runs.run(f"stopped-{recipe}", *own, "trainer.callbacks=[stop]")
    status, resumed = tiny_runs.run(f"resumed-{recipe}", *own, f"resume={stopped}")
    assert status == 0
    expected = last_weights(whole)
    assert all(torch.equal(one, expected[name]) for name, one in last_weights(resumed).items())
    assert expected.keys() == last_weights(plain).keys()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            (*HUGGING_FACE, "model.adapter=lora", "model.quantize=nf4"),
            "model.quantize=nf4",
        ),
        (("memory.ffn_chunk=64",), "memory.ffn_chunk=64"),
        (("context=1000", "trainer.tokens_per_step=8000"), "multiple of 16"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(words, reason) -> None:
    with pytest.raises(UserError, match=r"model\.float8=tensorwise") as refused:
        settings_of("model.float8=tensorwise", *words)
    assert reason in str(refused.value)


def test_gpus_before_sm_89_and_cpus_are_refused_and_a_plan_needs_no_torchao(monkeypatch) -> None:
    for hardware in (planned_hardware("a100-80gb", 1), detect_hardware("cpu")):
        with pytest.raises(UserError, match=r"model\.float8=rowwise needs a GPU of sm_89"):
            float8.check_float8("rowwise", hardware, plans=True)
    for name in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, name, None)
    float8.check_float8("rowwise", H200, plans=True)
    with pytest.raises(UserError, match=r"hardware\.precision=64-true.*bf16-mixed"):
        float8.check_float8("rowwise", replace(H200, precision="64-true"), plans=True)
    with pytest.raises(UserError, match=r"model\.float8=rowwise needs .*torchao"):
        float8.check_float8("rowwise", H200, plans=False)


def gain(model, recipe: str, context: int) -> float:
    return expected_gain(model.flops_per_token(context), *float8_flops(model, recipe))


def test_a_plan_names_the_layers_and_the_lengths_at_which_it_pays() -> None:
    words = ("mode=plan", "model.name=llama", "model.size=1.3b", "context=8192")
    words = (*words, "trainer.tokens_per_step=131072", "model.float8=rowwise_with_gw_hp")
    text = plan_language(settings_of(*words), H200)
    assert "float8 (rowwise_with_gw_hp): 96 linear layers in training" in text
    with torch.device("meta"):
        model = Decoder(DecoderConfig.of_size("1.3b", "llama", vocab_size=50257, context=8192))
    gains = {n: gain(model, "rowwise_with_gw_hp", n) for n in LENGTHS}
    assert list(gains.values()) == sorted(gains.values(), reverse=True)  # attention is in bf16
    assert f"{gains[8192]:.2f} times bf16's speed at context=8,192" in text
    last = max(length for length, gain in gains.items() if gain >= WORTH)
    assert f"({WORTH} or more up to {last:,})" in text
    # In the order of the measured steps (recipes/results/hf-float8-h200.json).
    by_row, by_tensor = (gain(model, one, 8192) for one in ("rowwise", "tensorwise"))
    assert 1 < by_row < gains[8192] < by_tensor < 1.2


def test_the_estimate_is_bf16s_without_feed_forwards_in_chunks() -> None:
    words = ("mode=plan", "model.name=llama", "model.size=1.3b")
    with torch.device("meta"):
        model = Decoder(DecoderConfig.of_size("1.3b", "llama", vocab_size=50257, context=1024))
    plain, rounded = (
        estimator(settings_of(*words, *own), H200, model, model.shape)
        for own in ((), ("model.float8=tensorwise",))
    )
    for micro_batch in (1, 8):
        assert rounded(micro_batch, MemorySavings()) == plain(micro_batch, MemorySavings())
        whole = rounded(micro_batch, MemorySavings("full", ffn_chunk=64))
        assert whole == plain(micro_batch, MemorySavings("full"))
