from __future__ import annotations

import pytest

from flashtrain.report.formats import cell, heading, short, significant


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234, "1.23k"),
        (1_557_611_200, "1.56B"),
        (999_600, "1.00M"),
        (12.345, "12.3"),
    ],
)
def test_large_counts_are_short(value: float, text: str):
    assert short(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.4, "0.400"),
        (9.999, "10.0"),
        (99.96, "100"),
        (0.00012345, "0.000123"),
        (0.000012345, "1.23e-05"),
        (-12.34, "-12.3"),
    ],
)
def test_measured_figures_have_three_significant_digits(value: float, text: str):
    assert significant(value) == text


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
    assert heading("peak_memory_gib") == "peak memory (GiB)"
    assert heading("my_measure") == "my measure"
    assert heading("optimizer.learning_rate") == "optimizer.learning_rate"
