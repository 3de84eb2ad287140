"""What each metric counts. These names are the same in every recipe and every logger."""

METRICS = {
    "loss": "cross-entropy in nats, mean over the supervised tokens of the global batch, before the step",
    "validation_loss": "the same over the whole validation dataset, after the step",
    "validation_loss/NAME": "the same over one source of a mixture",
    "token_accuracy": "share of the supervised tokens of the global batch to which the model gives the highest "
    "probability, before the step (loss.accuracy)",
    "validation_token_accuracy": "the same over the whole validation dataset",
    "grad_norm": "norm of all gradients together, before clipping",
    "lr": "learning rate of the step",
    "lr/PATTERN": "that of the parameters that parameter_groups.lr_ratios gives another one",
    "expert_load": "tokens of the busiest expert over the mean of all experts, mean over layers: 1 is even",
    "router_entropy": "entropy in nats of a token's probabilities of all experts, mean over tokens and layers",
    "router_loss": "load-balancing loss, not weighted, mean over layers and over documents by their supervised tokens; "
    "`loss` does not contain it",
    "time": "when it was written: seconds since 1970 (in metrics.jsonl)",
    "epoch": "how often the data has been seen; not for streams, whose size is not known",
    "tokens": "non-padding tokens of the global batch",
    "supervised_tokens": "tokens of the global batch that have a label",
    "tokens_per_second": "non-padding tokens per second and device, over step_seconds",
    "supervised_tokens_per_second": "supervised tokens per second and device, over step_seconds",
    "mfu": "model FLOPs utilisation: tokens_per_second times the FLOPs of a token (tune.loggers.flops_per_token, in a "
    "document of mean length) over the device's peak in dense bf16; on devices whose peak is known",
    "step_seconds": "time from the end of the step before to the end of this one; validation is left out, waiting for "
    "data and the blocking part of a checkpoint are not",
    "data_seconds": "time of it spent waiting for data",
    "peak_memory_gib": "largest memory of this process so far: allocated on the GPU, or resident on the host",
}
