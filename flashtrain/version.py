"""The version of flashtrain."""

from importlib.metadata import PackageNotFoundError, version

__version__ = "0.2.0.dev0"


def versions_text() -> str:
    """Return the versions of flashtrain, its kernels, torch and Triton in one line,
    without importing them."""
    found = {"flashtrain": __version__}
    for name in ("flashtrain-kernels", "torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return ", ".join(f"{name} {one}" for name, one in found.items())
