"""Sweeps and the depth profile as their user meets them: which runs a command makes, that a stopped sweep ends as an
undisturbed one, the table's statistics, compare.csv, compare.png, depth.csv."""
import csv
import importlib.util
import math
import re
import signal
import sys
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from model import GPT, NORMS, GPTConfig
from test_train import CPU, at_step, configs, exit_code, files, inject, load, log, refusal, run, same, start
from test_train import here, root      # noqa: F401 (fixtures)

MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
TIMES = ("train_seconds", "elapsed_seconds")


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def results(out: Path) -> list[tuple]:
    """Of each run its line of compare.csv, its log.csv and depth.csv, without the times."""
    return [({k: v for k, v in line.items() if k not in TIMES}, log(out / line["run"]), read(out / line["run"] / "depth.csv"))
            for line in read(out / "compare.csv")]


def cells(out: str) -> list[dict[str, str]]:
    """The lines of the table that out ends in, but for a hint at matplotlib, by its header; what diverged is under ""."""
    table = out[out.rindex("norm  "):].split("\nno ")[0]
    names, *lines = (re.split(" {2,}", line.strip()) for line in table.splitlines())
    return [dict(zip([*names, ""], [*line, ""])) for line in lines]


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", cell)]


# --------------------------------------------------------------------------------------------------------- flags

@pytest.mark.parametrize("flags, folders", [
    ("--norm pre geo", "pre geo"), ("--seed 7 --learning_rate 0.1 --geo_p 2 --geo_decay none", "geo"),
    ("--norm geo pre --seed 2 1", "geo-seed=2 pre-seed=2 geo-seed=1 pre-seed=1"),
    ("--norm pre geo --geo_decay none linear --geo_p 2", "pre geo-geo_decay=none geo-geo_decay=linear"),
    ("--norm geo pre --geo_p 2 inf", "geo-geo_p=2.0 geo-geo_p=inf pre"),
    ("--norm pre pre geo --norm pre --seed 1 1 --learning_rate 1e-3 0.001", "pre geo"),
    ("--norm peri --seed 1 2 1 --learning_rate 0.1 0.2", "peri-seed=1-learning_rate=0.1 peri-seed=1-learning_rate=0.2 "
                                                         "peri-seed=2-learning_rate=0.1 peri-seed=2-learning_rate=0.2")])
def test_folders(flags, folders):
    """A run is found by its folder's name: it holds exactly what varies, and what is given twice is one run."""
    assert [c.folder for c in train.parse_args(["--out_dir", "o", *flags.split()])] == [Path("o", f) for f in folders.split()]


def test_every_combination():
    """Each combination is one run in a folder of its own; geo_* multiplies geo alone, and the others keep the defaults."""
    rates, seeds, decays, ps = (1e-3, 3e-3), (1, 2, 3), ("none", "linear"), (1.0, 2.0, math.inf)
    found = configs("--norm", *NORMS, "--learning_rate", *rates, "--seed", *seeds, "--geo_decay", *decays, "--geo_p", *ps)
    want = [*product(("pre", "post", "peri"), rates, seeds, ["sqrt"], [math.inf]), *product(["geo"], rates, seeds, decays, ps)]
    assert sorted((c.norm, c.learning_rate, c.seed, c.geo_decay, c.geo_p) for c in found) == sorted(want)
    assert len({c.folder for c in found}) == len(want) and not any("geo_" in c.folder.name for c in found if c.norm != "geo")
    others = [{k: v for k, v in asdict(c).items() if k not in train.SWEPT} for c in found]
    assert all(other == others[0] for other in others) and others[0]["n_embd"] == 16


@pytest.mark.parametrize("flags", ["--learning_rate -1 1e-3", "--learning_rate 1e-3 nan 1e-2", "--learning_rate 1e-3 inf",
    "--seed 1 -1", "--seed 1 2.5 3", "--geo_decay none cubic", "--geo_p 2 0 inf", "--geo_p 1 nan", "--norm pre sandwich geo"])
