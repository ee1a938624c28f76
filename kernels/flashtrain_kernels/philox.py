"""Random numbers by counter: Philox4x32 in plain PyTorch, and the dropout mask made of it.

Philox (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a key and a counter
into four 32-bit words. There is no state to advance: whoever computes the word of a (sequence, head, query, key) gets
the same one, whatever the tiles, the order and the number of devices are. The kernels compute the same words by
tl.philox.
"""

import torch

# Seven rounds pass every statistical test (table 2 of the paper) and cost 30% less than the customary ten.
ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(seed: torch.Tensor, counter: Words, rounds: int = ROUNDS) -> Words:
    """The four words of Philox4x32.

    seed: int64, whose low 32 bits are the first word of the key and whose high 32 bits are the second.
    counter: four int64 tensors; their low 32 bits count (so -1 is 2^32 - 1). Everything broadcasts.
    Returns four int64 tensors with values from 0 to 2^32 - 1.
    """
    first, second = seed & _WORD, (seed >> 32) & _WORD
    a, b, c, d = (word & _WORD for word in counter)
    for number in range(rounds):
        if number:
            first, second = (first + _KEY_STEPS[0]) & _WORD, (second + _KEY_STEPS[1]) & _WORD
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
    return a, b, c, d


def threshold(p: float) -> int:
    """A weight is kept where the upper 31 bits of its word are at least this."""
    return round(p * 2**31)


def keep_mask(
    seed: torch.Tensor,
    sequence: torch.Tensor,
    head: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    p: float,
) -> torch.Tensor:
    """Which attention weights dropout keeps: bool, True with probability 1 - p.

    seed: (3,) int64: the seed, and what is added to sequence and to head (for a rank that holds some of them).
    sequence, head, query, key: integers that broadcast: the sequence's number, the query head, and the positions of
    query and key relative to their sequence's first key. One draw serves four keys: word key % 4 of the counter
    (key // 4, query, head, sequence).
    """
    key = key.long()
    group = torch.div(key, 4, rounding_mode="floor")
    counter = (group, query.long(), head.long() + seed[2], sequence.long() + seed[1])
    words = philox(seed[0], counter)
    number = key & 3  # also for negative keys: two's complement
    word = torch.where(
        number < 2, torch.where(number == 0, words[0], words[1]), torch.where(number == 2, words[2], words[3])
    )
    return (word >> 1) >= threshold(p)


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of x * factor, both below 2^32, by halves: the whole would overflow an int64."""
    upper, lower = x * (factor >> 16), x * (factor & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (lower + ((upper & 0xFFFF) << 16)) & _WORD
    return high, low
