"""Draw what the examples reached: docs/pictures/NAME.svg from docs/pictures/NAME.json.

    python examples/pictures.py                             from the top of the repository: draw all of them again
    python examples/pictures.py home_commands .demo/run     first take the numbers from the folder of a run

A picture is plain SVG with the colors of the reader's light or dark mode.
"""

import argparse
import json
import math
import tomllib
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import TypedDict

Curve = list[tuple[int, float]]  # (step, value)
Rows = list[dict[str, float]]  # lines of metrics.jsonl

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
HOME = Path(__file__).parent / "home_commands"
WIDTH, HEIGHT, ANSWERS = 720, 272, 88  # the last: below it, for answers
LEFT, RIGHT, TOP, BOTTOM = 56, 430, 64, 232  # the plot of the curves
BAR_LEFT, BAR_RIGHT = 480, 690
QUOTED = 84  # characters of a line
STYLE = """
svg { --card: #ffffff; --edge: #d0d7de; --text: #1f2328; --faint: #59636e; --grid: #e5e9ed; --first: #0969da; --second: #bc4c00 }
@media (prefers-color-scheme: dark) {
  svg { --card: #0d1117; --edge: #3d444d; --text: #f0f6fc; --faint: #9198a1; --grid: #21262d; --first: #4493f8; --second: #f0883e }
}
.answer { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text) }
.faint { fill: var(--faint) }
.title { font-weight: 600; font-size: 15px }
.grid { stroke: var(--grid) }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round }
"""  # noqa: E501
COLORS = ("var(--first)", "var(--second)")


class Record(TypedDict):
    """What a picture shows of a run."""

    title: str
    curves: dict[str, Curve]
    counted: str  # what `results` count, or measure
    results: dict[str, float]
    of: float  # the largest possible result
    answers: dict[str, str]  # to one request, by when they were given; may be empty


def home_commands(run: Path) -> Record:
    """The run folder of examples/home_commands/demo.py."""
    return before_and_after(run, "held-out requests", "Answers exactly right")


def preferences(run: Path) -> Record:
    """The run folder of examples/preferences/terse.py."""
    return before_and_after(run, "held-out pairs", "Terse answers")


def before_and_after(run: Path, validation: str, counted: str) -> Record:
    """A run folder with what its script counted before and after the training, in results.json."""
    steps, results = metrics(run), json.loads((run / "results.json").read_text(encoding="utf-8"))
    return {
        "title": "Loss over the optimizer steps",
        "curves": {"training": curve(steps, "loss"), validation: curve(steps, "validation_loss")},
        "counted": counted,
        "results": {"before": results["before"], "after": results["after"]},
        "of": results["of"],
        "answers": answers(run),
    }


def reinforcement(folder: Path) -> Record:
    """The folder of examples/reinforcement/reinforce.py."""
    steps = metrics(folder / "run")
    held_out = curve(steps, "validation_reward")
    return {
        "title": "Reward over the optimizer steps",
        "curves": {"sampled answers": curve(steps, "reward"), "held-out requests": held_out},
        "counted": "Held-out reward",
        "results": {"before": round(held_out[0][1], 2), "after": round(held_out[-1][1], 2)},
        "of": 1,
        "answers": {},
    }


def distillation(folder: Path) -> Record:
    """The folder of examples/distillation/halve.py."""
    held_out = len((HOME / "validation.jsonl").read_text(encoding="utf-8").splitlines())
    right = {}
    for name in ("teacher", "labels", "distilled"):
        (scores,) = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["results"].values()
        right[name] = round(scores["exact_match,none"] * held_out)
    return {
        "title": "Loss over the optimizer steps",
        "curves": {
            "distilled: divergence": curve(metrics(folder / "distilled"), "loss"),
            "labels: cross-entropy": curve(metrics(folder / "labels"), "loss"),
        },
        "counted": "Answers exactly right",
        "results": {"teacher": right["teacher"], "labels alone": right["labels"], "distilled": right["distilled"]},
        "of": held_out,
        "answers": {},
    }


EXAMPLES: dict[str, Callable[[Path], Record]] = {
    "home_commands": home_commands,
    "distillation": distillation,
    "preferences": preferences,
    "reinforcement": reinforcement,
}


def pictures() -> dict[str, str]:
    """All pictures by the names of their files: of each example that has numbers, and the badges of the README."""
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    drawn = {
        "license.svg": badge("license", project["license"]),
        "python.svg": badge("python", project["requires-python"].replace(">=", "≥ ")),
    }
    for name in EXAMPLES:
        if (numbers := FOLDER / f"{name}.json").exists():
            drawn[f"{name}.svg"] = draw(json.loads(numbers.read_text(encoding="utf-8")))
    return drawn


