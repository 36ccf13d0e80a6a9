"""GeoNorm: a residual update that never leaves the sphere. Needs only torch: copy this file.

Read the residual stream x of one token as a point on the sphere of radius |x|, and a sublayer's
output g as a proposed move. Only the part of g that is tangent to the sphere can move x along it,
and its length says how far to turn:

    1. tangent          v  = g - (<x,g> / <x,x>) x
    2. angle            theta = (scale * min(|v|/|x|, max_angle) + bias) * decay,
                        clamped to +-max_angle
    3. exponential map  x' = cos(theta) x + sin(theta) |x| v/|v|

So |x'| = |x|, the angle between x and x' is theta, and no norm is needed between the blocks.
`decay` shrinks with depth as a learning rate shrinks with time; scale and bias are two learned
numbers per sublayer.

    >>> x = torch.tensor([2.0, 0, 0, 0])
    >>> geodesic_update(x, torch.tensor([7, math.pi / 3, 0, 0]))    # a turn of 30 degrees
    tensor([1.7321, 1.0000, 0.0000, 0.0000])

Source: GeoNorm, arXiv 2601.22095, eq. 3 to 5 and appendix D. Ours: theta is also clamped from
below, and x does not move where v = 0. The parameter p of `geodesic_update` is from Sphere
Retraction Normalizations, arXiv 2608.02668. Vectors lie along the last dimension, (..., C);
angles are radians.
"""
import math

import torch
from torch import Tensor, nn

DECAYS = ("none", "harmonic", "sqrt", "linear")

TINY = 1e-30    # floor of squared lengths: roots and quotients then have finite gradients


def update_decay(schedule: str, layer: int, n_layer: int) -> float:
    """The factor by which layer 0..n_layer-1 shortens its steps (arXiv 2601.22095, eq. 5).

    none (ours) 1, harmonic 1/(layer+1), sqrt 1/sqrt(layer+1), linear (n_layer-layer)/n_layer.
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


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a,b> of each vector: (..., C), (..., C) -> (..., 1)."""
    return (a * b).sum(-1, keepdim=True)


def geodesic_update(x: Tensor, g: Tensor, scale: Tensor | float = 1.0, bias: Tensor | float = 0.0,
                    decay: float = 1.0, max_angle: float = math.pi / 4,
                    p: float = math.inf) -> Tensor:
    """Turn x along its sphere in the direction of g's tangent part: the three steps above.

    x           (..., C), the residual stream
    g           (..., C), the sublayer's output
    scale, bias the learned affine map of the angle: numbers, or tensors of shape (1,)
    decay       the layer's factor, see `update_decay`
    max_angle   the largest turn, radians
    p           the retraction: theta becomes p*atan(theta/p) before the last clamp. inf is the
                exponential map, 2 the Cayley map, 1 the metric projection of x + theta |x| v/|v|

    Returns x', (..., C), with the dtype and length of x. Half precision is computed in float32.
    Raises ValueError if x and g differ in shape.

    At g = 0 there is no direction: x' = x whatever the bias, and dx'/dg is
    scale*decay*(I - x x^T/<x,x>), the limit without a bias. If g is parallel to x up to rounding,
    x' = x and dx'/dg = 0. x = 0 stays 0 up to rounding.
    """
    if x.shape != g.shape:
        raise ValueError(f"x and g must have one shape, not {tuple(x.shape)} and {tuple(g.shape)}")
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    g = g.to(x.dtype)

    # 1. Tangent. The clamp keeps value and gradient finite at x = 0.
    xx = dot(x, x).clamp(min=TINY)                                      # (..., 1)
    along = dot(x, g) / xx                                              # (..., 1)
    v = g - along * x                                                   # (..., C)

    # 2. Angle. TINY keeps the root's gradient finite at v = 0, where the bias must not turn x.
    x_length = xx.sqrt()
    v_length = (dot(v, v) + TINY).sqrt()
    bias = bias * (v_length > 2 * math.sqrt(TINY)).to(x.dtype)
    theta = (scale * (v_length / x_length).clamp(max=max_angle) + bias) * decay
    if p < 1e6:     # beyond, it is theta itself to the last digit
        theta = p * torch.atan(theta / p)
    theta = theta.clamp(-max_angle, max_angle)

    # Step 1 subtracts along*x with an error of about eps times its length. A v that is not clearly
    # longer has no direction: moving along it would change |x|.
    rounding = 16 * torch.finfo(x.dtype).eps * along.detach().abs() * x_length.detach()
    theta = theta.masked_fill(v_length < rounding, 0.0)

    # 3. Exponential map.
    return (theta.cos() * x + theta.sin() * x_length / v_length * v).to(dtype)


def check_step(max_angle: float, p: float):
    """Raise ValueError if max_angle or p is invalid."""
    if not 0 < max_angle <= math.pi:
        raise ValueError(f"max_angle must be above 0 and at most pi radians, not {max_angle}")
    if not p >= 1e-6:
        raise ValueError(f"p must be at least 1e-6 (inf is the exponential map), not {p}")


class GeoNorm(nn.Module):
    """One sublayer's geodesic step: `geodesic_update` with a learned scale (1) and bias (0).

    decay: the layer's factor.  max_angle: radians, in (0, pi].  p: at least 1e-6.
    Raises ValueError for values outside these. scale and bias are not for weight decay.
    """

    def __init__(self, decay: float = 1.0, max_angle: float = math.pi / 4, p: float = math.inf):
        super().__init__()
        check_step(max_angle, p)
        self.decay, self.max_angle, self.p = decay, max_angle, p
        self.scale = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """x: (..., C), the stream; g: (..., C), the sublayer's output. Returns x', (..., C)."""
        return geodesic_update(x, g, self.scale, self.bias, self.decay, self.max_angle, self.p)
