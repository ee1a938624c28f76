"""recipe=hf-long: training steps of transformers' decoders at long contexts, trained as
recipe=hf trains them.

Each case is measured in its own processes, one for each rank (long_rank.py): a case that runs out
of memory, hangs or takes too long ends with its processes and becomes a row.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from lightning_fabric.plugins.environments.lightning import find_free_network_port

from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.folders.run_folder import FAILED, OUT_OF_MEMORY
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import Batching, choose_batching, memory_columns, room
from flashtrain.tasks.context_run import context_columns
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import GIB
from flashtrain.training.memory_choice import Room
from flashtrain_recipes.harness.baseline import Baseline
from flashtrain_recipes.harness.benchmark import Benchmark
from flashtrain_recipes.harness.processes import RankFailed, in_ranks
from flashtrain_recipes.harness.rows import NO_TIME, Row
from flashtrain_recipes.harness.run_folder import Run
from flashtrain_recipes.harness.turns import Effort
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.huggingface_benchmark.long_rank import measure_steps

PLAN = "plan of memory=auto"
_MULTIPLE = 4096  # tokens: the largest contexts are reported in multiples of so many
_MAX_MULTIPLES = 4096  # the search for the largest context stays below


class Flashtrain(Baseline):
    """The only implementation that is measured: flashtrain's."""

    name = title = "flashtrain"


