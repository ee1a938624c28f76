"""Makes Triton's interpreter five times quicker and changes no result. Imported by conftest.py where it interprets.

When a kernel is launched, Triton replaces the functions of its language by interpreted ones, and tries to do so again
at every call of a function within the kernel, looking through the whole language for what there is to replace. And it
computes each integer operation twice, once in 64 bits to see whether 32 overflow, but forgets the answer, as the
interpreter has no debug mode that would read it.
"""

from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter

_replace_language = interpreter._patch_lang


def _replace_once(fn):
    """What the launch replaced, it will put back: there is nothing to add to that within the kernel."""
    done = not (tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load))
    return interpreter._LangPatchScope() if done else _replace_language(fn)


if hasattr(interpreter, "_LangPatchScope"):  # another release may do all this in other ways
    interpreter._patch_lang = _replace_once
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
