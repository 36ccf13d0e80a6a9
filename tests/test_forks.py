"""Each published placement in tests/forks: its diff, its place in the program, and its equation."""
import importlib.util
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forks
import depths_figure
import model
import train
from helpers import (REPO, SMALL, PowerCut, assert_same_run, cells, configs, cut_at, datasets,
                     environment, exit_code, files, here, read, refusal)

NAMES = forks.names()
every_fork = pytest.mark.parametrize("name", NAMES)
C, V, T = 16, 40, 12


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """fork(name): the model.py of that placement as a module."""
    modules = {}

    def load(name: str):
        if name not in modules:
            folder = tmp_path_factory.mktemp(name)
            forks.copy_program(name, folder)
            spec = importlib.util.spec_from_file_location(f"model_{name}", folder / "model.py")
            modules[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(modules[name])
        return modules[name]
    yield load
    for module in modules.values():
        del sys.modules[module.__name__]


def gpt(module, norm: str, **settings):
    """A small model in float64, without dropout."""
    shape = dict(block_size=T, vocab_size=V, n_layer=4, n_head=2, n_embd=C) | settings
    torch.manual_seed(1)
    return module.GPT(module.GPTConfig(norm=norm, **shape)).double().eval()


def lively(model):
    """The model with its learned gains, steps and other vectors moved away from their start."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p += 0.3 * torch.rand(p.shape, generator=generator, dtype=p.dtype)
    return model


def tokens():
    return torch.randint(V, (2, T), generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------------- what all must fulfil

@every_fork
def test_diff(name, tmp_path):
    """At most 12 changed lines of model.py, a head that says what it is, and `patch` takes it."""
    text = (forks.FORKS / f"{name}.diff").read_text(encoding="utf-8")
    head = forks.head(name)
    assert 3 <= len(head) <= 6 and max(map(len, head)) <= 100
    assert re.search(r"arXiv \d{4}\.\d{5}|github.com/", " ".join(head))
    assert re.findall(r"^(?:---|\+\+\+) (.*)$", text, re.M) == ["a/model.py", "b/model.py"]
    changed = [line for line in text.splitlines()[len(head) + 2:] if re.match(r"[+-].*\S", line)]
    assert len(changed) <= 12
    assert all(len(line) <= 101 for line in changed)

    forks.copy_program(name, tmp_path / "git")
    if shutil.which("patch") is None:
        return
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "model.py").write_bytes((REPO / "model.py").read_bytes())
    with open(forks.FORKS / f"{name}.diff", "rb") as diff:
        subprocess.run(["patch", "-s", "-p1"], cwd=tmp_path / "patch", stdin=diff, check=True)
    patched = (tmp_path / "patch" / "model.py").read_bytes()
    assert patched == (tmp_path / "git" / "model.py").read_bytes()
    assert patched != (REPO / "model.py").read_bytes()


@every_fork
def test_starts_with_the_shared_weights(name, fork):
    """One seed gives a fork the matrices of `pre`; DeepNorm's own start scales some of them."""
    ours, theirs = gpt(fork(name), name).state_dict(), gpt(fork(name), "pre").state_dict()
    shared = [key for key in theirs if key in ours and theirs[key].dim() == 2]
    assert len(shared) == 1 + 4 * 4
    for key in shared:
        if name == "deepnorm":
            ratio = ours[key].norm(dim=1, keepdim=True) / theirs[key].norm(dim=1, keepdim=True)
            torch.testing.assert_close(ours[key], ratio * theirs[key])
        else:
            assert torch.equal(ours[key], theirs[key]), key


@every_fork
def test_is_causal(name, fork):
    model, idx = lively(gpt(fork(name), name)), tokens()
    other = idx.clone()
    other[:, 7] = (other[:, 7] + 1) % V
    with torch.no_grad():
        a, b = (model(x, targets=x)[0] for x in (idx, other))
    assert torch.equal(a[:, :7], b[:, :7])
    assert (a[:, 7:] != b[:, 7:]).any(-1).all()


@every_fork
def test_cached_and_uncached_logits_agree(name, fork):
    """Sampling token by token with keys and values kept, against the whole context each time."""
    model, idx = lively(gpt(fork(name), name)), tokens()
    cache = model.new_cache(2)
    with torch.no_grad():
        whole = model(idx, targets=idx)[0]
        steps = [model(idx[:, :5], cache=cache)[0]]
        steps += [model(idx[:, t:t + 1], cache=cache, start=t)[0] for t in range(5, T)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 4:])


