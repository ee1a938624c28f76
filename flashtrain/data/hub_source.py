"""Text from a dataset of the Hugging Face hub or of a local folder, read through `datasets`."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from flashtrain.data.sources import text_in
from flashtrain.errors import needs_package, unknown
from flashtrain.files.caches import default_cache_dir
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import read_json

log = logging.getLogger(__name__)

HUB_TIMEOUT_SECONDS = 10
SPLITS = "dataset_dict.json"  # in the folder of a DatasetDict


@dataclass
class HubSource:
    """A TextSource: the text column of one split of a Hugging Face dataset.

    Raises:
        UserError: `datasets` is not installed, there is no such split or column, or the column is
            not text. Whatever `datasets` raises is passed on.
    """

    # On the hub ("roneneldan/TinyStories"), or a folder that `datasets` can load or
    # `save_to_disk` wrote.
    name: str
    split: str = "train"
    text_column: str = "text"  # rows with null are left out
    config: str | None = None  # the dataset's configuration, if it has several
    streaming: bool = True  # read over the network while tokens are written, without a copy on disk
    # Further arguments of datasets.load_dataset, such as revision.
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.saved = saved_folder(self.name, self.split)

    def describe(self) -> str:
        if self.saved is not None:
            return f"dataset saved in {self.saved}"
        config = f" {self.config}" if self.config else ""
        return f"dataset {self.name}{config}, split {self.split}"

    def fingerprint(self) -> str:
        if self.saved is not None:
            return hashlib.sha256(
                f"saved {self.text_column} {_folder_version(self.saved)}".encode()
            ).hexdigest()
        local = Path(self.name).is_dir()
        name, version = (
            ("", _folder_version(Path(self.name))) if local else (self.name, self._commit())
        )
        parts: tuple[Any, ...] = (
            "hub",
            name,
            self.config,
            self.split,
            self.text_column,
            None,
            version,
        )
        if self.options:
            parts += (sorted(self.options.items()),)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        return self._texts(self.table)

    def shards(self) -> list[Callable[[], Iterator[str]]]:
        """Return a function for each shard of the dataset; called, it yields
        the shard's documents."""
        count = getattr(self.table, "num_shards", 1)
        return [
            partial(self._texts, self.table.shard(num_shards=count, index=number))
            for number in range(count)
        ]

    def _texts(self, rows: Any) -> Iterator[str]:
        texts = (text_in(row, self.text_column, f"dataset {self.name}") for row in rows)
        return (text for text in texts if text is not None)

    def approximate_bytes(self) -> int | None:
        """Return the size of the split that the dataset states; None if it states none."""
        if self.saved is not None:
            return self.table.data.nbytes
        stated = (self.table.info.splits or {}).get(self.split)
        return stated.num_bytes or None if stated is not None else None

    @cached_property
    def table(self) -> Any:
        """The rows of the split, as a dataset of the `datasets` library."""
        library = datasets_library()
        if self.saved is not None:
            return library.load_from_disk(str(self.saved))
        how = {"split": self.split, "streaming": self.streaming, **(self.options or {})}
        return library.load_dataset(self.name, self.config, **how)

    def _commit(self) -> str:
        """Return the commit hash of the revision: the hub's answer or, without a connection, the
        last answer saved on this machine, else "unknown"."""
        # So a machine without network finds the token cache that was built earlier (for
        # example, on a login node).
        import huggingface_hub  # comes with tokenizers; imported here since it is slow

        revision = (self.options or {}).get("revision")
        key = hashlib.sha256(repr((self.name, revision)).encode()).hexdigest()[:24]
        remembered = default_cache_dir() / "hub-commits" / key
        try:
            hub = huggingface_hub.HfApi()
            commit = str(
                hub.dataset_info(self.name, revision=revision, timeout=HUB_TIMEOUT_SECONDS).sha
            )
        except Exception:
            log.debug("the hub does not answer", exc_info=True)
            log.info(
                "the hub does not answer about %s: using the version that was seen last", self.name
            )
            return remembered.read_text(encoding="utf-8") if remembered.is_file() else "unknown"
        write_atomically(remembered, commit)
        return commit


def saved_folder(name: str | os.PathLike[str], split: str) -> Path | None:
    """Return the folder of a split if `name` is a folder that `save_to_disk` of
    `datasets` wrote, else None.

    Raises UserError if the dataset in it has no such split.
    """
    folder = Path(name).expanduser()
    if (folder / SPLITS).is_file():
        splits = read_json(folder / SPLITS)["splits"]
        if split not in splits:
            raise unknown("data.split", split, splits)
        return folder / split
    if all((folder / file).is_file() for file in ("state.json", "dataset_info.json")):
        return folder
    return None


def datasets_library() -> ModuleType:
    """Import Hugging Face's `datasets`. Raises UserError if it is not installed."""
    with needs_package("data from the Hugging Face hub", "datasets", "hub"):
        import datasets
    return datasets


def _folder_version(folder: Path) -> str:
    # When text is read: not for a plan.
    from flashtrain.files.content_hashes import hash_of_contents

    return hash_of_contents(folder, sorted(path for path in folder.rglob("*") if path.is_file()))
