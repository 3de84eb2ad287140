import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "home_commands"


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
