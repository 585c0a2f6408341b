"""Batches of bytes from real text. They depend only on seed and step, so every mesh and resume reads the same order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

END_OF_DOCUMENT = 256
VOCAB_SIZE = 264  # 256 bytes, the end of a document, and padding to a multiple of 8
IGNORE = -100


def read_text(path: str | None) -> str:
    """Return the file's text; without one, the manual of Python that CPython carries as `help()` topics."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def tokenize(text: str) -> Tensor:
    """Bytes of the text's paragraphs, each followed by END_OF_DOCUMENT; int64 [T]."""
    tokens: list[int] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        tokens += paragraph.encode("utf-8")
        tokens.append(END_OF_DOCUMENT)
    return torch.tensor(tokens)


def random_tokens(number: int, vocab_size: int, seed: int) -> Tensor:
    """Tokens in place of a text, int64 [number]: neither time nor memory depends on them."""
    return torch.randint(vocab_size, (number,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Corpus:
    """Rows of `seq_len` tokens and their labels, in a new random order in every epoch.

    Args:
        tokens: The whole text, int64 [T].
        seq_len: Tokens per row.
        batch_size: Rows in a *global* batch.
        documents: Also return document ids, and ignore labels that belong to another document than their token.
        restart_positions: With documents, also return positions that restart from 0 in each document.
        seed: Seed of the order.
    """

    tokens: Tensor
    seq_len: int
    batch_size: int
    documents: bool = False
    restart_positions: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"the text has {len(self.tokens)} tokens: too few for one row of {self.seq_len} + 1")

    @property
    def num_rows(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, Tensor]:
        """Return the chosen rows of the global batch of one step.

        Labels are shifted here, before anyone shards the sequence, so no token's label is lost at a shard's edge.

        Args:
            step: Counts from 0.
            rows: Which rows of the global batch; a data-parallel rank takes its own.

        Returns:
            tokens and labels, and if requested documents and positions, all int64 [B, S].
        """
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        places = (divmod(number, self.num_rows) for number in numbers)
        row = torch.stack([epoch_order(self.num_rows, self.seed, epoch)[place] for epoch, place in places])
        window = self.tokens[row[:, None] * self.seq_len + torch.arange(self.seq_len + 1)]
        batch = {"tokens": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}
        if self.documents:
            ends = batch["tokens"] == END_OF_DOCUMENT
            batch["labels"] = batch["labels"].masked_fill(ends, IGNORE)
            batch["documents"] = ends.cumsum(1) - ends.long()
            if self.restart_positions:
                batch["positions"] = restarting_positions(batch["documents"])
        return batch


def joined(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of a batch as documents of one row, [B, S] to [1, B·S]; what they attend to and their positions stay."""
    rows, length = batch["tokens"].shape
    batch = {
        "positions": torch.arange(length).expand(rows, length),
        "documents": torch.zeros(rows, length).long(),
    } | batch
    batch["documents"] = batch["documents"] + length * torch.arange(rows)[:, None]  # no id in two rows
    return {name: tensor.reshape(1, -1) for name, tensor in batch.items()}


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, seed: int, epoch: int) -> Tensor:
    """The order of the rows in one epoch, int64 [num_rows]."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def restarting_positions(documents: Tensor) -> Tensor:
    """Positions within each document, for ids [B, S]; equal neighbours belong to one document."""
    index = torch.arange(documents.shape[1]).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - (index * first).cummax(1).values


def split(tokens: Tensor, held_out: float = 0.05) -> tuple[Tensor, Tensor]:
    """Split off the end of the text as held-out text."""
    cut = int(len(tokens) * (1 - held_out))
    return tokens[:cut], tokens[cut:]
