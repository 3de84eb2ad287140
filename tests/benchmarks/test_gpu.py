"""`make gpu` with tiny models on a CPU."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import weekly_but

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
MODULES = ("bench", "layouts", "page", "parts")


@pytest.fixture
def gpu(monkeypatch):
    """Import the modules of the benchmark; their names exist only there."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import bench
    import layouts
    import page

    yield bench, layouts, page
    for name in MODULES:
        sys.modules.pop(name, None)


def run(folder, *only, limit=6000):
    """Return the table rows that these parts give, by their first cell."""
    out = folder / "page.md"
    options = ["--device", "cpu", "--folder", str(folder), "--out", str(out), "--limit", str(limit)]
    done = subprocess.run([sys.executable, FOLDER, *options, *only], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    page = out.read_text(encoding="utf-8")
    assert page in done.stdout
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows}


PARTS = {
    "nf4 sample-1b": ["NF4, fp32 values to level x scale", "1B"],
    "lora-moe": ["LoRA r16, MoE, 2 x 2 rows of 4,096"],
    "attention sampler grpo-1b": ["GRPO, 1B, 8 x 8 completions of 128"],
    "layout-ep traffic-fsdp": ["layout-ep: gradient norm", "FSDP, 1B, 2 devices, 4 rows of 4,096 each"],
}


@pytest.mark.parametrize("only", weekly_but([], PARTS))
def test_selected_parts_give_their_rows(only, tmp_path):
    rows = run(tmp_path, "--only", *only.split())
    assert set(PARTS[only]) <= rows.keys()
    checks = ("NF4", "curve", "layout", "attention", "sampler", "bf16")
    assert all(cells[-1] == "ok" for name, cells in rows.items() if name.startswith(checks))
    assert [file.name for file in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.slow
def test_failing_or_hanging_process_shows_its_last_lines(gpu, tmp_path):
    bench, *_ = gpu
    here = bench.Bench(tmp_path, "cpu", time.monotonic() + 100)
    assert here.process(sys.executable, "-c", "print(7)", limit=60) == "7\n"
    with pytest.raises(bench.Failed, match=r"(?s)line 39.*exit status 3"):
        code = "for number in range(40): print('line', number)\nraise SystemExit(3)"
        here.process(sys.executable, "-c", code, limit=60)
    begin = time.monotonic()
    with pytest.raises(bench.Failed, match="stopped after"):
        here.process(sys.executable, "-c", "import time; time.sleep(60)", limit=0.3)
    assert here.process(sys.executable, "-c", "import time; time.sleep(60)", limit=50, stop=lambda: True) == ""
    assert time.monotonic() - begin < 30
    here.deadline = time.monotonic() + 1
    with pytest.raises(bench.Skipped, match="no time"):
        here.process(sys.executable, "-c", "print(7)", limit=60)


def test_failed_checks_and_parts_are_on_the_page(gpu):
    bench, _, page = gpu
    results = [bench.Check("loss", 1e-6, 1e-5), bench.Check("norm", 2e-5, 1e-5), bench.Check("nan", float("nan"), 1.0)]
    text = page.page("A card", {"device": "H1000"}, results, {"lora-8b": "out of\nmemory", "trl": "skipped: no trl"})
    assert "| loss | 1.0e-06 | 1e-05 | ok |" in text
    assert "| norm | 2.0e-05 | 1e-05 | **WRONG** |" in text and "| nan | nan | 1e+00 | **WRONG** |" in text
    assert "`lora-8b`:\n\n```\nout of\nmemory\n```" in text and "`trl`: skipped: no trl" in text


def test_traffic_between_devices_and_its_hidden_share(gpu, tmp_path):
    """A trace of two steps: a 1 ms gather, half of it overlapping a product, and a 1 ms sum without overlap."""
    _, layouts, _ = gpu

    def kernel(name, begin, end, rank=0, **args):
        return {"cat": "kernel", "name": name, "pid": rank, "ts": begin, "dur": end - begin, "args": args}

    def collective(name, begin, end, kind, inputs, outputs):
        sizes = {"In msg nelems": inputs, "Out msg nelems": outputs, "Group size": 4, "dtype": "BFloat16"}
        return kernel(name, begin, end, **{"Collective name": kind}, **sizes)

    events = [
        collective("ncclDevKernel_AllGather_RING_LL", 0, 1000, "_allgather_base", 2**28, 2**30),
        kernel("nvjet", 400, 800), kernel("elementwise", 700, 900), kernel("nvjet", 0, 5000, rank=1),
        collective("ncclDevKernel_AllReduce_Sum_bf16", 2000, 3000, "allreduce", 2**29, 2**29),
        {"cat": "cpu_op", "name": "nccl:all_gather", "pid": 0, "ts": 0, "dur": 9},
    ]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    exchange = layouts.exchanged("", tmp_path / "trace.json", steps=2)
    assert exchange.gib_sent == pytest.approx((3 / 4 * 2 + 2 * 3 / 4 * 1) / 2)
    assert exchange.exchange_seconds == pytest.approx(1e-3) and exchange.hidden_share == pytest.approx(0.25)
