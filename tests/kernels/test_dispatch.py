"""Which implementation and tile a call gets."""

import pytest
import torch

from flashtrain_kernels import dispatch


def test_tensors_on_a_cpu_get_torchs_attention_and_those_on_cuda_the_kernels():
    assert dispatch.implementation_for("cpu") == "torch"
    assert dispatch.implementation_for("mps") == "torch"
    assert dispatch.implementation_for("cuda") == "portable"


def test_force_holds_within_its_context_only():
    with dispatch.force("reference"):
        assert dispatch.implementation_for("cpu") == "reference"
        assert not dispatch.runs_kernels(torch.device("cuda"))
    assert dispatch.implementation_for("cpu") == "torch"
    with (
        pytest.raises(ValueError, match="must be one of portable, torch, reference, not 'fast'"),
        dispatch.force("fast"),
    ):
        pass


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [1, 64, 65, 128, 129, 256])
def test_the_table_has_a_row_for_every_gpu_dtype_and_head_dimension(capability, dtype, head_dim):
    for tile in dispatch.table_row(dispatch.architecture(capability), head_dim, dtype):
        assert tile.block_q % 16 == tile.block_k % 16 == 0


def test_gpus_before_sm_80_are_refused_with_what_to_use_instead():
    with pytest.raises(ValueError, match=r"sm_80.*this one has 7.5: use torch.*scaled_dot_product_attention"):
        dispatch._require_sm80((7, 5))


def test_without_triton_a_gpu_call_says_so(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._require_triton.cache_clear()
    with pytest.raises(ValueError, match="needs the package triton"):
        dispatch.runs_kernels(torch.device("cuda"))
    dispatch._require_triton.cache_clear()
