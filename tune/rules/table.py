"""Rules that others have paid for: of settings, the machine that they are for, and the model's files."""

from pathlib import Path

from tune.rules.rule import GREAT, Facts, Level, Rule

ERROR, CHANGED, WARNING, _ = Level
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EMBEDDINGS = ("embedding", "embed_tokens", "embed_in", "wte", "word_embeddings")


def _compares(run: Facts) -> bool:
    """Whether answers are compared by their log-probs."""
    return "reference" in run.cfg and "reward" not in run.cfg


def _samples(run: Facts) -> bool:
    return "sampling" in run.cfg and "reward" in run.cfg


def _takes(run: Facts) -> str:
    return "an adapter takes, about 1e-4 to 3e-4" if run("adapter") else "all parameters takes, about 1e-6 to 5e-5"


def _scale(run: Facts) -> float:
    """What an adapter counts times."""
    rank = run.number("adapter.rank", 1.0) or 1.0
    return run.number("adapter.alpha", 2 * rank) / (rank**0.5 if run("adapter.rank_stabilized") else rank)


def _halves(run: Facts) -> set[str]:
    """Names of an embedding and of the head that is tied to it; our own models refuse a tied head."""
    heads = ["lm_head"] if run.asks("model._component_", "models.hf") else []
    return {*EMBEDDINGS, *heads}


def _has_experts(run: Facts) -> bool:
    return any(run.model.get(name) for name in EXPERTS)


def _multiplies_in_bf16() -> bool:
    """Whether the CPU does."""
    from torch import cpu  # settings are read without torch

    return cpu._is_avx512_bf16_supported()


