"""The exercises: what `exercises.py start` lays out, and what `exercises.py check` looks at.

For teachers. An exercise of your own, say number 11, takes four steps:

1. exercises.py: a line in EXERCISES with its title, its times, and the functions to cut out.
2. Here: its text in TASKS, and in FILES the files that the student fills in, if there are any.
3. Here: one function check_11_NAME(program) per property; with @each_placement, it is called for
   each of the four, and each that fails has its line. program("model") is the student's
   model.py, program("test_model") our tests on the student's model.py, and program.folder is the
   folder. Where one of our tests already checks the property, call it with `holds`. The message of
   an assert is all that the student reads, one line: say which property is violated and by how
   much, never what to write. Files of answers are read by `answers`.
4. test_exercises.py: a solution, which must pass, and two typical wrong answers, which must fail
   with a message that names the property.

A student's code runs here as any program does, so check only what you would run yourself.
"""
import csv
import importlib
import io
import itertools
import math
import re
import statistics
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.gradcheck import GradcheckError

TASKS, FILES = {}, {}
NAMES = ("pre", "post", "peri", "geo")
each_placement = pytest.mark.parametrize("norm", NAMES)


class Program:
    """The modules of a folder by name, imported afresh; our tests get the same modules.

    A context manager: afterwards this process has the modules back that it had before.
    """

    def __init__(self, folder: Path):
        self.folder, here = folder, Path(__file__).parent
        self.own = {path.stem for place in (folder, here) for path in place.glob("*.py")}
        self.own = (self.own | {"data"}) - {Path(__file__).stem}
        self.path = [str(folder), str(here), *sys.path]

    def swap(self, modules: dict) -> dict:
        """Put these modules in the place of all that are named as ours, and return those."""
        found = [name for name in sys.modules if name.partition(".")[0] in self.own]
        found = {name: sys.modules.pop(name) for name in found}
        sys.modules.update(modules)
        before = [*sys.path]
        sys.path[:] = self.path
        self.path = before
        importlib.invalidate_caches()
        return found

    def __enter__(self):
        self.before = self.swap({})
        return self

    def __call__(self, name: str):
        """Import the module; the student reads in which line it is no Python."""
        try:
            return importlib.import_module(name)
        except SyntaxError as error:
            pytest.fail(f"{Path(error.filename).name}, line {error.lineno}: {error.msg}",
                        pytrace=False)

    def __exit__(self, *error):
        self.swap(self.before)


@pytest.fixture(scope="module")
def program():
    """The student's folder is the one that pytest is started in."""
    with Program(Path.cwd()) as program:
        yield program


def holds(claim: str, test, *args, gap: str = "it is {} away"):
    """Call one of our tests; if it fails, the student reads the claim, and by how much.

    claim: what must be so.  gap: for a test that compares a distance with a bound.
    """
    try:
        test(*args)
    except (AssertionError, GradcheckError) as error:
        # pytest shows what was compared, as in: assert tensor(0.3908, grad_fn=...) < 1e-05
        seen = str(error).partition("\n")[0]
        seen = re.fullmatch(r"assert (?:tensor\()?([^,() ]+)(?:[,)].*)? <=? (\S+)", seen)
        if seen:
            claim += f"; {gap.format(seen[1])}, and {seen[2]} is allowed"
        raise AssertionError(claim) from None


def answers(path: Path) -> dict[str, str]:
    """The lines `question: answer` of a text file in lower case; # begins a comment."""
    found = {}
    for line in path.read_text(encoding="utf-8-sig").lower().splitlines():
        question, colon, answer = line.partition("#")[0].partition(":")
        if colon:
            found[question.strip()] = answer.strip()
    return found


def answer(path: Path, question: str) -> str:
    """One answer; a file in which it is missing fails."""
    found = answers(path).get(question.lower(), "")
    assert found, f"{path.name}: there is no answer after `{question}:`"
    return found


def rms(x: torch.Tensor) -> float:
    """The root of the mean square of all numbers of x."""
    return x.square().mean().sqrt().item()


def random(*shape: int) -> torch.Tensor:
    """The same float64 numbers each time, normal, and not those of our tests."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------- 1. turn a vector

TASKS[1] = """
Write the body of `geodesic_update` in geonorm.py: the three steps at the top of that file, with
scale, bias, decay, max_angle and p as its docstring says. A sublayer may propose nothing: what the
docstring says about g = 0 matters. The default p is infinite: there the formula with atan is a
limit, theta itself. Not needed here: half precision, x = 0, and a g that is parallel to x.
"""


def update_of(program):
    """The student's geodesic_update; the other checks wait while its default p gives nan."""
    update = program("geonorm").geodesic_update
    if nan_at_the_default_p(update):
        pytest.skip("with p = inf, x' is nan")
    return update


def nan_at_the_default_p(update) -> bool:
    """Whether p = inf loses an x' that p = 2 has."""
    x, g = random(2, 5, 16)
    return update(x, g).isnan().any().item() and not update(x, g, p=2.0).isnan().any()


def turns(program):
    """The settings that our tests try, in float64: words, x, x', and the right x' and theta."""
    tests, update = program("test_geonorm"), update_of(program)
    x, g = random(2, 64, 16)
    g = g * torch.logspace(-2, 1, 64, dtype=torch.float64)[:, None]
    for setting in tests.SETTINGS:
        words = ", ".join(f"{name} {value:.3g}" for name, value in setting.items())
        yield (words or "the defaults", x, update(x, g, **setting),
               *tests.restated(x, g, **setting))


def check_1_default_p(program):
    assert not nan_at_the_default_p(program("geonorm").geodesic_update), (
        "with the default p = inf, x' is nan: inf * atan(theta / inf) is inf * 0")


