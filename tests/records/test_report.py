"""report.html in a browser: it fetches nothing, no script fails, and the curves have the points of the metrics."""

import functools
import json
import re
import signal

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from run_folders import write_run

from tune.errors import TuneError
from tune.records import read, write_report
from tune.records.page import samples, seconds, thin, uses

needs_browser = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed (Debian's package: chromium)")


@pytest.fixture
def make_run(tmp_path):
    return functools.partial(write_run, tmp_path)


@pytest.fixture
def shown(tmp_path):
    """Return a function that writes the report of some runs and opens it."""
    browsers = []

    def show(*folders, **options):
        page = tmp_path / "page.html"
        assert write_report(folders, page) == page.stat().st_size < 3 * 2**20
        browsers.append(Browser(**options))
        browsers[-1].open(page)
        return browsers[-1]

    yield show
    for browser in browsers:
        fetched = [url for url in browser.requests if not url.startswith(("file:", "data:"))]
        browser.__exit__()
        assert (browser.errors, fetched) == ([], [])
        assert len([url for url in browser.requests if url.startswith("file:")]) == 1


def curves(browser):
    """Return the values of each curve, by chart."""
    script = """charts.map(each => each.series.slice(1).map((series, at) => [series.label, [...each.data[0]].flatMap(
        (step, place) => each.data[at + 1][place] == null ? [] : [[step, each.data[at + 1][place]]])]))"""
    titles = browser.ask("[...document.querySelectorAll('.chart h3')].map(each => each.textContent)")
    lines_by_title = zip(titles, browser.ask(script), strict=True)
    return {title: {label: dict(points) for label, points in lines} for title, lines in lines_by_title}


@pytest.mark.slow
@needs_browser
def test_report_of_one_run(shown, make_run):
    browser = shown(make_run())
    charts = curves(browser)
    assert list(charts)[:3] == ["Loss", "Gradient norm", "Learning rate"] and "epoch" not in str(charts)
    assert charts["Loss"]["loss"] == {step: pytest.approx(2 / step, rel=1e-5) for step in range(1, 13)}
    assert charts["Loss"]["validation_loss"] == {step: pytest.approx(2.1 / step, rel=1e-5) for step in (4, 8, 12)}
    assert set(charts["Seconds of a step"]) == {"step_seconds", "data_seconds", "save_seconds"}
    text = browser.ask("document.body.innerText")
    for part in ("done", "llama trained on chats.jsonl", "4 of 50 rows are copies", "the data are few", "0:00:35"):
        assert part in text, text
    assert "dropped: nothing to learn" in text and "33.3%" in text
    assert browser.ask("[...document.querySelectorAll('.row mark')].map(each => each.textContent)") == [
        "because ", "<script>alert(1)</script>"
    ]  # fmt: skip
    changed = browser.ask("[...document.querySelector('.settings').rows].map(row => row.innerText.split('\\t'))")
    assert changed == [
        ["setting", "default", "this run"], ["model.path", "???", "llama"], ["dataset.path", "???", "chats.jsonl"],
        ["max_steps", "null", "12"], ["optimizer.lr", "2e-05", "0.001"],
    ]  # fmt: skip


@pytest.mark.slow
@needs_browser
def test_hanging_browser_fails_the_test(monkeypatch):
    with Browser() as stopped:
        monkeypatch.setattr("browser.HANGS", 1)
        stopped.process.send_signal(signal.SIGSTOP)
        with pytest.raises(AssertionError, match="the browser hangs"):
            stopped.ask("1")


@pytest.mark.slow
@needs_browser
def test_reading_and_zooming(shown, make_run):
    browser = shown(make_run(steps=101))
    plot = "document.querySelector('.u-over').getBoundingClientRect()"
    left, top, width = (browser.ask(f"{plot}.{name}") for name in ("left", "top", "width"))
    legends = """[...document.querySelectorAll('.u-legend')].map(
        each => [...each.querySelectorAll('.u-value')].map(value => value.innerText))"""
    assert browser.ask(legends)[0] == ["101", "0.0198", "0.021"]  # the last values when nothing is hovered
    browser.drag((left + width / 2, top + 20), (left + width / 2, top + 20))
    assert browser.ask(legends)[0] == ["51", "0.03922", "0.04375"]  # from the last validation, at step 48
    assert all(values[0] == "51" for values in browser.ask(legends))  # in all charts
    browser.drag((left + width * 0.2, top + 20), (left + width * 0.4, top + 20))
    ranges = browser.ask("charts.map(each => [each.scales.x.min, each.scales.x.max])")
    assert ranges == [[pytest.approx(21, abs=1), pytest.approx(41, abs=1)]] * len(ranges)
    browser.ask("document.querySelector('.tools button').click()")
    browser.wait_for("charts.map(each => [each.scales.x.min, each.scales.x.max])", [[1, 101]] * len(ranges))
    browser.ask("smoothing.value = 0.5, smoothing.oninput()")
    smooth = [2, (2 * 0.25 + 1 * 0.5) / 0.75, (2 * 0.125 + 1 * 0.25 + 2 / 3 * 0.5) / 0.875]
    browser.wait_for("charts[0].data[2].slice(0, 3)", pytest.approx(smooth))


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_report_fits_the_screen(width, dark, shown, make_run):
    folder = make_run("a-long-name-of-a-run-that-does-not-fit-into-one-line-of-a-phone", lr=0.5)
    browser = shown(folder, make_run("other", steps=5), width=width, dark=dark)
    assert browser.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    back = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back))) < 200) == dark
    browser.ask("dispatchEvent(new Event('beforeprint'))")  # print layout: white, with everything unfolded
    assert sum(map(int, re.findall(r"\d+", browser.ask("getComputedStyle(document.body).backgroundColor")))) > 600
    assert browser.ask("[...document.querySelectorAll('details.run')].every(each => each.open)")


