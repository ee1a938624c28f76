"""Runs every test on a GPU twice: on the Hopper kernels wherever they can serve a call,
and on the portable ones."""

import os
import sys
from pathlib import Path

import pytest

# The modules of this folder and of the developer's tools are imported by their own names.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "kernels" / "dev")]
if os.environ.get("TRITON_INTERPRET") == "1":
    import quick_interpreter  # noqa: F401

PATHS = ("hopper", "portable")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that names its own path is run on that one."""
    named = any(mark.args[0] == "path" for mark in metafunc.definition.iter_markers("parametrize"))
    if metafunc.definition.get_closest_marker("gpu") is not None and not named:
        metafunc.parametrize("path", PATHS, indirect=True)


# autouse: pytest drops a fixture that is only parametrised and not asked for, and says nothing.
@pytest.fixture(autouse=True)
def path(request: pytest.FixtureRequest):
    """The kernels that calls of a GPU test are forced through. Skipped where there
    are none of that kind."""
    if not hasattr(request, "param"):
        yield None
        return
    import torch

    from flashtrain_kernels import dispatch
    from flashtrain_kernels.backends.hopper import backend as hopper

    with dispatch.force(request.param):
        if request.param == "hopper":
            reason = hopper.unavailable(torch.device("cuda"))
            if reason is not None:
                pytest.skip(f"no Hopper kernels here: {reason}")
        yield request.param


@pytest.fixture
def through_the_operators():
    """Calls on a CPU go through our operators, computed by the reference, and not to
    torch's own attention."""
    import torch

    from flashtrain_kernels import dispatch

    torch._dynamo.reset()
    with dispatch.force("reference"):
        yield