def check_1_example(program):
    x, g = torch.tensor([[2.0, 0, 0, 0], [7.0, math.pi / 3, 0, 0]], dtype=torch.float64)
    seen = update_of(program)(x, g)
    assert (seen - torch.tensor([3 ** 0.5, 1, 0, 0])).abs().max() < 1e-6, (
        "the four numbers at the top of geonorm.py: (2, 0, 0, 0) must become "
        f"(1.732, 1, 0, 0), not ({', '.join(f'{number:.4g}' for number in seen.tolist())})")
    holds("max_angle: g = (0, 1e6, 0, 0) must turn x = (2, 0, 0, 0) by 45 degrees, pi/4",
          program("test_geonorm").test_by_hand)


def check_1_length(program):
    for words, x, y, *_ in turns(program):
        ratio = y.norm(dim=-1) / x.norm(dim=-1)
        assert (ratio - 1).abs().max() < 1e-9, (
            f"the length must stay, |x'| = |x|; with {words}, |x'|/|x| is between "
            f"{ratio.min():.4g} and {ratio.max():.4g}")


def check_1_angle(program):
    for words, x, y, _, theta in turns(program):
        angle = program("test_geonorm").angle(x, y)
        gap = (angle - theta.abs()).abs()
        i = gap.argmax()
        assert gap.max() < 1e-6, (
            f"the angle between x and x' must be theta; with {words}, it is {angle[i]:.4f} "
            f"radians where theta is {theta[i]:.4f}")


LAST_CLAMP = (      # a long g, scale, bias, decay and max_angle, and the turn that they give
    (dict(scale=2.0, bias=0.5, max_angle=0.2), 0.2), (dict(bias=-2.0), -math.pi / 4),
    (dict(scale=2.0, max_angle=1.2), 1.2), (dict(scale=2.0, decay=0.5), math.pi / 4),
    (dict(scale=-3.0, decay=0.5, max_angle=0.2), -0.2))


def check_1_last_clamp(program):
    update = update_of(program)
    x, g = torch.tensor([[2.0, 0, 0, 0], [7.0, 100.0, 0, 0]], dtype=torch.float64)
    for setting, want in LAST_CLAMP:
        y = update(x, g, **setting)
        seen = math.atan2(y[1], y[0])
        words = ", ".join(f"{name} {value:g}" for name, value in setting.items())
        assert abs(seen - want) < 1e-9, (
            f"the last clamp, to +-max_angle: with {words}, a long g must turn x by {want:.4f} "
            f"radians; here it turns it by {seen:.4f}")


def check_1_tangent(program):
    update = update_of(program)
    x, g = random(2, 64, 16)
    gap = (update(x, g + 3 * x) - update(x, g)).abs().max()
    assert gap < 1e-9, (
        "v must be orthogonal to x, so what g has along x does not count; but adding 3x to g "
        f"moves x' by {gap:.4g}")


def check_1_direction(program):
    for words, x, y, want, _ in turns(program):
        gap = (y - want).norm(dim=-1) / x.norm(dim=-1)
        assert gap.max() < 1e-6, (
            f"x' must be on the great circle through x and v, on v's side (theta > 0); with "
            f"{words}, x' is up to {gap.max():.3g} |x| away from there")


def check_1_no_move(program):
    update = update_of(program)
    for bias in (0.0, 0.1):
        x, g = random(2, 3, 8)
        g[1] = 0
        x.requires_grad_()
        g.requires_grad_()
        y = update(x, g, scale=0.8, bias=bias, decay=0.5)
        moved = (y[1] - x[1]).norm().item()
        assert moved < 1e-9, f"no move at g = 0: with bias {bias}, x' is {moved:.4g} away from x"
        y.sum().backward()
        bad = sum((~t.grad.isfinite()).sum().item() for t in (x, g))
        assert not bad, (f"finite gradient at g = 0: with bias {bias}, {bad} of the 48 numbers "
                         "of the gradients in x and g are nan or inf")

        # A sublayer that starts with no output must be able to learn.
        row, got = x[1].detach(), g.grad[1]
        want = 0.4 * (1 - row.sum() / (row @ row) * row)
        assert (got - want).norm() < 1e-6, (
            f"gradient at g = 0: with bias {bias}, the gradient of x'.sum() in g has the length "
            f"{got.norm():.4g}; by the docstring's limit it is {want.norm():.4g}")


def check_1_edges(program):
    update = update_of(program)
    for size, bias in itertools.product((0.0, 1e-8, 1.0, 1e6), (0.0, 0.1)):
        x, g = random(2, 4, 384).float()
        leaves = [x, size * F.normalize(g, dim=-1), torch.ones(1), torch.tensor([bias])]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        y = update(*leaves)
        ratio = y.norm(dim=-1) / x.norm(dim=-1)
        ratio = ratio[(ratio - 1).abs().argmax()].item()
        gradients = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(
            y.sum(), leaves, allow_unused=True, materialize_grads=True)])
        bad = (~gradients.isfinite()).sum().item()
        assert abs(ratio - 1) <= 1e-6 and not bad, (
            f"where |g| is {size:g} and the bias is {bias}, |x'| must be |x| and the gradients "
            f"finite; here |x'|/|x| is {ratio:.7g} and {bad} of {len(gradients)} gradients are "
            "nan or inf")


# ---------------------------------------------------------------------------------- 2. four lines

TASKS[2] = """
Write two functions of model.py: `edge_norms`, which makes the norm before the first block and the
one after the last, and `Residual.forward`, one sublayer. The table in the docstring of `Residual`
says everything, d included (README's leaves it out); its __init__ has already made d, `self.decay`,
and the norms of a sublayer. `nn.Identity()` is a norm that does nothing. If `config.entry` is
"none" or "norm" instead of "own", it replaces the table's column: by nothing, or by N without gain.
"""
EDGES = {"pre": ("nothing", "N"), "post": ("N", "nothing"), "peri": ("N", "N"),
         "geo": ("N without gain", "N")}


