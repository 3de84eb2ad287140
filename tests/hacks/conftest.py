import json
from pathlib import Path

import pytest
from copied_recipe import Copied

REWARD = "def length(row, completion):\n    return float(len(completion) % 5)\n"
WORDS = ("cat", "dog", "mat", "rug", "red", "blue", "slow", "quick")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def copied(checkpoint: Path, chats: Path, tmp_path: Path) -> Copied:
    """A folder to copy recipes into, with data for all edits."""
    copied = Copied(tmp_path, checkpoint, chats)
    texts = [f"the {word} is {' '.join(WORDS[:number])}" for number, word in enumerate(WORDS, 1)]
    write(tmp_path / "other.jsonl", [{"text": text} for text in texts])
    write(tmp_path / "replay.jsonl", [{"text": text} for text in texts])
    write(tmp_path / "held_out.jsonl", [{"text": text} for text in texts[:3]])
    weights = [{"prompt": f"{word} ", "completion": text, "weight": 0.5 * number}
               for number, (word, text) in enumerate(zip(WORDS, texts, strict=True))]  # fmt: skip
    write(tmp_path / "weighted.jsonl", weights * 2)
    topics = [{"prompt": f"{word} ", "completion": text, "topic": number % 4}
              for number, (word, text) in enumerate(zip(WORDS, texts, strict=True))]  # fmt: skip
    write(tmp_path / "topics.jsonl", topics * 2)
    write(tmp_path / "questions.jsonl", [{"instruction": word, "answer": f"{word} sat"} for word in WORDS])
    write(tmp_path / "prompts.jsonl", [{"prompt": word, "answer": f" {word} sat"} for word in WORDS])
    pairs = [{"instruction": word, "chosen": f"{word} sat", "rejected": "no", "margin": 0.25 * number}
             for number, word in enumerate(WORDS)]  # fmt: skip
    write(tmp_path / "margins.jsonl", pairs * 2)
    (tmp_path / "rewarding.py").write_text(REWARD, encoding="utf-8")
    return copied
