"""Dropout's random numbers: the published words of Philox4x32 and Philox2x32, and
the mask made of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrain_kernels import philox

# Random123's file of known answers (kat_vectors): rounds, counter, key, words.
PUBLISHED = [
    (
        7,
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "5f6fb709 0d893f64 4f121f81 4f730a48",
    ),
    (
        7,
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "5207ddc2 45165e59 4d8ee751 8c52f662",
    ),
    (
        7,
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
    (
        10,
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        10,
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        10,
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
# Of Philox2x32, alike.
PUBLISHED_2X32 = [
    (7, "00000000 00000000", "00000000", "257a3673 cd26be2a"),
    (7, "ffffffff ffffffff", "ffffffff", "ab302c4d 3dc9d239"),
    (7, "243f6a88 85a308d3", "13198a2e", "bedbbe6b e4c770b3"),
    (10, "00000000 00000000", "00000000", "ff1dae59 6cd10df2"),
]
SEED = torch.tensor([1234, 0, 0])


def words(line: str) -> list[int]:
    return [int(word, 16) for word in line.split()]


def signed(value: int) -> int:
    """The int64 of the same bits."""
    return value - 2**64 if value >= 2**63 else value


def plain_philox(rounds: int, counter: list[int], key: list[int]) -> list[int]:
    """The algorithm on Python's integers, as the paper writes it."""
    a, b, c, d = counter
    for number in range(rounds):
        first, second = (
            (key[0] + number * 0x9E3779B9) % 2**32,
            (key[1] + number * 0xBB67AE85) % 2**32,
        )
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ first, y % 2**32, (x >> 32) ^ d ^ second, x % 2**32
    return [a, b, c, d]


def plain_philox2x32(rounds: int, counter: list[int], key: int) -> list[int]:
    """The smaller algorithm, alike."""
    a, b = counter
    for number in range(rounds):
        product = 0xD256D193 * a
        a, b = (product >> 32) ^ b ^ (key + number * 0x9E3779B9) % 2**32, product % 2**32
    return [a, b]


def keep(sequence=0, head=0, query=0, key=0, p=0.5, seed=SEED):
    arguments = (torch.as_tensor(x) for x in (sequence, head, query, key))
    return philox.keep_mask(seed, *arguments, p)


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), PUBLISHED)
def test_the_published_words_of_philox4x32(rounds, counter, key, expected):
    low, high = words(key)
    seed = torch.tensor(signed(low + (high << 32)))
    got = philox.philox(seed, tuple(torch.tensor(word) for word in words(counter)), rounds)
    assert [word.item() for word in got] == words(expected)
    assert plain_philox(rounds, words(counter), [low, high]) == words(expected)


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), PUBLISHED_2X32)
def test_the_published_words_of_philox2x32(rounds, counter, key, expected):
    (number,) = words(key)
    got = philox.philox2x32(
        torch.tensor(number), tuple(torch.tensor(word) for word in words(counter)), rounds
    )
    assert [word.item() for word in got] == words(expected)
    assert plain_philox2x32(rounds, words(counter), number) == words(expected)


@settings(max_examples=50)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    counter=st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 4),
    p=st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_weight_is_kept_where_its_16_bits_reach_the_threshold(seed, counter, p):
    sequence, head, query, key = counter
    seed_words = [seed % 2**32, (seed >> 32) % 2**32]
    own, *first, _ = plain_philox(10, [sequence % 2**32, head % 2**32, 0, 0], seed_words)
    pairs = [
        (at // 16 * 8 + at % 8 + begin) % 2**32
        for at, begin in zip((query, key), first, strict=True)
    ]
    word = plain_philox2x32(7, pairs, own)[query // 8 % 2]
    draw = word >> 16 if key // 8 % 2 else word % 2**16
    assert keep(*counter, p, torch.tensor([seed, 0, 0])).item() == (
        draw >= min(round(p * 65536), 65535)
    )


def test_nothing_is_dropped_at_probability_0():
    assert keep(query=torch.arange(64)[:, None], key=torch.arange(64), p=0.0).all()
    assert philox.keep_probability(0.0) == 1.0


@pytest.mark.parametrize(
    ("p", "share"), [(0.1, 58982 / 65536), (0.5, 0.5), (1 - 2**-20, 1 / 65536), (2**-18, 1.0)]
)
def test_the_kept_are_divided_by_the_share_that_is_kept_which_is_never_0(p, share):
    assert philox.keep_probability(p) == share
    assert philox.threshold(p) == round((1 - share) * 65536)


def test_draws_are_as_even_and_as_little_alike_as_chance_has_it():
    queries, keys = torch.arange(1024)[:, None], torch.arange(1024)
    kept = keep(query=queries, key=keys).double() * 2 - 1
    # Neighbours along queries and keys, the four weights of one call, and others:
    # correlations of a million draws.
    for rows, columns in [
        (1, 0),
        (0, 1),
        (1, 1),
        (8, 0),
        (0, 8),
        (8, 8),
        (16, 0),
        (0, 16),
        (16, 16),
        (512, 0),
    ]:
        here, there = kept[: 1024 - rows, : 1024 - columns], kept[rows:, columns:]
        assert abs((here * there).mean().item()) < 5 / 720
    for axis in (0, 1):  # sums of rows and of columns vary as those of independent draws
        assert abs(kept.sum(axis).var().item() / 1024 - 1) < 5 * (2 / 1024) ** 0.5
    for p in (1 / 4, 1 / 64, 1 / 1024):
        dropped = 1 - keep(query=queries, key=keys, p=p).double().mean().item()
        assert abs(dropped - p) < 5 * (p * (1 - p)) ** 0.5 / 1024


def test_neighbouring_heads_draw_nothing_alike():
    heads = torch.arange(64)[:, None, None]
    kept = keep(0, heads, torch.arange(128)[:, None], torch.arange(128)).double() * 2 - 1
    alike = (kept.flatten(1) @ kept.flatten(1).T / 128**2).fill_diagonal_(0)
    assert alike.abs().max() < 6 / 128


def test_a_new_seed_tensor_compiles_nothing():
    compiled = torch.compile(philox.keep_mask, backend="aot_eager", fullgraph=True)
    for seed in (SEED, SEED + 5):
        arguments = (torch.tensor(0), torch.tensor(1), torch.arange(9)[:, None], torch.arange(7))
        assert torch.equal(compiled(seed, *arguments, 0.3), philox.keep_mask(seed, *arguments, 0.3))
