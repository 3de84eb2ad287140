"""A run: its folder, its metrics and its messages."""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import random
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from tune import config, evaluation, optimizers, records, rehearsal
from tune.checkpointers import Checkpointer, check_forward, model_card
from tune.collators import collate
from tune.datasets import (
    MARKS,
    DataLoader,
    Dataset,
    Mixture,
    PromptLoader,
    Stream,
    beyond_positions,
    first_rows,
    marked,
    parts_of,
    warnings_about,
)
from tune.distributed import PACE, Interrupt, Parallelism, World, bytes_sent, repeated_blocks, undivided
from tune.errors import TuneError, explained
from tune.evaluation import Evaluator
from tune.files import CHECKPOINT, lock
from tune.generation import Rollouts
from tune.loggers import (
    Console,
    Files,
    Sink,
    lines_after,
    open_sinks,
)
from tune.lookup import in_shell
from tune.models import HuggingFaceModel, without_names
from tune.peft import adapted_modules, untrained_tokens
from tune.quantization import count_parameters
from tune.run import run_folder
from tune.run.flops import flops_per_token, peak_flops
from tune.run.hardware import attention_notes, disk_note, peak_memory_gib, planned_memory
from tune.run.store import Store
from tune.run.watchdog import Watchdog
from tune.secrets import without_secrets
from tune.terminal import visible
from tune.tokenizers import Tokenizer
from tune.types import NonNegativeInt

T = TypeVar("T")
FEW_STEPS = 10  # too few steps to learn much


