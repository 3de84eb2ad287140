"""Settings that are valid alone but not together, on any machine and with any model."""

import inspect
import os
from functools import partial
from typing import Any

from tune.errors import TuneError
from tune.lookup import did_you_mean, locate
from tune.rules.rule import Facts, Level, Rule
from tune.types import show

# Components of torch and torchao that do not work here, and what to use instead.
UNSUPPORTED = {
    "torch.optim.Muon": "only takes matrices. Use tune.optimizers.Muon: torch's, with AdamW for all other parameters",
    "torch.optim.Adafactor": "does not take sharded parameters. Use tune.optimizers.Adafactor: torch's, for shards too",
    "torchao.optim.CPUOffloadOptimizer": "keeps no states by parameter, so its runs cannot be resumed. "
    "Set compute.cpu_offload=true, which keeps the states of any optimizer in host memory",
    **dict.fromkeys(
        [f"schedulefree.{name}ScheduleFree" for name in ("AdamW", "SGD", "RAdam")],
        "keeps other weights in training than those to evaluate and save, and refuses to step without a call of its "
        "train(). Use torch.optim.AdamW with schedule._component_=tune.optimizers.constant",
    ),
    "torch.nn.CrossEntropyLoss": "takes full logits, which are never computed. Use tune.losses.LinearCrossEntropy: the "
    "same loss from hidden states and the head's weight",
}
ROWS = {  # the kind of rows for each loss
    **dict.fromkeys([f"tune.losses.{name}" for name in ("DPO", "IPO", "SimPO", "CPO", "ORPO")], "preferences"),
    "tune.losses.KTO": "labelled",
    "tune.losses.BradleyTerry": "graded",
    "tune.losses.LinearCrossEntropy": "supervised",
}
# Numbers that recipes use directly, so no argument checks them. Copies with a lower default are accepted.
LEAST = {"group_size": 2, "updates": 1, "dynamic_sampling": 0, "kl": 0, "value_weight": 0, "value_clip": 1e-9}
# Settings that have no effect without another one, with an example of its value.
NEEDS = {
    "max_turns": ("environment", "my_games.Guess"),
    "on_policy.max_new_tokens": ("on_policy.share", "0.5"),
    "evaluate.limit": ("evaluate.tasks", "[arc_easy]"),
    "evaluate.general_limit": ("evaluate.general", "shipped"),
}
EVALUATED = "prompts", "tasks", "general"
LOADED = ("tune.datasets.load", "tune.datasets.load_prompts", "tune.datasets.ray")


def _unsupported(key: str) -> Any:
    return lambda run: f"{run(key)} {UNSUPPORTED[run(key)]}"


def _has_no_effect(run: Facts, key: str, needed: str) -> bool:
    """Return whether the setting `key` was changed, and `needed`, which it depends on, is off."""
    is_set = bool(run.defaults) and run(key) is not None and run(key) != run.usual(key)
    return is_set and needed.split(".")[0] in run.cfg and not run(needed)


def _stages(run: Facts) -> float:
    return run.number("parallel.pp", 1)


def _is_selective(run: Facts) -> bool:
    return bool(run("compute.activation_checkpointing") == "selective")


def _has_two_backwards(run: Facts) -> bool:
    return bool(run("parallel.pp_schedule") == "zero_bubble" and _stages(run) > 1)


def _references(run: Facts) -> list[str]:
    """Return the words that name a reference, in addition to a model folder."""
    return ["adapter_off"] if "kl" in run.cfg else ["precomputed", "adapter_off"]


def _is_no_reference(run: Facts) -> bool:
    reference = run("reference")
    return reference not in (None, *_references(run), run("model.path")) and not os.path.isdir(str(reference))


def _trained_beside(run: Facts) -> list[str]:
    """Return the adapter settings that cannot be switched off."""
    return [key for key in ("adapter.path", "adapter.modules_to_save", "adapter.trainable_tokens") if run(key)]


def _cannot_be_switched_off(run: Facts) -> str:
    others = " and ".join(_trained_beside(run))
    problem = f"with {others} the base is not the model before the first step" if others else "this run has none"
    instead = "null" if "kl" in run.cfg else "precomputed"
    return f"adapter_off needs an adapter that can be switched off: {problem}. Set reference={instead}"


