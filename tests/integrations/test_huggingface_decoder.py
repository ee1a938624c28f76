"""transformers' decoders as Trainables: the loss and gradients of transformers' own eager
model, whatever is saved."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import huggingface_models as tiny
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.errors import UserError
from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.integrations.huggingface_loss import Head
from flashtrain.integrations.huggingface_model import transformers_decoder
from flashtrain.integrations.huggingface_specs import shape_of
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.training.memory import Blocks, estimate_memory
from flashtrain_kernels import FORWARDS, dispatch, masks

DOCUMENTS = [7, 1, 11, 5]  # packed into a row
SAVINGS = [
    MemorySavings(),
    MemorySavings("selective"),
    MemorySavings("full", ffn_chunk=7, loss_chunk=5),
    MemorySavings("full", offload=True),
]
PARTLY = MemorySavings("selective", layers=1)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def float64_stays(monkeypatch) -> None:
    """transformers' eager attention rounds its softmax to float32, and its loss the
    logits, in float64 too."""
    softmax, to_float32 = torch.nn.functional.softmax, torch.Tensor.float

    def in_its_own_type(x, *given, dtype=None, **named):
        return softmax(x, *given, dtype=None if x.dtype == torch.float64 else dtype, **named)

    monkeypatch.setattr(torch.nn.functional, "softmax", in_its_own_type)
    monkeypatch.setattr(
        torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float32(x)
    )


def pair(kind: str, **changes) -> tuple[HuggingFaceDecoder, transformers.PreTrainedModel]:
    """(ours, transformers' eager one), in float64; the experts one by one, since grouped
    products know no float64."""
    ours, eager = tiny.pair(kind, torch.float64, **changes)
    if kind == "gpt_oss":
        ours.set_experts_implementation("eager")
        eager.set_experts_implementation("eager")
    return HuggingFaceDecoder(ours), eager


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[:, ::5] = -100
    return labels


def eager_loss(model, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """transformers' own loss over the documents of a row, each read by itself."""
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for part, wanted in zip(ids.split(DOCUMENTS, 1), labels.split(DOCUMENTS, 1), strict=True):
        count = int((wanted != -100).sum())
        if count:
            total = total + model(input_ids=part, shift_labels=wanted, labels=wanted).loss * count
            counted += count
    return total / counted


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_equal_with_every_saving(ours, eager, ids: torch.Tensor, mask=None) -> None:
    """The loss and gradients of packed DOCUMENTS, whatever is saved."""
    labels = labels_of(ids)
    expected = eager_loss(eager, ids, labels)
    expected.backward()
    ours.train()
    for savings in SAVINGS:
        ours.save_memory(savings)
        ours.zero_grad()
        loss = ours.loss(ids, labels, positions=tiny.positions(DOCUMENTS), mask=mask)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-10), savings
        torch.testing.assert_close(gradients(ours), gradients(eager), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", tiny.DECODERS)
def test_packed_documents_have_transformers_own_loss_and_gradients_with_every_saving(
    kind: str,
) -> None:
    numbers = torch.tensor([[n for n, length in enumerate(DOCUMENTS) for _ in range(length)]])
    mask = masks.document(numbers, causal=True)
    assert_equal_with_every_saving(*pair(kind), tiny.tokens(1, sum(DOCUMENTS)), mask)


@pytest.mark.parametrize(
    ("kind", "changes", "head"),
    [
        ("llama", {}, Head(1.0, 0.0)),
        ("llama", {"tie_word_embeddings": True}, Head(1.0, 0.0)),
        ("gemma2", {"final_logit_softcapping": 3.0}, Head(1.0, 3.0)),
        ("cohere", {"logit_scale": 0.25}, Head(0.25, 0.0)),
        ("granite", {"logits_scaling": 8.0}, Head(0.125, 0.0)),
        ("phi", {}, None),  # lm_head has a bias: whole logits
    ],
)
def test_the_loss_in_pieces_knows_what_the_model_does_to_its_logits(kind, changes, head) -> None:
    ours = transformers_decoder(
        config=kind, changes={**tiny.LLAMA_LIKE, **changes}, attention="standard"
    )
    ours.materialise(CPU)
    ours.double()
    assert ours.head == head
    ids = tiny.tokens(2, 13)
    labels = labels_of(ids)
    loss = ours.loss(ids, labels)
    assert loss.item() == pytest.approx(
        ours.module(input_ids=ids, shift_labels=labels, labels=labels).loss.item()
    )
    loss.backward()
    assert gradients(ours).keys() == dict(ours.named_parameters()).keys()
    weights = torch.randn(2, 13, dtype=torch.float64)
    each = ours.token_losses(ids, labels)
    exact = torch.nn.functional.cross_entropy(
        ours.module(input_ids=ids).logits.mT, labels, reduction="none"
    )
    torch.testing.assert_close(each, exact, atol=1e-10, rtol=0)
    expected, found = (
        torch.autograd.grad(one, [*ours.parameters()], weights) for one in (exact, each)
    )
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_a_model_that_calls_a_part_of_its_body_computes_its_logits_itself() -> None:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert (
        transformers_decoder(config="opt", changes={**sizes, "word_embed_proj_dim": 32}).head
        is None
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_oss", "gemma3", *tiny.LATER])
def test_weights_of_a_folder_are_read_onto_a_model_without_any(kind: str, tmp_path: Path) -> None:
    eager = tiny.build(kind, "eager", torch.float32)
    eager.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = transformers_decoder(str(tmp_path))
    assert {one.device.type for one in ours.parameters()} == {"meta"}
    ours.materialise(CPU)
    ids = tiny.tokens(1, 9)
    torch.testing.assert_close(ours(ids), eager(ids).logits, rtol=0, atol=1e-5)
    assert all(one.requires_grad for one in ours.parameters())


def test_random_weights_are_those_of_the_class_and_of_the_seed() -> None:
    changes = {**tiny.LLAMA_LIKE, "tie_word_embeddings": True}
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        ours = transformers_decoder(config="llama", changes=changes)
        ours.materialise(CPU)
        drawn.append(ours.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])
    assert drawn[0][name].std().item() == pytest.approx(0.02, rel=0.1)
    assert drawn[0]["model.norm.weight"].eq(1).all()
    assert drawn[0]["lm_head.weight"].data_ptr() == drawn[0]["model.embed_tokens.weight"].data_ptr()


def test_text_is_written_with_a_cache_as_without(tmp_path: Path) -> None:
    ours, _ = pair("mistral")  # a window of 5 tokens
    ids, cache = tiny.tokens(1, 12), ours.new_cache()
    pieces = [ours(part, cache=cache, last_only=True) for part in ids.split([8, 1, 3], 1)]
    assert cache.get_seq_length() == 12
    torch.testing.assert_close(pieces[-1], ours(ids)[:, -1:])


@pytest.mark.parametrize(
    ("residual", "kept"), [("weights", torch.float32), ("compute", torch.bfloat16)]
)
def test_the_sum_of_all_branches_is_kept_in_the_type_that_was_asked_for(
    residual: str, kept: torch.dtype
) -> None:
    ours = transformers_decoder(config="llama", changes=tiny.LLAMA_LIKE, residual=residual)
    ours.materialise(CPU)
    between = []
    ours.blocks[1].register_forward_pre_hook(lambda module, given: between.append(given[0].dtype))
    ids = tiny.tokens(1, 13)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours.loss(ids, labels_of(ids))
    loss.backward()
    assert between == [kept]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(ours.loss(ids, labels_of(ids)).item(), rel=1e-2)


LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def draw_adapters(model):
    """The model itself, its adapters drawn at random."""
    torch.manual_seed(1)
    for name, one in model.named_parameters():
        if ".lora_" in name:
            one.data = 0.3 * torch.randn_like(one)
    return model


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_adapters_have_the_gradients_that_peft_gives_them_in_transformers_model(kind: str) -> None:
    peft = pytest.importorskip("peft")
    models = tiny.pair(kind, torch.float64)
    for model in models:
        model.add_adapter(peft.LoraConfig(**LORA))
        draw_adapters(model)
    ours, eager = HuggingFaceDecoder(models[0]), models[1]
    assert_equal_with_every_saving(ours, eager, tiny.tokens(1, sum(DOCUMENTS)))
    assert all(".lora_" in name for name in gradients(ours))


@pytest.mark.parametrize(
    ("kind", "sizes", "targets", "said"),
    [
        ("llama", {}, ["q_proj", "embed_tokens"], "model.embed_tokens and lm_head"),
        ("gpt2", {"n_embd": 32, "n_head": 2}, ["wte"], "transformer.wte and lm_head"),
    ],
)
def test_adapters_on_a_matrix_that_two_layers_share_are_refused(
    kind, sizes, targets, said, tmp_path
) -> None:
    pytest.importorskip("peft")
    content = {**tiny.LLAMA_LIKE, "tie_word_embeddings": True, **sizes}
    config = save_config(tmp_path, model_type=kind, **content)
    with pytest.raises(UserError, match=rf"{said} are one matrix .tie_word_embeddings"):
        transformers_decoder(config=config, lora={**LORA, "target_modules": targets})


def test_adapters_on_embeddings_begin_as_the_model_and_are_merged_where_the_head_is_apart(
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    base, run = tmp_path / "base", tmp_path / "run"
    eager, ids = tiny.build("llama", "eager"), tiny.tokens(1, 9)
    eager.save_pretrained(base)
    ours = transformers_decoder(
        str(base), lora={**LORA, "target_modules": ["embed_tokens", "lm_head"]}
    )
    ours.materialise(CPU)
    torch.testing.assert_close(ours(ids), eager(ids).logits, rtol=0, atol=1e-5)
    trained = draw_adapters(ours)(ids)
    ours.save(run)
    merged = transformers.AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32)
    apart = peft.PeftModel.from_pretrained(eager, run / "adapter")
    for back in (merged, apart):
        torch.testing.assert_close(back(ids).logits, trained, rtol=0, atol=1e-4)


EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LATENT = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
LATENT |= {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}


def experts(kind: str) -> transformers.PretrainedConfig:
    latent = LATENT if kind == "deepseek_v3" else {}
    return transformers.AutoConfig.for_model(kind, **{**tiny.LLAMA_LIKE, **EXPERTS, **latent})


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_adapters_of_experts_are_pefts_and_are_written_merged_and_apart(
    kind: str, tmp_path: Path, monkeypatch
) -> None:
    """peft puts one adapter around another where several matrices of a module are adapted."""
    peft = pytest.importorskip("peft")
    monkeypatch.undo()
    base, run, ids = tmp_path / "base", tmp_path / "run", tiny.tokens(1, 13)
    transformers.AutoModelForCausalLM.from_config(experts(kind)).save_pretrained(base)

    def read(folder: Path) -> transformers.PreTrainedModel:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager"
        )

    theirs = read(base)
    theirs.add_adapter(peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    ours = transformers_decoder(str(base), lora=LORA)
    ours.materialise(CPU)
    # An adapter begins with 0.
    torch.testing.assert_close(ours(ids), read(base)(ids).logits, rtol=0, atol=1e-5)
    adapters = {name: one.shape for name, one in theirs.named_parameters() if ".lora_" in name}
    assert {name: one.shape for name, one in ours.state_dict().items()} == adapters
    assert sum(".experts." in name for name in adapters) == (4 if kind == "deepseek_v3" else 8)
    labels = labels_of(ids)
    ours.train().save_memory(MemorySavings("full", ffn_chunk=7))
    draw_adapters(ours).loss(ids, labels).backward()
    expected = draw_adapters(theirs)(input_ids=ids, labels=labels, shift_labels=labels)
    expected.loss.backward()
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.eval()(ids), expected.logits, rtol=0, atol=1e-5)
    ours.save(run)
    # And goes on as before.
    torch.testing.assert_close(ours(ids), expected.logits, rtol=0, atol=1e-5)
    for back in (read(run), peft.PeftModel.from_pretrained(read(base), run / "adapter")):
        torch.testing.assert_close(back(ids).logits, expected.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["phimoe", "llama4_text"])
