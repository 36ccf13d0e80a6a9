"""Sweeps as their user meets them: which runs a command makes and what their folders are called,
stopped sweeps, several processes, diverged runs, the table at the end; and the depth profile.

What the table and compare.csv say of made-up runs is in test_compare.py.
"""
import importlib.util
import math
import os
import signal
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import data.compare
import train
from data import flag
from data.runs import locked
from helpers import (
    CPU, TINY, at_step, cells, config, configs, exit_code, files, inject, load, log, read, record,
    refusal, run, same, saved_step, signal_at, start, steps)
from helpers import datasets, here      # noqa: F401 (fixtures)
from model import GPT, NORMS, GPTConfig, depth_profile

MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
DRAW = data.compare.draw
SECONDS = ("train_seconds", "elapsed_seconds")


def results(out: Path) -> list[tuple]:
    """Of each run its line of compare.csv, its log.csv and depth.csv, without times."""
    return [({k: v for k, v in line.items() if k not in (*SECONDS, "peak_mb")},
             log(out / line["run"]), read(out / line["run"] / "depth.csv"))
            for line in read(out / "compare.csv")]


def names(*flags) -> list[str]:
    return [folder.name for folder in configs(*flags)]


# ----------------------------------------------------------------------------------------- folders

@pytest.mark.parametrize("flags, folders", [
    ("", "geo"), ("--norm pre geo", "pre geo"),
    ("--seed 7 --learning_rate 0.1 --geo_p 2 --decay none",
     "geo-decay=none-learning_rate=0.1-seed=7-geo_p=2.0"),
    ("--seed 1 --n_embd 16", "geo-n_embd=16-seed=1"),
    ("--norm geo pre --seed 2 1", "geo-seed=2 pre-seed=2 geo-seed=1 pre-seed=1"),
    ("--norm pre geo --geo_max_angle 0.5 1 --geo_p 2",
     "pre geo-geo_max_angle=0.5-geo_p=2.0 geo-geo_max_angle=1.0-geo_p=2.0"),
    ("--norm geo pre --geo_p 2 inf", "geo-geo_p=2.0 geo-geo_p=inf pre"),
    ("--norm pre geo --decay none own",
     "pre-decay=none pre-decay=own geo-decay=none geo-decay=own"),
    ("--weight_decay 0 0.1 --n_layer 1 2",
     "geo-n_layer=1-weight_decay=0.0 geo-n_layer=1-weight_decay=0.1 "
     "geo-n_layer=2-weight_decay=0.0 geo-n_layer=2-weight_decay=0.1"),
    ("--norm pre pre geo --norm pre --seed 1 1 --learning_rate 1e-3 0.001",
     "pre-learning_rate=0.001-seed=1 geo-learning_rate=0.001-seed=1"),
    ("--max_iters 5 --eval_iters 3 --dtype float32 --eval_interval 2 --preset tiny", "geo"),
    ("--norm peri --seed 1 2 1 --learning_rate 0.1 0.2",
     "peri-learning_rate=0.1-seed=1 peri-learning_rate=0.2-seed=1 "
     "peri-learning_rate=0.1-seed=2 peri-learning_rate=0.2-seed=2")])
def test_folders(flags, folders):
    """A run is found by its folder's name: the norm and every flag given that changes the model or
    its training, with one value or many, so that a sweep can always be extended. What is given
    twice is one run."""
    found = configs("--out_dir", "o", *flags.split())
    assert list(found) == [Path("o", name) for name in folders.split()]


def test_every_combination():
    """Each combination is one run in a folder of its own; geo_* multiplies only geo, and the others
    keep the defaults."""
    rates, seeds, decays, ps = (1e-3, 3e-3), (1, 2, 3), ("none", "linear"), (1.0, 2.0, math.inf)
    found = configs("--norm", *NORMS, "--learning_rate", *rates, "--seed", *seeds, "--decay",
                    *decays, "--geo_p", *ps)
    want = [*product(("pre", "post", "peri"), rates, seeds, decays, [math.inf]),
            *product(["geo"], rates, seeds, decays, ps)]
    axes = ("norm", "learning_rate", "seed", "decay", "geo_p")
    assert sorted(tuple(getattr(c, name) for name in axes) for c in found.values()) == sorted(want)
    assert len(found) == len(want)
    assert not any("geo_" in folder.name for folder, c in found.items() if c.norm != "geo")
    others = [{k: v for k, v in vars(c).items() if k not in axes} for c in found.values()]
    assert all(other == others[0] for other in others) and others[0]["n_embd"] == 16


