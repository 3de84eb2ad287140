"""A stalled run names the process that the others wait for."""

import json
import re
from pathlib import Path

import pytest
from helpers import HANGS, run_processes

from tune.run.watchdog import read, waited_for

SCRIPT = """\
import sys, time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tune import distributed
from tune.run.watchdog import Watchdog

folder = Path(sys.argv[1])
world = replace(distributed.init("cpu"), timeout=timedelta(seconds=4))  # the watchdog's alone: it speaks after 2
watchdog = Watchdog(folder, world, lambda text: print(text, flush=True))
watchdog.beat(1)
world.barrier()
watchdog.beat(2)
if world.rank == 1:
    def reads_slowly():
        while not (folder / "rank-00000.txt").exists():
            time.sleep(0.1)
        time.sleep(4)  # until the watchdog reports it
    reads_slowly()
world.barrier()
watchdog.end()
"""


@pytest.mark.slow
def test_watchdog_names_the_process_that_others_wait_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    output = run_processes(tmp_path / "script.py", 2, str(tmp_path / "stacks"))
    warnings = re.findall(r"warning: no step .* The others wait for process 1 on \S+ \((.*), step 2\)\.", output)
    assert len(warnings) == 1 and "in reads_slowly" in warnings[0], output
    stacks = [(tmp_path / "stacks" / f"rank-0000{rank}.txt").read_text() for rank in (0, 1)]
    beat = json.loads((tmp_path / "heartbeat.json").read_text())  # from the waiting process
    assert beat["step"] == 2 and beat["checkpoint"] is None and 3 < beat["time"] - beat["began"] < HANGS
    assert "barrier" in stacks[0] and "reads_slowly" in stacks[1]


def test_waited_for_process() -> None:
    def head(rank: int, waits: bool) -> dict[str, object]:
        return {"rank": rank, "step": 7, "host": "node", "waits": waits, "place": "data.py:3 in read"}

    waiting = {rank: head(rank, True) for rank in range(3)}
    assert waited_for(waiting, range(3), 3) == "All processes wait for each other."
    silent = "Process 3 of 4 says nothing: stopped, or stuck outside of Python, which its stderr then shows."
    assert waited_for(waiting, range(4), 4) == silent
    busy = waiting | {1: head(1, False)}
    assert waited_for(busy, range(3), 3) == "The others wait for process 1 on node (data.py:3 in read, step 7)."


def test_incomplete_files_are_ignored(tmp_path: Path) -> None:
    head = json.dumps({"rank": 1, "step": 7, "host": "node", "waits": True, "place": "a.py:3 in read"})
    (tmp_path / "rank-00001.txt").write_text(f"{head}\n\nMainThread:\n")
    for number, text in enumerate(["", head[:9], "null\n", head[:-1] + "\n", "[]\n"], 2):
        (tmp_path / f"rank-{number:05d}.txt").write_text(text)
    (tmp_path / "rank-00009.txt").write_bytes(b"\xff\xfe\n")
    assert read(tmp_path) == {1: json.loads(head)}


def test_files_on_the_disks_of_other_nodes_are_not_required() -> None:
    here = "Of 4 processes, 2, 3 write to this node's disk. "
    heads: dict[int, dict[str, object]] = {
        rank: {"rank": rank, "step": 7, "host": "node", "waits": rank == 2, "place": "a.py:3 in read"}
        for rank in (2, 3)
    }
    assert waited_for(heads, [2, 3], 4) == f"{here}The others wait for process 3 on node (a.py:3 in read, step 7)."
    heads[3]["waits"] = True
    assert waited_for(heads, [2, 3], 4) == f"{here}They wait for those of other nodes."
    del heads[3]
    assert waited_for(heads, [2, 3], 4).startswith(f"{here}Process 3 of 4 says nothing")


APART = """\
import ctypes, sys
from dataclasses import replace
from datetime import timedelta
sys.setswitchinterval(10)  # the thread gets no turn by chance
from pathlib import Path
from tune import distributed
from tune.run.watchdog import Watchdog

world = replace(distributed.init("cpu"), timeout=timedelta(seconds=1.2))  # the watchdog's alone: it speaks after 0.75
folder = Path(sys.argv[1], str(world.rank))
folder.mkdir()
watchdog = Watchdog(folder / "stacks", world, print, apart=True)
assert watchdog.seen == [world.rank]
def keeps_pythons_lock():
    ctypes.PyDLL(None).sleep(2)
keeps_pythons_lock()
watchdog.end()
together = Watchdog(Path(sys.argv[1], "stacks"), world, print)
assert together.seen == [0, 1]
together.end()
"""


@pytest.mark.slow
def test_process_holding_the_gil_prints_its_stack_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(APART)
    output = run_processes(tmp_path / "script.py", 2, str(tmp_path))
    assert "in keeps_pythons_lock" in output
