"""What the kernel tests share: random inputs, and the outputs and gradients of a call beside the float64
reference's."""

from typing import NamedTuple

import torch

from flashtrain_kernels import Documents, documents_from_ids, flash_attn_func, reference


class Case(NamedTuple):
    """Shapes and options of one attention call. document_lengths, if any, sum to seqlen_q."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    document_lengths: tuple[int, ...] | None = None

    def __str__(self) -> str:
        documents = "" if self.document_lengths is None else f"-documents{len(self.document_lengths)}"
        mask = "causal" if self.causal else "full"
        lengths = f"Sq{self.seqlen_q}-Sk{self.seqlen_k}"
        return f"B{self.batch}-{lengths}-H{self.heads}/{self.kv_heads}-D{self.head_dim}-{mask}{documents}"

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(self.batch, self.seqlen_q, self.heads, self.head_dim, generator=generator, dtype=torch.float64)
        k = torch.randn(
            self.batch, self.seqlen_k, self.kv_heads, self.head_dim, generator=generator, dtype=torch.float64
        )
        v = torch.randn(
            self.batch, self.seqlen_k, self.kv_heads, self.head_dim, generator=generator, dtype=torch.float64
        )
        return tuple(x.to(device=device, dtype=dtype).requires_grad_() for x in (q, k, v))

    def documents(self, device: str = "cpu") -> Documents | None:
        if self.document_lengths is None:
            return None
        rows = []
        for row in range(self.batch):  # each row of the batch has the same documents in another order
            lengths = self.document_lengths[row:] + self.document_lengths[:row]
            rows.append(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)))
        return documents_from_ids(torch.stack(rows).int().to(device))


def upstream(case: Case, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of out and of the log-sum-exp, the same for every implementation."""
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(case.batch, case.seqlen_q, case.heads, case.head_dim, generator=generator)
    dlse = torch.randn(case.batch, case.heads, case.seqlen_q, generator=generator)
    return dout.to(device=device, dtype=dtype), dlse.to(device)


def run(attention, case: Case, inputs: tuple[torch.Tensor, ...], through_lse: bool = True) -> dict[str, torch.Tensor]:
    """out, lse and the three gradients; the loss uses the log-sum-exp too, where it is finite."""
    device = inputs[0].device.type
    out, lse = attention(*inputs, causal=case.causal, documents=case.documents(device), return_lse=True)
    dout, dlse = upstream(case, device, inputs[0].dtype)
    loss = (out.to(lse.dtype) * dout.to(lse.dtype)).sum()
    if through_lse:
        loss = loss + torch.where(lse.isfinite(), lse * dlse.to(lse.dtype), 0.0).sum()
    dq, dk, dv = torch.autograd.grad(loss, inputs)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def expected(case: Case, inputs: tuple[torch.Tensor, ...], through_lse: bool = True) -> dict[str, torch.Tensor]:
    """The reference in float64, from the same (already rounded) inputs."""
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    return run(reference.attention, case, exact, through_lse)


def ours(case: Case, inputs: tuple[torch.Tensor, ...], through_lse: bool = True) -> dict[str, torch.Tensor]:
    return run(flash_attn_func, case, inputs, through_lse)


def assert_close(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            actual[name].to(value.dtype), value, atol=tolerance, rtol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
