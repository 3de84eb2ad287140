"""Run in each process as `shared_requests.py MODEL TASKS OUT`: evaluate tasks with a copy of the model per process and
with a sharded model, also with fewer rows than processes. Writes the response to each request."""

import json
import sys
from pathlib import Path

from tune import distributed
from tune.checkpointers import load_model
from tune.evaluation import Tasks, metrics
from tune.peft import open_model
from tune.tokenizers import Tokenizer

world = distributed.init("cpu")
path, folder, out = sys.argv[1:]
names = ["choice", "letters", "answer", "rolling"]
models = {"copies": load_model(path), "sharded": open_model(path).shard(world)}
tokenizer = Tokenizer(path)
answers = {}
for kind, model in models.items():
    results = Tasks(names, tokenizer, folder)(model, world, log_samples=True)
    assert bool(results) == world.is_main
    everywhere = world.from_all_ranks(metrics(results, world))
    assert everywhere[0] == everywhere[-1] and "choice/acc" in everywhere[0]
    if world.is_main:
        answers[kind] = {name: [sample["resps"] for sample in results["samples"][name]] for name in names}
for name in names:
    Tasks([name], tokenizer, folder, limit=1, batch_size=1)(models["sharded"], world)
if world.is_main:
    Path(out).write_text(json.dumps(answers))
world.finish()