@pytest.mark.parametrize("flags", [
    "--learning_rate -1 1e-3", "--learning_rate 1e-3 nan 1e-2", "--learning_rate 1e-3 inf",
    "--seed 1 -1", "--seed 1 2.5 3", "--decay none cubic", "--geo_p 2 0 inf", "--geo_p 1 nan",
    "--norm pre sandwich geo", "--n_embd 16 18", "--dropout 0 1", "--max_iters 1 2"])
def test_wrong_value_in_a_list(flags, capsys):
    """A wrong value anywhere in a list is met before hours of training: one line, exit 2."""
    assert exit_code(configs, *flags.split()) == 2
    err = capsys.readouterr().err
    word = "2" if "max_iters" in flags else flags.split()[0][2:]
    assert err.count("\n") == 1 and word in err


@pytest.mark.parametrize("name", [
    "batch_size", "block_size", "n_layer", "n_head", "n_embd", "dropout", "learning_rate", "min_lr",
    "warmup_iters", "lr_decay_iters", "weight_decay", "beta1", "beta2", "grad_clip",
    "gradient_accumulation_steps", "seed", "entry", "decay", "geo_p", "geo_max_angle"])
def test_any_flag_is_an_axis(name):
    """One flag after another could once be swept only after an edit in several places."""
    values = {"dropout": (0.1, 0.2), "min_lr": (1e-4, 2e-4), "learning_rate": (0.1, 0.2),
              "entry": ("none", "norm"), "decay": ("none", "sqrt"), "geo_p": (1.0, 2.0),
              "geo_max_angle": (0.5, 1.0), "weight_decay": (0.0, 0.1), "beta1": (0.8, 0.9),
              "beta2": (0.8, 0.9), "grad_clip": (0.5, 1.0), "n_head": (1, 2), "n_embd": (16, 32)
              }.get(name, (4, 8))
    found = configs(f"--{name}", *values)
    assert [(folder.name, getattr(c, name)) for folder, c in found.items()] == [
        (f"geo-{name}={value}", value) for value in values]


def test_swept_flags_reach_the_run(tmp_path, capsys):
    """A swept flag that is only in Config once trained alike under other names, or was no column:
    each run has its setting in model or optimizer, and the table has a column of it."""
    run(tmp_path, *"--norm pre --weight_decay 0 0.1 --n_layer 1 2 --max_iters 3".split())
    for layers, decay in product((1, 2), (0.0, 0.1)):
        folder = tmp_path / f"pre-n_layer={layers}-weight_decay={decay}"
        state = load(folder)
        assert state["model_config"]["n_layer"] == layers
        assert state["optimizer"]["param_groups"][0]["weight_decay"] == decay
    table = cells(capsys.readouterr().out)
    assert [(line["n_layer"], float(line["weight_decay"])) for line in table] == [
        (str(layers), decay) for layers, decay in product((1, 2), (0.0, 0.1))]
    assert [line["weight_decay"] for line in read(tmp_path / "compare.csv")] == ["0.0", "0.1"] * 2


def test_flag_of_a_fork(tmp_path, monkeypatch, capsys):
    """A fork that adds a field to Config, and nothing else, can sweep it: folders, config.json,
    table. Named after a norm, it varies only that norm."""
    @dataclass
    class Forked(train.Config):
        momentum: float = flag(0.5, "the fork's")
        pre_power: int = flag(1, "the fork's, for pre")
    monkeypatch.setattr(train, "Config", Forked)
    flags = "--norm pre geo --momentum 0.5 0.7 --pre_power 1 2".split()
    want = ["pre-momentum=0.5-pre_power=1", "pre-momentum=0.5-pre_power=2",
            "pre-momentum=0.7-pre_power=1", "pre-momentum=0.7-pre_power=2",
            "geo-momentum=0.5", "geo-momentum=0.7"]
    assert names(*flags) == want
    run(tmp_path, *flags, "--max_iters", 3)
    assert sorted(f.name for f in tmp_path.iterdir() if f.is_dir()) == sorted(want)
    assert record(tmp_path / want[3])["config"]["momentum"] == 0.7
    table = cells(capsys.readouterr().out)
    assert [line["momentum"] for line in table] == ["0.5", "0.5", "0.7", "0.7", "0.5", "0.7"]


