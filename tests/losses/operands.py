"""The operands of a head (hidden states, output weight, labels) and a counter of its tensors."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def make(dtype=torch.float32, tokens=50, dim=16, vocabulary=97):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, dim, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, dim, generator=generator) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (2, tokens // 2), generator=generator)
    labels[0, :7] = labels[1, -3:] = -100
    return hidden, weight, labels


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor and the number of matrix products."""

    def __init__(self):
        super().__init__()
        self.elements = self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result