@pytest.mark.slow
@needs_browser
def test_overlaid_runs_of_different_recipes(shown, make_run):
    """One run has other metrics, the other has no default settings; both share their name with another run."""
    one, other = make_run("one/run"), make_run("two/run", steps=30, lr=0.1, state="failed", error="<i>no</i> memory")
    (other / "config.yaml").write_text("reward: mine.right\nmax_steps: 30\n")
    (other / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 0.5, "kl": 0.1}\n{"step": 2, "reward": 0.7, "kl": 0.2}\n'
    )
    browser = shown(one, other)
    charts = curves(browser)
    assert charts["Loss"].keys() == {f"{one} loss", f"{one} validation_loss"}
    assert charts["Reward"] == {f"{other} reward": {1: 0.5, 2: 0.7}} and charts["kl"] == {
        f"{other} kl": {1: 0.1, 2: 0.2}
    }
    text = browser.ask("document.body.innerText")
    assert "The run has failed: <i>no</i> memory" in text and "mine.right" in text and "max_steps\t12\t30" in text


@pytest.mark.slow
@needs_browser
def test_gaps_are_drawn_as_gaps(shown, make_run):
    folder = make_run(steps=10)
    lines = (folder / "metrics.jsonl").read_text().replace('"loss": 0.4,', '"loss": NaN,').replace('"loss": 0.25,', "")
    (folder / "metrics.jsonl").write_text(lines)
    browser = shown(folder)
    assert sorted(curves(browser)["Loss"]["loss"]) == [1, 2, 3, 4, 6, 7, 9, 10]
    assert browser.ask("charts[0].data[1].map(each => each === null)") == [step in (5, 8) for step in range(1, 11)]


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("steps", [0, 1])
def test_run_with_hardly_any_steps(steps, shown, make_run):
    folder = make_run(steps=steps, state="running")
    assert "The run was killed" in shown(folder).ask("document.body.innerText")


def write_samples(folder, *samples, end=""):
    lines = [json.dumps(dict(zip(("step", "prompt", "text", "row"), sample, strict=False))) for sample in samples]
    (folder / "samples.jsonl").write_text("".join(line + "\n" for line in lines) + end)


@pytest.mark.slow
@needs_browser
def test_samples_before_and_after(shown, make_run):
    folder = make_run()
    before = (0, "why?", "no idea"), (0, "where?", "<b>here</b>")
    write_samples(folder, *before, (6, "why?", "half"), (12, "why?", "yes"), (12, "where?", "there"), end='{"step": 1')
    articles = shown(folder).ask("[...document.querySelectorAll('article')].map(each => each.innerText.split(/\\n+/))")
    assert articles == [
        ["why?", "first", "no idea", "last", "yes"],
        ["where?", "first", "<b>here</b>", "last", "there"],
    ]


def test_samples_of_one_step_are_shown_once(make_run):
    folder = make_run()
    write_samples(folder, (0, "why?", "no idea"))
    assert samples(read(folder)) == [("why?", "no idea", "")]


