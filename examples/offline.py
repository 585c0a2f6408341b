"""Stand-ins for downloads from a hub: texts, a tokenizer for them, and a small Llama with random weights."""

from data import read_text
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

VOCABULARY = 1000


def texts() -> list[str]:
    """The paragraphs of Python's manual."""
    return [text for text in read_text(None).split("\n\n") if text.strip()]


def tokenizer() -> PreTrainedTokenizerFast:
    trained = ByteLevelBPETokenizer()
    special = ["<end>", "<padding>"]
    trained.train_from_iterator(texts(), vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>", pad_token="<padding>")


def model() -> LlamaForCausalLM:
    set_seed(0)  # weights equal on all ranks
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