def test_wrong_value_in_a_list(flags, capsys):
    """A wrong value anywhere in a list is met before hours of training: one line, exit 2."""
    assert exit_code(configs, *flags.split()) == 2
    assert (err := capsys.readouterr().err).count("\n") == 1 and flags.split()[0] in err


# ---------------------------------------------------------------------------------------------------- stopped sweeps

def test_stopped_at_any_moment(tmp_path, monkeypatch):
    """SIGTERM in the first, a middle or the last step of a run, or in the last of all: the same command, again and
    again, ends with the results of an undisturbed sweep, and compare.csv is not written before."""
    flags = "--norm pre geo --learning_rate 1e-2 1e-3 --dropout 0.1".split()
    run(tmp_path / "whole", *flags)
    for norm, rate, step in (("pre", 1e-2, 1), ("pre", 1e-2, 10), ("pre", 1e-3, 7), ("geo", 1e-3, 10)):
        with monkeypatch.context() as m:
            at_step(m, lambda i, c: (c.norm, c.learning_rate, i) == (norm, rate, step) and signal.raise_signal(signal.SIGTERM))
            assert exit_code(run, tmp_path / "cut", *flags) == 143
        assert load(tmp_path / "cut" / f"{norm}-learning_rate={rate}")["row"]["step"] == step
        assert not list((tmp_path / "cut").glob("compare.*"))
        assert read(tmp_path / "cut" / f"{norm}-learning_rate={rate}" / "depth.csv")[0]["step"] == "0"
    run(tmp_path / "cut", *flags)
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    assert all(float(line[name]) > 0 for line in read(tmp_path / "cut" / "compare.csv") for name in TIMES)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_terminated_command(root, tmp_path):
    """The same with the real command line, as a job scheduler ends it."""
    flags = "--norm post geo --seed 1 2 --dropout 0.1 --max_iters 60 --eval_interval 30".split()
    process = start(root, *flags, "--out_dir", tmp_path / "cut")
    while b"geo-seed=1 step 6:" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, b"") and b"stopped: step" in out
    assert 6 <= load(tmp_path / "cut" / "geo-seed=1")["row"]["step"] < 60
    assert sorted(f.name for f in (tmp_path / "cut").iterdir()) == ["geo-seed=1", "post-seed=1"]
    for name in ("cut", "whole"):
        run(tmp_path / name, *flags)
    assert results(tmp_path / "cut") == results(tmp_path / "whole") and len(results(tmp_path / "cut")) == 4


def test_overwritten_sweep_goes_on_with_itself(tmp_path, monkeypatch, capsys):
    """--overwrite, cut in the first run, then the same without it as advised: once it took the old runs for finished."""
    flags = "--norm pre geo --seed 1 2".split()
    run(tmp_path / "whole", *flags)
    run(tmp_path / "cut", *flags, "--dtype", "bfloat16")
    with monkeypatch.context() as m:
        at_step(m, lambda i, c: i == 3 and signal.raise_signal(signal.SIGTERM))
        capsys.readouterr()
        assert exit_code(run, tmp_path / "cut", *flags, "--overwrite") == 143
    assert "\nnorm " not in capsys.readouterr().out        # half a run compares with none
    run(tmp_path / "cut", *flags)
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


def test_extension_cut_before_its_first_checkpoint(tmp_path, monkeypatch):
    """A longer --max_iters that saved nothing leaves the finished sweep's record and profile as they were."""
    flags = "--norm pre geo --max_iters 6".split()
    run(tmp_path, *flags)
    depth, lines = (tmp_path / "pre" / "depth.csv").read_text(), read(tmp_path / "compare.csv")
    with monkeypatch.context() as m:
        at_step(m, lambda i, c: i == 8 and exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, *flags, "--max_iters", 12, "--eval_interval", 12)
    for name in ("config.json", "log.csv"):
        (tmp_path / "geo" / name).write_bytes(b"\xff")      # of a finished run, all that is compared is in its checkpoint
    run(tmp_path, *flags)
    assert (tmp_path / "pre" / "depth.csv").read_text() == depth and read(tmp_path / "compare.csv") == lines


# -------------------------------------------------------------------------------------------------------- divergence

