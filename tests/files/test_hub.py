"""Whether the hub answers is asked once and quickly, and its libraries are told."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from flashtrain.files import hub


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever is set meanwhile
        monkeypatch.delenv(name)
    for name in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.delitem(hub.sys.modules, name, raising=False)
    hub.work_offline_where_unreachable.cache_clear()
    yield
    hub.work_offline_where_unreachable.cache_clear()


def test_where_nothing_answers_the_libraries_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    hub.work_offline_where_unreachable()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_name_that_is_looked_up_for_long_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SECONDS", 0.1)
    found = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: found.wait() and socket.socket())
    hub.work_offline_where_unreachable()  # and does not wait until it is found
    found.set()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_where_the_hub_answers_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SECONDS", 600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.work_offline_where_unreachable()
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_OFFLINE", "0"), ("https_proxy", "http://proxy:3128")])
def test_who_has_said_how_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(hub, "_answers", lambda *_: pytest.fail("asked"))
    hub.work_offline_where_unreachable()
    assert os.environ.get("HF_HUB_OFFLINE", "0") == "0"
