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
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from tune import config, records, rehearsal
from tune.checkpointers import Checkpointer
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
from tune.distributed import PACE, Interrupt, World, bytes_sent, repeated_blocks, undivided
from tune.errors import TuneError, explained
from tune.evaluation import Evaluator
from tune.files import CHECKPOINT, lock
from tune.generation import Sampler
from tune.loggers import (
    WANDB_OFF,
    Console,
    Files,
    Sink,
    TensorBoard,
    WandbOptions,
    WeightsAndBiases,
    lines_after,
    open_sinks,
)
from tune.lookup import in_shell
from tune.models import HuggingFaceModel, without_names
from tune.peft import untrained_tokens
from tune.quantization import count_parameters
from tune.run import run_folder
from tune.run.flops import flops_per_token, peak_flops
from tune.run.hardware import attention_notes, disk_note, peak_memory_gib, planned_memory
from tune.run.profiler import ProfilerOptions, profile
from tune.run.store import Store
from tune.run.watchdog import Watchdog
from tune.secrets import without_secrets
from tune.terminal import visible
from tune.tokenizers import Tokenizer
from tune.types import NonNegativeInt, PositiveInt

T = TypeVar("T")
FEW_STEPS = 10  # too few steps to learn much
DType: TypeAlias = Literal["bf16", "fp16", "fp32"]


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

    Nothing is written before `steps` is called, so a wrong input does not change an earlier run.

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
        console_every: PositiveInt = 1,
        tensorboard: bool = False,
        wandb: WandbOptions = WANDB_OFF,
        trackers: Sequence[Any] = (),
    ):
        """Create a run.

        `settings` are all settings of the recipe, recorded in config.yaml and by trackers. `trackers` are components
        that return a `tune.loggers.Sink`, or their dotted paths; `tensorboard` and `wandb` are shortcuts for two.
        """
        self.__class__ = rehearsal.stand_in(type(self))
        self.recipe, self.world, self.settings = recipe, world, settings
        self.trackers = _trackers(tensorboard, wandb, trackers)
        self._open_folder(run_folder.choose(output_dir, recipe, world), resume)

        # Output. Messages of the setup are kept until training begins.
        self.sinks: list[Sink] = [Console(console_every)] if world.is_main else []
        self.messages: list[str] = []
        self.files: Files | None = None  # on the first process, once training has begun
        self.unwritten: list[str] = []  # outputs that could not be written
        self.waits = False  # whether lines currently wait for disk space
        # The data, for data.json and first_row.txt.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Close the sinks and write the report. A stream's accounting is complete only at the end of a run."""
        if error is None:
            if self.stream:
                self.info(self.stream.seen.table())
            self.world.finish()
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

    def begin(self, checkpointer: Checkpointer, evaluator: Evaluator) -> dict[str, float]:
        """Run and record the measurements that precede the first step, and return their metrics.

        In a new run they are those of the untrained model. A run that continues makes the measurements that were due at
        the step after which it ended before, so that `keep_best`, `patience` and your own lines in a measurement get
        the same values as in a run without an end. Call this between `steps` and the loop, on all processes.
        """
        if self.step == 0:
            return evaluator(0)
        if not checkpointer.unmeasured or self.step == self.total:  # `finish` measures after the last step
            return {}
        metrics = evaluator.due(self.step)
        if metrics:
            self.info(f"step {self.step}: the run ended before its measurements, so they are made now")
            self.record(self.step, metrics)
            checkpointer.step(self.step, metrics)
        return metrics

    def finish(self, checkpointer: Checkpointer | None = None, evaluator: Evaluator | None = None) -> None:
        """Run the final measurements of the `evaluator`; with `keep_best`, then load the best checkpoint's weights.

        If a signal has arrived, the process exits here with code 130, and the same command continues it. After this
        call, a signal ends the process at once, because everything is saved.
        """
        self._end_if_interrupted(checkpointer)
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

    def describe_model(
        self, model: nn.Module, work: StepSize, *, dtype: DType, master_dtype: DType, compile: Any = False,
        activation_checkpointing: str = "none", activation_offload: bool = False, cpu_offload: bool = False,
        keep: int | None = None, merged: str | None = None,
    ) -> None:  # fmt: skip
        """Report the processes, the model, its memory, and the communication in a step of this `work`.

        Types, `compile`, checkpointing and offloading are the arguments of `tune.distributed.parallelize`. For the
        check of disk space, `keep` is the number of kept checkpoints, and `merged` the base of merged adapters.
        """
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
        where = "host memory" if cpu_offload else "memory"
        then = "activations in host memory" if activation_offload else "activations"
        self.info(f"{where} of each process, GiB: {held} (with AdamW); plus {then}")
        if self.world.size > 1:
            self._describe_mesh(model, work, dtype, master_dtype)
        folder = rehearsal.named(self.path)
        if self.world.is_main and (note := disk_note(folder, model, master_dtype, keep, merged)):
            self.info(f"warning: {note}")
        self.flops_per_token = flops_per_token(model, work.mean)
        shape = work.micro_batch_size, work.row
        how = bool(compile), activation_checkpointing
        for note in attention_notes(model, self.world.device, dtype, shape, work.longest, *how):
            self.info(note)

    def _describe_mesh(self, model: nn.Module, work: StepSize, dtype: DType, master_dtype: DType) -> None:
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

    def describe(
        self,
        model: nn.Module,
        data: DataLoader,
        tokenizer: Tokenizer,
        validation: Dataset | Mixture | Stream | None = None,
        *,
        base: str | None = None,
        **how: Any,
    ) -> None:
        """Report the model, which may be on the meta device, the data, and warnings; data.json and first_row.txt keep
        the report on the data.

        `base` is the folder of the weights, used to find tokens whose frozen rows were never trained. `how` are the
        arguments of `describe_model`. Raises TuneError if a process has other data.
        """
        self._require_same_data(data.dataset, validation)
        accounting = data.dataset.accounting
        longest = data.dataset.max_seq_len if isinstance(data.dataset, Stream) else accounting.longest
        mean = accounting.tokens // max(1, accounting.samples)
        rows = data.global_batch_size
        tokens = accounting.tokens * rows // accounting.training_rows if accounting.training_rows else longest * rows
        row = accounting.row_capacity or longest
        self.describe_model(model, StepSize(row, longest, mean, rows, tokens, data.micro_batch_size), **how)
        self.info(accounting.table())
        if note := beyond_positions(model, accounting.longest):
            self.info(f"warning: {note}")
        (first,) = first_rows(data.dataset, tokenizer)
        self.first_row = "\n".join(map(marked, first))
        start = marked(first[0], short=True).rstrip()
        self.info(f"the first row ({'learned tokens'.join(MARKS)}; see first_row.txt for all of it):\n{start}")
        special = tokenizer.special_ids.keys() & first[0].sample.tokens.tolist()
        if self.world.is_main and base and (untrained := untrained_tokens(model, base, special)):
            names = ", ".join(f"{tokenizer.special_ids[each]} ({each})" for each in untrained)
            self.info(
                f"warning: the data contain {names}, whose rows of the embedding or head were never trained and are "
                "frozen: the model can hardly read or write these tokens. Train them with "
                f"adapter.trainable_tokens={untrained}, or train all parameters with full_finetune"
            )
        self._describe_steps(data, "optimizer steps")
        self.data = accounting.as_dict() | {"steps_per_epoch": data.steps_per_epoch}
        if self.world.is_main:
            parts = parts_of(data.dataset, "training"), parts_of(validation, "validation")
            self.data["warnings"] = warnings_about(*parts, tokenizer)
            for warning in self.data["warnings"]:
                self.info(f"warning: {warning}")
        self.stream = data.dataset if isinstance(data.dataset, Stream) else None

    def describe_prompts(
        self, model: nn.Module, data: PromptLoader, sampler: Sampler, *, longest: int, samples: PositiveInt,
        micro_batch_size: PositiveInt, **how: Any,
    ) -> None:  # fmt: skip
        """Report the model, the prompts, the number of steps, and a warning if nothing ends completions.

        A prompt gets `samples` completions, and has up to `longest` tokens with each. `how` are the arguments of
        `describe_model`. Raises TuneError if a process has other prompts.
        """
        self._require_same_data(data.dataset)
        rows = data.prompts_per_step * samples
        self.describe_model(model, StepSize(longest, longest, longest, rows, rows * longest, micro_batch_size), **how)
        self.info(data.dataset.table())
        if not (sampler.stop_ids or sampler.stop_strings):
            self.info(
                "warning: the tokenizer has no eos_token, so nothing ends a completion. Set sampling.stop_strings"
            )
        self._describe_steps(data, "steps")
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
        self, data: Iterable[tuple[int, T]], start: int = 0, checkpointer: Checkpointer | None = None, *,
        total: int | None = None, seed: NonNegativeInt = 0, profiler: ProfilerOptions | None = None,
    ) -> Iterator[tuple[int, T]]:  # fmt: skip
        """Start writing to the folder in this call, and iterate over the optimizer steps of `data`.

        `data` yields pairs of a step and its batch. The iteration goes from the step after `start` to `total` (default:
        the length of `data`), and ends when the `checkpointer` reports that training is over. After a first Ctrl-C or
        SIGTERM on any rank, `is_end` is true for the running step, in which the recipe saves a checkpoint; then the
        process exits with code 130. It measures each step and its wait for data. `profiler` are arguments of `profile`.

        In each step, the generators of torch, NumPy and `random` are seeded by `seed`, step and data rank. A recipe
        thus draws the same numbers when it runs again, also from a checkpoint.
        """
        self._set_ends(data, start, total)
        self._begin(start)
        self.interrupt = Interrupt()
        return profile(
            self._steps(data, checkpointer, seed),
            self.path / "profile",
            self.world,
            **(profiler or {"start": None, "steps": 1}),
        )

    def _set_ends(self, data: Iterable[Any], start: int, total: int | None) -> None:
        if total is None:
            if not isinstance(data, Sized):
                raise TuneError(f"total: a {type(data).__name__} has no length. Pass the number of optimizer steps")
            total = len(data)
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
                if (checkpointer and checkpointer.is_over()) or (item := next(items, None)) is None:
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


def require_scalars(metrics: Mapping[str, Any]) -> None:
    """Raise TuneError if one of the metrics is not a number."""
    for name, value in metrics.items():
        if value is None or isinstance(value, str | list | tuple | dict):
            raise TuneError(f"metrics: {name} is a {type(value).__name__}; a metric is a number")


def _trackers(tensorboard: bool, wandb: WandbOptions, trackers: Sequence[Any]) -> list[Sink]:
    """Return the sinks that the settings name. Raises TuneError for other components, or a missing package."""
    made: list[Sink] = []
    if tensorboard:
        with explained("logger.tensorboard"):
            made.append(TensorBoard())
    if wandb["project"]:
        with explained("logger.wandb"):
            made.append(WeightsAndBiases(wandb["project"], wandb.get("name")))
    for index, tracker in enumerate(trackers):
        with explained(f"logger.trackers[{index}]"):
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