class Counted(Protocol):
    """Token counts that a step is logged with: all tokens over all ranks, and the supervised tokens."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_supervised(self) -> int: ...


class StepSize(NamedTuple):
    """The size of a step.

    Tokens in a `row` of a micro-batch, in the `longest` and in the `mean` document; the `rows` and approximate `tokens`
    of a step; the rows of a micro-batch.
    """

    row: int
    longest: int
    mean: int
    rows: int
    tokens: int
    micro_batch_size: int


class Run:
    """The run folder `output_dir` (default `runs/<recipe>-<time>`): config.yaml, run.json, data.json, first_row.txt,
    metrics.jsonl, log.txt, report.html.

    `recipe` names a new folder; a folder of another recipe's run is refused. `resume` is the setting; after a
    restart by the launcher, the attribute is "auto".

    Nothing is written before `steps` is called, so a wrong input does not change an earlier run. The exception is a
    preparation of data that takes long: log.txt says how far it is, and another run cannot take the folder.

    Raises:
        TuneError: the folder cannot be written, another run is writing there, or it holds another run's results and
            `resume` is `never`; or a logger is not installed.
    """

    def __init__(
        self,
        recipe: str,
        world: World,
        output_dir: str | None = None,
        resume: str = "auto",
        *,
        settings: DictConfig,
        trackers: Sequence[Any] = (),
    ):
        """Create a run.

        `settings` are all settings of the recipe, recorded in config.yaml and by trackers. `trackers` are components
        that return a `tune.loggers.Sink`, or their dotted paths. A `tune.loggers.Console` among them replaces the usual
        one.
        """
        self.__class__ = rehearsal.stand_in(type(self))
        self.recipe, self.world, self.settings = recipe, world, settings
        made = _trackers(trackers)
        self.trackers = [sink for sink in made if not isinstance(sink, Console)]
        self._open_folder(run_folder.choose(output_dir, recipe, world), resume)

        # Output. Messages of the setup are kept until training begins.
        consoles = [sink for sink in made if isinstance(sink, Console)] or [Console()]
        self.sinks: list[Sink] = [*consoles[-1:]] if world.is_main else []
        self.messages: list[str] = []
        self.files: Files | None = None  # on the first process, once training has begun
        self.unwritten: list[str] = []  # outputs that could not be written
        self.waits = False  # whether lines currently wait for disk space
        # The data, for data.json and first_row.txt.
        self.dataset_name = ""
        self.data: dict[str, Any] = {}
        self.first_row = ""
        self.stream: Stream | None = None
        # Progress.
        self.step, self.total = 0, 0  # the last started step, and the last step of the run
        self.exported_step: int | None = None  # the step of the weights after `finish`
        self.has_begun = False  # on the first process
        self.was_done = False  # whether an earlier start already finished, with all results
        self.interrupt: Interrupt | None = None  # from the first step on
        self.asked, self.interrupted = 0, False  # the step of the last `is_interrupted`, and its answer
        # Timings of a step.
        self.step_began = time.perf_counter()
        self.data_seconds, self.save_seconds, self.flops_per_token = 0.0, 0.0, 0.0
        self.timings: dict[str, float] = {}
        self.broken = set[str]()  # metrics whose last value was not finite
        # What `steps` gets.
        self.checkpointer: Checkpointer | None = None
        self.evaluator: Evaluator | None = None
        self.higher_is_better: dict[str, bool | None] = {}  # by metric of a task, from the evaluator
        self.logged, self.has_learned = 0, False  # steps of this start, and whether one of them supervised a token

        if self.store:
            self.info(f"{self.path} is uploaded to {self.store.name} during the run")
        for note in config.notes(settings):
            self.info(note)

    def _open_folder(self, chosen: str, resume: str) -> None:
        """Lock the run folder `chosen`, a path or a URL, and check that this run can use it."""
        world, is_url = self.world, "://" in chosen
        self.path = config.local_folder(chosen)
        world.of_main(lambda: lock.hold(self.path))  # before changing anything in it
        self.store = Store(chosen, self.path, world) if is_url else None
        # Describes the command that continues this run.
        values: Any = OmegaConf.to_container(self.settings, resolve=True)
        others = (name for name, value in values.items() if value == chosen)  # a copied recipe may rename it
        key = "output_dir" if "output_dir" in values else next(others, None)
        folder = f"{key}={in_shell(chosen)}" if key else f"the folder {chosen}"
        self.again = f"the same command with {folder}{'' if resume == 'auto' else ' resume=auto'}"
        self.resume = world.broadcast(run_folder.resumption(self.path, resume))
        mark = self.path / f".{world.broadcast(uuid.uuid4().hex)}"
        refusal = run_folder.refusal(self.path, self.resume, mark, self.recipe) if world.is_main else ""
        if refusal := world.broadcast(refusal):
            raise TuneError(refusal)
        if is_url:  # each node has its own folder
            mark.unlink(missing_ok=True)
        else:
            run_folder.require_shared(mark, world)
        run_folder.require_same_files(values, world)
        if world.is_main:
            run_folder.log_preparation(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Close the sinks and write the report. A stream's accounting is complete only at the end of a run."""
        if error is None:
            if self.stream:
                self.info(self.stream.seen.table())
            self.world.finish()
            if written := [name for name in ("adapter", "model") if (self.path / name).is_dir()]:
                self.info("done: " + ", ".join(f"the {name} is in {self.path / name}" for name in written))
        try:
            failure = self._conclude(error) if self.has_begun else None
            for sink in reversed(self.sinks):  # log.txt after the trackers, whose closing can fail
                sink.close()
            if self.store:
                self.store.finish(error)
        finally:
            lock.release(self.path)
        if failure:
            raise failure

    def _conclude(self, error: BaseException | None) -> TuneError | None:
        """Record how the run ended and write its report, without hiding `error`.

        Without an `error`, return the error of a run with unwritten outputs, if any.
        """
        try:
            if self.stream and error is None:
                data = self.data | self.stream.seen.as_dict() | {"steps_per_epoch": None}
                (self.path / "data.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
            records.end(self.path, error or self._failure(), self.exported_step)
            if not isinstance(error, KeyboardInterrupt):  # the user ends the run at once
                records.write_report([self.path], self.path / "report.html")
        except Exception as problem:
            why = problem if isinstance(problem, TuneError) else repr(problem)
            self.info(f"the report could not be written: {why}")
            if isinstance(problem, TuneError | OSError):
                self.unwritten.append(f"the report ({why})")
        failure = self._failure()
        if error and failure:
            self.info(f"warning: {failure}")
        return None if error else failure

    def _failure(self) -> TuneError | None:
        """Return the error of a run with unwritten outputs, or None."""
        unwritten = [*self.unwritten, *filter(None, [self.files.unwritten() if self.files else ""])]
        if not unwritten:
            return None
        what = "; ".join(unwritten)
        return TuneError(f"output_dir: {self.path} is incomplete: it lacks {what}. {self._way_back()}")

    def _way_back(self) -> str:
        """Return the advice for a full disk, and where a rerun starts."""
        saved = max(self.path.glob(f"checkpoints/{CHECKPOINT}"), default=None)
        where = f"continues after step {int(saved.name.removeprefix('step-'))}" if saved else "starts over"
        return f"Free some space: {self.again} {where}"

    def _measure_before(self) -> None:
        """Run and record the measurements that precede the first step.

        In a new run they are those of the untrained model. A run that continues makes the measurements that were due at
        the step after which it ended before, so that `keep_best`, `patience` and your own lines in a measurement get
        the same values as in a run without an end.
        """
        if not self.evaluator:
            return
        if self.step == 0:
            self.evaluator(0)
            return
        if not (self.checkpointer and self.checkpointer.unmeasured) or self.step == self.total:
            return  # `finish` measures after the last step
        metrics = self.evaluator.due(self.step)
        if metrics:
            self.info(f"step {self.step}: the run ended before its measurements, so they are made now")
            self.record(self.step, metrics)
            self.checkpointer.step(self.step, metrics)

    def finish(self) -> None:
        """Run the final measurements of the evaluator; with `keep_best`, then load the best checkpoint's weights.

        If a signal has arrived, the process exits here with code 130, and the same command continues it. After this
        call, a signal ends the process at once, because everything is saved. Raises TuneError if no step of the run
        supervised a token.
        """
        checkpointer, evaluator = self.checkpointer, self.evaluator
        self._end_if_interrupted(checkpointer)
        if self._has_learned_nothing():
            raise TuneError(
                f"nothing to learn in {self.step} steps: no token was supervised. (With rewards: all "
                "completions of a group had the same reward, or those that differed were cut. Use other prompts or a "
                "finer reward.) The model is unchanged and not exported"
            )
        # Data may end before the announced last step, so the last step may not be saved yet.
        if checkpointer and checkpointer.wait() < self.step:
            checkpointer.save(self.step, wait=True)
        # A finished run that is started again does not repeat its measurements.
        metrics = evaluator.at_end(self.step) if evaluator and not self.was_done else {}
        if metrics:
            self.record(self.step, metrics)
        if checkpointer and metrics:
            checkpointer.step(self.step, metrics, now=True)
        self.exported_step = self.step
        if checkpointer:
            self.exported_step = checkpointer.finish() or self.step
            if checkpointer.unwritten and self.world.is_main:
                self.unwritten.append(checkpointer.unwritten)
        if self.interrupt:
            self.interrupt.end()
        self._end_if_interrupted(checkpointer)

    def _has_learned_nothing(self) -> bool:
        """Return whether no step supervised a token, also if an earlier start made all of them."""
        if self.has_learned or (self.checkpointer and self.checkpointer.updates):
            return False
        counts = self.world.of_main(lambda: _supervised(self.path / "metrics.jsonl"))
        return bool(counts) and not any(counts)

    def _end_if_interrupted(self, checkpointer: Checkpointer | None) -> None:
        if self.world.any(self.interrupt is not None and self.interrupt.requested):
            self._exit(checkpointer)

    def _exit(self, checkpointer: Checkpointer | None) -> None:
        """End an interrupted run whose last step is saved."""
        if checkpointer:
            self.info(f"interrupted: step {checkpointer.wait()} is saved, {self.again} continues after it")
        else:
            self.info(f"interrupted after step {self.step}: without a checkpointer, nothing is saved")
        sys.exit(130)

    def info(self, message: str) -> None:
        """Send a message to the console and log.txt."""
        message = visible(without_secrets(message))
        self.messages.append(message)
        for sink in self.sinks:
            sink.message(message)
        self._report_disk()

    def _report_disk(self) -> None:
        """Report once that lines wait for disk space, and once that they were written. A full disk ends no run."""
        unwritten = self.files.unwritten() if self.files else ""
        if bool(unwritten) == self.waits:
            return
        self.waits = bool(unwritten)
        if self.waits:
            self.info(
                f"warning: {self.path} does not accept {unwritten}. They are kept, and written when there is space. "
                f"{self._way_back()} if the run ends before that"
            )
        else:
            self.info(f"{self.path} accepts lines again: nothing is missing")

    def _describe_model(self, how: Parallelism, model: nn.Module, work: StepSize) -> None:
        """Report the processes, the whole `model`, its memory, and the communication in a step of this `work`."""
        dtype, master_dtype = how.dtype, how.master_dtype
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.info(f"{self.path}: {self.world.size} process(es) on {self.world.device.type}, torch {torch.__version__}")
        self.info(f"model: {count_parameters(model):,} parameters, {trainable:,} trainable")
        if isinstance(model, HuggingFaceModel):
            self.info(f"model: {model.cost}")
        if left_out := without_names(model):
            self.info(
                f"warning: {', '.join(left_out)}: trained, but not exported, because the model on disk has no such "
                "tensor. Save it next to the export"
            )
        tp = self.world.mesh["tp"].size()
        parts, shared = tp * self.world.num_stages, (tp, self.world.loss_parallel)
        planned = planned_memory(model, dtype, master_dtype, self.world.shards.shape[-1] * parts, *shared)
        if self.world.zero_stage in (1, 2):
            planned["gathered in a step"] = planned_memory(model, dtype, dtype, parts, *shared)["weights"]
        held = ", ".join(f"{name} {gib:.2f}" for name, gib in planned.items())
        where = "host memory" if how.cpu_offload else "memory"
        then = "activations in host memory" if how.activation_offload else "activations"
        self.info(f"{where} of each process, GiB: {held} (with AdamW); plus {then}")
        if self.world.size > 1:
            self._describe_mesh(model, work, dtype, master_dtype)
        folder = rehearsal.named(self.path)
        keep = self.checkpointer.keep if self.checkpointer else None
        if self.world.is_main and (note := disk_note(folder, model, master_dtype, keep)):
            self.info(f"warning: {note}")
        self.flops_per_token = flops_per_token(model, work.mean)
        shape = work.micro_batch_size, work.row
        blocks = how.compiles, how.activation_checkpointing
        for note in attention_notes(model, self.world.device, dtype, shape, work.longest, *blocks):
            self.info(note)

    def _describe_mesh(self, model: nn.Module, work: StepSize, dtype: torch.dtype, master_dtype: torch.dtype) -> None:
        mesh, experts = self.world.mesh, self.world.experts
        rows, tokens = -(-work.rows // self.world.data_size), work.tokens / self.world.data_size
        axes = [f"{axis} {size}" for axis, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True) if size > 1]
        shared = f", of which ep {experts['ep'].size()} share the experts" if experts else ""
        self.info(f"mesh: {' x '.join(axes)}{shared}; consecutive processes share the last axis")
        sent = bytes_sent(
            model, self.world, dtype, master_dtype, tokens=tokens, micro_batches=-(-rows // work.micro_batch_size)
        )
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        by_axis = ", ".join(f"{axis} {size / 2**20:,.1f}" for axis, size in sent.items())
        by_axis += ", tp not counted, because the model has a plan" if sizes["tp"] > 1 and "tp" not in sent else ""
        self.info(f"sent by each process per step of {tokens:,.0f} tokens, MiB: {by_axis}")
        if whole := undivided(model, repeated_blocks(model), sizes["tp"], loss_parallel=True):
            self.info(f"warning: tp={sizes['tp']} does not divide the rows of {', '.join(whole)}: each process has all")
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world.size))
        for warning in over_slow_links(sizes, experts["ep"].size() if experts else 1, here):
            self.info(f"warning: {warning}")

    def _describe_rows(self, model: nn.Module, data: DataLoader, tokenizer: Tokenizer) -> None:
        """Report the model, the data and warnings; data.json and first_row.txt keep the report on the data.

        Raises TuneError if a process has other data, or if the model has no row for a token.
        """
        how = Parallelism.of(model)
        model = how.whole or model
        validation = data.dataset.validation
        vocab_size: int | None = getattr(getattr(model, "config", None), "vocab_size", None)
        both: list[Dataset | Mixture | Stream] = [data.dataset, *([validation] if validation else [])]
        if vocab_size is not None:
            for part in both:
                part.require_vocabulary(vocab_size)
        self._require_same_data(data.dataset, validation)
        accounting = data.dataset.accounting
        longest = data.dataset.max_seq_len if isinstance(data.dataset, Stream) else accounting.longest
        mean = accounting.tokens // max(1, accounting.samples)
        rows = data.global_batch_size
        tokens = accounting.tokens * rows // accounting.training_rows if accounting.training_rows else longest * rows
        row = accounting.row_capacity or longest
        self._describe_model(how, model, StepSize(row, longest, mean, rows, tokens, data.micro_batch_size))
        self.info(accounting.table())
        if note := beyond_positions(model, accounting.longest):
            self.info(f"warning: {note}")
        (first,) = first_rows(data.dataset, tokenizer)
        self.first_row = "\n".join(map(marked, first))
        start = marked(first[0], short=True).rstrip()
        self.info(f"the first row ({'learned tokens'.join(MARKS)}; see first_row.txt for all of it):\n{start}")
        special = tokenizer.special_ids.keys() & first[0].sample.tokens.tolist()
        base = getattr(model, "source", None)
        if self.world.is_main and base and (untrained := untrained_tokens(model, base, special)):
            names = ", ".join(f"{tokenizer.special_ids[each]} ({each})" for each in untrained)
            advice = "Train the embedding and the head too"
            if adapted_modules(model):
                advice = f"Train them with adapter.trainable_tokens={untrained}, or all parameters with full_finetune"
            self.info(
                f"warning: the data contain {names}, whose rows of the embedding or head were never trained and are "
                f"frozen: the model can hardly read or write these tokens. {advice}"
            )
        self._describe_steps(data, "optimizer steps")
        self.dataset_name = data.dataset.name
        self.data = accounting.as_dict() | {"steps_per_epoch": data.steps_per_epoch}
        if self.world.is_main:
            parts = parts_of(data.dataset, "training"), parts_of(validation, "validation")
            self.data["warnings"] = warnings_about(*parts, tokenizer)
            for warning in self.data["warnings"]:
                self.info(f"warning: {warning}")
        self.stream = data.dataset if isinstance(data.dataset, Stream) else None

    def describe_rollouts(self, data: PromptLoader, rollouts: Rollouts) -> None:
        """Report the model, the prompts, the number of steps, and a warning if nothing ends completions.

        Raises TuneError if a process has other prompts.
        """
        self._require_same_data(data.dataset)
        how, longest = Parallelism.of(rollouts.model), rollouts.longest
        rows = data.prompts_per_step * rollouts.samples
        work = StepSize(longest, longest, longest, rows, rows * longest, rollouts.micro_batch_size)
        self._describe_model(how, how.whole or rollouts.model, work)
        self.info(data.dataset.table())
        if not (rollouts.sampler.stop_ids or rollouts.sampler.stop_strings):
            self.info(
                "warning: the tokenizer has no eos_token, so nothing ends a completion. Set sampling.stop_strings"
            )
        self._describe_steps(data, "steps")
        self.dataset_name = data.dataset.name
        self.data = data.dataset.as_dict()

    def _require_same_data(self, *parts: Any) -> None:
        found = self.world.from_all_ranks([None if part is None else part.fingerprint for part in parts])
        why = "Files, the version of a Hub dataset, or the results of your own functions differ"
        run_folder.require_same(found, self.world, "dataset: the rows", why)

    def _describe_steps(self, data: DataLoader | PromptLoader, what: str) -> None:
        an_epoch = f", {data.steps_per_epoch:,} an epoch" if data.steps_per_epoch else ""
        few = ": few to learn from; raise the epochs, or use fewer rows per step" if len(data) < FEW_STEPS else ""
        few = "" if data.max_steps else few
        self.info(f"{len(data):,} {what if len(data) > 1 else what.removesuffix('s')}{an_epoch}{few}")
        if (data.max_steps or 0) > len(data):
            ends = f"epochs={data.epochs} ends after {len(data):,}"
            self.info(
                f"warning: max_steps={data.max_steps:,} is not reached: {ends}. Raise epochs, or use fewer rows a step"
            )

    def steps(
        self, data: Iterable[tuple[int, T]], checkpointer: Checkpointer | None = None,
        evaluator: Evaluator | None = None, *, total: int | None = None, seed: NonNegativeInt = 0,
    ) -> Iterator[tuple[int, T]]:  # fmt: skip
        """Restore the last checkpoint, describe the run, start writing to its folder, measure what is due before the
        first step, and iterate over the optimizer steps of `data`: pairs of a step and its batch.

        The iteration goes from the step after the restored one to `total` (default: the length of `data`), also if
        `data` have more steps. It ends earlier with the data, or when the `checkpointer` reports that training is over.
        After a first Ctrl-C or SIGTERM on any rank, the running
        step is the last one: the checkpointer saves it, and the process exits with code 130. Each step and its wait for
        data are timed.

        In each step, the generators of torch, NumPy and `random` are seeded by `seed`, step and data rank. A recipe
        thus draws the same numbers when it runs again, also from a checkpoint.
        """
        self.checkpointer, self.evaluator = checkpointer, evaluator
        if evaluator:
            pixels = getattr(getattr(evaluator.data, "dataset", None), "pictures", None)
            blank = collate([[]], pictures=pixels).to(self.world.device).pictures if pixels else None
            check_forward(evaluator.model, blank)
            if isinstance(evaluator.data, DataLoader):  # the loop may iterate over several, or its own
                self._describe_rows(evaluator.model, evaluator.data, evaluator.tokenizer)
        self._set_ends(data, checkpointer.resume(self.resume) if checkpointer else 0, total)
        self._begin(self.step)
        self.interrupt = Interrupt()
        self._measure_before()
        return self._steps(data, checkpointer, seed)

    def fetch(self, **values: torch.Tensor | float) -> dict[str, float]:
        """Return numbers of a step as floats: the only wait for the device.

        `values` are the same on all processes. Added are the learning rates of the checkpointer's optimizer and, if the
        evaluator's model and loss count them, the metrics of experts and the accuracy.
        """
        optimizer = self.checkpointer.optimizer if self.checkpointer else None
        if self.evaluator:
            of_experts = evaluation.routing(self.evaluator.model, self.world)
            of_loss = evaluation.accuracy(self.evaluator.loss_fn, self.world)
            values = {**values, **of_experts, **of_loss}
        return self.world.fetch(**values) | (optimizers.learning_rates(optimizer) if optimizer else {})

    def model_card(self, base: str) -> str:
        """Return README.md for the exported model, which was trained from `base`."""
        return model_card(self.recipe, base, self.dataset_name)

    def _set_ends(self, data: Iterable[Any], start: int, total: int | None) -> None:
        if total is None:
            if not isinstance(data, Sized):
                raise TuneError(f"total: a {type(data).__name__} has no length. Pass the number of optimizer steps")
            total = len(data)
        if start > total:
            raise TuneError(
                f"resume: the checkpoint is of step {start}, but this run ends at step {total}. Raise the number of "
                "steps, or start over with resume=never and another output_dir"
            )
        self.step, self.total = start, total

    def continues(self) -> Path | None:
        """Return the folder of the run whose checkpoint training continues from, or None. All processes call it."""
        folder = rehearsal.named(self.path)
        found = self.world.of_main(lambda: run_folder.continued(folder, self.resume))
        return found and found.parents[1]

    def is_interrupted(self, step: int) -> bool:
        """Return whether any rank got Ctrl-C or SIGTERM before the first call in this step. All processes call it."""
        if self.asked != step:
            self.asked = step
            self.interrupted = self.world.any(self.interrupt is not None and self.interrupt.requested)
        return self.interrupted

    def is_end(self, step: int) -> bool:
        """Return whether training ends with this step (the last one, or `is_interrupted`). All processes call it."""
        return self.is_interrupted(step) or step == self.total

    def _begin(self, start: int) -> None:
        """Start writing to the folder."""
        run_folder.log_preparation(None)
        if self.world.is_main:
            self.path.mkdir(parents=True, exist_ok=True)
        self.world.of_main(lambda: lock.hold(self.path, make=True))
        self.was_done = start == self.total and self.world.of_main(lambda: records.is_done(self.path))
        if self.world.is_main:
            sinks = open_sinks(self.path, self.trackers, self.settings)
            for sink, message in itertools.product(sinks, self.messages):
                sink.message(message)
            self.sinks += sinks
            self.files = next(sink for sink in sinks if isinstance(sink, Files))
            self._report_earlier_starts(start)
            device = self.world.device
            records.start(
                self.path, start, steps=self.total, recipe=self.recipe, command=without_secrets(sys.argv),
                processes=self.world.size, torch=torch.__version__,
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            )  # fmt: skip
            self.has_begun = True
            (self.path / "data.json").write_text(json.dumps(self.data, indent=2) + "\n", encoding="utf-8")
            (self.path / "first_row.txt").write_text(self.first_row, encoding="utf-8")
        for sink in self.sinks:
            sink.start(start, self.total)

    def _steps(
        self, data: Iterable[tuple[int, T]], checkpointer: Checkpointer | None, seed: int
    ) -> Iterator[tuple[int, T]]:
        items, begin = iter(data), time.perf_counter()
        self.step_began = begin
        tell = self.info if self.world.is_main else functools.partial(print, file=sys.stderr, flush=True)
        if self.store:
            self.store.start(tell, checkpointer.keep if checkpointer else None)
        watchdog = Watchdog(self.path / "stacks", self.world, tell, apart=self.store is not None)
        try:
            while True:
                watchdog.beat(self.step + 1)
                if self.step >= self.total or (checkpointer and checkpointer.is_over()):
                    return
                item = next(items, None)
                if item is None:
                    return
                self.step = item[0]
                PACE.intervals.append((begin, time.perf_counter(), 1.0))
                self.data_seconds = time.perf_counter() - begin
                seed_generators(seed, self.step, self.world.data_rank)
                yield item
                begin = time.perf_counter()
                self.save_seconds = begin - self.step_began  # after a step is logged, its checkpoint is saved
                if self.is_interrupted(self.step):
                    if checkpointer and checkpointer.wait() < self.step:  # `continue` in the loop skipped the save
                        checkpointer.save(self.step, wait=True)
                    self._exit(checkpointer)
        finally:
            watchdog.end()

    def _report_earlier_starts(self, start: int) -> None:
        is_first = not (self.path / "config.yaml").exists()
        changed = config.save(self.settings, self.path)
        if start or not is_first:
            said = [f"continued after step {start}" if start else "started over: no checkpoint was complete"]
            if self.was_done:
                whole = f"{self.path} is complete ({start:,} of {self.total:,} steps): nothing to train"
                said = [f"{whole}. For a new run, name another folder"]
            if lost := [step for step in lines_after(self.path / "metrics.jsonl", start)[1] if step]:
                which = f"step {lost[0]} was" if len(lost) == 1 else f"steps {lost[0]} to {lost[-1]} were"
                said.append(f"{which} trained but not saved, and will be trained again")
            self.info("; ".join([*said, f"changed: {', '.join(changed)}"] if changed else said))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time in this context from the step's time."""
        begin = time.perf_counter()
        yield
        self.step_began += time.perf_counter() - begin

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the seconds in this context as a metric of the step."""
        begin = time.perf_counter()
        yield
        self.timings[name] = time.perf_counter() - begin

    def log(self, step: int, batch: Counted, metrics: Mapping[str, float | None]) -> None:
        """Record the metrics of an optimizer step (see docs/runs.md), with token counts of its `batch` over all ranks,
        and speeds. None leaves a metric out, and so does NaN in a step that supervises no token."""
        tokens, supervised_tokens = batch.num_tokens, batch.num_supervised
        now = time.perf_counter()
        seconds, self.step_began = now - self.step_began, now
        values = {name: value for name, value in metrics.items() if value is not None}
        if not supervised_tokens:  # a mean over no tokens is NaN
            values = {name: value for name, value in values.items() if not math.isnan(value)}
        if steps_per_epoch := self.data.get("steps_per_epoch"):
            values["epoch"] = step / steps_per_epoch
        values |= self.timings | {
            "tokens": tokens,
            "supervised_tokens": supervised_tokens,
            "tokens_per_second": tokens / seconds / self.world.size,
            "supervised_tokens_per_second": supervised_tokens / seconds / self.world.size,
            "step_seconds": seconds,
            "data_seconds": self.data_seconds,
            "save_seconds": self.save_seconds,
            "peak_memory_gib": peak_memory_gib(self.world.device),
            **PACE.slowest(),
        }
        if peak := peak_flops(self.world.device):
            values["mfu"] = values["tokens_per_second"] * self.flops_per_token / peak
        self.record(step, values)
        self.logged, self.has_learned = self.logged + 1, self.has_learned or supervised_tokens > 0
        if not supervised_tokens:
            why = "all groups are dead or were cut" if "dead_groups" in metrics else "no token is supervised"
            self.info(f"warning: nothing was learned in step {step}: {why}")

    def append(self, file: str, records: list[dict[str, Any]]) -> None:
        """Append the `records` of all data ranks, as JSON lines, to a file in the run folder."""
        gathered = self.world.all_gather(records)
        if self.files and any(gathered):
            self.files.append(file, *(json.dumps(record, ensure_ascii=False) for each in gathered for record in each))
            self._report_disk()

    def record(self, step: int, values: dict[str, float]) -> None:
        """Send finite metrics to the sinks; a validation before the first step is step 0. A metric that becomes NaN or
        infinite is reported in a warning."""
        require_scalars(values)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        broken = values.keys() - finite.keys()
        if new := sorted(broken - self.broken):
            named = ", ".join(f"{name} is {values[name]}" for name in new)
            self.info(f"warning: step {step}: {named}. Such values are not recorded")
        self.broken = (self.broken - finite.keys()) | broken
        values = finite
        for sink in self.sinks:
            sink.metrics(step, values)
        self._report_disk()


def _supervised(metrics: Path) -> list[float]:
    """Return the supervised tokens of each step in a file of metrics."""
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    return [line["supervised_tokens"] for line in map(records.json_object, lines) if "supervised_tokens" in line]


def require_scalars(metrics: Mapping[str, Any]) -> None:
    """Raise TuneError if one of the metrics is not a number."""
    for name, value in metrics.items():
        if value is None or isinstance(value, str | list | tuple | dict):
            raise TuneError(f"metrics: {name} is a {type(value).__name__}; a metric is a number")


def _trackers(trackers: Sequence[Any]) -> list[Sink]:
    """Return the sinks that the settings name. Raises TuneError for other components, or a missing package."""
    made: list[Sink] = []
    for index, tracker in enumerate(trackers):
        with explained(f"trackers[{index}]"):
            node: Any = OmegaConf.to_container(tracker, resolve=True) if isinstance(tracker, DictConfig) else tracker
            node = {config.COMPONENT: node} if isinstance(node, str) else node
            if not isinstance(node, Mapping):
                raise TuneError(f"{node} is neither the dotted path of a tracker nor a group with {config.COMPONENT}")
            sink = config.instantiate(node)
            if not isinstance(sink, Sink):
                raise TuneError(
                    f"{node[config.COMPONENT]} returns a {type(sink).__name__}. It must return a tune.loggers.Sink"
                )
            made.append(sink)
    return made


def seed_generators(*numbers: int) -> None:
    """Seed the generators of torch (on all devices), NumPy and `random` with a function of these numbers."""
    state = int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest())
    torch.manual_seed(state)
    np.random.seed(state)
    random.seed(state)


def over_slow_links(sizes: dict[str, int], ep: int, here: int) -> Iterator[str]:
    """Yield a warning for each axis that communicates within blocks and spans nodes of `here` processes."""
    for axis, size, reach in (("tp", sizes["tp"], 1), ("cp", sizes["cp"], sizes["tp"]), ("ep", ep, sizes["tp"])):
        if size > 1 and here % (size * reach):
            most = f"parallel.{axis} to a divisor of {here // reach}" if here > reach else "it to 1"
            yield f"{axis} {size} spans nodes of {here} processes, whose links are slow. Set {most}"
