"""What every plan must satisfy, checked from the dense mask tile by tile."""

import torch
from mask_cases import Batch, the_twelve

from flashtrain_kernels.masks import Mask

# Four documents of unequal segments and one of one token; then two documents: odd lengths,
# nothing a multiple of 16.
BATCH: Batch = [[[30, 25, 22], [1], [40], [11, 9, 19]], [[70, 20, 31], [36]]]
# (forward, dQ, dK/dV) tiles of queries and keys.
BLOCKS = [(16, 16, 32, 16, 16, 32), (64, 32, 128, 64, 32, 64), (32, 128, 16, 64, 128, 16)]
ORDERS = ["natural", "zigzag", "random"]


def reordered(mask: Mask, order: str) -> Mask:
    """The mask with its queries and keys in another order: as context parallelism
    deals them, or in no order."""
    if order == "natural":
        return mask
    seqlen = mask.seqlen_k
    # Each of three ranks has a piece from the front and its mirror image from the back.
    if order == "zigzag":
        pieces = torch.arange(seqlen).tensor_split(6)
        index = torch.cat([pieces[i] for i in (0, 5, 1, 4, 2, 3)])
    else:
        index = torch.randperm(seqlen, generator=torch.Generator().manual_seed(0))
    return mask.select(index, index)


def planned_masks(order: str) -> dict[str, Mask]:
    return {
        name: reordered(case.mask, order) for name, case in the_twelve(BATCH, 21, 13, 18).items()
    }


def listed(row: list[int]) -> tuple[list[int], list[int]]:
    """The tiles a row of a table visits, with and without the mask: what a kernel's loops do."""
    pc, p0, c1, p1, c2, p2, c3, p3, fc, f0, d1, f1 = row[:12]
    assert row[12:] == [0, 0, 0, 0]
    assert 0 <= c1 <= c2 <= c3 <= pc
    assert 0 <= d1 <= fc
    masked = [
        p0 + i if i < c1 else p1 + i - c1 if i < c2 else p2 + i - c2 if i < c3 else p3 + i - c3
        for i in range(pc)
    ]
    full = [f0 + i if i < d1 else f1 + i - d1 for i in range(fc)]
    return masked, full


def check_table(table: torch.Tensor, dense: torch.Tensor, own: int, other: int) -> tuple[int, int]:
    """Check a table for tiles of `own` rows and `other` columns of dense (Bm, rows, columns).

    Returns how many tiles it lists needlessly, and how many it masks needlessly.
    """
    batch, rows, columns = dense.shape
    assert table.dtype == torch.int32
    assert table.shape == (batch, -(-rows // own), 16)
    needless = masked_needlessly = 0
    for number in range(batch):
        for tile, row in enumerate(table[number].tolist()):
            masked, full = listed(row)
            visited = masked + full
            assert len(set(visited)) == len(visited), "a tile comes twice"
            assert all(0 <= index < -(-columns // other) for index in visited), (
                "a tile that does not exist"
            )
            mine = dense[number, tile * own : (tile + 1) * own]
            for index in range(-(-columns // other)):
                block = mine[:, index * other : (index + 1) * other]
                whole = bool(block.all()) and block.shape[1] == other
                assert index in visited or not block.any(), "a visible pair is left out"
                assert index not in full or whole, "a tile that needs the mask is listed as full"
                needless += index in visited and not bool(block.any())
                masked_needlessly += index in masked and whole
    return needless, masked_needlessly


def check_plan(
    tables: tuple[torch.Tensor, ...], mask: Mask, blocks: tuple[int, ...]
) -> tuple[int, int]:
    """Check the three tables. Returns the needlessly listed and the needlessly
    masked tiles of all three."""
    dense = mask.dense()
    counts = [
        check_table(tables[0], dense, blocks[0], blocks[1]),
        check_table(tables[1], dense, blocks[2], blocks[3]),
        check_table(tables[2], dense.transpose(1, 2), blocks[5], blocks[4]),
    ]
    return sum(count[0] for count in counts), sum(count[1] for count in counts)
