"""What the README says works: its Python is run, its tables are the result files'."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtrain.report.readme import check_tables

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_block(marker: str) -> str:
    """The Python code that follows a marker comment in the README."""
    found = re.search(rf"<!-- {marker} -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    assert found, f"README has no Python block marked {marker}"
    return found[1]


def test_the_lightning_script_trains_without_hydra(tmp_path, text_folder, monkeypatch) -> None:
    code = python_block("lightning script")
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
    exec(python_block("attention module"), variables)
    assert variables["y"].shape == variables["x"].shape  # type: ignore[attr-defined]


def test_the_attention_mask_of_the_readme_keeps_documents_apart() -> None:
    variables: dict[str, Any] = {}
    exec(python_block("attention mask"), variables)
    attention, x, documents = variables["attention"].eval(), variables["x"], variables["documents"]
    together = attention(x, mask=variables["masks"].document(documents, causal=True))
    torch.testing.assert_close(together[:, 40:80], attention(x[:, 40:80]), atol=1e-5, rtol=0)


def test_the_hugging_face_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    exec(python_block("hugging face"), {})
    assert "routed 1 calls" in capsys.readouterr().out


def test_the_quick_start_is_two_commands() -> None:
    quick_start = README.split("<!-- quick start -->")[1].split("<!-- end quick start -->")[0]
    assert len(re.findall(r"^python3 ", quick_start, flags=re.MULTILINE)) == 2


RESULTS = ROOT / "recipes" / "results"


@pytest.mark.parametrize("page", [ROOT / "README.md", RESULTS / "README.md"], ids=["readme", "results"])
def test_every_table_is_drawn_from_its_result_file(page) -> None:
    assert check_tables(page, RESULTS)  # the names of the tables; raises for others


def test_every_result_file_is_shown_somewhere() -> None:
    pages = [ROOT / "README.md", RESULTS / "README.md", ROOT / "kernels" / "OPTIMISATION.md"]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [path.name for path in RESULTS.glob("*.json") if path.stem not in shown] == []


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_every_link_into_the_repository_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_so_does_every_link_of_the_page_of_results() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (RESULTS / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if not (RESULTS / link).exists()] == []
