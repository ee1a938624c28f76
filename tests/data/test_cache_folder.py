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


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        (Unix, "XDG_CACHE_HOME", "{base}/flashtrain"),
        (Windows, "LOCALAPPDATA", "{base}/flashtrain"),
        (Unix, None, "{home}/.cache/flashtrain"),
        (MacOS, None, "{home}/Library/Caches/flashtrain"),
        (Windows, None, "{home}/AppData/Local/flashtrain"),
    ],
)
def test_otherwise_the_platform_decides(monkeypatch, tmp_path, platform, variable, expected):
    for name in ("FLASHTRAIN_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platformdirs, "PlatformDirs", platform)
    # Windows itself is asked there, and answers with this variable's folder.
    local = tmp_path if variable else Path.home() / "AppData" / "Local"
    monkeypatch.setattr("platformdirs.windows.get_win_folder", lambda name: str(local))
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    assert default_cache_dir() == Path(expected.format(base=tmp_path, home=Path.home()))
