"""Every command and script in README and docs runs with tiny stand-ins for models and data (tests/docs_reader.py)."""

import re

import pytest
from docs_reader import ROOT, Reader, commands

from tune.cli import VERBS

PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"))
}
# Followed by test_readme.py, test_guides.py, test_changes.py, and test_contracts.py.
FOLLOWED_ELSEWHERE = {"README.md", "docs/extending.md", "docs/changes.md", "docs/contracts.md"}
HUB = "reads from the Hugging Face hub; tests/cli/test_download.py has a hub of its own"
HUB_TASKS = "reads its data from the Hugging Face hub; tests/recipes/test_evaluate.py has tasks with local data"
TERMINAL = "is for a terminal; tests/cli/test_chat.py has one"
LAUNCHERS = "starts workers or jobs; tests/launchers has what they need"
NOT_RUN = {
    "pytest -q tests/losses": "is one of these tests itself",
    ". .venv/bin/activate": "for the shell of the reader",
    "python docs/cards_page.py --shapes": "is for a clone; test_cards.py writes the shapes",
    "tune download Qwen/Qwen3-0.6B [--revision REVISION] [--out FOLDER]": HUB,
    "tune eval ./SmolLM2-135M --tasks arc_easy,hellaswag --out results.json": HUB_TASKS,
    "tune run full_finetune model.path=... dataset.path=... evaluate.every=500 'evaluate.tasks=[arc_easy,hellaswag]' "
    "evaluate.limit=100": HUB_TASKS,
    "tune quantize MODEL --to KIND --out FOLDER [--dynamic]": "tests/quantization/test_compressed.py writes them",
    "tune merge RUN OUT --method average [--steps 100 200 300]": "tests/cli/test_export.py has runs with checkpoints",
    "tune push RUN_OR_FOLDER OWNER/NAME [--private] [--token-file FILE]": "tests/cli/test_push.py has a hub of its own",
    "tune run full_finetune model.path=... dataset.path=... "
    "'trackers=[{_component_: tune.loggers.MLflow, experiment: chats}]'": "tests/loggers/test_trackers.py logs",
    "tune chat BASE": TERMINAL,
    "tune chat ADAPTER --compare BASE": TERMINAL,
    'tune chat runs/start --system "Answer with one JSON command."': TERMINAL,
    "tune chat runs/chat --compare .demo/smollm2-135m --max-new-tokens 64 "
    '--system "Answer with one JSON command."': TERMINAL,
    "python ask.py": "imports llama_cpp, which is compiled when it is installed",
    "tune run --launcher ray --nproc-per-node 2 full_finetune model.path=... dataset.path=...": LAUNCHERS,
    "tune run --launcher slurm --nodes 4 --gpus-per-node 8 --time 24:00:00 full_finetune model.path=... "
    "dataset.path=...": LAUNCHERS,
    "tune run full_finetune model.path=... dataset.path=... model.float8=rowwise compute.compile=true "
    "packed=true": "for a GPU: elsewhere a rule says so; tests/quantization/test_float8.py trains with it",
    "tune plan lora_finetune model.path=./SmolLM2-135M-Instruct --world-size 1 --device rtx4090 "
    "--longest-row max_seq_len": "tests/cli/test_plan.py plans for a device with less memory than a tiny model fills",
    "tune verify runs/theirs/adapter --against runs/theirs": "tests/cli/test_strangers.py has folders of others",
    "tune plan mine.py tokenizer._component_=my_module.MyTokenizer --calibrate runs/mine --device h100": "tests/cli/"
    "test_strangers.py has such a run",
    "tune convert model.gguf FOLDER": "tests/cli/test_convert_gguf.py writes such files",
    "tune convert Llama-3.1-8B/original FOLDER": "tests/cli/test_convert_meta.py writes such folders",
}


# Pages that run little are quick.
LONG = (
    "examples/", "docs/cli.md", "docs/clusters.md", "docs/coming_from_", "docs/components.md",
    "docs/data.md", "docs/distillation.md", "docs/edits.md", "docs/evaluation.md", "docs/families.md",
    "docs/layouts.md", "docs/lora.md", "docs/planning.md", "docs/preferences.md", "docs/reinforcement.md",
    "docs/results.md", "docs/templates.md", "docs/reward.md", "docs/runs.md", "docs/start.md", "docs/training.md",
    "docs/troubleshooting.md", "docs/tutorials/", "docs/using.md", "docs/which_method.md",
)  # fmt: skip


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.weekly if page.startswith(LONG) else ())
        for page in PAGES
        if page not in FOLLOWED_ELSEWHERE and "```" in PAGES[page]
    ],
)
def test_commands_and_scripts(page, checkpoint, chats, tmp_path):
    elsewhere = commands("".join(text for name, text in PAGES.items() if name.startswith("examples/")))
    elsewhere = {line.removesuffix(" --steps 2") for line in elsewhere}  # a quick pass of the same script
    skipped = {*NOT_RUN, *elsewhere} if page == "docs/results.md" else NOT_RUN
    Reader(tmp_path, checkpoint, chats).follow(PAGES[page], skipped)


def test_list_of_skipped_commands_is_up_to_date():
    assert NOT_RUN.keys() <= {command for text in PAGES.values() for command in commands(text)}


def test_inline_commands_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    known = {"tune": {*VERBS, "VERB"}, "make": {*targets}}
    inline = [words for text in PAGES.values() for words in re.findall(r"`(tune|make) ([a-z][\w-]*)", text)]
    assert len(inline) > 20
    assert not [words for words in inline if words[1] not in known[words[0]]]
