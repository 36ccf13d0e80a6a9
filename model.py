"""A GPT in which one word, `config.norm`, says where the normalization stands: pre, post, peri or geo.

Read from the top: the configuration; attention and MLP, which know nothing of norms; then `edge_norms` and `Residual`,
which hold the whole difference between the four; then the GPT that stacks them. Under autocast the sublayers compute in
half precision and hand back float32, so that the stream and its norms are float32 in all four, on a CPU and on CUDA.

Shapes: B batch, T tokens, C = n_embd channels, H = n_head heads, D = C/H channels a head, V = vocab_size.
"""
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geonorm import GeoNorm

NORMS = ("pre", "post", "peri", "geo")


@dataclass
class GPTConfig:
    """Everything that decides a GPT's shape and arithmetic. Impossible values raise ValueError, in words."""
    block_size: int = 1024          # longest context, tokens
    vocab_size: int = 50257         # token ids 0..vocab_size-1
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    norm: str = "geo"               # one of NORMS
    geo_decay: str = "sqrt"         # geo only: see geonorm.update_decay
    geo_max_angle: float = math.pi / 4  # geo only: largest turn of one sublayer, radians
    geo_p: float = math.inf         # geo only: the retraction; inf is the exponential map

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd must be a multiple of 2*n_head, since rotary embeddings turn pairs of channels in "
                             f"each head; {self.n_embd} is not a multiple of {2 * self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, not {self.norm!r}")
        GeoNorm(0, 1, self.geo_decay, self.geo_max_angle, self.geo_p)  # raises for what geo cannot use


def rms_norm(config: GPTConfig, gain: bool = True) -> nn.RMSNorm:
    """RMSNorm (arXiv 1910.07467): x / sqrt(mean(x^2) + eps), times a learned gain. One eps, whatever the dtype."""
    return nn.RMSNorm(config.n_embd, eps=1e-6, elementwise_affine=gain)


def rotary_table(config: GPTConfig) -> Tensor:
    """RoPE's angles (arXiv 2104.09864) as (2, block_size, 1, D/2): the cosines, then the sines."""
    half = config.n_embd // config.n_head // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.outer(torch.arange(config.block_size), frequency)
    return torch.stack((angle.cos(), angle.sin())).unsqueeze(2)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn channels i and i+D/2 of each head as a pair, by position times frequency i. x: (B, T, heads, D)."""
    cos, sin = rotary.to(x.dtype)           # (T, 1, D/2) each
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions; no norm and no bias."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """x: (B, T, C), the tokens at start..start+T-1. cache: (2, B, H, block_size, D), keys and values of the
        earlier ones, to which these are added. Returns (B, T, C)."""
        B, T, C = x.shape
        qk, v = self.c_attn(x).view(B, T, 3 * self.n_head, -1).split([2 * self.n_head, self.n_head], dim=2)
        q, k = rotate(qk, rotary).transpose(1, 2).chunk(2, dim=1)       # (B, H, T, D) each
        v = v.transpose(1, 2)
        mask = None
        if cache is not None:
            end = start + T
            cache[0, :, :, start:end], cache[1, :, :, start:end] = k, v
            k, v = cache[:, :, :, :end]                                 # (B, H, end, D) each
            # is_causal would align the first query with the first key, but the queries are the last T of them.
            mask = torch.ones(T, end, dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                           dropout_p=self.dropout if self.training else 0.0)
        return self.drop(self.c_proj(y.transpose(1, 2).reshape(B, T, C))).to(x.dtype)


class MLP(nn.Module):
    """Two linear maps, four times wider between them, with GELU; no norm and no bias."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.drop(self.c_proj(F.gelu(self.c_fc(x)))).to(x.dtype)


def edge_norms(config: GPTConfig) -> tuple[nn.Module, nn.Module]:
    """What stands before the first block and after the last: the two middle columns of `Residual`'s table."""
    N = rms_norm
    if config.norm == "pre":  return nn.Identity(), N(config)
    if config.norm == "post": return N(config), nn.Identity()
    if config.norm == "peri": return N(config), N(config)
    if config.norm == "geo":  return N(config, gain=False), N(config)
    raise ValueError(f"no placement {config.norm!r}")


class Residual(nn.Module):
    """One sublayer f and how its output joins the residual stream x. This is all that `--norm` changes:

        norm   one sublayer              before the first block        after the last    source
        pre    x + f(N(x))               nothing                       N                 arXiv 2002.04745
        post   N(x + f(x))               N                             nothing           arXiv 2002.04745
        peri   x + N(f(N(x)))            N                             N                 arXiv 2502.02732
        geo    exp_x(tangent of f(x))    N without gain: the sphere    N                 arXiv 2601.22095

    N is RMSNorm with a learned gain, each its own. A norm that a placement does not use does not exist.
    """

    def __init__(self, config: GPTConfig, layer: int, f: nn.Module):
        super().__init__()
        self.norm, self.f = config.norm, f
        if config.norm in ("pre", "peri"):
            self.norm_in = rms_norm(config)
        if config.norm in ("post", "peri"):
            self.norm_out = rms_norm(config)
        if config.norm == "geo":
            self.step = GeoNorm(layer, config.n_layer, config.geo_decay, config.geo_max_angle, config.geo_p)

    def forward(self, x: Tensor, *args) -> Tensor:
        """x: (B, T, C), the stream; args: what f wants besides. Returns the new stream, (B, T, C)."""
        if self.norm == "pre":  return x + self.f(self.norm_in(x), *args)
        if self.norm == "post": return self.norm_out(x + self.f(x, *args))
        if self.norm == "peri": return x + self.norm_out(self.f(self.norm_in(x), *args))
        if self.norm == "geo":  return self.step(x, self.f(x, *args))
        raise ValueError(f"no placement {self.norm!r}")


