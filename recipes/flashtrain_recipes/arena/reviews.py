"""The Arena's task Text: whether a film review (IMDB; Maas et al. 2011) is favourable.
It is read byte by byte."""

from __future__ import annotations

from pathlib import Path

from flashtrain.data.labelled_rows import SUFFIXES, Columns, Row, dataset_rows, file_rows
from flashtrain.data.loader import epoch_order
from flashtrain.data.sequences import SequenceShape
from flashtrain.data.split_names import split_named
from flashtrain.errors import UserError
from flashtrain_recipes.arena.byte_sequences import ByteSequences, FileSource, with_held_out
from flashtrain_recipes.arena.sequence_samples import Sequences

LENGTH = 4096  # the Arena's
HELD_OUT = 2000  # training reviews that validate: the data set has no split for it
_COLUMNS = Columns(labels="label")
_SENTIMENTS = {"neg": 0, "pos": 1, "0": 0, "1": 1}


class Reviews(FileSource):
    """Film reviews with their labels, 0 (unfavourable) or 1.

    Args:
        path: the folder aclImdb (train/pos, train/neg, test/pos, test/neg, a .txt a review), or one
            with train*.jsonl and test*.jsonl (or .parquet), rows with `text` and `label` (0 or 1).
        name: instead of path, a dataset that `datasets` loads, with such rows,
            such as stanfordnlp/imdb.
        length: the most bytes that are read of a review; None: 4,096.
        validation: how many training reviews are held out for validation; None: 2,000.
        seed: decides which reviews are held out.
        fixed: whether every batch is padded to `length` (SequenceSamples).
    """

    needs = (
        "sequence.data=text is read from disk: sequence.path=FOLDER with aclImdb (train/pos, ...) "
        "or train.jsonl and test.jsonl, or sequence.name=stanfordnlp/imdb through `datasets`."
    )

    def __init__(
        self,
        path: str | Path | None,
        name: str | None = None,
        *,
        length: int | None = None,
        validation: int | None = None,
        seed: int = 0,
        fixed: bool = False,
    ) -> None:
        super().__init__(path, name)
        self.length, self.seed, self.fixed = length or LENGTH, seed, fixed
        self.validation = HELD_OUT if validation is None else validation

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=2, length=self.length)

    def describe(self) -> str:
        return f"film reviews in {self.where}, up to {self.length:,} bytes"

    def read(self, part: str) -> dict[str, Sequences]:
        of_file = "test" if part == "test" else "train"
        found = ByteSequences(self.length)
        for row in self._rows(of_file):
            label = _SENTIMENTS.get(" ".join(row.labels))
            if label is None:
                raise UserError(
                    f"{row.where}: "
                    f"the label {row.labels} is neither 0 (unfavourable) nor 1 (favourable)."
                )
            found.add(label, str(row.text))
        if of_file == "test":
            return {"test": _shuffled(found.finish())}
        parts = with_held_out(found.finish(), self.validation, self.seed)
        return {**parts, "validation": _shuffled(parts["validation"])}

    def _rows(self, part: str) -> list[Row]:
        given = self.given()
        if isinstance(given, str):
            return dataset_rows(given, None, _COLUMNS)[part]
        inner = given / "aclImdb" if (given / "aclImdb").is_dir() else given
        reviews = [
            path for name in ("neg", "pos") for path in sorted((inner / part / name).glob("*.txt"))
        ]
        if reviews:
            return [
                Row(path.read_bytes().decode(errors="replace"), [path.parent.name], str(path))
                for path in reviews
            ]
        tables = [path for path in sorted(given.iterdir()) if path.name.endswith(SUFFIXES)]
        tables = [path for path in tables if split_named(Path(path.name)) == part]
        if not tables:
            raise UserError(
                f"sequence.path={given} has no {part} reviews: expected {part}/pos and {part}/neg "
                f"with .txt files, or {part}.jsonl or .parquet."
            )
        return [row for table in tables for row in file_rows(table, _COLUMNS)]


def _shuffled(part: Sequences) -> Sequences:
    # in one random order, so that the first rows are of both kinds
    return part.chosen(epoch_order(len(part.labels), 0, 9))
