"""Before a hybrid trains, kernels are called once as its training will call them."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from hybrid_models import CONFIGS, ON_ONE_DEVICE, decoder

from flashtrain.command.compose import compose_settings
from flashtrain.integrations import huggingface_tuning
from flashtrain.integrations.huggingface_tuning import tune
from flashtrain.run import fitting
from flashtrain.training.hardware import detect_hardware
from flashtrain_kernels import recurrences

CPU = torch.device("cpu")
OPERATORS = ("short_convolution", "gated_delta_rule", "decayed_sum", "state_space")
# Zaya's convolutions are torch's; Mamba-1's scan has no kernel.
KINDS = [kind for kind in CONFIGS if kind != "zaya"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    version = metadata.version
    monkeypatch.setattr(
        huggingface_tuning.metadata,
        "version",
        lambda name: "0.6.0" if name == "fla-core" else version(name),
    )
    monkeypatch.setattr(huggingface_tuning, "TOKENS", 128)
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path))
    return tmp_path / "triton"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> set:
    """What tells calls of operators apart in Triton's keys: all but batch and tokens."""
    seen = set()

    def recorded(name, own):
        def operator(*given, **named):
            tensors = [one for one in given if isinstance(one, torch.Tensor)]
            # Under autocast a decay or step is float32, or is made so for the kernel.
            sizes = [
                (tuple(one.shape[1:2] if "conv" in name else one.shape[2:]), one.dtype)
                for one in tensors
            ]
            rows = next(type(one) for one in given if isinstance(one, recurrences.Rows))
            seen.add((name, rows, *sizes, *named.items()))
            return own(*given, **named)

        return operator

    for name in OPERATORS:
        monkeypatch.setattr(recurrences, name, recorded(name, getattr(recurrences, name)))
    return seen


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_called_with_the_sizes_and_types_of_training(kind, precision, calls):
    model = decoder(kind, torch.float32)
    model.keep_in(precision)
    tune(model.module, CPU, precision, shared=False)
    tuned = set(calls)
    calls.clear()
    tokens, positions = torch.randint(3, 64, (1, 48)), torch.arange(48)[None] % 24
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        model.loss(tokens, tokens, positions=positions)
    assert tuned == calls
    assert calls or kind in ("falcon_mamba", "jamba")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ON_ONE_DEVICE])
def test_where_devices_will_share_sequences_kernels_are_called_with_states(kind, calls):
    tune(decoder(kind, torch.float32).module, CPU, "bf16-mixed", shared=True)
    assert calls
    assert all(recurrences.SharedRows in call for call in calls)


def test_it_is_done_once_a_machine_and_said_and_stored_in_the_cache(cache, calls, caplog):
    module = decoder("qwen3_5_text", torch.float32).module
    given = os.environ.get("TRITON_CACHE_DIR")
    folders = []

    def said() -> list[str]:
        return [one.message for one in caplog.records if one.name == "flashtrain"]

    for layer in module.model.layers[0].modules():
        layer.register_forward_pre_hook(lambda *_: folders.append(triton.knobs.cache.dir))
    with caplog.at_level(logging.INFO, "flashtrain"):
        tune(module, CPU, "bf16-mixed", shared=False)
        (line,) = said()
        assert str(cache) in line
        calls.clear()
        tune(module, CPU, "bf16-mixed", shared=False)
        assert calls  # each process reads the times
        assert said() == [line]
        tune(module, CPU, "bf16-true", shared=False)
    assert len(said()) == 2
    assert set(folders) == {str(cache)}
    assert os.environ.get("TRITON_CACHE_DIR") == given


def test_a_machines_mark_that_another_user_wrote_is_not_touched(cache, calls, monkeypatch):
    module = decoder("qwen3_5_text", torch.float32).module
    tune(module, CPU, "bf16-mixed", shared=False)
    calls.clear()

    def touch(path, *_, **__):
        raise PermissionError(path)

    monkeypatch.setattr(Path, "touch", touch)
    tune(module, CPU, "bf16-mixed", shared=False)
    assert calls


def test_in_full_precision_a_line_says_that_plain_torch_computes(cache, calls, caplog):
    with caplog.at_level(logging.INFO, "flashtrain"):
        tune(decoder("qwen3_5_text", torch.float32).module, CPU, "32-true", shared=False)
    (line,) = (one.message for one in caplog.records if one.name == "flashtrain")
    assert "hardware.precision=32-true" in line
    assert not calls
    assert not cache.exists()


def test_a_run_on_a_gpu_tunes_before_its_ranks_wait_for_each_other(tmp_path, monkeypatch):
    order = []

    class Begun(Exception):
        pass

    def fit(*_, **__):
        order.append("fit")
        raise Begun

    model = SimpleNamespace(tune_kernels=lambda *given, **named: order.append((*given, named)))
    trainer = SimpleNamespace(fit=fit, loggers=[], strategy=SimpleNamespace(launcher=None))
    monkeypatch.setattr(fitting, "make_trainer", lambda *_, **__: trainer)
    monkeypatch.setattr(fitting, "gpu_index", lambda: 3)
    prepared = SimpleNamespace(
        task=SimpleNamespace(model=model), data=None, stage=None, callbacks=[], monitor=None,
        batching=SimpleNamespace(accumulate=1), throughput=None, mode="min",
    )  # fmt: skip
    settings = compose_settings(["recipe=gpt2"])
    hardware = replace(detect_hardware(), kind="cuda", precision="bf16-mixed")
    with pytest.raises(Begun):
        fitting.fit(
            prepared, settings, hardware, tmp_path, resumed=None, started=0.0, finish=lambda _: {}
        )
    assert order == [(3, "bf16-mixed", {"shared": False}), "fit"]
