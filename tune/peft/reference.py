"""A frozen model to compare with: the trained model before its first step, or another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tune.collators import Batch
from tune.distributed import Dtype, World, current_world, local_shard, reshard
from tune.peft.adapters import adapted_modules, switched_off
from tune.peft.lora import LoRA, LowRank
from tune.peft.opened import open_model
from tune.tokenizers import Tokenizer


class Reference:
    """The frozen model of a KL term: `reference(batch, head)` is its output, without gradients.

    Without a `path` (or with "adapter_off") it is `model` before the first step. A new adapter does not change the
    model, so it is switched off. Of an adapter that was loaded from files, and of parts that are trained in full, each
    process keeps a copy of its shards. Where all parameters are trained (`lora` is None), or with the `path` of a
    model, adapter or run, it is a second model.

    Raises:
        TuneError: the folder cannot be opened, or its tokenizer has other ids than `tokenizer`.
    """

    def __init__(self, model: nn.Module, lora: LoRA | None, path: str | None = None, *, tokenizer: Tokenizer):
        self.model, self.lora = model, lora
        self.frozen: Any = None
        self.kept: list[tuple[nn.Parameter, Tensor]] = []
        is_start = path in (None, "adapter_off")
        self.opened = None
        if not (is_start and lora):
            self.opened = open_model(str(model.source if is_start else path), setting="reference")
            self.opened.require_same_vocabulary(tokenizer)

    def load(self, dtype: Dtype, world: World | None = None) -> None:
        """Read the weights of a second model, or keep the trained weights as they are now: after the model is loaded,
        and before a checkpoint is restored."""
        if self.opened:
            self.frozen, self.opened = self.opened.shard(current_world(world), dtype), None
            return
        assert self.lora
        adapters = [module for module in adapted_modules(self.model).values() if isinstance(module, LowRank)]
        of_adapters = {id(parameter) for module in adapters for parameter in module.parameters(recurse=False)}
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        is_new = self.lora.path is None and all(id(each) in of_adapters for each in trained)
        if not is_new:
            self.kept = [(each, local_shard(each)[0].detach().clone()) for each in trained]

    @torch.no_grad()
    def __call__(self, batch: Batch, head: Any) -> Any:
        """Return the output of the frozen model's forward with this `head`."""
        if self.frozen is not None:
            return self.frozen(batch, head)
        with self._restored():
            return self.model(batch, head)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """A context in which the model computes as at the start, in evaluation mode."""
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

    def _swap(self) -> None:
        reshard(self.model)  # gathered weights would be outdated
        for parameter, kept in self.kept:
            shard, _ = local_shard(parameter)
            other = shard.clone()
            shard.copy_(kept)
            kept.copy_(other)
