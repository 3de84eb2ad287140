"""User errors: one message with the place, the cause and the solution, exit code 2, and nothing overwritten.

Each function below spoils the inputs of a run that would work, or returns settings that do; `wrong` lists parts of the
expected message.
"""

import json
import sys
from collections.abc import Callable

import pytest
import torch
from helpers import REFUSED_BY
from safetensors.torch import load_file
from tokenizers import Tokenizer

Case = Callable[..., list[str] | None]
CASES: list = []


def wrong(*parts: str) -> Callable[[Case], Case]:
    def register(case: Case) -> Case:
        marks = pytest.mark.slow if len(CASES) % 3 else ()
        CASES.append(pytest.param(case, parts, id=case.__name__.replace("_", " "), marks=marks))
        return case

    return register


def chat(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = chat(("user", "the cat"), ("assistant", "sat on the mat"))

# The settings


@wrong("learning_rate: is not a setting", "'optimizer.lr'")
def unknown_key(inputs):
    return ["learning_rate=1e-5"]


@wrong("global_batch_sise", "Did you mean 'global_batch_size'?")
def misspelled_key(inputs):
    return ["global_batch_sise=8"]


@wrong("optimizer.lr: -0.1 is not a number from 0")
def negative_learning_rate(inputs):
    return ["optimizer.lr=-0.1"]


@wrong("epochs: 0 is not a number above 0", "max_seq_len: 'long' is not a positive integer", "2 problems")
def several_mistakes_together(inputs):
    return ["epochs=0", "max_seq_len=long"]


@wrong("optimizer._component_", "AdamW")
def misspelled_component(inputs):
    return ["optimizer._component_=torch.optim.AdmW"]


@wrong("optimizer.betta", "Did you mean 'optimizer.betas'?")
def unknown_argument_of_a_component(inputs):
    return ["optimizer.betta=[0.9,0.99]"]


@wrong("--lr", "is not an option", "without dashes")
def option_in_another_style(inputs):
    return ["--lr=0.1"]


@wrong("mine.yaml", "no")
def missing_config_file(inputs):
    return ["--config", "mine.yaml"]


@wrong("model.path: is missing", "model.path=...")
def missing_required_setting(inputs):
    return ["model.path=???"]


@wrong("device: 'gpu' is not one of auto, cpu, cuda, mps")
def unknown_device(inputs):
    return ["device=gpu"]


@wrong("device: cuda is not available", "available: cpu", "Leave device out")
def cuda_without_a_gpu(inputs):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    return ["device=cuda"]


@wrong("parallel: dp_replicate=2", "1 processes", "must divide 1")
def replicas_that_do_not_divide_the_processes(inputs):
    return ["parallel.dp_replicate=2"]


@wrong("compute.activation_offload", "Set it to false")
def offload_from_host_to_host(inputs):
    return ["compute.activation_offload=true"]


@wrong("global_batch_size=4 is not a multiple of 3", "Set global_batch_size to 3 or 6", "micro_batch_size to 1, 2")
def batch_sizes_that_do_not_divide(inputs):
    return ["micro_batch_size=3"]


# The model


@wrong("model.path", "nowhere does not exist", "folder with config.json")
def no_model_folder(inputs):
    return [f"model.path={inputs.folder / 'nowhere'}"]


@wrong("model.path: Qwen/Qwen3-0.6B does not exist", "`tune download Qwen/Qwen3-0.6B`")
def model_path_of_the_hub(inputs):
    return ["model.path=Qwen/Qwen3-0.6B"]


@wrong("schedule.warmup: 1.5 is not a non-negative integer or a number from 0 to below 1")
def warmup_of_one_and_a_half(inputs):
    return ["schedule.warmup=1.5"]


@wrong("model.path", "is a file", "must be a folder")
def model_path_of_a_file(inputs):
    return [f"model.path={inputs.model / 'model.safetensors'}"]


@wrong("model.path", "no config.json", "found nothing")
def empty_model_folder(inputs):
    (inputs.folder / "empty").mkdir()
    return [f"model.path={inputs.folder / 'empty'}"]


@wrong("no config.json", "found", "model.safetensors")
def no_config_json(inputs):
    (inputs.model / "config.json").unlink()


@wrong("config.json is not valid JSON", "line 1")
def broken_config_json(inputs):
    (inputs.model / "config.json").write_text('{"model_type": "llama",')


@wrong("config.json", "model_type 'unheard' is not native", "llama")
def unsupported_architecture(inputs):
    inputs.change_json("config.json", model_type="unheard")


@wrong("config.json", "logit_scale=0.5", "not supported for model_type 'llama'")
def unsupported_field(inputs):
    inputs.change_json("config.json", logit_scale=0.5)


@wrong("config.json", "'hidden_size' must be a positive integer", "found '64'")
def field_of_a_wrong_type(inputs):
    inputs.change_json("config.json", hidden_size="64")


@wrong("config.json", "rope", "'magic'")
def unknown_rope_scaling(inputs):
    inputs.change_json("config.json", rope_parameters=None, rope_scaling={"type": "magic", "factor": 2.0})


@wrong("config.json", "hqq", "dequantize=True")
def quantized_checkpoint(inputs):
    inputs.change_json("config.json", quantization_config={"quant_method": "hqq", "bits": 4})


@wrong("model.path", "no *.safetensors")
def no_weights(inputs):
    (inputs.model / "model.safetensors").unlink()


@wrong("pytorch_model.bin cannot be read", "torch before 1.6", "weights_only=True")
def unreadable_torch_file(inputs):
    (inputs.model / "model.safetensors").rename(inputs.model / "pytorch_model.bin")


@wrong("model.safetensors.index.json names files that do not exist", "model-00002-of-00002.safetensors", "Download")
def missing_shard(inputs):
    weights = {name: "model-00001-of-00002.safetensors" for name in load_file(inputs.model / "model.safetensors")}
    weights["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (inputs.model / "model.safetensors").rename(inputs.model / "model-00001-of-00002.safetensors")
    (inputs.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


@wrong("model.safetensors.index.json", "is not valid JSON")
def broken_index(inputs):
    (inputs.model / "model.safetensors").rename(inputs.model / "model-00001-of-00001.safetensors")
    (inputs.model / "model.safetensors.index.json").write_text('{"weight_map": ')


@wrong("model.safetensors is damaged", "Download it again")
def truncated_weights(inputs):
    file = inputs.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


@wrong("model.norm.weight has shape [32], config.json says [64]")
def tensor_of_another_shape(inputs):
    inputs.change_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.ones(32)}))


