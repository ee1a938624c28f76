"""python -m tests.attacks [settings:1000,files:1000,kills:100] [--seed N] [--only NAME] [--save FILE.json]

Runs the attacks, prints each failure with what makes it again, and exits with 1 where there was one. The counts are
FLASHTRAIN_ATTACKS' where none are given. Linux only: it forks, limits and counts as Linux does.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import time
from pathlib import Path

FULL = "settings:1000,files:1000,kills:100"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks")
    parser.add_argument("counts", nargs="?", default=os.environ.get("FLASHTRAIN_ATTACKS", FULL))
    parser.add_argument("--seed", type=int, help="default: by chance, and printed")
    parser.add_argument("--only", help="one round again, as its failure named it: ATTACK:SEED:NUMBER")
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="write a result file")
    parser.add_argument("--root", type=Path, help="where the runs to attack are kept; default: a temporary folder")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    counts = {name: int(count) for name, count in (part.split(":") for part in options.counts.split(",") if part)}
    only = None
    if options.only:
        name, given, number = options.only.split(":")
        seed, only, counts = int(given), int(number), {name: int(number) + 1}

    from tests.attacks.scene import prepare, train_all

    began = time.monotonic()
    scene = prepare(options.root)
    train_all(scene)
    print(f"seed {seed}; {counts}; in {scene.root}; ready after {time.monotonic() - began:.0f} s", flush=True)

    from tests.attacks import ATTACKS
    from tests.attacks.record import Record

    records = []
    try:
        for name, count in counts.items():
            began = time.monotonic()
            record = Record(name, seed)
            for one in ATTACKS[name](scene, seed, count, only):
                record.add(one)
                if only is not None:
                    print(f"{one.name} {one.failure or 'passed'}: {one.shown}")
                    print((scene.root / "logs/attempt.log").read_text(errors="replace")[-6000:])
            records.append(record)
            took = time.monotonic() - began
            done, failed, peak = sum(record.kinds.values()), len(record.failed), record.peak / 2**30
            print(f"{name}: {done} rounds, {failed} failed, {took:.0f} s, peak {peak:.1f} GiB", flush=True)
    finally:
        if options.root is None:
            shutil.rmtree(scene.root, ignore_errors=True)
    if options.save:
        from flashtrain.report.rows import write_result

        rows = [row for record in records for row in record.rows()]
        write_result(options.save, "attacks", f"python -m tests.attacks {options.counts} --seed {seed}", rows)
    return int(any(record.failed for record in records))


if __name__ == "__main__":
    sys.exit(main())
