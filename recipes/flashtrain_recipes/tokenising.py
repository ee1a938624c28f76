"""Tokenising speed: flashtrain's token file against the tokenizers library's
encode_batch, in turns.

    python -m flashtrain_recipes.tokenising [ROUNDS] [FILE]

Both encode the source of Python's standard library with the same BPE, on all cores. The library
gets all texts in memory; flashtrain reads them from disk, encodes them and writes its token file.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

from flashtrain.data.bpe import BPETokenizer
from flashtrain.data.sources import StandardLibrarySource
from flashtrain.data.token_cache import open_or_build
from flashtrain.report.rows import write_result

VOCABULARY = 32_768
TRAINED_ON = 500  # documents


def main(rounds: int = 7, path: str | None = None) -> None:
    """Print the tokens per second of each round, and write a result file to
    `path` where it is given."""
    source = StandardLibrarySource()
    texts = list(source.documents())
    size = sum(len(text.encode()) for text in texts)
    tokenizer = BPETokenizer.train(texts[:TRAINED_ON], VOCABULARY)
    rows, ratios = [], []
    for number in range(rounds):
        library = tokenizer.library_form()  # anew each time: its words are cached
        begin = time.perf_counter()
        tokens = sum(len(found.ids) for found in library.encode_batch(texts)) + len(texts)
        theirs = time.perf_counter() - begin
        with tempfile.TemporaryDirectory() as folder:
            fresh = BPETokenizer(tokenizer.library_form())
            begin = time.perf_counter()
            cache = open_or_build(source, fresh, folder)
            ours = time.perf_counter() - begin
        for name, seconds, count in (
            ("encode_batch", theirs, tokens),
            ("flashtrain", ours, len(cache.tokens)),
        ):
            rows.append(
                {
                    "implementation": name,
                    "round": number,
                    "text_mb": round(size / 1e6, 1),
                    "tokens": count,
                    "seconds": round(seconds, 3),
                    "tokens_per_second": round(count / seconds),
                }
            )
        ratios.append(len(cache.tokens) / ours / (tokens / theirs))
        print(
            f"round {number}: "
            f"encode_batch {tokens / theirs:,.0f} tokens/s, flashtrain {tokens / ours:,.0f}"
        )
    ratio = statistics.median(ratios)
    print(f"flashtrain over encode_batch, the median of {rounds} rounds: {ratio:.2f}")
    if path is not None:
        command = "python -m flashtrain_recipes.tokenising  # beside other programs"
        write_result(path, "tokenising", command, rows)


if __name__ == "__main__":
    main(*(int(word) if word.isdecimal() else word for word in sys.argv[1:]))  # type: ignore[arg-type]
