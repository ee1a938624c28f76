"""The Triton kernels around the Hopper backward in Triton's interpreter: all gradients computed again, as after a NaN,
against the float64 reference. test_portable.py runs this file in a process of its own.
"""

import pytest
import torch

from flashtrain_kernels import reference
from flashtrain_kernels.backends import Call, Gradients
from flashtrain_kernels.backends.hopper.backward import backward_launches
from flashtrain_kernels.options import Options


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "options"),
    [
        (64, 2, {"right": 0}),
        (64, 1, {"right": 0, "softcap": 1.5}),
        (72, 1, {"right": 0, "softcap": 1.5}),
        (136, 2, {"left": -20, "right": 3}),
    ],
    ids=str,
)
def test_what_is_computed_again_has_the_softcap_and_any_head_dimension(head_dim, kv_heads, options):
    torch.manual_seed(0)
    options, length = Options(4 * head_dim**-0.5, **options), 130
    q = torch.randn(1, length, 2, head_dim, dtype=torch.float16)
    k, v = (torch.randn(1, length, kv_heads, head_dim, dtype=torch.float16) for _ in range(2))
    dout, dlse = torch.randn_like(q), torch.randn(1, 2, length)
    out, lse = reference.forward_from(q.float(), k.float(), v.float(), options)
    exact = (dout.double(), dlse.double(), q.double(), k.double(), v.double(), out.double(), lse.double())
    wanted = reference.backward_from(*exact, options, False)
    gradients = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    given = Gradients(dout, dlse, out.half(), lse, *gradients, None)
    prepare, _, finish = backward_launches(Call(q, k, v, options), given)
    prepare.run()
    work, flags = finish.args[0], finish.args[2]
    work.fill_(torch.nan)
    flags.fill_(1)
    finish.run()
    for got, value in zip(gradients, wanted, strict=False):
        assert (got.double() - value).abs().max() < 1e-3 * value.abs().max()
