"""A GPT in which one word, `config.norm`, places the normalization: pre, post, peri or geo.

Read from the top: the configuration; attention and MLP, which know nothing of norms; then
`edge_norms` and `Residual`, which hold the whole difference between the four; then the GPT that
stacks them; and last `depth_profile`, which measures what each sublayer does to the stream.

Shapes: B batch, T tokens, C = n_embd channels, H = n_head heads, D = C/H channels per head,
V = vocab_size.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geonorm import DECAYS, GeoNorm, check_step, update_decay

NORMS = ("pre", "post", "peri", "geo")
ENTRIES = ("own", "none", "norm")


@dataclass
class GPTConfig:
    """A GPT's shape and arithmetic. Invalid values raise a ValueError that says why."""
    block_size: int = 1024          # longest context, tokens
    vocab_size: int = 50257         # token ids 0..vocab_size-1
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    norm: str = "geo"               # one of NORMS
    decay: str = "own"              # own (geo sqrt, the others none), or one of geonorm.DECAYS
    entry: str = "own"              # before the first block: own (see Residual), none, or norm
    geo_max_angle: float = math.pi / 4  # geo only: largest turn of one sublayer, radians
    geo_p: float = math.inf         # geo only: the retraction; inf is the exponential map

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd must be a multiple of 2*n_head, since rotary embeddings turn "
                             f"pairs of channels in each head; {self.n_embd} is not a multiple of "
                             f"{2 * self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        for name, words in (("norm", NORMS), ("decay", ("own", *DECAYS)), ("entry", ENTRIES)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, "
                                 f"not {getattr(self, name)!r}")
        # The message begins with the name of geonorm's argument; the field's has geo_ before it.
        try:
            check_step(self.geo_max_angle, self.geo_p)
        except ValueError as error:
            raise ValueError(f"geo_{error}") from None


def rms_norm(config: GPTConfig, gain: bool = True) -> nn.RMSNorm:
    """RMSNorm (arXiv 1910.07467): x / sqrt(mean(x^2) + eps), times a learned gain.

    eps is fixed, since torch's default depends on the dtype.
    """
    return nn.RMSNorm(config.n_embd, eps=1e-6, elementwise_affine=gain)


def rotary_table(config: GPTConfig) -> Tensor:
    """RoPE's angles (arXiv 2104.09864) as (2, block_size, 1, D/2): the cosines, then the sines.

    Computed in float32: bfloat16 has 513 distinct values for 1024 positions. `rotate` may then
    round the cosines and sines.
    """
    half = config.n_embd // config.n_head // 2
    channel = torch.arange(half, dtype=torch.float32)
    position = torch.arange(config.block_size, dtype=torch.float32)
    frequency = 10000.0 ** (-channel / half)                        # (D/2,)
    angle = torch.outer(position, frequency)                        # (block_size, D/2)
    return torch.stack((angle.cos(), angle.sin())).unsqueeze(2)     # (2, block_size, 1, D/2)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn channels i and i+D/2 of each head as a pair, by position times frequency i.

    x: (B, T, H, D).  rotary: (2, T, 1, D/2), the rows of `rotary_table` for these positions.
    """
    cos, sin = rotary.to(x.dtype).unbind(0)     # (T, 1, D/2) each
    a, b = x.chunk(2, dim=-1)                   # (B, T, H, D/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions; no norm and no bias."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: Tensor, cache: Tensor | None = None,
                start: int = 0) -> Tensor:
        """Returns what attention adds at each position, (B, T, C).

        x: (B, T, C), the tokens at start..start+T-1.  rotary: (2, T, 1, D/2), their angles.
        cache: (2, B, H, block_size, D), keys and values of the earlier tokens; these are added.
        """
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, -1).unbind(2)   # (B, T, H, D) each
        q = rotate(q, rotary).transpose(1, 2)                               # (B, H, T, D)
        k = rotate(k, rotary).transpose(1, 2)                               # (B, H, T, D)
        v = v.transpose(1, 2)                                               # (B, H, T, D)

        # is_causal would align the first query with the first key; with a cache, the queries are
        # the last T of the keys, so they need a mask of their own.
        mask = None
        if cache is not None:
            end = start + T
            cache[0, :, :, start:end] = k
            cache[1, :, :, start:end] = v
            k, v = cache[:, :, :, :end].unbind(0)                           # (B, H, end, D) each
            mask = torch.ones(T, end, dtype=torch.bool, device=x.device).tril(start)

        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                           dropout_p=self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, T, C)
        # Under autocast y is in half precision: the stream gets it back in its own dtype.
        return self.drop(self.c_proj(y)).to(x.dtype)


class MLP(nn.Module):
    """Two linear maps, four times wider between them, with GELU; no norm and no bias."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C), in the dtype of the stream as in `Attention`."""
        hidden = F.gelu(self.c_fc(x))                                       # (B, T, 4C)
        return self.drop(self.c_proj(hidden)).to(x.dtype)


