"""What a machine is said to offer."""

from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.training import hardware
from flashtrain.training.hardware import (
    attention_for,
    detect_hardware,
    peak_flops_of,
    precision_for,
)


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def with_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA H200 #{index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100, 150))
    monkeypatch.setattr(torch.version, "hip", None, raising=False)


def test_a_cpu_trains_in_float32_with_torchs_attention(without_gpu):
    found = detect_hardware("auto")
    assert (found.kind, found.precision, found.attention) == ("cpu", "32-true", "sdpa")
    assert found.peak_flops is None
    assert found.capability is None
    assert found.count >= 1
    assert found.name
    if hardware.Path("/proc/meminfo").is_file():
        assert 0 < found.free_memory_bytes <= found.total_memory_bytes


def test_asking_for_a_gpu_where_there_is_none_is_one_line(without_gpu):
    with pytest.raises(UserError, match="hardware=gpu, ") as error:
        detect_hardware("gpu")
    assert "\n" not in str(error.value)


def test_auto_takes_the_gpu_of_this_processs_local_rank(with_h200, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = detect_hardware("auto")
    assert (found.kind, found.name, found.count) == ("cuda", "NVIDIA H200 #1", 2)
    assert (found.capability, found.precision, found.peak_flops) == ((9, 0), "bf16-mixed", 989e12)
    assert (found.free_memory_bytes, found.total_memory_bytes) == (100, 150)
    assert detect_hardware("cpu").kind == "cpu"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
    ],
)
def test_dense_peaks_are_the_datasheets_of_names_that_hold_each_other(name, peak):
    assert peak_flops_of(name) == peak


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Instinct MI300X"]
)
def test_a_gpu_that_the_table_does_not_hold_has_no_peak(name):
    assert peak_flops_of(name) is None


def test_gpus_before_sm_80_get_fp16_and_torchs_attention():
    assert precision_for((7, 5)) == "16-mixed"
    assert attention_for((7, 5)) == "sdpa"
    assert precision_for((8, 0)) == "bf16-mixed"


def test_flash_attention_needs_triton(monkeypatch):
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None)
    assert attention_for((9, 0)) == "sdpa"
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: object())
    assert attention_for((9, 0)) == "flash"
