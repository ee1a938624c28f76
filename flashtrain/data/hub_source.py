"""A dataset of the Hugging Face hub, or a local folder that `datasets` can load, read through `datasets`."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from flashtrain.errors import UserError
from flashtrain.files.caches import default_cache_dir
from flashtrain.files.content_hashes import hash_of_contents
from flashtrain.files.disk import write_atomically
from flashtrain.files.hub import work_offline_where_unreachable
from flashtrain.files.json_files import read_json

log = logging.getLogger(__name__)

HUB_TIMEOUT_SECONDS = 10
SPLITS = "dataset_dict.json"  # in the folder of a DatasetDict
OWN_SETTINGS = {  # of load_dataset's arguments
    "path": "say data.name=",
    "name": "say data.config=",
    "split": "say data.split=",
    "streaming": "say data.streaming=",
    "trust_remote_code": "code of a dataset is never run",
}


class HubSource:
    """The text column of one split of a dataset.

    name: as on the hub ("roneneldan/TinyStories"), or a local folder. config: the dataset's configuration, where it
    has several. streaming: read over the network while tokens are written, without a copy of the dataset on disk.
    options: further arguments of datasets.load_dataset, such as revision, a branch, tag or commit.

    The fingerprint holds the commit that the revision stands for. A machine without network uses the commit that it
    saw last, so that a token cache built before (on a login node, say) is found again.
    Raises UserError when `datasets` is not installed, for a column that is not there or no text, and what `datasets`
    raises.
    """

    def __init__(
        self,
        name: str,
        split: str = "train",
        text_column: str = "text",
        config: str | None = None,
        streaming: bool = True,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = dict(options or {})
        for option in self.options:
            if option in OWN_SETTINGS:
                raise UserError(f"data.options.{option}: {OWN_SETTINGS[option]}.")
        self.name = name
        self.split = split
        self.text_column = text_column
        self.config = config
        self.streaming = streaming
        self.revision = self.options.get("revision")
        self._rows: Any = None

    def describe(self) -> str:
        config = f" {self.config}" if self.config else ""
        return f"dataset {self.name}{config}, split {self.split}"

    def fingerprint(self) -> str:
        local = Path(self.name).is_dir()
        name, version = ("", _folder_version(Path(self.name))) if local else (self.name, self._commit())
        parts: tuple[Any, ...] = ("hub", name, self.config, self.split, self.text_column, None, version)
        if self.options:
            parts += (sorted(self.options.items()),)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        return self._texts(self._load())

    def shards(self) -> list[Callable[[], Iterator[str]]]:
        """The documents of each shard that the dataset lies in, to be read apart."""
        rows = self._load()
        count = getattr(rows, "num_shards", 1)
        if not isinstance(count, int) or count < 2:
            return [self.documents]
        return [partial(self._of_shard, rows, count, number) for number in range(count)]

    def _of_shard(self, rows: Any, count: int, number: int) -> Iterator[str]:
        return self._texts(rows.shard(num_shards=count, index=number))

    def _texts(self, rows: Any) -> Iterator[str]:
        for row in rows:
            if self.text_column not in row:
                raise UserError(
                    f"dataset {self.name}: no column '{self.text_column}'. Possible: {', '.join(row)} "
                    "(set it with data.text_column)."
                )
            text = row[self.text_column]
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise UserError(f"dataset {self.name}: column '{self.text_column}' holds {kind}, not text.")
            if text is not None:
                yield text

    def approximate_bytes(self) -> int | None:
        """The size of the split as the dataset states it, None where it does not or cannot be reached."""
        try:
            splits = self._load().info.splits
        except Exception:
            log.debug("the size of %s is not known", self.name, exc_info=True)
            return None
        stated = splits.get(self.split) if splits else None
        return stated.num_bytes or None if stated is not None else None

    def _load(self) -> Any:
        if self._rows is None:
            if not Path(self.name).is_dir():
                work_offline_where_unreachable()
            self._rows = datasets_library().load_dataset(
                self.name,
                self.config,
                **{"split": self.split, "streaming": self.streaming, **self.options},
            )
        return self._rows

    def _commit(self) -> str:
        """The commit that name and revision stand for: the hub's answer, or the last one it gave on this machine."""
        key = hashlib.sha256(repr((self.name, self.revision)).encode()).hexdigest()[:24]
        remembered = default_cache_dir() / "hub-commits" / key
        try:
            commit = _ask_hub(self.name, self.revision)
        except Exception:
            log.debug("the hub cannot be asked about %s", self.name, exc_info=True)
            if not remembered.is_file():
                return "unknown"
            log.info("the hub cannot be asked about %s; using the version seen last", self.name)
            return remembered.read_text(encoding="utf-8")
        try:
            write_atomically(remembered, commit)
        except UserError as error:
            log.debug("could not remember the commit of %s: %s", self.name, error)
        return commit


class SavedDataset(HubSource):
    """A folder that `save_to_disk` of the datasets library wrote: a Dataset, or one split of a DatasetDict.

    Raises UserError as HubSource, and for a split that is not there.
    """

    def __init__(self, folder: str | os.PathLike[str], split: str = "train", text_column: str = "text") -> None:
        super().__init__(os.fspath(folder), split, text_column)
        self.folder = Path(folder).expanduser()
        if (self.folder / SPLITS).is_file():
            splits = read_json(self.folder / SPLITS)["splits"]
            if split not in splits:
                raise UserError(
                    f"the dataset in {folder} has no split '{split}'. Possible: data.split={', '.join(splits)}."
                )
            self.folder /= split

    def describe(self) -> str:
        return f"dataset saved in {self.folder}"

    def fingerprint(self) -> str:
        return hashlib.sha256(f"saved {self.text_column} {_folder_version(self.folder)}".encode()).hexdigest()

    def approximate_bytes(self) -> int | None:
        return sum(path.stat().st_size for path in self.folder.glob("*.arrow")) or None

    def _load(self) -> Any:
        if self._rows is None:
            self._rows = datasets_library().load_from_disk(str(self.folder))
        return self._rows


def is_saved_dataset(folder: str | os.PathLike[str]) -> bool:
    """Whether `save_to_disk` wrote this folder, by the names of its files."""
    folder = Path(folder).expanduser()
    return (folder / SPLITS).is_file() or all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def datasets_library() -> ModuleType:
    """Hugging Face's `datasets`. UserError where it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data from the Hugging Face hub needs `datasets`; install it with: pip install 'flashtrain[hub]'"
        ) from error
    return datasets


def _ask_hub(name: str, revision: str | None) -> str:
    work_offline_where_unreachable()
    import huggingface_hub  # comes with tokenizers; imported here since it is slow

    info = huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
    return str(info.sha)


def _folder_version(folder: Path) -> str:
    return hash_of_contents(folder, sorted(path for path in folder.rglob("*") if path.is_file()))
