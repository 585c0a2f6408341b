"""Fine-tune on packed texts with the Trainer: torchrun --nproc-per-node 2 examples/finetune_transformers.py"""

import os

import offline  # or a hub: load_dataset, AutoTokenizer.from_pretrained, AutoModelForCausalLM.from_pretrained
import torch
from accelerate import ParallelismConfig
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from cp_mesh.integrations.trainer import context_parallel

arguments = TrainingArguments(
    output_dir="build/finetune_transformers",
    parallelism_config=ParallelismConfig(cp_size=int(os.environ["WORLD_SIZE"])),
    fsdp=True,
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=8,  # documents; the collator packs them into one sequence, sharded over all ranks
    max_steps=20,
    logging_steps=4,
    learning_rate=1e-2,
)
documents = [{"input_ids": ids, "labels": ids} for ids in offline.tokenizer()(offline.texts())["input_ids"]]
data = {"train_dataset": documents[64:], "eval_dataset": documents[:64], "data_collator": DataCollatorWithFlattening()}
trainer = context_parallel(Trainer)(offline.model(), arguments, **data)
trainer.train()
print(trainer.evaluate())
trainer.save_model("build/finetune_transformers/final")
trainer.end()
