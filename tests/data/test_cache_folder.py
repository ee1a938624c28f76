"""Where caches live."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix
from platformdirs.windows import Windows

from flashtrain.files.caches import default_cache_dir


def test_the_environment_variable_decides(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "here"))
    assert default_cache_dir() == tmp_path / "here"


@pytest.mark.parametrize(("platform", "expected"), [(Unix, ".cache/flashtrain"), (MacOS, "Library/Caches/flashtrain")])
def test_otherwise_the_platform_decides(monkeypatch, platform, expected):
    for name in ("FLASHTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platformdirs, "PlatformDirs", platform)
    assert default_cache_dir() == Path.home() / expected


def test_on_windows_it_is_the_folder_of_earlier_versions(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHTRAIN_CACHE", raising=False)
    monkeypatch.setattr(platformdirs, "PlatformDirs", Windows)
    monkeypatch.setattr("platformdirs.windows.get_win_folder", lambda name: str(tmp_path))
    assert default_cache_dir() == tmp_path / "flashtrain"
