"""The Triton kernels around the Hopper backward in Triton's interpreter: all gradients
computed again, as after a NaN, against the float64 reference. test_portable.py runs this file
in a process of its own.
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
    exact = (
        dout.double(),
        dlse.double(),
        q.double(),
        k.double(),
        v.double(),
        out.double(),
        lse.double(),
    )
    wanted = reference.backward_from(*exact, options, False)
    gradients = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    given = Gradients(dout, dlse, out.half(), lse, *gradients, None)
    prepare, *_, finish = backward_launches(Call(q, k, v, options), given)
    prepare.run()
    work, _, flags, parts = finish.args[:4]
    flags.fill_(1)
    work.fill_(torch.nan)
    parts.fill_(torch.nan)  # with one key/value head, each of its two query heads is a part
    finish.run()
    for got, value in zip(gradients, wanted, strict=False):
        assert (got.double() - value).abs().max() < 1e-3 * value.abs().max()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_parts_of_dk_and_dv_are_summed_up(head_dim):
    torch.manual_seed(0)
    heads, length = 4, 256  # one key/value head, whose query heads are a part each
    q, dout, out = (torch.randn(1, length, heads, head_dim, dtype=torch.float16) for _ in range(3))
    k, v = (torch.randn(1, length, 1, head_dim, dtype=torch.float16) for _ in range(2))
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    call = Call(q, k, v, Options(1.0))
    prepare, _, finish = backward_launches(
        call, Gradients(dout, None, out, torch.zeros(1, heads, length), *gradients, None)
    )
    prepare.run()
    true = torch.randn(heads, length // 64, 2, 64, head_dim)  # part, 64 keys, dK or dV
    # As the fused kernel's registers hold them: bits 5-4, 2-0 and 3 of a key among
    # bits of its dimensions.
    held = true.unflatten(4, (head_dim // 8, 4, 2)).unflatten(3, (4, 2, 8))
    finish.args[3].copy_(held.permute(0, 1, 2, 3, 6, 5, 7, 4, 8).flatten())
    finish.run()
    for got, wanted in zip(gradients[1:], true.sum(0).movedim(1, 0), strict=True):
        torch.testing.assert_close(got[0, :, 0].float(), wanted.flatten(0, 1), atol=1e-2, rtol=1e-2)
