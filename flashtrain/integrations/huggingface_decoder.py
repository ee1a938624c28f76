"""Training of Hugging Face decoders, with our attention, chunked loss and activation checkpointing.

    # A folder, or a name on the hub; no weights are read yet.
    model = transformers_decoder("Qwen3-0.6B")
    # Reads them; if sharded before, each rank reads its shard.
    model.materialise(torch.device("cuda"))
    loss = model.loss(tokens, labels, positions=positions)

Shapes: B batch, S sequence, E embedding width, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.integrations import huggingface_folder as folders
from flashtrain.integrations.huggingface_adapter import check_adapter
from flashtrain.integrations.huggingface_attention import NAME, SEEN
from flashtrain.integrations.huggingface_context import scales_with_length, whole_of
from flashtrain.integrations.huggingface_document_search import counted
from flashtrain.integrations.huggingface_layers import (
    Layer,
    body_of,
    decoder_layers,
    first_position,
)
from flashtrain.integrations.huggingface_loss import balance_of, head_of
from flashtrain.integrations.huggingface_mixers import serve_mixers, served, using
from flashtrain.integrations.huggingface_specs import (
    HuggingFaceShape,
    flops_per_token,
    layers_of,
    shape_of,
)
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.key_value_cache import cache_bytes
from flashtrain.models.mixer import DECAYS
from flashtrain.models.sharded_sequence import next_positions, sharded_sequence
from flashtrain.models.trainable import Trainable
from flashtrain_kernels import Mask, linear_cross_entropy
from flashtrain_kernels.environment import autocast_dtype
from flashtrain_kernels.loss_head import IGNORED
from flashtrain_kernels.masks import HIGH, LOW
from flashtrain_kernels.recurrences import Rows

# torchao quantizes blocks of 64 numbers, and their scales in blocks of 256.
BLOCKS_OF_4_BITS = 64 * 256


class HuggingFaceDecoder(Trainable):
    """A transformers model for causal language modelling as a Trainable; its weights have
    transformers' own names.

    Args:
        module: The model, on the meta device where its weights are not yet read.
        origin: Folder or hub name of the weights (None: they are in the module, or
            initialized at random).
        residual: "weights", or "compute": the embeddings, and so the residual stream,
            have autocast's dtype.
        quantize: "nf4" stores the base matrices of adapters in 4 bits (Dettmers et al.
            2023, "QLoRA"), by torchao.
        context: The longest sequence in tokens (None: as the module's configuration says).
    """

    module: Any
    generates = True
    # Layers are compiled one by one, since the code between them is transformers' own.
    recomputes_blocks = True
    # huggingface_context.py refuses those of a known name, the first step the others.
    shares_sequences = None

    def __init__(
        self,
        module: Any,
        *,
        origin: str | None = None,
        residual: str = "weights",
        quantize: str | None = None,
        context: int | None = None,
    ) -> None:
        super().__init__()
        # Both modules have the same submodules, so that state dicts have transformers'
        # names, also for FSDP2.
        self.__dict__["_modules"], self.__dict__["module"] = module._modules, module
        self.origin = origin
        self.residual = residual
        self.quantize = quantize
        self.context = context
        self.blocks = decoder_layers(module)
        self.layers = [Layer(block) for block in self.blocks]
        self.head = head_of(module)
        self.start: dict[str, Tensor] = {}  # weights of the adapters or, without, of all
        self.mixes = served(type(module))
        self.tunable = self.mixes and serve_mixers(type(module))
        self.balance, self.first = balance_of(module), first_position(module)
        for layer in self.layers if self.balance is not None else []:
            if layer.feed_forward is not None:
                layer.feed_forward.routes = True
        if residual == "compute":
            module.get_input_embeddings().register_forward_hook(_in_compute_type)
        self.register_state_dict_post_hook(_trained_alone)

    @property
    def config(self) -> Any:
        """transformers' configuration; of a model that also reads images or
        sound, the text model's."""
        return self.module.config.get_text_config()

    @property
    def adapters(self) -> list[tuple[str, Any]]:
        """peft's adapter layers as (name, layer); empty where the model has no adapters."""
        return [(name, one) for name, one in self.module.named_modules() if hasattr(one, "lora_A")]

    @property
    def keeps_part(self) -> bool:
        return bool(self.adapters)

    @property
    def shape(self) -> HuggingFaceShape:
        shape = shape_of(self.module)
        quantized = 0 if self.quantize is None else sum(map(_size_in_4_bits, self.adapters))
        return replace(
            shape, context=self.context or shape.context - self.first, quantized=quantized
        )

    @cached_property
    def unshared(self) -> str | None:
        """The kind of layers whose sequences devices cannot share; None: all can."""
        kinds = (one.mixer for one in layers_of(self.module))
        return next((one.kind for one in kinds if one.crosses_devices is None), None)

    @cached_property
    def _names(self) -> tuple[str, bool]:
        """The name of the cache among the model's arguments, and whether it takes positions."""
        known = inspect.signature(self.module.forward).parameters
        # **kwargs' too; Mamba's; transformers 5.24's.
        names = ("past_key_values", "cache_params", "cache")
        inside = inspect.signature(body_of(self.module)[1].forward).parameters
        return next((name for name in names if name in known), names[0]), "position_ids" in inside

    @property
    def output_weight(self) -> Tensor:
        """The output head's matrix (V, E)."""
        return self.module.get_output_embeddings().weight

    @property
    def end_ids(self) -> Sequence[int]:
        return () if self.origin is None else folders.end_ids(folders.folder_of(self.origin))

    def train(self, mode: bool = True) -> HuggingFaceDecoder:
        object.__setattr__(self.module, "training", mode)
        return super().train(mode)

    def save_memory(self, savings: MemorySavings) -> None:
        """Use these memory options from now on; UserError for ffn_chunk where a layer has
        no known feed-forward."""
        specs = self.shape.layers if savings.ffn_chunk is not None else ()
        if any(
            layer.feed_forward is None and spec.feed_forward.width
            for layer, spec in zip(self.layers, specs, strict=False)
        ):
            raise UserError(
                f"memory.ffn_chunk does not support {type(self.module).__name__}. Set it to null."
            )
        self.savings = savings
        for number, layer in enumerate(self.layers):
            layer.save_memory(savings.of_layer(number))

    def compile_blocks(self, **options: Any) -> bool:
        """Compile each layer by torch.compile with these options but
        fullgraph=False, and return True."""
        from flashtrain.integrations.huggingface_documents import settled

        # Without a mask a layer is causal only if its is_causal says so; other
        # models are not changed.
        causal = all(getattr(one, "is_causal", True) for one in self.module.modules())
        ours = self.config._attn_implementation == NAME
        for layer, spec in zip(self.layers, self.shape.layers, strict=True):
            head_dim = getattr(spec.mixer, "head_dim", None)
            settle = partial(settled, head_dim=head_dim) if causal and ours and head_dim else None
            layer.compile(settle, **{**options, "fullgraph": False})
        return True

    def tune_kernels(self, gpu: int, precision: str, *, shared: bool) -> None:
        """Tune a hybrid's kernels on this GPU (huggingface_tuning.tune), before it is sharded."""
        if self.tunable:
            from flashtrain.integrations.huggingface_tuning import tune

            with torch.cuda.device(gpu):
                tune(self.module, torch.device("cuda", gpu), precision, shared=shared)

    def keep_in(self, precision: str) -> None:
        # Frozen weights are never updated, so that bfloat16 suffices for them in mixed precision.
        trained = {
            "bf16-true": torch.bfloat16,
            "16-true": torch.float16,
            "64-true": torch.float64,
        }.get(precision)
        frozen = torch.bfloat16 if precision == "bf16-mixed" else trained
        for name, one in self.named_parameters():
            dtype = trained if one.requires_grad or name.rpartition(".")[2] in DECAYS else frozen
            if dtype is not None and one.is_floating_point():
                one.data = one.data.to(dtype)

    def materialise(self, device: torch.device) -> None:
        """Load the weights of a model on the meta device, or initialize them; UserError
        where they do not fit."""
        if not any(one.device.type == "meta" for one in self.parameters()):
            return
        # Earlier draws differ with the number of devices; here the weights
        # depend on the seed alone.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(torch.initial_seed() if self.seed is None else self.seed)
            self._materialise(device)

    def _materialise(self, device: torch.device) -> None:
        # The weights may not fit on the device before they are quantized.
        place = device if self.quantize is None else torch.device("cpu")
        if self.start and not self.adapters:
            self._assign(self.start, device)
            self.start = {}
            return
        with self._without_adapters():
            if self.origin is None:
                folders.random_weights(self.module, self.blocks, place)
            else:
                folders.read_weights(
                    self.module, folders.folder_of(self.origin, "model*.safetensors"), place
                )
        for adapted in self.adapters if self.quantize is not None else []:
            if _size_in_4_bits(adapted):
                from torchao.quantization import to_nf4

                base = adapted[1].get_base_layer()
                base.weight = nn.Parameter(
                    to_nf4(base.weight.detach().to(device)), requires_grad=False
                )
        if place != device:
            self.to(device)
        # Inner ones first.
        for name, layer in sorted(self.adapters, key=lambda one: -one[0].count(".base_layer")):
            with folders.allocated(layer, device):
                for one in layer.r:
                    layer.reset_lora_parameters(one, True)
                for one, parameter in layer.named_parameters(prefix=name):
                    if one in self.start:
                        parameter.data.copy_(self.start.pop(one))

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """Within this context, each adapted layer of the model is replaced by its base layer."""
        adapted = self.adapters
        # Inner ones first: experts have two around one module.
        for name, layer in reversed(adapted):
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
        """Return logits (B, S, V) for the token after each of tokens (B, S); other
        arguments: see Decoder.forward."""
        options: dict[str, Any] = {}
        if cache is not None:
            options[self._names[0]] = cache
            # Some classes would count from 0 in every call (Bamba).
            if positions is None and self._names[1]:
                read = cache.get_seq_length()
                positions = torch.arange(read, read + tokens.shape[1], device=tokens.device)
                positions = positions.expand(tokens.shape)
        if positions is not None or (self.mixes and sharded_sequence() is not None):
            options["position_ids"] = self._positions(tokens, positions)
        # Of a number Gemma 4 makes a slice of the masks.
        sliced = last_only and getattr(self.config, "num_kv_shared_layers", False)
        rows = self._rows(options.get("position_ids")) if cache is None else None
        with using(rows), using(getattr(cache, "seen", None), SEEN):
            return self.module(
                input_ids=tokens,
                use_cache=cache is not None,
                logits_to_keep=tokens.new_tensor([-1]) if sliced else int(last_only),
                **options,
            ).logits

    def _rows(self, positions: Tensor | None) -> Rows | None:
        """Return the documents within which a hybrid's recurrences and convolutions compute; None
        for a model without them, or without positions."""
        if not self.mixes or positions is None or positions.is_meta:
            return None
        sequence = sharded_sequence()
        if sequence is None:
            return Rows(positions)
        if self.unshared is not None:
            raise UserError(
                f"layers of {self.unshared} under context parallelism: devices cannot share "
                "their sequences. Use another strategy (fsdp, ddp)."
            )
        whole = whole_of(sequence, positions)
        assert whole is not None  # they are not yet known to be 0, 1, ...
        return sequence.rows(positions, whole)

    def _positions(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return positions (B, S) as the model numbers them, from self.first on (0 but in RoBERTa's
        family). positions: counted from 0; None: those of the tokens in their rows."""
        made = positions is None
        if positions is None:  # also in rows that are sharded over devices
            positions = next_positions(tokens.shape[1], None, tokens.device).expand(
                tokens.shape[0], -1
            )
        positions = positions + self.first if self.first else positions
        return counted(positions) if made and sharded_sequence() is None else positions

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Return the mean cross-entropy as in Trainable.loss, which equals transformers' own; with
        reduction="none" each token's, (B, S).

        In training the mean includes the routers' balancing loss where the configuration
        has output_router_logits. A mask must be the causal mask of the documents that
        positions mark, else UserError.
        """
        if mask is not None:
            _check_mask(mask, positions)
        # With an unknown head the model computes all logits itself.
        computing = self.module if self.head is None else body_of(self.module)[1]
        numbers = self._positions(tokens, positions)
        with using(self._rows(numbers)):
            found = computing(input_ids=tokens, position_ids=numbers, use_cache=False)
        if self.head is None:
            logits = found.logits.to(torch.promote_types(found.logits.dtype, torch.float32))
            how = "none" if reduction == "none" else "sum"
            total = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=how
            )
            if how == "none":
                return total.view(labels.shape)
            return self._balanced(total / (labels != IGNORED).sum().clamp(min=1), found, tokens)
        hidden = found.last_hidden_state
        loss = linear_cross_entropy(
            hidden if self.head.scale == 1 else hidden * self.head.scale,
            self.output_weight,
            labels,
            chunk=self.savings.loss_chunk,
            softcap=self.head.softcap,
            reduction=reduction,
        )
        return loss if reduction == "none" else self._balanced(loss, found, tokens)

    def _balanced(self, loss: Tensor, found: Any, tokens: Tensor) -> Tensor:
        """Return the loss, in training plus the routers' balancing loss times its coefficient;
        the balancing loss is also stored for logging."""
        if self.balance is None or not self.training:
            return loss
        balancing = self.balance.loss(found.router_logits, tokens.shape[0])
        self.balancing_loss = balancing.detach()
        return loss + self.balance.coefficient * balancing.to(loss.dtype)

    @property
    def decodes_rows(self) -> bool:  # type: ignore[override]
        ours = self.config._attn_implementation == NAME and bool(cache_bytes(self.shape.layers))
        # Llama 4's scales queries by the cache's length, which is the longest row's.
        by_length = getattr(self.config, "attn_temperature_tuning", False)
        return ours and not by_length and not any(map(scales_with_length, self.module.modules()))

    def new_cache(self, tokens: int | None = None) -> Any:
        if tokens is not None and self.decodes_rows:
            from flashtrain.integrations.huggingface_cache import HuggingFaceCache

            return HuggingFaceCache(self.shape.layers, tokens)
        from flashtrain.integrations.huggingface_cache import own_cache

        return own_cache(self.module)

    def flops_per_token(self, context: int | None = None) -> float:
        return flops_per_token(self.module, self.shape.context if context is None else context)

    def save(self, folder: Path) -> str:
        """Save the model for from_pretrained, with adapters merged; return in words
        how to load the folder."""
        # The model may train on, and peft's merge and unmerge do not undo each other.
        if self.adapters:
            whole = self._copy()
            whole.merge(folder)
            return whole.save(folder)
        folders.save_folder(
            self.module, folder, None if self.origin is None else folders.folder_of(self.origin)
        )
        read = "transformers.AutoModelForCausalLM.from_pretrained reads it"
        if not (folder / "adapter").exists():
            return read
        return (
            f"adapters merged: {read}; adapter/: "
            "the adapters alone, peft.PeftModel.from_pretrained reads them"
        )

    def _copy(self) -> HuggingFaceDecoder:
        """Return a copy of an adapted model in full precision on the CPU; frozen weights are read
        anew from `origin`, if there is one."""
        parameters, place = {}, "cpu" if self.origin is None else "meta"
        for one in self.parameters():
            value = one.detach().to(place, torch.promote_types(one.dtype, torch.float32)).clone()
            parameters[id(one)] = nn.Parameter(value, requires_grad=one.requires_grad)
        made = copy.deepcopy(self, parameters)
        made.fill({name: one.cpu() for name, one in self.state_dict().items()})
        return made

    def merge(self, folder: Path) -> None:
        """Save the adapters in folder/adapter and merge them into the weights; the
        model has none afterwards."""
        self.save_adapters(folder / "adapter")
        for name, layer in reversed(self.adapters):  # inner ones first
            base = layer.get_base_layer()
            # The quantized values used in training.
            if hasattr(getattr(base, "weight", None), "get_original_weight"):
                base.weight = nn.Parameter(
                    base.weight.detach().get_original_weight(), requires_grad=False
                )
            layer.merge()
            self.module.set_submodule(name, base)
        self.module._hf_peft_config_loaded = False

    def save_adapters(self, folder: Path) -> None:
        """Save the adapters alone, for PeftModel.from_pretrained(model, folder)."""
        self.module._hf_peft_config_loaded = True
        folders.save_folder(self.module, folder, None)

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        # Each rank reads its shards of the others, and quantizes them where the first stage does.
        if self.keeps_part:
            check_adapter(self, weights, "the checkpoint")
        self.start = dict(weights)

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Load a checkpoint's weights (CPU tensors); frozen weights that it lacks
        are read from `origin`."""
        cpu = torch.device("cpu")
        if self.keeps_part:
            check_adapter(self, weights, "the checkpoint")
            self.materialise(cpu)
            self.load_state_dict(weights, strict=False)
            return
        self._assign(weights, cpu)

    def _assign(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.load_state_dict(folders.shards_of(self.module, weights, device), assign=True)
        # But for two that differ, of older runs.
        self.module.tie_weights(missing_keys=set(), recompute_mapping=False)
        folders.fill_buffers(self.module, device)


def _size_in_4_bits(adapted: tuple[str, Any]) -> int:
    """Return how many parameters of an adapted layer, given as (name, layer), are stored in 4
    bits; 0 if it is not an nn.Linear that torchao's blocks divide."""
    base = adapted[1].get_base_layer()
    if isinstance(base, nn.Linear) and base.weight.numel() % BLOCKS_OF_4_BITS == 0:
        return base.weight.numel()
    return 0


def _trained_alone(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Drop frozen weights from the state dict of an adapted model."""
    if isinstance(module, HuggingFaceDecoder) and module.keeps_part:
        trained = {prefix + name for name, one in module.named_parameters() if one.requires_grad}
        for name in [name for name in state if name.startswith(prefix) and name not in trained]:
            del state[name]


def _in_compute_type(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
    return embedded.to(autocast_dtype(embedded.device.type) or embedded.dtype)


def _check_mask(mask: Mask, positions: Tensor | None) -> None:
    """Raise UserError unless the mask is the causal one of the documents in these positions."""
    if sharded_sequence() is not None and positions is not None:
        return  # the mask is of all tokens, and the positions are of this device's alone
    fits = (
        positions is not None and mask.keys is None and mask.queries.shape[-2:] == positions.shape
    )
    if fits and positions is not None:
        index = torch.arange(positions.shape[1], device=positions.device)
        low, high = mask.queries[LOW], mask.queries[HIGH]
        fits = positions.is_meta or bool(((low == index - positions) & (high == index + 1)).all())
    if not fits:
        raise UserError(
            "a transformers model supports no mask but that of packed documents. Pass "
            "positions that restart at each document, with masks.document(..., "
            "causal=True) or without a mask."
        )
