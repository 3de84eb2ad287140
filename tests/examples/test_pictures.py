"""The pictures of examples/pictures.py and the terminal of examples/terminal.py."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples import pictures, terminal

SVG = "{http://www.w3.org/2000/svg}"
RECORD: pictures.Record = {
    "title": "Loss & steps",
    "curves": {"training": [(1, 4.0), (2, 2.0), (4, 1.0)]},
    "counted": "Right",
    "results": {"before": 1, "after": 3},
    "of": 4,
    "answers": {"request": "Who?", "after": "x" * 200},
}


def test_curve_and_bars_are_drawn_to_scale() -> None:
    drawn = ElementTree.fromstring(pictures.draw(RECORD))
    (line,) = [path.get("d", "") for path in drawn.iter(f"{SVG}path") if path.get("class") == "curve"]
    points = [tuple(map(float, point.split())) for point in line[1:].split("L")]
    plot = pictures
    expected = [
        (plot.LEFT + (plot.RIGHT - plot.LEFT) * step / 4, plot.BOTTOM - (plot.BOTTOM - plot.TOP) * value / 4)
        for step, value in RECORD["curves"]["training"]
    ]
    assert [*sum(points, ())] == pytest.approx([*sum(expected, ())], abs=0.06)
    widths = [float(bar.get("width", 0)) for bar in drawn.iter(f"{SVG}rect") if bar.get("height") == "20"]
    full = pictures.BAR_RIGHT - pictures.BAR_LEFT
    assert widths == pytest.approx([full, full / 4, full, full * 3 / 4], abs=0.06)
    words = {text.text for text in drawn.iter(f"{SVG}text")}
    assert {"Loss & steps", "training", "1 of 4", "3 of 4", "0", "4", "Who?"} <= words
    assert max(map(len, filter(None, words))) == pictures.QUOTED


@pytest.mark.parametrize(
    ("largest", "values"),
    [
        (2.916, [0, 1, 2, 3]),
        (88, [0, 20, 40, 60, 80, 100]),
        (0.82, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (5, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_ticks(largest: float, values: list[float]) -> None:
    assert pictures.round_values(largest) == values


def write(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_figures_match_the_run_folder(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 1.25, "validation_loss": 1.5}])
    write(tmp_path / "results.json", [{"before": 0, "after": 2, "of": 3}])
    samples = [{"index": index, "prompt": f"{index}?", "text": f"{at}\n {index}"} for at in (0, 1) for index in (0, 1)]
    write(tmp_path / "samples.jsonl", samples)
    record = pictures.home_commands(tmp_path)
    assert [*record["curves"].values()] == [[(1, 2.5), (2, 1.25)], [(2, 1.5)]]
    assert record["results"] == {"before": 0, "after": 2} and record["of"] == 3
    assert record["answers"] == {"request": "0?", "before": "0 0", "after": "1 0"}


def test_rewards_match_the_run_folder(tmp_path: Path) -> None:
    write(tmp_path / "run" / "metrics.jsonl", [{"step": 0, "validation_reward": 0.375}, {"step": 1, "reward": 0.5}])
    record = pictures.reinforcement(tmp_path)
    assert [*record["curves"].values()] == [[(1, 0.5)], [(0, 0.375)]]
    assert record["results"] == {"before": 0.38, "after": 0.38}


def test_correct_answers_match_the_evaluations(tmp_path: Path) -> None:
    for name, share in {"teacher": 58 / 60, "labels": 0.5, "distilled": 0.75}.items():
        write(tmp_path / f"{name}.json", [{"results": {"validation": {"exact_match,none": share}}}])
        write(tmp_path / name / "metrics.jsonl", [{"step": 1, "loss": share}])
    record = pictures.distillation(tmp_path)
    assert [*record["curves"].values()] == [[(1, 0.75)], [(1, 0.5)]]
    assert record["results"] == {"teacher": 58, "labels alone": 30, "distilled": 45} and record["of"] == 60


def recorded() -> list[dict[str, str]]:
    return json.loads((terminal.FOLDER / "terminal.json").read_text(encoding="utf-8"))


def test_terminal_picture_matches_the_script() -> None:
    file = (terminal.FOLDER / "terminal.svg").read_text(encoding="utf-8")
    assert file == terminal.draw(recorded()) and len(file.encode()) < 300_000
    assert [entry["command"] for entry in recorded()] == [*terminal.COMMANDS]


def test_terminal_picture_shows_every_character_and_no_local_path() -> None:
    entries = recorded()
    shown = [text.text or "" for text in ElementTree.fromstring(terminal.draw(entries)).iter(f"{SVG}text")]
    assert max(map(len, shown)) <= terminal.COLUMNS
    printed = "".join(entry["command"] + entry["output"] for entry in entries)
    assert re.sub(r"\s|\$ ", "", "".join(shown)) == re.sub(
        r"\s|\$ ", "", "".join(f"$ {e['command']}{e['output']}" for e in entries)
    )
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", printed)


def test_terminal_picture_plays_lines_in_order() -> None:
    entries = [{"command": "a", "output": "\n".join("xyz") + "\n"}, {"command": "b", "output": "last\n"}]
    style = terminal.draw(entries).split("@keyframes below {")[1].split("}\n")[0]
    times = [float(time) for time in re.findall(r"([\d.]+)%", style)]
    heights = [int(height) for height in re.findall(r"translateY\((\d+)px\)", style)]
    assert times == sorted(times) and times[0] == 0 and times[-1] < 100
    assert heights == [terminal.LINE * number for number in range(1, 7)]
