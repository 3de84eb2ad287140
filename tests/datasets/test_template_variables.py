"""Variables of a chat template: those of a row or a run reach the template, or stop the run."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_references import transformers_rendering

from tune.config import list_recipes_with_settings, load
from tune.datasets import load as load_dataset
from tune.datasets import load_prompts
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
VARIABLES = {
    "chat_template_kwargs": {"enable_thinking": False},
    "enable_thinking": False,
    "chat_template": "{{ messages }}",
}
ASKED, ANSWERED = [{"role": "user", "content": "Hi"}], [{"role": "assistant", "content": "Hello"}]
WORSE = [{"role": "assistant", "content": "No"}]
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": ASKED + ANSWERED}, "supervised"),
    "instruction": ({"instruction": "Hi", "output": "Hello"}, "supervised"),
    "prompt": ({"prompt": ASKED, "completion": ANSWERED}, "supervised"),
    "preferences": ({"prompt": ASKED, "chosen": ANSWERED, "rejected": WORSE}, "preferences"),
    "labelled": ({"prompt": ASKED, "completion": ANSWERED, "label": True}, "labelled"),
    "prompts": ({"messages": ASKED}, "prompts"),
}


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(SWITCHED)
    return Tokenizer(folder)


def samples(tokenizer: Tokenizer, rows: list[dict[str, Any]], kind: Any, folder: Path, **options: Any) -> list[Any]:
    """The tokens and labels of rows of a file, or their prompts."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "prompts":
        loaded = load_prompts(tokenizer, str(file), max_prompt_len=200, **options)
        return [prompt.tokens for prompt in loaded]
    options |= {"kind": kind, "max_seq_len": 200, "cache_dir": str(folder / "cache")}
    data: Any = load_dataset(tokenizer, str(file), **options)
    return [(sample.tokens.tolist(), sample.labels.tolist()) for sample in data.samples]


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("case", ROWS)
def test_variables_of_a_row_stop_the_run(tokenizer: Tokenizer, tmp_path: Path, case: str, variable: str) -> None:
    row, kind = ROWS[case]
    other = json.loads(json.dumps(row).replace("Hi", "Ho"))  # labelled rows need two prompts
    with pytest.raises(TuneError, match=rf"rows\.jsonl:2: .*{variable}"):
        samples(tokenizer, [other, {**row, variable: VARIABLES[variable]}], kind, tmp_path)
    left_out = samples(tokenizer, [other, {**row, variable: VARIABLES[variable]}], kind, tmp_path, ignore=[variable])
    assert left_out == samples(tokenizer, [other, row], kind, tmp_path)


PLACES = ("enable_thinking", "tokenizer.enable_thinking", "dataset.enable_thinking", "dataset.chat_template_kwargs")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in list_recipes_with_settings() if name != "evaluate"])
def test_variables_of_a_run_stop_it(recipe: str) -> None:
    values = ["{enable_thinking: false}" if place.endswith("kwargs") else "false" for place in PLACES]
    settings = [f"{place}={value}" for place, value in zip(PLACES, values, strict=True)]
    with pytest.raises(TuneError) as caught:
        load(recipe, ["model.path=m", "dataset.path=d", *settings])
    wrong = {line.strip().partition(": ")[0] for line in str(caught.value).splitlines()}
    assert {*PLACES} <= wrong


@pytest.mark.parametrize("case", ROWS)
def test_variable_in_the_template_of_a_run_reaches_every_row(tokenizer: Tokenizer, tmp_path: Path, case: str) -> None:
    """And a row's own variable next to it still stops the run."""
    file, (row, kind) = tmp_path / "no_thinking.jinja", ROWS[case]
    file.write_text("{% set enable_thinking = false %}" + SWITCHED)
    set_in_it = Tokenizer(tokenizer.path, chat_template=str(file))
    messages = row.get("messages") or ASKED + (ANSWERED if kind != "prompts" else [])
    asked = {"add_generation_prompt": kind == "prompts", "enable_thinking": False}
    expected = transformers_rendering(SWITCHED, {"eos_token": "</s>"})(messages, **asked)
    other = json.loads(json.dumps(row).replace("Hi", "Ho"))
    made = samples(set_in_it, [row, other], kind, tmp_path)[0]
    assert "<think></think>" in expected
    tokens = made if kind == "prompts" else made[0]
    assert expected.startswith(set_in_it.decode(tokens)) and len(set_in_it.decode(tokens)) >= len(expected) - 1
    with pytest.raises(TuneError, match=r"rows\.jsonl:2: .*enable_thinking"):
        samples(set_in_it, [other, {**row, "enable_thinking": True}], kind, tmp_path)
