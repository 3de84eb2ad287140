"""Rules from problems that others reported: settings, the machine they are for, and the model's files."""

from pathlib import Path

from tune.rules.rule import GREAT, Facts, Level, Rule

ERROR, CHANGED, WARNING, _ = Level
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EMBEDDINGS = ("embedding", "embed_tokens", "embed_in", "wte", "word_embeddings")


def _compares(run: Facts) -> bool:
    """Return whether the loss compares the log-probs of answers."""
    return "reference" in run.cfg and run("dataset.kind") in ("preferences", "graded", "labelled")


def _samples(run: Facts) -> bool:
    return "sampling" in run.cfg and "reward" in run.cfg


def _usual_rate(run: Facts) -> str:
    return "an adapter, about 1e-4 to 3e-4" if run("adapter") else "all parameters, about 1e-6 to 5e-5"


def _scale(run: Facts) -> float:
    """Return the adapter's scaling factor."""
    rank = run.number("adapter.rank", 1.0) or 1.0
    return run.number("adapter.alpha", 2 * rank) / (rank**0.5 if run("adapter.rank_stabilized") else rank)


def _halves(run: Facts) -> set[str]:
    """Return names of the embedding and its tied head. Native models refuse an adapted tied head."""
    heads = ["lm_head"] if run.asks("model._component_", "models.hf") else []
    return {*EMBEDDINGS, *heads}


def _has_experts(run: Facts) -> bool:
    return any(run.model.get(name) for name in EXPERTS)


def _multiplies_in_bf16() -> bool:
    """Return whether the CPU multiplies in bf16."""
    from torch import cpu  # reading settings does not import torch

    return cpu._is_avx512_bf16_supported()