def test_routers_that_return_several_tensors_get_no_adapter(
    kind: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.undo()
    base, run, ids = tmp_path / "base", tmp_path / "run", tiny.tokens(1, 13)
    config = transformers.AutoConfig.for_model(
        kind, **{**tiny.LLAMA_LIKE, "num_local_experts": 4, "head_dim": 8}
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    ours = transformers_decoder(str(base), lora=LORA)
    ours.materialise(CPU)
    assert not [name for name, _ in ours.adapters if "router" in name]
    draw_adapters(ours).train().loss(ids, labels_of(ids)).backward()
    assert all(one.grad is not None for one in ours.parameters() if one.requires_grad)
    ours.eval().save(run)
    back = transformers.AutoModelForCausalLM.from_pretrained(run, attn_implementation="eager")
    torch.testing.assert_close(back(ids).logits, ours(ids), rtol=0, atol=1e-5)
    with pytest.raises(UserError, match=r"unknown layer in model\.adapter_targets 'router'"):
        transformers_decoder(str(base), lora={**LORA, "target_modules": ["q_proj", "router"]})


@pytest.mark.parametrize("targets", [["q_proj", "v_prj"], ["v_prj"]])
def test_a_target_that_no_layer_has_is_refused_with_the_near_name(targets: list[str]) -> None:
    pytest.importorskip("peft")
    with pytest.raises(UserError, match=r"model.adapter_targets 'v_prj'. Did you mean 'v_proj'"):
        transformers_decoder(
            config="llama", changes=tiny.LLAMA_LIKE, lora={**LORA, "target_modules": targets}
        )


def test_a_peft_that_transformers_does_not_accept_is_named_with_the_remedy(monkeypatch) -> None:
    """As transformers 5.24 does not accept peft 0.21: this is said of the packages,
    whatever the targets are."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "99.0")
    both = (
        r"model.adapter=lora: "
        rf"transformers {transformers.__version__} does not accept peft {peft.__version__}"
    )
    for target in ("q_proj", "v_prj"):
        with pytest.raises(UserError, match=rf"{both} .*99.0.* pip install 'flashtrain\[hub\]'"):
            transformers_decoder(
                config="llama", changes=tiny.LLAMA_LIKE, lora={**LORA, "target_modules": [target]}
            )


def test_targets_may_name_experts_as_peft_does(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    experts("mixtral").save_pretrained(tmp_path)
    ours = transformers_decoder(
        config=str(tmp_path), lora={**LORA, "target_modules": ["q_proj", "w1", "w2", "w3"]}
    )
    # transformers has w1 and w3 as one.
    assert sum(".experts" in name for name, _ in ours.adapters) == 4


def test_adapters_of_a_configuration_are_written_without_a_look_at_the_hub(
    tmp_path: Path, monkeypatch
) -> None:
    peft = pytest.importorskip("peft")
    looked = []
    monkeypatch.setattr(
        peft.utils.save_and_load, "check_file_exists_on_hf_hub", lambda *asked: looked.append(asked)
    )
    ours = transformers_decoder(config="llama", changes=tiny.LLAMA_LIKE, lora=LORA)
    ours.materialise(CPU)
    ours.save_adapters(tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    assert not looked


def test_matrices_in_4_bits_are_trained_beside_and_merged_as_they_were(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    sizes = {**tiny.LLAMA_LIKE, "hidden_size": 128, "intermediate_size": 128}
    ours = transformers_decoder(config="llama", changes=sizes, lora=LORA, quantize="nf4")
    # k and v are of too few numbers.
    assert ours.shape.quantized == 2 * (2 * 128 * 128 + 3 * 128 * 128)
    ours.materialise(CPU)
    weight = ours.blocks[0].mlp.up_proj.base_layer.weight
    assert type(weight).__name__ == "NF4Tensor"
    ours.train().save_memory(MemorySavings("selective"))
    ids = tiny.tokens(2, 13)
    optimizer = torch.optim.AdamW([one for one in ours.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = ours.loss(ids, labels_of(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(".lora_" in name for name in gradients(ours))
    trained = ours.eval()(ids)
    ours.save(tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(back(ids).logits, trained, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match=r"add model\.adapter=lora"):
        transformers_decoder(config="llama", changes=sizes, quantize="nf4")


class Counted(TorchDispatchMode):
    """Counts how often attention was computed forward."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in FORWARDS or (
            "scaled_dot_product" in func.name() and "backward" not in func.name()
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("savings", "each"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_does_not_compute_attention_again(savings: str, each: int) -> None:
    ours, _ = pair("llama")
    ours.train().save_memory(MemorySavings(savings))
    ids = tiny.tokens(1, 13)
    with Counted() as counted:
        ours.loss(ids, labels_of(ids)).backward()
    assert counted.calls == each * len(ours.blocks)


@pytest.mark.parametrize("savings", [MemorySavings(), MemorySavings("full", layers=3)])
def test_compiled_layers_save_what_is_estimated(savings: MemorySavings) -> None:
    """The bytes that autograd saves of three layers more, within 5% of the estimate. (What
    "selective" saves of attention no hook sees.)"""
    saved, expected = [], []
    for layers in (1, 4):
        torch.compiler.reset()
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=128,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                attn_implementation=register_with_transformers(),
            )
        )
        ours = HuggingFaceDecoder(model.bfloat16())
        ours.train().save_memory(savings)
        ours.compile_blocks(dynamic=False, backend="aot_eager_decomp_partition")
        sizes: dict[int, int] = {}
        alive = []
        weights = {one.untyped_storage().data_ptr() for one in ours.parameters()}

        def note(one: torch.Tensor, sizes=sizes, alive=alive, weights=weights) -> torch.Tensor:
            storage = one.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
                alive.append(one)
            return one

        ids = torch.zeros(1, 256, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda one: one)
        with dispatch.force("reference"), hooks:
            ours.loss(ids, ids)
        saved.append(sum(sizes.values()))
        blocks = Blocks(ours.shape.embed, ours.shape.layers)
        sizes_of = {"vocab_rows": 128, "context": 256, "micro_batch": 1, "precision": "bf16-true"}
        estimate = estimate_memory(10**6, blocks, savings=savings, **sizes_of)
        expected.append(estimate.activations)
    assert saved[1] - saved[0] == pytest.approx(expected[1] - expected[0], rel=0.05)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize(
    "savings",
    [MemorySavings(), MemorySavings("selective"), MemorySavings("full"), PARTLY],
    ids=MemorySavings.describe,
)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_layers_that_are_compiled_give_the_same(
    kind: str, savings: MemorySavings, monkeypatch
) -> None:
    monkeypatch.undo()  # what stands in for torch's functions, and compiled code passes by
    found = []
    ids, positions = tiny.tokens(1, sum(DOCUMENTS)), tiny.positions(DOCUMENTS)
    for compiled in (False, True):
        ours, _ = pair(kind)
        ours.train().save_memory(savings)
        if compiled:
            torch._dynamo.reset()
            ours.compile_blocks(dynamic=False, fullgraph=True, backend="aot_eager")
        ours.loss(ids, labels_of(ids), positions=positions).backward()
        found.append(gradients(ours))
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ffn_chunk", [None, 7])
def test_all_layers_share_what_is_compiled_and_make_no_mask_of_a_row_of_one_document(
    ffn_chunk: int | None, monkeypatch
) -> None:
    monkeypatch.undo()
    ours, _ = pair("llama")
    ours.train().save_memory(MemorySavings("selective", ffn_chunk=ffn_chunk))
    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    ours.compile_blocks(dynamic=False, backend=keep)
    ids = tiny.tokens(1, 13)
    ours.loss(ids, labels_of(ids)).backward()
    assert len(graphs) == 1 < len(ours.blocks)
    assert "cumsum" not in graphs[0].code  # by which documents are numbered


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_compiled_layers_generate_as_before_and_compile_nothing_for_it(
    kind: str, monkeypatch
) -> None:
    monkeypatch.undo()
    ours, _ = pair(kind)
    ours.eval().save_memory(MemorySavings("full", ffn_chunk=8))
    ids, graphs = tiny.tokens(1, 9), []

    def generated() -> torch.Tensor:
        return ours.module.generate(
            input_ids=ids[:, :5], max_new_tokens=5, do_sample=False, pad_token_id=0
        )

    wanted = generated()
    torch._dynamo.reset()
    ours.compile_blocks(dynamic=False, backend=lambda graph, _: graphs.append(1) or graph.forward)
    ours.loss(ids, labels_of(ids)).backward()
    trained = len(graphs)
    assert trained
    torch.testing.assert_close(generated(), wanted)
    assert len(graphs) == trained


def flops(kind: str, context: int, **changes) -> float:
    return transformers_decoder(
        config=kind, changes={**tiny.LLAMA_LIKE, **changes}
    ).flops_per_token(context)


def test_flops_count_windows_active_experts_and_no_table_that_is_looked_up() -> None:
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48  # q and o, k and v, the gated feed-forward
    full = 6 * (2 * layer + 61 * 32)
    assert flops("llama", 64) == full + 12 * 2 * 32 * 32
    assert flops("llama", 64, tie_word_embeddings=True) == flops("llama", 64)
    windowed = flops("mistral", 64, sliding_window=16)  # a token sees 16 keys, the first ones fewer
    assert windowed == full + 12 * 2 * 32 * 16 * (1 - 16 / 128)
    router, expert = 4 * 32, 3 * 32 * 48
    experts = flops("mixtral", 64, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    assert experts == full + 12 * 2 * 32 * 32 + 6 * 2 * (router + expert)


def test_layers_of_a_state_say_what_they_are() -> None:
    config = transformers.Lfm2Config(**tiny.LLAMA_LIKE, layer_types=["conv", "full_attention"])
    with torch.device("meta"):
        model = HuggingFaceDecoder(transformers.AutoModelForCausalLM.from_config(config))
    state, attention = (layer.mixer for layer in model.shape.layers)
    assert (state.kind, state.crosses_devices, attention.crosses_devices) == (
        "conv",
        "state",
        "attention",
    )
    assert state.flops(64) == 0  # but for its weights


def save_config(folder: Path, **content) -> str:
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model_type": "bloom"}, "BloomForCausalLM calls .* 0 times"),
        (
            {"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 8},
            "mixes tokens by linear_attention in 1 of 1 layers",
        ),
        (
            {"model_type": "lama"},
            "unknown kind of decoder in model.config 'lama'. Did you mean 'llama'",
        ),
        ({"model_type": "mine", "auto_map": {}}, "unknown kind of decoder in model.config 'mine'"),
        ({}, "unknown kind of decoder in model.config 'None'"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantized weights"),
        # transformers' masks then hide every token.
        (
            {"model_type": "mistral", "sliding_window": 0},
            "has sliding_window=0: expected at least 1 .*null",
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": -1},
            "has sliding_window=-1: expected at least 1",
        ),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 0},
            "has attention_chunk_size=0: expected at least 1",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(content, said, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        transformers_decoder(config=save_config(tmp_path, **content))


def test_a_folder_without_safetensors_and_weights_of_another_model_are_refused(
    tmp_path: Path,
) -> None:
    model = tiny.build("llama", "eager")
    model.config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(UserError, match=r"no model\.safetensors in"):
        transformers_decoder(str(tmp_path))
    tiny.build("llama", "eager", intermediate_size=40).save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"of another model: 'model\.layers\.0\.mlp.*has another shape"
    ):
        transformers_decoder(str(tmp_path)).materialise(CPU)
    tiny.build("llama", "eager", num_hidden_layers=1).save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'model\.layers\.1.* is missing, and so of 8 others"):
        transformers_decoder(str(tmp_path)).materialise(CPU)


@pytest.fixture
def untied(tmp_path: Path) -> str:
    """A folder with two different matrices that its configuration calls one."""
    model = tiny.build("llama", "eager", tie_word_embeddings=False)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "untied")
    return str(tmp_path / "untied")


def test_an_output_head_that_is_tied_to_another_embedding_is_refused_or_trained_untied(
    untied,
) -> None:
    """An export of it would be two models: transformers 5 reads the head, others the
    embedding in its place."""
    with pytest.raises(
        UserError, match=r"'lm_head\.weight' and 'model\.embed_tokens\.weight' .* differ.*: false"
    ):
        transformers_decoder(untied).materialise(CPU)
    ours = transformers_decoder(untied, changes={"tie_word_embeddings": False})
    ours.materialise(CPU)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(untied, attn_implementation="eager")
    ids = tiny.tokens(1, 24)
    torch.testing.assert_close(
        ours(ids).double(), theirs(ids).logits, rtol=0, atol=1e-4, check_dtype=False
    )


def test_a_checkpoint_of_an_older_run_keeps_the_head_that_it_trained_beside_the_embedding(
    untied,
) -> None:
    state = transformers_decoder(untied, changes={"tie_word_embeddings": False})
    state.materialise(CPU)
    older = transformers_decoder(untied)
    older.fill(state.state_dict())
    assert torch.equal(older.output_weight, state.output_weight)
    assert not torch.equal(older.output_weight, older.module.get_input_embeddings().weight)


@pytest.mark.parametrize("name", ["no/such/folder", "someone/some-model"])
def test_a_name_that_is_no_folder_is_refused_where_the_hub_does_not_answer(
    name, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=rf"model\.path={name}: no such folder.*add model\.path=F"):
        transformers_decoder(name)


def test_positions_that_are_too_few_are_refused_and_rotary_ones_stretched(caplog) -> None:
    with pytest.raises(UserError, match="longer than the 64 learned positions"):
        transformers_decoder(
            config="gpt2", changes={"n_positions": 64, "n_embd": 32, "n_head": 2}, context=128
        )
    longer = transformers_decoder(
        config="llama", changes=tiny.LLAMA_LIKE, context=128, rope_factor=2.0
    )
    assert longer.config.max_position_embeddings == 128
    assert longer.config.rope_parameters["rope_theta"] > 10000


BALANCED = [
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "gpt_oss",
    "minimax_m2",
    "granitemoe",
    "jetmoe",
]


@pytest.mark.parametrize("kind", BALANCED)
def test_the_balancing_loss_of_routers_is_transformers_own_with_every_saving(
    kind: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.undo()
    coefficient = {"aux_loss_coef" if kind == "jetmoe" else "router_aux_loss_coef": 10.0}
    content = {**tiny.LLAMA_LIKE, **EXPERTS, "num_local_experts": 4, "head_dim": 8, **coefficient}
    content |= {"kv_channels": 8, "rope_parameters": OWN, "decoder_sparse_step": 1}
    config = transformers.AutoConfig.for_model(kind, **content, output_router_logits=True)
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).train()
    eager.save_pretrained(tmp_path)
    ours = transformers_decoder(str(tmp_path))
    ours.materialise(CPU)
    ids = tiny.tokens(2, 13)
    labels = labels_of(ids)
    expected = eager(input_ids=ids, labels=labels, shift_labels=labels)
    expected.loss.backward()
    assert expected.aux_loss > 1
    ours.train()
    for savings in SAVINGS:
        ours.save_memory(savings)
        ours.zero_grad()
        loss = ours.loss(ids, labels)
        loss.backward()
        assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5), savings
        assert ours.balancing_loss.item() == pytest.approx(expected.aux_loss.item(), abs=1e-5)
        torch.testing.assert_close(gradients(ours), gradients(eager), rtol=1e-4, atol=1e-5)
    held_out = expected.loss - 10 * expected.aux_loss  # nats a token
    assert ours.eval().loss(ids, labels).item() == pytest.approx(held_out.item(), abs=1e-5)


SCALED = {"rope_type": "yarn", "factor": 4.0}
OWN = {"rope_type": "default", "rope_theta": 1e5}
GEMMA = {"sliding_attention": {"rope_type": "default", "rope_theta": 7e3}, "full_attention": OWN}


@pytest.mark.parametrize(
    ("kind", "content", "changes", "whole"),
    [
        ("llama", {"rope_theta": 1e5}, {"rope_parameters": SCALED}, {**OWN, **SCALED}),
        ("llama", {"rope_parameters": OWN}, {"rope_parameters": SCALED}, {**OWN, **SCALED}),
        (
            "llama",
            {"rope_theta": 1e5, "rope_scaling": SCALED},
            {"rope_parameters": {"rope_type": "default"}},
            OWN,
        ),
        (
            "llama",
            {"rope_parameters": OWN},
            {"rope_parameters": SCALED, "max_position_embeddings": 256},
            {**OWN, **SCALED, "original_max_position_embeddings": 64},
        ),
        (
            "gemma3_text",
            {"rope_parameters": GEMMA},
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
            {**GEMMA, "full_attention": {**OWN, "rope_type": "linear", "factor": 8.0}},
        ),
    ],
)
def test_rotary_entries_given_in_part_leave_the_models_own(
    kind, content, changes, whole, tmp_path: Path
) -> None:
    sizes = {**tiny.LLAMA_LIKE, "head_dim": 8}
    given = json.loads(json.dumps(changes))  # transformers writes into what it is given
    ours = transformers_decoder(
        config=save_config(tmp_path, model_type=kind, **sizes, **content), changes=given
    )
    rest = {name: value for name, value in changes.items() if not name.startswith("rope")}
    wanted = transformers.AutoConfig.for_model(kind, **{**sizes, **rest}, rope_parameters=whole)
    module = transformers.AutoModelForCausalLM.from_config(wanted)
    ours.materialise(CPU)
    angles = {name: one for name, one in module.named_buffers() if "inv_freq" in name}
    assert angles
    for name, one in angles.items():
        torch.testing.assert_close(ours.module.get_buffer(name), one, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"attention_droput": 0.1},
            "model.options 'attention_droput'. Did you mean 'attention_dropout'",
        ),
        (
            {"rope_parameters": {"rope_typ": "yarn"}},
            "model.options 'rope_typ'. Did you mean 'rope_type'",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "model.options 'full_attention'"),
        ({"rope_theta": 1e5}, "model.options 'rope_theta'"),
        ({"model_type": "qwen3"}, "model.options 'model_type'"),
    ],
)
def test_a_change_of_what_the_configuration_has_not_is_refused(
    changes, said, tmp_path: Path
) -> None:
    given = save_config(tmp_path, model_type="llama", **tiny.LLAMA_LIKE, of_its_own=1)
    transformers_decoder(config=given, changes={"attention_dropout": 0.1, "of_its_own": 2})
    with pytest.raises(UserError, match=said):
        transformers_decoder(config=given, changes=changes)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_an_entry_that_the_model_reads_by_getattr_is_changed_as_in_its_config_json(
    kind, tmp_path: Path
) -> None:
    experts = (
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        if kind == "glm4_moe"
        else {"num_experts": 4}
    )
    content = {
        **tiny.LLAMA_LIKE,
        **experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 12,
    }
    written = transformers_decoder(config=save_config(tmp_path, model_type=kind, **content))
    ours = transformers_decoder(config=kind, changes=content)
    shapes = [
        {name: one.shape for name, one in model.named_parameters()} for model in (ours, written)
    ]
    assert shapes[0] == shapes[1]
    assert ours.module.model.layers[0].self_attn.q_proj.out_features == 4 * 12
    with pytest.raises(UserError, match=r"'head_dimm'. Did you mean 'head_dim'"):
        transformers_decoder(config=kind, changes={**content, "head_dimm": 12})


