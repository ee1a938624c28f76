"""Finding whether a model's tokens see each other, and by what.

The model runs twice, the second time with some tokens changed. If the state of an unchanged token
moves, something reached it: an attention, a recurrence, a convolution. Before sequences are shared
over devices, the attention that devices share is left out, so that what is found is something else;
flashtrain.checks asks the same of whole models and documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from flashtrain.models.sharded_sequence import use_sharded_sequence
from flashtrain_kernels.recurrences import Rows

# Of a tensor's largest number, some units of bfloat16: what mixes tokens moves
# its own output by more.
ROUNDING = 0.02
# Where the same numbers are computed twice, in a product of other rows they differ by float32's.
EXACT = 1e-5


@torch.no_grad()
def probe(
    run: Callable[[bool], Any], tokens: int, others: slice | Tensor, *, shared: bool = True
) -> tuple[int, str | None]:
    """Return how often `run` called shared attention, and what else mixes tokens.

    The latter is where a state of an unchanged token moves first, such as "convolution in
    Model.mixer"; None: nowhere.

    Args:
        run: Computes rows of tokens (B, S) without random numbers; run(True) with some of the
            tokens changed.
        tokens: S; choose a number that no other dimension of the model's tensors has.
        others: The tokens that run(True) does not change: a slice of one row's, or (B, S) booleans.
        shared: Whether each token sees only itself in the attention that devices share; False: it
            is computed as ever, and what it moves is found too, however little.
    """
    before: dict[Any, Tensor] = {}
    for again in (False, True):
        states, alone = _States(before, tokens, others, shared), _Alone(tokens)
        with (
            use_sharded_sequence(alone) if shared else nullcontext(),
            torch.compiler.set_stance("force_eager"),
            states.modules,
            states,
        ):
            run(again)
    return alone.calls, states.moved


class _Alone:
    """A sharded sequence (ShardedSequence) in which each token sees only itself."""

    def __init__(self, tokens: int) -> None:
        self.length = self.held = self.tokens = tokens
        self.calls = 0  # of shared attention
        self.whole: Any = lambda *_: None  # what a batch has is whole
        self.refuse_own_part: Any = self.whole
        self.label_count = torch.ones(())
        self.gathered = self.shard = self.summed = self.next_labels = self.weighted = lambda x: x
        self.batch_mean = self.weighted
        self.positions: Any = lambda tokens, device: torch.arange(tokens, device=device)[None]

    def rows(self, positions: Tensor, whole: Tensor) -> Rows:
        self.calls += 1
        return Rows(positions, torch.ones_like(positions, dtype=torch.bool))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        self.calls += 1
        return v.repeat_interleave(q.shape[2] // v.shape[2], 2).to(q.dtype)


class _Modules(ModuleTracker):
    """Names the modules that compute. Views of parameters (DBRX) take no hooks on gradients."""

    def _fw_pre_hook(self, mod: Any, input: Any) -> None:
        super()._fw_pre_hook(mod, ())

    def _fw_post_hook(self, mod: Any, input: Any, output: Any) -> None:
        super()._fw_post_hook(mod, (), ())


class _States(TorchDispatchMode):
    """Records every computed tensor that has a dimension of S tokens.

    The first run stores them in `before` under (operation and module, shape, how manyth
    such tensor). The second run compares with them, and `moved` names the first that
    differs for the other tokens.
    """

    supports_higher_order_operators = True

    def __init__(
        self, before: dict[Any, Tensor], tokens: int, others: slice | Tensor, shared: bool
    ) -> None:
        super().__init__()
        self.before, self.tokens, self.others, self.shared = before, tokens, others, shared
        self.rows = 1 if isinstance(others, slice) else len(others)
        self.modules, self.count = _Modules(), Counter[Any]()
        self.moved: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").partition(".")[0]
        module = max(self.modules.parents - {"Global"}, key=len, default="the step itself")
        # Of a pooling, whose query is no token, no state moves.
        attends = self.shared and name.startswith("_scaled_dot_product")
        if attends and args[1].shape[-2] == self.tokens:
            self.moved = self.moved or f"{name} in {module}"
        # What `empty` makes holds nothing yet, and neither does a view of it.
        if "empty" not in name and not getattr(func, "is_view", False):
            for x in tree_leaves(result):
                known = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2
                if known and x.shape[0] == self.rows:
                    self._look_at(f"{name} in {module}", x)
        return result

    def _look_at(self, where: str, x: Tensor) -> None:
        if list(x.shape).count(self.tokens) != 1:
            return
        self.count[where, x.shape] += 1
        key = where, x.shape, self.count[where, x.shape]
        x = x.movedim(x.shape.index(self.tokens), 1)
        x = x[0] if isinstance(self.others, slice) else x
        now = x[self.others].to("cpu", torch.float64, copy=True)
        before = self.before.setdefault(key, now)
        rounding = ROUNDING if self.shared else EXACT
        if now.numel() and (now - before).abs().max() > rounding * before.abs().max():
            self.moved = self.moved or where
