"""geonorm.py against closed forms, finite differences and a literal restatement of the equations in float64."""
import math
from itertools import product

import pytest
import torch
from torch import nn

from geonorm import DECAYS, GeoNorm, geodesic_update, update_decay
from model import GPTConfig, Residual


def restated(x, g, scale=1.0, bias=0.0, decay=1.0, max_angle=math.pi / 4, p=math.inf):
    """arXiv 2601.22095's three steps, word for word, one token at a time in Python floats: (x', theta)."""
    out, angles = [], []
    for xi, gi in zip(x.double().tolist(), g.double().tolist()):
        r = math.sqrt(math.fsum(a * a for a in xi))
        along = math.fsum(a * b for a, b in zip(xi, gi)) / r**2
        v = [b - along * a for a, b in zip(xi, gi)]
        n = math.sqrt(math.fsum(a * a for a in v))
        t = (scale * min(n / r, max_angle) + bias) * decay
        theta = t if p == math.inf else p * math.atan(t / p)
        theta = max(-max_angle, min(max_angle, theta))
        out.append([math.cos(theta) * a + math.sin(theta) * r * b / n for a, b in zip(xi, v)])
        angles.append(theta)
    return torch.tensor(out, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64)


def angle(x, y):
    """Angle in radians between rows, in float64; atan2 is exact at small angles, where acos is not."""
    x, y = (nn.functional.normalize(a.double(), dim=-1) for a in (x, y))
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))


