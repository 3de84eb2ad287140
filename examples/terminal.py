"""Draw commands and what they print as a terminal that plays for 20 seconds: docs/pictures/terminal.svg.

    python examples/terminal.py            from the top of the repository: draw terminal.svg again from terminal.json
    python examples/terminal.py --record   first run the commands (`make model` gets the model)

What is shown is what the commands printed. The waits are left out. The file has no script: CSS moves the lines and the
covers over them.
"""

import argparse
import json
import os
import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SETTINGS = "lora_finetune --config examples/home_commands/demo.yaml model.path=.demo/smollm2-135m"
COMMANDS = (
    "tune ls | head -10 | sed 's/[,:].*//'",
    f"tune validate {SETTINGS} adapter.rnk=32 micro_batch_size=3",
    f"tune run {SETTINGS} max_steps=24 output_dir=.demo/terminal",
    'tune generate .demo/terminal --system "Answer with one JSON command." --temperature 0 '
    '--prompt "could you dim the bedroom lamp to about thirty percent?"',
)
SECONDS = 20
COLUMNS, ROWS = 100, 24
CHARACTER, LINE, MARGIN, BAR = 7.83, 20, 16, 32  # pixels; a character of 13 pixels is 0.602 of them wide
WIDTH, HEIGHT = round(2 * MARGIN + COLUMNS * CHARACTER), 2 * MARGIN + BAR + ROWS * LINE
# Shares of the time: a character that is typed counts 1
PER_LINE, PER_COMMAND = 4, 60


class Shown(NamedTuple):
    """A line of the screen, and the share of the time until the next one."""

    text: str
    is_command: bool
    share: float


def record() -> list[dict[str, str]]:
    """Run the commands one after another. Returns each of them with its output."""
    recorded = []
    with TemporaryDirectory() as cache:
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
        environment = os.environ | {"PATH": path, "COLUMNS": str(COLUMNS), "TUNE_CACHE": cache}
        for command in COMMANDS:
            print(f"$ {command}", flush=True)
            done = subprocess.run(
                command, shell=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            print(done.stdout, end="", flush=True)
            recorded.append({"command": command, "output": done.stdout})
    return recorded


def lines(recorded: list[dict[str, str]]) -> list[Shown]:
    """The lines of the screen; longer ones are broken at spaces."""
    shown = []
    for entry in recorded:
        shown += [Shown(line, True, len(line)) for line in broken(f"$ {entry['command']}")]
        shown += [
            Shown(part, False, PER_LINE) for line in entry["output"].splitlines() for part in broken(line) or [""]
        ]
        shown[-1] = shown[-1]._replace(share=PER_COMMAND)
    return [*shown[:-1], shown[-1]._replace(share=3 * PER_COMMAND)]  # the end stays a while


def broken(line: str) -> list[str]:
    return textwrap.wrap(line, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def draw(recorded: list[dict[str, str]]) -> str:
    """Draw what was recorded. Returns an SVG file."""
    shown = lines(recorded)
    total = sum(line.share for line in shown)
    rows, typing, scroll, below, passed = [], [], ["0%{transform:translateY(0)}"], [], 0.0
    for at, line in enumerate(shown):
        begin, end = (100 * time / total for time in (passed, passed + line.share))
        passed += line.share
        y = LINE * at
        below.append(f"{begin:.2f}%{{transform:translateY({y + LINE}px)}}")
        if at >= ROWS:
            scroll.append(f"{begin:.2f}%{{transform:translateY({LINE * (ROWS - 1 - at)}px)}}")
        style = ' class="command"' if line.is_command else ""
        rows.append(f'<text y="{y + 15}"{style}>{escape(line.text, quote=False)}</text>')
        if line.is_command:
            width = CHARACTER * len(line.text)
            rows.append(f'<rect class="screen hidden t{at}" y="{y}" width="{width:.1f}" height="{LINE}"/>')
            typing.append(
                f".t{at}{{animation:t{at} {SECONDS}s linear infinite}}"
                f"@keyframes t{at}{{0%,{begin:.2f}%{{opacity:1;transform:translateX(0)}}"
                f"{end:.2f}%{{opacity:1;transform:translateX({width:.1f}px)}}"
                f"{min(end + 0.01, 100):.2f}%,100%{{opacity:0;transform:translateX({width:.1f}px)}}}}"
            )
    last = LINE * max(0, len(shown) - ROWS)
    height = LINE * len(shown)
    style = f"""
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d1d7e0; white-space: pre }}
.command {{ fill: #f0f6fc; font-weight: 600 }}
.screen {{ fill: #151b23 }}
.hidden {{ opacity: 0 }}
.scroll {{ transform: translateY(-{last}px); animation: scroll {SECONDS}s step-end infinite }}
.below {{ transform: translateY({height}px); animation: below {SECONDS}s step-end infinite }}
@keyframes scroll {{{"".join(scroll)}}}
@keyframes below {{{"".join(below)}}}
{chr(10).join(typing)}
@media (prefers-reduced-motion: reduce) {{ * {{ animation: none !important }} }}
"""  # noqa: E501
    title = escape("A terminal: " + "; ".join(entry["command"] for entry in recorded))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img">\n<title>{title}</title>\n<style>{style}</style>\n'
        f'<rect class="screen" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" stroke="#3d444d"/>\n'
        + "".join(f'<circle cx="{20 + 18 * at}" cy="18" r="5" fill="#3d444d"/>' for at in range(3))
        + f'\n<svg x="{MARGIN}" y="{MARGIN + BAR - 8}" width="{WIDTH - 2 * MARGIN}" height="{ROWS * LINE}">\n'
        '<g class="scroll" xml:space="preserve">\n' + "\n".join(rows) + "\n"
        f'<rect class="screen below" width="{WIDTH}" height="{height}"/>\n</g>\n</svg>\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the commands")
    file = FOLDER / "terminal.json"
    if parser.parse_args().record:
        file.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (FOLDER / "terminal.svg").write_text(draw(json.loads(file.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
