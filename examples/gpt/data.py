"""Real English that every Python carries: the reference pages behind `help("for")`, about half a megabyte.

A token is a byte, so there is no tokenizer to train or to download.
"""

import re
from pydoc_data.topics import topics
from typing import Literal

import torch
from torch.utils.data import Dataset

SAMPLE_SHARE = 0.05
"""The last part of the text is never trained on; prompts are taken from it."""


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Blocks of `block` tokens, side by side: item i is (x_T, y_T), int64, where y is x one token later."""

    def __init__(self, block: int, split: Literal["train", "sample"] = "train") -> None:
        pages = "\n\n".join(topics[name].strip() for name in sorted(topics))
        pages = re.sub(r"[ +|=*-]{3,}", " ", pages)  # tables and rulers say little
        cut = pages.index("\n\n", int(len(pages) * (1 - SAMPLE_SHARE))) + 2
        self.ids = encode(pages[:cut] if split == "train" else pages[cut:])
        self.block = block

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.block
        ids = self.ids[start : start + self.block + 1].long()
        return ids[:-1], ids[1:]


def encode(text: str) -> torch.Tensor:
    """The text's UTF-8 bytes as token ids (T,), uint8."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(ids_T: torch.Tensor) -> str:
    """Token ids (T,) as text; bytes that are no valid UTF-8 become a replacement character."""
    return bytes(ids_T.tolist()).decode(errors="replace")
