"""What a head gets: hidden states, an output weight, labels."""

import torch


def make(dtype=torch.float32, tokens=50, dim=16, vocabulary=97):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, dim, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, dim, generator=generator) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (2, tokens // 2), generator=generator)
    labels[0, :7] = labels[1, -3:] = -100
    return hidden, weight, labels
