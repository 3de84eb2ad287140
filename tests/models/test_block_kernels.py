"""Fused kernels match the plain operations, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tune import fused
from tune.models.block_kernels import rotate, rotated, silu_product

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's kernels need a CUDA device")


def heads_and_angles(device="cpu", dtype=torch.float32, shape=(2, 7), heads=6, kv_heads=2, size=64):
    draw = torch.Generator().manual_seed(3)
    query, key = (
        torch.randn(*shape, count, size, generator=draw).to(device, dtype).requires_grad_()
        for count in (heads, kv_heads)
    )
    angles = torch.randn(*shape, 1, size // 2, generator=draw).repeat(1, 1, 1, 2)
    return query, key, angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def gate_and_up(device="cpu", dtype=torch.float32, shape=(3, 1000)):
    draw = torch.Generator().manual_seed(4)
    return [(torch.randn(*shape, generator=draw) * 3).to(device, dtype).requires_grad_() for _ in range(2)]


def results(function, *inputs):
    """Outputs and input gradients for a random gradient of the outputs."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    draw = torch.Generator().manual_seed(5)
    gradients = [torch.randn(output.shape, generator=draw).to(output) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [tensor for tensor in inputs if tensor.requires_grad], gradients)]


def plain_rotation(query, key, cos, sin):
    return rotated(query, cos, sin), rotated(key, cos, sin)


def plain_product(gate, up):
    return F.silu(gate) * up


def launch_plainly(programs, program, grid, *arguments, **options):
    """Replace a kernel launch: write the results of the program with plain operations."""
    if program == "rotation":
        query, key, query_output, key_output, cos, sin, *_, back = arguments
        query_output.copy_(rotated(query, cos, -sin if back else sin))
        key_output.copy_(rotated(key, cos, -sin if back else sin))
    elif program == "silu_product":
        gate, up, output, *_ = arguments
        output.copy_(F.silu(gate) * up)
    else:
        gradient, gate, up, of_gate, of_up, *_ = arguments
        of_up.copy_(gradient * F.silu(gate))
        of_gate.copy_(torch.ops.aten.silu_backward(gradient * up, gate))


@pytest.mark.parametrize(
    ("ours", "plain", "make"), [(rotate, plain_rotation, heads_and_angles), (silu_product, plain_product, gate_and_up)]
)
def test_kernel_wrappers_match_plain_operations(ours, plain, make, monkeypatch):
    inputs = make()
    expected = results(plain, *inputs)
    assert all(torch.equal(*pair) for pair in zip(results(ours, *inputs), expected, strict=True))  # without a kernel
    monkeypatch.setattr(fused, "fits", lambda *_: True)
    monkeypatch.setattr(fused, "launch", launch_plainly)
    assert_close(results(ours, *inputs), expected, atol=1e-6, rtol=1e-6)


def test_only_gate_and_up_are_saved_for_backward(monkeypatch):
    monkeypatch.setattr(fused, "fits", lambda *_: True)
    monkeypatch.setattr(fused, "launch", launch_plainly)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor
    ):
        silu_product(*gate_and_up())
    assert kept == [(3, 1000)] * 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_rotation_on_a_gpu(dtype, size):
    """16-bit results are equal to the last bit, as both round each product; in fp32 a device may fuse operations."""
    inputs = heads_and_angles("cuda", dtype, size=size)
    tolerance = 1e-6 if dtype == torch.float32 else 0
    assert_close(results(rotate, *inputs), results(plain_rotation, *inputs), atol=tolerance, rtol=tolerance)
    strided = [tensor.transpose(0, 1) for tensor in inputs]
    assert_close(results(rotate, *strided), results(plain_rotation, *strided), atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_silu_product_on_a_gpu(dtype):
    """Two compilers' exponentials differ in the last bit, which may change the last of 16 bits."""
    inputs = gate_and_up("cuda", dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    outputs, expected = results(silu_product, *inputs), results(plain_product, *inputs)
    assert_close(outputs, expected, atol=tolerance, rtol=tolerance)
    if dtype != torch.float32:
        assert sum((one != other).sum() for one, other in zip(outputs, expected, strict=True)) < 0.02 * 9000
