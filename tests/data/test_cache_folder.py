"""Where caches live."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashtrain.files.disk import default_cache_dir


def test_the_environment_variable_decides(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "here"))
    assert default_cache_dir() == tmp_path / "here"


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", "XDG_CACHE_HOME", "{base}/flashtrain"),
        ("win32", "LOCALAPPDATA", "{base}/flashtrain"),
        ("linux", None, "{home}/.cache/flashtrain"),
        ("darwin", None, "{home}/Library/Caches/flashtrain"),
        ("win32", None, "{home}/AppData/Local/flashtrain"),
    ],
)
def test_otherwise_the_platform_decides(monkeypatch, tmp_path, platform, variable, expected):
    for name in ("FLASHTRAIN_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    assert default_cache_dir() == Path(expected.format(base=tmp_path, home=Path.home()))
