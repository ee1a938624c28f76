"""Makes Triton's interpreter ten times quicker and changes no result. Imported by
conftest.py where it interprets.

When a kernel is launched, Triton replaces the functions of its language by interpreted ones, and
tries to do so again at every call of a function within the kernel, looking through the whole
language for what there is to replace. And it computes each integer operation twice, once in 64 bits
to see whether 32 overflow, but forgets the answer, as the interpreter has no debug mode that would
read it. And it describes each block anew, whose type and shape are among few.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_replace_language = interpreter._patch_lang


def _replace_once(fn):
    """What the launch replaced, it will put back: there is nothing to add to
    that within the kernel."""
    done = not (tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load))
    return interpreter._LangPatchScope() if done else _replace_language(fn)


class _KnownBlocks:
    """What Triton finds out of a block's type and shape, kept for the next
    block that has the same."""

    def __init__(self) -> None:
        self.describe_type = tl.core.block_type.__init__
        self.describe_tensor = tl.core.tensor.__init__
        self.types: dict[tuple[int, tuple[int, ...]], tuple[tl.dtype, dict[str, Any]]] = {}
        self.shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_type(self, made: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        # The types of pointers cannot be hashed. What is kept with a number holds
        # the object that has it.
        key = id(element_ty), tuple([getattr(size, "value", size) for size in shape])
        known = self.types.get(key)
        if known is None:
            self.describe_type(made, element_ty, shape)
            self.types[key] = element_ty, dict(made.__dict__)
        else:
            made.__dict__.update(known[1])

    def init_tensor(self, made: tl.tensor, handle: Any, type: tl.dtype) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = self.shapes.get(sizes)
        if known is None:
            self.describe_tensor(made, handle, type)
            self.shapes[sizes] = made.shape, made.numel
        else:
            made.handle, made.type, made.dtype = handle, type, type.scalar
            made.shape, made.numel = known


def _keep_known() -> None:
    blocks, numpy_of = _KnownBlocks(), {}
    find_numpy_dtype = interpreter._get_np_dtype

    def numpy_dtype(dtype: tl.dtype) -> np.dtype:
        # Triton writes down the whole table of types at each question.
        if isinstance(dtype, tl.pointer_type | tl.block_type):
            return find_numpy_dtype(dtype)
        if dtype not in numpy_of:
            numpy_of[dtype] = find_numpy_dtype(dtype)
        return numpy_of[dtype]

    tl.core.block_type.__init__ = lambda self, element_ty, shape: blocks.init_type(
        self, element_ty, shape
    )
    tl.core.tensor.__init__ = lambda self, handle, type: blocks.init_tensor(self, handle, type)
    interpreter._get_np_dtype = numpy_dtype


if hasattr(tl.core.tuple, "values") or hasattr(interpreter, "_get_np_dtype"):
    _keep_known()
if hasattr(interpreter, "_LangPatchScope"):  # another release may do all this in other ways
    interpreter._patch_lang = _replace_once
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