def edge_norms(config: GPTConfig) -> tuple[nn.Module, nn.Module]:
    """The norms before the first block and after the last: two columns of `Residual`'s table."""
    N = rms_norm
    if config.norm == "pre":    entry, exit = nn.Identity(), N(config)
    elif config.norm == "post": entry, exit = N(config), nn.Identity()
    elif config.norm == "peri": entry, exit = N(config), N(config)
    elif config.norm == "geo":  entry, exit = N(config, gain=False), N(config)
    else: raise ValueError(f"edge_norms has no placement {config.norm!r}")
    if config.entry == "none": entry = nn.Identity()
    if config.entry == "norm": entry = N(config, gain=False)
    return entry, exit


class Residual(nn.Module):
    """One sublayer f and how its output joins the stream x: with `edge_norms`, all of `--norm`.

        norm   one sublayer            before the first block   after the last   arXiv
        pre    x + d f(N(x))           nothing                  N                2002.04745
        post   N(x + d f(x))           N                        nothing          2002.04745
        peri   x + d N(f(N(x)))        N                        N                2502.02732
        geo    turn x towards f(x)     N without gain           N                2601.22095

    N is RMSNorm with a learned gain, never shared; unused norms are not created. The turn is
    `geonorm.geodesic_update`; the entry norm of `geo` chooses the sphere. d is the layer's factor
    in the schedule `config.decay`; by default it is 1, and for `geo`, whose angles it multiplies,
    1/sqrt(layer+1). `config.entry` replaces the third column. Peri-LN's paper calls its entry
    norm optional.

    A placement must draw no random numbers when it is built: then one seed starts every placement
    with the same weights.
    """

    def __init__(self, config: GPTConfig, layer: int, sublayer: nn.Module):
        super().__init__()
        self.norm, self.f = config.norm, sublayer
        own = "sqrt" if config.norm == "geo" else "none"
        schedule = own if config.decay == "own" else config.decay
        self.decay = update_decay(schedule, layer, config.n_layer)
        if config.norm in ("pre", "peri"):
            self.norm_in = rms_norm(config)
        if config.norm in ("post", "peri"):
            self.norm_out = rms_norm(config)
        if config.norm == "geo":
            self.step = GeoNorm(self.decay, config.geo_max_angle, config.geo_p)

    def forward(self, x: Tensor, *context) -> Tensor:
        """x: (B, T, C), the stream; context: f's other arguments. Returns the next x, (B, T, C)."""
        d, f = self.decay, self.f
        if self.norm == "pre":  return x + d * f(self.norm_in(x), *context)
        if self.norm == "post": return self.norm_out(x + d * f(x, *context))
        if self.norm == "peri": return x + d * self.norm_out(f(self.norm_in(x), *context))
        if self.norm == "geo":  return self.step(x, f(x, *context))
        raise ValueError(f"Residual.forward has no placement {self.norm!r}")


