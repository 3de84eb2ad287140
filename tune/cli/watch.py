"""Watch a run in the terminal: curve, last metrics, time left, warnings, and as much of its report as fits. It ends
with the run and then shows the whole report. Ctrl-C ends the watch, not the run."""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from tune.lookup import local_path
from tune.records import TEMPLATES, Record, changed, number, read, samples, seconds, uses
from tune.terminal import visible

LINES, BLOCKS = 8, " ▁▂▃▄▅▆▇█"  # of the curve
CURVES = ("validation_loss", "validation_reward", "grad_norm", "lr")  # with a line of their own, first
NO_BREAK = "\N{NO-BREAK SPACE}"
RECENT = 50  # steps that the shown speed is measured over


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("run", metavar="RUN", type=local_path, help="a run folder")
    path = parser.parse_args(arguments).run
    console, run = Console(highlight=False), read(path)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            run = read(path)
            parts = [*view(run, console.width)]
            room = console.height - 1 if console.is_terminal and run.goes_on else sys.maxsize
            for line in details(run, console.width):
                if len(console.render_lines(Group(*parts, line))) > room:
                    break
                parts.append(line)
            live.update(Group(*parts), refresh=run.goes_on)  # at the end the last view is shown in full
            if not run.goes_on:
                break
            time.sleep(max(1.0, 5 * (time.monotonic() - began)))  # reading a long run takes seconds
    if not console.is_terminal:
        console.line()  # there Live does


def view(run: Record, width: int) -> Iterator[RenderableType]:
    """Yield the main view of a run, for a terminal of `width` columns."""
    color = {"preparing": "cyan", "running": "cyan", "done": "green"}.get(run.state, "red")
    yield Text.assemble((visible(run.path), "bold"), "  ", (run.state, color), f"  {run.facts.get('error') or ''}")
    steps, times = run.known("time")
    if run.state == "preparing":
        yield Text("".join(run.text("log.txt", 4096).splitlines()[-1:]))
        return
    if not len(steps):
        yield Text("no step has finished yet")
        return
    total = run.facts.get("steps", 0)
    pace = (times[-1] - times[-RECENT:][0]) / max(1, steps[-1] - steps[-RECENT:][0])
    left = timedelta(seconds=round(max(0, total - steps[-1]) * pace))
    ago = timedelta(seconds=max(0, round(time.time() - times[-1])))
    goes_on = f"  {left} left, last step {ago} ago" if run.state == "running" else ""
    yield Text(f"step {steps[-1]:,.0f}{f' of {total:,}' if total else ''}, {pace:.3g} s a step{goes_on}")
    yield ProgressBar(total=max(total, 1), completed=steps[-1], width=min(width, 60))
    name = main_curve(run)
    values = run.known(name)[1]
    if len(values):
        now = "" if run.exported_step else " now"
        yield Text(f"\n{name}: {run.shown(name)}{now}, {number(values.min())} to {number(values.max())}")
        yield Text("\n".join(curve(values, max(1, width - 2))), "cyan")
    last = {each: run.shown(each).replace(" ", NO_BREAK) for each in run.columns if each not in ("step", "time", name)}
    yield Text("\n" + "   ".join(f"{each}{NO_BREAK}{value}" for each, value in last.items()))
    yield Text("\n".join(["", *(f"warning: {each}" for each in run.warnings[-3:])]), "yellow")


def main_curve(run: Record) -> str:
    return "reward" if "reward" in run.columns else "loss"


def details(run: Record, width: int) -> Iterator[Text]:
    """Yield the other parts of the report, the most informative first."""
    yield from curves(run, CURVES, width)
    if parts := [f"{part} {TEMPLATES.filters['duration'](each)}" for part, each in seconds(run).items()]:
        yield Text("time: " + ", ".join(parts))
    counts = {name: each for name, each in run.data.items() if each and isinstance(each, int | float)}
    dropped = run.data.get("dropped") or {}
    is_dropped = run.data.get("first_dropped", dropped)  # other rows are held out
    counts |= {f"dropped, {why}" if why in is_dropped else why: count for why, count in dropped.items()}
    if counts:
        yield Text("data: " + ", ".join(f"{name.replace('_', ' ')} {number(each)}" for name, each in counts.items()))
    yield from beginnings({"the first row": run.text("first_row.txt", 6000, True)}, width)
    for prompt, before, after in samples(run):
        yield from beginnings({"\nprompt": prompt, "first": before, "last": after}, width)
    for key, (default, value) in changed(run) or []:
        yield Text(f"{key}: {TEMPLATES.filters['setting'](value)} (default: {TEMPLATES.filters['setting'](default)})")
    shown = ("step", "time", "epoch", main_curve(run), *CURVES)
    yield from curves(run, [name for name in run.columns if name not in shown], width)
    for sentence, commands in uses(run) if not run.goes_on else ():
        yield Text(visible("\n".join(["", sentence, *commands])))


def beginnings(texts: dict[str, str], width: int) -> Iterator[Text]:
    """Yield about three lines of each text after its title, with learned tokens in another color."""
    for title, text in texts.items():
        if text:
            line = Text(f"{title}: {' '.join(text.split())}")
            line.truncate(3 * width, overflow="ellipsis")
            line.highlight_regex("⟦[^⟧]*⟧?", "green")
            yield line


def curves(run: Record, names: Iterable[str], width: int) -> Iterator[Text]:
    """Yield a line for each of these metrics that has at least two values, all finite."""
    for name in names:
        values = run.known(name)[1]
        if np.isfinite(values).all() and len(values) > 1:
            yield Text(f"{name:<17} {curve(values, max(1, min(60, width - 32)), 1)[0]} {run.shown(name)}")


def curve(values: np.ndarray, width: int, lines: int = LINES) -> list[str]:
    """Return lines of block characters, at most `width` wide. Each column is the mean of consecutive values."""
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    span = np.ptp(means) or 1.0
    eighths = np.rint((means - means.min()) / span * (8 * lines - 1)).astype(int) + 1
    return ["".join(BLOCKS[each] for each in np.clip(eighths - 8 * row, 0, 8)) for row in reversed(range(lines))]
