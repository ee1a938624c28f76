"""report.html: what it shows of a run, a sweep and a study."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from tiny_runs import TinyRuns

from flashtrain.report.__main__ import main
from flashtrain.report.curves import curves
from flashtrain.report.page import write_page
from flashtrain.report.sweep import report_sweep

EVIL = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'\"&${x}"
)
ROW = {
    "recipe": "gpt2",
    "model": "gpt2-demo",
    "status": "finished",
    "context": 32,
    "train_loss": 3.25,
    "tokens_per_second": 4321.0,
    "device": "a GPU",
    "overrides": "recipe=gpt2 context=32",
}
SHARED = {
    "lr-AdamW/pg1": 0.001,
    "lr-AdamW/pg2": 0.001,
    "tokens_per_second": 1000,
    "peak_memory_gib": 0.5,
}
METRICS = [
    {"step": 0, "train_loss": 5.5, "gradient_norm": 2.5, **SHARED},
    {"step": 1, "train_loss": 5.0, "gradient_norm": 2.0, **SHARED},
    {
        "step": 2,
        "train_loss": 4.5,
        "gradient_norm": float("nan"),
        **SHARED,
        "validation_loss": 4.75,
    },
]


class Page(HTMLParser):
    """A page's tags with their attributes, and its texts by the tag that they stand in."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attributes}))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._inside == "h2" and data.strip():
            self.headings.append(data)

    def values(self, attribute: str) -> list[str]:
        return [own[attribute] for _, own in self.tags if attribute in own]


def a_run(folder: Path, row: dict[str, object] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(ROW if row is None else row))
    (folder / "config.yaml").write_text(
        "recipe: gpt2\ncontext: 32\nseed: 0\ntrainer:\n  steps: 3\ndata:\n  path: null\n"
    )
    write_metrics(folder, METRICS)
    (folder / "sample.txt").write_text("def main():\n    return <what>\n")
    return folder


def write_metrics(folder: Path, rows: Iterable[dict[str, float]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "metrics.jsonl"


def a_picture(path: Path) -> None:
    Image.new("RGB", (4, 4), "red").save(path, format="PNG")


def test_a_runs_page_has_its_row_curves_sample_settings_and_files(tmp_path: Path) -> None:
    page = Page(write_page(a_run(tmp_path / "run")))
    assert page.headings == ["Curves", "What it writes", "Settings", "Files"]
    for text in (
        "gpt2: gpt2-demo",
        "3.250",
        "4,321",
        "python -m flashtrain recipe=gpt2 context=32",
    ):
        assert text in page.texts, text
    assert "def main():\n    return <what>\n" in page.texts
    assert (tmp_path / "run" / "config.yaml").read_text() in page.texts
    names = [href.removeprefix("./") for href in page.values("href")]
    assert names == ["config.yaml", "metrics.jsonl", "sample.txt", "summary.json"]
    assert all((tmp_path / "run" / name).exists() for name in names)


def test_the_curves_are_those_of_training(tmp_path: Path) -> None:
    drawn = dict(curves(a_run(tmp_path) / "metrics.jsonl"))
    assert list(drawn) == [
        "loss (nats)",
        "learning rate",
        "gradient norm",
        "tokens/s",
        "peak memory (GiB)",
    ]
    # Steps as a user counts them, each named.
    for text in ("train loss", "validation loss", ">1<", ">2<", ">3<"):
        assert text in drawn["loss (nats)"], text
    assert "pg2" not in drawn["learning rate"]  # the same course is drawn once


def test_a_long_course_keeps_its_peaks_and_is_small(tmp_path: Path) -> None:
    rows = [
        {"step": n, "train_loss": 3.0 if n != 7777 else 99.0, "tokens_per_second": 1 + n % 3}
        for n in range(20000)
    ]
    drawn = dict(curves(write_metrics(tmp_path, rows)))
    assert ">100<" in drawn["loss (nats)"]  # the axis reaches the peak
    assert all(len(svg) < 60_000 for svg in drawn.values())


def test_a_sweep_has_its_figure_and_its_table_side_by_side_with_a_link_to_each_job(
    tmp_path: Path,
) -> None:
    for number, context in enumerate((16, 32)):
        losses = {"context": context, "validation_loss": 3.5 - number}  # the best job comes first
        write_page(a_run(tmp_path / f"{number:02d}", {**ROW, **losses}))
    failed = {"recipe": "gpt2", "context": 64, "status": "out of memory", "error": f"CUDA {EVIL}"}
    a_run(tmp_path / "02", failed)
    report_sweep(tmp_path)
    page = Page(write_page(tmp_path))
    assert page.headings == ["Results", "Files"]
    assert [src[:22] for src in page.values("src")] == ["data:image/png;base64,"]
    assert page.values("href")[:2] == ["./01/report.html", "./00/report.html"]
    assert {"16", "32", "64", "out of memory"} <= set(page.texts)


def test_a_study_shows_its_rows_figures_and_trainings(tmp_path: Path) -> None:
    study = a_run(tmp_path / "study", {**ROW, "best_context": 64})
    (study / "metrics.jsonl").unlink()
    for context in (16, 64):
        a_run(study / f"context-{context}", {**ROW, "context": context})
    (study / "wandb").mkdir()
    rows = [{"context": 16, "perplexity": 12.5}, {"context": 64, "perplexity": 11.5}]
    result = {
        "recipe": "gpt2-long",
        "command": "c",
        "date": "2026-11-21",
        "device": "d",
        "versions": {},
        "rows": rows,
    }
    (study / "result.json").write_text(json.dumps(result))
    for name in ("lengths.png", "positions.png"):
        a_picture(study / name)
    page = Page(write_page(study))
    assert {"12.50", "11.50", "3.250"} <= set(page.texts)
    assert page.values("alt") == ["lengths.png", "positions.png"]


def test_what_files_say_is_text_and_never_the_page(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "run", {**dict.fromkeys(ROW, EVIL), EVIL: EVIL, "error": EVIL, "train_loss": 3.0}
    )
    (run / "config.yaml").write_text(
        json.dumps({"recipe": EVIL, EVIL: {EVIL: EVIL}, "data": {"path": EVIL}})
    )
    (run / "sample.txt").write_text(f"</pre>{EVIL}")
    a_picture(run / "x' onerror='alert(1).png")
    page = Page(write_page(run))
    assert f"</pre>{EVIL}" in page.texts
    assert "script" not in {tag for tag, _ in page.tags}
    assert not page.values("onerror")


def test_a_run_ends_with_its_page_and_the_report_writes_it_anew(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "finished"  # as it was called where it was made
    shutil.copytree(trained, run)
    page = Page(run / "report.html")
    assert page.headings == ["Curves", "What it writes", "Settings", "Files"]
    assert sum(source.startswith("data:image/svg+xml") for source in page.values("src")) == 5
    assert (run / "sample.txt").read_text() in page.texts
    (run / "report.html").unlink()
    assert main([str(run)]) == 0
    assert f"wrote {run / 'report.html'}" in capsys.readouterr().err
    # Other tests share the trained folder: a file of theirs may be listed too.
    anew = Page(run / "report.html")
    assert (anew.headings, anew.values("src")) == (page.headings, page.values("src"))
    assert (run / "sample.txt").read_text() in anew.texts


def test_a_page_that_cannot_be_written_is_no_failure_of_the_run(
    tiny_runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no fonts\nfound")

    monkeypatch.setattr("flashtrain.report.page.write_page", failing)
    with caplog.at_level("INFO"):
        status, folder = tiny_runs.run("no-page", "trainer.steps=1")
    assert status == 0
    assert "no report.html: no fonts" in caplog.text
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