# ----------------------------------------------------------------------------------- stopped sweeps

def test_stopped_at_any_moment(tmp_path, monkeypatch):
    """SIGTERM in the first, a middle or the last step of a run, or in the last of all: the same
    command, again and again, ends with the results of an undisturbed sweep, and compare.csv is not
    written before."""
    flags = "--norm pre geo --learning_rate 1e-2 1e-3 --dropout 0.1".split()
    run(tmp_path / "whole", *flags)
    out = tmp_path / "cut"
    for moment in (("pre", 1e-2, 1), ("pre", 1e-2, 10), ("pre", 1e-3, 7), ("geo", 1e-3, 10)):
        with monkeypatch.context() as m:
            signal_at(m, signal.SIGTERM, lambda i, c: (c.norm, c.learning_rate, i) == moment)
            assert exit_code(run, out, *flags) == 143
        norm, rate, step = moment
        folder = out / f"{norm}-dropout=0.1-learning_rate={rate}"
        assert saved_step(folder) == step
        assert not list(out.glob("compare.*"))
        assert read(folder / "depth.csv")[0]["step"] == "0"
    run(out, *flags)
    assert results(out) == results(tmp_path / "whole") and len(results(out)) == 4
    assert all(float(line[name]) > 0 for line in read(out / "compare.csv") for name in SECONDS)


@pytest.mark.skipif(os.name == "nt", reason="POSIX locks and signals")
def test_two_processes_one_sweep(datasets, tmp_path):
    """Two terminals once shared a sweep by hand only. The second leaves out, with a line, the run
    that the first is in, trains the others, and ends well; the first, ended by a job scheduler, has
    saved. The same command makes the one table of an undisturbed sweep."""
    flags = "--norm post geo --dropout 0.1 --max_iters 80 --eval_interval 40".split()
    out = tmp_path / "shared"
    first = start(datasets, *flags, "--out_dir", out)
    while b" step 2/" not in (line := first.stdout.readline()):
        assert line, first.stderr.read()
    first.send_signal(signal.SIGSTOP)
    second = start(datasets, *flags, "--out_dir", out)
    printed, errors = (part.decode() for part in second.communicate(timeout=100))
    first.send_signal(signal.SIGCONT)
    first.terminate()
    rest, err = first.communicate(timeout=60)

    given = [word for name in ("n_layer", "n_head", "n_embd", "block_size", "batch_size",
             "warmup_iters") for word in (f"--{name}", TINY[name])]
    folders = names(*given, *flags)
    assert second.returncode == 0 and printed.count("is skipped: another process") == 1
    skipped = Path(printed.split(" is skipped")[0].splitlines()[-1]).name
    assert errors.count("\n") == 1 and skipped in errors       # it is not in the table yet
    assert skipped in folders and len(cells(printed)) == 1
    assert (first.returncode, err) == (143, b"") and b"stopped: step" in rest
    assert 2 <= saved_step(out / skipped) < 80
    threads = torch.get_num_threads()
    torch.set_num_threads(1)        # as the processes have: other numbers add in another order
    for folder in (out, tmp_path / "whole"):
        run(folder, *given, *flags)
    torch.set_num_threads(threads)
    assert results(out) == results(tmp_path / "whole")
    assert [line["run"] for line in read(out / "compare.csv")] == folders


@pytest.mark.skipif(os.name == "nt", reason="POSIX locks")
def test_run_trained_elsewhere_is_skipped(tmp_path, capsys):
    """The others are trained, and the table is made of what is finished."""
    flags = "--norm pre post geo --max_iters 3".split()
    with locked(tmp_path / "post"):
        run(tmp_path, *flags)
        out, err = capsys.readouterr()
        assert out.count("is skipped") == 1 and "post" in err
        assert [line["norm"] for line in cells(out)] == ["pre", "geo"]
        assert not list((tmp_path / "post").iterdir())
    run(tmp_path, *flags)
    assert [line["norm"] for line in cells(capsys.readouterr().out)] == ["pre", "post", "geo"]