# fmt: off
TABLE = [
    # Learning rates
    Rule("rate-of-all-parameters", WARNING, "optimizer.lr", "karpathy/nanoGPT#136", "always",
         lambda run: f"{run.lr:g} is far above the usual rate for {_usual_rate(run)}. Lower it",
         "a pretrained model forgets in its first steps, and the loss on the new data does not show it",
         lambda run: run.lr > (1e-2 if run("adapter") else 5e-4)),
    Rule("rate-of-an-adapter", WARNING, "optimizer.lr", "huggingface/diffusers#6288", "always",
         "{} is a rate for all parameters. Raise it tenfold for an adapter, to about 1e-4 to 3e-4",
         "an adapter starts at zero, and at this rate stays near zero",
         lambda run: 0 < run.lr < 2e-5 and run("adapter.alpha")
         and not ("reference" in run.cfg or _samples(run) or run("adapter.path") or run.asks("loss", "BradleyTerry"))),
    Rule("rate-of-preferences", WARNING, "optimizer.lr", "huggingface/trl#1025", "trl 0.7",
         "{} is high for a preference loss. Lower it to about 5e-7 to 5e-6, or ten times that with an adapter",
         "chosen and rejected answers both become improbable and the model repeats itself, while the loss falls",
         lambda run: _compares(run) and run.lr > (5e-4 if run("adapter") else 5e-5)),
    Rule("rate-of-a-policy", WARNING, "optimizer.lr", "datawhalechina/hello-agents#770", "trl 0.14",
         "{} is high for reinforcement learning. Lower it to about 1e-6, or 1e-5 with an adapter",
         "the policy collapses: right answers fell from 57% to 2% in the linked report",
         lambda run: _samples(run) and run.lr > (5e-4 if run("adapter") else 3e-5)),
    Rule("rate-of-zero", WARNING, "optimizer.lr", "huggingface/transformers#5316", "always",
         "it is 0, so nothing is learned. Raise it",
         "the run ends normally, with an unchanged model",
         lambda run: run("optimizer.lr") == 0),
    Rule("rate-of-sgd", WARNING, "optimizer.lr", "rstrudel/segmenter#47", "always",
         "{} is a rate for Adam, whose steps do not depend on the size of gradients. For SGD, set 1e-2 or more",
         "gradients of language models are small, so the steps would be small too",
         lambda run: 0 < run.number("optimizer.lr") < 1e-3 and run.asks("optimizer._component_", "optim.SGD")),
    Rule("rate-of-adafactor", WARNING, "optimizer.lr", "huggingface/transformers#19387", "torch 2.5",
         "{} is a rate for Adam. Adafactor multiplies it by the size of each weight: set about 1e-3",
         "with weights of about 0.02, it learns fifty times more slowly than the number suggests",
         lambda run: 0 < run.number("optimizer.lr") < 1e-4 and run.asks("optimizer._component_", "Adafactor")),
    Rule("ratio-of-rates", WARNING, "parameter_groups.lr_ratios", "tdrussell/qlora-pipe#20", "peft 0.10",
         "with {} a parameter group learns at more than 1e-2. Lower optimizer.lr when you use LoRA+",
         "the B matrices diverge while the rest learns",
         lambda run: any(isinstance(ratio, int | float) and ratio * run.lr > 1e-2
                         for ratio in dict(run("parameter_groups.lr_ratios", {})).values())),
    Rule("warm-up-of-the-whole-run", ERROR, "schedule.warmup", "PrimeIntellect-ai/prime-rl#968", "always",
         "{} warm-up steps do not fit into max_steps. Lower it, or set a fraction below 1",
         "the learning rate would never reach optimizer.lr",
         lambda run: run.number("schedule.warmup") > max(1, run.number("max_steps", GREAT))),
    # Number formats
    Rule("updates-lost-in-bf16", WARNING, "compute.master_dtype", "pytorch/ao#1124", "always",
         "{} has three digits, so most updates at rates below 2e-5 are rounded away. Set "
         "compute.master_dtype=fp32. In one "
         "process you can also use torchao.optim.AdamW8bit with optimizer.bf16_stochastic_round=true",
         "the loss falls slowly or not at all",
         lambda run: run("compute.master_dtype") == "bf16" and 0 < run.lr < 2e-5 and not run("adapter")
         and not run("optimizer.bf16_stochastic_round")),
    Rule("moments-stuck-in-bf16", WARNING, "optimizer.betas", "Nerogar/OneTrainer#1005", "always",
         "with compute.master_dtype=bf16 the second moment cannot follow a beta above 0.996 (got {}). Lower it to 0.99",
         "the change in a step is below its precision and is rounded away",
         lambda run: run("compute.master_dtype") == "bf16" and run.lr
         and max([0, *run("optimizer.betas", [])][-1:]) > 0.996 and not run.asks("optimizer._component_", "torchao")),
    Rule("low-bit-states-of-bf16-shards", ERROR, "optimizer._component_", "pytorch/ao#4216", "torchao 0.17",
         "{} cannot update bf16 shards (several processes, or compute.cpu_offload). Set "
         "compute.master_dtype=fp32, or use "
         "torch.optim.AdamW",
         "the run would end in its first step, because torchao's code for their states does not compile",
         lambda run: run("compute.master_dtype") == "bf16" and run.asks("optimizer._component_", "torchao")
         and (run.processes > 1 or run("compute.cpu_offload"))),
    Rule("computing-finer-than-the-weights", WARNING, "compute.dtype", "meta-pytorch/torchtune#2254", "always",
         "computing in {} takes twice the time, and compute.master_dtype=bf16 rounds its results. Swap the two",
         "weights and optimizer states need the precision",
         lambda run: (run("compute.dtype"), run("compute.master_dtype")) == ("fp32", "bf16")),
    Rule("fp32-on-a-gpu", WARNING, "compute.dtype", "pytorch/pytorch#153195", "torch 1.12",
         "{} is about eight times slower than bf16 on this GPU, as TF32 is off. Set compute.dtype=bf16 and keep "
         "compute.master_dtype",
         "weights and optimizer states still stay in fp32",
         lambda run: run.device == "cuda" and run("compute.dtype") == "fp32" and (run.capability or (9, 0)) >= (8, 0)),
    Rule("bf16-on-a-cpu", WARNING, "compute.dtype", "pytorch/pytorch#146508", "always",
         "{} is slow on this CPU, without AVX512-BF16 or AMX. Set compute.dtype=fp32, which is several times "
         "faster and exact",
         "each product is converted back and forth",
         lambda run: run.device == "cpu" and run("compute.dtype") == "bf16" and not _multiplies_in_bf16()),
    Rule("bf16-on-an-old-gpu", WARNING, "compute.dtype", "vllm-project/vllm#1157", "always",
         "{} is slow on this GPU: bf16 units and flash kernels need compute capability 8.0. Set "
         "compute.dtype=fp16 or fp32",
         "bf16 is emulated: computed in fp32 and rounded",
         lambda run: run.device == "cuda" and run("compute.dtype") == "bf16" and (run.capability or (9, 0)) < (8, 0)),
    Rule("fp16-that-overflows", WARNING, "compute.dtype", "huggingface/transformers#36822", "always",
         "hidden states of Gemma exceed 65,504, the largest number in {}. Set compute.dtype=bf16 or fp32",
         "the loss is not finite in the first step, and no loss scale helps",
         lambda run: run("compute.dtype") == "fp16" and str(run.model.get("model_type", "")).startswith("gemma")),
    Rule("float8-on-an-old-gpu", ERROR, "model.float8", "pytorch/ao#2566", "torch 2.5",
         "this GPU does not multiply in {}: tensorwise needs compute capability 8.9, rowwise 9.0. Leave it out",
         "the first product fails",
         lambda run: run("model.float8") and (run.device == "mps" or (run.device == "cuda"
         and (run.capability or (9, 0)) < ((8, 9) if run("model.float8") == "tensorwise" else (9, 0))))),
    Rule("float8-by-rows-in-fp32", ERROR, "model.float8", "pytorch/ao#2566", "torch 2.5",
         "{} only returns products in bf16. Set compute.dtype=bf16 and keep compute.master_dtype",
         "the first product fails",
         lambda run: run.device == "cuda" and run.asks("model.float8", "rowwise") and run("compute.dtype") == "fp32"),
    Rule("float8-that-is-slower", WARNING, "model.float8", "pytorch/ao#1199", "torch 2.5",
         "{} is faster than bf16 only on a GPU with compute.compile=true. Set compute.compile=true, or leave it out",
         "without compilation, casts take longer than the products save; other devices emulate float8",
         lambda run: run("model.float8") and not (run.device == "cuda" and run("compute.compile"))),
    Rule("two-types-on-mps", CHANGED, "compute.dtype", "huggingface/transformers#40458", "torch 2.3",
         "on mps, weights and computation have the same type: {} becomes fp32, like compute.master_dtype",
         "FSDP, which casts between two types, does not run on mps, and M1 and M2 only emulate bf16",
         lambda run: run.device == "mps" and run("compute.dtype") in ("bf16", "fp16")
         and run("compute.master_dtype") == "fp32" and (not run("adapter") or run("adapter.modules_to_save")),
         lambda run: {"compute.dtype": "fp32"}),
    Rule("two-types-on-mps-reversed", ERROR, "compute.master_dtype", "huggingface/transformers#40458", "torch 2.3",
         "on mps, weights and computation have the same type. Set it to fp32, or compute.dtype=bf16",
         "FSDP, which casts between two types, does not run on mps",
         lambda run: run.device == "mps" and (run("compute.dtype"), run("compute.master_dtype")) == ("fp32", "bf16")),
    # Memory
    Rule("offload-on-mps", ERROR, "compute.cpu_offload", "huggingface/transformers#47601", "always",
         "it does not work on mps. Set it to false",
         "FSDP moves the parameters and does not run on mps; host and device share one memory anyway",
         lambda run: run.device == "mps" and run("compute.cpu_offload")),
    Rule("offload-from-host-to-host", ERROR, "compute.activation_offload", "modelscope/ms-swift#7201", "always",
         "with device=cpu, activations are already in host memory. Set it to false",
         "activations would be copied for nothing",
         lambda run: run.device == "cpu" and run("compute.activation_offload")),
    # Compilers, processes and the environment
    Rule("recomputing-compiled-shares", ERROR, "compute.compile", "meta-pytorch/torchtune#2684", "torch 2.4",
         "with parallel.tp or parallel.ep above 1, compiled blocks are recomputed as a whole. Set "
         "compute.compile=false, or compute.activation_checkpointing=full or none",
         "selective checkpointing chooses operations, which a compiled block does not expose",
         lambda run: run("compute.compile") and max(run.number("parallel.tp", 1), run.number("parallel.ep", 1)) > 1
         and run("compute.activation_checkpointing", "none") == "selective"),
    Rule("compiling-without-a-compiler", CHANGED, "compute.compile", "pytorch/pytorch#92745", "torch 2.0",
         "this machine has no C++ compiler (g++, or the one that CXX names), so blocks are not compiled",
         "the run would end in its first step",
         lambda run: run.device == "cpu" and run("compute.compile") and not run.has_compiler,
         lambda run: {"compute.compile": False}),
    Rule("compiling-without-a-c-compiler", ERROR, "compute.compile", "unslothai/unsloth#1772", "torch 2.0",
         lambda run: f"Triton, which compiles for GPUs, needs {run.triton_lacks}: apt install gcc python3-dev (or the "
         "equivalent packages; CC names another compiler), or set compute.compile=false",
         "the run would end in its first step",
         lambda run: run.device == "cuda" and run("compute.compile") and run.triton_lacks),
    Rule("optimizer-without-a-compiler", ERROR, "optimizer._component_", "urchade/GLiNER#148", "torchao 0.4",
         "{} needs a C++ compiler, and this machine has none. Install g++, or use torch.optim.AdamW",
         "the run would end in its first step, after all weights are loaded",
         lambda run: run.device == "cpu" and run.asks("optimizer._component_", "torchao") and not run.has_compiler),
    Rule("compiling-switched-off", CHANGED, "compute.compile", "vllm-project/vllm#40715", "torch 2.12",
         "TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set in the environment, so blocks are not compiled",
         "torch would end the run in its first step, because nothing was compiled",
         lambda run: run.device and run("compute.compile")
         and {run.environ.get(f"TORCH{name}_DISABLE") for name in ("_COMPILE", "DYNAMO")}
         - {None, "", "0"}, lambda run: {"compute.compile": False}),
    Rule("waiting-for-each-kernel", WARNING, "device", "ByteDance-Seed/VeOmni#115", "always",
         "CUDA_LAUNCH_BLOCKING is set in the environment. Unset it unless you are debugging",
         "the host waits for each kernel, so host and GPU never work at the same time",
         lambda run: run.device == "cuda" and run.environ.get("CUDA_LAUNCH_BLOCKING") == "1"),
    Rule("shares-beyond-a-node", WARNING, "parallel.tp", "NVIDIA/Megatron-LM#258", "always",
         "{} processes share each block, and a node has at most 8 GPUs. Lower it; parallel.dp_shard works across nodes",
         "every layer would wait for the network twice",
         lambda run: run.device == "cuda" and run.number("parallel.tp", 1) > 8),
    Rule("little-patience", WARNING, "parallel.timeout", "meta-pytorch/torchtune#2093", "always",
         "saving or exporting a large model may take longer than {} minutes. Set it to 30 or more",
         "the other processes give up and end the run while its last checkpoint is written",
         lambda run: run.processes > 1 and run.number("parallel.timeout", 60) < 10),
    # Checkpoints
    Rule("best-of-one", WARNING, "checkpointer.keep_best", "huggingface/transformers#12786", "always",
         "{} is only measured after the last step. Set evaluate.every",
         "the best checkpoint is always the last one, and patience never ends a run",
         lambda run: run.asks("checkpointer.keep_best", "validation_") and not run("evaluate.every")),
    Rule("best-of-nothing", ERROR, "checkpointer.keep_best", "huggingface/transformers#31450", "always",
         "validation does not measure {}. Use validation_loss, or validation_token_accuracy with loss.accuracy=true. "
         "For a metric of your own, also set checkpointer.higher_is_better",
         "the run would end at its first validation",
         lambda run: run.asks("loss._component_", "LinearCrossEntropy")
         and run.asks("checkpointer.keep_best", "validation_")
         and run("checkpointer.keep_best").partition("/")[0] != "validation_loss"
         and run("checkpointer.higher_is_better") is None
         and not (run("loss.accuracy") and run("checkpointer.keep_best") == "validation_token_accuracy")),
    # Adapters, preferences and policies
    Rule("adapter-that-hardly-counts", WARNING, "adapter.alpha", "jondurbin/airoboros#36", "always",
         "with {} the adapter's scaling factor is below 1/4. Raise it to twice the rank",
         "a higher rank then learns more slowly and seems not to help",
         lambda run: run("adapter.rank") and not run("adapter.path") and _scale(run) < 0.25),
    Rule("adapter-that-counts-too-much", WARNING, "adapter.alpha", "predibase/lorax#299", "peft 0.7",
         "with {} the adapter's scaling factor is above 16. Lower it; rank_stabilized=true divides it only by the "
         "square root of the rank",
         "it acts like a learning rate higher by this factor",
         lambda run: run("adapter.rank") and not run("adapter.path") and _scale(run) > 16),
    Rule("dropout-beside-a-reference", WARNING, "adapter.dropout", "huggingface/trl#639", "trl 0.5",
         "the reference has no dropout (got {}). Set it to 0",
         "the comparison with the reference contains noise, which the loss mistakes for learning",
         lambda run: _compares(run) and run.number("adapter.dropout") > 0
         and not run.asks("loss._component_", ".SimPO", ".CPO", ".ORPO")),
    Rule("dropout-beside-a-sampler", WARNING, "adapter.dropout", "huggingface/trl#3234", "trl 0.14",
         "the sampler has no dropout (got {}). Set it to 0",
         "the ratio to the sampled policy is noise from the first step on, and is clipped at 2",
         lambda run: _samples(run) and run.number("adapter.dropout") > 0),
    Rule("updates-without-a-clip", WARNING, "updates", "huggingface/trl#2899", "trl 0.16",
         "{} updates use the same completions without a clip. Set loss._component_=tune.losses.ClippedPolicy",
         "nothing keeps the policy near the one that sampled them",
         lambda run: run.number("updates", 1) > 1 and run.asks("loss._component_", "PolicyGradient")),
    Rule("another-distribution", WARNING, "sampling", "verl-project/verl#6240", "always",
         "top_k, top_p and min_p sample from another distribution than the trained one. Leave them out",
         "probabilities of trainer and sampler differ, so their ratio is wrong for each token",
         lambda run: _samples(run) and any(run(f"sampling.{name}") for name in ("top_k", "top_p", "min_p"))),
    Rule("reference-of-nothing", WARNING, "reference", "huggingface/trl#2806", "trl 0.16",
         "{} is not used because kl is 0. Raise kl, or leave the reference out",
         "only kl keeps the policy near its reference",
         lambda run: "kl" in run.cfg and not run("kl") and run("reference") not in (None, run("model.path"))),
    Rule("teacher-that-is-the-student", WARNING, "teacher.path", "huggingface/trl#2217", "trl 0.11",
         "{} is the student itself, so the loss is 0. Use another model",
         "the run ends normally, with an unchanged model",
         lambda run: run("teacher.path") and not run("loss.cross_entropy")
         and Path(str(run("teacher.path"))).resolve() == Path(str(run("model.path"))).resolve()
         and not any(map(run, ("model.quantization", "teacher.quantization", "adapter.path")))),
    Rule("a-beta-that-holds", WARNING, "loss.beta", "huggingface/trl#2382", "trl 0.5",
         "{} is outside the range for DPO, 0.01 to 1. Set it to 0.1 to 0.5",
         "above it, the policy stays at the reference; below it, nothing prevents degeneration",
         lambda run: run.asks("loss._component_", "losses.DPO") and not run("loss.length_normalized")
         and not 0.005 <= run.number("loss.beta", 0.1) <= 2),
    Rule("answers-exchanged", ERROR, "loss.label_smoothing", "huggingface/trl#1035", "trl 0.7",
         "{} means that at least half of the pairs are reversed. Lower it below 0.5",
         "at 0.5 nothing is learned, and above 0.5 the model learns the rejected answers",
         lambda run: _compares(run) and run.number("loss.label_smoothing") >= 0.5),
    Rule("epochs-of-rewards", WARNING, "epochs", "PKU-Alignment/safe-rlhf#24", "always",
         "{} passes over the pairs: a reward model overfits in the second one. Set it to 1",
         "it becomes overconfident on pairs it has seen, and a policy exploits its errors",
         lambda run: run.asks("loss._component_", "BradleyTerry") and run.number("epochs", 1) > 1
         and not run("max_steps")),
    # Settings that depend on the model's files
    Rule("merged-into-other-weights", WARNING, "export.merge", "unslothai/unsloth-zoo#810", "peft 0.4",
         "the adapter is trained on NF4 weights and merged into the exact weights. Evaluate the merged model",
         "it has learned to compensate quantization errors that the merged model does not have",
         lambda run: run("export.merge") and run("model.quantization")),
    Rule("experts-that-stay", WARNING, "model.quantization", "bitsandbytes-foundation/bitsandbytes#1849",
         "transformers 5.0",
         "{} only quantizes linear layers: the experts of this model stay in dtype",
         "experts are most of its weights, so hardly any memory is saved",
         lambda run: run("model.quantization") and _has_experts(run)),
    Rule("adapted-router", WARNING, "adapter.target_modules", "AI-Hypercomputer/maxtext#3969", "always",
         "{} names the router of the experts. Leave gate or router out",
         "a small change sends tokens to experts that have not learned them",
         lambda run: _has_experts(run) and not isinstance(run("adapter.target_modules"), str)
         and {"gate", "router"} & {*run("adapter.target_modules", [])}),
    Rule("adapted-router-weight", WARNING, "adapter.target_parameters", "AI-Hypercomputer/maxtext#3969", "always",
         "{} names the router of the experts. Leave its weight out",
         "a small change sends tokens to experts that have not learned them",
         lambda run: any(name.endswith(("gate.weight", "router.weight"))
                         for name in run("adapter.target_parameters", []))),
    Rule("unbalanced-experts", WARNING, "model.router_loss", "huggingface/transformers#44586", "transformers 4.36",
         "all parameters are trained and no loss balances the experts, because config.json turns output_router_logits "
         "off. Set model.router_loss to its router_aux_loss_coef",
         "over time, a few experts get all tokens",
         lambda run: _has_experts(run) and run.model.get("router_aux_loss_coef") and not run("adapter")
         and not run.model.get("output_router_logits") and run("model.router_loss") is None and "model" in run.cfg),
    Rule("packing-one-by-one", WARNING, "packed", "state-spaces/mamba#478", "always",
         "a model with recurrent states splits a packed row into one row per document. Set packed=false, and count "
         "documents in micro_batch_size",
         "states would leak between documents, so all are padded to the longest, in one forward",
         lambda run: run("packed") and run.asks("model._component_", "models.hf")
         and any(name in run.model for name in ("state_size", "mamba_d_state", "ssm_state_size", "d_state"))),
    Rule("tied-halves", WARNING, "adapter.modules_to_save", "huggingface/transformers#45127", "transformers 4.0",
         "{}: embedding and head of this model share one weight, and the adapter file has only one of them. Merge with "
         "`tune merge`, or use adapter.trainable_tokens",
         "readers that do not tie them again lose the training of the other one",
         lambda run: run.model.get("tie_word_embeddings")
         and {name.rpartition(".")[2] for name in run("adapter.modules_to_save", [])}
         & _halves(run)),
    Rule("gemma-without-bos", WARNING, "tokenizer.chat_template", "EleutherAI/lm-evaluation-harness#1465", "always",
         "the chat template writes no bos_token, which Gemma models need. Add {{{{ bos_token }}}} at its start",
         "without it, perplexity is a thousand times higher, and training first has to make up for that",
         lambda run: str(run.model.get("model_type", "")).startswith("gemma") and run.template
         and "bos" not in run.template),
    Rule("thoughts-cut-short", WARNING, "sampling.max_new_tokens", "huggingface/trl#5697", "trl 0.14",
         "{} tokens are too few for a reasoning model (its chat template has <think>). Set it to 1,000 or more",
         "no completion reaches its answer, all rewards are zero, and nothing is learned",
         lambda run: "reward" in run.cfg and "<think>" in run.template
         and run.number("sampling.max_new_tokens", GREAT) < 512),
]
"""Rules with an upstream source."""