@pytest.mark.parametrize("older", [False, True])
def test_packed_documents_of_robertas_family_are_read_as_alone_and_in_older_runs_from_position_0(
    older,
) -> None:
    changes = {**tiny.LLAMA_LIKE, "pad_token_id": 1, "bos_token_id": 0, "is_decoder": True}
    del changes["num_key_value_heads"]
    ours = transformers_decoder(
        config="roberta", changes=changes, context=62, older_positions=older
    )
    ours.materialise(CPU)
    ours.double().eval()
    assert ours.shape.context == (64 if older else 62)
    ids = tiny.tokens(1, sum(DOCUMENTS))
    labels = labels_of(ids)
    config = copy.deepcopy(ours.config)  # transformers writes the implementation into it
    eager = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        .double()
        .eval()
    )
    eager.load_state_dict(ours.module.state_dict())
    if older:
        read = [
            eager(one, position_ids=tiny.positions([one.shape[1]])).logits
            for one in ids.split(DOCUMENTS, 1)
        ]
        logits = torch.cat(read, 1)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    else:
        expected = eager_loss(eager, ids, labels)
        with pytest.raises(UserError, match="context=63 is longer than the 62 learned positions"):
            transformers_decoder(config="roberta", changes=changes, context=63)
    loss = ours.loss(ids, labels, positions=tiny.positions(DOCUMENTS))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)


