"""How many files a reader follows from flash_attn_func to a kernel's launch, and how
little a repeated call runs."""

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch

import flashtrain_kernels as fk
from flashtrain_kernels import attend, dispatch
from flashtrain_kernels.backends.hopper import backend as hopper

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
HOME = Path(fk.__file__).parent


def file_of(frame) -> str | None:
    """Our file that a frame runs a function of; None for others' and for a
    module or class being made."""
    path = Path(frame.f_code.co_filename)
    made = not frame.f_code.co_flags & 2  # CO_NEWLOCALS: a function's
    return None if made or HOME not in path.parents else str(path.relative_to(HOME))


def is_of_a_value(frame) -> bool:
    """Whether a frame is of a value's own method, as options.rich is."""
    own = frame.f_locals.get("self")
    return isinstance(own, tuple) or (
        dataclasses.is_dataclass(own) and own.__dataclass_params__.frozen
    )


def files_passed(call, launch) -> list[str]:
    """The files of ours that a reader follows through `call` up to the function
    `launch` (by its code).

    They are those on the stack at the launch, and those that one of these asks and that then ask
    another file in turn; a file that answers by itself is no stop. Functions of torch in between do
    not count, nor do methods of a value.
    """
    stacks: dict[tuple[str, ...], bool] = {}

    def note(frame, event, _):
        launches = frame.f_code is launch
        if event != "call" or True in stacks.values():
            return
        if not launches and (file_of(frame) is None or is_of_a_value(frame)):
            return
        found, each = [], frame
        while each is not None:
            found += [file_of(each)] if file_of(each) is not None else []
            each = each.f_back
        stacks[tuple(name for name, _ in itertools.groupby(reversed(found)))] = launches

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    line = [*dict.fromkeys(*[stack for stack, launches in stacks.items() if launches])]
    asked = {}
    for stack in stacks:
        first = next((i for i, name in enumerate(stack) if name not in line), len(stack))
        if first + 1 < len(stack):
            asked[stack[first]] = None
    return [*line, *asked]


def launched(_launch) -> None:
    """In place of a kernel's launch, for which there is no GPU."""


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_a_call_passes_eight_files_on_its_way_to_the_launch(backend, monkeypatch):
    from flashtrain_kernels.backends.portable.launch import Launch

    monkeypatch.setattr(dispatch, "implementation_for", lambda device_type: "portable")
    monkeypatch.setattr(dispatch, "runs_kernels", lambda device: True)
    monkeypatch.setattr(
        hopper, "unavailable", lambda device: None if backend == "hopper" else "no such GPU"
    )

    monkeypatch.setattr(Launch, "start", launched)
    attend.CHECKED.clear()
    q, k, v = (torch.randn(1, 64, 2, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    passed = files_passed(lambda: fk.flash_attn_func(q, k, v, causal=True), launched.__code__)
    assert passed == [
        "flash_attn.py", "attend.py", "eager.py", "dispatch.py", f"backends/{backend}/backend.py",
        "backends/portable/launch.py", "arguments.py", f"backends/{backend}/forward.py",
    ]  # fmt: skip
