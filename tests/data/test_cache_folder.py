"""Where caches live."""

from __future__ import annotations

from pathlib import Path

import platformdirs
from platformdirs.unix import Unix

from flashtrain.files.caches import default_cache_dir


def test_the_environment_variable_decides_else_the_platform(monkeypatch):
    monkeypatch.setenv("FLASHTRAIN_CACHE", "here")
    assert default_cache_dir() == Path("here")
    for name in ("FLASHTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platformdirs, "PlatformDirs", Unix)
    assert default_cache_dir() == Path.home() / ".cache/flashtrain"
