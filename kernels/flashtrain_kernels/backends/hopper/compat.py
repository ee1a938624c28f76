"""What differs between releases of Triton, in one place."""

import contextlib
import inspect
from typing import Any

from triton.backends.nvidia import driver


def remember_maps(compiled: Any) -> None:
    """Let a compiled kernel encode the TMA map of a descriptor object once and not at every launch (6 us each).

    Triton's launcher is a closure around the one that wants encoded maps. Where a release builds it otherwise, launches
    stay as they are.
    """
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        inner = compiled.run.launch
        names = inspect.getclosurevars(inner).nonlocals
        launcher, indices, metas = names["launcher"], sorted(names["tensordesc_indices"]), names["tensordesc_meta"]
        encode, ordinary = driver.make_tensordesc_arg, getattr(driver, "_BASE_ARGS_FORMAT_LEN", None)
        meta_of = dict(zip(indices, metas, strict=True))

        def expand(args: Any) -> list[Any]:
            found: list[Any] = []
            for index, arg in enumerate(args):
                if index not in meta_of:
                    found.append(arg)
                    continue
                if not hasattr(arg, "encoded"):
                    arg.encoded = encode(arg, meta_of[index])
                found.extend(arg.encoded)
            return found

        def launch_flat(*args: Any) -> Any:  # 3.6: the kernel's arguments follow the launcher's own
            return launcher(*args[:ordinary], *expand(args[ordinary:]))

        def launch_nested(*args: Any) -> Any:  # 3.7: they come as one tuple
            return launcher(*args[:-1], expand(args[-1]))

        compiled.run.launch = launch_nested if ordinary is None else launch_flat
