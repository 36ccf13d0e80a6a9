"""GeoNorm: a residual update that never leaves the sphere. Needs torch and nothing else: copy this file alone.

Read the residual stream x of one token as a point on the sphere of radius |x|, and a sublayer's output g as a wish to
move. Only the part of g that is tangent to the sphere can move x along it; its length says how far to turn:

    1. tangent          v = g - (<x,g> / <x,x>) x
    2. angle            theta = ((scale * min(|v|/|x|, max_angle)) + bias) * decay,   clamped to +-max_angle
    3. exponential map  x' = cos(theta) x + sin(theta) |x| v/|v|

So |x'| = |x|, the angle between x and x' is theta, and no other norm is needed between the blocks. `decay` shrinks
with depth as a learning rate shrinks with time; scale and bias are two learned numbers per sublayer. A finite p, if you
choose one, takes p*atan(theta/p) for theta before the clamp.

Sources: GeoNorm, arXiv 2601.22095 (the three steps, the decay); Sphere Retraction Normalizations, arXiv 2608.02668
(the family of step 2 in p). Vectors lie along the last dimension, (..., C); angles are radians.
"""
import math

import torch
from torch import Tensor, nn

DECAYS = ("none", "harmonic", "sqrt", "linear")


def update_decay(schedule: str, layer: int, n_layer: int) -> float:
    """The factor by which layer `layer` of 0..n_layer-1 shortens its steps (arXiv 2601.22095, layer-wise decay).

    none 1, harmonic 1/(layer+1), sqrt 1/sqrt(layer+1), linear (n_layer-layer)/n_layer.
    Raises ValueError for another schedule or a layer outside 0..n_layer-1.
    """
    if not 0 <= layer < n_layer:
        raise ValueError(f"layer must be in 0..{n_layer - 1} (n_layer is {n_layer}), not {layer}")
    if schedule == "none":
        return 1.0
    if schedule == "harmonic":
        return 1 / (layer + 1)
    if schedule == "sqrt":
        return 1 / math.sqrt(layer + 1)
    if schedule == "linear":
        return (n_layer - layer) / n_layer
    raise ValueError(f"decay must be one of {', '.join(DECAYS)}, not {schedule!r}")


class InnerProducts(torch.autograd.Function):
    """(x, g) -> <x,x>, c = <x,g>/<x,x> and <v,v> of v = g - c x, each (..., 1): all that the step wants to know.

    Plain autograd would keep v, and visit it again, for the backward pass. But all derivatives are combinations of x and g,

        d<x,x> = 2 <x,dx>,    dc = (<g - 2c x, dx> + <x,dg>) / <x,x>,    d<v,v> = 2 <v, dg - c dx>,

    so x and g are kept alone; that is as little memory as x + RMSNorm(g) takes, and less time than the plain equations.
    """

    @staticmethod
    def forward(ctx, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        xx = (x * x).sum(-1, keepdim=True)
        c = (x * g).sum(-1, keepdim=True) / xx.clamp(min=1e-30)
        v = g - c * x       # <v,v> is summed over v itself: as <g,g> - c <x,g> it would lose its digits when g is near x
        ctx.save_for_backward(x, g, xx, c)
        return xx, c, (v * v).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, d_xx: Tensor, d_c: Tensor, d_vv: Tensor) -> tuple[Tensor, Tensor]:
        x, g, xx, c = ctx.saved_tensors
        d_c = d_c / xx.clamp(min=1e-30)
        cross = d_c - 2 * c * d_vv
        return (2 * d_xx - c * (d_c + cross)) * x + cross * g, cross * x + 2 * d_vv * g


def geodesic_update(x: Tensor, g: Tensor, scale: Tensor | float = 1.0, bias: Tensor | float = 0.0,
                    decay: float = 1.0, max_angle: float = math.pi / 4, p: float = math.inf) -> Tensor:
    """Turn x along its sphere in the direction of g's tangent part; the three steps of arXiv 2601.22095 (see above).

    x: (..., C), the residual stream.       g: (..., C), the sublayer's output.
    scale, bias: the learned affine map of the angle.       decay: the layer's factor, see `update_decay`.
    max_angle: largest turn, radians.       p: which retraction makes the turn t of step 2 the angle p*atan(t/p), clamped
        again (arXiv 2608.02668): inf is the exponential map, 2 the Cayley map, 1 the metric projection of x + t |x| v/|v|.
    Returns x', (..., C), of x's dtype and length. float16 and bfloat16 are computed in float32 and cast back.

    Where g has no tangent part (|v| under 1e-15, or under 16 eps of the part along x, which is rounding) the direction is
    undefined: x' = x whatever the bias. At g = 0 the gradient is dx'/dg = scale*decay*(I - x x^T/<x,x>), the limit without
    a bias. x = 0 stays 0 up to rounding. Values and gradients are finite in all these cases, for |g| from 0 to 1e15.
    """
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    g = g.to(x.dtype)

    xx, c, vv = InnerProducts.apply(x, g)       # (..., 1) each; the tangent is v = g - c x
    # A root's slope at 0 is infinite, so each square is clamped before its root: then 0 gives a finite gradient, not nan.
    x_norm, v_norm = xx.clamp(min=1e-30).sqrt(), vv.clamp(min=1e-30).sqrt()

    # If g is parallel to x, v is what rounding left of it: a direction only if it stands out from what was taken away.
    noise = vv < (16 * torch.finfo(x.dtype).eps) ** 2 * c * c * xx
    t = (v_norm / x_norm).clamp(max=max_angle)
    t = (scale * t + bias * (vv > 1e-30).to(x.dtype)) * decay
    theta = t if math.isinf(p) else p * torch.atan(t / p)
    theta = theta.clamp(-max_angle, max_angle).masked_fill(noise, 0.0)

    along_v = theta.sin() * x_norm / v_norm
    return ((theta.cos() - along_v * c) * x + along_v * g).to(dtype)    # cos(theta) x + sin(theta) |x| v/|v|


class GeoNorm(nn.Module):
    """One sublayer's geodesic step: `geodesic_update` with its layer's decay and a learned scale (1) and bias (0).

    layer: 0..n_layer-1.    decay: a schedule of `update_decay`.    max_angle (radians, in (0, pi]) and p (above 0)
    as in `geodesic_update`. Raises ValueError for values outside these. The two scalars are not for weight decay.
    """

    def __init__(self, layer: int, n_layer: int, decay: str = "sqrt", max_angle: float = math.pi / 4,
                 p: float = math.inf):
        super().__init__()
        if not 0 < max_angle <= math.pi:
            raise ValueError(f"max_angle must be above 0 and at most pi radians, not {max_angle}")
        if not p > 0:
            raise ValueError(f"p must be above 0 (inf is the exponential map), not {p}")
        self.decay, self.max_angle, self.p = update_decay(decay, layer, n_layer), max_angle, p
        self.scale = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """x: (..., C), the stream; g: (..., C), the sublayer's output. Returns the turned x, (..., C)."""
        return geodesic_update(x, g, self.scale, self.bias, self.decay, self.max_angle, self.p)