def test_older_and_other_names_of_entries_are_changed(tmp_path: Path) -> None:
    # GPT-2 calls them n_embd, ...
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    assert transformers_decoder(config="gpt2", changes=small).config.n_embd == 32
    few = {**tiny.LLAMA_LIKE, "sliding_window_pattern": 2}  # a field no more
    assert (
        transformers_decoder(config="gemma3_text", changes=few).config.layer_types[1]
        == "full_attention"
    )


def test_a_mask_that_positions_cannot_express_is_refused() -> None:
    ours, _ = pair("llama")
    ids = tiny.tokens(1, sum(DOCUMENTS))
    whole = masks.causal(sum(DOCUMENTS))
    for mask, positions in ((whole, tiny.positions(DOCUMENTS)), (whole, None)):
        with pytest.raises(UserError, match="packed documents"):
            ours.loss(ids, labels_of(ids), positions=positions, mask=mask)


@pytest.mark.parametrize(
    ("kind", "by_autograd"), [("llama", False), ("gemma3", True), ("gpt2", True)]
)
def test_the_estimate_knows_whose_chunks_our_operator_computes(kind, by_autograd):
    model = transformers.AutoModelForCausalLM.from_config(
        tiny.DECODERS[kind](), attn_implementation="sdpa"
    )
    assert shape_of(model).layers[0].feed_forward.by_autograd is by_autograd


