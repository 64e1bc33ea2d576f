"""A small GPT: embeddings, a few transformer blocks, one linear head.

Shapes are part of names: B batch, T positions, V vocabulary, D width, H heads, K width of one head (D = H * K).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    num_tokens: int = 256
    """Size of the vocabulary; 256 is every byte."""
    block: int = 64
    """How many tokens the model looks back."""
    num_layers: int = 4
    num_heads: int = 4
    width: int = 128
    dropout: float = 0.1


class Attention(nn.Module):
    """Every position looks at itself and at what came before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, block, width = x_BTD.shape
        shape = (batch, block, self.num_heads, width // self.num_heads)
        q_BHTK, k_BHTK, v_BHTK = (y.view(shape).transpose(1, 2) for y in self.query_key_value(x_BTD).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.project(y_BHTK.transpose(1, 2).reshape(batch, block, width))


class Block(nn.Module):
    """Attention, then a perceptron, each on a normalised copy and added back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(config)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.norm_attention(x_BTD)))
        return x_BTD + self.dropout(self.mlp(self.norm_mlp(x_BTD)))


class GPT(nn.Module):
    """Token ids (B, T), int64, to the scores of the next token (B, T, V)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.num_tokens, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.num_layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.num_tokens, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTD = self.tokens(ids_BT) + self.positions(positions_T)
        return self.head(self.norm(self.blocks(x_BTD)))

    @torch.no_grad()
    def generate(self, ids_T: torch.Tensor, count: int, temperature: float = 0.8, seed: int = 0) -> torch.Tensor:
        """`ids_T` and `count` more tokens, one after the other; the same seed gives the same tokens."""
        was_training = self.training
        self.eval()
        random = torch.Generator().manual_seed(seed)
        for _ in range(count):
            scores_V = self(ids_T[None, -self.config.block :])[0, -1] / temperature
            ids_T = torch.cat([ids_T, torch.multinomial(scores_V.softmax(-1).cpu(), 1, generator=random).to(ids_T)])
        self.train(was_training)
        return ids_T


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
