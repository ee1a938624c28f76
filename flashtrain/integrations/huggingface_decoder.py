"""Any decoder of transformers whose attention asks transformers' interface, trained like one of ours (model=huggingface).

    model = huggingface_decoder("Qwen3-0.6B")             # a folder, or a name of the hub; no weights are read yet
    model.materialise(torch.device("cuda"))               # now they are; sharded before this, each rank reads its part
    loss = model.loss(tokens, labels, positions=positions)

The model stays the class that transformers has. Around it are ours: attention, the loss in pieces, memory savings.

Shapes: B batch, S sequence, E embedding width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.announce import say
from flashtrain.errors import UserError, unknown
from flashtrain.integrations import huggingface_folder as folders
from flashtrain.integrations.huggingface_attention import register_with_transformers
from flashtrain.integrations.huggingface_layers import Layer, decoder_layers
from flashtrain.integrations.weight_files import CONFIG
from flashtrain.models.cache import next_positions, spread_sequence
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.models.positions import rotary_base_for
from flashtrain.models.trainable import Trainable
from flashtrain_kernels import Mask, linear_cross_entropy
from flashtrain_kernels.masks import HIGH, LOW

ATTENTIONS = {"flash": None, "sdpa": "sdpa", "standard": "eager"}  # transformers' own names; None is ours
ADAPTERS = ("lora",)
IGNORED = -100


@dataclass(frozen=True)
class HuggingFaceShape:
    """The numbers of a transformers configuration from which memory and traffic are estimated.

    ffn: the inner width that a token passes, of all experts that it is sent to. activation: "swiglu" where two inner
    matrices read the input, else "gelu". positions: "rotary" or "learned". trained: parameters that get a gradient.
    """

    vocab_size: int
    context: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    ffn: int
    vocab_rows: int
    activation: str
    positions: str
    head_dim: int
    trained: int


class Head(NamedTuple):
    """How logits come from lm_head's: softcap * tanh(scale * x / softcap), or scale * x where softcap is 0."""

    scale: float
    softcap: float


