"""Train with TRL's SFTTrainer on sequences that all ranks share: packed texts of Python's manual, a tokenizer of them.

torchrun --nproc-per-node 2 examples/finetune_sft.py
"""

import os

import torch
from accelerate import ParallelismConfig
from data import read_text
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from cp_mesh.integrations.trainer import context_parallel

if not torch.cuda.is_available():
    import accelerate_cpu  # noqa: F401

texts = [text for text in read_text(None).split("\n\n") if text.strip()]
trained = ByteLevelBPETokenizer()
trained.train_from_iterator(texts, vocab_size=1000, special_tokens=["<end>", "<padding>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>", pad_token="<padding>")
arguments = SFTConfig(
    output_dir="build/finetune_sft",
    parallelism_config=ParallelismConfig(cp_size=int(os.environ["WORLD_SIZE"])),
    fsdp=True,
    use_cpu=not torch.cuda.is_available(),
    packing=True,
    max_length=1024,
    per_device_train_batch_size=1,
    max_steps=20,
    disable_tqdm=True,
    logging_steps=4,
    learning_rate=1e-2,
    bf16=torch.cuda.is_available(),
    report_to=[],
)
set_seed(0)  # random weights, equal on all ranks
trainer = context_parallel(
    SFTTrainer
)(  # without context parallelism: SFTTrainer(
    model=LlamaForCausalLM(  # or the name of a model
        LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    ),
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts[64:]}),
    eval_dataset=Dataset.from_dict({"text": texts[:64]}),
    processing_class=tokenizer,
)
trainer.train()
trainer.evaluate()
trainer.save_model("build/finetune_sft/final")
trainer.end()
