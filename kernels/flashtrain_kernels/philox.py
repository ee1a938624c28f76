"""Random numbers by counter (Philox) in plain PyTorch, and dropout masks made of them.

The random number of a (sequence, head, query, key) depends on these and the seed only, not on
tiles, order or the number of devices. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers:
as easy as 1, 2, 3", SC 2011.
"""

import torch

# Philox4x32 passed BigCrush (TestU01) with 7 and 10 rounds. No published test of Philox2x32 with 7
# rounds is known (Random123 has 10); ours are tests/kernels/test_philox.py. Its key is one word
# only, so a head's key and the start of its counters are words of Philox4x32-10, of the whole seed:
# heads that share a key still draw other numbers.
ROUNDS = 7  # of Philox2x32
STREAM_ROUNDS = 10  # of Philox4x32
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MULTIPLIER, KEY_STEP = 0xD256D193, 0x9E3779B9  # of Philox2x32
_WORD = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(seed: torch.Tensor, counter: Words, rounds: int = STREAM_ROUNDS) -> Words:
    """Compute the four output words of Philox4x32.

    Args:
        seed: int64, the key: its low 32 bits are the first word, its high 32 bits the second.
        counter: four int64 tensors, of which the low 32 bits are used (-1 is 2^32 - 1).
            All arguments broadcast.

    Returns:
        Four int64 tensors with values from 0 to 2^32 - 1.
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


def philox2x32(
    key: torch.Tensor, counter: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the two output words of Philox2x32, as int64; of key and counter (int64)
    the low 32 bits are used."""
    key, a, b = key & _WORD, counter[0] & _WORD, counter[1] & _WORD
    for number in range(rounds):
        if number:
            key = (key + KEY_STEP) & _WORD
        high, low = _product(a, MULTIPLIER)
        a, b = high ^ b ^ key, low
    return a, b


def threshold(p: float) -> int:
    """Return the least 16-bit random number for which dropout keeps a weight: p * 65536,
    rounded, at most 65535."""
    return min(round(p * 65536), 65535)


def keep_probability(p: float) -> float:
    """Return 1 - p, with p rounded to a multiple of 1/65536: the divisor of the
    weights that dropout keeps."""
    return (65536 - threshold(p)) / 65536


def keep_mask(
    seed: torch.Tensor,
    sequence: torch.Tensor,
    head: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    p: float,
) -> torch.Tensor:
    """Return which attention weights dropout keeps: bool, True with
    probability keep_probability(p).

    Args:
        seed: (3,) int64: the seed, and the offsets added to sequence and to head (for a
            rank that holds a part).
        sequence, head, query, key: integers that broadcast: the sequence's number, the query head,
            and the positions of query and key relative to their sequence's first key.
        p: the probability of dropping a weight.
    """
    # A weight takes 16 bits. One call of Philox2x32 gives those of four weights, {i, i + 8} x {j,
    # j + 8} within aligned squares of 16 x 16: a thread that holds a tile as Hopper's tensor cores
    # leave it has all four. (sequence, head, 0,
    # 0) gives a head's key, and what is added to the two words of its counters, which are the
    # numbers of the groups that query and key are in. Bit 3 of the query chooses the word, bit 3
    # of the key its half.
    query, key = query.long(), key.long()
    zero = torch.zeros_like(seed[0])
    own, first, second, _ = philox(
        seed[0], (sequence.long() + seed[1], head.long() + seed[2], zero, zero)
    )
    words = philox2x32(own, (group_of(query) + first, group_of(key) + second))
    word = torch.where((query & 8) == 0, *words)
    draw = torch.where((key & 8) == 0, word & 0xFFFF, word >> 16)
    return draw >= threshold(p)


def group_of(position: torch.Tensor) -> torch.Tensor:
    """Return the number of the pair {i, i + 8} that a position belongs to, within aligned
    groups of 16 positions."""
    return (position >> 4) * 8 + (position & 7)


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of x * factor, both below 2^32, by halves: the whole
    would overflow an int64."""
    upper, lower = x * (factor >> 16), x * (factor & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (lower + ((upper & 0xFFFF) << 16)) & _WORD
    return high, low