@every_fork
def test_trains(name, fork):
    """The loss of one batch falls, and every parameter has a part in it."""
    model, idx = gpt(fork(name), name).train(), tokens()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.param_groups(0.0), lr=3e-3)
    losses = []
    for _ in range(25):
        loss = model.loss(idx[:, :-1], idx[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    still = [key for key, p in model.named_parameters() if torch.equal(p, before[key])]
    assert not still


@every_fork
def test_resumes_bit_for_bit(name, fork, tmp_path, monkeypatch):
    """Cut at step 7 and continued from the checkpoint of step 4: the files of a run in one go."""
    module = fork(name)
    monkeypatch.setattr(train, "GPT", module.GPT)
    monkeypatch.setattr(train, "GPTConfig", module.GPTConfig)
    monkeypatch.setattr(train, "depth_profile", module.depth_profile)

    def go(out):
        runs = configs("--out_dir", out, "--seed", 5)
        train.main({path.with_name(name): replace(c, norm=name) for path, c in runs.items()})

    go(tmp_path / "whole")
    with monkeypatch.context() as m, pytest.raises(PowerCut):
        cut_at(m, 7)
        go(tmp_path / "cut")
    go(tmp_path / "cut")
    assert_same_run(tmp_path / "whole" / name, tmp_path / "cut" / name)


# -------------------------------------------------------------------------- each one's own equation

def N(x, gain=1.0):
    """RMSNorm in its own words."""
    return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def tangent(x, g):
    """The part of g across x."""
    return g - (x * g).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True) * x


def residual(module, norm: str, layer: int = 2, **settings):
    """One sublayer with moved gains, its f, which is one matrix, and a stream x, (2, 5, C)."""
    shape = dict(block_size=T, vocab_size=V, n_layer=8, n_head=2, n_embd=C) | settings
    f = nn.Linear(C, C, bias=False)
    nn.init.normal_(f.weight, generator=torch.Generator().manual_seed(4))
    made = module.Residual(module.GPTConfig(norm=norm, **shape), layer, f).double()
    x = torch.randn(2, 5, C, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return lively(made), f, 3 * x


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_none_is_pre_with_the_gains_folded_into_f(fork):
    """x + f(x); on a stream of RMS 1, pre's f(gain * x) is an f whose columns hold the gain."""
    module = fork("none")
    none, f, x = residual(module, "none")
    close(none(x), x + f(x))
    pre, f, x = residual(module, "pre")
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    with torch.no_grad():
        none.f.weight.copy_(f.weight * pre.norm_in.weight)
    torch.testing.assert_close(none(x), pre(x), rtol=1e-5, atol=1e-5)      # N's eps


def test_reordered_ignores_the_length_of_the_update(fork):
    made, f, x = residual(fork("reordered"), "reordered")
    close(made(x), x + N(f(x), made.norm_out.weight))
    before = made(x)
    with torch.no_grad():
        made.f.weight *= 100
    torch.testing.assert_close(made(x), before, rtol=1e-5, atol=1e-5)      # N's eps


def test_sandwich_is_peri_without_the_norm_of_the_embedding(fork):
    """Normalise the embedding's rows by hand, and sandwich's logits are those of peri."""
    module = fork("sandwich")
    peri, sandwich = lively(gpt(module, "peri")), lively(gpt(module, "sandwich"))
    with torch.no_grad():
        peri.entry.weight.fill_(1)
        sandwich.load_state_dict(peri.state_dict(), strict=False)
        head = sandwich.wte.weight.clone()
        stream = N(head)[tokens()]
        for block in sandwich.blocks:
            stream = block(stream, sandwich.rotary)
        logits = F.linear(sandwich.exit(stream), head)[..., :V]
        torch.testing.assert_close(logits.float(), peri(tokens(), targets=tokens())[0])
        assert isinstance(sandwich.entry, nn.Identity)


def test_deepnorm_with_alpha_1_is_post(fork):
    module = fork("deepnorm")
    made, f, x = residual(module, "deepnorm")
    assert made.alpha == (2 * 8) ** 0.25
    close(made(x), N(16 ** 0.25 * x + f(x), made.norm_out.weight))
    post, _, _ = residual(module, "post")
    made.alpha = 1.0
    close(made(x), post(x))


def test_deepnorm_start(fork):
    """beta = (8L)^(-1/4) on v, c_proj and c_fc; q and k keep std 1/sqrt(fan-in)."""
    model, beta = gpt(fork("deepnorm"), "deepnorm", n_embd=128, n_layer=3), 24 ** -0.25
    block, C = model.blocks[1], 128
    q_and_k, v = block.attention.f.c_attn.weight.split((2 * C, C))
    for weight, fan_in, factor in ((q_and_k, C, 1), (v, C, beta),
                                   (block.mlp.f.c_fc.weight, C, beta),
                                   (block.attention.f.c_proj.weight, C, beta),
                                   (block.mlp.f.c_proj.weight, 4 * C, beta)):
        assert weight.std().item() == pytest.approx(factor / math.sqrt(fan_in), rel=0.03)


@pytest.mark.parametrize("layer, norm", [(0, "post"), (1, "post"), (2, "pre"), (7, "pre")])
def test_mix_is_post_in_the_first_quarter_and_then_pre(layer, norm, fork):
    made, f, x = residual(fork("mix"), "mix", layer)
    if norm == "post":
        close(made(x), N(x + f(x), made.norm_out.weight))
    else:
        close(made(x), x + f(N(x, made.norm_in.weight)))


@pytest.mark.parametrize("layer", [0, 1, 7])
def test_scaled_divides_the_norm_by_the_root_of_the_depth(layer, fork):
    made, f, x = residual(fork("scaled"), "scaled", layer)
    close(made(x), x + f(N(x, made.norm_in.weight) / math.sqrt(layer + 1)))
    pre, _, _ = residual(fork("scaled"), "pre", layer)
    assert torch.equal(made(x), pre(x)) == (layer == 0)


def test_rezero_is_the_identity_at_the_start(fork):
    """The stream leaves the blocks as it came, and only a receives a gradient."""
    model = gpt(fork("rezero"), "rezero")
    x = model.entry(model.wte(tokens()))
    after = x
    for block in model.blocks:
        after = block(after, model.rotary)
    assert torch.equal(after, x)
    model.loss(tokens(), tokens()).backward()
    residuals = [r for block in model.blocks for r in (block.attention, block.mlp)]
    assert all(r.a.item() == 0 and r.a.grad.item() != 0 for r in residuals)
    made, f, x = residual(fork("rezero"), "rezero")
    close(made(x), x + made.a * f(x))


def test_b2t_adds_the_input_of_the_layer_before_its_last_norm(fork):
    model = lively(gpt(fork("b2t"), "b2t"))
    x, block = 2 * model.wte(tokens()), model.blocks[2]
    attention, mlp = block.attention, block.mlp
    y = N(x + attention.f(x, model.rotary), attention.norm_out.weight)
    close(block(x, model.rotary), N(x + y + mlp.f(y), mlp.norm_out.weight))


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_exponential_turns_by_the_whole_length(size, fork):
    """cos t x + sin t |x| v/|v| with t = |v|/|x|, even where that is many times around."""
    made, f, x = residual(fork("exponential"), "exponential")
    with torch.no_grad():
        made.f.weight *= size
    v, r = tangent(x, f(x)), x.norm(dim=-1, keepdim=True)
    t = v.norm(dim=-1, keepdim=True) / r
    close(made(x), t.cos() * x + t.sin() * r * v / v.norm(dim=-1, keepdim=True))
    assert [name for name, _ in made.named_parameters()] == ["f.weight"]


def test_lerp_with_a_1_forgets_x(fork):
    made, f, x = residual(fork("lerp"), "lerp")
    close(made(x), N(x + made.a * (N(f(x)) - x)))
    assert made.a.shape == (C,)
    with torch.no_grad():
        made.a.fill_(-1)        # its absolute value counts
    torch.testing.assert_close(made(x), N(f(x)), rtol=1e-5, atol=1e-5)     # N twice: eps
    model = gpt(fork("lerp"), "lerp")
    assert (model.blocks[0].mlp.a == 1 / 4).all()


def test_keel(fork):
    """N(alpha x + f(N(x))) with alpha the number of sublayers; with alpha 0 it forgets x."""
    made, f, x = residual(fork("keel"), "keel")
    g = f(N(x, made.norm_in.weight))
    close(made(x), N(16 * x + g, made.norm_out.weight))
    made.alpha = 0
    close(made(x), N(g, made.norm_out.weight))


def test_hybrid_attention_normalises_q_k_and_v_of_each_head(fork):
    """Softmax attention written out, head by head; positions enter after the norms."""
    module = fork("hybrid")
    model = lively(gpt(module, "hybrid"))
    block = model.blocks[1]
    x, attention = 5 * torch.randn(1, T, C, dtype=torch.float64), block.attention.f
    heads = []
    for head in range(2):
        parts = []
        for part, norm in zip(attention.c_attn.weight.split(C), attention.norms):
            rows = part[head * C // 2:(head + 1) * C // 2]
            parts.append(N(x @ rows.T, norm.weight))
        q, k = (module.rotate(part[:, :, None], model.rotary)[:, :, 0] for part in parts[:2])
        score = (q @ k.mT / math.sqrt(C // 2)).masked_fill(
            ~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)
        heads.append(score.softmax(-1) @ parts[2])
    y = x + torch.cat(heads, -1) @ attention.c_proj.weight.T
    close(block.attention(x, model.rotary), y)
    normed = N(y, block.mlp.norm_in.weight)
    close(block(x, model.rotary), normed + block.mlp.f(normed))


def test_hybrid_leaves_the_attention_of_the_others_alone(fork):
    """With its module, `pre` has the parameters and logits that it has in the program."""
    ours, theirs = gpt(fork("hybrid"), "pre"), gpt(model, "pre")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours(tokens())[0], theirs(tokens())[0])


def test_dyt(fork):
    """gain * tanh(alpha x), at the last norm too; for small alpha x it is linear."""
    made, f, x = residual(fork("dyt"), "dyt")
    norm = made.norm_in
    close(made(x), x + f(norm.gain * torch.tanh(norm.alpha * x)))
    torch.testing.assert_close(made(1e-6 * x) / 1e-6, x + f(norm.gain * norm.alpha * x))
    model = gpt(fork("dyt"), "dyt")
    assert type(model.exit) is type(norm) and model.exit.alpha.item() == 1
    assert not any(isinstance(module, nn.RMSNorm) for module in model.modules())


@pytest.mark.parametrize("s", [-2.0, 0.0, 3.0])
def test_retraction_projects_x_plus_a_part_of_the_tangent(s, fork):
    made, f, x = residual(fork("retraction"), "retraction")
    with torch.no_grad():
        made.a.fill_(s)
    moved = x + tangent(x, f(x)) / (1 + math.exp(-s))
    close(made(x), x.norm(dim=-1, keepdim=True) * moved / moved.norm(dim=-1, keepdim=True))
    assert residual(fork("retraction"), "retraction")[0].a.shape == (1,)


# ------------------------------------------------------------------------------- the command itself

def command(datasets, *words):
    """tests/forks.py at the size of TINY, in a folder outside the checkout; later flags win."""
    if "--" in words:
        flags = words.index("--") + 1
        words = (*words[:flags], *SMALL, *words[flags:])
    return subprocess.run([sys.executable, REPO / "tests" / "forks.py", *words], cwd=datasets,
                          env=environment(datasets), capture_output=True, text=True)


def test_command_trains_compares_and_goes_on(datasets, tmp_path):
    """A fork, then `geo` and the fork in one table: the same command trains only what is new.

    The first placement is the first row, also if a flag varies only geo's folders.
    """
    tree = files(REPO / "tests" / "forks") | files(REPO / "data" / "results")
    flags = ("--", "--out_dir", tmp_path / "out", "--seed", "1")
    first = command(datasets, "mix", *flags)
    assert first.returncode == 0, first.stderr
    assert [line["norm"] for line in cells(first.stdout)] == ["mix"]
    again = command(datasets, "geo", "mix", *flags, "2", "--geo_p", "1", "inf")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("is finished at step 10; nothing to do") == 1
    lines = read(tmp_path / "out" / "compare.csv")
    assert lines[0]["norm"] == "geo"
    assert sorted((line["norm"], line["seed"]) for line in lines) == [
        ("geo", "1"), ("geo", "1"), ("geo", "2"), ("geo", "2"), ("mix", "1"), ("mix", "2")]
    assert files(REPO / "tests" / "forks") | files(REPO / "data" / "results") == tree


def test_command_lists(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["forks.py"])
    forks.main()
    assert [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()] == NAMES


@pytest.mark.parametrize("code, words, wanted", [
    (2, ["mixx"], "no placement 'mixx'"), (2, ["--"], "name a placement before the --"),
    (2, ["mix", "--", "--norm", "pre"], "name the placements before the --"),
    (2, ["mix", "--", "--n_layerz", "2"], "--n_layerz"),
    (2, ["mix", "--n_layer", "2"], "--n_layer"),
    (1, ["pre", "mix", "--", "--dataset", "nowhere"], "there is no dataset")])
def test_command_refuses(code, words, wanted, monkeypatch, capsys):
    """What concerns every placement is said once, before any of them is trained."""
    monkeypatch.setattr(sys, "argv", ["forks.py", *words])
    line = refusal(forks.main) if code == 1 else exit_code(forks.main)
    printed = capsys.readouterr()
    if code == 2:
        assert line == 2 and printed.err.endswith("\n")
        line = printed.err.removesuffix("\n")
    assert wanted in line and "\n" not in line and printed.out == ""


def test_sigterm_is_passed_on(datasets, tmp_path):
    """It reached only forks.py, and the training went on: now it saves, and both end with 143."""
    words = [sys.executable, REPO / "tests" / "forks.py", "mix", "pre", "--", *SMALL,
             "--max_iters", "100000", "--out_dir", tmp_path]
    process = subprocess.Popen(words, env=environment(datasets), stdout=subprocess.PIPE, text=True)
    while "step 1/" not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert list(tmp_path.glob("mix*/ckpt.pt")) and not list(tmp_path.glob("pre*"))


def test_diff_that_cannot_be_applied(tmp_path, monkeypatch):
    """A changed model.py, or no git: one line that names the diff, or git."""
    monkeypatch.setattr(forks, "FORKS", tmp_path)
    text = (REPO / "tests" / "forks" / "mix.diff").read_text(encoding="utf-8")
    (tmp_path / "mix.diff").write_text(text.replace("NORMS = (", "NORMZ = ("), encoding="utf-8")
    with pytest.raises(ValueError, match=r"mix\.diff does not apply: error: patch failed"):
        forks.copy_program("mix", tmp_path / "program")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="git is needed"):
        forks.copy_program("mix", tmp_path / "other")


def test_figure(tmp_path):
    """It is drawn from two tables, at each setting's best rate; failures are counted."""
    pytest.importorskip("matplotlib")
    lines = [("pre", "none", 0.1, 1, 2.0, "ok"), ("pre", "none", 0.1, 2, 2.2, "ok"),
             ("pre", "none", 0.2, 1, 1.8, "ok"), ("pre", "sqrt", 0.2, 1, 1.9, "ok"),
             ("pre", "sqrt", 0.4, 1, 2.5, "ok"),
             ("mix", "none", 0.2, 1, 1.0, "learned nothing"), ("mix", "none", 0.1, 1, 3.0, "ok")]
    for name in ("a.csv", "b.csv"):
        text = "norm,decay,learning_rate,seed,val_loss,status,n_layer,entry\n"
        text += "".join(",".join(map(str, (*line, 4, "own"))) + "\n" for line in lines)
        (tmp_path / name).write_text(text, encoding="utf-8")
    runs = depths_figure.read(tmp_path / "a.csv")
    assert list(map(depths_figure.losses, runs.values())) == [[2.0, 2.2], [1.9], [3.0]]
    assert depths_figure.names(runs) == ["pre, decay none, entry own", "pre, decay sqrt, entry own",
                                         "mix"]
    depths_figure.draw(runs, runs, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "part.a.png").exists()


HEAD = "norm,decay,entry,learning_rate,seed,val_loss,status,n_layer\n"


@pytest.mark.parametrize("text", [
    "", "norm,seed\n", "no,columns\n1,2\n", HEAD + "pre,none,none,0.1,1,2.0\n",
    HEAD + "x" * 200_000, HEAD + 2 * "pre,none,none,0.1,1,2.0,ok,4\n",
    HEAD + "pre,none,none,0.1,1,2.0,ok,4\npre,none,none,0.1,2,2.0,ok,16\n"],
    ids=["empty", "header", "another", "cut", "huge", "other flags", "two depths"])
def test_figure_of_another_file(text, tmp_path, monkeypatch):
    """Tracebacks and pooled runs, once: one line that names the file."""
    path = tmp_path / "other.csv"
    path.write_text(text, encoding="utf-8")
    figure = str(tmp_path / "x.png")
    monkeypatch.setattr(sys, "argv", ["depths_figure.py", str(path), str(path), figure])
    assert refusal(depths_figure.main).startswith(f"{path} is no compare.csv of one depth")


def test_figure_replaces_no_table(tmp_path, monkeypatch, capsys):
    """The third argument was once replaced whatever it was: now it must be a .png."""
    path = tmp_path / "a.csv"
    path.write_text(HEAD + "pre,none,none,0.1,1,2.0,ok,4\n", encoding="utf-8")
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["depths_figure.py", *[str(path)] * 3])
    with pytest.raises(SystemExit) as error:
        depths_figure.main()
    assert error.value.code == 2 and path.read_bytes() == before
    assert f"{path} must end in .png" in capsys.readouterr().err
