"""What torch.compile is told of our functions, without importing it: that is as long as importing torch itself."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)


def constant(function: Function) -> Function:
    """torch.compiler.assume_constant_result: torch.compile calls the function while it traces, and keeps the result."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
