"""Imports of flashtrain_kernels go one way: no circle, imports within functions included, and nothing of what stands on
the kernels."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "flashtrain_kernels"
FOLDER = Path(__file__).parents[2] / "kernels" / PACKAGE
ABOVE = {"flashtrain", "flashtrain_recipes", "lightning", "pytorch_lightning", "hydra", "omegaconf"}


def module_name(path: Path) -> str:
    parts = path.relative_to(FOLDER.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FOLDER.rglob("*.py")}


def import_nodes(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Every import of a module but those for type checkers alone, which never run."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        found += import_nodes(node)
    return found


def imported(name: str, path: Path) -> set[str]:
    """The absolute names that a module imports: a package's submodule where `from package import submodule` names one.

    That a submodule's import runs its package's __init__ first is no arrow: the package would otherwise be in a circle
    with all that it offers.
    """
    found: set[str] = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in import_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        submodules = {f"{source}.{alias.name}" for alias in node.names}
        found |= (submodules & MODULES.keys()) or {source}
        if not submodules <= MODULES.keys():
            found.add(source)
    return found


GRAPH = {name: imported(name, path) for name, path in MODULES.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, the first again at the end; none: an empty list."""
    try:
        TopologicalSorter({name: sources & graph.keys() for name, sources in graph.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_by_way_of_others():
    assert len(GRAPH) > 50
    assert sum(map(len, GRAPH.values())) > 200
    assert circle(GRAPH) == []


def test_a_circle_within_functions_would_be_found(tmp_path):
    one = tmp_path / "one.py"
    one.write_text("def f():\n    from .masks import mask\n")
    lazy = imported(f"{PACKAGE}.one", one)
    assert lazy == {f"{PACKAGE}.masks.mask"}
    assert len(circle({**GRAPH, f"{PACKAGE}.one": lazy, f"{PACKAGE}.masks.rows": {f"{PACKAGE}.one"}})) == 4
    one.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .masks import mask\n")
    assert imported(f"{PACKAGE}.one", one) == {"typing"}


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_the_kernels_know_nothing_that_stands_on_them(name):
    assert not {source.split(".")[0] for source in GRAPH[name]} & ABOVE