def test_diverged_run(tmp_path, monkeypatch, capsys):
    """A rate that leads until it diverges is a row and no winner: no star, no mean; the other runs and the figure go on."""
    rate = [0.0]
    inject(monkeypatch, loss=lambda norm, step: norm == "geo" and rate[0] == 0.02 and step >= 6)
    at_step(monkeypatch, lambda step, config: rate.__setitem__(0, config.learning_rate))
    run(tmp_path, *"--norm pre geo --learning_rate 0.02 1e-5".split())
    lines, table = read(tmp_path / "compare.csv"), cells(capsys.readouterr().out)
    assert [(line["norm"], line["diverged"], line["step"]) for line in lines] == [
        ("pre", "", "10"), ("pre", "", "10"), ("geo", "6", "4"), ("geo", "", "10")]
    assert float(lines[2]["val_loss"]) < float(lines[3]["val_loss"]) and lines[2]["mean_angle"] == "nan"
    assert [line["learning_rate"] for line in table] == ["0.02*", "1e-05", "0.02", "1e-05*"]
    assert (table[2]["val nats/token"], table[2]["minus pre"], table[2][""]) == ("-", "-", "diverged at step 6")
    assert (tmp_path / "compare.png").exists() == MATPLOTLIB


def test_every_run_diverged(tmp_path, capsys):
    """Also then there is a row for each run, none with a star, the figure, and exit code 1."""
    flags = "--norm pre geo --learning_rate 1e17 1e18 --grad_clip 0 --warmup_iters 0".split()
    assert "every run diverged" in refusal(run, tmp_path, *flags)
    table = cells(capsys.readouterr().out)
    assert [line["learning_rate"] for line in table] == ["1e+17", "1e+18"] * 2
    assert [line["run"] for line in read(tmp_path / "compare.csv") if line["diverged"]] == [
        f"{norm}-learning_rate={rate}" for norm in ("pre", "geo") for rate in ("1e+17", "1e+18")]
    assert (tmp_path / "compare.png").exists() == MATPLOTLIB


# ------------------------------------------------------------------------------------------- the table, compare.csv

def fake_row(loss: float, diverged: int | None = None, seconds: float = 1.0) -> dict:
    depth = [[10, layer, name, layer + 1, 1, 0.5, 2] for layer, name in product((0, 1), ("attention", "mlp"))]
    return {"parameters": 1234, "val_loss": loss, "val_bits_per_byte": loss / 2, "best_step": 8, "step": 10,
            "diverged": diverged, "train_seconds": seconds, "elapsed": 2.0, "peak_memory": 3.0, "depth_end": depth}


def test_table_statistics():
    """Mean and sample deviation over seeds; a star at the lowest mean of the rates that lost no seed to divergence;
    differences seed by seed from the first norm at its own best rate, with their standard error."""
    rng, seeds, rates = np.random.default_rng(0), (1, 2, 3, 4), (1e-3, 3e-3, 1e-2)
    luck = np.array([-0.1, 0.05, 0.15, -0.08])      # a seed's, in all settings: pairing takes it away
    level = dict(zip(product(("pre", "geo"), rates), (1.70, 1.60, 1.30, 1.57, 1.65, 1.20)))
    loss = {key: value + luck + rng.normal(0, 0.004, 4) for key, value in level.items()}
    runs = configs("--norm", "pre", "geo", "--learning_rate", *rates, "--seed", *seeds)
    rows = [fake_row(loss[c.norm, c.learning_rate][c.seed - 1], 9 if (c.learning_rate, c.seed) == (1e-2, 3) else None, c.seed)
            for c in runs]
    lines = cells(train.table(rows, runs))
    assert [(line["norm"], line["learning_rate"]) for line in lines] == [
        ("pre", "0.001"), ("pre", "0.003*"), ("pre", "0.01"), ("geo", "0.001*"), ("geo", "0.003"), ("geo", "0.01")]
    for line, ((norm, rate), values) in zip(lines, loss.items()):
        whole = [i for i in range(4) if rate < 1e-2 or i != 2]
        values, d = values[whole], (values - loss["pre", 3e-3])[whole]
        assert numbers(line["val nats/token"]) == pytest.approx([values.mean(), values.std(ddof=1)], abs=6e-5)
        minus = [d.mean(), d.std(ddof=1) / len(d) ** 0.5] if (norm, rate) != ("pre", 3e-3) else []     # from itself: "-"
        assert numbers(line["minus pre"]) == pytest.approx(minus, abs=6e-5)
        assert numbers(line["val bits/byte"]) == pytest.approx([values.mean() / 2], abs=6e-5)
        assert line["tokens/s"] == f"{4 * 10 * 4 * 16 / (1 + 2 + 3 + 4):,.0f}" and line["best step"] == "8"
        assert line[""] == "seed 3 diverged at step 9" * (rate == 1e-2)
    assert numbers(lines[3]["minus pre"])[1] < 0.005 < 0.05 < numbers(lines[3]["val nats/token"])[1] / 2