def test_overwritten_sweep_continues_with_itself(tmp_path, monkeypatch, capsys):
    """--overwrite, cut in the first run, then the same without it as advised: once it took the old
    runs for finished."""
    flags = "--norm pre geo --seed 1 2".split()
    run(tmp_path / "whole", *flags)
    run(tmp_path / "cut", *flags, "--dtype", "bfloat16")
    with monkeypatch.context() as m:
        signal_at(m, signal.SIGTERM, lambda step, c: step == 3)
        capsys.readouterr()
        assert exit_code(run, tmp_path / "cut", *flags, "--overwrite") == 143
    assert "\nnorm " not in capsys.readouterr().out        # half a run compares with none
    run(tmp_path / "cut", *flags)
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


def test_extension_cut_before_its_first_checkpoint(tmp_path, monkeypatch):
    """A longer --max_iters that saved nothing leaves the finished sweep's record and profile as
    they were."""
    flags = "--norm pre geo --max_iters 6".split()
    run(tmp_path, *flags)
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}

    def interrupt(step, c):
        if step == 8:
            raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        at_step(m, interrupt)
        run(tmp_path, *flags, "--max_iters", 12, "--eval_interval", 12)
    assert record(tmp_path / "pre")["config"]["max_iters"] == 12
    run(tmp_path, *flags)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before


def test_extended_sweep(tmp_path, monkeypatch, capsys):
    """More seeds, rates or norms join the runs that are there; a folder's name once held only what
    varied, and the same run was trained again under another name."""
    run(tmp_path, *"--norm geo --seed 1 --learning_rate 1e-2".split())
    before = files(tmp_path)
    trained = []
    at_step(monkeypatch, lambda step, c: trained.append((c.norm, c.seed)))
    run(tmp_path, *"--norm pre geo --seed 1 2 --learning_rate 1e-2".split())
    assert set(trained) == {("pre", 1), ("pre", 2), ("geo", 2)}
    assert {f: text for f, text in files(tmp_path).items() if f in before} == before
    assert len(cells(capsys.readouterr().out)) == 2


# --------------------------------------------------------------------------------------- divergence

def test_diverged_run(tmp_path, monkeypatch, capsys):
    """A rate that leads until it diverges is a row and no winner: no star, no mean; the other runs
    continue."""
    monkeypatch.setattr(data.compare, "LEARNED_NOTHING", math.inf)     # ten steps do learn little
    inject(monkeypatch, loss=lambda c, i: c.norm == "geo" and c.learning_rate == 0.02 and i > 5)
    run(tmp_path, *"--norm pre geo --learning_rate 0.02 1e-5".split())
    lines, table = read(tmp_path / "compare.csv"), cells(capsys.readouterr().out)
    assert [(line["norm"], line["status"], line["step"]) for line in lines] == [
        ("pre", "ok", "10"), ("pre", "ok", "10"), ("geo", "diverged at step 6", "6"),
        ("geo", "ok", "10")]
    assert lines[2]["mean_angle"] == "" and float(lines[3]["mean_angle"]) > 0
    assert [(line["norm"], line["learning_rate"]) for line in table] == [
        ("pre", "1e-05"), ("pre", "0.02*"), ("geo", "1e-05*"), ("geo", "0.02")]
    assert (table[3]["val nats/token"], table[3]["minus pre"]) == ("-", "-")
    assert table[3][""].endswith("diverged at step 6")
    assert steps(tmp_path / "geo-learning_rate=0.02") == [1, 2, 4, 6]


def test_every_run_diverged(tmp_path, capsys):
    """Also then there is a row for each run, none with a star, and exit code 1."""
    flags = "--norm pre geo --learning_rate 1e17 1e18 --grad_clip 0 --warmup_iters 0".split()
    assert "every run diverged" in refusal(run, tmp_path, *flags)
    table = cells(capsys.readouterr().out)
    assert [line["learning_rate"] for line in table] == ["1e+17", "1e+18"] * 2
    lines = read(tmp_path / "compare.csv")
    assert [line["run"] for line in lines if "diverged" in line["status"]] == names(*flags)


def test_diverged_run_again(tmp_path, monkeypatch, capsys):
    """The same command trains it again from its last checkpoint, to the same end; a remedy in the
    code trains it to the end."""
    with monkeypatch.context() as m:
        inject(m, loss=lambda c, step: step >= 6)
        for _ in range(2):
            assert "every run diverged" in refusal(run, tmp_path)
            assert steps(tmp_path / "geo") == [1, 2, 4, 6]
            assert "is of step 4" in capsys.readouterr().out
    run(tmp_path)
    assert steps(tmp_path / "geo") == [1, 2, 4, 6, 8, 10]


