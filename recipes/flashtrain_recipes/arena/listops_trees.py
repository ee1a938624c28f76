"""ListOps expressions (Nangia and Bowman 2018, arXiv 1804.06028) of the Long Range Arena's
lengths, made by numba.

An expression is a digit, or an operator with its arguments: [MAX 2 9 [MIN 4 7 ] 0 ] is 9. Each
symbol is a token: an operator with its bracket, a digit, the closing bracket.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from flashtrain_recipes.arena.pathfinder.random_numbers import GAMMA, mixed

DIGIT, CLOSE = 1, 15  # the digits are 1 to 10
MIN, MAX, MEDIAN, SUM = 11, 12, 13, 14
OPERATORS = 4
OPERATOR_SHARE = 0.25
MAX_DEPTH = 10  # the root is at depth 1; what would be deeper is a digit
MAX_ARGUMENTS = 10


@njit(cache=True)
def _next(state: np.ndarray) -> np.uint64:
    state[0] += GAMMA
    return mixed(state[0])


@njit(cache=True)
def _below(state: np.ndarray, count: int) -> int:
    return int(_next(state) % uint64(count))


@njit(cache=True)
def _value(operator: int, arguments: np.ndarray) -> int:
    if operator == MIN:
        return int(arguments.min())
    if operator == MAX:
        return int(arguments.max())
    if operator == SUM:
        return int(arguments.sum() % 10)
    ordered = np.sort(arguments)
    half = len(ordered) // 2
    return int(ordered[half]) if len(ordered) % 2 else int((ordered[half - 1] + ordered[half]) // 2)


@njit(cache=True)
def expression(seed: int, number: int, tokens: np.ndarray) -> tuple[int, int]:
    """Write expression `number` of a seed into `tokens`, and return (its number of tokens, its
    value); (-1, 0) where it is longer than `tokens`."""
    state = np.zeros(1, dtype=np.uint64)
    state[0] = uint64(seed) * uint64(0xD1342543DE82EF95) + uint64(1)
    state[0] = _next(state) ^ (uint64(number) * GAMMA)
    operators = np.zeros(MAX_DEPTH + 1, dtype=np.int64)
    wanted = np.zeros(MAX_DEPTH + 1, dtype=np.int64)
    found = np.zeros(MAX_DEPTH + 1, dtype=np.int64)
    arguments = np.zeros((MAX_DEPTH + 1, MAX_ARGUMENTS), dtype=np.int64)
    depth, length = 0, 0  # depth: of operators that are open
    while True:
        is_operator = False
        if depth + 1 < MAX_DEPTH:
            is_operator = float(_next(state) >> uint64(11)) * 2.0**-53 < OPERATOR_SHARE
        if length >= len(tokens):
            return -1, 0
        if is_operator:
            depth += 1
            operators[depth] = MIN + _below(state, OPERATORS)
            wanted[depth] = 2 + _below(state, MAX_ARGUMENTS - 1)
            found[depth] = 0
            tokens[length] = operators[depth]
            length += 1
            continue
        value = _below(state, 10)
        tokens[length] = DIGIT + value
        length += 1
        while depth > 0:
            arguments[depth, found[depth]] = value
            found[depth] += 1
            if found[depth] < wanted[depth]:
                break
            if length >= len(tokens):
                return -1, 0
            tokens[length] = CLOSE
            length += 1
            value = _value(operators[depth], arguments[depth, : wanted[depth]])
            depth -= 1
        if depth == 0:
            return length, value


@njit(cache=True)
def expressions(
    seed: int,
    first: int,
    shortest: int,
    longest: int,
    tokens: np.ndarray,
    lengths: np.ndarray,
    values: np.ndarray,
) -> tuple[int, int]:
    """Draw random expressions into arrays, one a row, in the order of their numbers.

    Seed and number determine an expression. One whose length is not between `shortest` and
    `longest`, both excluded, is passed over.

    Args:
        seed, first: the seed, and the number of the first expression to draw.
        shortest, longest: bounds of the number of an expression's tokens.
        tokens, lengths, values: arrays to fill, a row or an entry for each expression: its
            tokens, (rows, longest); how many they are, (rows,); its value, (rows,).

    Returns:
        (number of rows filled, number of the next expression to draw).
    """
    row, number = 0, first
    while row < len(lengths):
        length, value = expression(seed, number, tokens[row, : longest - 1])
        number += 1
        if shortest < length < longest:
            lengths[row], values[row] = length, value
            row += 1
    return row, number
