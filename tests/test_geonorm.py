"""geonorm.py against closed forms, finite differences and a literal restatement in float64."""
import copy
import math
import os
import shutil
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from geonorm import DECAYS, GeoNorm, geodesic_update, update_decay
from model import GPT, GPTConfig, Residual


def restated(x, g, scale=1.0, bias=0.0, decay=1.0, max_angle=math.pi / 4, p=math.inf):
    """arXiv 2601.22095's three steps, one token at a time in Python floats: (x', theta)."""
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
    """Angle between rows, radians; atan2 is exact at small angles, where acos is not."""
    x, y = (nn.functional.normalize(a.double(), dim=-1) for a in (x, y))
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))


SETTINGS = [dict(), dict(scale=0.7, bias=0.1, decay=0.5), dict(p=1.0),
            dict(scale=1.3, bias=-0.2, p=2.0),
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
    """48 layers of two sublayers: errors of the length must not add up.

    The step is float32 whatever the stream is.
    """
    torch.manual_seed(0)
    x = torch.randn(32, 768).to(dtype)
    start = x.double().norm(dim=-1)
    for step in range(96):
        g = 0.3 * torch.randn(32, 768).to(dtype)
        x = geodesic_update(x, g, decay=update_decay("sqrt", step // 2, 48))
    assert x.dtype == dtype
    assert (x.double().norm(dim=-1) / start - 1).abs().max() < bound


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradcheck(setting):
    torch.manual_seed(1)
    x, g = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = torch.tensor(setting.get("scale", 1.0), dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(setting.get("bias", 0.0), dtype=torch.float64, requires_grad=True)
    rest = {k: v for k, v in setting.items() if k not in ("scale", "bias")}
    # Below the clamp, and mostly above it, where scale 1 and bias 0 are on a kink.
    for size in (0.1, 1.0) if setting else (0.1,):
        def update(x, g, s, b):
            return geodesic_update(x, size * g, s, b, **rest)
        assert torch.autograd.gradcheck(update, (x, g, scale, bias))


def test_gradient_at_no_update():
    """g = 0 in a good batch: x' = x, dx'/dx = 1, dx'/dg the limit; `where` once gave nan.

    The limit is scale*decay*(I - x x^T/<x,x>).
    """
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
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(geodesic_update, (x, zero))


@pytest.mark.parametrize("x_is, g_is, size, bias, dtype", list(product(
    ["random", "zero", "huge"], ["random", "parallel"], [0.0, 1e-30, 1e-8, 1.0, 1e6, 1e15],
    [0.0, 0.1], [torch.float32, torch.float64])))
def test_edges_are_finite(x_is, g_is, size, bias, dtype):
    torch.manual_seed(0)
    x = {"random": torch.randn(4, 384), "zero": torch.zeros(4, 384),
         "huge": torch.full((4, 384), 300.0)}[x_is].to(dtype)
    direction = torch.randn(4, 384).to(dtype) if g_is == "random" else x
    g = size * nn.functional.normalize(direction, dim=-1)
    leaves = [x.requires_grad_(), g.requires_grad_(), torch.ones(1, requires_grad=True),
              torch.tensor([bias], requires_grad=True)]
    y = geodesic_update(*leaves)
    y.sum().backward()
    assert all(t.isfinite().all() for t in (y, *(leaf.grad for leaf in leaves)))
    assert ((y.norm(dim=-1) - x.norm(dim=-1)).abs() <= 1e-6 * x.norm(dim=-1) + 1e-12).all()
    if g_is == "parallel":      # no tangent, no move, whatever the bias
        assert (y - x).abs().max() <= 1e-6 * x.abs().max() + 1e-12


def test_rounding_noise_is_no_direction():
    """g = 3x with a learned bias: moving along what rounding left changed the norm by 10%."""
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
    root = math.sqrt(2)
    assert torch.allclose(clamped, torch.tensor([root, root, 0, 0], dtype=torch.float64))


def test_p_is_the_family_of_retractions():
    """arXiv 2608.02668: p = 1 projects x + v to the sphere, 2 is the Cayley map, 0 stays."""
    torch.manual_seed(0)
    x, g = torch.randn(9, 16, dtype=torch.float64), 0.3 * torch.randn(9, 16, dtype=torch.float64)
    v = g - (x * g).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True) * x
    r = x.norm(dim=-1, keepdim=True)
    t = v.norm(dim=-1, keepdim=True) / r
    projected = r * (x + v) / (x + v).norm(dim=-1, keepdim=True)
    assert torch.allclose(geodesic_update(x, g, p=1.0), projected, atol=1e-12)
    cayley = ((1 - t**2 / 4) * x + v) / (1 + t**2 / 4)
    assert torch.allclose(geodesic_update(x, g, p=2.0), cayley, atol=1e-12)
    assert torch.allclose(geodesic_update(x, g, p=1e-9), x, atol=1e-7)
    big = geodesic_update(x.float(), g.float(), p=1e39)     # once 0 * inf
    assert torch.allclose(big, geodesic_update(x.float(), g.float()))


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_whole_and_under_autocast(autocast):
    """One graph, no break; aot_eager traces forward and backward as inductor does."""
    torch.manual_seed(0)
    step = GeoNorm(0.5)
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


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
def test_compiled_code_gives_the_same_numbers(tmp_path, monkeypatch):
    """What Inductor makes of the step, forward and backward, run: torch 2.6 once got one wrong."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    step = GeoNorm(0.5)
    x, g = torch.randn(2, 3, 16, requires_grad=True), torch.randn(2, 3, 16, requires_grad=True)
    weights, found = torch.randn(2, 3, 16), []
    for f in (step, torch.compile(step, fullgraph=True)):
        y = f(x, g)
        inputs = (x, g, step.scale, step.bias)
        found.append([y.detach(), *torch.autograd.grad((y * weights).sum(), inputs)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------ plain PyTorch

def inputs(*shape, size=0.3):
    torch.manual_seed(0)
    x, g = torch.randn(*shape, dtype=torch.float64), size * torch.randn(*shape, dtype=torch.float64)
    return x.requires_grad_(), g.requires_grad_()


@pytest.mark.parametrize("setting", SETTINGS)
def test_double_backward(setting):
    """A hand-written derivative once could not be differentiated again by every road."""
    assert torch.autograd.gradgradcheck(lambda x, g: geodesic_update(x, g, **setting), inputs(3, 5))


def test_function_transforms():
    """vmap, grad, jvp and hessian once raised `must override the setup_context`, for geo only."""
    x, g = (t.detach() for t in inputs(4, 6))

    def loss(x, g):
        return geodesic_update(x, g, bias=0.1, decay=0.5).pow(3).sum()
    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(x, g)
    for i in range(4):
        a, b = x[i].clone().requires_grad_(), g[i].clone().requires_grad_()
        whole = torch.autograd.grad(loss(a, b), (a, b))
        assert all(torch.allclose(p[i], w, atol=1e-12) for p, w in zip(per_sample, whole))
    _, tangent = torch.func.jvp(lambda x: geodesic_update(x, g), (x,), (g,))
    small = 1e-6 * g
    difference = (geodesic_update(x + small, g) - geodesic_update(x - small, g)) / 2e-6
    assert torch.allclose(tangent, difference, atol=1e-8)


def test_hessian_at_no_update():
    """At g = 0, where a zero-initialised c_proj starts: once 0 instead of -(w.x)/<x,x> P."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 6, dtype=torch.float64)
    zero = torch.zeros(6, dtype=torch.float64)
    hessian = torch.func.hessian(lambda g: geodesic_update(x, g) @ w)(zero)
    P = torch.eye(6, dtype=torch.float64) - torch.outer(x, x) / (x @ x)
    assert torch.allclose(hessian, -(w @ x) / (x @ x) * P, atol=1e-12)


def test_export_and_deepcopy():
    """A module of plain operations can be exported, and a copy has scalars of its own."""
    step = GeoNorm(0.5)
    x, g = (t.detach().float() for t in inputs(2, 4))
    exported = torch.export.export(step, (x, g)).module()
    assert torch.allclose(exported(x, g), step(x, g))
    twin = copy.deepcopy(step)
    torch.nn.init.constant_(twin.scale, 0.0)
    assert torch.allclose(twin(x, g), x) and not torch.allclose(step(x, g), x)


@pytest.mark.parametrize("x_shape, g_shape", [((1, 4), (5, 4)), ((4,), (5, 4)), ((5, 1), (5, 4)),
                                              ((5, 4), (4,))])
def test_shapes_that_differ(x_shape, g_shape):
    """Broadcasting once gave a wrong gradient (67.77 for 57.92), or a wrong value, silently."""
    with pytest.raises(ValueError, match="one shape"):
        geodesic_update(torch.ones(x_shape), torch.ones(g_shape))
    x, g = inputs(1, 4)[0], inputs(5, 4)[1]
    assert torch.autograd.gradcheck(lambda x, g: geodesic_update(x.expand(5, 4), g), (x, g))


def test_decays():
    assert [update_decay("none", i, 4) for i in range(4)] == [1, 1, 1, 1]
    assert [update_decay("harmonic", i, 4) for i in range(4)] == [1, 1 / 2, 1 / 3, 1 / 4]
    sqrt = [update_decay("sqrt", i, 4) for i in range(4)]
    assert sqrt == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5], abs=1e-15)
    assert [update_decay("linear", i, 4) for i in range(4)] == [1, 0.75, 0.5, 0.25]
    assert all(type(update_decay(name, 1, 4)) is float for name in DECAYS)


@pytest.mark.parametrize("call, word", [
    (lambda: update_decay("cosine", 0, 4), "harmonic"),
    (lambda: update_decay("sqrt", 4, 4), "0..3"),
    (lambda: update_decay("sqrt", -1, 4), "-1"),
    (lambda: GeoNorm(max_angle=0.0), "max_angle"),
    (lambda: GeoNorm(max_angle=4.0), "pi"),
    (lambda: GeoNorm(p=0.0), "p must"),
    (lambda: GeoNorm(p=math.nan), "p must")])
def test_bad_values_raise_in_words(call, word):
    with pytest.raises(ValueError, match=word):
        call()


def test_module_has_two_scalars_and_uses_them():
    """They have the shape (1,), since FSDP2 refuses tensors without a dimension."""
    step = GeoNorm(0.25, 1.0, 2.0)
    assert {name: p.tolist() for name, p in step.named_parameters()} == {"scale": [1], "bias": [0]}
    torch.manual_seed(0)
    x, g = torch.randn(4, 16), torch.randn(4, 16)
    torch.nn.init.constant_(step.scale, 0.5)
    torch.nn.init.constant_(step.bias, 0.2)
    expected, _ = restated(x, g, 0.5, 0.2, 0.25, 1.0, 2.0)
    assert torch.allclose(step(x, g).double(), expected, atol=1e-6)


# ------------------------------------------------------------ Pre and Post as steps on the sphere

def N(z: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(z, z.shape[-1:], eps=1e-30)


def length(z: torch.Tensor) -> torch.Tensor:
    return z.norm(dim=-1, keepdim=True)


def split(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a and v of g = a x + v, v tangent at x."""
    a = (g * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
    return a, g - a * x


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """x on the sphere of radius sqrt(16) = 4, and tangents v, |v|/|x| from 1e-6 to 0.75 < pi/4."""
    torch.manual_seed(0)
    x, g = torch.randn(2, 50, 16, dtype=torch.float64)
    sizes = torch.logspace(-6, math.log10(0.75), 50, dtype=torch.float64)[:, None]
    return N(x), N(split(x, g)[1]) * sizes


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-12):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_post_is_a_sphere_step():
    """N(x + g) is the sphere step with p = 1; the part a x of g only makes it a step by v/(1 + a).

    True for a > -1: beyond, x + g points away from x, and the angle is the atan2 of its parts.
    """
    x, v = points()
    close(N(x + v), geodesic_update(x, v, p=1.0))
    a = torch.linspace(-0.9, 3, 50, dtype=torch.float64)[:, None]
    v = v * (1 + a).clamp(max=1)            # |v|/((1 + a)|x|) stays below the clamp
    close(N(x + a * x + v), geodesic_update(x, v / (1 + a), p=1.0))
    close(angle(x, N(x + a * x + v)), torch.atan(length(v) / ((1 + a) * length(x)))[:, 0])
    close(geodesic_update(x, a * x + v, p=1.0), N(x + v))       # geo looks only at v
    for a in (-1.0, -1.5, -3.0):
        turn = torch.atan2(length(v), (1 + a) * length(x))[:, 0]
        close(angle(x, N(x + a * x + v)), turn, 1e-9)


def test_flags_that_make_geo_post():
    """p = 1 needs the clamp out of the way: with it, no turn passes atan(pi/4) = 38.1 degrees."""
    x, v = points()
    v = v * torch.linspace(0.1, 4, 50, dtype=torch.float64)[:, None]
    turned = geodesic_update(x, v, p=1.0, max_angle=math.pi)
    far = (length(v) < math.pi * length(x))[:, 0]
    close(turned[far], N(x + v)[far])
    capped = geodesic_update(x, 100 * v, p=1.0)
    assert angle(x, capped).max() <= math.atan(math.pi / 4) + 1e-12


def test_orders_of_agreement():
    """Post and the geodesic agree to first order in |g|, and to second where g is tangent."""
    x, v = points()
    a = torch.linspace(-0.5, 0.5, 50, dtype=torch.float64)[:, None]
    v = 4 * v / length(v)

    def gap(size, a):
        g = size * (a * x + v)
        return (N(x + g) - geodesic_update(x, g)).norm()
    assert gap(1e-2, a) / gap(1e-3, a) == pytest.approx(100, rel=0.05)
    assert gap(1e-2, 0 * a) / gap(1e-3, 0 * a) == pytest.approx(1000, rel=0.05)


def test_pre_is_a_sphere_step():
    """Under Pre the direction u of a stream moves as Post's does, with f divided by rms(x)."""
    x, v = points()
    u, v = x / 4, v / 8
    r = torch.linspace(-0.3, 2, 50, dtype=torch.float64)[:, None]
    f = r * u + v                           # f(N(x)) does not know the length s of x = s u
    for s in (1.0, 2.0, 4.0):
        y = s * u + f
        rms = (s * u).square().mean(-1, keepdim=True).sqrt()
        close(y / length(y), (u + f / s) / length(u + f / s))
        close(N(y), N(N(s * u) + f / rms))          # Post's projection, on its sphere of radius 4
        a, tangent = split(s * u, f)
        close(y / length(y), geodesic_update(u, tangent / ((1 + a) * s), p=1.0))
        close(angle(u, y).tan(), (length(v) / (s + r))[:, 0])
        close(angle(u, s * u + v).tan() * s, length(v)[:, 0])   # twice the length, half the turn


def test_appendix_b():
    """arXiv 2601.22095, appendix B: Pre divided by sqrt(k+1) after its k-th sublayer.

    y' = sqrt(k/(k+1)) y + f(N(y))/sqrt(k+1) has Pre's directions exactly, whatever f is. It is a
    turn by atan(1/sqrt(k)) if f is orthogonal to y and as long.
    """
    torch.manual_seed(0)
    x = torch.randn(20, 16, dtype=torch.float64)
    y = x.clone()
    for k in range(1, 9):
        matrix = torch.randn(16, 16, dtype=torch.float64)
        x = x + N(x) @ matrix
        y = math.sqrt(k / (k + 1)) * y + N(y) @ matrix / math.sqrt(k + 1)
        close(N(x), N(y))
        close(x / math.sqrt(k + 1), y)
    for k in range(1, 9):
        _, f = split(y, torch.randn(20, 16, dtype=torch.float64))
        f = f * length(y) / length(f)
        turned = math.sqrt(k / (k + 1)) * y + f / math.sqrt(k + 1)
        close(length(turned), length(y))
        close(angle(y, turned), torch.full((20,), math.atan(1 / math.sqrt(k)), dtype=torch.float64))
        theta = math.atan(1 / math.sqrt(k))
        close(turned, math.cos(theta) * y + math.sin(theta) * f)


def test_appendix_b_trains_as_pre():
    """Both forms from one start, 30 steps of AdamW: the losses are equal up to RMSNorm's eps."""
    def appendix_b(residual, k, y, *context):
        update = residual.f(residual.norm_in(y), *context)
        return math.sqrt(k / (k + 1)) * y + update / math.sqrt(k + 1)

    torch.manual_seed(0)
    tokens = torch.randint(20, (30, 4, 17))
    losses = {}
    for form in ("pre", "appendix B"):
        torch.manual_seed(1)
        model = GPT(GPTConfig(16, 20, n_layer=3, n_head=2, n_embd=16, norm="pre", entry="norm"))
        model.double()
        if form == "appendix B":
            sublayers = [module for module in model.modules() if isinstance(module, Residual)]
            for k, residual in enumerate(sublayers, 1):
                residual.forward = partial(appendix_b, residual, k)
        optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-2)
        losses[form] = []
        for batch in tokens:
            loss = model.loss(batch[:, :-1], batch[:, 1:])
            losses[form].append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses["appendix B"] == pytest.approx(losses["pre"], abs=1e-5)
    assert abs(losses["pre"][-1] - losses["pre"][0]) > 0.01


def test_residuals_are_sphere_steps():
    """model.Residual itself, up to RMSNorm's eps: Post's update and the direction of Pre's.

    And Post is geo with p = 1 and no decay where the sublayer's output is tangent.
    """
    x, _ = points()
    f = nn.Linear(16, 16, bias=False).double()
    shape = dict(block_size=16, vocab_size=300, n_layer=2, n_head=2, n_embd=16)
    pre, post, geo = (
        Residual(GPTConfig(**shape, norm=norm, decay="none", geo_p=1.0), 1, f).double()
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
