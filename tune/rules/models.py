"""Rules that read the model's files too: config.json, the chat template."""

from tune.rules.rule import GREAT, Facts, Level, Rule

ERROR, HEAL, WARN = Level
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _has_experts(run: Facts) -> bool:
    return any(run.model.get(name) for name in EXPERTS)


# fmt: off
MODELS = [
    Rule("merged-into-other-weights", WARN, "export.merge", "unslothai/unsloth-zoo#810", "peft 0.4",
         "the adapter is trained on NF4 weights and merged into the exact ones. Evaluate the merged model",
         "it has learned to mend errors of quantisation that the merged model does not have",
         lambda run: run("export.merge") and run("quantization.weights")),
    Rule("experts-that-stay", WARN, "quantization.weights", "bitsandbytes-foundation/bitsandbytes#1849",
         "transformers 5.0",
         "{} is for linear layers: the experts of this model stay in dtype",
         "they are most of its weights, so that hardly any memory is saved",
         lambda run: run("quantization.weights") and _has_experts(run)),
    Rule("adapted-router", WARN, "adapter.target_modules", "AI-Hypercomputer/maxtext#3969", "always",
         "{} names the router of the experts. Leave gate or router out",
         "a small change sends tokens to other experts than those that have learned them",
         lambda run: _has_experts(run) and not isinstance(run("adapter.target_modules"), str)
         and {"gate", "router"} & {*run("adapter.target_modules", [])}),
    Rule("unbalanced-experts", WARN, "model.router_loss", "huggingface/transformers#44586", "transformers 4.36",
         "all parameters are trained, and no loss keeps the experts balanced, as config.json has output_router_logits "
         "off. Set model.router_loss to its router_aux_loss_coef",
         "few experts get all tokens in time",
         lambda run: _has_experts(run) and run.model.get("router_aux_loss_coef") and not run("adapter")
         and not run.model.get("output_router_logits") and run("model.router_loss") is None and "model" in run.cfg),
    Rule("packing-one-by-one", WARN, "packed", "state-spaces/mamba#478", "always",
         "a model with states takes each document of a packed row in a row of its own: set packed=false, and a "
         "micro_batch_size of documents",
         "states would leak from one document into the next; all are padded to the longest, in one forward",
         lambda run: run("packed") and run.asks("model._component_", "models.hf")
         and any(name in run.model for name in ("state_size", "mamba_d_state", "ssm_state_size", "d_state"))),
    Rule("tied-halves", WARN, "adapter.modules_to_save", "huggingface/transformers#45127", "transformers 4.0",
         "{}: embedding and head of this model share one weight, and the file has it as one of them. Merge with "
         "`tune merge`, or take adapter.trainable_tokens",
         "readers that do not tie it again lose what the other half has learned",
         lambda run: run.model.get("tie_word_embeddings")
         and {"embed_tokens", "lm_head"} & {*run("adapter.modules_to_save", [])}),
    Rule("gemma-without-bos", WARN, "tokenizer.chat_template", "EleutherAI/lm-evaluation-harness#1465", "always",
         "the chat template writes no bos_token, and models of Gemma need it. Add {{{{ bos_token }}}} at its beginning",
         "without it their perplexity is a thousand times higher, and they learn to do without first",
         lambda run: str(run.model.get("model_type", "")).startswith("gemma") and run.template
         and "bos" not in run.template),
    Rule("text-of-today", WARN, "tokenizer.chat_template", "oobabooga/textgen#6692", "transformers 4.44",
         "the chat template writes today's date into conversations: save it with a fixed one to repeat this run",
         "the same rows are other tokens tomorrow, and a run is not continued with other data",
         lambda run: "strftime_now" in run.template),
    Rule("thoughts-cut-short", WARN, "sampling.max_new_tokens", "huggingface/trl#5697", "trl 0.14",
         "{} tokens are few for a model that thinks first, as its chat template says: give it 1,000 or more",
         "no completion comes to its answer, all rewards are zero, and nothing is learned",
         lambda run: "reward" in run.cfg and "<think>" in run.template
         and run.number("sampling.max_new_tokens", GREAT) < 512),
]