def test_table_of_geo_settings():
    """Each (geo_decay, geo_p) is a setting with lines and a star of its own; the norms without them show a dash."""
    runs = configs(*"--norm pre geo --geo_decay none sqrt --geo_p 2 inf --learning_rate 1e-3 1e-2".split())
    better = {("geo", "none", 2.0): 1e-2, ("geo", "sqrt", math.inf): 1e-2}      # the other settings like 1e-3
    rows = [fake_row(1.5 if better.get((c.norm, c.geo_decay, c.geo_p), 1e-3) == c.learning_rate else 1.6) for c in runs]
    starred = [line for line in cells(train.table(rows, runs)) if "*" in line["learning_rate"]]
    assert [tuple(line[k] for k in ("norm", "geo_decay", "geo_p", "learning_rate")) for line in starred] == [
        ("pre", "-", "-", "0.001*"), ("geo", "none", "2", "0.01*"), ("geo", "none", "inf", "0.001*"),
        ("geo", "sqrt", "2", "0.001*"), ("geo", "sqrt", "inf", "0.01*")]
    assert "minus geo none p=2" in train.table(rows[2:], runs[2:]).splitlines()[0]


def test_compare_csv(tmp_path):
    """One line a run, with all its settings, the results of its checkpoint, and its depth.csv in three numbers."""
    flags = "--norm pre geo --seed 1 2 --geo_p 2 inf --max_iters 6 --dropout 0.1".split()
    run(tmp_path, *flags)
    lines, runs = read(tmp_path / "compare.csv"), configs("--out_dir", tmp_path, *flags)
    assert [line["run"] for line in lines] == [c.folder.name for c in runs] and len(runs) == 6
    for line, c in zip(lines, runs):
        row = load(c.folder)["row"]
        want = {f.name: getattr(c, f.name) for f in fields(c) if f.name not in ("out_dir", "overwrite")} | {
            "elapsed_seconds": row["elapsed"]} | {name: row[name] for name in (
                "parameters", "val_loss", "val_bits_per_byte", "best_step", "step", "diverged", "train_seconds")}
        assert {name: line[name] for name in want} == {name: "" if v is None else str(v) for name, v in want.items()}
        depth = [r for r in read(c.folder / "depth.csv") if r["step"] == "6"]
        rms = [float(r["stream_rms"]) for r in depth if r["sublayer"] == "mlp"]     # after whole layers
        grad, angle = ([float(r[name]) for r in depth] for name in ("grad_norm", "angle"))
        assert [float(line[name]) for name in ("rms_last_first", "grad_max_min", "mean_angle")] == pytest.approx(
            [rms[-1] / rms[0], max(grad) / min(grad), sum(angle) / len(angle)], rel=1e-9)
    run(tmp_path, *flags, "--dtype", "bfloat16", "--eval_interval", 3)     # reads finished runs, and says how they were trained
    assert read(tmp_path / "compare.csv") == lines
    run(tmp_path / "single", *"--norm pre --seed 3 3 --max_iters 2".split())
    assert [f.name for f in (tmp_path / "single").iterdir()] == ["pre"]


# ------------------------------------------------------------------------------------------------------ depth profile

