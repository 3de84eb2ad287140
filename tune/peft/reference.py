"""The reference model: the trained model as it was before its first step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tune.distributed import local_shard, reshard
from tune.peft.adapters import adapted_modules, switched_off
from tune.peft.lora import LoRA, LowRank


class Reference:
    """The current state of an adapted `model`, to compute with later. Make it before the first step and a resume.

    A new adapter does not change the model, so the reference switches it off. If an adapter was loaded from files, or
    other parameters are trained in full, each process keeps a copy of its shards. Without `lora` nothing is kept.
    """

    def __init__(self, model: nn.Module, lora: LoRA | None):
        self.model = model
        adapters = [module for module in adapted_modules(model).values() if isinstance(module, LowRank)]
        of_adapters = {id(parameter) for module in adapters for parameter in module.parameters(recurse=False)}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad] if lora else []
        is_new = lora is not None and lora.path is None and all(id(each) in of_adapters for each in trained)
        self.kept = [] if is_new else [(each, local_shard(each)[0].detach().clone()) for each in trained]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the model computes as at the start, in evaluation mode. Use it for forwards without
        gradients."""
        if not self.kept:
            with switched_off(self.model):
                yield
            return
        was_training = self.model.training
        self.model.eval()
        self._swap()
        try:
            yield
        finally:
            self._swap()
            self.model.train(was_training)

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self.model)  # gathered weights would be outdated
        for parameter, kept in self.kept:
            shard, _ = local_shard(parameter)
            other = shard.clone()
            shard.copy_(kept)
            kept.copy_(other)