def metrics(run: Path) -> Rows:
    """The numbers of each step of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def answers(run: Path) -> dict[str, str]:
    """The first request of `evaluate.prompts`, and what the model answered before and after the training."""
    lines = (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    first = [sample for sample in map(json.loads, lines) if sample["index"] == 0]
    texts = {"request": first[0]["prompt"], "before": first[0]["text"], "after": first[-1]["text"]}
    return {name: " ".join(text.split()) for name, text in texts.items()}


def curve(steps: Rows, name: str) -> Curve:
    """The values of a metric, of the steps that have it."""
    return [(int(step["step"]), round(step[name], 4)) for step in steps if name in step]


def draw(record: Record) -> str:
    """Draw the curves of a run, its results as bars at the right, and answers below. Returns an SVG file."""
    parts = [*plot(record["title"], record["curves"]), *bars(record["counted"], record["results"], record["of"])]
    height = HEIGHT
    if record["answers"]:
        parts += quotes(record["answers"])
        height += ANSWERS
    ends = " and ".join(
        f"{name} {points[0][1]:.2f} to {points[-1][1]:.2f}" for name, points in record["curves"].items()
    )
    counts = ", ".join(f"{name} {amount(value, record['of'])}" for name, value in record["results"].items())
    described = escape(f"{record['title']}: {ends}. {record['counted']}: {counts}.")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">\n<title>{described}</title>\n<style>{STYLE}</style>\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" fill="var(--card)" '
        'stroke="var(--edge)"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def plot(title: str, curves: dict[str, Curve]) -> Iterator[str]:
    """Lines over the steps; the values begin at 0."""
    steps = max(step for points in curves.values() for step, _ in points)
    ticks = round_values(max(value for points in curves.values() for _, value in points))

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / steps

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / ticks[-1]

    rises = all(points[0][1] < points[-1][1] for points in curves.values())
    legend = BOTTOM - 20 * len(curves) if rises else TOP + 6  # where no curve is
    yield text(20, 30, title, "title")
    for value in ticks:
        yield f'<path class="grid" d="M{LEFT} {y(value):.1f}H{RIGHT}"/>'
        yield text(LEFT - 8, y(value) + 4, f"{value:g}", "faint", "end")
    for step in round_values(steps):
        if step <= steps:
            yield text(x(step), BOTTOM + 20, f"{step:g}", "faint", "middle")
    for at, ((name, points), color) in enumerate(zip(curves.items(), COLORS, strict=False)):
        path = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)
        yield f'<path class="curve" stroke="{color}" d="M{path}"/>'
        if len(points) <= 12:
            yield from (
                f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="4" fill="{color}"/>' for step, value in points
            )
        yield f'<path stroke="{color}" stroke-width="3" d="M{RIGHT - 150} {legend + 20 * at}h18"/>'
        yield text(RIGHT - 126, legend + 4 + 20 * at, name)


def bars(title: str, results: dict[str, float], of: float) -> Iterator[str]:
    """A bar for each result; the frame around it is the largest possible one."""
    yield text(BAR_LEFT, 30, title, "title")
    height = (BOTTOM - TOP) / len(results)
    for at, (name, value) in enumerate(results.items()):
        top, color = TOP + height * at, COLORS[0] if at == len(results) - 1 else "var(--faint)"
        yield text(BAR_LEFT, top + 10, name, "faint")
        yield text(BAR_RIGHT, top + 10, amount(value, of), "title", "end")
        for fill, share in (("var(--grid)", 1.0), (color, value / of)):
            width = (BAR_RIGHT - BAR_LEFT) * share
            yield f'<rect x="{BAR_LEFT}" y="{top + 20:.1f}" width="{width:.1f}" height="20" rx="3" fill="{fill}"/>'


def quotes(answers: dict[str, str]) -> Iterator[str]:
    """A request and its answers, a line each."""
    yield f'<path class="grid" d="M20 {HEIGHT - 8}H{WIDTH - 20}"/>'
    for at, (name, words) in enumerate(answers.items()):
        shown = words if len(words) <= QUOTED else f"{words[: QUOTED - 1]}…"
        yield text(20, HEIGHT + 18 + 24 * at, name, "faint")
        yield text(84, HEIGHT + 18 + 24 * at, shown, "answer")


def amount(value: float, of: float) -> str:
    return f"{value:g}" if of == 1 else f"{value:g} of {of:g}"


def badge(name: str, value: str) -> str:
    """Draw a name and a value next to each other. Returns an SVG file."""
    left, right = (round(12 + 6.6 * len(words)) for words in (name, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">'
        f"<title>{escape(name)}: {escape(value)}</title>"
        f"<style>text {{ font: 11px system-ui, sans-serif; fill: #fff; text-anchor: middle }}</style>"
        f'<rect width="{left + right}" height="20" rx="3" fill="#0969da"/>'
        f'<path d="M3 0h{left - 3}v20h-{left - 3}a3 3 0 0 1-3-3v-14a3 3 0 0 1 3-3" fill="#59636e"/>'
        f'<text x="{left / 2}" y="14">{escape(name)}</text><text x="{left + right / 2}" y="14">{escape(value)}</text>'
        "</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def round_values(largest: float) -> list[float]:
    """Round numbers from 0 up to the first that is not below `largest`, five steps at most."""
    power = 10 ** math.floor(math.log10(largest / 5))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= largest)
    return [round(distance * number, 10) for number in range(math.ceil(largest / distance - 1e-9) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", nargs="?", choices=EXAMPLES)
    parser.add_argument("run", nargs="?", type=Path, help="the folder that the example's script wrote")
    options = parser.parse_args()
    if options.run:
        record = json.dumps(EXAMPLES[options.example](options.run))
        (FOLDER / f"{options.example}.json").write_text(record + "\n", encoding="utf-8")
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
