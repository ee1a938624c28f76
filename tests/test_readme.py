"""What the README and the guide say works: their Python is run, their tables are the result
files', links lead on."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from published_commands import GUIDE, PAGES, ROOT, python_blocks

from flashtrain.report.readme import anchor_of, check_tables

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_lightning_script_trains_without_hydra(tmp_path, text_folder, monkeypatch) -> None:
    code = python_blocks()["lightning script"]
    for written, here in {
        '"stdlib"': repr(str(text_folder)),
        "context=1024": "context=32",
        '"124m"': '"demo"',
        "total_steps=500": "total_steps=2",
        "max_steps=500": "max_steps=2",
        '"bpe"': '"bytes"',
    }.items():
        assert written in code, written
        code = code.replace(written, here)
    script = tmp_path / "script.py"
    script.write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "cache"))
    variables = runpy.run_path(str(script))
    assert variables["trainer"].global_step == 2
    assert variables["throughput"].summary()["tokens_per_second"] > 0


def test_the_attention_module_of_the_readme_runs_on_its_own() -> None:
    variables: dict[str, object] = {}
    exec(python_blocks()["attention module"], variables)
    assert variables["y"].shape == variables["x"].shape  # type: ignore[attr-defined]


def test_the_attention_mask_of_the_readme_keeps_documents_apart() -> None:
    variables: dict[str, Any] = {}
    exec(python_blocks()["attention mask"], variables)
    attention, x, documents = variables["attention"].eval(), variables["x"], variables["documents"]
    together = attention(x, mask=variables["masks"].document(documents, causal=True))
    torch.testing.assert_close(together[:, 40:80], attention(x[:, 40:80]), atol=1e-5, rtol=0)


def test_the_hugging_face_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    exec(python_blocks()["hugging face"], {})
    assert "routed 1 calls" in capsys.readouterr().out


RESULTS = ROOT / "recipes" / "results"


@pytest.mark.parametrize("extra", ["hub", "low-bit", "tensorboard"])
def test_the_range_of_an_extra_ends_with_the_release_that_the_tests_passed_with(extra: str) -> None:
    pins = dict(
        re.findall(
            r"^([\w-]+)==([\d.]+)", (ROOT / "constraints-all.txt").read_text(), re.MULTILINE
        )[::-1]
    )
    ranges = re.search(
        rf"^{extra} = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    for needed in map(Requirement, re.findall(r'"(.*?)"', ranges[1])):
        major, minor, *_ = map(int, pins[needed.name].split("."))
        assert f"{major}.{minor}.99" in needed.specifier
        assert f"{major}.{minor + 1}.0" not in needed.specifier


def test_a_gpus_constraints_are_what_its_figures_were_measured_with() -> None:
    pins = "".join(
        (ROOT / name).read_text() for name in ("constraints-gpu.txt", "constraints-all.txt")
    )
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", pins, flags=re.MULTILINE))
    for path in RESULTS.glob("*.json"):
        versions = json.loads(path.read_text())["versions"]
        if "cuda" in versions and not path.stem.startswith("gpu-tests"):
            named = {name: version for name, version in versions.items() if name in pinned}
            assert named == {name: pinned[name] for name in named}, path.name


WITH_TABLES = [
    page for page in PAGES if "<!-- table: " in (ROOT / page).read_text(encoding="utf-8")
]


def test_the_pages_with_tables_are_found() -> None:
    assert {"README.md", "docs/results/benchmarks.md", "recipes/results/README.md"} <= set(
        WITH_TABLES
    )


@pytest.mark.parametrize("page", WITH_TABLES)
def test_every_table_is_drawn_from_its_result_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    # Raises for others.
    assert len(check_tables(ROOT / page, RESULTS)) == text.count("\n<!-- table: ")


def test_every_result_file_is_shown_somewhere() -> None:
    pages = [page for page in PAGES if page != "docs/results/files.md"]  # which lists them all
    shown = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    assert [path.name for path in RESULTS.glob("*.json") if path.stem not in shown] == []


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "SECURITY.md"])
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    text = re.sub(
        r"^```.*?^```",
        "",
        (ROOT / page).read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text)
    wrong = []
    for link, anchor in links:
        target = (ROOT / page).parent / link if link else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{link}#{anchor}")
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """What a link may name of a page: its headings, as GitHub and mkdocs spell them, and
    names of mkdocstrings."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {anchor_of(heading) for heading in headings} | set(
        re.findall(r"^::: (.+)$", text, flags=re.MULTILINE)
    )


def test_the_readme_is_short_and_reports_early_what_it_cannot_do() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert lines.index("## What it cannot do") < 30
    assert len(re.findall(r"^<!-- table: ", README, flags=re.MULTILINE)) <= 2
    assert len(re.findall(r"^!\[", README, flags=re.MULTILINE)) == 1


@pytest.mark.parametrize("page", GUIDE)
def test_no_line_of_a_page_is_too_long_to_edit(page: str) -> None:
    text = re.sub(
        r"^```text\n.*?^```",
        "",
        (ROOT / page).read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    assert [
        line for line in text.splitlines() if len(line) > 160 and not line.startswith("|")
    ] == []


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [
        page for page in GUIDE if page.startswith("docs/") and f": {page[5:]}\n" not in menu
    ] == []