SETTINGS = [dict(), dict(scale=0.7, bias=0.1, decay=0.5), dict(p=1.0), dict(scale=1.3, bias=-0.2, p=2.0),
            dict(scale=-1.0, bias=0.05, decay=0.3, p=4.0, max_angle=1.2)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_float64_is_the_equations(setting):
    torch.manual_seed(0)
    x, g = torch.randn(20, 48, dtype=torch.float64), torch.randn(20, 48, dtype=torch.float64)
    for size in (1e-3, 0.3, 1.0, 30.0):
        expected, _ = restated(x, g * size, **setting)
        assert (geodesic_update(x, g * size, **setting) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("width", [4, 384, 4096])
def test_float32_keeps_the_norm_and_turns_by_theta(setting, width):
    torch.manual_seed(0)
    x, g = torch.randn(64, width), torch.randn(64, width) * torch.logspace(-2, 1, 64)[:, None]
    y = geodesic_update(x, g, **setting)
    assert ((y.double().norm(dim=-1) / x.double().norm(dim=-1)) - 1).abs().max() < 1e-6
    _, theta = restated(x, g, **setting)
    assert (angle(x, y) - theta.abs()).abs().max() < 1e-6


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_norm_after_96_steps(dtype, bound):
    """48 layers of two sublayers: errors of the length must not add up (the step is float32 whatever the stream is)."""
    torch.manual_seed(0)
    x = torch.randn(32, 768).to(dtype)
    start = x.double().norm(dim=-1)
    for step in range(96):
        x = geodesic_update(x, 0.3 * torch.randn(32, 768).to(dtype), decay=update_decay("sqrt", step // 2, 48))
    assert x.dtype == dtype
    assert (x.double().norm(dim=-1) / start - 1).abs().max() < bound


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradcheck(setting):
    torch.manual_seed(1)
    x, g = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = torch.tensor(setting.get("scale", 1.0), dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(setting.get("bias", 0.0), dtype=torch.float64, requires_grad=True)
    rest = {k: v for k, v in setting.items() if k not in ("scale", "bias")}
    # Below the clamp, and mostly above it; there, scale 1 and bias 0 stand on a kink of the equations themselves.
    for size in (0.1, 1.0) if setting else (0.1,):
        assert torch.autograd.gradcheck(lambda x, g, s, b: geodesic_update(x, size * g, s, b, **rest), (x, g, scale, bias))


def test_gradient_at_no_update():
    """g = 0 in a good batch: x' = x, dx'/dx = 1, dx'/dg the limit scale*decay*(I - x x^T/<x,x>); `where` gave nan."""
    torch.manual_seed(0)
    x = torch.randn(3, 8, requires_grad=True)
    g = torch.randn(3, 8)
    g[1] = 0
    g.requires_grad_()
    y = geodesic_update(x, g, scale=0.8, decay=0.5)
    y.sum().backward()
    assert torch.equal(y[1], x[1])
    assert torch.equal(x.grad[1], torch.ones(8))
    row = x[1].detach()
    assert torch.allclose(g.grad[1], 0.4 * (1 - row.sum() / (row @ row) * row), atol=1e-6)
    assert torch.autograd.gradcheck(geodesic_update, (torch.randn(2, 5, dtype=torch.float64, requires_grad=True),
                                                      torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)))


@pytest.mark.parametrize("x_is, g_is, size, bias, dtype", list(product(
    ["random", "zero", "huge"], ["random", "parallel"], [0.0, 1e-30, 1e-8, 1.0, 1e6, 1e15], [0.0, 0.1],
    [torch.float32, torch.float64])))
def test_edges_are_finite(x_is, g_is, size, bias, dtype):
    torch.manual_seed(0)
    x = {"random": torch.randn(4, 384), "zero": torch.zeros(4, 384), "huge": torch.full((4, 384), 300.0)}[x_is].to(dtype)
    g = size * nn.functional.normalize(torch.randn(4, 384).to(dtype) if g_is == "random" else x, dim=-1)
    leaves = [x.requires_grad_(), g.requires_grad_(), torch.ones((), requires_grad=True), torch.tensor(bias, requires_grad=True)]
    y = geodesic_update(*leaves)
    y.sum().backward()
    assert all(t.isfinite().all() for t in (y, *(leaf.grad for leaf in leaves)))
    assert ((y.norm(dim=-1) - x.norm(dim=-1)).abs() <= 1e-6 * x.norm(dim=-1) + 1e-12).all()
    if g_is == "parallel":      # no tangent, no move, whatever the bias
        assert (y - x).abs().max() <= 1e-6 * x.abs().max() + 1e-12


def test_rounding_noise_is_no_direction():
    """g = 3x with a learned bias: the tangent is what rounding left, and moving along it changed the norm by 10%."""
    torch.manual_seed(0)
    x = torch.randn(64, 384)
    for factor in (3.0, -3.0, 1e6):
        assert torch.equal(geodesic_update(x, factor * x, bias=torch.tensor(0.1)), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_inside(dtype):
    """A row of 300 overflows float16 when squared, and a row of small numbers vanishes."""
    torch.manual_seed(0)
    x = torch.randn(3, 64)
    x[1], x[2] = 300.0, 1e-4
    x, g = x.to(dtype).requires_grad_(), torch.randn(3, 64).to(dtype).requires_grad_()
    y = geodesic_update(x, g)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == g.grad.dtype == dtype
    assert torch.equal(y, geodesic_update(x.float(), g.float()).to(dtype))
    assert y.isfinite().all() and x.grad.isfinite().all() and g.grad.isfinite().all()


def test_by_hand():
    """A turn of 30 degrees, and one that the clamp stops at 45."""
    x = torch.tensor([2.0, 0, 0, 0], dtype=torch.float64)
    turned = geodesic_update(x, torch.tensor([7, math.pi / 3, 0, 0], dtype=torch.float64))
    assert torch.allclose(turned, torch.tensor([math.sqrt(3), 1, 0, 0], dtype=torch.float64))
    clamped = geodesic_update(x, torch.tensor([0, 1e6, 0, 0], dtype=torch.float64))
    assert torch.allclose(clamped, torch.tensor([math.sqrt(2), math.sqrt(2), 0, 0], dtype=torch.float64))


def test_p_is_the_family_of_retractions():
    """arXiv 2608.02668: p = 1 projects x + v back to the sphere, p = 2 is the Cayley map, p -> 0 does not move."""
    torch.manual_seed(0)
    x, g = torch.randn(9, 16, dtype=torch.float64), 0.3 * torch.randn(9, 16, dtype=torch.float64)
    v = g - (x * g).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True) * x
    r = x.norm(dim=-1, keepdim=True)
    t = v.norm(dim=-1, keepdim=True) / r
    assert torch.allclose(geodesic_update(x, g, p=1.0), r * (x + v) / (x + v).norm(dim=-1, keepdim=True), atol=1e-12)
    cayley = ((1 - t**2 / 4) * x + v) / (1 + t**2 / 4)
    assert torch.allclose(geodesic_update(x, g, p=2.0), cayley, atol=1e-12)
    assert torch.allclose(geodesic_update(x, g, p=1e-9), x, atol=1e-7)


def test_post_norm_is_the_step_to_first_order():
    """method of the papers: RMSNorm without gain projects x + g to the sphere; the geodesic differs in second order."""
    torch.manual_seed(0)
    x = nn.functional.rms_norm(torch.randn(9, 32, dtype=torch.float64), (32,))
    g = torch.randn(9, 32, dtype=torch.float64)

    def gap(size):
        return (nn.functional.rms_norm(x + size * g, (32,)) - geodesic_update(x, size * g)).norm()
    assert gap(1e-3) / gap(1e-4) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_whole_and_under_autocast(autocast):
    """One graph, no break; aot_eager traces forward and backward as inductor does, without a C++ compiler."""
    torch.manual_seed(0)
    step = GeoNorm(2, 4)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, g = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    results = []
    for f in (step, compiled):
        step.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = f(x, g.bfloat16() if autocast else g)
        y.square().sum().backward()
        results.append((y, step.scale.grad.clone()))
    assert results[0][0].dtype == torch.float32
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-4)


def test_decays():
    assert [update_decay("none", i, 4) for i in range(4)] == [1, 1, 1, 1]
    assert [update_decay("harmonic", i, 4) for i in range(4)] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [update_decay("sqrt", i, 4) for i in range(4)] == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5], abs=1e-15)
    assert [update_decay("linear", i, 4) for i in range(4)] == [1, 0.75, 0.5, 0.25]
    assert all(type(update_decay(name, 1, 4)) is float for name in DECAYS)


@pytest.mark.parametrize("call, word", [
    (lambda: update_decay("cosine", 0, 4), "harmonic"), (lambda: update_decay("sqrt", 4, 4), "0..3"),
    (lambda: update_decay("sqrt", -1, 4), "-1"), (lambda: GeoNorm(0, 1, max_angle=0.0), "max_angle"),
    (lambda: GeoNorm(0, 1, max_angle=4.0), "pi"), (lambda: GeoNorm(0, 1, p=0.0), "p must"),
    (lambda: GeoNorm(0, 1, p=math.nan), "p must"), (lambda: GeoNorm(0, 1, decay="cosine"), "cosine")])
def test_bad_values_raise_in_words(call, word):
    with pytest.raises(ValueError, match=word):
        call()


def test_module_has_two_scalars_and_uses_them():
    step = GeoNorm(3, 4, "linear", 1.0, 2.0)
    assert {name: p.item() for name, p in step.named_parameters()} == {"scale": 1.0, "bias": 0.0}
    torch.manual_seed(0)
    x, g = torch.randn(4, 16), torch.randn(4, 16)
    torch.nn.init.constant_(step.scale, 0.5)
    torch.nn.init.constant_(step.bias, 0.2)
    expected, _ = restated(x, g, 0.5, 0.2, 0.25, 1.0, 2.0)
    assert torch.allclose(step(x, g).double(), expected, atol=1e-6)


# ------------------------------------------------------------------------------------- Pre and Post as sphere steps

def N(z: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(z, z.shape[-1:], eps=1e-30)


def length(z: torch.Tensor) -> torch.Tensor:
    return z.norm(dim=-1, keepdim=True)


def split(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a and v of g = a x + v, v tangent at x."""
    a = (g * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
    return a, g - a * x


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """x on the sphere of radius sqrt(16) = 4, and tangents v with |v|/|x| from 1e-6 to 0.75, below the clamp pi/4."""
    torch.manual_seed(0)
    x, g = torch.randn(2, 50, 16, dtype=torch.float64)
    return N(x), N(split(x, g)[1]) * torch.logspace(-6, math.log10(0.75), 50, dtype=torch.float64)[:, None]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-12):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_post_is_a_sphere_step():
    """N(x + g) is the sphere step with p = 1, and the part a x of g only makes it a step by v/(1 + a)."""
    x, v = points()
    close(N(x + v), geodesic_update(x, v, p=1.0))
    a = torch.linspace(-0.9, 3, 50, dtype=torch.float64)[:, None]
    v = v * (1 + a).clamp(max=1)            # |v|/((1 + a)|x|) stays below the clamp
    close(N(x + a * x + v), geodesic_update(x, v / (1 + a), p=1.0))
    close(angle(x, N(x + a * x + v)), torch.atan(length(v) / ((1 + a) * length(x)))[:, 0])
    close(geodesic_update(x, a * x + v, p=1.0), N(x + v))       # geo looks at v alone


def test_pre_is_a_sphere_step():
    """Under Pre the direction u of a stream moves as Post's does, by the step f(N(x))/|x|: the longer x, the shorter."""
    x, v = points()
    u, v = x / 4, v / 8
    r = torch.linspace(-0.3, 2, 50, dtype=torch.float64)[:, None]
    f = r * u + v                           # f(N(x)), which knows nothing of the length s of x = s u
    for s in (1.0, 2.0, 4.0):
        y = s * u + f
        close(y / length(y), (u + f / s) / length(u + f / s))
        close(N(y), N(N(s * u) + 4 * f / s))                        # Post's projection, on its sphere of radius 4
        a, tangent = split(s * u, f)
        close(y / length(y), geodesic_update(u, tangent / ((1 + a) * s), p=1.0))
        close(angle(u, y).tan(), (length(v) / (s + r))[:, 0])
        close(angle(u, s * u + v).tan() * s, length(v)[:, 0])       # where f is tangent, twice the length is half of it


def test_residuals_are_sphere_steps():
    """model.Residual itself: Post's update and the direction of Pre's are those steps, up to RMSNorm's eps; and Post is
    geo with p = 1 and no decay where the sublayer's output is tangent."""
    x, _ = points()
    f = nn.Linear(16, 16, bias=False).double()
    pre, post, geo = (Residual(GPTConfig(16, 300, 2, 2, 16, norm=norm, geo_decay="none", geo_p=1.0), 1, f).double()
                      for norm in ("pre", "post", "geo"))
    with torch.no_grad():
        f.weight *= 0.4                     # angles below the clamp
        a, v = split(x, f(x))
        close(post(x), geodesic_update(x, v / (1 + a), p=1.0), 1e-5)
        for s in (0.5, 1.0, 2.0):
            a, v = split(s * x, f(x))       # N(s x) = x
            close(N(pre(s * x)), geodesic_update(x, v / ((1 + a) * s), p=1.0), 1e-5)
        f.weight -= f.weight.clone().T      # antisymmetric: f(x) is tangent at x
        close(post(x), geo(x), 1e-5)
