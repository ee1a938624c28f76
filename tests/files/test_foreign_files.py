"""Small files from elsewhere: bounded, no aliases, no interpolation, one line for whatever is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from flashtrain.errors import LONGEST_LINE, UserError, printable
from flashtrain.files.foreign_files import literal, parse_json, read_bytes, read_json_object, read_yaml


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("a: " + "[" * 300 + "]" * 300, "nested deeper"),
        ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("a: 1\na: 2\n", "duplicate"),
        ("a: \0", "not valid YAML"),
        ("- 1", "holds no settings"),
        ("a: " + "x" * 2**20, "at most 1,048,576 are read"),
    ],
    ids=["aliases", "depth", "code", "twice the same", "NUL", "a list", "size"],
)
def test_a_yaml_file_that_is_odd_is_refused_by_name(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=reason) as refusal:
        read_yaml(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["${a}", "\\${a}", "x\\\\${oc.env:HOME}", "plain", "$", "\\", "${"])
def test_a_text_with_an_interpolation_in_it_stays_that_text(text: str) -> None:
    config = OmegaConf.create(literal({"a": [text]}))
    assert OmegaConf.to_container(config, resolve=True) == {"a": [text]}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5000, "1" * 10_000, "{", "\0"])
def test_json_that_is_odd_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"meta\.json is"):
        parse_json(text, "meta.json")


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "summary.json"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="is no file"):
        read_json_object(pipe)
    with pytest.raises(UserError, match="there is no file"):
        read_bytes(tmp_path / "missing", 10)


def test_a_terminal_obeys_nothing_that_a_file_brought_into_a_message() -> None:
    assert str(UserError("no column '\x1b[2J\u202e'\nnext\ud800")) == "no column '\\x1b[2J\\u202e' next\\ud800"
    assert len(str(UserError("x" * 10**6))) < LONGEST_LINE + 10
    assert printable("lines\n\tand tabs stay") == "lines\n\tand tabs stay"
