"""What pyproject.toml cannot say of the wheel: the experiments lie in recipes/, and are a
package of their own in it.

An editable install has no copy of them: its path file names recipes/ (dev-mode-dirs).
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ExperimentsHook(BuildHookInterface):
    """Adds flashtrain_recipes to the wheel that is no editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["recipes/flashtrain_recipes"] = "flashtrain_recipes"
