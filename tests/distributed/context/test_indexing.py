"""Tokens are taken from their places and put into them as plain indexing does, whatever
their type and strides."""

from __future__ import annotations

import pytest
import torch

from flashtrain.distributed.context.indexing import ascending, copy, inverse, put, take, take_into

B, M, HEADS, D = 2, 11, 3, 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)
INDEXES = (torch.tensor([[4, 0, 9, 2]]), torch.tensor([[4, 0, 9, 2], [1, 10, 3, 0]]))


def states(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).mul(100).to(dtype)


def plain(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [row[places] for row, places in zip(x, index.expand(len(x), -1), strict=True)]
    )


@pytest.mark.parametrize("index", INDEXES, ids=["one for all rows", "of each row"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [D, 5], ids=["whole words", "parts of words"])
class TestIndexing:
    def test_taking(self, dtype, index, width):
        x = states(dtype, B, M, HEADS, width)
        for given in (x, x[:, :, 1:], x[..., 1:], x.transpose(2, 3), x[:, :, 0]):
            found = take(given, index)
            assert found.dtype == dtype
            assert torch.equal(found, plain(given, index))

    def test_putting_changes_those_places_and_no_others(self, dtype, index, width):
        target, x = states(dtype, B, M, 4, width), states(dtype, B, 4, 2, width)
        expected = target.clone()
        for row, places in enumerate(index.expand(B, -1)):
            expected[row, places, 2:] = x[row]
        put(target[:, :, 2:], index, x)
        assert torch.equal(target, expected)

    def test_putting_what_lies_otherwise_in_memory(self, dtype, index, width):
        target, x = states(dtype, B, M, 2, width), states(dtype, B, 4, width, 2).transpose(2, 3)
        put(target, index, x)
        assert torch.equal(plain(target, index), x)

    def test_copying_between_any_strides(self, dtype, index, width):
        target, x = states(dtype, B, M, 4, width), states(dtype, M, B, 2, width)
        for part in (x.transpose(0, 1), states(dtype, B, width, M, 2).permute(0, 2, 3, 1)):
            expected = target.clone()
            expected[:, :, 1:3] = part
            copy(target[:, :, 1:3], part)
            assert torch.equal(target, expected)

    def test_taking_into_a_part_of_a_tensor(self, dtype, index, width):
        target, x = states(dtype, 4, 5, width), states(dtype, M, 2, width)
        expected = target.clone()
        expected[:, 3:] = x[index[0]]
        take_into(target[:, 3:], x, index[0])
        assert torch.equal(target, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_on_a_gpu_are_those_on_a_cpu(dtype):
    """Parts of heads as ulysses sends them, and tokens into a part of what is sent."""
    x, sent, index = (
        states(dtype, 1, 512, 8, 64),
        states(dtype, 4, 1, 512, 5, 64),
        torch.randperm(2048),
    )
    heads = x.unflatten(2, (4, -1))[:, :, :, 1:].movedim(2, 0)
    came = states(dtype, 2048, 2, 64)
    found = []
    for device in ("cpu", "cuda"):
        target = sent.to(device, copy=True)
        copy(target[:, :, :, 2:3], x.to(device).unflatten(2, (4, -1))[:, :, :, 1:].movedim(2, 0))
        take_into(target.flatten(0, 2)[:, 3:], came.to(device), index.to(device))
        found.append(target.cpu())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][:, :, :, 2:3], heads)
    assert torch.equal(found[0].flatten(0, 2)[:, 3:], came[index])


def test_gradients_flow_through_what_is_taken():
    x = torch.randn(1, M, HEADS, D, requires_grad=True)
    take(x, INDEXES[0]).sum().backward()
    assert x.grad[0, :, 0, 0].nonzero().flatten().tolist() == sorted(INDEXES[0][0].tolist())


def test_an_order_and_its_inverse():
    tokens = torch.tensor([[7, 2, -1, 5]])
    order = ascending(tokens)
    assert tokens.gather(1, order).tolist() == [[2, 5, 7, -1]]
    assert inverse(order, 5).tolist() == [[2, 0, 3, 1, -1]]
