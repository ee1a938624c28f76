"""The Hugging Face hub: whether it answers from here, asked once, before its libraries ask again and again."""

from __future__ import annotations

import os
import socket
import sys
import threading
from functools import cache
from urllib.parse import urlparse
from urllib.request import getproxies

SECONDS = 3.0  # in which a name is found and a connection made; the libraries wait and try again for half a minute
OFFLINE = "HF_HUB_OFFLINE"  # huggingface_hub's own switch, which datasets and transformers follow


@cache
def work_offline_where_unreachable() -> None:
    """Where the hub cannot be reached, have its libraries look at what they have kept, and answer at once.

    A proxy finds names that this machine does not: behind one, and where HF_HUB_OFFLINE is set, nothing is changed.
    """
    if OFFLINE in os.environ or getproxies().keys() & {"https", "all"}:
        return
    address = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    if _answers(address.hostname or "huggingface.co", port):
        return
    os.environ[OFFLINE] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # read before, as they were imported
        if name in sys.modules:
            setattr(sys.modules[name], OFFLINE, True)


def _answers(host: str, port: int) -> bool:
    """Whether a connection comes about in time. In a thread: looking up a name has no limit of its own."""
    made = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=SECONDS).close()
            made.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True, name="hub")
    thread.start()
    thread.join(SECONDS)
    return made.is_set()
