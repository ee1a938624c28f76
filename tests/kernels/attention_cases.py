"""What the kernel tests share: one attention call as a case, with random inputs, and its outputs
and gradients beside the float64 reference's."""

import itertools
import random
from typing import Any, NamedTuple

import torch

from flashtrain_kernels import block_sparse, documents_from_ids, flash_attn_func, masks, reference

BANDS = ("full", "causal", "window", "window causal")
MASKS = (
    "document",
    "causal document",
    "prefix",
    "shared question",
    "global window",
    "blockwise",
    "shuffled",
)
BLOCKS = ("blocks", "blocks causal")
BLOCK = 32


class Case(NamedTuple):
    """Shapes and options of one attention call. mask: of BANDS, MASKS (these need as many queries
    as keys) or BLOCKS, or "part" (two intervals) or "part document" (one).

    bias: its shape, 1 where it is broadcast and 0 for the whole size, as (0, 0, 0, 0).
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str = "full"
    softcap: float = 0.0
    alibi: str = ""
    bias: tuple[int, int, int, int] | None = None
    dropout: float = 0.0
    sinks: bool = False
    value_dim: int = 0  # 0: as head_dim

    def __str__(self) -> str:
        parts = [
            f"B{self.batch}-Sq{self.seqlen_q}-Sk{self.seqlen_k}-H{self.heads}/"
            f"{self.kv_heads}-D{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim else "")
        ]
        parts += (
            [self.mask.replace(" ", "_")]
            + ["softcap"] * bool(self.softcap)
            + [self.alibi] * bool(self.alibi)
        )
        bias = (
            ""
            if self.bias is None
            else "bias" + "".join("1" if size else "*" for size in self.bias)
        )
        return "-".join(
            [
                *parts,
                *[bias] * bool(bias),
                *["dropout"] * bool(self.dropout),
                *["sinks"] * self.sinks,
            ]
        )

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[torch.Tensor]:
        """q, k, v and, if there are any, the bias and the sinks: leaves that want gradients."""
        generator = torch.Generator().manual_seed(seed)
        whole = (self.batch, self.heads, self.seqlen_q, self.seqlen_k)
        shapes = [
            (self.batch, self.seqlen_q, self.heads, self.head_dim),
            (self.batch, self.seqlen_k, self.kv_heads, self.head_dim),
            (self.batch, self.seqlen_k, self.kv_heads, self.value_dim or self.head_dim),
        ]
        if self.bias is not None:
            shapes.append(tuple(size or full for size, full in zip(self.bias, whole, strict=True)))
        shapes += [(self.heads,)] * self.sinks
        made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [x.to(device=device, dtype=dtype).requires_grad_() for x in made]

    def options(self, device: str = "cpu") -> dict[str, Any]:
        """The keyword arguments, but for the bias and the sinks, which are inputs."""
        given: dict[str, Any] = self._mask(device)
        if self.softcap:
            given["softcap"] = self.softcap
        if self.alibi:
            slopes = torch.tensor(
                [[2.0 ** -(i + j + 1) for i in range(self.heads)] for j in range(self.batch)]
            )
            given["alibi_slopes"] = (slopes if self.alibi == "alibi_rows" else slopes[0]).to(device)
        if self.dropout:
            given["dropout_p"], given["dropout_seed"] = self.dropout, 1234567890123
        return given

    def _mask(self, device: str) -> dict[str, Any]:
        if self.mask in ("full", "causal"):
            return {"causal": self.mask == "causal"}
        if self.mask.startswith("window"):
            return {"window_size": (self.seqlen_k // 3, 2), "causal": self.mask == "window causal"}
        if self.mask in BLOCKS:
            counts = [-(-n // BLOCK) for n in (self.seqlen_q, self.seqlen_k)]
            chosen = (
                torch.rand(self.heads, *counts, generator=torch.Generator().manual_seed(5)) < 0.6
            )
            chosen |= torch.eye(*counts, dtype=torch.bool)
            made = block_sparse.block_mask(
                chosen.to(device), block_size=(BLOCK, BLOCK), seqlen_q=self.seqlen_q,
                seqlen_k=self.seqlen_k,
                causal=self.mask == "blocks causal",
            )  # fmt: skip
            return {"mask": made, "causal": self.mask == "blocks causal"}
        made = self._part if self.mask.startswith("part") else self._intervals
        return {"mask": made(device)}

    def _intervals(self, device: str) -> masks.Mask:
        """Documents of unequal lengths, other ones in each row, their halves as segments."""
        length = self.seqlen_q
        token = torch.arange(length)
        ids = torch.stack([(token + 7 * row) // (length // 3 + 2) for row in range(self.batch)]).to(
            device
        )
        documents = documents_from_ids(ids)
        segments = (ids * length + (token.to(device) - documents.start) // (length // 9 + 1)).int()
        if self.mask == "prefix":
            return masks.prefix_lm((documents.end - documents.start) // 2, documents=documents)
        if self.mask == "shared question":
            return masks.shared_question(segments, documents=documents)
        if self.mask == "global window":
            return masks.global_window(length, 5, (length // 4, 3), documents=documents)
        if self.mask == "blockwise":
            return masks.causal_blockwise(segments, documents=documents)
        whole = masks.document(documents, causal=self.mask != "document")
        if self.mask == "shuffled":
            order = torch.randperm(length, generator=torch.Generator().manual_seed(2)).to(device)
            return whole.select(order, order.flip(0))
        return whole

    def _part(self, device: str) -> masks.Mask:
        """Some queries and some keys of a sequence: of each row other keys, in one of
        them in any order. Of the first 192 queries every seventh sees nothing, and
        neither does one from the 64th on."""
        length = 2 * max(self.seqlen_q, self.seqlen_k)
        token = torch.arange(length)
        ids = torch.stack([(token + 7 * row) // (length // 3 + 2) for row in range(self.batch)])
        documents = documents_from_ids(ids)
        if self.mask == "part document":
            whole = masks.document(documents, causal=True)
        else:
            whole = masks.global_window(length, 5, (length // 4, 3), documents=documents)
        generator = torch.Generator().manual_seed(3)
        queries = torch.randperm(length, generator=generator)[: self.seqlen_q].sort().values
        keys = torch.stack(
            [
                torch.randperm(length, generator=generator)[: self.seqlen_k]
                for _ in range(self.batch)
            ]
        )
        keys[1:] = keys[1:].sort(-1).values
        rows = whole.queries[:, :, queries].clone()
        place = torch.arange(self.seqlen_q)
        blind = (place < 192) & ((place % 7 == 3) | (place >= 64))
        bounds = (masks.LOW, masks.HIGH, masks.LOW2, masks.HIGH2)
        for bound in bounds if len(rows) == 7 else bounds[:2]:
            rows[bound, :, blind] = 0
        return masks.Mask(rows.to(device), keys.int().to(device), self.seqlen_k)


def run(
    attention: Any, inputs: list[torch.Tensor], options: dict[str, Any], through_lse: bool = True
) -> dict:
    """out, lse and every gradient; the loss uses the log-sum-exp too, where it is finite."""
    q, k, v, *others = inputs
    others = {"learnable_sink" if x.dim() == 1 else "bias": x for x in others}
    out, lse = attention(q, k, v, **options, **others, return_lse=True)
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    dlse = torch.randn(lse.shape, generator=generator).to(lse.device, lse.dtype)
    loss = (out.to(lse.dtype) * dout.to(lse.dtype)).sum()
    if through_lse:
        loss = loss + torch.where(lse.isfinite(), lse * dlse, 0.0).sum()
    gradients = torch.autograd.grad(loss, inputs)
    names = ("dq", "dk", "dv", *(f"d{name}" for name in others))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=True))}


def expected(
    case: Case, inputs: list[torch.Tensor], through_lse: bool = True
) -> dict[str, torch.Tensor]:
    """The reference in float64, from the same (already rounded) inputs."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    return run(reference.attention, exact, case.options(inputs[0].device.type), through_lse)


