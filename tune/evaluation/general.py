"""Measure how far training has moved a model on data that it is not trained on."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tune import rehearsal
from tune.collators import Batch
from tune.datasets import Stream, add_scores, load, scores_file, validation_batches
from tune.distributed import World
from tune.errors import TuneError, explained
from tune.evaluation.validation import means, validate
from tune.losses import ForwardKL, LinearCrossEntropy, MostProbable, TopK, takes_shares
from tune.peft import adapted_modules, switched_off
from tune.tokenizers import Tokenizer

SHIPPED = Path(__file__).with_name("general.jsonl")
LENGTH = 1024  # tokens of a packed row
K = 64  # most probable tokens of the base that are stored


class GeneralData:
    """Measure the loss on general data, and the KL divergence to the base. The base is the model without its adapter;
    if all parameters are trained, it is the model before the first step.

    `path` is anything that `tune.datasets.load` reads, or `shipped`. For each supervised token, the base's `K` most
    probable tokens and the remaining probability mass are stored in `folder`; the divergence is computed over these
    K + 1 parts (`ForwardKL`).

    Raises:
        TuneError: the rows cannot be read.
    """

    def __init__(self, path: str, model: nn.Module, tokenizer: Tokenizer, world: World, folder: Path) -> None:
        self.model, self.world, self.folder, self.has_base = model, world, folder, False
        longest = min(LENGTH, getattr(model, "max_positions", None) or LENGTH)
        with explained("evaluate.general"):
            data = load(tokenizer, str(SHIPPED) if path == "shipped" else path, max_seq_len=longest, packed=True)
        assert not isinstance(data, Stream)
        self.data, self.most_probable = data, MostProbable(min(K, tokenizer.vocab_size))

    def keep_base(self) -> None:
        """Compute the base's predictions before the first step. All processes must call this."""
        if self.world.is_main and not rehearsal.current():
            for file in self.folder.glob("base-*.npy"):  # files of another run in this folder
                file.unlink()
        self.world.barrier()
        self._add_base()

    def require_base(self) -> None:
        """Raise TuneError if training continues from a checkpoint, and the base's predictions for these rows were not
        stored before the first step. All processes must call this."""
        if adapted_modules(self.model):  # the model without its adapter
            return
        folder = rehearsal.named(self.folder.parent) / self.folder.name
        if rehearsal.current():  # which reads only some of the rows
            is_there = any(folder.glob("base-*.npy"))
        else:
            files = [scores_file(folder, "base", part, self.most_probable.k) for part in self.data.parts.values()]
            is_there = all(file.exists() for file in files)
        if not self.world.broadcast(is_there):
            raise TuneError(
                f"evaluate.general: the model's predictions before the first step, for these rows, are not in {folder} "
                "and cannot be recomputed. Unset evaluate.general, or start a training with it"
            )

    def _add_base(self) -> None:
        with switched_off(self.model):
            add_scores(
                self.data, "base", lambda batch: self.model(batch, self.most_probable), self.world,
                micro_batch_size=1, pad_to=None, folder=self.folder, made_of=self.most_probable.k,
            )  # fmt: skip
        self.has_base = True

    def __call__(self) -> dict[str, float]:
        """Return `general_loss` and `general_kl`, means over the supervised tokens, in nats. All processes must call
        this.

        Raises:
            TuneError: as `require_base` does.
        """
        if not self.has_base:
            self.require_base()
            self._add_base()
        batches = ((("general_loss",), batch) for _, batch in validation_batches(self.data, self.world))
        return self.world.fetch(**means(validate(self.model, batches, self._measured), self.world))

    def _measured(self, batch: Batch) -> dict[str, Tensor]:
        loss, divergence = self.model(batch, _loss_and_divergence)
        count = torch.full_like(loss, batch.num_supervised)
        return {"loss": torch.stack([loss, count]), "kl": torch.stack([divergence, count])}


@takes_shares
def _loss_and_divergence(hidden: Tensor, weight: Tensor, batch: Batch, **softcap: Any) -> Tensor:
    """A head that returns two sums over supervised tokens: loss and divergence."""
    base = TopK.stored(batch.columns["base"], batch)
    heads = LinearCrossEntropy(), partial(ForwardKL(), teacher=base)
    return torch.stack([head(hidden, weight, batch, **softcap) for head in heads])