@pytest.mark.parametrize(("kind", "alone"), [("llama", True), ("qwen3", False)])
def test_of_queries_the_backward_keeps_what_positions_turned_and_what_a_norm_read(kind, alone):
    """What the estimate of memory counts: autograd keeps a projection's output only
    where a norm needs it."""
    model = transformers.AutoModelForCausalLM.from_config(
        tiny.DECODERS[kind](), attn_implementation="sdpa"
    )
    assert shape_of(model).layers[0].mixer.rotated_alone is alone
    made, kept = [], []
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda module, given, output: made.append(output))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.append(x.data_ptr()), x)[1], lambda x: x
    ):
        model(torch.arange(12)[None], use_cache=False)
    assert (made[0].data_ptr() not in kept) is alone


@pytest.mark.parametrize(
    "savings", [MemorySavings(), MemorySavings("selective", ffn_chunk=8, loss_chunk=8)], ids=str
)
def test_a_decoder_without_weights_has_a_loss_and_gradients_of_the_weights_shapes(
    savings: MemorySavings,
) -> None:
    ours = transformers_decoder(config="llama", changes=tiny.LLAMA_LIKE)
    ours.save_memory(savings)
    with torch.device("meta"):
        row = torch.zeros(1, 20, dtype=torch.int64)
        at = torch.arange(20)[None]
        loss = ours.loss(
            row, row, positions=at, mask=masks.document(torch.zeros_like(row), causal=True)
        )
    loss.backward()
    assert loss.is_meta
    assert all(one.grad is not None and one.grad.shape == one.shape for one in ours.parameters())
