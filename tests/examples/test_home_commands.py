import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "home_commands"


def rows(name: str) -> list[tuple[str, str]]:
    """Return (request, answer) for each row of a shipped file."""
    conversations = [json.loads(line)["messages"] for line in (FOLDER / name).open()]
    assert all(
        [message["role"] for message in conversation] == ["system", "user", "assistant"]
        for conversation in conversations
    )
    return [(conversation[1]["content"], conversation[2]["content"]) for conversation in conversations]


def test_shipped_files_match_the_script(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "make_data.py", "--out", tmp_path], check=True)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_requests_are_unique() -> None:
    requests = [request for request, _ in rows("train.jsonl") + rows("validation.jsonl")]
    assert len(set(requests)) == len(requests)


def test_held_out_commands_are_new_combinations_of_known_parts() -> None:
    train = {answer for _, answer in rows("train.jsonl")}
    held_out = {answer for _, answer in rows("validation.jsonl")}
    assert train & held_out == {'{"error":"unsupported"}'}
    known = {item for answer in train for item in json.loads(answer).items()}
    assert known.issuperset(item for answer in held_out for item in json.loads(answer).items())


def test_answers_are_strict_json() -> None:
    for _, answer in rows("train.jsonl") + rows("validation.jsonl"):
        command = json.loads(answer)
        assert answer == json.dumps(command, separators=(",", ":"))
        assert list(command) in (
            ["error"],
            ["room", "device", "action"],
            ["room", "device", "action", "value"],
            ["device", "action", "value"],
        )


@pytest.mark.weekly
def test_ctrl_c_saves_a_checkpoint_that_the_printed_command_continues(checkpoint: Path, tmp_path: Path) -> None:
    demo = [sys.executable, FOLDER / "demo.py", checkpoint, "--rows", "2", "--out", tmp_path / "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(demo, cwd=ROOT, env=environment, **pipes) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 2/88"):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output = "".join(lines)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert "step 20/88" not in output
    command = lines[-1].split()
    assert command[:4] == ["$", "tune", "run", "lora_finetune"]
    assert f"output_dir={tmp_path / 'run'}" in command and "dataset.validation.take=2" in command
    step = int(saved.name.removeprefix("step-"))
    command = [sys.executable, "-m", "tune.cli", *command[2:], f"max_steps={step + 1}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in metrics] == [*range(1, step + 2)]