def _environment(run: Facts) -> str:
    """Return the problem with the environment class, or ""."""
    path = run("environment")
    if not path:
        return ""
    try:
        found = locate(path)
    except TuneError as error:
        return str(error)
    if lacking := {"start", "step"} - {*dir(found)}:
        return f"{path} has no {' and no '.join(sorted(lacking))}: it must be a class with start(row) and step(message)"
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        return f"{path} is called without arguments: {error}. Add a default"
    return ""


def _validates_on_nothing(run: Facts) -> bool:
    return run("dataset._component_") in LOADED and not (
        run("dataset.validation_fraction") or run("dataset.validation")
    )


def _evaluates_nothing(run: Facts, key: str) -> bool:
    return bool(run(key) and _validates_on_nothing(run) and not any(run(f"evaluate.{each}") for each in EVALUATED))


def _give_validation(run: Facts) -> str:
    choices = "dataset.validation" + ("" if "reward" in run.cfg else " or dataset.validation_fraction")
    return f"the run has no validation data. Set {choices}, or leave it out"


def _compares_with_nothing(run: Facts) -> bool:
    loss = run("loss._component_")
    return bool(run("reference", "precomputed") != "precomputed" and loss) and not getattr(
        locate(loss), "needs_reference", True
    )


def _learns_from_other_rows(run: Facts) -> bool:
    kind = run("dataset.kind")
    return bool(kind and ROWS.get(run("loss._component_"), kind) != kind)


def _best(run: Facts) -> str:
    return str(run("checkpointer.keep_best", ""))


def _other_loss(run: Facts) -> str:
    """Return why the recipe cannot call this loss, or "".

    For example, the loss compares answers and the recipe's default loss takes tokens or scores, or the reverse.
    """
    component, usual = run("loss._component_"), run.usual("loss._component_")
    if not usual or component == usual:
        return ""
    loss, own = locate(component), locate(usual)
    is_of_answers, are_wanted = hasattr(loss, "needs_reference"), hasattr(own, "needs_reference")
    if is_of_answers != are_wanted:
        verb = "compares" if is_of_answers else "does not compare"
        return f"{component} {verb} log-probs of answers, unlike this recipe's {usual}"
    if is_of_answers and not hasattr(loss, "reward"):
        return f"{component} has no method reward(answers), which returns the rewards of answers. Add one"
    if not is_of_answers and not _is_called_like(loss, own):
        return f"{component} takes other arguments than {usual}, this recipe's loss. Use a loss of the same kind"
    return ""


