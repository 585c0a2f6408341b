"""Fine-tune on texts that TRL's SFTTrainer packs.

accelerate launch --config_file examples/accelerate.yaml examples/finetune_sft.py
"""

import offline  # or a hub: load_dataset, AutoTokenizer.from_pretrained, AutoModelForCausalLM.from_pretrained
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from cp_mesh.integrations.trainer import context_parallel

arguments = SFTConfig(
    output_dir="build/finetune_sft",  # parallelism_config and fsdp are those of accelerate.yaml
    use_cpu=not torch.cuda.is_available(),
    packing=True,  # into sequences of max_length=1024 tokens, sharded over all ranks
    per_device_train_batch_size=1,
    max_steps=20,
    logging_steps=4,
    learning_rate=1e-2,
)
texts = Dataset.from_dict({"text": offline.texts()}).train_test_split(64, seed=0)
data = {"train_dataset": texts["train"], "eval_dataset": texts["test"], "processing_class": offline.tokenizer()}
trainer = context_parallel(SFTTrainer)(offline.model(), arguments, **data)
trainer.train()
print(trainer.evaluate())
trainer.save_model("build/finetune_sft/final")
trainer.end()
