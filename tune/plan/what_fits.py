"""What makes a run fit: the memory that changes of settings save, and the longest rows."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from tune.config import less_memory
from tune.errors import TuneError
from tune.plan.memory import Layout
from tune.plan.planning import LEAST_TOKENS, Job, Plan
from tune.types import as_given

PIECE = 128  # tokens: lengths of rows are multiples of it
CLOSE = 1.02  # the longest rows are found when rows longer by this factor do not fit
MOST = 2**24  # tokens


def savings(job: Job, layout: Layout, changed: Callable[[str, int], Job]) -> Iterator[tuple[str, Plan]]:
    """Yield the changes that lower the peak of `job` in this layout, with their plans: settings, and twice the devices.

    `changed` returns the job with a changed setting (key=value, or "" for none) on a number of processes. It raises
    TuneError for what the recipe or a rule refuses; such changes are left out.
    """
    now = job.plan(layout)
    names = {key: name for name, key in job.keys.items()}
    for key, value in less_memory(job.cfg, has_gpu=not job.device.is_host):
        change = f"{key}={as_given(value)}"
        new = replace(layout, **{names[key]: value}) if key in names else layout
        if (plan := _planned(changed, change, job.processes, new)) and plan.peak < now.peak:
            yield change, plan
    plan = _planned(changed, "", 2 * job.processes, replace(layout, dp_shard=2 * layout.dp_shard))
    if plan and plan.peak < now.peak:
        yield f"{2 * job.processes} devices", plan


def _planned(changed: Callable[[str, int], Job], change: str, processes: int, layout: Layout) -> Plan | None:
    try:
        return changed(change, processes).plan(layout)
    except TuneError:
        return None


class Longest(NamedTuple):
    """The longest rows that fit, and the plan of a step with them."""

    tokens: int
    plan: Plan


def longest_rows(start: int, with_rows: Callable[[int], Job], is_searched: bool) -> list[Longest]:
    """Return the longest rows that fit, one row in a micro-batch, for each layout that is the fastest at some length,
    among all layouts or among those without offload, and for the layout that needs the least. Shorter rows come first.

    Layouts differ in activation checkpointing and offload, and if `is_searched` also in the axes. The list is empty if
    no row fits. `with_rows` returns the job with rows of a number of tokens; the search begins at `start` tokens.
    """
    job_with = cache(with_rows)
    layouts = job_with(max(start, LEAST_TOKENS * job_with(start).processes)).layouts_of_one_row(is_searched)

    @cache
    def plan(layout: Layout, tokens: int) -> Plan:
        return job_with(tokens).plan(layout)

    def fitting(layouts: Iterable[Layout], tokens: int) -> list[Layout]:
        """Return those of the layouts that fit, fastest first."""
        fits = []
        for layout in layouts:
            try:
                fits += [layout] if plan(layout, tokens).fits else []
            except TuneError as error:  # the model cannot be divided along these axes
                if layout.size == layout.dp_shard or not str(error).startswith("parallel."):
                    raise
        return sorted(fits, key=lambda layout: plan(layout, tokens).step_seconds)

    tokens, fits = start, fitting(layouts, start)
    while tokens > PIECE and not fits:
        tokens = max(PIECE, tokens // 2 // PIECE * PIECE)
        fits = fitting(layouts, tokens)
    tried = dict[Layout, int]()  # the layouts to list, and the longest rows tried with them
    last = fits
    while tokens <= MOST and fits:
        on_device = [layout for layout in fits if not (layout.activation_offload or layout.cpu_offload)]
        tried |= {layout: tokens for layout in fits if layout in tried or layout in (fits[0], *on_device[:1])}
        last, tokens = fits, 2 * tokens
        fits = fitting(last, tokens)  # what does not fit now does not fit longer rows
    if tried:
        smallest = min(last, key=lambda layout: plan(layout, tokens).share)
        tried.setdefault(smallest, tokens // 2)  # it may not be the fastest anywhere, but fits the longest rows
    found = [_longest(fits, partial(plan, layout)) for layout, fits in tried.items()]
    return sorted(found, key=lambda longest: longest.tokens)


def _longest(fits: int, plan: Callable[[int], Plan]) -> Longest:
    """Return the longest rows from `fits` tokens, which fit, up to twice as many."""
    beyond = 2 * fits
    while beyond - fits > max(PIECE, (CLOSE - 1) * fits):
        below, above = plan(fits).share, plan(beyond).share
        if above <= 1:
            return Longest(beyond, plan(beyond))
        # Memory grows at least linearly, so the row on the line between both ends fits, and is nearly the longest.
        line = fits + int((1 - below) / (above - below) * (beyond - fits))
        middle = max(line, int(CLOSE * fits)) if line - fits < PIECE else line
        middle = min(max(middle // PIECE * PIECE, fits + PIECE), beyond - PIECE)
        fits, beyond = (middle, beyond) if plan(middle).fits else (fits, middle)
    return Longest(fits, plan(fits))