def _is_called_like(component: Any, usual: Any) -> bool:
    """Return whether instances of `component` can be called like instances of `usual`.

    They must take all positional arguments of `usual` and its keyword arguments without a default. Components of this
    library must also use the same names for positional arguments.
    """
    wanted = inspect.signature(usual.__call__).parameters.values()
    placed = [parameter.name for parameter in wanted if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    named = [
        parameter.name
        for parameter in wanted
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    try:
        bound = inspect.signature(component.__call__).bind(*placed, **dict.fromkeys(named))
    except TypeError:
        return False
    is_ours = component.__module__.startswith("tune.")
    return not is_ours or [*bound.arguments][: len(placed)] == placed


def _layout(run: Facts) -> Any:
    return locate("tune.plan.layout_of")(run)  # tune.plan imports the rules, and takes seconds to import


def rule(id: str, key: Any, says: Any, why: str, when: Any) -> Rule:
    return Rule(id, Level.ERROR, key, "", "always", says, why, when)


NOT_WITH_FLOAT8 = "it cannot be combined with model.float8. Leave one of them out"
ONE_BACKWARD = "it does not work with parallel.pp_schedule=zero_bubble, which splits the backward. Leave one out"
ALL_BLOCKS = "pipeline stages keep the blocks in several processes"

# fmt: off
COMBINATIONS = [
    *[rule(f"least-{key.replace('_', '-')}", key, f"{{}} is below {least}, the minimum. Raise it",
           "the run would learn nothing, or the opposite of its objective",
           lambda run, key=key, least=least: run.number(key, least) < least <= run.usual(key, least))
      for key, least in LEAST.items()],
    rule("optimizer-that-does-not-work-here", "optimizer._component_", _unsupported("optimizer._component_"),
         "the run would end in its first step, or could not be resumed",
         lambda run: run("optimizer._component_") in UNSUPPORTED),
    rule("loss-of-whole-logits", "loss._component_", _unsupported("loss._component_"),
         "the logits of all tokens can take more memory than the model",
         lambda run: run("loss._component_") in UNSUPPORTED),
    rule("loss-of-another-kind", "loss._component_", _other_loss,
         "the recipe calls its loss with other arguments",
         lambda run: run("loss._component_") not in UNSUPPORTED and _other_loss(run)),
    rule("head-of-another-recipe", "model.head",
         lambda run: f"{show(run('model.head'))} is the head for another recipe. Leave it out",
         "the loss would get the wrong values from the head",
         lambda run: run.defaults and run("model._component_") == "tune.models.build"
         and run("model.head", "tokens") != run.usual("model.head", "tokens")),
    rule("loss-of-other-rows", "loss._component_",
         lambda run: f"{run('loss._component_')} needs dataset.kind={ROWS[run('loss._component_')]} (got "
         f"{run('dataset.kind')}). Change one of them",
         "the kind of rows decides the arguments of the loss",
         _learns_from_other_rows),
    rule("decay-of-more-than-a-weight", "optimizer.weight_decay",
         lambda run: f"optimizer.lr={run('optimizer.lr')} times {run('optimizer.weight_decay')} is more than 1, so a "
         "step would remove more than a whole weight. Lower one of them",
         "weights would change sign in each step",
         lambda run: run.number("optimizer.lr") * run.number("optimizer.weight_decay") > 1),
    rule("fp16-of-weights-in-bf16", "compute.master_dtype",
         "compute.dtype=fp16 needs trained parameters in fp32. Leave it out, or set compute.dtype=bf16",
         "gradients are scaled in fp16 and must be unscaled in fp32",
         lambda run: run("compute.dtype") == "fp16" and run("compute.master_dtype") == "bf16"),
    *(rule(f"fp16-beside-{axis}", "compute.dtype",
           f"fp16 gradients are not scaled with parallel.{axis} above 1. Set parallel.{axis}=1 or compute.dtype=bf16",
           "gradients would underflow to zero or overflow",
           lambda run, axis=axis: run("compute.dtype") == "fp16" and run.number(f"parallel.{axis}", 1) > 1)
      for axis in ("pp", "ep")),
    rule("selective-offload-of-eager-blocks", "compute.activation_offload",
         "with activation_checkpointing=selective, activations are only offloaded from compiled blocks. Set "
         "compute.activation_checkpointing to full or none, or compute.compile=true",
         "the hooks that offload do not see the tensors that selective checkpointing saves",
         lambda run: run("compute.activation_offload") and _is_selective(run) and run("compute.compile") is not True),
    rule("two-backwards-of-compiled-blocks", "compute.compile", ONE_BACKWARD,
         "a compiled block has a single backward",
         lambda run: _has_two_backwards(run) and run("compute.compile")),
    rule("two-backwards-of-recomputed-blocks", "compute.activation_checkpointing", ONE_BACKWARD,
         "selective checkpointing recomputes only once",
         lambda run: _has_two_backwards(run) and _is_selective(run)),
    rule("quantized-weights-alone", "model.quantization",
         "quantized weights are frozen, and the run has no adapter to train. Set adapter.rank=16",
         "there would be nothing to train",
         lambda run: run("model.quantization") and "adapter" in run.cfg and not run("adapter")),
    Rule("quantized-weights-of-no-adapter", Level.WARNING, "model.quantization", "", "always",
         "quantized weights are frozen, and this recipe adds no adapter. Use lora_finetune, or leave it out",
         "only the embedding, the norms and the head would be trained",
         lambda run: run("model.quantization") and "adapter" not in run.cfg),
    *(rule(f"float8-beside-{name}", key, NOT_WITH_FLOAT8, "both replace the matrix products of the same layers",
           lambda run, key=key: run("model.float8") and run(key) not in (None, 1))
      for name, key in (("nf4", "model.quantization"), ("tp", "parallel.tp"))),
    rule("tasks-of-stages", "evaluate.tasks",
         lambda run: f"it needs all blocks in one process (got parallel.pp={_stages(run):g}). Evaluate the "
         "exported model, or set parallel.pp=1", ALL_BLOCKS,
         lambda run: _stages(run) > 1 and run("evaluate.tasks")),
    rule("answers-of-stages", "evaluate.prompts",
         lambda run: f"it needs all blocks in one process (got parallel.pp={_stages(run):g}). Generate "
         "afterwards, or set parallel.pp=1", ALL_BLOCKS,
         lambda run: _stages(run) > 1 and run("evaluate.prompts")),
    rule("general-data-of-stages", "evaluate.general",
         lambda run: f"it needs all blocks in one process (got parallel.pp={_stages(run):g}). Set "
         "parallel.pp=1, or leave it out", ALL_BLOCKS,
         lambda run: _stages(run) > 1 and run("evaluate.general")),
    rule("dropout-drawn-anew", "adapter.dropout",
         lambda run: f"with parallel.pp={_stages(run):g}, compiled blocks draw new dropout masks when they "
         "recompute. Set compute.compile=false or parallel.pp=1",
         "the gradient would belong to a different forward",
         lambda run: _stages(run) > 1 and run("adapter.dropout") and _is_selective(run) and run("compute.compile")),
    rule("value-of-many-outputs", "value.head",
         "a value model needs a head with one output. Set value.head=score",
         "a value is one number per token",
         lambda run: run("value.head", "score") != "score"),
    rule("stored-predictions-of-new-answers", "teacher.top_k",
         "the teacher cannot store predictions for answers that the student samples later. Set on_policy.share=0",
         "predictions are stored before training",
         lambda run: run("teacher.top_k") and run("on_policy.share")),
    rule("reference-that-is-not-there", "reference",
         lambda run: f"{run('reference')} is neither {' nor '.join(_references(run))} nor a model folder."
         + did_you_mean(str(run("reference")), _references(run)).removesuffix("."),
         "there is no model to compare with",
         _is_no_reference),
    rule("reference-of-a-loss-without", "reference",
         lambda run: f"{run('loss._component_')} uses no reference. Leave it out, or use tune.losses.DPO",
         "the reference would be loaded for nothing",
         _compares_with_nothing),
    rule("adapter-that-stays-on", "reference", _cannot_be_switched_off,
         "the reference must be the model before the first step",
         lambda run: run("reference") == "adapter_off" and (not run("adapter") or _trained_beside(run))),
    rule("no-reward", "reward",
         lambda run: f"{show(run('reward'))} gives no reward. Name a function"
         + (", or an environment that gives rewards" if "environment" in run.cfg else ""),
         "there is nothing to learn from",
         lambda run: "reward" in run.cfg and not run("reward") and not run("environment")),
    rule("environment-that-is-none", "environment", _environment,
         "each completion gets its own object, which is called with its messages",
         _environment),
    rule("patience-without-a-metric", "checkpointer.patience",
         "it counts values of a metric. Name one, such as checkpointer.keep_best=validation_loss",
         "patience would never end the run",
         lambda run: run("checkpointer.patience") and not _best(run)),
    rule("best-of-a-few-rows", "checkpointer.keep_best",
         lambda run: f"{_best(run)} is no metric of the validation. Use validation_"
                     f"{'reward' if run('reward') else 'loss'}, or another one",
         "a training metric depends on how easy the rows of a step are",
         lambda run: _best(run) and not _best(run).startswith("validation_")
         and not ("/" in _best(run) and run("evaluate.tasks"))),
    *(Rule(f"{name}-nothing", Level.WARNING, key, "", "always",
           "the run has nothing to evaluate. Set dataset.validation, or evaluate.prompts, .tasks or .general",
           "it has no effect, unless the recipe adds a measurement of its own",
           partial(_evaluates_nothing, key=key))
      for name, key in (("evaluating", "evaluate.every"), ("evaluating-first", "evaluate.first"))),
    rule("best-validation-of-nothing", "checkpointer.keep_best", _give_validation,
         "the metric is never measured",
         lambda run: _validates_on_nothing(run) and _best(run).startswith("validation_")),
    *(Rule(f"{key.replace('.', '-').replace('_', '-')}-of-nothing", Level.WARNING, key, "", "always",
           f"{{}} has no effect without {needed}. Set {needed}={example}, or leave it out",
           "the setting would be ignored",
           partial(_has_no_effect, key=key, needed=needed))
      for key, (needed, example) in NEEDS.items()),
    Rule("layout-that-is-planned", Level.CHANGED, "parallel.auto", "", "always",
         "the layout is planned, with micro_batch_size and parts of compute",
         "`tune plan --search` chooses the fastest layout that fits",
         lambda run: run.device and run("parallel.auto"), _layout),
]
"""Rules that follow from this library alone. The last rule sees the changes of the others."""
