"""Kernels that give the same bits in every run."""

import os
import subprocess
import sys

import pytest
import torch

from tune.distributed import determinism


@pytest.mark.slow
def test_deterministic_kernels():
    """In a separate process, because the settings persist. Settings of the user are kept, too."""
    code = (
        "import os, torch; from tune import distributed; distributed.use_deterministic_kernels();"
        "print(torch.are_deterministic_algorithms_enabled(), os.environ['CUBLAS_WORKSPACE_CONFIG'], "
        "torch.utils.deterministic.fill_uninitialized_memory);"
        "import torch._inductor.config as config; print(config.deterministic)"
    )
    environ = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True).stdout
    assert out.split() == ["True", ":16:8", "False", "True"]


@pytest.mark.parametrize("shape", [(3, 1), (2, 7), (1, 1000), (4, 64, 5)])
def test_doubling_sums_are_cumulative_sums(shape):
    values = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected, sums = values.cumsum(1), determinism._sums_by_doubling(values, 1)
    assert torch.allclose(sums, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(shape, dtype=torch.float64)
    assert torch.allclose(*(torch.autograd.grad((result * weights).sum(), values)[0] for result in (sums, expected)))