@wrong("missing: model.norm.weight [64]")
def missing_tensor(inputs):
    inputs.change_tensors(lambda tensors: tensors.pop("model.norm.weight"))


@wrong("not known: model.extra.weight [2]")
def unknown_tensor(inputs):
    inputs.change_tensors(lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))


# The tokenizer


@wrong("no tokenizer in", "tokenizer.json, tekken.json, tokenizer.model")
def no_tokenizer(inputs):
    (inputs.model / "tokenizer.json").unlink()


@wrong("tokenizer.json is not a readable tokenizer")
def broken_tokenizer(inputs):
    (inputs.model / "tokenizer.json").write_text("{}")


@wrong("has no chat template", "tokenizer.chat_template to chatml", "chat_template.jinja", "prompt and completion")
def no_chat_template(inputs):
    (inputs.model / "chat_template.jinja").unlink()


@wrong("chat template in", "line 1")
def chat_template_that_is_not_jinja(inputs):
    (inputs.model / "chat_template.jinja").write_text("{% for message in messages %}")


@wrong("tokenizer.chat_template=gemma", "no token '<start_of_turn>'", "tune add-tokens", "chatml")
def chat_template_with_missing_tokens(inputs):
    return ["tokenizer.chat_template=gemma"]


@wrong("tokenizer.eos_token=</s>", "no token '</s>'")
def missing_eos_token(inputs):
    return ["tokenizer.eos_token=</s>"]


@wrong("rows.jsonl: the tokenizer produced token 300", "vocab_size is 300", "same checkpoint")
def tokenizer_of_a_larger_model(inputs):
    tokenizer = Tokenizer.from_file(str(inputs.model / "tokenizer.json"))
    tokenizer.add_tokens(["catamaran"])
    tokenizer.save(str(inputs.model / "tokenizer.json"))
    return inputs.write_rows(chat(("user", "the catamaran"), ("assistant", "ran")))


# The data


@wrong("dataset.path: ", "chat.jsonl does not exist", "Did you mean 'chats.jsonl'?")
def wrong_dataset_path(inputs):
    return [f"dataset.path={inputs.rows.with_name('chat.jsonl')}"]


@wrong("dataset.validation.path: ", "held_out.jsonl does not exist")
def wrong_validation_path(inputs):
    return [f"dataset.validation={inputs.folder / 'held_out.jsonl'}"]


@wrong("rows.jsonl has no rows")
def empty_file(inputs):
    return inputs.write_rows()


@wrong("must hold data files of one kind", "found nothing")
def empty_folder(inputs):
    (inputs.folder / "data").mkdir()
    return [f"dataset.path={inputs.folder / 'data'}"]


@wrong("table.xlsx: cannot read .xlsx files", ".json, .jsonl, .csv, .tsv, .parquet")
def file_of_an_unknown_kind(inputs):
    return inputs.write_rows(GOOD, name="table.xlsx")


