"""Options of the verbs that open a model and sample from it."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tune.errors import TuneError, explained
from tune.launchers import count

MAX_NEW_TOKENS = 512
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Keys of generation_config.json that change sampling in transformers but not here, with the value that turns them off.
NOT_APPLIED: dict[str, Any] = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None, "min_length": 0, "min_new_tokens": 0,
    "max_new_tokens": None, "max_time": None, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0,
    "length_penalty": 1.0, "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "penalty_alpha": 0.0, "dola_layers": None, "guidance_scale": 1.0, "bad_words_ids": None, "force_words_ids": None,
    "constraints": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "sequence_bias": None, "stop_strings": None, "token_healing": False,
    "watermarking_config": None,
}  # fmt: skip


def add_step(parser: ArgumentParser) -> None:
    parser.add_argument("--step", type=int, metavar="N", help="use the run's checkpoint after N optimizer steps")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options for a model and for sampling."""
    parser.add_argument("model", metavar="MODEL", help="a model in Hugging Face layout, an adapter, or a run folder")
    parser.add_argument("--adapter", metavar="A", action="append", default=[], help="can be repeated; adapters add up")
    add_step(parser)
    longest = f"maximum tokens of an answer (default: {MAX_NEW_TOKENS}, or the room in the model)"
    parser.add_argument("--max-new-tokens", metavar="N", type=count, help=longest)
    by_file = "(default: the model's generation_config.json)"
    parser.add_argument("--temperature", metavar="T", type=float, help=f"0: greedy decoding {by_file}")
    parser.add_argument("--top-k", metavar="K", type=int, help="sample from the K most likely tokens; 0: all")
    parser.add_argument("--top-p", metavar="P", type=float, help="sample from the top tokens of this probability")
    parser.add_argument("--min-p", metavar="P", type=float, help="from those at least P times as likely as the first")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the samples (default: 0)")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--tp", metavar="N", type=count, default=1, help="processes that share the model's layers")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    dtype = "bf16, fp16 or fp32 (default: fp32 on a CPU, else the file's)"
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), metavar="TYPE", help=dtype)


def opened(options: Namespace, world: Any, tell: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model, its tokenizer, and the sampler settings except `max_new_tokens`."""
    from tune.generation import Sampler
    from tune.peft import open_model

    named = open_model(options.model, options.adapter, step=options.step)
    places = named.folders.tokenizer, named.folders.base
    say = (place for place in places if (place / "generation_config.json").exists())  # or neither
    folder = next(say, places[1])
    settings, words = sampling_settings(folder, **{name: getattr(options, name) for name in SAMPLING})
    Sampler(max_new_tokens=1, **settings)  # reports wrong settings before the model is loaded
    model, tokenizer = named.load(world.device, options.dtype, peers=world.mesh["tp"]), named.tokenizer(date=None)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    place = f"{world.device}, shared by {options.tp} processes" if options.tp > 1 else world.device
    step = "" if options.step is None else f" after step {options.step}"
    tell(f"{options.model}{step}: {dtype} on {place}; {words}, seed {options.seed}")
    if ignored := not_applied(folder, ["max_new_tokens"] if options.max_new_tokens else []):
        tell(f"warning: {folder / 'generation_config.json'}: not applied: {', '.join(ignored)}")
    return model, tokenizer, settings | {"seed": options.seed, "stop_ids": tokenizer.stop_ids}


def sampling_settings(folder: Path, **given: float | None) -> tuple[dict[str, Any], str]:
    """Return the sampler's settings, and a description of them.

    Settings that are not `given` come from generation_config.json in `folder`. Without do_sample there, decoding is
    greedy.
    """
    from tune.tokenizers import mapping_in

    path = folder / "generation_config.json"
    file = mapping_in(path)
    _require_types(path, file)
    settings = {name: file.get(name) for name in SAMPLING} if file.get("do_sample") else {"temperature": 0.0}
    settings |= {name: value for name, value in given.items() if value is not None}
    settings = {name: value for name, value in settings.items() if value is not None and (name, value) != ("top_k", 0)}
    temperature = settings.setdefault("temperature", 1.0)
    idle = [name for name in SAMPLING if given.get(name)]
    if idle and not temperature and given.get("temperature") is None:
        raise TuneError(f"--{idle[0].replace('_', '-')}: decoding is greedy, so it has no effect. Add --temperature 1")
    shown = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    return settings, shown if temperature else "the most likely token"


def _require_types(path: Path, fields: dict[str, Any]) -> None:
    """Raise TuneError if a field of generation_config.json that is applied has the wrong type or value."""
    from tune.generation import Sampler

    if not isinstance(fields.get("do_sample"), bool | None):
        raise TuneError(f"{path}: do_sample is {fields['do_sample']!r}; it must be true or false")
    applied = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    applied = {name: value for name, value in applied.items() if (name, value) != ("top_k", 0)}
    for name, value in applied.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TuneError(f"{path}: {name} is {value!r}; it must be a number")
    if fields.get("do_sample"):
        with explained(str(path)):
            Sampler(max_new_tokens=1, **applied)


def not_applied(folder: Path, given: Sequence[str] = ()) -> list[str]:
    """Return the sampling settings of generation_config.json in `folder` that are not applied, except those `given`."""
    from tune.tokenizers import mapping_in

    file = mapping_in(folder / "generation_config.json")
    names = [name for name, off in NOT_APPLIED.items() if file.get(name) not in (off, None, [], {})]
    return [f"{name}={file[name]}" for name in names if name not in given]


def dotted(score: str) -> str:
    """Return `my_scores:is_right` as `my_scores.is_right`, and anything else unchanged."""
    return score.replace(":", ".") if re.fullmatch(r"[\w.]+:[\w.]+", score) else score
