"""The two wheels: what they carry, and that what is installed from them stands on its own."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tiny_runs import TINY

from flashtrain_kernels.recurrences import fla

CHECKOUT = Path(__file__).resolve().parents[1]
PROJECTS = {"flashtrain": CHECKOUT, "flashtrain_kernels": CHECKOUT / "kernels"}
PACKAGES = {  # of a wheel: the folder that holds each
    "flashtrain": {CHECKOUT: "flashtrain", CHECKOUT / "recipes": "flashtrain_recipes"},
    "flashtrain_kernels": {CHECKOUT / "kernels": "flashtrain_kernels"},
}

FIND = """
from flashtrain.files.shipped import conf_folder, recipe_files, recipes_folder
print(conf_folder())
print(recipes_folder())
print(" ".join(recipe_files()))
"""

# Python reads .pth files in site folders only, not in those on PYTHONPATH. What they add comes
# first here, as this environment may have a flashtrain of its own.
AS_SITE_FOLDER = """
import site, sys
before = list(sys.path)
site.addsitedir({folder!r})
sys.path[:] = [path for path in sys.path if path not in before] + before
"""

LIST_LOADED = """
import sys
import flashtrain_kernels
strangers = {"flashtrain", "lightning", "pytorch_lightning", "hydra", "omegaconf", "transformers",
             "wandb"}
print(flashtrain_kernels.__file__)
print(" ".join(sorted(strangers & {name.partition(".")[0] for name in sys.modules})))
"""


def test_the_versions_for_kernels_of_hybrids_are_those_that_the_extra_asks_for():
    """And that fla-core takes on Hopper."""
    lines = (CHECKOUT / "constraints-linear.txt").read_text().splitlines()
    pinned = dict(line.partition(";")[0].split("==") for line in lines if "==" in line)
    (asked,) = re.findall(r"^linear = (.*)$", (CHECKOUT / "pyproject.toml").read_text(), re.M)
    for one in map(Requirement, ast.literal_eval(asked)):
        assert one.specifier.contains(pinned[one.name])
    assert fla._numbers(pinned["triton"]) >= fla.RIGHT_FROM
    assert "-c constraints-all.txt" in lines


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, built from the checkout with the build backend of this
    environment (no network)."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS.values():
        run(
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            folder,
            project,
            cwd=folder,
        )
    return {name: next(folder.glob(f"{name}-*.whl")) for name in PROJECTS}


@pytest.fixture(scope="session")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both wheels installed into it and nothing else."""
    return pip_install(tmp_path_factory.mktemp("installed"), *wheels.values())


def run(*command: str | Path, cwd: Path, pythonpath: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.pop("FLASHTRAIN_RECIPES", None)
    if pythonpath:
        environment["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip_install(folder: Path, *wheels: Path) -> Path:
    folder.mkdir(exist_ok=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    run(*pip, "--target", folder, *wheels, cwd=folder)
    return folder


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def shipped_settings() -> set[str]:
    """The checkout's configuration and recipes, under the names that they have
    in flashtrain's wheel."""
    conf = (file for file in CHECKOUT.glob("conf/**/*") if file.is_file())
    files = [*conf, *CHECKOUT.glob("recipes/*.yaml")]
    return {f"flashtrain/{file.relative_to(CHECKOUT).as_posix()}" for file in files}


@pytest.mark.integration
def test_flashtrains_wheel_carries_exactly_the_checkouts_configuration_and_recipes(
    wheels: dict[str, Path],
):
    assert {
        name for name in contents(wheels["flashtrain"]) if name.endswith((".yaml", ".sbatch"))
    } == shipped_settings()


@pytest.mark.integration
@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_carries_every_module_of_its_package(wheels: dict[str, Path], name: str):
    modules = {
        file.relative_to(root).as_posix()
        for root, package in PACKAGES[name].items()
        for file in root.glob(f"{package}/**/*.py")
    }
    assert modules - contents(wheels[name]) == set()


@pytest.mark.integration
@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_carries_its_package_and_nothing_beside_it(wheels: dict[str, Path], name: str):
    files = contents(wheels[name])
    metadata = f"{name}-{version(wheels[name])}.dist-info"
    assert {file.partition("/")[0] for file in files} == {*PACKAGES[name].values(), metadata}
    assert [
        file for file in files if "/results/" in file or "/tests/" in file or "__pycache__" in file
    ] == []


@pytest.mark.integration
def test_an_installed_wheel_finds_its_own_configuration_and_recipes(
    installed: Path, tmp_path: Path
):
    conf, recipes, *names = run(
        sys.executable, "-c", FIND, cwd=tmp_path, pythonpath=installed
    ).split()
    assert Path(conf) == installed / "flashtrain" / "conf"
    assert Path(recipes) == installed / "flashtrain" / "recipes"
    assert set(names) == {file.stem for file in CHECKOUT.glob("recipes/*.yaml")}


@pytest.mark.integration
def test_an_editable_install_finds_those_of_the_checkout(tmp_path: Path):
    code = "import hatchling.build, sys; print(hatchling.build.build_editable(sys.argv[1]))"
    wheel = run(sys.executable, "-c", code, tmp_path, cwd=CHECKOUT).split()[-1]
    folder = pip_install(tmp_path / "editable", tmp_path / wheel)
    found = run(
        sys.executable, "-c", f"{AS_SITE_FOLDER.format(folder=str(folder))}{FIND}", cwd=tmp_path
    )
    assert found.split()[:2] == [str(CHECKOUT / "conf"), str(CHECKOUT / "recipes")]
    where = (
        f"{AS_SITE_FOLDER.format(folder=str(folder))}import flashtrain_recipes; "
        "print(flashtrain_recipes.__file__)"
    )
    experiments = run(sys.executable, "-c", where, cwd=tmp_path).strip()
    # And no copy of them.
    assert Path(experiments) == CHECKOUT / "recipes" / "flashtrain_recipes" / "__init__.py"


@pytest.mark.integration
def test_the_kernels_import_without_flashtrain_and_its_dependencies(
    wheels: dict[str, Path], tmp_path: Path
):
    alone = pip_install(tmp_path / "alone", wheels["flashtrain_kernels"])
    file, *strangers = run(
        sys.executable, "-c", LIST_LOADED, cwd=tmp_path, pythonpath=alone
    ).split()
    assert Path(file).is_relative_to(alone)
    assert strangers == []


@pytest.mark.integration
def test_the_kernels_need_torch_and_triton_only(wheels: dict[str, Path]):
    with zipfile.ZipFile(wheels["flashtrain_kernels"]) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode("utf-8").splitlines()
    needed = [
        line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")
    ]
    assert sorted(line.split(">")[0] for line in needed) == ["torch", "triton"]
    assert "Linux" in next(line for line in needed if line.startswith("triton"))


def version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


@pytest.mark.integration
@pytest.mark.slow  # .ci/run's first command is the same from a clone
def test_the_installed_wheels_train_from_any_folder(
    installed: Path, text_folder: Path, tmp_path: Path
):
    tiny = [word for word in TINY if not word.startswith("trainer.steps=")]
    words = [f"data.path={text_folder}", f"data.cache_dir={tmp_path / 'cache'}", *tiny]
    said = run(
        sys.executable,
        "-m",
        "flashtrain",
        *words,
        "trainer.steps=1",
        cwd=tmp_path,
        pythonpath=installed,
    )
    assert "finished gpt2-demo" in said
    assert list(tmp_path.glob("runs/gpt2/*/summary.json"))
