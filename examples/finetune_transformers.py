"""Train a model of Transformers with its Trainer on sequences that all ranks share: packed bytes of Python's manual.

torchrun --nproc-per-node 2 examples/finetune_transformers.py
"""

import os

import torch
from accelerate import ParallelismConfig
from data import END_OF_DOCUMENT, VOCAB_SIZE, read_text, split, tokenize
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from cp_mesh.integrations.trainer import context_parallel

if not torch.cuda.is_available():
    import accelerate_cpu  # noqa: F401


def documents(tokens: torch.Tensor) -> list[dict[str, list[int]]]:
    ends = (tokens == END_OF_DOCUMENT).nonzero().flatten() + 1
    return [{"input_ids": x.tolist(), "labels": x.tolist()} for x in tokens.tensor_split(ends) if len(x) > 1]


training, held_out = split(tokenize(read_text(None)))  # bytes of text: a tokenizer's tokens do as well
arguments = TrainingArguments(
    output_dir="build/finetune_transformers",
    parallelism_config=ParallelismConfig(cp_size=int(os.environ["WORLD_SIZE"])),
    fsdp=True,
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=8,  # documents, which the collator packs to one sequence
    max_steps=20,
    disable_tqdm=True,
    logging_steps=4,
    learning_rate=1e-2,
    report_to=[],
)
set_seed(0)  # random weights, equal on all ranks
trainer = context_parallel(
    Trainer
)(  # without context parallelism: Trainer(
    model=LlamaForCausalLM(  # or AutoModelForCausalLM.from_pretrained(...)
        LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
    ),
    args=arguments,
    train_dataset=documents(training),
    eval_dataset=documents(held_out)[:16],
    data_collator=DataCollatorWithFlattening(),
)
trainer.train()
trainer.evaluate()
trainer.save_model("build/finetune_transformers/final")
trainer.end()
