"""Where caches live."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix
from platformdirs.windows import Windows

from flashtrain.files.caches import default_cache_dir


@pytest.mark.parametrize(
    ("platform", "expected"),
    [(Unix, ".cache/flashtrain"), (MacOS, "Library/Caches/flashtrain"), (Windows, "local/flashtrain")],
)
def test_the_environment_variable_decides_else_the_platform(monkeypatch, platform, expected):
    monkeypatch.setenv("FLASHTRAIN_CACHE", "here")
    assert default_cache_dir() == Path("here")
    for name in ("FLASHTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platformdirs, "PlatformDirs", platform)
    monkeypatch.setattr("platformdirs.windows.get_win_folder", lambda name: str(Path.home() / "local"))
    assert default_cache_dir() == Path.home() / expected
