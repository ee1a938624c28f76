"""python -m flashtrain_recipes.arena.pathfinder.worker HEADER: generates what it is asked for on its standard input.

HEADER is the JSON of records.Header. Each line read is `first count`; the records' bytes are the answer on standard
output. It ends with its input, so that it never outlives the process that started it.
"""

from __future__ import annotations

import json
import signal
import sys

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.generate import generate_records
from flashtrain_recipes.arena.pathfinder.records import Header


def main() -> int:
    """The worker; exit status 2 with one line on standard error for a UserError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to the starter, which closes our input
    try:
        header = Header.from_dict(json.loads(sys.argv[1]))
        for line in sys.stdin:
            first, count = map(int, line.split())
            sys.stdout.buffer.write(generate_records(header, first, count).tobytes())
            sys.stdout.buffer.flush()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the starter is gone
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