class LongSteps(Benchmark):
    """The benchmark of training steps at long contexts: every requested model and context, on
    trainer.devices devices.

    Raises:
        UserError: the machine has fewer than trainer.devices GPUs.
    """

    what = "long steps of transformers' decoders"
    columns = (
        "model", "context", "devices", "implementation", "step_seconds", "tokens_per_second", "mfu",
        "peak_memory_gib",
        "memory_estimate_gib", "host_estimate_gib", "memory", "limited_by", "steps",
        "compile_seconds", "status",
    )  # fmt: skip
    rate = "tokens_per_second"

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        self.devices = settings.trainer.devices
        if hardware.kind == "cuda" and self.devices > hardware.count:
            raise UserError(
                f"trainer.devices={self.devices}: expected at most {hardware.count}, the number of "
                "GPUs of this machine."
            )
        precision = settings.hardware.precision or hardware.precision
        attention = "flash" if settings.shares_sequences else hardware.attention
        self.adapted = replace(hardware, precision=precision, attention=attention)
        self._full: dict[str, int] = {}  # the context at which a model ran out of memory

    def make_cases(self) -> list[HuggingFaceCase]:
        contexts = sorted(self.options.contexts)
        return [
            HuggingFaceCase(model, context, "fp32", self.settings)
            for model in self.options.models
            for context in contexts
        ]

    def make_baselines(self) -> list[Baseline]:
        return [Flashtrain()]

    def measure(self, run: Run, number: int, case: HuggingFaceCase, effort: Effort) -> list[Row]:
        row = self.planned(case)
        if "error" not in row:  # else more is needed than there is, whatever is saved
            row |= self._measured(run, number, case)
        if row.get("status") == OUT_OF_MEMORY:
            self._full.setdefault(case.model, case.context)
        if "error" in row:
            run.note(str(case), "flashtrain", f"{row['status']}: {row['error']}")
        return [row]

    def _measured(self, run: Run, number: int, case: HuggingFaceCase) -> Row:
        if case.model in self._full:
            why = f"not tried: a context of {self._full[case.model]:,} ran out of memory already"
            return {"status": OUT_OF_MEMORY, "error": why}
        arguments = (
            case.model,
            case.context,
            self.adapted,
            run.folder.resolve(),
            find_free_network_port(),
        )
        try:
            with closing(
                in_ranks(measure_steps, arguments, self.devices, until=run.until)
            ) as found:
                return dict(next(found))
        except TimeoutError:
            return {"status": NO_TIME, "error": "the limit benchmark.max_seconds was reached"}
        except RankFailed as error:
            write_atomically(run.folder / f"case-{number}.txt", error.failure.trace)
            return {"status": OUT_OF_MEMORY if error.failure.full else FAILED, "error": str(error)}

    def without(
        self, case: HuggingFaceCase, baseline: Baseline, status: str, reason: str
    ) -> list[Row]:
        return [{"status": status, **self.planned(case)}]

    def completed(self, rows: list[Row]) -> list[Row]:
        return [*rows, *self.plans()]

    def plan_line(self, case: HuggingFaceCase) -> str:
        return f"{case}: {_words(self.planned(case))}"

    def plan(self) -> str:
        *lines, last = super().plan().splitlines()
        largest = [
            (
                f"  {row['model']} S={row['context']:,} at most by "
                f"memory.activation_checkpointing=auto: {_words(row)}"
            )
            for row in self.plans()
        ]
        if self.devices > 1 and not self.settings.shares_sequences:
            lines[0] += (
                f" (one sequence a device; context_parallel={self.devices} shares it among them)"
            )
        return "\n".join([*lines, *largest, last])

    def planned(self, case: HuggingFaceCase) -> Row:
        """Return the columns of a case's row that are known before measuring,
        with the memory estimates."""
        settings, model = case.settings(), case.decoder(self.adapted)
        columns = {
            "implementation": "flashtrain", "model": case.model, "context": case.context,
            "batch": 1,
            "devices": self.devices, "precision": self.adapted.precision,
            **context_columns(settings.sharding, self.adapted.precision, model, 1),
            **dict.fromkeys(("memory", "memory_estimate_gib", "host_estimate_gib",
                "peak_memory_gib")),
            **dict.fromkeys(("step_seconds", "tokens_per_second", "mfu", "compile_seconds")),
        }  # fmt: skip
        try:
            batching = choose_batching(settings, self.adapted, model)
            full = {} if batching.fits or settings.mode != "plan" else {"error": "does not fit"}
            return {**columns, **_estimated(batching), **full}
        except UserError as error:
            return {**columns, "status": OUT_OF_MEMORY, "error": str(error)}

    def plans(self) -> list[Row]:
        """Return a row for each model with the largest context that is estimated to fit into memory
        with the settings memory.* at their defaults.

        The column limited_by says which memory a longer context exceeds: that of the
        "device" or of the "host".
        """
        return [row for model in self.options.models if (row := self._largest(model))]

    def _largest(self, name: str) -> Row | None:
        case = HuggingFaceCase(name, min(self.options.contexts), "fp32", self.settings)
        model = case.decoder(self.adapted)

        def plan(count: int) -> Batching:
            settings = replace(case, context=count * _MULTIPLE).settings()
            settings.memory = type(settings.memory)()
            return choose_batching(settings, self.adapted, model)

        low, high = 0, _MAX_MULTIPLES
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if plan(middle).fits else (low, middle)
        if not low:
            return None
        device = Room(room(self.settings, self.adapted).device)  # with a host that holds anything
        by_host = any(device.holds(option.estimate) for option in plan(high).options)
        return {
            "implementation": PLAN, "model": name, "context": low * _MULTIPLE, "batch": 1,
            "devices": self.devices, "precision": self.adapted.precision, **_estimated(plan(low)),
            "limited_by": None if high == _MAX_MULTIPLES else "host" if by_host else "device",
            "peak_memory_gib": None, "step_seconds": None,
        }  # fmt: skip


def _estimated(batching: Batching) -> Row:
    needed = batching.estimate
    return {
        **memory_columns(batching),
        "host_estimate_gib": None if needed is None else round(needed.host / GIB, 2),
    }


def _words(row: Row) -> str:
    keys = ("memory", "memory_estimate_gib", "host_estimate_gib", "limited_by", "error")
    return ", ".join(f"{key} {row[key]}" for key in keys if row.get(key) is not None)
