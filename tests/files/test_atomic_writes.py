from __future__ import annotations

from pathlib import Path

import pytest

from flashtrain.files.disk import write_atomically


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some.json").write_text("whole")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "some.json", "half")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [
        ("some.json", "whole")
    ]
