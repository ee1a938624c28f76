"""Optimisers: AdamW, Muon and LAMB, each also with float32 master copies of half-precision weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError

AT_ONCE = 2**26  # elements of the parameters that LAMB updates together, with two temporaries of this size
HALF = (torch.bfloat16, torch.float16)
COPIED_AT_ONCE = 2**28  # elements of the gradients that a step of MasterWeights holds in float32: 1 GiB


class Stepping(torch.optim.Optimizer):
    """An optimiser whose step is `_update`, after the optional closure of torch's interface."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, if any, then update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError


class SharedState(Stepping):
    """Several optimisers as one, with all their parameter groups and one state; each steps its own groups.

    Schedules and checkpoints see a single optimiser.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make every optimiser use this one's groups and state."""
        at = 0
        for one in self.optimizers:
            count = len(one.param_groups)
            one.param_groups = self.param_groups[at : at + count]
            one.state = self.state
            at += count
            if isinstance(one, SharedState):
                one._share()

    def _update(self) -> None:
        for one in self.optimizers:
            one.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state into all optimisers."""
        super().load_state_dict(state_dict)
        self._share()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups of the model's trainable parameters: those with weight decay, and those without.

    The rule is GPT-2's, as in nanoGPT and llm.c: parameters with two or more dimensions (linear weights and both
    embedding tables) decay; biases and norm weights do not. A tied parameter counts once.
    An empty group is left out.

    Raises:
        UserError: no parameter has requires_grad.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(f"{type(model).__name__} has no trainable parameter: requires_grad is False everywhere")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module,
    lr: float = 6e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over `parameter_groups(model, weight_decay)`.

    It is torch's fused implementation. Clip gradients with `flashtrain.training.steps.clip_gradients`: Lightning's own
    clipping rejects a fused optimiser under mixed precision.
    """
    return torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)


def adamw_8bit(model: nn.Module, *, weight_decay: float, **options: Any) -> torch.optim.Optimizer:
    """torchao's AdamW with both moments in 8 bits, one scale per 256 numbers (Dettmers et al. 2021, arXiv 2110.02861).

    Args:
        options: lr, betas and eps, as in `adamw`.

    Raises:
        UserError: torchao is not installed, or devices cannot share a weight's rows evenly.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            "optimizer.states=8bit needs the package torchao. Install it: pip install 'flashtrain[low-bit]'."
        ) from error
    for name, one in model.named_parameters():
        if one.requires_grad:
            _check_even(name, one)
    from torch.distributed.tensor import DTensor

    def local(x: torch.Tensor) -> torch.Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    class Resumable(AdamW8bit):
        """Also loads unquantised states, which checkpoints of sharded runs hold (distributed/sharded_strategy.py)."""

        @torch.no_grad()
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for one, state in self.state.items():
                for name, signed in (("exp_avg", True), ("exp_avg_sq", False)) if state else ():
                    new = self._new_buffer(one, signed)
                    if type(local(new)) is not type(local(state[name])):
                        local(new).copy_(local(state[name]))
                        state[name] = new

    return Resumable(parameter_groups(model, weight_decay), **options)


def _check_even(name: str, parameter: torch.Tensor) -> None:
    """Raise UserError if the devices cannot share the parameter's rows evenly."""
    # torchao 0.18 decides by each rank's own number of rows whether a state is stored in 8 bits, and a checkpoint
    # cannot gather states of two kinds.
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor):
        return
    for at, place in enumerate(parameter.placements):
        devices = parameter.device_mesh.size(at)
        if isinstance(place, Shard) and parameter.shape[place.dim] % devices:
            raise UserError(
                f"optimizer.states=8bit needs weights whose rows the {devices} devices share evenly, and {name} has "
                f"{parameter.shape[place.dim]}. Use optimizer.states=full or trainer.strategy=ddp."
            )


def inner_matrices(model: nn.Module) -> list[torch.Tensor]:
    """The trainable weights of linear layers, except the output head and weights tied to embeddings."""
    head = getattr(model, "output_weight", None)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return [w for w in weights if w.requires_grad and id(w) not in embeddings and w is not head]


def muon(
    model: nn.Module,
    lr: float = 6e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
) -> SharedState:
    """Muon (Jordan et al. 2024, torch.optim.Muon) for the matrices inside the model, AdamW for all else.

    Args:
        lr: of both: Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982).
        momentum: Muon's. The other arguments are as in `adamw`.

    Raises:
        UserError: the model has no such matrices.
    """
    matrices = inner_matrices(model)
    if not matrices:
        raise UserError(f"{type(model).__name__} has no linear layers inside for muon to train. Use optimizer=adamw.")
    rest = adamw(model, lr, betas, eps, weight_decay)
    chosen = {id(matrix) for matrix in matrices}
    for group in rest.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    rest.param_groups = [group for group in rest.param_groups if group["params"]]
    first = torch.optim.Muon(
        matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )
    return SharedState([first, rest])