@pytest.mark.parametrize("norm", NORMS)
def test_depth_profile(norm):
    """Each number is what its column says, by a walk through the model by hand; and the model is as it was before."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 300, 3, 2, 16, 0.3, norm))
    with torch.no_grad():
        for p in model.parameters():        # a model as training might leave it: gains not 1, biases not 0
            p += 0.2 * torch.randn_like(p)
    ids, rng = torch.randint(300, (6000,)), torch.get_rng_state()
    config = configs("--norm", norm, "--n_layer", 3, "--batch_size", 300)[0]
    found = train.depth_profile(model, ids.numpy().astype(np.uint16), config, 7, CPU)
    assert model.training and torch.equal(torch.get_rng_state(), rng) and all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())

    x, y = ids[:4096].view(256, 16), ids[1:4097].view(256, 16)      # of 300 windows, those within 4,096 tokens
    model.eval()
    model(x, y)[1].backward()
    rms = lambda t: t.square().mean().sqrt().item()
    want, largest, stream = [], 0.0, model.entry(model.wte(x))
    for layer, block in enumerate(model.blocks):
        grad = math.sqrt(sum(p.grad.double().square().sum().item() for p in block.parameters()))
        for name, f, args in (("attention", block.attention, [model.rotary[:, :16]]), ("mlp", block.mlp, [])):
            a, stream = stream.detach().double(), f(stream, *args)
            b = stream.detach().double()
            angle = ((a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)).clamp(-1, 1).acos()
            want.append([7, layer, name, rms(b), rms(b - a) / rms(a), angle.mean().item(), grad])
            largest = max(largest, angle.max().item())
    assert [line[:3] for line in found] == [line[:3] for line in want]
    assert [line[3:] for line in found] == [pytest.approx(line[3:], rel=1e-4) for line in want]
    if norm == "geo":
        assert max(line[5] for line in found) <= largest < math.pi / 4 + 1e-5
        assert all(line[3] == pytest.approx(found[0][3], rel=1e-5) for line in found)


def test_depth_csv(root, tmp_path):
    """It holds the profile at the start and at the last step, also when a larger --max_iters moves the last step."""
    val, config = np.memmap(root / "data" / "mine" / "val.bin", np.uint16, "r"), configs()[0]
    for last in (6, 9):
        run(tmp_path, "--max_iters", last)
        state = load(tmp_path / "geo")
        torch.manual_seed(config.seed)
        model, lines = GPT(GPTConfig(**state["model_config"])), [train.DEPTH_COLUMNS]
        for step in (0, last):
            lines += train.depth_profile(model, val, config, step, CPU)
            model.load_state_dict(state["model"])
        text = (tmp_path / "geo" / "depth.csv").read_text().splitlines()
        assert text == [",".join(map(str, line)) for line in lines] and len(text) == 1 + 2 * 2 * 2
        assert text[0] == "step,layer,sublayer,stream_rms,update_rms,angle,grad_norm"


def test_no_last_step_no_profile_of_it(tmp_path, monkeypatch, capsys):
    """A finished run that is extended and diverges once kept the profile of its old last step as if of the new one."""
    flags = "--norm pre geo --max_iters".split()
    run(tmp_path, *flags, 6)
    inject(monkeypatch, loss=lambda norm, step: norm == "geo" and step >= 7)
    run(tmp_path, *flags, 12)
    assert {line["run"]: line["mean_angle"] == "nan" for line in read(tmp_path / "compare.csv")} == {"pre": False, "geo": True}


def test_depth_profile_leaves_padding_out():
    """A val text of less than one batch: what fills the batch up is no text, and the batch size changes nothing."""
    torch.manual_seed(0)
    model, val = GPT(GPTConfig(16, 257, 2, 2, 16)), np.random.default_rng(0).integers(0, 256, 41).astype(np.uint8)
    few, many = (train.depth_profile(model, val, configs("--batch_size", b)[0], 0, CPU) for b in (2, 12))
    assert [line[3:] for line in few] == [pytest.approx(line[3:], rel=1e-5) for line in many]


def test_depth_profile_only_observes(tmp_path, monkeypatch):
    """Training with it is the training without it: dropout, losses, weights, optimizer."""
    run(tmp_path / "with", "--dropout", 0.1)
    monkeypatch.setattr(train, "depth_profile", lambda model, data, config, step, device: [[step, 0, "mlp", 1, 1, 1, 1]] * 4)
    run(tmp_path / "without", "--dropout", 0.1)
    a, b = (load(tmp_path / name / "geo") for name in ("with", "without"))
    assert log(tmp_path / "with" / "geo") == log(tmp_path / "without" / "geo")
    assert all(same(a[name], b[name]) for name in ("model", "optimizer", "rng")) and a["row"]["depth_end"] != b["row"]["depth_end"]


# -------------------------------------------------------------------------------------------- again, and the figure

def test_finished_sweep_again(tmp_path, monkeypatch, capsys):
    """A finished sweep run again trains nothing, changes no byte, prints the same table, and draws the figure anew."""
    flags = "--norm pre geo --seed 1 2 --max_iters 4".split()
    run(tmp_path, *flags)
    (tmp_path / "compare.png").write_bytes(b"")
    table, before = capsys.readouterr().out.splitlines()[-3:], files(tmp_path)
    at_step(monkeypatch, lambda step, config: pytest.fail("it trains"))
    run(tmp_path, *flags)
    assert capsys.readouterr().out.splitlines()[-3:] == table
    assert bool((tmp_path / "compare.png").read_bytes()) == MATPLOTLIB
    after = files(tmp_path)
    assert after.keys() == before.keys() and all(after[f][0] == before[f][0] for f in after if f.suffix != ".png")


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    """The figure alone needs matplotlib: without it one line says how to get it, and all else is there."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    run(tmp_path, *"--norm pre geo --max_iters 2".split())
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "pip install matplotlib" in err
    assert [line["run"] for line in read(tmp_path / "compare.csv")] == ["pre", "geo"] and "\nnorm " in out
    assert sorted(f.name for f in tmp_path.iterdir()) == ["compare.csv", "geo", "pre"]


