"""Makes attention_cases.py importable by name (the folder's own name, kernels, belongs to a package of other people),
and runs every test on a GPU twice: with calls going where dispatch sends them, and with the portable kernels alone."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

PATHS = ("dispatched", "portable")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("gpu") is not None:
        metafunc.fixturenames.append("path")
        metafunc.parametrize("path", PATHS, indirect=True)


@pytest.fixture
def path(request: pytest.FixtureRequest):
    """Where calls go. "dispatched" on a GPU without Hopper kernels would be the same again."""
    from flashtrain_kernels import dispatch, fast_path

    if request.param == "portable":
        with dispatch.force("portable"):
            yield "portable"
        return
    import torch

    reason = fast_path.unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"no Hopper kernels here: {reason}")
    yield "hopper"