# -------------------------------------------------------------------------------------- at the end

def test_compare_csv(tmp_path):
    """What train.py writes is what the comparison reads: one line per run, with all its settings,
    its last line of log.csv, and its depth.csv in numbers."""
    flags = "--norm pre geo --seed 1 2 --geo_p 2 inf --max_iters 6 --dropout 0.1".split()
    run(tmp_path, *flags)
    lines, runs = read(tmp_path / "compare.csv"), configs("--out_dir", tmp_path, *flags)
    assert [line["run"] for line in lines] == [folder.name for folder in runs] and len(runs) == 6
    for line, (folder, c) in zip(lines, runs.items()):
        settings = {k: v for k, v in record(folder)["config"].items() if k in line}
        settings |= {"device": "cpu", "dtype": "float32"}
        assert len(settings) >= 20 and (settings["seed"], settings["norm"]) == (c.seed, c.norm)
        assert {k: line[k] for k in settings} == {
            k: "" if v is None else str(v) for k, v in settings.items()}
        last = log(folder)[-1]
        for name in ("step", "val_loss", "val_bits_per_byte"):
            assert line[name] == last[name]
        assert line["parameters"] == str(record(folder)["parameters"]) and line["status"]
        depth = [r for r in read(folder / "depth.csv") if r["step"] == "6"]
        rms = [float(r["stream_rms"]) for r in depth if r["sublayer"] == "mlp"]
        grad, angle = ([float(r[name]) for r in depth] for name in ("grad_norm", "angle"))
        found = [float(line[name]) for name in ("rms_last_first", "grad_max_min", "mean_angle")]
        want = [rms[-1] / rms[0], max(grad) / min(grad), sum(angle) / len(angle)]
        assert found == pytest.approx(want, rel=1e-9)
    run(tmp_path / "single", *"--norm pre --seed 3 3 --max_iters 3".split())
    assert [f.name for f in (tmp_path / "single").iterdir()] == ["pre-seed=3"]


def test_finished_sweep_again(tmp_path, monkeypatch, capsys):
    """A finished sweep run again trains nothing, changes no byte, prints the same table, and draws
    the figure anew."""
    monkeypatch.setattr(data.compare, "draw", DRAW)
    flags = "--norm pre geo --seed 1 2 --max_iters 4".split()
    run(tmp_path, *flags)
    assert (tmp_path / "compare.png").exists() == MATPLOTLIB
    (tmp_path / "compare.png").write_bytes(b"")
    table, before = capsys.readouterr().out.splitlines()[-3:], files(tmp_path)
    at_step(monkeypatch, lambda step, c: pytest.fail("it trains"))
    run(tmp_path, *flags)
    assert capsys.readouterr().out.splitlines()[-3:] == table
    assert bool((tmp_path / "compare.png").read_bytes()) == MATPLOTLIB
    after = files(tmp_path)
    assert after.keys() == before.keys()
    assert all(after[f][0] == before[f][0] for f in after if f.suffix != ".png")
    assert all(after[f] == before[f] for f in after if f.parent != tmp_path)


# ------------------------------------------------------------------------------------ depth profile