class Block(nn.Module):
    """Attention, then MLP, each joined to the stream by the placement."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attention = Residual(config, layer, Attention(config))
        self.mlp = Residual(config, layer, MLP(config))

    def forward(self, x: Tensor, rotary: Tensor, cache: Tensor | None = None,
                start: int = 0) -> Tensor:
        """(B, T, C) -> (B, T, C); the other arguments are those of `Attention`."""
        x = self.attention(x, rotary, cache, start)
        return self.mlp(x)


class GPT(nn.Module):
    """Token embedding, entry norm, n_layer blocks, exit norm, and the embedding as the head."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        padded = 64 * math.ceil(config.vocab_size / 64)     # matrix units like multiples of 64
        self.wte = nn.Embedding(padded, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.entry, self.exit = edge_norms(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.register_buffer("rotary", rotary_table(config), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draw every weight from a normal of mean 0.

            wte (the embedding, also the head)                          std 0.02
            c_attn (attention in), c_fc (MLP in)                        std 1/sqrt(C)
            c_proj of attention (fan-in C) and of the MLP (fan-in 4C)   std 1/sqrt(fan-in)
                                                                            / sqrt(2 n_layer)

        The norms draw nothing: gains stay 1, scale and bias of the geodesic steps 1 and 0.
        """
        nn.init.normal_(self.wte.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features ** -0.5
                if name.endswith("c_proj"):
                    std /= math.sqrt(2 * self.config.n_layer)
                nn.init.normal_(module.weight, std=std)

    def forward(self, idx: Tensor, targets: Tensor | None = None,
                cache: list[Tensor] | None = None,
                start: int = 0) -> tuple[Tensor, Tensor | None]:
        """The next token's logits, and the loss if targets are given.

        idx: (B, T) token ids, at positions start..start+T-1 of the context.
        targets: (B, T), the ids that follow; -1 is not counted.
        cache: see `new_cache`; it holds the positions before start, and receives these.

        Returns logits, (B, T, V) with targets, else (B, 1, V) of the last position; and the mean
        loss in nats/token, or None. Raises ValueError if the context exceeds block_size.
        """
        T = idx.size(1)
        if start + T > self.config.block_size:
            raise ValueError(f"{start + T} tokens do not fit a context of block_size "
                             f"{self.config.block_size}")
        x = self.entry(self.drop(self.wte(idx)))                    # (B, T, C)
        rotary = self.rotary[:, start:start + T]                    # (2, T, 1, D/2)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, cache[layer] if cache else None, start)

        # The padded ids are cut off, so that they can be neither learned nor sampled.
        x = self.exit(x if targets is not None else x[:, -1:])
        logits = F.linear(x, self.wte.weight)[..., :self.config.vocab_size].float()
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Only the mean loss, nats/token. Compiled, it need not return the (B, T, V) logits."""
        return self(idx, targets)[1]

    def new_cache(self, batch: int) -> list[Tensor]:
        """Room for a context's keys and values: one (2, B, H, block_size, D) tensor per layer."""
        c, weight = self.config, self.wte.weight
        shape = (2, batch, c.n_head, c.block_size, c.n_embd // c.n_head)
        return [weight.new_empty(shape) for _ in range(c.n_layer)]

    def param_groups(self, weight_decay: float) -> list[dict]:
        """Optimizer groups: matrices are decayed; gains and the geodesic scalars are not."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        return [{"params": matrices, "weight_decay": weight_decay},
                {"params": vectors, "weight_decay": 0.0}]


def angle_between(a: Tensor, b: Tensor) -> Tensor:
    """Angle between the vectors of a and b, radians: (..., C), (..., C) -> (...)."""
    u, v = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))  # acos fails at small angles


def depth_profile(model: GPT, idx: Tensor, targets: Tensor) -> list[dict]:
    """What each sublayer does to the stream, without dropout: one dict per sublayer, in order.

    idx, targets: (B, T). The model is left as it was. Keys of the dicts:

        layer, sublayer     0..n_layer-1, and attention or mlp
        stream_rms          root mean square of the stream after the sublayer
        update_rms          that of the change it made, divided by that of the stream before
        angle               mean turn of a token's stream, radians
        clamped             geo: share of tokens with |v|/|x| > max_angle; "" for the others
        grad_norm           of the loss, in all weights of the sublayer's layer
    """
    changes, clamped, hooks = [], [], []

    def rms(x):
        return x.square().mean().sqrt()

    def watch_stream(residual, inputs, after):
        before, after = inputs[0].detach(), after.detach()
        angle = angle_between(before, after).mean()
        changes.append([rms(after), rms(after - before) / rms(before), angle])

    def watch_step(step, inputs, after):
        x, g = inputs[0].detach(), inputs[1].detach()
        turn = angle_between(x, g).sin() * g.norm(dim=-1) / x.norm(dim=-1)      # |v|/|x|
        clamped.append((turn > step.max_angle).float().mean().item())

    # One forward pass, watched.
    for module in model.modules():
        if isinstance(module, Residual):
            hooks.append(module.register_forward_hook(watch_stream))
        if isinstance(module, GeoNorm):
            hooks.append(module.register_forward_hook(watch_step))
    training = model.training
    _, loss = model.eval()(idx, targets)
    model.train(training)
    for hook in hooks:
        hook.remove()

    # One backward pass, which leaves no gradient in the parameters.
    rows = []
    weights = [[p for p in block.parameters() if p.requires_grad] for block in model.blocks]
    gradients = torch.autograd.grad(loss, sum(weights, []), allow_unused=True,
                                    materialize_grads=True)
    for layer, block in enumerate(model.blocks):
        own, gradients = gradients[:len(weights[layer])], gradients[len(weights[layer]):]
        grad_norm = torch.nn.utils.get_total_norm(own).item()
        for sublayer, _ in block.named_children():
            stream_rms, update_rms, angle = torch.stack(changes[len(rows)]).tolist()
            rows.append({"layer": layer, "sublayer": sublayer, "stream_rms": stream_rms,
                         "update_rms": update_rms, "angle": angle,
                         "clamped": clamped[len(rows)] if clamped else "",
                         "grad_norm": grad_norm})
    return rows