# fmt: off
TABLE = [
    # How fast
    Rule("rate-of-all-parameters", WARNING, "optimizer.lr", "karpathy/nanoGPT#136", "always",
         lambda run: f"{run.lr:g} is far above what training {_takes(run)}. Lower it",
         "a pretrained model forgets in its first steps, and the loss on the new data does not tell",
         lambda run: run.lr > (1e-2 if run("adapter") else 5e-4) and not run("from_scratch")),
    Rule("rate-of-an-adapter", WARNING, "optimizer.lr", "huggingface/diffusers#6288", "always",
         "{} is that of all parameters; an adapter takes ten times as much, about 1e-4 to 3e-4. Raise it",
         "an adapter starts at zero, and so slow it ends there",
         lambda run: 0 < run.lr < 2e-5 and run("adapter.alpha") and "reference" not in run.cfg
         and not (_samples(run) or run("adapter.path") or "teacher" in run.cfg or run.asks("loss", "BradleyTerry"))),
    Rule("rate-of-preferences", WARNING, "optimizer.lr", "huggingface/trl#1025", "trl 0.7",
         "{} is high for a loss of preferences, which takes about 5e-7 to 5e-6, with an adapter ten times as much",
         "chosen and rejected answers both become improbable, and the model repeats itself, while the loss falls",
         lambda run: _compares(run) and run.lr > (5e-4 if run("adapter") else 5e-5)),
    Rule("rate-of-a-policy", WARNING, "optimizer.lr", "datawhalechina/hello-agents#770", "trl 0.14",
         "{} is high for reinforcement learning, which takes about 1e-6, with an adapter 1e-5",
         "the policy collapses: of 57% right answers 2% were left in that report",
         lambda run: _samples(run) and run.lr > (5e-4 if run("adapter") else 3e-5)),
    Rule("rate-of-zero", WARNING, "optimizer.lr", "huggingface/transformers#5316", "always",
         "it is 0: nothing is learned",
         "the run ends as any other, with the model that it began with",
         lambda run: run("optimizer.lr") == 0),
    Rule("rate-of-sgd", WARNING, "optimizer.lr", "rstrudel/segmenter#47", "always",
         "{} is a rate for Adam, whose steps do not depend on the size of gradients; SGD takes about 1e-2 and more",
         "gradients of language models are small, and so are the steps",
         lambda run: 0 < run.number("optimizer.lr") < 1e-3 and run.asks("optimizer._component_", "optim.SGD")),
    Rule("rate-of-adafactor", WARNING, "optimizer.lr", "huggingface/transformers#19387", "torch 2.5",
         "{} is a rate for Adam; Adafactor multiplies it by the size of each weight and takes about 1e-3",
         "with weights of about 0.02 it learns fifty times as slowly as the number says",
         lambda run: 0 < run.number("optimizer.lr") < 1e-4 and run.asks("optimizer._component_", "Adafactor")),
    Rule("ratio-of-rates", WARNING, "parameter_groups.lr_ratios", "tdrussell/qlora-pipe#20", "peft 0.10",
         "with {} a group learns at more than 1e-2: LoRA+ wants a lower optimizer.lr beside its ratio",
         "the matrices B diverge while the rest learns",
         lambda run: any(isinstance(ratio, int | float) and ratio * run.lr > 1e-2
                         for ratio in dict(run("parameter_groups.lr_ratios", {})).values())),
    Rule("warm-up-of-the-whole-run", ERROR, "schedule.warmup", "PrimeIntellect-ai/prime-rl#968", "always",
         "{} steps of warm-up do not fit into max_steps. Lower it, or give a share below 1",
         "the learning rate would never be what optimizer.lr says",
         lambda run: run.number("schedule.warmup") > max(1, run.number("max_steps", GREAT))),
    # In which numbers
    Rule("updates-lost-in-bf16", WARNING, "master_dtype", "pytorch/ao#1124", "always",
         "{} has three digits, and steps of less than 2e-5 are mostly rounded away. Set master_dtype=fp32, or, in "
         "one process, take torchao.optim.AdamW8bit with optimizer.bf16_stochastic_round=true",
         "the loss falls slowly or not at all",
         lambda run: run("master_dtype") == "bf16" and 0 < run.lr < 2e-5 and not run("adapter")
         and not run("optimizer.bf16_stochastic_round")),
    Rule("moments-stuck-in-bf16", WARNING, "optimizer.betas", "Nerogar/OneTrainer#1005", "always",
         "with master_dtype=bf16 a second moment cannot follow a beta above 0.996, of {}. Lower it to 0.99",
         "what is added to it in a step is less than it can hold, and so is never added",
         lambda run: run("master_dtype") == "bf16" and run.lr and max([0, *run("optimizer.betas", [])][-1:]) > 0.996
         and not run.asks("optimizer._component_", "torchao")),
    Rule("low-bit-states-of-bf16-shards", ERROR, "optimizer._component_", "pytorch/ao#4216", "torchao 0.17",
         "{} does not update shards in bf16 (several processes, or memory.cpu_offload). Set master_dtype=fp32, or take "
         "torch.optim.AdamW",
         "the run would end in its first step, as torchao's states of them cannot be compiled",
         lambda run: run("master_dtype") == "bf16" and run.asks("optimizer._component_", "torchao")
         and (run.processes > 1 or run("memory.cpu_offload"))),
    Rule("computing-finer-than-the-weights", WARNING, "dtype", "meta-pytorch/torchtune#2254", "always",
         "computing in {} costs twice the time, and master_dtype=bf16 rounds what comes of it. Exchange the two",
         "weights and states are what needs the digits",
         lambda run: (run("dtype"), run("master_dtype")) == ("fp32", "bf16")),
    Rule("fp32-on-a-gpu", WARNING, "dtype", "pytorch/pytorch#153195", "torch 1.12",
         "{} is about eight times slower than bf16 on this GPU, as TF32 is off. Set dtype=bf16, and leave master_dtype",
         "weights and optimizer states stay in fp32 all the same",
         lambda run: run.device == "cuda" and run("dtype") == "fp32" and (run.capability or (9, 0)) >= (8, 0)),
    Rule("bf16-on-a-cpu", WARNING, "dtype", "pytorch/pytorch#146508", "always",
         "{} is slow on this CPU, which has no AVX512-BF16 or AMX: dtype=fp32 is several times faster, and exact",
         "each product is converted forth and back",
         lambda run: run.device == "cpu" and run("dtype") == "bf16" and not _multiplies_in_bf16()),
    Rule("bf16-on-an-old-gpu", WARNING, "dtype", "vllm-project/vllm#1157", "always",
         "{} is slow on this GPU, which has no units for it and no flash kernels: these need compute capability 8.0. "
         "Set dtype=fp16, or dtype=fp32",
         "it is emulated: computed in fp32 and rounded",
         lambda run: run.device == "cuda" and run("dtype") == "bf16" and (run.capability or (9, 0)) < (8, 0)),
    Rule("fp16-that-overflows", WARNING, "dtype", "huggingface/transformers#36822", "always",
         "hidden states of Gemma exceed what {} holds, 65,504: set dtype=bf16 or fp32",
         "the loss is not finite in the first step, and no scale of it helps",
         lambda run: run("dtype") == "fp16" and str(run.model.get("model_type", "")).startswith("gemma")),
    Rule("float8-on-an-old-gpu", ERROR, "quantization.float8", "pytorch/ao#2566", "torch 2.5",
         "this GPU does not multiply in {}: that needs compute capability 8.9, by rows 9.0. Leave it out",
         "the first product fails",
         lambda run: run("quantization.float8") and (run.device == "mps" or (run.device == "cuda"
         and (run.capability or (9, 0)) < ((8, 9) if run("quantization.float8") == "tensorwise" else (9, 0))))),
    Rule("float8-by-rows-in-fp32", ERROR, "quantization.float8", "pytorch/ao#2566", "torch 2.5",
         "{} gives products in bf16 alone. Set dtype=bf16, and leave master_dtype",
         "the first product fails",
         lambda run: run.device == "cuda" and run.asks("quantization.float8", "rowwise") and run("dtype") == "fp32"),
    Rule("float8-that-is-slower", WARNING, "quantization.float8", "pytorch/ao#1199", "torch 2.5",
         "{} is faster than bf16 only on a GPU and with compile=true",
         "without a compiler the casts take longer than the products save, and elsewhere all of it is emulated",
         lambda run: run("quantization.float8") and not (run.device == "cuda" and run("compile"))),
    Rule("two-types-on-mps", CHANGED, "dtype", "huggingface/transformers#40458", "torch 2.3",
         "on mps weights and computation have one type: {} becomes fp32, as master_dtype is",
         "FSDP, which casts between two, does not run there, and M1 and M2 only emulate bf16",
         lambda run: run.device == "mps" and run("dtype") in ("bf16", "fp16") and run("master_dtype") == "fp32"
         and (not run("adapter") or run("adapter.modules_to_save")), lambda run: {"dtype": "fp32"}),
    Rule("two-types-on-mps-reversed", ERROR, "master_dtype", "huggingface/transformers#40458", "torch 2.3",
         "on mps weights and computation have one type. Set it to fp32, or dtype=bf16",
         "FSDP, which casts between two, does not run there",
         lambda run: run.device == "mps" and (run("dtype"), run("master_dtype")) == ("fp32", "bf16")),
    # In what memory
    Rule("offload-on-mps", ERROR, "memory.cpu_offload", "huggingface/transformers#47601", "always",
         "on mps it does not work: set it to false",
         "FSDP moves parameters, and does not run there; host and device share one memory anyway",
         lambda run: run.device == "mps" and run("memory.cpu_offload")),
    Rule("offload-from-host-to-host", ERROR, "memory.activation_offload", "modelscope/ms-swift#7201", "always",
         "with device=cpu activations are in host memory; set it to false",
         "they would be copied for nothing",
         lambda run: run.device == "cpu" and run("memory.activation_offload")),
    # With which tools
    Rule("recomputing-compiled-shares", ERROR, "compile", "meta-pytorch/torchtune#2684", "torch 2.4",
         "with parallel.tp or parallel.ep above 1 compiled blocks are recomputed as a whole. Set compile=false, or "
         "memory.activation_checkpointing=full or none",
         "what is saved of a block is chosen by operations, which a compiled block does not show",
         lambda run: run("compile") and max(run.number("parallel.tp", 1), run.number("parallel.ep", 1)) > 1
         and run("memory.activation_checkpointing", "none") == "selective"),
    Rule("compiling-without-a-compiler", CHANGED, "compile", "pytorch/pytorch#92745", "torch 2.0",
         "there is no C++ compiler here (g++, or the one that CXX names): blocks are not compiled",
         "the run would end in its first step",
         lambda run: run.device == "cpu" and run("compile") and not run.has_compiler,
         lambda run: {"compile": False}),
    Rule("compiling-without-a-c-compiler", ERROR, "compile", "unslothai/unsloth#1772", "torch 2.0",
         lambda run: f"Triton, which compiles for GPUs, needs {run.triton_lacks}: apt install gcc python3-dev (or the "
         "same of another system; CC names another compiler), or set compile=false",
         "the run would end in its first step",
         lambda run: run.device == "cuda" and run("compile") and run.triton_lacks),
    Rule("optimizer-without-a-compiler", ERROR, "optimizer._component_", "urchade/GLiNER#148", "torchao 0.4",
         "{} compiles itself, and there is no C++ compiler here: install g++, or take torch.optim.AdamW",
         "the run would end in its first step, after all weights are loaded",
         lambda run: run.device == "cpu" and run.asks("optimizer._component_", "torchao") and not run.has_compiler),
    Rule("compiling-switched-off", CHANGED, "compile", "vllm-project/vllm#40715", "torch 2.12",
         "TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set in the environment: blocks are not compiled",
         "torch ends the run in its first step, as nothing was compiled",
         lambda run: run.device and run("compile")
         and {run.environ.get(f"TORCH{name}_DISABLE") for name in ("_COMPILE", "DYNAMO")}
         - {None, "", "0"}, lambda run: {"compile": False}),
    Rule("waiting-for-each-kernel", WARNING, "device", "ByteDance-Seed/VeOmni#115", "always",
         "CUDA_LAUNCH_BLOCKING is set in the environment: unset it unless you look for a bug",
         "the host waits for each kernel, so that host and GPU never work at one time",
         lambda run: run.device == "cuda" and run.environ.get("CUDA_LAUNCH_BLOCKING") == "1"),
    Rule("shares-beyond-a-node", WARNING, "parallel.tp", "NVIDIA/Megatron-LM#258", "always",
         "{} processes share each block, and a node has at most 8 GPUs. Lower it; parallel.dp_shard spans nodes",
         "every layer then waits for the network twice",
         lambda run: run.device == "cuda" and run.number("parallel.tp", 1) > 8),
    Rule("little-patience", WARNING, "parallel.timeout", "meta-pytorch/torchtune#2093", "always",
         "{} minutes are less than a process may take to save or export a large model. Set it to 30 or more",
         "the others give up and the run ends while its last checkpoint is written",
         lambda run: run.processes > 1 and run.number("parallel.timeout", 60) < 10),
    # What is kept
    Rule("best-of-one", WARNING, "checkpointer.keep_best", "huggingface/transformers#12786", "always",
         "{} is measured after the last step only: give validate_every",
         "the best checkpoint is then always the last one, and patience never ends a run",
         lambda run: run.asks("checkpointer.keep_best", "validation_") and not run("validate_every")),
    Rule("best-of-nothing", ERROR, "checkpointer.keep_best", "huggingface/transformers#31450", "always",
         "a validation does not measure {}, but validation_loss, and validation_token_accuracy with loss.accuracy=true",
         "the run would end at its first validation",
         lambda run: run("loss.accuracy") is not None and run.asks("checkpointer.keep_best", "validation_")
         and run("checkpointer.keep_best") != "validation_loss"
         and not (run("loss.accuracy") and run("checkpointer.keep_best") == "validation_token_accuracy")),
    Rule("trace-of-no-step", WARNING, "profiler.start", "pytorch/pytorch#91682", "always",
         "step {} comes after max_steps: no trace is written",
         "a run for its trace alone has to be repeated",
         lambda run: run.number("profiler.start") > run.number("max_steps", GREAT)),
    # How adapters and answers are trained
    Rule("adapter-that-hardly-counts", WARNING, "adapter.alpha", "jondurbin/airoboros#36", "always",
         "with {} the adapter counts less than a quarter. Raise it with the rank, to twice the rank",
         "a higher rank then learns more slowly, and looks as if it did not help",
         lambda run: run("adapter.rank") and not run("adapter.path") and _scale(run) < 0.25),
    Rule("adapter-that-counts-too-much", WARNING, "adapter.alpha", "predibase/lorax#299", "peft 0.7",
         "with {} the adapter counts more than 16 times. Lower it; with rank_stabilized=true it is divided by the root "
         "of the rank only",
         "it is as if the learning rate were so much higher",
         lambda run: run("adapter.rank") and not run("adapter.path") and _scale(run) > 16),
    Rule("dropout-beside-a-reference", WARNING, "adapter.dropout", "huggingface/trl#639", "trl 0.5",
         "{} is not in the reference: set it to 0",
         "answers are compared with themselves under noise, which the loss takes for what was learned",
         lambda run: _compares(run) and run.number("adapter.dropout") > 0
         and not run.asks("loss._component_", ".SimPO", ".CPO", ".ORPO")),
    Rule("dropout-beside-a-sampler", WARNING, "adapter.dropout", "huggingface/trl#3234", "trl 0.14",
         "{} is not in the sampler: set it to 0",
         "the ratio to the sampled policy is noise from the first step on, and is cut off at 2",
         lambda run: _samples(run) and run.number("adapter.dropout") > 0),
    Rule("updates-without-a-clip", WARNING, "updates", "huggingface/trl#2899", "trl 0.16",
         "{} of the same completions with a loss that does not clip: take loss._component_=tune.losses.ClippedPolicy",
         "nothing keeps the policy near the one that was sampled",
         lambda run: run.number("updates", 1) > 1 and run.asks("loss._component_", "PolicyGradient")),
    Rule("another-distribution", WARNING, "sampling", "verl-project/verl#6240", "always",
         "top_k, top_p and min_p sample from another distribution than the one that is trained: leave them off",
         "probabilities of trainer and sampler differ, and their ratio is wrong for each token",
         lambda run: _samples(run) and any(run(f"sampling.{name}") for name in ("top_k", "top_p", "min_p"))),
    Rule("reference-of-nothing", WARNING, "reference", "huggingface/trl#2806", "trl 0.16",
         "{} is not used, as kl is 0. Raise kl, or leave the reference out",
         "who names a reference expects the policy to stay near it",
         lambda run: "kl" in run.cfg and not run("kl") and run("reference") not in (None, run("model.path"))),
    Rule("teacher-that-is-the-student", WARNING, "teacher.path", "huggingface/trl#2217", "trl 0.11",
         "{} is the student itself: the loss is 0. Give another model",
         "the run ends as any other, with the model that it began with",
         lambda run: run("teacher.path") and not run("loss.cross_entropy") and not run("from_scratch")
         and Path(str(run("teacher.path"))).resolve() == Path(str(run("model.path"))).resolve()
         and not any(map(run, ("quantization.weights", "quantization.qat", "teacher.quantization", "adapter.path")))),
    Rule("a-beta-that-holds", WARNING, "loss.beta", "huggingface/trl#2382", "trl 0.5",
         "{} is outside of what DPO takes, 0.01 to 1: the usual ones are 0.1 to 0.5",
         "above, the policy stays at the reference; below, nothing keeps it from degenerating",
         lambda run: run.asks("loss._component_", "losses.DPO") and not run("loss.length_normalized")
         and not 0.005 <= run.number("loss.beta", 0.1) <= 2),
    Rule("answers-exchanged", ERROR, "loss.label_smoothing", "huggingface/trl#1035", "trl 0.7",
         "{} says that every second pair is the wrong way round. Lower it below 0.5",
         "at 0.5 nothing is learned, and above it the rejected answers",
         lambda run: _compares(run) and run.number("loss.label_smoothing") >= 0.5),
    Rule("epochs-of-rewards", WARNING, "epochs", "PKU-Alignment/safe-rlhf#24", "always",
         "{} passes over pairs: a reward model overfits in the second one. Set it to 1",
         "it is sure of pairs that it has seen, and the policy finds out what it is wrong about",
         lambda run: run.asks("loss._component_", "BradleyTerry") and run.number("epochs", 1) > 1
         and not run("max_steps")),
    # What the model's files say too
    Rule("merged-into-other-weights", WARNING, "export.merge", "unslothai/unsloth-zoo#810", "peft 0.4",
         "the adapter is trained on NF4 weights and merged into the exact ones. Evaluate the merged model",
         "it has learned to mend errors of quantisation that the merged model does not have",
         lambda run: run("export.merge") and run("quantization.weights")),
    Rule("experts-that-stay", WARNING, "quantization.weights", "bitsandbytes-foundation/bitsandbytes#1849",
         "transformers 5.0",
         "{} is for linear layers: the experts of this model stay in dtype",
         "they are most of its weights, so that hardly any memory is saved",
         lambda run: run("quantization.weights") and _has_experts(run)),
    Rule("adapted-router", WARNING, "adapter.target_modules", "AI-Hypercomputer/maxtext#3969", "always",
         "{} names the router of the experts. Leave gate or router out",
         "a small change sends tokens to other experts than those that have learned them",
         lambda run: _has_experts(run) and not isinstance(run("adapter.target_modules"), str)
         and {"gate", "router"} & {*run("adapter.target_modules", [])}),
    Rule("unbalanced-experts", WARNING, "model.router_loss", "huggingface/transformers#44586", "transformers 4.36",
         "all parameters are trained, and no loss keeps the experts balanced, as config.json has output_router_logits "
         "off. Set model.router_loss to its router_aux_loss_coef",
         "few experts get all tokens in time",
         lambda run: _has_experts(run) and run.model.get("router_aux_loss_coef") and not run("adapter")
         and not run.model.get("output_router_logits") and run("model.router_loss") is None and "model" in run.cfg),
    Rule("packing-one-by-one", WARNING, "packed", "state-spaces/mamba#478", "always",
         "a model with states takes each document of a packed row in a row of its own: set packed=false, and a "
         "micro_batch_size of documents",
         "states would leak from one document into the next; all are padded to the longest, in one forward",
         lambda run: run("packed") and run.asks("model._component_", "models.hf")
         and any(name in run.model for name in ("state_size", "mamba_d_state", "ssm_state_size", "d_state"))),
    Rule("tied-halves", WARNING, "adapter.modules_to_save", "huggingface/transformers#45127", "transformers 4.0",
         "{}: embedding and head of this model share one weight, and the file has it as one of them. Merge with "
         "`tune merge`, or take adapter.trainable_tokens",
         "readers that do not tie it again lose what the other half has learned",
         lambda run: run.model.get("tie_word_embeddings")
         and {name.rpartition(".")[2] for name in run("adapter.modules_to_save", [])}
         & _halves(run)),
    Rule("gemma-without-bos", WARNING, "tokenizer.chat_template", "EleutherAI/lm-evaluation-harness#1465", "always",
         "the chat template writes no bos_token, and models of Gemma need it. Add {{{{ bos_token }}}} at its beginning",
         "without it their perplexity is a thousand times higher, and they learn to do without first",
         lambda run: str(run.model.get("model_type", "")).startswith("gemma") and run.template
         and "bos" not in run.template),
    Rule("thoughts-cut-short", WARNING, "sampling.max_new_tokens", "huggingface/trl#5697", "trl 0.14",
         "{} tokens are few for a model that thinks first, as its chat template says: give it 1,000 or more",
         "no completion comes to its answer, all rewards are zero, and nothing is learned",
         lambda run: "reward" in run.cfg and "<think>" in run.template
         and run.number("sampling.max_new_tokens", GREAT) < 512),
]
"""Rules that have a source upstream."""
