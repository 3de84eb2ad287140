"""Task files of lm-evaluation-harness with local data of very different lengths."""

import json
import random
from pathlib import Path

from helpers import WORDS

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  cache_dir: {folder}/cache
  data_files:
    test: {folder}/{name}.jsonl
test_split: test
fewshot_split: test
"""
TASKS = {
    "choice": """\
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "letters": """\
output_type: multiple_choice
doc_to_text: "{{q}} is"
doc_to_choice: [red, blue, the, a]
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}]
""",
    "answer": """\
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: [" on", "a"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
""",
    "rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


def write_task(folder: Path, name: str, rows: list[dict], body: str) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder) + body)


def write_tasks(folder: Path) -> Path:
    """Write tasks with empty contexts, trailing blanks, contexts over 128 tokens and odd numbers of rows."""
    draw = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))

    contexts = ["", f"{text(1, 6)}  ", text(20, 60), text(150, 160)]
    rows = {
        "choice": [
            {"q": contexts[at % 4], "choices": [text(1, 4) for _ in range(4)], "gold": at % 3} for at in range(13)
        ],
        "letters": [{"q": text(5, 20), "gold": at % 4} for at in range(5)],
        "answer": [{"q": text(1, 40 * at + 1), "a": text(1, 2)} for at in range(7)],
        "rolling": [{"text": [text(1, 5), text(300, 400)][at % 2]} for at in range(5)],
    }
    for name, body in TASKS.items():
        write_task(folder, name, rows[name], body)
    return folder