def edge(module: nn.Module) -> str:
    """What a module does to a stream of RMS 3, in the words of Residual's table."""
    size = rms(module(3 * F.rms_norm(torch.randn(1, 1, 16), (16,))))
    if not list(module.parameters()):
        return {3: "nothing", 1: "N without gain"}.get(round(size, 3), f"RMS 3 becomes {size:.3g}")
    return "N" if round(size, 3) == 1 else f"RMS 3 becomes {size:.3g}"


def small(model, norm: str, **changes):
    """The configuration of a small model of the student's."""
    return model.GPTConfig(16, 70, 3, 2, 16, norm=norm, **changes)


class Sublayer(nn.Module):
    """A matrix in place of attention, which must receive its other argument, too."""

    def __init__(self, norm: str):
        super().__init__()
        self.norm, self.matrix = norm, 0.15 * random(16, 16)    # short enough for geo's max_angle

    def forward(self, x, factor=None):
        assert factor is not None, (f"{self.norm}: f must receive the other arguments of forward "
                                    "(*context), but it is called with 1 argument")
        return factor * x @ self.matrix


@each_placement
def check_2_edge_norms(program, norm):
    model = program("model")
    places = "before the first block", "after the last block"
    words = {"own": EDGES[norm][0], "none": "nothing", "norm": "N without gain"}
    for entry, first in words.items():
        made = model.edge_norms(small(model, norm, entry=entry))
        for place, module, want in zip(places, made, (first, EDGES[norm][1])):
            assert edge(module) == want, (
                f"{norm} with entry={entry}: {place} the table has {want}, here it is: "
                f"{edge(module)}")