@wrong("rows.jsonl:1", "columns question, answer", "messages; conversations; prompt + completion", "dataset.columns")
def wrong_columns(inputs):
    return inputs.write_rows({"question": "2 + 2", "answer": "4"})


@wrong("rows.jsonl:2: malformed JSON", "column")
def malformed_line(inputs):
    settings = inputs.write_rows(GOOD)
    with (inputs.folder / "rows.jsonl").open("a") as lines:
        lines.write('{"messages": [{"role": "user"\n')
    return settings


@wrong("rows.parquet: malformed Parquet")
def damaged_parquet(inputs):
    return inputs.write_rows(GOOD, name="rows.parquet")


@wrong(
    'rows.jsonl:2: messages[1].role is "asistant"',
    "Did you mean 'assistant'?",
    "system, developer, user, assistant, tool",
)
def bad_role(inputs):
    return inputs.write_rows(GOOD, chat(("user", "the dog"), ("asistant", "ran")))


@wrong("rows.jsonl:1: messages[1].content is", "must be a string")
def content_that_is_not_text(inputs):
    return inputs.write_rows({"messages": [GOOD["messages"][0], {"role": "assistant", "content": 4}]})


@wrong("max_seq_len cuts off every answer", "Set max_seq_len to at least ")
def rows_longer_than_max_seq_len(inputs):
    return ["max_seq_len=8"]


@wrong("none of the 2 rows can be used", "no assistant message (2)")
def nothing_supervised(inputs):
    return inputs.write_rows(chat(("user", "the cat")), chat(("user", "the dog")))


@wrong("split=test", "no splits", "`train`", "Remove split=test")
def split_of_a_file(inputs):
    return ["dataset.split=test"]


@wrong("dataset.train_on: 'user' is not one of assistant, all, last or a list")
def role_that_is_not_a_list(inputs):
    return ["dataset.train_on=user"]


@wrong("dataset.train_on: in ['asistant'], 'asistant' is not one of system, developer, user, assistant, tool")
def misspelled_role_to_learn(inputs):
    return ["dataset.train_on=[asistant]"]


@wrong("dataset.too_long: 'cut' is not one of truncate, drop, split, error", "dataset.validation_fraction: 2 is not")
def invalid_dataset_settings(inputs):
    return ["dataset.too_long=cut", "dataset.validation_fraction=2"]


@wrong("dataset: format=sharegtp is not a format", "Did you mean 'sharegpt'?")
def misspelled_format(inputs):
    return ["dataset.format=sharegtp"]


@wrong("dataset.filter: there is no module 'my_rows'", "Is it installed, or in the current folder?")
def missing_filter(inputs):
    return ["dataset.filter=my_rows.is_good"]


@wrong("dataset: ", "rows.jsonl:1: the row has", "more than max_seq_len=8")
def rows_too_long_with_too_long_error(inputs):
    return [*inputs.write_rows(GOOD), "max_seq_len=8", "dataset.too_long=error"]


@wrong("dataset: ", "none of the 1 rows can be used: left for training (1)", "held out for validation")
def fraction_that_holds_out_no_row(inputs):
    return [*inputs.write_rows(GOOD), "dataset.validation_fraction=0.000001"]


# The run folder, and what a run continues from


@wrong("output_dir", "cannot be made", "File exists")
def output_dir_is_a_file(inputs):
    return [f"output_dir={inputs.rows}"]


@wrong("output_dir", "cannot be made", "Not a directory")
def output_dir_below_a_file(inputs):
    return [f"output_dir={inputs.rows / 'run'}"]


@wrong("output_dir", "/proc/run cannot be made")
def output_dir_that_is_not_writable(inputs):
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    return ["output_dir=/proc/run"]


@wrong("output_dir", "nosuch://bucket/run cannot be used", "nosuch")
def output_dir_in_an_unknown_store(inputs):
    return ["output_dir=nosuch://bucket/run"]


@wrong("output_dir", "holds a run already", "resume=never", "another output_dir")
def output_dir_of_another_run(inputs):
    return ["resume=never"]


@wrong("resume", "nowhere", "neither a complete checkpoint")
def resume_from_nowhere(inputs):
    return [f"resume={inputs.folder / 'nowhere'}"]


@wrong("resume", "step-00000002", "neither a complete checkpoint")
def resume_from_an_incomplete_checkpoint(inputs):
    path = inputs.run / "checkpoints" / "step-00000002"
    (path / ".metadata").unlink()
    return [f"resume={path}"]