class HuggingFaceDecoder(Trainable):
    """A transformers model for causal language modelling as a Trainable; its weights have transformers' own names.

    module: the model, on the meta device where its weights are yet to be read. origin: the folder, or the hub's name,
    that has them (None: they are drawn at random, or there). residual: see GPT2; the embeddings are cast.
    """

    def __init__(self, module: Any, *, origin: str | None = None, residual: str = "weights") -> None:
        super().__init__()
        # Its parts are this module's own, so that states have transformers' names, also where FSDP2 looks for them.
        self.__dict__["_modules"], self.__dict__["module"] = module._modules, module
        self.origin, self.residual = origin, residual
        self.blocks = decoder_layers(module)
        self.layers = [Layer(block) for block in self.blocks]
        self.head = _head_of(module)
        self.savings = MemorySavings()
        if residual == "compute":
            module.get_input_embeddings().register_forward_hook(_in_compute_type)
        self.register_state_dict_post_hook(_trained_alone)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is set here is no part of the model."""
        object.__setattr__(self, name, value)

    @property
    def config(self) -> Any:
        """transformers' configuration, of the text's model where there are several."""
        return self.module.config.get_text_config()

    @property
    def adapters(self) -> list[tuple[str, Any]]:
        """peft's layers by name; none where the model itself is trained."""
        return [(name, one) for name, one in self.module.named_modules() if hasattr(one, "lora_A")]

    @property
    def keeps_part(self) -> bool:
        """Whether checkpoints hold what is trained alone (adapters); the rest is read from where it came from."""
        return bool(self.adapters)

    @property
    def shape(self) -> HuggingFaceShape:
        config = self.config
        heads = config.num_attention_heads
        experts = getattr(config, "num_experts_per_tok", None)
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
        if experts:
            inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
            inner += getattr(config, "shared_expert_intermediate_size", None) or 0
        names = {name.rpartition(".")[2] for name, _ in self.blocks[0].named_modules()}
        names |= {name.rpartition(".")[2] for name, _ in self.blocks[0].named_parameters()}
        return HuggingFaceShape(
            vocab_size=config.vocab_size,
            context=getattr(config, "max_position_embeddings", None) or 2**31 - 1,
            layers=len(self.blocks),
            embed=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            ffn=inner,
            vocab_rows=self.module.get_output_embeddings().weight.shape[0],
            activation="swiglu" if names & {"gate_proj", "gate_up_proj", "w3"} else "gelu",
            positions="learned" if _learned(self.module) is not None else "rotary",
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            trained=sum(one.numel() for one in self.parameters() if one.requires_grad),
        )

    @property
    def recomputes_blocks(self) -> bool:
        """Always: layers are compiled one by one, as what is between them is transformers' own program."""
        return True

    @property
    def generates(self) -> bool:
        return True

    def train(self, mode: bool = True) -> HuggingFaceDecoder:
        object.__setattr__(self.module, "training", mode)
        return super().train(mode)  # type: ignore[return-value]

    def save_memory(self, savings: MemorySavings) -> None:
        """Train with less memory for activations from now on; losses and gradients stay. UserError: ffn_chunk, where
        the layers' feed-forward is not found."""
        if savings.ffn_chunk is not None and any(layer.feed_forward is None for layer in self.layers):
            raise UserError(f"{type(self.module).__name__} has no feed-forward that memory.ffn_chunk could cut up.")
        self.savings = savings
        for layer in self.layers:
            layer.save_memory(savings)

    def compile_blocks(self, **options: Any) -> bool:
        """Each layer through torch.compile with these options; transformers' own code may break the graph in it."""
        for layer in self.layers:
            layer.compute = torch.compile(layer.compute, **{**options, "fullgraph": False})
        return True

    def keep_in(self, precision: str) -> None:
        """Read the weights in what they are kept in. What an adapter leaves as it is needs no more than bfloat16 where
        that is computed in: it is never updated."""
        trained = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}.get(precision)
        frozen = torch.bfloat16 if precision == "bf16-mixed" else trained
        for one in self.parameters():
            dtype = trained if one.requires_grad else frozen
            if dtype is not None and one.is_floating_point():
                one.data = one.data.to(dtype)

    def materialise(self, device: torch.device) -> None:
        """Give a model on the meta device its weights: from where it came, or at random. UserError: they do not fit."""
        if not any(one.device.type == "meta" for one in self.parameters()):
            return
        with self._without_adapters():
            if self.origin is None:
                folders.random_weights(self.module, self.blocks, device)
            else:
                folders.read_weights(self.module, folders.folder_of(self.origin, "*.safetensors*"), device)
        for _, layer in self.adapters:
            with folders.whole(layer, device):
                for name in layer.lora_A:
                    layer.reset_lora_parameters(name, True)

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """The model as transformers knows it, each adapted layer's own in its place."""
        adapted = self.adapters
        for name, layer in adapted:
            self.module.set_submodule(name, layer.get_base_layer())
        try:
            yield
        finally:
            for name, layer in adapted:
                self.module.set_submodule(name, layer)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        cache: Any = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits (B, S, V) for the token after each of tokens (B, S); cache and last_only as GPT2's."""
        held = None if cache is None else cache.held
        options: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        found = self.module(
            input_ids=tokens, past_key_values=held, use_cache=held is not None, logits_to_keep=int(last_only), **options
        )
        return found.logits

    def hidden(self, tokens: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """The states (B, S, E) that lm_head reads, of packed documents where positions (B, S) begin anew."""
        if positions is None:
            positions = next_positions(tokens.shape[1], None, tokens.device).expand(tokens.shape[0], -1)
        return self.module.base_model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state

    def loss(
        self, tokens: Tensor, labels: Tensor, *, positions: Tensor | None = None, mask: Mask | None = None
    ) -> Tensor:
        """As Trainable.loss, and transformers' own of shifted labels. mask: that of the documents that the positions
        tell of, which transformers finds in them. UserError: any other."""
        if mask is not None:
            _check_mask(mask, positions)
        if self.head is None:  # not known: whole logits, by the model's own head
            if positions is None:
                positions = next_positions(tokens.shape[1], None, tokens.device).expand(tokens.shape[0], -1)
            logits = self.module(input_ids=tokens, position_ids=positions, use_cache=False).logits
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            return total / (labels != IGNORED).sum().clamp(min=1)
        hidden = self.hidden(tokens, positions=positions)
        return linear_cross_entropy(
            hidden if self.head.scale == 1 else hidden * self.head.scale,
            self.module.get_output_embeddings().weight,
            labels,
            ignore_index=IGNORED,
            chunk=self.savings.loss_chunk,
            softcap=self.head.softcap,
        )

    def new_cache(self, tokens: int | None = None) -> Cache:
        return Cache(self.module.config)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int | None = None) -> float:
        """As GPT2's, of the experts that a token is sent to and of the keys that each layer's window lets it see; a
        frozen matrix has no gradient of its own, so that it costs two thirds."""
        config = self.config
        length = self.shape.context if context is None else context
        looked_up = {id(self.module.get_input_embeddings().weight), id(_learned(self.module))}
        looked_up -= {id(self.module.get_output_embeddings().weight)}
        of_experts = [getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
        experts = next((one for one in of_experts if one), 1)
        share = (getattr(config, "num_experts_per_tok", None) or experts) / experts
        flops = 0.0
        for name, parameter in self.named_parameters():
            if id(parameter) not in looked_up and parameter.dim() >= 2:
                each = 6.0 if parameter.requires_grad else 4.0
                flops += each * parameter.numel() * (share if ".experts." in name else 1.0)
        shape = self.shape
        return flops + 12.0 * shape.heads * shape.head_dim * sum(_seen(config, length))

    def save(self, folder: Path) -> str:
        """Write the model as from_pretrained reads it, adapters added into the weights; returns how, in words."""
        adapted = self.adapters
        for _, layer in adapted:
            layer.merge()
        origin = None if self.origin is None else folders.folder_of(self.origin)
        with self._without_adapters():
            self.module._hf_peft_config_loaded = False
            folders.save_folder(self.module, folder, origin)
        for _, layer in adapted:
            layer.unmerge()
        read = "transformers.AutoModelForCausalLM.from_pretrained reads it"
        if not adapted:
            return read
        self.save_adapters(folder / "adapter")
        return f"adapters merged: {read}; adapter/: the adapters alone, peft.PeftModel.from_pretrained reads them"

    def save_adapters(self, folder: Path) -> None:
        """Write the adapters alone, as peft reads them: PeftModel.from_pretrained(model, folder)."""
        self.module._hf_peft_config_loaded = True
        self.module.save_pretrained(folder)

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, as a checkpoint has them, on the CPU; what it leaves out is read from the origin."""
        cpu = torch.device("cpu")
        if self.keeps_part:
            self.materialise(cpu)
            missing = {name for name, one in self.named_parameters() if one.requires_grad} - weights.keys()
            found = self.load_state_dict(weights, strict=False)
            if missing or found.unexpected_keys:
                odd = sorted([*missing, *found.unexpected_keys])[0]
                raise UserError(f"the checkpoint's adapters are of another form than these: '{odd}' differs.")
            return
        self.load_state_dict(weights, assign=True)
        self.module.tie_weights(recompute_mapping=False)
        folders.fill_buffers(self.module, cpu)


class Cache:
    """transformers' cache of keys and values, as our generate asks for it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.clear()

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.held.get_seq_length()

    def clear(self) -> None:
        """Forgets every token."""
        from transformers import DynamicCache

        self.held = DynamicCache(config=self.config)


def _trained_alone(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave out of a state what an adapter leaves as it is."""
    if isinstance(module, HuggingFaceDecoder) and module.keeps_part:
        trained = {prefix + name for name, one in module.named_parameters() if one.requires_grad}
        for name in [name for name in state if name.startswith(prefix) and name not in trained]:
            del state[name]


def _in_compute_type(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
    device = embedded.device.type
    return embedded.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else embedded


def _learned(module: Any) -> Tensor | None:
    """The table of a model's learned positions."""
    tables = [one.weight for one in module.base_model.children() if isinstance(one, nn.Embedding)]
    return next((one for one in tables if one is not module.get_input_embeddings().weight), None)


def _seen(config: Any, length: int) -> Iterator[float]:
    """For each layer the keys that a token sees on average in a sequence of `length` tokens."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    for kind in kinds:
        bound = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else window
        if kind == "full_attention" or bound is None or bound >= length:
            yield length / 2
        else:
            yield bound / 2 if kind == "chunked_attention" else bound * (1 - bound / (2 * length))


def _check_mask(mask: Mask, positions: Tensor | None) -> None:
    """UserError unless the mask is the causal one of the documents in which these positions begin anew."""
    if spread_sequence() is not None and positions is not None:
        return  # the mask is of all tokens, and the positions are those of this device's
    fits = positions is not None and mask.keys is None and mask.queries.shape[-2:] == positions.shape
    if fits and positions is not None:
        index = torch.arange(positions.shape[1], device=positions.device)
        low, high = mask.queries[LOW], mask.queries[HIGH]
        fits = bool(((low == index - positions) & (high == index + 1)).all())
    if not fits:
        raise UserError(
            "a transformers model takes the mask of packed documents, as their positions tell of them, and no other: "
            "give positions that begin anew at each document, and masks.document(..., causal=True) or no mask."
        )


@torch.no_grad()
def _head_of(module: Any) -> Head | None:
    """What a model does with lm_head's logits, found by asking it about a few numbers; None where it is something else.

    The model's own forward runs, with its body replaced by given states and its lm_head by nothing.
    """
    head, config = module.get_output_embeddings(), module.config.get_text_config()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return None
    probe = torch.linspace(-60, 60, 25, dtype=torch.float64, device="cpu")[None, None]
    body_name = module.base_model_prefix
    head_name = next(name for name, one in module.named_modules() if one is head)
    body = module._modules[body_name]
    try:
        module._modules[body_name] = _Says(_states(probe), body)
        module.set_submodule(head_name, nn.Identity())
        with torch.device("cpu"):  # whatever the model is built on
            logits = module(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    except Exception:  # noqa: BLE001 - whatever it is, the whole model will compute its logits by itself
        return None
    finally:
        module._modules[body_name] = body
        module.set_submodule(head_name, head)
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    slope = float((torch.atanh(logits[0, 0, 13] / softcap) * softcap if softcap else logits[0, 0, 13]) / probe[0, 0, 13])
    expected = softcap * torch.tanh(slope * probe / softcap) if softcap else slope * probe
    known = math.isfinite(slope) and torch.allclose(logits.double(), expected, rtol=1e-6, atol=1e-6)
    return Head(slope if abs(slope - 1) > 1e-6 else 1.0, softcap) if known else None


def _states(hidden: Tensor) -> Any:
    """A body's output with these states, and None for whatever else a head may look for in it."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class States(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            return None

    return States(last_hidden_state=hidden)


class _Says(nn.Module):
    """In the place of a model's body: says what it was given."""

    def __init__(self, states: Any, body: nn.Module) -> None:
        super().__init__()
        self.states, self.__dict__["body"] = states, body

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.states


def huggingface_decoder(
    path: str | None = None,
    *,
    config: str | None = None,
    changes: Mapping[str, Any] | None = None,
    attention: str = "flash",
    context: int | None = None,
    residual: str = "weights",
    rope_base: float | None = None,
    rope_factor: float | None = None,
    lora: Mapping[str, Any] | None = None,
) -> HuggingFaceDecoder:
    """The model in a folder or of the hub, or one of a configuration with weights yet to be drawn; no weights are read.

    path: a folder, or a hub's name. config: in its place, a config.json, its folder, or a model type ("llama").
    changes: entries of the configuration, or experts_implementation. context: tokens of a sequence (None: any). rope_base, rope_factor: of rotary
    positions, as in GPT2Config. lora: peft's LoraConfig, to train adapters alone.
    UserError: no such model, or one that cannot be trained so.
    """
    import transformers

    if attention not in ATTENTIONS:
        raise unknown("attention", attention, ATTENTIONS)
    folder = None if path is None else folders.folder_of(path)
    given, setting = (str(folder), "model.path") if folder is not None else (str(config), "model.config")
    changes = dict(changes or {})
    own = {name: changes.pop(name) for name in ("experts_implementation",) if name in changes}
    described = folders.read_config(given, changes, setting)
    if folder is not None and Path(str(path)).expanduser().is_dir():
        folders.check_weights(folder)
    if described.get_text_config() is not described:
        raise UserError(
            f"{given} is a {described.model_type}, of more than text. Possible: its text model by itself, with a "
            f"{CONFIG} of model_type {described.get_text_config().model_type}."
        )
    _stretch(described.get_text_config(), context, rope_base, rope_factor, given)
    name = register_with_transformers()
    if ATTENTIONS[attention] and (attention != "sdpa" or torch.cuda.is_available()):  # on a CPU ours computes by SDPA
        name = str(ATTENTIONS[attention])
    try:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(
                described, attn_implementation=name, dtype=torch.float32, **own
            )
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{given}: transformers cannot build its model ({reason}).") from error
    folders.check_architecture(module, decoder_layers(module), given)
    if lora is not None:
        _add_adapters(module, lora, str(path or config))
    return HuggingFaceDecoder(module, origin=path, residual=residual)


def _add_adapters(module: Any, lora: Mapping[str, Any], name: str) -> None:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("model.adapter=lora needs the package peft: pip install 'flashtrain[hub]'.") from error
    module.name_or_path = name  # what the adapters say that they are for
    try:
        module.add_adapter(LoraConfig(task_type="CAUSAL_LM", **lora))
    except ValueError as error:
        raise UserError(f"model.adapter_targets: {' '.join(str(error).split())[:200]}") from error


def _stretch(config: Any, context: int | None, base: float | None, factor: float | None, where: str) -> None:
    """Make the configuration's positions serve `context` tokens. UserError: learned ones are too few."""
    trained = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None)
    if rotary is None:
        for name, value in (("rope_base", base), ("rope_factor", factor)):
            if value is not None:
                raise UserError(f"model.{name}={value:g} is for rotary positions, and {where} has none.")
        if context is not None and trained is not None and context > trained:
            raise UserError(f"context={context} is longer than the {trained} learned positions of {where}.")
        return
    if base is not None or factor is not None:
        each = list(rotary.values()) if all(isinstance(one, dict) for one in rotary.values()) else [rotary]
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for one in each:
            one["rope_theta"] = rotary_base_for(base or one["rope_theta"], factor or 1.0, head)
    if context is None or trained is None or context <= trained:
        return
    if base is None and factor is None and rotary.get("rope_type", "default") == "default":
        say(
            f"context={context} is {context / trained:g} times the {trained} that {where} was trained with; "
            f"model.rope_factor={context / trained:g} would slow its rotary angles for it."
        )
    config.max_position_embeddings = context


def build(settings: Any, *, vocab_size: int, context: int, attention: str) -> HuggingFaceDecoder:
    """model=huggingface. vocab_size: of the text's tokenizer, which may make no more tokens than the model knows."""
    if settings.path is None and settings.config is None:
        raise UserError("model=huggingface needs model.path=..., a transformers folder or a name of the hub.")
    lora = None
    if settings.adapter is not None:
        if settings.adapter not in ADAPTERS:
            raise unknown("adapter", settings.adapter, ADAPTERS)
        targets = settings.adapter_targets.split(",")
        lora = {
            "r": settings.adapter_rank,
            "lora_alpha": settings.adapter_alpha or 2 * settings.adapter_rank,
            "lora_dropout": settings.adapter_dropout,
            "target_modules": targets[0] if targets == ["all-linear"] else targets,
        }
    model = huggingface_decoder(
        settings.path,
        config=settings.config,
        changes=settings.options,
        attention=attention,
        context=context,
        residual=settings.residual,
        rope_base=settings.rope_base,
        rope_factor=settings.rope_factor,
        lora=lora,
    )
    known = model.shape.vocab_rows
    if vocab_size > known:
        raise UserError(
            f"the tokenizer makes {vocab_size:,} tokens, and {settings.path or settings.config} knows {known:,}: "
            "choose the tokenizer that it was trained with (data.tokenizer=huggingface, where that is beside it)."
        )
    return model


def check(settings: Any, *, vocab_size: int, context: int) -> None:
    """Raise what build would, before any text is read."""
    build(settings, vocab_size=vocab_size, context=context, attention="flash")


build.check = check  # type: ignore[attr-defined]