class Block(nn.Module):
    """Attention, then MLP, each joined to the stream by the placement."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attention = Residual(config, layer, Attention(config))
        self.mlp = Residual(config, layer, MLP(config))

    def forward(self, x: Tensor, *args) -> Tensor:
        """(B, T, C) -> (B, T, C); args go to the attention."""
        return self.mlp(self.attention(x, *args))


class GPT(nn.Module):
    """Token embedding, entry norm, n_layer blocks, exit norm, and the embedding again as the output head."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        padded = 64 * math.ceil(config.vocab_size / 64)     # matrix units like multiples of 64; see forward
        self.wte = nn.Embedding(padded, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.entry, self.exit = edge_norms(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.register_buffer("rotary", rotary_table(config), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draw every weight from a normal of mean 0; the norms draw nothing, so one seed starts all four alike.

            wte (the embedding, also the head)                          std 0.02
            c_attn (attention in), c_fc (MLP in)                        std 1/sqrt(C)
            c_proj of attention (fan-in C) and of the MLP (fan-in 4C)   std 1/sqrt(fan-in) / sqrt(2 n_layer)
            gains of the norms 1, scale and bias of the geodesic steps 1 and 0, as they were made
        """
        nn.init.normal_(self.wte.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features ** -0.5
                if name.endswith("c_proj"):
                    std /= math.sqrt(2 * self.config.n_layer)
                nn.init.normal_(module.weight, std=std)

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: list[Tensor] | None = None,
                start: int = 0) -> tuple[Tensor, Tensor | None]:
        """The next token's logits, and the loss if targets are given.

        idx: (B, T) token ids, standing at positions start..start+T-1 of the context. targets: (B, T), the ids that
        follow; -1 is not counted. cache: one tensor a layer, see `Attention`, filled up to start.
        Returns logits, (B, T, V) with targets, else (B, 1, V) of the last position; and the mean loss in nats/token,
        or None. The padded ids never appear in the logits. Raises ValueError if the context exceeds block_size.
        """
        T = idx.size(1)
        if start + T > self.config.block_size:
            raise ValueError(f"{start + T} tokens do not fit a context of block_size {self.config.block_size}")
        x = self.entry(self.drop(self.wte(idx)))            # (B, T, C)
        rotary = self.rotary[:, start:start + T]
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, cache[layer] if cache else None, start)
        x = self.exit(x if targets is not None else x[:, -1:])
        logits = F.linear(x, self.wte.weight)[..., :self.config.vocab_size].float()
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def param_groups(self, weight_decay: float) -> list[dict]:
        """Optimizer groups: matrices are decayed; gains and the geodesic scalars, below two dimensions, are not."""
        return [{"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
                {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}]

    @torch.no_grad()
    def stream(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
               top_k: int | None = None) -> Iterator[Tensor]:
        """Sample from the model, one (B, 1) tensor of token ids at a time; all else, errors too, as in `generate`."""
        if idx.size(1) < 1:
            raise ValueError("the prompt must hold at least one token")
        if idx.min() < 0 or idx.max() >= self.config.vocab_size:
            raise ValueError(f"the prompt's ids must be in 0..{self.config.vocab_size - 1}")
        if not temperature >= 0:
            raise ValueError(f"temperature must be 0 (greedy) or above, not {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k}")
        c, weight = self.config, self.wte.weight
        cache = [torch.empty(2, idx.size(0), c.n_head, c.block_size, c.n_embd // c.n_head, dtype=weight.dtype,
                             device=weight.device) for _ in range(c.n_layer)]
        visible, start = idx[:, -c.block_size:], 0      # the model sees `visible`; the cache holds its first `start`
        for _ in range(max_new_tokens):
            if visible.size(1) > c.block_size:
                visible, start = visible[:, -max(1, c.block_size // 2):], 0
            logits, _ = self(visible[:, start:], cache=cache, start=start)
            start = visible.size(1)
            # The k likeliest ids, (B, k): one is greedy, and so is a temperature that leaves only one.
            k = 1 if temperature < 1e-6 else min(top_k or c.vocab_size, c.vocab_size)
            logits, ids = logits[:, -1].topk(k)
            token = ids.gather(1, torch.multinomial(F.softmax(logits / max(temperature, 1e-6), dim=-1), 1))
            visible = torch.cat((visible, token), dim=1)
            yield token

    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
                 top_k: int | None = None) -> Tensor:
        """Continue idx, (B, T), by max_new_tokens sampled ids: (B, T + max_new_tokens). Call `eval()` first.

        temperature 0 takes the likeliest id; top_k keeps only the k likeliest. What is visible: the last block_size
        prompt tokens and all that follows, until that is block_size long; then the last block_size//2 tokens, and
        all that follows, again and again. So most steps feed one token through the cache, however long the text,
        and each is what the uncached model would say of the same visible tokens.
        Raises ValueError for an empty prompt, ids outside the vocabulary, temperature below 0 or nan, top_k below 1.
        """
        return torch.cat((idx, *self.stream(idx, max_new_tokens, temperature, top_k)), dim=1)
