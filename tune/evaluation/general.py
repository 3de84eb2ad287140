"""Measure how far training has moved a model on data that it is not trained on."""

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tune import rehearsal
from tune.collators import Batch
from tune.datasets import Stream, add_scores, is_stored, load, scores_file, validation_batches
from tune.distributed import World
from tune.errors import TuneError, explained
from tune.evaluation.validation import validate
from tune.files import written_aside
from tune.losses import ForwardKL, LinearCrossEntropy, MostProbable, TopK, takes_shares
from tune.peft import LowRank, adapted_modules, switched_off, trained_in_full
from tune.tokenizers import Tokenizer

SHIPPED = Path(__file__).with_name("general.jsonl")
LENGTH = 1024  # tokens of a packed row
K = 64  # most probable tokens of the base that are stored


class GeneralData:
    """Measure the loss on general data, and the KL divergence to the base. The base is the model without its adapter;
    if all parameters are trained, it is the model before the first step.

    `path` is anything that `tune.datasets.load` reads, or `shipped`. For each supervised token, the base's `K` most
    probable tokens and the remaining probability mass are stored in `folder`; the divergence is computed over these
    K + 1 parts (`ForwardKL`). `before` is the folder of the run that training continues from, or None: the predictions
    of its base count, and no others.

    Raises:
        TuneError: the rows cannot be read; or an adapter is continued whose modules are trained in full, so that the
            base's own values are not in the model.
    """

    def __init__(
        self, path: str, model: nn.Module, tokenizer: Tokenizer, world: World, folder: Path, before: Path | None = None
    ) -> None:
        self.model, self.world, self.folder, self.has_base = model, world, folder, False
        self.before = None if before is None else before / folder.name
        adapters = adapted_modules(model).values()
        whole = [layer.settings for layer in adapters if isinstance(layer, LowRank) and layer.settings.path]
        if modules := [name for lora in whole for name in lora.modules_to_save]:
            raise TuneError(
                f"evaluate.general: the adapter in adapter.path has its own {', '.join(dict.fromkeys(modules))}, in "
                "full, in place of the base's, so the base's predictions cannot be computed. Unset evaluate.general"
            )
        longest = min(LENGTH, getattr(model, "max_positions", None) or LENGTH)
        with explained("evaluate.general"), rehearsal.all_rows() if before else nullcontext():
            data = load(tokenizer, str(SHIPPED) if path == "shipped" else path, max_seq_len=longest, packed=True)
        assert not isinstance(data, Stream)
        self.data, self.most_probable = data, MostProbable(min(K, tokenizer.vocab_size))

    def keep_base(self) -> None:
        """Compute the base's predictions before the first step. All processes must call this."""
        self.before = None  # training starts over
        self._clear()
        self._add_base()

    def require_base(self) -> None:
        """Raise TuneError if training continues from a checkpoint, and the base's predictions for these rows are
        neither stored nor can be computed again without the adapter. All processes must call this."""
        folder = self.before
        if folder is None or self._can_recompute:
            return
        if not self.world.of_main(lambda: all(is_stored(file) for file in self._files(folder))):
            raise self._missing()

    @property
    def _can_recompute(self) -> bool:
        """Whether the model without its adapters is the base, also during training."""
        return bool(adapted_modules(self.model)) and not trained_in_full(self.model)

    def _missing(self) -> TuneError:
        which = ""
        if adapted_modules(self.model):
            which = f", since {', '.join(trained_in_full(self.model)[:3])} are trained in full"
        return TuneError(
            f"evaluate.general: the predictions of the model before the first step, for these rows, are not in "
            f"{self.before} and cannot be computed again{which}. Unset evaluate.general, or start a training with it"
        )

    def _files(self, folder: Path) -> list[Path]:
        """Return the files in `folder` with the base's predictions for these rows."""
        return [scores_file(folder, "base", part, self.most_probable.k) for part in self.data.parts.values()]

    def _clear(self) -> None:
        """Remove the predictions in this folder, which are of another training."""
        if self.world.is_main and not rehearsal.current():
            for file in self.folder.glob("base-*.npy"):
                file.unlink()
        self.world.barrier()

    def _take_over(self) -> None:
        """Copy the predictions from the folder of the run that training continues from, if it is another one."""
        before = self.before
        if rehearsal.current() or before is None or self.world.of_main(lambda: _is_same(before, self.folder)):
            return
        self._clear()
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for source, file in zip(self._files(before), self._files(self.folder), strict=True):
                if source.exists():
                    with written_aside(file) as unfinished:
                        shutil.copyfile(source, unfinished)
        self.world.barrier()

    def _add_base(self) -> None:
        self._take_over()
        with switched_off(self.model):
            add_scores(
                self.data, "base", self._of_base, self.world,
                micro_batch_size=1, pad_to=None, folder=self.folder, made_of=self.most_probable.k,
            )  # fmt: skip
        self.has_base = True

    def _of_base(self, batch: Batch) -> Tensor:
        """Compute the base's predictions; only called if none are stored, or they are damaged."""
        if self.before is not None and not self._can_recompute and not rehearsal.current():
            raise self._missing()
        return self.model(batch, self.most_probable)

    def __call__(self) -> dict[str, float]:
        """Return `general_loss` and `general_kl`, means over the supervised tokens, in nats. All processes must call
        this.

        Raises:
            TuneError: as `require_base` does.
        """
        if not self.has_base:
            self._add_base()
        batches = ((("general_loss",), batch) for _, batch in validation_batches(self.data, self.world))
        return self.world.fetch(**self.world.means(validate(self.model, batches, self._measured)))

    def _measured(self, batch: Batch) -> dict[str, Tensor]:
        loss, divergence = self.model(batch, _loss_and_divergence)
        count = torch.full_like(loss, batch.num_supervised)
        return {"loss": torch.stack([loss, count]), "kl": torch.stack([divergence, count])}


def _is_same(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()


@takes_shares
def _loss_and_divergence(hidden: Tensor, weight: Tensor, batch: Batch, **softcap: Any) -> Tensor:
    """A head that returns two sums over supervised tokens: loss and divergence."""
    base = TopK.stored(batch.columns["base"], batch)
    heads = LinearCrossEntropy(), partial(ForwardKL(), teacher=base)
    return torch.stack([head(hidden, weight, batch, **softcap) for head in heads])