def test_samples_with_different_prompts_in_each_step(make_run):
    folder = make_run()
    chat = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2?"}]}
    write_samples(folder, (1, 0, "a", {"prompt": "1?"}), (1, 1, "b", chat), (2, 2, "c", {"q": "3?"}), (2, "4?", "d"))
    first, last = [("1?", "a", ""), ("Be kind.\n2?", "b", "")], [('{"q": "3?"}', "", "c"), ("4?", "", "d")]
    assert samples(read(folder)) == first + last


@pytest.mark.weekly
def test_long_run_keeps_its_extremes(make_run, tmp_path):
    folder, steps = make_run(steps=0), 100_000
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(steps):
            peak = 99 if step == 77_777 else -99 if step == 3333 else float("nan") if step == 5000 else step % 7
            lines.write(json.dumps({"step": step, **{f"metric_{name}": peak + name for name in range(25)}}) + "\n")
    assert write_report([folder], tmp_path / "page.html") < 3 * 2**20
    curves = json.loads(re.search(r'id="curves">(.*?)</script>', (tmp_path / "page.html").read_text(), re.DOTALL)[1])[
        "curves"
    ]
    assert len(curves) == 25
    for name, curve in enumerate(curves):
        points = dict(zip(curve["steps"], curve["values"], strict=True))
        assert (points[77_777], points[3333], points[5000], points[0]) == (99 + name, -99 + name, None, name)
        assert points[steps - 1] == (steps - 1) % 7 + name and len(points) < 5000


def test_thinning_follows_its_definition():
    steps, values = np.arange(10_000), np.random.default_rng(0).normal(size=10_000)
    kept, points = thin(steps, values, 400)
    assert len(kept) <= 401 and (np.diff(kept) > 0).all() and (values[kept] == points).all()
    for part in np.array_split(steps, 100):
        inside = points[np.isin(kept, part)]
        assert (inside.min(), inside.max()) == (values[part].min(), values[part].max())


def test_time_spent_excludes_the_time_between_two_starts(make_run):
    folder = make_run(steps=10, starts=[{"step": 0, "time": 1000}, {"step": 5, "time": 9000}])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[5:]:
        row["time"] += 8000
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spent = {"training": 12.5, "waiting for data": 5, "saving": 2.5, "evaluation": 8}
    assert seconds(read(folder)) == spent  # 10 steps of 2 s, plus 1 s after all but two


def test_secrets_are_not_on_the_page(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    token = "hf_" + "a" * 34
    folder = make_run(command=["recipe.py", f"dataset.path=https://me:word@host/x?token={token}"])
    (folder / "first_row.txt").write_text(f"my key is very-secret-value ⟦{token}⟧")
    (folder / "log.txt").write_text(f"token={token}\nwarning: {token}\n")
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": token, "text": "very-secret-value"}))
    (folder / "config.yaml").write_text(f"hf_token: abcdefgh\npath: https://me:word@host\nother: {token}\n")
    write_report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert not [secret for secret in (token, "very-secret-value", "me:word", "abcdefgh") if secret in page]


def test_run_without_a_model_can_be_resumed(make_run, tmp_path):
    """A second Ctrl-C ends a run before it saves anything."""
    folder = make_run(state="interrupted")
    write_report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"output_dir={folder} resume=auto" in page
    assert "The run was interrupted." in page and "saved a checkpoint" not in page


def test_step_of_the_weights_is_reported_only_when_known(make_run):
    folder = make_run(state="interrupted")
    (folder / "model").mkdir()
    newest = folder / "checkpoints/step-00000012"
    newest.mkdir(parents=True)
    (newest / "state.json").write_text('{"best": {"step": 4}}')
    ((sentence, _),) = uses(read(folder))
    assert sentence == f"The model is in {folder / 'model'}."  # the model may be from an earlier start
    (folder / "run.json").write_text((folder / "run.json").read_text().replace("interrupted", "done"))
    ((sentence, _),) = uses(read(folder))
    assert sentence.endswith("with the weights of step 12, the last one.")  # there is no checkpoint of step 4


def test_only_reports_are_overwritten(make_run, tmp_path):
    folder, page = make_run(), tmp_path / "page.html"
    write_report([folder], page)
    write_report([folder], page)
    page.write_text("my work")
    with pytest.raises(TuneError, match=r"page\.html: this file exists and is not a report"):
        write_report([folder], page)
    assert page.read_text() == "my work"
    for out in (folder, tmp_path / "page.html" / "inside.html"):
        with pytest.raises(TuneError, match="cannot be written"):
            write_report([folder], out)
