from __future__ import annotations

from typing import Any

import pytest

from flashtrain.report.formats import cell, heading, short, significant


@pytest.mark.parametrize(
    ("shown", "value", "text"),
    [
        (short, 0, "0"),  # large counts are short
        (short, 1234, "1.23k"),
        (short, 1_557_611_200, "1.56B"),
        (short, 999_600, "1.00M"),
        (short, 12.345, "12.3"),
        (significant, 0.0, "0"),  # measured figures have three significant digits
        (significant, 0.4, "0.400"),
        (significant, 9.999, "10.0"),
        (significant, 99.96, "100"),
        (significant, 0.00012345, "0.000123"),
        (significant, 0.000012345, "1.23e-05"),
        (significant, -12.34, "-12.3"),
    ],
)
def test_digits_of_a_number(shown: Any, value: float, text: str):
    assert shown(value) == text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("train_loss", float("nan"), "nan"),
        ("mfu", None, "-"),
        ("anything", "", "-"),
        ("anything", True, "yes"),
        ("anything", 0.0003, "0.0003"),
        ("anything", 8.0, "8"),
        ("anything", "two\nlines", "two lines"),
    ],
)
def test_a_cell_reads_by_its_columns_format(key: str, value: object, text: str):
    assert cell(key, value) == text


def test_headings_carry_units_and_settings_keep_their_names():
    names = ("peak_memory_gib", "my_measure", "optimizer.learning_rate")
    assert [heading(name) for name in names] == [
        "peak memory (GiB)",
        "my measure",
        "optimizer.learning_rate",
    ]