@wrong(
    "resume",
    "step-00000002 is damaged",
    "__0_0.distcp is truncated|__0_0.distcp does not match its digest",
    "Use an earlier checkpoint",
)
def resume_from_a_damaged_checkpoint(inputs):
    path = inputs.run / "checkpoints" / "step-00000002" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:100])
    return [f"resume={path.parent}"]


@wrong("made with other data", "fingerprint", "resume=never and another output_dir")
def resume_with_other_data(inputs):
    return inputs.write_rows(*[GOOD] * 9)


@wrong("made with other data", "seed was 0 and is now 1")
def resume_with_another_seed(inputs):
    return ["seed=1"]


@wrong("made with other data", "global_batch_size was 4 and is now 8")
def resume_with_another_batch_size(inputs):
    return ["global_batch_size=8"]


@wrong("resume", "step-00000002 has a different model", "missing: blocks.3.", "Restore the settings")
def resume_with_more_layers(inputs):
    inputs.change_json("config.json", num_hidden_layers=4)

    def one_more(tensors):
        third = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
        tensors.update({name.replace(".2.", ".3."): tensor.clone() for name, tensor in third.items()})

    inputs.change_tensors(one_more)


@wrong("resume", "step-00000002 has a different model", "not known: blocks.2.", "Restore the settings")
def resume_with_fewer_layers(inputs):
    inputs.change_json("config.json", num_hidden_layers=2)

    def one_less(tensors):
        for name in [name for name in tensors if ".layers.2." in name]:
            del tensors[name]

    inputs.change_tensors(one_less)


@wrong("resume", "step-00000002 has a different model", "blocks.0.mlp.gate.weight has shape [128, 64], here [160, 64]")
def resume_with_a_wider_model(inputs):
    inputs.change_json("config.json", intermediate_size=160)

    def widen(tensors):
        for name in [name for name in tensors if ".mlp." in name]:
            rows, columns = tensors[name].shape
            tensors[name] = torch.zeros(160, columns) if rows == 128 else torch.zeros(rows, 160)

    inputs.change_tensors(widen)


@wrong("resume", "step-00000002 has a different optimizer", "has exp_avg, exp_avg_sq, step", "this run momentum_buffer")
def resume_with_another_optimizer(inputs):
    return ["optimizer._component_=torch.optim.SGD", "optimizer.momentum=0.9", "optimizer.fused=false"]


@wrong("resume", "step-00000002 has a different optimizer", "this run no states", "another output_dir")
def resume_with_an_optimizer_without_states(inputs):
    return ["optimizer._component_=torch.optim.SGD", "optimizer.fused=false"]


@wrong("resume", "of step 2, but this run ends at step 1", "Raise max_steps or epochs")
def resume_after_the_last_step(inputs):
    return ["max_steps=1"]


@wrong("resume", "continuing after step 1 would replace", "step-00000002", "another output_dir")
def resume_from_an_earlier_step_in_place(inputs):
    return [f"resume={inputs.run / 'checkpoints' / 'step-00000001'}"]


# The training


@wrong("loss is nan at step 1", "earlier checkpoints are intact", "dataset rows")
def non_finite_weights(inputs):
    inputs.change_tensors(lambda tensors: tensors["model.norm.weight"].fill_(float("inf")))
    return [f"output_dir={inputs.folder / 'new'}"]


@wrong("at step", "checkpoints are intact", "learning rate too high")
def weights_so_large_that_gradients_overflow(inputs):
    inputs.make_overflow()
    return ["max_steps=9", f"output_dir={inputs.folder / 'new'}"]


# Errors that a run finds in its weights, or during training.
NOT_BEFORE = {non_finite_weights, weights_so_large_that_gradients_overflow}


def is_in(part: str, text: str) -> bool:
    """Return whether `text` contains one of the alternatives in `part`, separated by `|`."""
    return any(alternative in text for alternative in part.split("|"))


@pytest.mark.parametrize(*REFUSED_BY)
@pytest.mark.parametrize(("spoil", "parts"), CASES)
def test_wrong_input(spoil, parts, by, inputs, run_recipe, contents, capfd, told):
    settings = inputs.settings("checkpointer.async=false", *(spoil(inputs) or []))
    before = contents(inputs.folder)
    if by == "validate":
        if spoil in NOT_BEFORE:
            return
        errors = told("full_finetune", settings)
        assert not [part for part in parts if not is_in(part, errors) and "problems" not in part], errors
        assert contents(inputs.folder) == before
        return
    code = run_recipe(settings)
    message = capfd.readouterr().err
    assert code == 2, message
    assert message.startswith("error: ")
    assert "Traceback" not in message
    for part in parts:
        assert is_in(part, message), part
    after = contents(inputs.folder)
    assert [file for file in before if after.get(file) != before[file]] == []
