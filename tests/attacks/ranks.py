"""Two ranks of one training as two forks, as a launcher would start them: no imports, and each can be killed alone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

RANKS = 2
GRACE = 20.0  # seconds that a rank may live on after the other has ended badly, as launchers have it


def both_ranks(run: Callable[[], int | None], *, after: tuple[float, int, str] | None) -> Callable[[], int]:
    """What runs `run` once for each rank, and ends with the first bad exit status, a rank's signal as 128 and more.

    after: (seconds, signal, "the process" for the first rank, "a child" for the second, "all").
    """

    def action() -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "NODE_RANK": "0"}
        living = {_fork(run, {**shared, "LOCAL_RANK": str(rank)}): rank for rank in range(RANKS)}
        began, worst, ends_at, sent = time.monotonic(), 0, None, after is None
        ranks = {rank: process for process, rank in living.items()}
        while living:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process in living:
                del living[process]
                code = os.waitstatus_to_exitcode(status)
                worst = worst or (code if code >= 0 else 128 - code)
                if code and ends_at is None:
                    ends_at = time.monotonic() + GRACE
            now = time.monotonic()
            if after is not None and not sent and now - began > after[0]:
                sent = True
                whom = {"the process": [0], "a child": [1]}.get(after[2], [0, 1])
                for rank in whom:
                    if ranks[rank] in living:
                        os.kill(ranks[rank], after[1])
            if ends_at is not None and now > ends_at:
                for process in living:
                    os.kill(process, signal.SIGKILL)
                print("a rank lived on and was killed", flush=True)
            time.sleep(0.005)
        return worst

    return action


def _fork(run: Callable[[], int | None], environment: dict[str, str]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.environ.update(environment)
        status = run() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - told to whoever waits
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
