"""JSON and YAML files: read as the settings they hold, and named where they hold none."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from flashtrain.errors import UserError
from flashtrain.files.json_files import read_json
from flashtrain.files.yaml_files import literal, read_yaml


def test_numbers_are_read_as_omegaconf_reads_them_and_nothing_is_resolved(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("\ufeffrate: 1e-4\nname: ${oc.env:HOME}\nday: 2020-01-01\n", encoding="utf-8")
    assert read_yaml(path) == {"rate": 1e-4, "name": "${oc.env:HOME}", "day": "2020-01-01"}


def test_no_code_runs_and_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: !!python/object/apply:os.system [ls]")
    with pytest.raises(yaml.YAMLError, match=r"config\.yaml"):
        read_yaml(path)


@pytest.mark.parametrize(
    "text", ["${a}", "\\${a}", "x\\\\${oc.env:HOME}", "plain", "$", "\\", "${"]
)
def test_a_text_with_an_interpolation_in_it_stays_that_text(text: str) -> None:
    config = OmegaConf.create(literal({"a": [text]}))
    assert OmegaConf.to_container(config, resolve=True) == {"a": [text]}


def test_json_has_its_file_named(tmp_path: Path) -> None:
    path = tmp_path / "meta.json"
    path.write_text('\ufeff{"a": 1}', encoding="utf-8")
    assert read_json(path) == {"a": 1}
    path.write_text('{"a": 1')
    with pytest.raises(UserError, match=r"meta\.json is not valid JSON: .*line 1"):
        read_json(path)