def ours(
    case: Case, inputs: list[torch.Tensor], through_lse: bool = True
) -> dict[str, torch.Tensor]:
    return run(flash_attn_func, inputs, case.options(inputs[0].device.type), through_lse)


def assert_close(
    actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float
) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            actual[name].to(value.dtype),
            value,
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def pairwise(factors: dict[str, list]) -> list[dict[str, Any]]:
    """Few combinations in which every value of every factor meets every value of
    every other one (greedy)."""
    draw = random.Random(0)
    names = list(factors)
    missing = {
        ((a, x), (b, y)) for a,
        b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }  # fmt: skip

    def pairs(row: dict[str, Any]) -> set:
        return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}

    rows = []
    while missing:
        (a, x), (b, y) = min(missing, key=str)
        candidates = [
            {**{name: draw.choice(factors[name]) for name in names}, a: x, b: y} for _ in range(60)
        ]
        rows.append(max(candidates, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows


def case_of(
    factors: dict[str, Any], documents: int, *lengths: int, heads: tuple[int, int], head_dim: int
) -> Case:
    """A case of what pairwise chose. documents: the length where a mask needs
    as many queries as keys."""
    mask, alibi = factors.get("mask", "causal"), factors.get("alibi", "")
    if mask in MASKS and alibi == "alibi_rows":  # slopes of each sequence: of each document, there
        alibi = "alibi"
    seqlen_q, seqlen_k = (documents, documents) if mask in MASKS else lengths
    return Case(
        2, seqlen_q, seqlen_k, *factors.get("heads", heads), factors.get("head_dim", head_dim),
        mask,
        factors.get("softcap", 0.0), alibi, factors.get("bias"), factors.get("dropout", 0.0),
    )  # fmt: skip
