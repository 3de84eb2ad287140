"""Write the page of results in Markdown."""

from collections.abc import Iterable, Sequence

from bench import Check, Result, Sampling, Traffic, Training


def page(heading: str, facts: dict[str, str], results: Sequence[Result], notes: dict[str, str]) -> str:
    """Return the page. `notes` have the reasons for parts without results."""
    sections = [f"# {heading}", table(("", ""), facts.items())]

    def section(title: str, kind: type, columns: tuple[str, ...], row) -> None:
        if rows := [row(result) for result in results if isinstance(result, kind)]:
            sections.extend([f"## {title}", table(columns, rows)])

    section("Correctness", Check, ("check", "found", "wanted at most", ""), of_check)
    section(
        "Training", Training,
        ("work", "tokens/s", "MFU", "seconds a step", "of it sampling", "seconds to the end of step 1", "peak GiB"),
        of_training,
    )  # fmt: skip
    section(
        "Sampling", Sampling,
        ("model", "prompts x tokens", "first call, s", "third call, s", "ms a token", "tokens/s", "peak GiB"),
        of_sampling,
    )  # fmt: skip
    section("Between devices", Traffic, ("layout", "GiB sent a step", "seconds", "hidden"), of_traffic)
    if notes:
        sections.append("## Without results")
        sections += [of_note(name, note) for name, note in notes.items()]
    return "\n\n".join(sections) + "\n"


def in_words(result: Result) -> str:
    """Return a line for the console."""
    cells = {Check: of_check, Training: of_training, Sampling: of_sampling, Traffic: of_traffic}[type(result)](result)
    return ", ".join(cell for cell in cells if cell)


def table(columns: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def of_check(check: Check) -> tuple[str, ...]:
    return check.name, f"{check.found:.1e}", f"{check.wanted:.0e}", "ok" if check.passed else "**WRONG**"


def of_training(run: Training) -> tuple[str, ...]:
    return (
        run.name, number(run.tokens_per_second, ",.0f"), number(run.mfu, ".1%"), number(run.step_seconds, ".3f"),
        number(run.sampling, ".3f"), number(run.start, ".1f"), number(run.peak_gib, ".1f"),
    )  # fmt: skip


def of_sampling(calls: Sampling) -> tuple[str, ...]:
    first, *_, last = calls.seconds
    return (
        calls.name, f"{calls.rows} x {calls.new}", f"{first:.2f}", f"{last:.2f}", f"{1000 * last / calls.new:.2f}",
        f"{calls.rows * calls.new / last:,.0f}", number(calls.peak_gib, ".1f"),
    )  # fmt: skip


def of_traffic(traffic: Traffic) -> tuple[str, ...]:
    return traffic.name, f"{traffic.gib_sent:.3f}", f"{traffic.exchange_seconds:.4f}", f"{traffic.hidden_share:.0%}"


def of_note(name: str, note: str) -> str:
    first, *more = note.splitlines() or ["failed without a word"]
    return f"`{name}`: {first}" if not more else f"`{name}`:\n\n```\n{note}\n```"