@pytest.mark.parametrize("norm", NORMS)
def test_depth_profile(norm):
    """Each number is what its column says, by a walk through the model by hand; and the model is as
    it was before."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 300, 3, 2, 16, 0.3, norm, geo_max_angle=1.2))
    with torch.no_grad():
        for p in model.parameters():    # a model as training might leave it: gains not 1
            p += 0.2 * torch.randn_like(p)
    ids, rng = torch.randint(300, (257, 16)), torch.get_rng_state()
    x, y = ids[:256], ids[1:]
    found = depth_profile(model, x, y)
    assert model.training and torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
                   for m in model.modules())

    def rms(t):
        return t.square().mean().sqrt().item()

    def angles(a, b):
        return ((a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)).clamp(-1, 1).acos()
    model.eval()
    model(x, y)[1].backward()
    want, stream = [], model.entry(model.wte(x))
    for layer, block in enumerate(model.blocks):
        squares = [p.grad.double().square().sum().item() for p in block.parameters()]
        for name, residual in (("attention", block.attention), ("mlp", block.mlp)):
            context = [model.rotary[:, :16]] if name == "attention" else []
            a, g = stream.detach().double(), residual.f(stream, *context).detach().double()
            stream = residual(stream, *context)
            b = stream.detach().double()
            tangent = g - (a * g).sum(-1, keepdim=True) / (a * a).sum(-1, keepdim=True) * a
            far = tangent.norm(dim=-1) / a.norm(dim=-1) > 1.2
            want.append({"layer": layer, "sublayer": name, "stream_rms": rms(b),
                         "update_rms": rms(b - a) / rms(a), "angle": angles(a, b).mean().item(),
                         "clamped": far.double().mean().item() if norm == "geo" else "",
                         "grad_norm": math.sqrt(sum(squares))})
    assert [list(line) for line in found] == [list(line) for line in want]
    for line, expected in zip(found, want):
        assert line == {k: pytest.approx(v, rel=1e-4) if isinstance(v, float) else v
                        for k, v in expected.items()}
    if norm == "geo":
        assert any(0 < line["clamped"] < 1 for line in found)
        assert all(line["stream_rms"] == pytest.approx(found[0]["stream_rms"], rel=1e-5)
                   for line in found)


def test_depth_csv(datasets, tmp_path):
    """It holds the profile at the start and at the last step, also when a larger --max_iters moves
    the last step."""
    val, c = np.memmap(datasets / "mine" / "val.bin", np.uint16, "r"), config()
    for last in (6, 9):
        run(tmp_path, "--max_iters", last)
        state = load(tmp_path / "geo")
        torch.manual_seed(c.seed)
        model, rows = GPT(GPTConfig(**state["model_config"])), []
        for step in (0, last):
            rows += train.profile(model, val, c, step, CPU)
            model.load_state_dict(state["model"])
        found = read(tmp_path / "geo" / "depth.csv")
        assert found == [{k: str(v) for k, v in row.items()} for row in rows]
        assert len(found) == 2 * 2 * 2
        assert list(found[0]) == ["step", "layer", "sublayer", "stream_rms", "update_rms", "angle",
                                  "clamped", "grad_norm"]


def test_no_last_step_no_profile_of_it(tmp_path, monkeypatch):
    """A finished run that is extended and diverges once kept the profile of its old last step as if
    of the new one."""
    flags = "--norm pre geo --max_iters".split()
    run(tmp_path, *flags, 6)
    inject(monkeypatch, loss=lambda c, step: c.norm == "geo" and step >= 7)
    run(tmp_path, *flags, 12)
    assert {line["run"]: line["mean_angle"] == "" for line in read(tmp_path / "compare.csv")} == {
        "pre": False, "geo": True}
    assert {row["step"] for row in read(tmp_path / "geo" / "depth.csv")} == {"0"}


def test_profile_leaves_padding_out():
    """A val text of less than one batch: what fills the batch up is no text, and the batch size
    changes nothing. Of large batches, 4,096 tokens are enough."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 257, 2, 2, 16))
    val = np.random.default_rng(0).integers(0, 256, 41).astype(np.uint8)
    few, many = (train.profile(model, val, config("--batch_size", size), 3, CPU)
                 for size in (2, 12))
    for a, b in zip(few, many):
        assert a == {k: pytest.approx(v, rel=1e-5) if isinstance(v, float) else v
                     for k, v in b.items()}
    assert len(few) == 4 and all(row["step"] == 3 for row in few)
    seen = []
    model.wte.register_forward_hook(lambda module, inputs, after: seen.append(inputs[0].shape))
    train.profile(model, np.zeros(16 * 400 + 1, np.uint8), config("--batch_size", 300), 0, CPU)
    assert seen == [(256, 16)]


def test_depth_profile_only_observes(tmp_path, monkeypatch):
    """Training with it is the training without it: dropout, losses, weights, optimizer."""
    folders = [tmp_path / name / "geo-dropout=0.1" for name in ("with", "without")]
    run(tmp_path / "with", "--dropout", 0.1)
    monkeypatch.setattr(train, "profile",
                        lambda model, ids, config, step, device: [{"step": step, "angle": 1.0}])
    run(tmp_path / "without", "--dropout", 0.1)
    a, b = (load(folder) for folder in folders)
    assert log(folders[0]) == log(folders[1])
    assert all(same(a[name], b[name]) for name in ("model", "optimizer", "rng"))
    assert a["files"]["depth.csv"] != b["files"]["depth.csv"]