def test_figure(tmp_path, monkeypatch):
    """compare.png: four labelled panels, a norm in one colour in all of them, its settings in several line styles; the
    lines are means over seeds, at the best rate, of log.csv and depth.csv."""
    Figure, figures = pytest.importorskip("matplotlib.figure").Figure, []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: figures.append(self) or save(self, *args, **kw))
    run(tmp_path, *"--norm pre geo --geo_p inf 2 --learning_rate 1e-2 1e-4 --seed 1 2".split())
    assert (tmp_path / "compare.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    axes, = [figure.axes for figure in figures]
    assert len(axes) == 4 and all(ax.get_xlabel() and ax.get_ylabel() and ax.get_title() for ax in axes)
    pre, inf, two = axes[0].lines
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["pre", "geo p=inf", "geo p=2"]
    assert pre.get_color() != inf.get_color() == two.get_color() and inf.get_linestyle() != two.get_linestyle()
    assert all({line.get_color() for line in ax.lines} == {pre.get_color(), inf.get_color()} for ax in axes)

    mean = lambda lists: pytest.approx(np.mean([[float(value) for value in values] for values in lists], axis=0).tolist())
    best, worst = ([tmp_path / f"pre-seed={seed}-learning_rate={rate}" for seed in (1, 2)] for rate in (0.01, 0.0001))
    ys = [[line.get_ydata().tolist() for line in ax.lines if line.get_color() == pre.get_color()] for ax in axes]
    assert pre.get_xdata().tolist() == [4, 8, 10]
    assert ys[0] == [mean([r["val_loss"] for r in log(f) if r["val_loss"]] for f in best)]
    assert ys[1][0] == mean([load(f)["row"]["val_loss"] for f in pair] for pair in zip(worst, best))
    for lines, name, every in ((ys[2], "stream_rms", 1), (ys[3], "grad_norm", 2)):
        assert lines == [mean([r[name] for r in read(f / "depth.csv") if r["step"] == step][::every] for f in best)
                         for step in ("0", "10")]
