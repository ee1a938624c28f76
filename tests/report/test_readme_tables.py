from __future__ import annotations

from pathlib import Path

import pytest

from flashtrain.errors import UserError
from flashtrain.report.readme import check_tables, insert_tables
from flashtrain.report.rows import write_result

README = """# Title

<!-- table: speed columns=context,tokens_per_second -->
typed in, and wrong
<!-- end table -->

text between

<!-- table: other -->
<!-- end table -->
the end
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name in ("speed", "other"):
        rows = [{"model": name, "context": 1024, "tokens_per_second": 412345.0}]
        write_result(
            tmp_path / f"{name}.json",
            "gpt2",
            "python -m flashtrain recipe=gpt2",
            rows,
            "a GPU",
            {"torch": "2.13"},
        )
    return tmp_path


def readme(folder: Path, text: str = README) -> Path:
    file = folder / "README.md"
    file.write_text(text, encoding="utf-8")
    return file


def test_tables_are_drawn_between_their_markers_and_the_rest_is_left_alone(results: Path):
    file = readme(results)
    assert insert_tables(file, results) == ["speed", "other"]
    text = file.read_text(encoding="utf-8")
    assert "| context | tokens/s |\n| ---: | ---: |\n| 1,024 | 412,345 |\n\nMeasured " in text
    assert (
        text.count(
            " on a GPU.\n\n<details><summary>Command, versions</summary>\n\ntorch 2.13\n\n```bash\n"
        )
        == 2
    )
    assert (
        "\n"
        "```bash\n"
        "python -m flashtrain recipe=gpt2\n"
        "```\n"
        "\n"
        "</details>\n"
        "<!-- end table -->\n"
        "\n"
        "text between\n"
    ) in text
    assert text.startswith("# Title\n\n<!-- table: speed columns=context,tokens_per_second -->\n|")
    assert text.endswith("<!-- end table -->\nthe end\n")
    assert "typed in" not in text


def test_a_fold_has_one_command_a_line_and_words_that_are_no_command_in_no_block(tmp_path: Path):
    commands = {
        "A=1 python x 'y=[1,2]'; B=2 python x y=3": (
            "```bash\nA=1 python x 'y=[1,2]'\nB=2 python x y=3\n```"
        ),
        "attention(q, k, v); CUDA events around each": (
            "`attention(q, k, v); CUDA events around each`"
        ),
    }
    for command, shown in commands.items():
        write_result(
            tmp_path / "one.json", "gpt2", command, [{"context": 1024}], "a GPU", {"torch": "2.13"}
        )
        file = readme(tmp_path, "<!-- table: one command=details -->\n<!-- end table -->\n")
        insert_tables(file, tmp_path)
        assert f"torch 2.13\n\n{shown}" in file.read_text(encoding="utf-8")


def test_a_link_leads_to_the_heading_of_the_table_in_full_or_to_the_file(results: Path):
    readme(
        results, "# All\n\n## How fast, in tokens\n\n<!-- table: speed -->\n<!-- end table -->\n"
    )
    page = results / "guide" / "page.md"
    page.parent.mkdir()
    page.write_text(
        "".join(
            f"<!-- table: {one} command=link -->\n<!-- end table -->\n"
            for one in ("speed", "other")
        )
    )
    insert_tables(page, results)
    text = page.read_text(encoding="utf-8")
    assert (
        " on a GPU: [command, versions and all rows](../README.md#how-fast-in-tokens).\n"
        "<!-- end table -->"
    ) in text
    assert "[command, versions and all rows](../other.json)." in text
    assert check_tables(page, results) == ["speed", "other"]


def test_the_check_passes_after_an_insertion_and_names_what_has_changed_since(results: Path):
    file = readme(results)
    insert_tables(file, results)
    assert insert_tables(file, results) == []  # nothing is left to change
    assert check_tables(file, results) == ["speed", "other"]
    file.write_text(
        file.read_text(encoding="utf-8").replace("412,345", "500,000", 1), encoding="utf-8"
    )
    with pytest.raises(
        UserError, match=r"disagrees with the result files of: speed\. Run: .*--insert"
    ):
        check_tables(file, results)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "<!-- table: sped -->\n<!-- end table -->\n",
            "unknown result 'sped'. Did you mean 'speed'?",
        ),
        (
            "<!-- table: speed columns=contxt -->\n<!-- end table -->\n",
            "table speed: unknown column 'contxt'",
        ),
        (
            "<!-- table: speed colums=context -->\n<!-- end table -->\n",
            "unknown table option 'colums'",
        ),
        (
            "<!-- table: speed command=lnk -->\n<!-- end table -->\n",
            "unknown form of the command 'lnk'. Did you mean",
        ),
        ("<!-- table: speed -->\n", "no partner"),
        ("\n<!-- end table -->\n", "no partner"),
        ("<!-- table: a -->\n<!-- table: b -->\n<!-- end table -->\n", "no partner"),
        ("<!-- table: -->\n<!-- end table -->\n", "no partner"),
    ],
)
def test_a_wrong_marker_is_one_line_and_nothing_is_written(results: Path, text: str, said: str):
    good = "<!-- table: other -->\n<!-- end table -->\n"
    for whole in (text, text + good) if "end" in text else (text,):
        file = readme(results, whole)
        with pytest.raises(UserError) as caught:
            insert_tables(file, results)
        assert said in str(caught.value)
        assert file.read_text(encoding="utf-8") == whole
