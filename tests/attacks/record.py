"""What the rounds of an attack came to: a line for each failure, and the rows of a result file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.attacks.watch import GIB, Outcome


@dataclass
class Round:
    """One round. name: ATTACK:SEED:NUMBER, which makes it again. failure: what went wrong; None for nothing."""

    kind: str
    name: str
    failure: str | None
    shown: str
    seconds: float
    peak: int
    refused: bool = False

    @classmethod
    def of(cls, kind: str, name: str, outcome: Outcome, failure: str | None, shown: str) -> Round:
        return cls(kind, name, failure, shown, outcome.seconds, outcome.peak, outcome.status == 2)


@dataclass
class Record:
    """All rounds of one attack."""

    attack: str
    seed: int
    seconds: float = 0.0
    peak: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[Round] = field(default_factory=list)

    def add(self, one: Round) -> None:
        """Count a round, and print it where it failed."""
        self.kinds[one.kind] += 1
        self.refused[one.kind] += one.refused
        self.seconds += one.seconds
        self.peak = max(self.peak, one.peak)
        if one.failure is not None:
            self.failed.append(one)
            print(f"FAILED {one.name}  {one.kind}: {one.failure}\n       {one.shown}", flush=True)

    def rows(self) -> list[dict[str, object]]:
        """A row for each kind of round: how many, how many of them failed in which way."""
        rows: list[dict[str, object]] = []
        for kind, count in sorted(self.kinds.items()):
            failures = Counter((one.failure or "").split(":")[0] for one in self.failed if one.kind == kind)
            told = ", ".join(f"{how} {number}" for how, number in failures.most_common())
            rows.append(
                {
                    "attack": self.attack,
                    "kind": kind,
                    "rounds": count,
                    "refused": self.refused[kind],
                    "failures": sum(failures.values()),
                    "failures_by_kind": told or None,
                    "seed": self.seed,
                }
            )
        total = {
            "attack": self.attack,
            "kind": "all",
            "rounds": sum(self.kinds.values()),
            "refused": sum(self.refused.values()),
            "failures": len(self.failed),
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "peak_gib": round(self.peak / GIB, 2),
        }
        return [*rows, total]
