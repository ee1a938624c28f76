"""A TCP port for the ranks that a test starts."""

from __future__ import annotations

import random
import socket

# Below the ports that systems give connections by themselves (Linux: from 32768), of which one
# would be another connection's before the first rank listens.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port of 127.0.0.1 that no process uses now."""
    while True:
        with socket.socket() as tried:
            port = random.SystemRandom().choice(_PORTS)
            if tried.connect_ex(("127.0.0.1", port)):
                return port
