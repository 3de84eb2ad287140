"""Small, realistic configs of other libraries for the tests of `tune migrate`."""

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
    split: train[:200]
val_set_size: 0.1
output_dir: ./outputs/lora-out
sequence_len: 1024
sample_packing: true
wandb_project:
wandb_entity:
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.1
weight_decay: 0.01
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
saves_per_epoch: 1
special_tokens:
  pad_token: <|end_of_text|>
"""

LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj, v_proj
pref_beta: 0.2
pref_loss: simpo
dataset: dpo_en_demo
template: llama3
cutoff_len: 1024
max_samples: 500
output_dir: saves/dpo
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
deepspeed: examples/deepspeed/ds_z3_offload_config.json
"""

TORCHTUNE = """
# tune run --nproc_per_node 2 full_finetune_distributed --config this.yaml
output_dir: /tmp/full
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/llama/original/tokenizer.model
  max_seq_len: 4096
model:
  _component_: torchtune.models.llama3_2.llama3_2_1b
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /tmp/llama
  checkpoint_files: [model.safetensors]
  output_dir: ${output_dir}
  model_type: LLAMA3_2
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: false
seed: null
shuffle: true
batch_size: 4
epochs: 1
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
  fused: true
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: false
optimizer_in_bwd: false
device: cuda
enable_activation_checkpointing: true
dtype: bf16
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
log_every_n_steps: 1
"""

TRL = """
accelerate launch --num_processes 2 --config_file zero3.yaml trl/scripts/sft.py \\
    --model_name_or_path Qwen/Qwen2-0.5B \\
    --dataset_name trl-lib/Capybara \\
    --learning_rate 2.0e-4 \\
    --num_train_epochs 1 \\
    --packing \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 8 \\
    --eos_token '<|im_end|>' \\
    --use_peft --lora_r 32 --lora_alpha 16 \\
    --lora_target_modules q_proj v_proj \\
    --output_dir Qwen2-0.5B-SFT \\
    --push_to_hub
"""