def from_table(norm: str, place: nn.Module, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """One sublayer as Residual's table has it: d = 1/2, context 0.7, and this gain."""
    def N(z):
        return z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def f(z):
        return 0.7 * z @ place.f.matrix

    if norm == "pre":
        return x + f(N(x)) / 2
    if norm == "post":
        return N(x + f(x) / 2)
    if norm == "peri":
        return x + N(f(N(x))) / 2
    return place.step(x, f(x))


@torch.no_grad()
def check_one_sublayer(program, norm: str):
    """Fail with numbers unless a sublayer's result is that of its line in the table."""
    model = program("model")
    x, gain = 2 * random(2, 5, 16), torch.linspace(0.5, 1.5, 16, dtype=torch.float64)
    place = model.Residual(small(model, norm, decay="harmonic"), 1, Sublayer(norm)).double()
    for name, p in place.named_parameters():
        if "norm" in name:      # gains of 1 would hide a norm's gain
            p.copy_(gain)
    seen, want = place(x, 0.7), from_table(norm, place, x, gain)
    gap = (seen - want).abs().max().item()
    assert gap < 1e-6, (
        f"{norm}: one sublayer must be its line of the table; at d = 0.5 it turns a stream of RMS "
        f"{rms(x):.3g} into one of RMS {rms(seen):.3g}, and the table into one of RMS "
        f"{rms(want):.3g}; the two streams are up to {gap:.3g} apart")


def check_whole_model(program, norm: str):
    """Fail with numbers unless the model's logits and norms are those of its line."""
    tests = program("test_model")
    holds(f"{norm}: the whole model must be what its line of the table says",
          tests.test_placements_are_their_formulas, norm, "own", "own", gap="its output is {} away")
    holds(f"{norm}: the model must have the norms of its line of the table, and no others",
          tests.test_only_its_own_norms_exist, norm)


@each_placement
def check_2_sublayer(program, norm):
    check_one_sublayer(program, norm)


@each_placement
def check_2_whole_model(program, norm):
    check_whole_model(program, norm)


# ---------------------------------------------------------------------------------- 3. one sphere

TASKS[3] = """
Post-Norm and Pre-Norm are turns on the sphere, just as GeoNorm is. one_sphere.py has three
functions to fill in; the docstring of each says what must hold, to 1e-12 in float64. Pencil and
paper first: split g into a part along x and a part v across, and draw the triangle of x, g and
x + g.
"""
FILES[3] = {"one_sphere.py": '''
"""Post and Pre as turns of a point on a sphere. N(z) = z / rms(z): RMSNorm without its gain.

x and g: (..., C), the stream and what a sublayer adds to it. Angles: radians, (..., 1).
"""
import math

import torch
from torch import Tensor


def length(z: Tensor) -> Tensor:
    """|z| of each vector: (..., C) -> (..., 1)."""
    return z.norm(dim=-1, keepdim=True)


def turn(x: Tensor, v: Tensor, theta: Tensor) -> Tensor:
    """x turned by theta towards v, which is orthogonal to it: step 3 of geonorm.py. Leave it so."""
    return theta.cos() * x + theta.sin() * length(x) * v / length(v)


def post_step(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Post's N(x + g) as a turn: v and theta such that turn(x, v, theta) = N(x + g).

    x: a point on the sphere of radius sqrt(C), where N puts every vector.
    g: any vector that is not parallel to x; its part along x may point back and be longer than x.
    Returns v, (..., C), orthogonal to x, and theta, (..., 1), between 0 and pi.
    """
    raise NotImplementedError("split g into a x + v; how far does x + g point from x?")


def pre_step(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pre's x + g, seen as a point on the same sphere: turn(u, v, theta) = N(x + g).

    x: a stream of any length.  g: f(N(x)), not parallel to x.
    Returns u, the point on the sphere of radius sqrt(C) in the direction of x; v, orthogonal to
    u; and theta, between 0 and pi.
    """
    raise NotImplementedError("two lines will do, if one of them calls post_step")


def fixed_angle(k: int) -> float:
    """The angle of appendix B of GeoNorm's paper, for the sublayers k = 1, 2, 3, ...

    There, Pre's stream after k sublayers is divided by sqrt(k+1). That changes nothing for a norm
    that reads it, since a norm ignores length. The step is then
    y' = sqrt(k/(k+1)) y + g / sqrt(k+1), and if g is orthogonal to y and as long as y, that is
    turn(y, g, fixed_angle(k)). Returns radians.
    """
    raise NotImplementedError("compare the two factors with those of turn")
'''}


def check_turn(name: str, words: str, x, v, theta, want):
    """Fail with numbers unless turning x by theta towards v gives `want`, and v is tangent."""
    point = "u" if name == "pre_step" else "x"
    along = ((x * v).sum(-1) / x.square().sum(-1)).abs().max().item()
    assert along < 1e-12, (f"{name}: v must be orthogonal to {point}, but there is up to "
                           f"{along:.3g} {point} in it")
    assert theta.shape == (*x.shape[:-1], 1), (f"{name}: theta must have the shape "
                                               f"{(*x.shape[:-1], 1)}, not {tuple(theta.shape)}")
    y = theta.cos() * x + theta.sin() * x.norm(dim=-1, keepdim=True) * F.normalize(v, dim=-1)
    gap = (y - want).norm(dim=-1)
    i = gap.argmax()
    cosine = F.cosine_similarity(x, want, dim=-1)[i].clamp(-1, 1)
    assert gap.max() < 1e-12, (
        f"{name}: the turn must lead to N(x + g). {words}, theta is {theta[i].item():.4f} where "
        f"N(x + g) is {cosine.acos():.4f} radians from x; the points are {gap[i]:.3g} apart")


def check_3_post(program):
    tests, one_sphere = program("test_geonorm"), program("one_sphere")
    x, v = tests.points()
    for a in (0.0, 0.7, -0.6):
        g = a * x + v
        check_turn("post_step", f"For g = {a} x + v", x, *one_sphere.post_step(x, g),
                   tests.N(x + g))


def check_3_post_back(program):
    tests, one_sphere = program("test_geonorm"), program("one_sphere")
    x, v = tests.points()
    for a in (-1.5, -3.0):
        g = a * x + v
        check_turn("post_step", f"For g = {a} x + v, so that x + g points back", x,
                   *one_sphere.post_step(x, g), tests.N(x + g))


def check_3_pre(program):
    tests, one_sphere = program("test_geonorm"), program("one_sphere")
    on_sphere, g = tests.points()[0], random(50, 16)
    for size in (0.5, 1.0, 4.0):
        x = size * on_sphere
        u, v, theta = one_sphere.pre_step(x, g)
        gap = (u - on_sphere).abs().max().item()
        assert gap < 1e-12, (f"pre_step: u must be on the sphere, in the direction of x; for "
                             f"rms(x) = {size} it is {gap:.3g} away")
        check_turn("pre_step", f"For rms(x) = {size}", u, v, theta, tests.N(x + g))


def check_3_fixed_angle(program):
    tests, one_sphere = program("test_geonorm"), program("one_sphere")
    y, v = tests.points()
    g = v * y.norm(dim=-1, keepdim=True) / v.norm(dim=-1, keepdim=True)
    for k in (1, 2, 5, 40):
        theta = float(one_sphere.fixed_angle(k))
        turned = math.cos(theta) * y + math.sin(theta) * g
        gap = (turned - math.sqrt(k / (k + 1)) * y - g / math.sqrt(k + 1)).abs().max().item()
        assert gap < 1e-12, (f"fixed_angle: at k = {k} the turn must be appendix B's step; with "
                             f"{theta:.4f} radians it is {gap:.3g} away")
    holds("appendix B", tests.test_appendix_b)


# --------------------------------------------------------------------------------- 4. five faults

TASKS[4] = """
faulty.py is GeoNorm's step, written in a hurry, with five faults: the kinds of fault that the
listing in GeoNorm's own paper has. Its docstrings say what it should do. Read it, find all five
before you run anything, and mend them. Each has a check of its own; while the module cannot even
be built, the others wait.
"""
FILES[4] = {"faulty.py": '''
"""One sublayer's geodesic step, as geonorm.py's GeoNorm, with five faults to find and mend."""
import math

import torch
from torch import Tensor, nn


class Step(nn.Module):
    """Turn the stream x on its sphere towards a sublayer's output g: x' has the length of x.

    layer       0 for the first, 1, 2, ...
    decay       "sqrt", which is the default, divides the angle by sqrt(layer+1);
                "harmonic" divides it by layer+1
    max_angle   the largest angle before scale, bias and decay, radians

    The angle is (scale * min(|v|/|x|, max_angle) + bias), divided as `decay` says, where v is the
    part of g that is orthogonal to x. scale and bias are learned, and start as 1 and 0. Where
    v = 0, x does not move, whatever the bias.
    """

    def __init__(self, layer: int = 0, decay: str = "square-root",
                 max_angle: float = math.pi / 4):
        super().__init__()
        self.layer, self.decay = layer, decay
        self.max_angle = math.pi / 4
        self.scale = nn.Parameter(torch.tensor([1]))
        self.bias = nn.Parameter(torch.tensor([0]))

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """x and g: (..., C). Returns x', (..., C)."""
        radius = x.norm(dim=-1, keepdim=True)
        v = g - (x * g).sum(-1, keepdim=True) / radius.square() * x
        size = v.norm(dim=-1, keepdim=True)
        theta = self.scale * (size / radius).clamp(max=self.max_angle) + self.bias

        # Deeper layers turn less.
        if self.decay == "harmonic":
            angle = theta / (self.layer + 1)
        elif self.decay == "sqrt":
            theta = theta / math.sqrt(self.layer + 1)

        direction = v / size.clamp(min=1e-12)
        return theta.cos() * x + theta.sin() * radius * direction
'''}


def built(program, *args, **settings) -> nn.Module:
    """The student's module in float64; the checks but the first wait until it can be built."""
    faulty = program("faulty")
    try:
        return faulty.Step(*args, **settings).double()
    except RuntimeError as error:
        pytest.skip(str(error))


def turned_by(program, step: nn.Module, size: float) -> float:
    """By how many radians a proposal of |v|/|x| = size turns x."""
    x = 2 * F.normalize(random(1, 8), dim=-1)
    v = torch.zeros_like(x)
    v[0, 0], v[0, 1] = x[0, 1], -x[0, 0]
    v = 2 * size * F.normalize(v, dim=-1)
    return program("test_geonorm").angle(x, step(x, v)).item()


def check_4_parameters(program):
    try:
        step = program("faulty").Step(0, decay="sqrt")
    except RuntimeError as error:
        pytest.fail(f"scale and bias must be parameters that can be learned; torch says: {error}",
                    pytrace=False)
    x, g = random(2, 5, 8).float()
    step(x, g / 9)[:, 0].sum().backward()
    for name in ("scale", "bias"):
        p = dict(step.named_parameters()).get(name)
        assert p is not None and p.grad is not None and p.grad.abs().sum() > 0, (
            f"{name} must be a parameter that is learned, but its gradient is 0 or missing")


def check_4_max_angle(program):
    for limit in (0.2, 1.2):
        seen = turned_by(program, built(program, 0, decay="sqrt", max_angle=limit), 100.0)
        assert abs(seen - limit) < 1e-6, (
            f"max_angle={limit} must limit the turn to {limit} radians, but a long proposal "
            f"turns x by {seen:.4f}")


def check_4_default_decay(program):
    first, deep = (turned_by(program, built(program, layer), 0.4) for layer in (0, 3))
    assert abs(deep / first - 0.5) < 1e-6, (
        "the default decay is 1/sqrt(layer+1), which at layer 3 is 0.5 of layer 0's turn; "
        f"here it is {deep / first:.3g} of it")


def check_4_harmonic(program):
    first, deep = (turned_by(program, built(program, layer, decay="harmonic"), 0.4)
                   for layer in (0, 3))
    assert abs(deep / first - 0.25) < 1e-6, (
        "harmonic decay is 1/(layer+1), which at layer 3 is 0.25 of layer 0's turn; here it is "
        f"{deep / first:.3g} of it")


def check_4_no_move(program):
    step = built(program, 0, decay="sqrt")
    with torch.no_grad():
        step.bias.fill_(0.3)
    x = random(4, 8)
    y = step(x, torch.zeros_like(x))
    ratio = (y.norm() / x.norm()).item()
    assert abs(ratio - 1) < 1e-6, (
        f"|x'| = |x|, also where v = 0: with g = 0 and a bias of 0.3, |x'|/|x| is {ratio:.4g}")
    gap = (y - x).abs().max().item()
    assert gap < 1e-6, ("no move where v = 0: with g = 0 and a bias of 0.3, x' is "
                        f"{gap:.3g} away from x")


# ------------------------------------------------------------------------ 5. predict, then measure

TASKS[5] = """
Before you run anything, guess, and write the guesses into predictions.txt. Then check, which
measures with `depth_profile` of model.py. The models are new, with random weights, 64 channels
and 4 heads. Gradients are even if the largest gradient norm of a layer, divided by the smallest,
is near 1: the placement where that quotient is lowest is the most even, and the least even is the
one where it is highest. If a guess was wrong, find out why before you change it: the profile is a
function you can call.
"""
QUESTIONS = {4: "most even gradients, 4 layers", 16: "least even gradients, 16 layers"}
KEEPS = {1.0: "stream keeps RMS 1 at the start", 1.5: "stream keeps RMS 1 when every gain is 1.5"}
FILES[5] = {"predictions.txt": f"""
# One of pre, post, peri, geo:
{QUESTIONS[4]}:
{QUESTIONS[16]}:

# The placements whose stream has RMS 1 after every sublayer, to a hundredth: one or several.
{KEEPS[1.0]}:
# Training changes the gains of the norms N. The same with all of them set to 1.5:
{KEEPS[1.5]}:
"""}


def profile(program, norm: str, n_layer: int, gain: float = 1.0) -> list[dict]:
    """depth_profile of a new model whose norms have this gain, on random tokens."""
    model = program("model")
    torch.manual_seed(0)
    gpt = model.GPT(model.GPTConfig(32, 70, n_layer, 4, 64, norm=norm))
    for module in gpt.modules():
        if isinstance(module, nn.RMSNorm) and module.weight is not None:
            nn.init.constant_(module.weight, gain)
    tokens = torch.randint(70, (8, 33))
    return model.depth_profile(gpt, tokens[:, :-1], tokens[:, 1:])


def check_5_gradients(program):
    for n_layer, question in QUESTIONS.items():
        guess = answer(program.folder / "predictions.txt", question)
        assert guess in NAMES, f"`{question}:` one of {', '.join(NAMES)}, not {guess!r}"
        spread = {}
        for norm in NAMES:
            norms = [row["grad_norm"] for row in profile(program, norm, n_layer)]
            spread[norm] = max(norms) / min(norms)
        most = question.startswith("most")
        best = min(spread.values()) if most else max(spread.values())
        assert spread[guess] == best, (
            f"{question}: {guess}'s largest is {spread[guess]:.2f} times its smallest, and "
            f"another placement's are {'more' if most else 'less'} even")


def check_5_rms(program):
    for gain, question in KEEPS.items():
        text = answer(program.folder / "predictions.txt", question)
        guess = set(text.replace(",", " ").replace(" and ", " ").split())
        assert guess <= set(NAMES), f"`{question}:` names from {', '.join(NAMES)}, not {text!r}"
        for norm in NAMES:
            sizes = [row["stream_rms"] for row in profile(program, norm, 4, gain)]
            keeps = max(abs(size - 1) for size in sizes) < 0.01
            if norm in guess:
                assert keeps, (f"{question}: not {norm}, whose RMS is between {min(sizes):.2f} "
                               f"and {max(sizes):.2f} after the sublayers of 4 layers")
            else:
                assert not keeps, f"{question}: {len(guess)} named, but there is one more"


# ------------------------------------------------------------------------- 6. save it with one flag

TASKS[6] = """
In this folder, run this (half a minute; the first time it also prepares its text, 24 MB):

    python train.py {command} --out_dir out/none

It learns nothing: its val loss is about what the frequencies of the bytes give, 3.3 nats. Find one
flag that mends it, other than {fixed}, and write it with its value
into flag.txt. The check trains both; yours must end below 0.92 of what the byte frequencies give,
about 3.05 nats. The list of flags: `python train.py --help`.
"""
SIXTEEN = {"--norm": "geo", "--decay": "none", "--n_layer": "16", "--n_embd": "48", "--n_head": "2",
           "--block_size": "32", "--batch_size": "8", "--max_iters": "200", "--warmup_iters": "50",
           "--learning_rate": "0.006", "--eval_iters": "20", "--device": "cpu", "--seed": "1"}
FIXED = ("--norm", "--n_layer", "--max_iters")
TASKS[6] = TASKS[6].format(fixed="--norm, --n_layer and --max_iters", command=" ".join(
    word for pair in SIXTEEN.items() for word in pair))
FILES[6] = {"flag.txt": """
# One flag and its value, as in: --dropout 0.1
"""}


def one_flag(path: Path) -> dict[str, str]:
    """The flag of flag.txt and its value."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    words = [word for line in lines for word in line.partition("#")[0].replace("=", " ").split()]
    assert len(words) == 2 and words[0].startswith("--"), (
        "flag.txt must hold one flag, which starts with --, and its value; it holds: "
        f"{' '.join(words) or 'nothing'}")
    assert words[0] not in FIXED, f"{words[0]} must stay {SIXTEEN[words[0]]}: it is the question"
    return {words[0]: words[1]}


def trained(program, settings: dict[str, str], flag: dict[str, str]) -> tuple[float, float]:
    """Last val loss of a run, nan if it diverged, and what the byte frequencies give.

    flag: what the student adds to the settings, and reads if train.py ends with an error.
    """
    train, compare = program("train"), program("data.compare")
    name = " ".join(*flag.items()) if flag else "the command of the task"
    settings = settings | flag
    with tempfile.TemporaryDirectory() as out, redirect_stderr(io.StringIO()) as errors:
        words = [word for pair in settings.items() for word in pair] + ["--out_dir", out]
        try:
            runs = train.parse_args(words)
        except SystemExit:
            line = errors.getvalue().strip().splitlines()[-1].partition(": ")[2]
            pytest.fail(f"train.py refuses {name}: {line}", pytrace=False)
        try:
            train.main(runs)
        except (SystemExit, Exception) as error:
            line = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            if not str(error).startswith("every run diverged"):
                pytest.fail(f"train.py stopped with {name}: {line[0]}", pytrace=False)
        run = compare.read_run(next(iter(runs)))
    loss = math.nan if run.val_loss is None else run.val_loss
    return loss, run.record["data"]["unigram_loss"]


def verdict(none: float, mended: float, frequencies: float, flag: str):
    """Fail unless the run without decay learned nothing and the mended one something."""
    assert not none < 0.95 * frequencies, (
        f"without decay the val loss is {none:.3f}, below the {frequencies:.3f} of the byte "
        "frequencies: here nothing needs mending; tell your teacher")
    assert mended < 0.92 * frequencies, (
        f"the model must learn: with {flag} the val loss is {mended:.3f} (without {none:.3f}), "
        f"and must end below {0.92 * frequencies:.3f}; the byte frequencies give {frequencies:.3f}")


def check_6_learns(program):
    flag = one_flag(program.folder / "flag.txt")
    mended, frequencies = trained(program, SIXTEEN, flag)
    none, _ = trained(program, SIXTEEN, {})
    verdict(none, mended, frequencies, " ".join(*flag.items()))


# -------------------------------------------------------------------- 7. one rate is no comparison

TASKS[7] = """
data/results/earlier-layers16.csv has one line per run: norm, learning_rate, seed, val_loss (nats).
Rank pre, post, peri and geo in ranking.txt: for each learning rate, the best first, by the mean
val_loss over the seeds, runs that learned nothing included (val_loss above 3.2); then with each
placement at its own best rate, the one with its lowest mean. A run that diverged may have no
val_loss: it counts as infinite, and so does the mean of its rate. Use a few lines of Python, or a
spreadsheet. If the columns decay and entry are there, count only runs in which both are `own`. Two
means less than 0.01 apart may be in either order. Which placement wins at which rate? What would a
paper have said that had tried only one rate?
"""
FILES[7] = {"ranking.txt": """
# One line per learning rate, and one for each placement at its own best. The form of a line:
# 0.5: geo post peri pre
own best:
"""}
TIE = 0.01


def plain(row: dict[str, str]) -> bool:
    """Whether a run is one of the four placements as the table has it."""
    own = {"decay": {"own", "sqrt" if row["norm"] == "geo" else "none"},
           "entry": {"own", {"pre": "none", "geo": "norm"}.get(row["norm"])},
           "geo_decay": {"sqrt"}, "geo_p": {"inf"}}
    return row["norm"] in NAMES and all(row.get(name, "") in {"", *words}
                                        for name, words in own.items())


def runs_of(folder: Path) -> dict[str, dict[float, dict[str, float]]]:
    """The val losses of the plain runs: [norm][learning rate][seed]; a diverged run is inf."""
    runs = {}
    with open(folder / "data/results/earlier-layers16.csv", encoding="utf-8", newline="") as file:
        for row in filter(plain, csv.DictReader(file)):
            loss = float(row["val_loss"] or "inf")
            seeds = runs.setdefault(row["norm"], {}).setdefault(float(row["learning_rate"]), {})
            seeds[row["seed"]] = math.inf if math.isnan(loss) else loss
    return runs


def mean_losses(folder: Path) -> dict[str, dict[float, float]]:
    """The mean over the seeds: [norm][learning rate]."""
    return {norm: {rate: statistics.fmean(seeds.values()) for rate, seeds in rates.items()}
            for norm, rates in runs_of(folder).items()}


def check_ranking(what: str, text: str, means: dict[str, float]):
    """Fail with numbers unless the names in the text are in the order of their means."""
    names = text.replace(",", " ").replace(">", " ").split()
    assert sorted(names) == sorted(means), (
        f"`{what}:` each of {', '.join(means)} once, the best first, not {text!r}")
    for i, better in enumerate(names):
        for worse in names[i + 1:]:
            assert means[better] <= means[worse] + TIE, (
                f"{what}: {better} is before {worse}, but its mean val loss is "
                f"{means[better] - means[worse]:.3f} higher")


def check_7_each_rate(program):
    means, found = mean_losses(program.folder), {}
    for question, text in answers(program.folder / "ranking.txt").items():
        try:
            found[float(question)] = text
        except ValueError:
            assert question == "own best", f"ranking.txt: {question!r} is no learning rate"
    common = set.intersection(*(set(rates) for rates in means.values()))
    assert set(found) >= common, (
        f"ranking.txt: {len(common & set(found))} of the {len(common)} learning rates are ranked")
    for rate in sorted(common):
        check_ranking(f"{rate:g}", found[rate], {norm: means[norm][rate] for norm in means})


def check_7_own_best(program):
    means = mean_losses(program.folder)
    check_ranking("own best", answer(program.folder / "ranking.txt", "own best"),
                  {norm: min(rates.values()) for norm, rates in means.items()})


# ----------------------------------------------------------------------------- 8. how many seeds

TASKS[8] = """
data/results/earlier-layers16.csv has one line per run: norm, learning_rate, seed, val_loss (nats).
Take geo and pre, each at its own best rate (lowest mean val_loss; if there are columns decay and
entry, only runs with `own`), and pair them by seed. How sure is the difference, and how many seeds
would make it sure to 0.01? The half width of a 95% interval is t * s / sqrt(n): n pairs, s the
standard deviation of the n differences (divided by n - 1), and t Student's for n - 1 degrees of
freedom: STUDENT_T in data/compare.py. Write numbers into seeds.txt. The last line of seeds.txt
shows why three seeds are few.
"""
FILES[8] = {"seeds.txt": """
# geo minus pre, nats per token
mean difference:
standard deviation of the differences:
half width with the seeds of the file:
# The smallest number of pairs with which the half width is at most 0.01, if s stays what it is:
seeds needed:
# How many times wider is t for two degrees of freedom than 1.96, its limit for many seeds?
t with 2 degrees of freedom divided by 1.96:
"""}


def differences(folder: Path) -> list[float]:
    """geo minus pre by seed, each at its own best rate."""
    means, runs = mean_losses(folder), runs_of(folder)
    geo, pre = (runs[norm][min(means[norm], key=means[norm].get)] for norm in ("geo", "pre"))
    return [geo[seed] - pre[seed] for seed in geo if seed in pre]


def half_width(program, s: float, n: int) -> float:
    """Half of the 95% interval of a mean of n differences with standard deviation s."""
    table = program("data.compare").STUDENT_T
    t = table[n - 2] if n - 2 < len(table) else 1.96
    return t * s / math.sqrt(n)


def number(folder: Path, question: str) -> float:
    """A number of seeds.txt."""
    text = answer(folder / "seeds.txt", question)
    try:
        return float(text)
    except ValueError:
        pytest.fail(f"`{question}:` must be a number, not {text!r}", pytrace=False)


def close(folder: Path, question: str, want: float):
    """Fail with the factor between the student's number and ours, unless they agree to 2%."""
    seen = number(folder, question)
    assert abs(seen / want - 1) < 0.02, (
        f"{question}: {seen:g} is {seen / want:.2f} times what the runs give")


def check_8_mean(program):
    close(program.folder, "mean difference", statistics.fmean(differences(program.folder)))


def check_8_deviation(program):
    close(program.folder, "standard deviation of the differences",
          statistics.stdev(differences(program.folder)))


def check_8_half_width(program):
    pairs = differences(program.folder)
    close(program.folder, "half width with the seeds of the file",
          half_width(program, statistics.stdev(pairs), len(pairs)))


def check_8_seeds(program):
    s = statistics.stdev(differences(program.folder))
    seen = int(number(program.folder, "seeds needed"))
    assert seen >= 2, f"seeds needed: {seen} difference has no standard deviation"
    width = half_width(program, s, seen)
    assert width <= 0.01, f"seeds needed: with {seen} the half width is {width:.4f}, above 0.01"
    assert seen == 2 or half_width(program, s, seen - 1) > 0.01, (
        f"seeds needed: fewer than {seen}, whose half width is {width:.4f}, are enough")


def check_8_two_degrees(program):
    close(program.folder, "t with 2 degrees of freedom divided by 1.96",
          program("data.compare").STUDENT_T[1] / 1.96)


# ----------------------------------------------------------------------- 9. a placement of your own

TASKS[9] = """
OLMo 2 (arXiv 2501.00656) norms what a sublayer adds, and not what it reads: x + N(f(x)), N with a
learned gain; nothing before the first block, N after the last. Multiply N(f(x)) by self.decay, as
the table in `Residual` does with d, so that `--decay` works for it too. Make it a fifth word,
`reordered`, so that `python train.py --norm reordered` trains it: about five changed lines, all in
model.py. One rule: it must draw no random numbers when it is built, or else one seed does not start
all placements alike.
"""


def reordered(program):
    """The student's model.py, which must know the word."""
    model = program("model")
    assert "reordered" in model.NORMS, (
        f"`reordered` must be a word of --norm; the {len(model.NORMS)} words are: "
        f"{', '.join(model.NORMS)}")
    return model


@torch.no_grad()
def check_9_formula(program):
    model = reordered(program)
    for decay, d in (("own", 1.0), ("harmonic", 0.5)):
        config = small(model, "reordered", decay=decay)
        check_reordered(model.Residual(config, 1, Sublayer("reordered")).double(), decay, d)


def check_reordered(place: nn.Module, decay: str, d: float):
    """Fail with numbers unless the sublayer's result is x + d N(f(x))."""
    norms = [module for module in place.modules() if isinstance(module, nn.RMSNorm)]
    assert len(norms) == 1 and norms[0].weight is not None, (
        f"x + N(f(x)): a sublayer has one norm with a learned gain; here it has {len(norms)}, "
        f"with {sum(p.numel() for p in place.parameters())} numbers to learn for 16 channels")
    norms[0].weight.copy_(torch.linspace(0.5, 1.5, 16))
    x = 2 * random(2, 5, 16)
    g = 0.7 * x @ place.f.matrix
    want = x + d * g / (g.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norms[0].weight
    seen = place(x, 0.7)
    gap = (seen - want).abs().max().item()
    assert gap < 1e-6, (
        f"x + N(f(x)): with --decay {decay}, d is {d:g} at layer 1, and the change of a stream of "
        f"RMS {rms(x):.3g} must have RMS {rms(want - x):.3g}; here it has {rms(seen - x):.3g}, and "
        f"the results are {gap:.3g} apart")


@each_placement
def check_9_others_stay(program, norm):
    reordered(program)
    check_one_sublayer(program, norm)
    check_whole_model(program, norm)


def check_9_edges(program):
    model = reordered(program)
    made = model.edge_norms(small(model, "reordered"))
    for place, module, want in zip(("before the first", "after the last"), made, ("nothing", "N")):
        assert edge(module) == want, (
            f"the edges: {place} block there must be {want}, here it is: {edge(module)}")


def check_9_starts_alike(program):
    reordered(program)
    tests = program("test_model")
    holds("it must draw no random numbers when it is built",
          tests.test_placements_draw_no_random_numbers, "reordered")
    holds("one seed must start all placements with the same weights",
          tests.test_one_seed_starts_all_four_alike)


def check_9_causal(program):
    reordered(program)
    holds("causal: a later token must not change an earlier answer",
          program("test_model").test_causal, "reordered")


def check_9_cache(program):
    reordered(program)
    holds("sampling with the cache must give the logits of the uncached model",
          program("test_model").test_cache_is_the_uncached_forward, "reordered",
          gap="they are {} apart")


def check_9_trains(program):
    reordered(program)
    model, idx = program("test_model").make("reordered").train(), torch.arange(34).view(2, 17)
    optimizer = torch.optim.AdamW(model.param_groups(0.0), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = model.loss(idx[:, :-1], idx[:, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        still = [name for name, p in model.named_parameters() if not p.grad.abs().sum() > 0]
        assert not still, f"every weight must learn; {len(still)} have no gradient: {still[0]}"
        optimizer.step()
    assert losses[3] < losses[0], (f"it must learn: three steps on one batch took the loss from "
                                   f"{losses[0]:.3f} to {losses[3]:.3f}")


# ---------------------------------------------------------------------- 10. sampling with a memory

TASKS[10] = """
When sampling, almost every step runs one new token through the model; the keys and values of the
tokens before it are in a cache. In `Attention.forward` of model.py, write what happens if there is
one. The T new tokens, one or several, are at positions start..start+T-1. Put their k and v into
the cache; let k and v be those of all start+T tokens; and make the mask, (T, start+T), which is
True where a new token may look. What the cache holds after them must not be read. The model then
answers as if it had read the whole text at once.
"""


def check_chunks(program, words: str, chunks: list[int]):
    """Fail with the first position at which cached and uncached logits differ."""
    tests = program("test_model")
    with torch.no_grad():
        model, idx = tests.make("pre"), tests.ids(2, 12)
        want, start = model(idx, idx)[0], 0
        cache = [layer.fill_(math.nan) for layer in model.new_cache(2)]     # nothing may be read
        for size in chunks:
            part = idx[:, start:start + size]
            seen, _ = model(part, part, cache=cache, start=start)
            gap = (seen - want[:, start:start + size]).abs().amax(dim=(0, 2))
            bad = (~(gap < 1e-5)).nonzero()
            assert not len(bad), (
                f"{words}: the logits must be those of the uncached model; at position "
                f"{start + bad[0].item()} of 0 to 11 they are {gap[bad[0]].item():.3g} away")
            start += size


def check_10_prompt(program):
    check_chunks(program, "a prompt of 12 tokens into an empty cache", [12])


def check_10_one_by_one(program):
    check_chunks(program, "one token, then one at a time", [1] * 12)


def check_10_chunks(program):
    check_chunks(program, "chunks of 3, 2 and 7 tokens", [3, 2, 7])


@each_placement
def check_10_placements(program, norm):
    tests = program("test_model")
    holds(f"{norm}: cached and uncached logits must agree",
          tests.test_cache_is_the_uncached_forward, norm, gap="they are {} apart")
    holds(f"{norm} without a cache: a later token must not change an earlier answer",
          tests.test_causal, norm)


def check_10_past_the_context(program):
    test = program("test_sample").test_generate_equals_the_uncached_model
    holds("45 new tokens with a context of 7 must be the uncached model's choices", test, "geo",
          7, 3)
