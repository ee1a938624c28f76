"""`flashtrain cache`: what the cache of token files holds, and its removal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashtrain.errors import UserError
from flashtrain.files.disk import default_cache_dir

USAGE = "flashtrain cache, flashtrain cache clear KEY, flashtrain cache clear all; each also with data.cache_dir=FOLDER"


def run_cache(words: Sequence[str]) -> int:
    """The command's words after `cache`. Returns the exit status. Raises UserError."""
    from flashtrain.data import cache_contents

    named = [word for word in words if word.startswith("data.cache_dir=")]
    rest = [word for word in words if word not in named]
    base = Path(named[-1].partition("=")[2]).expanduser() if named else default_cache_dir()
    if rest in ([], ["list"]):
        print(cache_contents.listing(base))
    elif len(rest) == 2 and rest[0] == "clear":
        for line in cache_contents.clear(base, rest[1]):
            print(line)
    else:
        raise UserError(f"'cache {' '.join(rest)}' is no command. Possible: {USAGE}.")
    return 0
