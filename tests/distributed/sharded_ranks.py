"""What gloo ranks do for test_sharded_checkpoints.py; run as a script, which forks them for each scenario.

python sharded_ranks.py FOLDER
python sharded_ranks.py FOLDER endless       two ranks that write checkpoints until they are killed
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from ranks import fork
from tiny_training import TinyData, TinyTask, tiny_trainer

from flashtrain.distributed import FullyShardedStrategy, full_state_dict
from flashtrain.training import sharded
from flashtrain.training.checkpoints import AtomicCheckpointIO, SaveLast, checkpoint_callbacks


class TiedTask(TinyTask):
    """With a weight that has two names, as a tied head's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model.head = torch.nn.Linear(12, 17, bias=False)
        self.model.head.weight = self.model.embedding.weight


def fit(folder: Path, ranks: int, *callbacks: Any, shards: bool = True, resume: Any = None, **options: Any) -> TinyTask:
    """Train on all ranks with the 8 samples of a step dealt among them."""
    task = TiedTask()
    trainer = tiny_trainer(
        folder,
        *callbacks,
        devices=ranks,
        strategy=FullyShardedStrategy(save_distributed_checkpoint=shards),
        plugins=[AtomicCheckpointIO()],
        **options,
    )
    trainer.fit(task, datamodule=TinyData(batch_size=8 // ranks), ckpt_path=resume)
    return task


def write(folder: Path, found: dict[str, Any]) -> None:
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # gloo's threads abort a process that exits with them


def two(folder: Path) -> None:
    """Nine steps; then six with a checkpoint each and a best one, then three more from there."""
    whole = fit(folder, 2, max_steps=9)
    options = {"limit_val_batches": 1, "val_check_interval": 3}
    began = fit(folder, 2, *checkpoint_callbacks(folder / "run", 1), max_steps=6, **options)
    weights = full_state_dict(began.model)
    if os.environ["RANK"] == "0":
        torch.save(weights, folder / "weights.pt")
    resumed = fit(folder, 2, max_steps=9, resume=folder / "run" / "last.ckpt")
    switched = fit(folder, 2, SaveLast(folder / "switched"), shards=False, max_steps=2)
    kinds = [(folder / "switched" / "last.ckpt").is_dir()]
    for shards, steps in ((True, 4), (False, 6), (True, 9)):
        callback, path = SaveLast(folder / "switched"), folder / "switched" / "last.ckpt"
        switched.losses += fit(folder, 2, callback, shards=shards, max_steps=steps, resume=path).losses
        kinds.append(path.is_dir())
    write(
        folder,
        {"losses": whole.losses, "began": began.losses, "resumed": resumed.losses, "switched": switched.losses,
         "folders": kinds},
    )  # fmt: skip


def four(folder: Path, checkpoint: Path) -> None:
    resumed = fit(folder, 4, SaveLast(folder / "run"), max_steps=8, resume=checkpoint)
    write(folder, {"resumed": resumed.losses})


def full(folder: Path) -> None:
    """The disk is full for the second rank's second checkpoint; the same once more, but for the first rank's pointer."""
    found = {}
    real, take_place = sharded._write_through, sharded._take_place
    for name in ("shards", "current"):
        path = folder / name / "last.ckpt"

        def no_space(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        def second(*arguments: Any, name: str = name) -> None:
            second.calls += 1  # type: ignore[attr-defined]
            (no_space if second.calls == 2 else take_place)(*arguments)  # type: ignore[attr-defined]

        second.calls = 0  # type: ignore[attr-defined]
        if name == "current":
            sharded._take_place = second
        elif os.environ["RANK"] == "1":
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

            write_data = HuggingFaceStorageWriter.write_data

            def write_twice(self: Any, *arguments: Any, write_data: Any = write_data) -> Any:
                second.calls += 1  # type: ignore[attr-defined]
                return no_space() if second.calls == 2 else write_data(self, *arguments)  # type: ignore[attr-defined]

            HuggingFaceStorageWriter.write_data = write_twice
        try:
            fit(folder, 2, SaveLast(path.parent, 1), max_steps=6)
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
    sharded._write_through, sharded._take_place = real, take_place
    write(folder, found)


def endless(folder: Path) -> None:
    fit(folder, 2, SaveLast(folder / "run", 1), max_steps=5000)


def main() -> None:
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["endless"]:
        fork(2, endless, folder)
        return
    for function, ranks, arguments in (
        (two, 2, ()),
        (four, 4, (folder / "two" / "run" / "last.ckpt",)),
        (full, 2, ()),
    ):
        place = folder / function.__name__
        place.mkdir()
        codes = fork(ranks, function, place, *arguments)
        (place / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
