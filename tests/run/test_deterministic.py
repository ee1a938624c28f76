"""trainer.deterministic=true reaches the backward of each attention call, and ends with the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_runs import TinyRuns, each

import flashtrain
from flashtrain.models import attention_functions
from flashtrain.training import hardware
from flashtrain_kernels.options import Options


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each attention call whose backward begins: whether the Hopper kernels would add
    dQ up in a fixed order."""
    from flashtrain_kernels.backends.hopper.backward import is_deterministic

    on_cpu = hardware._cpu
    monkeypatch.setattr(hardware, "_cpu", lambda: replace(on_cpu(), attention="flash"))
    found: list[bool] = []
    for name in ("flash_attn_func", "flash_attn_qkvpacked_func"):
        real = getattr(attention_functions, name)

        def call(*args: Any, real: Any = real, **options: Any) -> Any:
            out = real(*args, **options)
            if out.requires_grad:
                out.register_hook(lambda _: found.append(is_deterministic(Options(1.0))))
            return out

        monkeypatch.setattr(attention_functions, name, call)
    return found


@pytest.mark.parametrize("model", each(["gpt2", "llama"]))
@pytest.mark.parametrize("requested", [True, False])
def test_the_setting_holds_in_each_backward_and_not_after_the_run(
    requested: bool, model: str, tiny_runs: TinyRuns, backwards: list[bool], tmp_path: Path
) -> None:
    words = tiny_runs.settings_words("trainer.steps=2", f"model={model}", f"output={tmp_path}")
    settings = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in words)}
    flashtrain.train(**{**settings, "trainer.deterministic": requested})
    assert set(backwards) == {requested}
    assert not torch.are_deterministic_algorithms_enabled()
