"""Optimisers of a model: AdamW, Muon and LAMB, each also for half-precision weights with float32 copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError


class Stepping(torch.optim.Optimizer):
    """An optimiser whose step is `_update`, after the closure that torch's optimisers take."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run closure, if any, then update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError


class SharedState(Stepping):
    """The parameter groups of several optimisers, one after the other, with one state: what schedules a group, saves or
    loads it, sees one optimiser. Each steps its own groups."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let every optimiser work on this one's groups and state."""
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
        """Take up a saved state."""
        super().load_state_dict(state_dict)
        self._share()


# Devices whose AdamW has a fused implementation in every torch that flashtrain supports.
FUSED_DEVICES = ("cuda", "cpu")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimiser groups of the model's trainable parameters: matrices that decay, and the rest that does not.

    The rule is GPT-2's, as nanoGPT and llm.c apply it: a parameter with two or more dimensions (linear weights and
    both embedding tables) decays; biases and norm weights do not. A tied parameter counts once. An empty group is
    left out. Raises UserError for a model with nothing to train.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(f"{type(model).__name__} has no parameter that is trained (requires_grad is False everywhere)")
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
    fused: bool | str = "auto",
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over `parameter_groups(model, weight_decay)`.

    fused: "auto" takes the fused implementation where all parameters lie on a device that has it. Repeated runs are
    bitwise equal with either choice; fused and unfused differ from each other in the last bits. Clip gradients with
    `flashtrain.training.steps`: Lightning's own clipping refuses a fused optimiser under mixed precision.
    """
    groups = parameter_groups(model, weight_decay)
    if fused == "auto":
        fused = all(p.device.type in FUSED_DEVICES for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=bool(fused))


def adamw_8bit(model: nn.Module, *, weight_decay: float, **options: Any) -> torch.optim.Optimizer:
    """AdamW whose two moments are kept in 8 bits, 256 numbers to a scale (Dettmers et al. 2021, arXiv 2110.02861), by
    torchao. options: lr, betas and eps, as adamw's. UserError: no torchao, a tensor that devices share unevenly."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            "optimizer.states=8bit needs the package torchao: pip install 'flashtrain[low-bit]'."
        ) from error
    for name, one in model.named_parameters():
        if one.requires_grad:
            _check_even(name, one)
    from torch.distributed.tensor import DTensor

    def local(x: torch.Tensor) -> torch.Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    class Resumable(AdamW8bit):
        """Takes states as numbers too, as checkpoints of sharded ones hold them (distributed/sharded_strategy.py)."""

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
    """Each rank's own number of rows says whether torchao puts a tensor's states into 8 bits, and a checkpoint cannot
    gather states of two kinds (torchao 0.18)."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor):
        return
    for at, place in enumerate(parameter.placements):
        devices = parameter.device_mesh.size(at)
        if isinstance(place, Shard) and parameter.shape[place.dim] % devices:
            raise UserError(
                f"optimizer.states=8bit needs weights whose rows the {devices} devices share evenly, and {name} has "
                f"{parameter.shape[place.dim]}. Possible: optimizer.states=full, trainer.strategy=ddp."
            )


def inner_matrices(model: nn.Module) -> list[torch.Tensor]:
    """The weights of linear layers that are trained, without embeddings, tied to them or not, and the output head."""
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
    fused: bool | str = "auto",
) -> SharedState:
    """Muon (Jordan et al. 2024, torch.optim.Muon) for the matrices inside the model, AdamW for all else.

    lr serves both: Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982).
    momentum is Muon's; the other arguments are as in `adamw`. Raises UserError for a model without such matrices.
    """
    matrices = inner_matrices(model)
    if not matrices:
        raise UserError(f"{type(model).__name__} has no linear layers inside for muon to train; use adamw")
    rest = adamw(model, lr, betas, eps, weight_decay, fused)
    chosen = {id(matrix) for matrix in matrices}
    for group in rest.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    rest.param_groups = [group for group in rest.param_groups if group["params"]]
    first = torch.optim.Muon(
        matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )
    return SharedState([first, rest])


AT_ONCE = 2**26  # elements of the parameters updated together: what two temporaries of each are taken for


class Lamb(Stepping):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", arXiv 1904.00962): Adam's update, scaled for
    each parameter tensor to the size of its weights, so that batches of tens of thousands train. Its algorithm 2 with
    Adam's bias correction, many tensors a launch, waiting for nothing.

    m and v are Adam's moments; u = m' / (sqrt(v') + eps) + weight_decay * w, of the corrected ones; then
    w -= lr * |w| / |u| * u, where the ratio is 1 if either norm is 0, and in groups with adapt=False.

    params: as torch's optimisers take them; a group may have lr, betas, eps, weight_decay and adapt of its own.
    UserError: sharded parameters (FSDP2), whose norms would be those of one shard.
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
        """One step of parameters of one device and dtype, at one count of steps."""
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
                raise UserError("lamb cannot train sharded weights (strategy fsdp). Possible: ddp, or adamw.")
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
    """LAMB over the model's parameters, biases and norm weights without decay and without adaptation.

    The defaults are those of the MLPerf BERT reference, as FlagPerf's configurations of it give them (betas 0.9 and
    0.999, weight decay 0.01) and You et al. 2020 (eps 1e-6); its learning rate depends on the batch size. Clip the
    gradients' global norm at 1 before each step, as the reference does.
    """
    groups = parameter_groups(model, weight_decay)
    for group in groups:
        group["adapt"] = all(parameter.dim() >= 2 for parameter in group["params"])
    return Lamb(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _ratios(parameters: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
    """|w| / |u| of each pair, 1 where either is 0: scalars on the device."""
    weight, update = (torch.stack(torch._foreach_norm(list(tensors))) for tensors in (parameters, updates))
    return list(torch.where((weight > 0) & (update > 0), weight / update, 1.0).unbind())


def _bundles(parameters: Sequence[Tensor], at_once: int) -> Iterator[list[Tensor]]:
    """Parameters of one device and dtype together, so many elements at most, or one that is larger."""
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


HALF = (torch.bfloat16, torch.float16)
COPIED_AT_ONCE = 2**28  # elements of the gradients that a step of MasterWeights holds in float32: 1 GiB


class MasterWeights(SharedState):
    """An optimiser of half-precision parameters that keeps, and updates, a float32 copy of each: updates too small for
    bfloat16's 8 bits add up all the same (Micikevicius et al. 2018, "Mixed Precision Training", section 3.1).

    inner: any optimiser that has not stepped yet; it goes on with the copies in the parameters' places. After each step
    the parameters are the copies, rounded. What is saved is `inner`'s state, and the copies under "masters".
    host: of all parameters, the copies and so the states lie in host memory, where the step is computed (Ren et al.
    2021, "ZeRO-Offload"); two copies of the parameters go over the bus each step.
    """

    def __init__(self, inner: torch.optim.Optimizer, host: bool = False) -> None:
        self.host = host
        self._saved: dict[str, Any] | None = None  # a state that is taken up at the next step
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
        """A step of the copies. Parameters without a gradient stay as they are."""
        self._take_up()
        # The copies have no gradient: what has one is trained as it is, in the first of the steps below.
        others = [(one, one.grad) for group in self.param_groups for one in group["params"] if one.grad is not None]
        copies = {id(parameter): master for parameter, master in self.pairs}
        moved = [parameter for parameter, _ in self.pairs if parameter.grad is not None]
        # A part at a time, so that not all gradients are there in float32 at once. What has no gradient is passed over.
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
        """Of the parameters: the copies have a gradient only within a step."""
        super().zero_grad(set_to_none)
        for parameter, _ in self.pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's state and the copies."""
        self._take_up()
        return {**super().state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state; from one without copies the weights as they are."""
        masters = state_dict.get("masters", [parameter for parameter, _ in self.pairs])
        self._saved = {name: value for name, value in state_dict.items() if name != "masters"}
        if not self.host:  # else Lightning would move it to the parameters' device as soon as it is there
            self._take_up()
        with torch.no_grad():
            for (parameter, master), saved in zip(self.pairs, masters, strict=True):
                master.copy_(saved)
                parameter.copy_(master)

    def _take_up(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            super().load_state_dict(saved)