class Lamb(Stepping):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", arXiv 1904.00962), for very large batches.

    Algorithm 2 of the paper with Adam's bias correction: with Adam's corrected moments m' and v',
    u = m' / (sqrt(v') + eps) + weight_decay * w and w -= lr * |w| / |u| * u, per parameter tensor. The ratio is 1 if
    either norm is 0, and in groups with adapt=False. A step updates many tensors per launch and never waits for the
    device.

    Args:
        params: as torch's optimisers take them; a group may set its own lr, betas, eps, weight_decay and adapt.

    Raises:
        UserError: in a step, for sharded parameters (FSDP2), whose norms would be those of one shard.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, defaults)

    def _update(self) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for some in _bundles(parameters, AT_ONCE):
                self._update_alike(some, group)

    def _update_alike(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of parameters with the same device, dtype and step count."""
        states = [self._state_of(parameter) for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        means, squares = ([state[name] for state in states] for name in ("mean", "square"))
        for state in states:
            state["step"] += 1
        first, second = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        step = states[0]["step"]
        scale = torch._foreach_sqrt(squares)
        torch._foreach_div_(scale, math.sqrt(1 - second**step))
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_mul_(scale, 1 - first**step)
        updates = torch._foreach_div(means, scale)
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["adapt"]:
            torch._foreach_mul_(updates, _ratios(parameters, updates))
        torch._foreach_add_(parameters, updates, alpha=-float(group["lr"]))

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            if hasattr(parameter, "full_tensor"):
                raise UserError("lamb cannot train sharded weights. Use trainer.strategy=ddp or optimizer=adamw.")
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["square"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def lamb(
    model: nn.Module,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Lamb:
    """LAMB over the model's parameters; biases and norm weights have neither weight decay nor adaptation.

    Defaults are those of the MLPerf BERT reference in FlagPerf's configurations (betas 0.9 and 0.999, weight decay
    0.01) and of You et al. 2020 (eps 1e-6). The learning rate depends on the batch size. Clip the gradients' global
    norm at 1 before each step, as the reference does.
    """
    groups = parameter_groups(model, weight_decay)
    for group in groups:
        group["adapt"] = all(parameter.dim() >= 2 for parameter in group["params"])
    return Lamb(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _ratios(parameters: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
    """|w| / |u| of each pair, 1 if either is 0, as scalars on the device."""
    weight, update = (torch.stack(torch._foreach_norm(list(tensors))) for tensors in (parameters, updates))
    return list(torch.where((weight > 0) & (update > 0), weight / update, 1.0).unbind())


def _bundles(parameters: Sequence[Tensor], at_once: int) -> Iterator[list[Tensor]]:
    """Groups of parameters of one device and dtype: at most `at_once` elements, or a single larger parameter."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for alike in by_kind.values():
        bundle: list[Tensor] = []
        size = 0
        for parameter in alike:
            if bundle and size + parameter.numel() > at_once:
                yield bundle
                bundle, size = [], 0
            bundle.append(parameter)
            size += parameter.numel()
        yield bundle


class MasterWeights(SharedState):
    """An optimiser that updates float32 master copies of half-precision parameters, then rounds them.

    Updates too small for bfloat16's 8 bits thus add up (Micikevicius et al. 2018, "Mixed Precision Training", section
    3.1). The saved state is the inner optimiser's, with the copies under "masters".

    Args:
        inner: an optimiser that has not stepped yet; its parameters are replaced by the copies.
        host: the copies of all parameters, and so the states, lie in host memory, where the step is computed (Ren et
            al. 2021, "ZeRO-Offload"). Each step moves two copies of the parameters over the bus.
    """

    def __init__(self, inner: torch.optim.Optimizer, host: bool = False) -> None:
        self.host = host
        self._saved: dict[str, Any] | None = None  # a state to load before the next step
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for group in inner.param_groups:
            group["params"] = [self._master_of(parameter) for parameter in group["params"]]
        super().__init__([inner])

    def _master_of(self, parameter: Tensor) -> Tensor:
        if parameter.dtype not in HALF and not self.host:
            return parameter
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        master = parameter.detach().to("cpu" if self.host else parameter.device, dtype, copy=True).requires_grad_()
        self.pairs.append((parameter, master))
        return master

    def _update(self) -> None:
        """Step the copies. Parameters without a gradient do not change."""
        self._load_saved()
        # Parameters without a copy have their gradient here: the first of the steps below trains them.
        others = [(one, one.grad) for group in self.param_groups for one in group["params"] if one.grad is not None]
        copies = {id(parameter): master for parameter, master in self.pairs}
        moved = [parameter for parameter, _ in self.pairs if parameter.grad is not None]
        # One bundle at a time, so that not all gradients exist in float32 at once. A step skips what has no gradient.
        for parameters in list(_bundles(moved, COPIED_AT_ONCE)) or [[]]:
            masters = [copies[id(parameter)] for parameter in parameters]
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = parameter.grad.to(master)  # type: ignore[union-attr]
            super()._update()
            if parameters:
                torch._foreach_copy_(parameters, masters)
            for one in [*masters, *(one for one, _ in others)]:
                one.grad = None
        for one, gradient in others:
            one.grad = gradient

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients; the copies have gradients only within a step."""
        super().zero_grad(set_to_none)
        for parameter, _ in self.pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's state, and the copies under "masters"."""
        self._load_saved()
        return {**super().state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state; without copies in it, the copies become the current weights."""
        masters = state_dict.get("masters", [parameter for parameter, _ in self.pairs])
        self._saved = {name: value for name, value in state_dict.items() if name != "masters"}
        if not self.host:  # a loaded state would be moved to the parameters' device by Lightning
            self._load_saved()
        with torch.no_grad():
            for (parameter, master), saved in zip(self.pairs, masters, strict=True):
                master.copy_(saved)
                parameter.copy_(master)

    def _load_saved(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            super().load_state_dict(saved)
