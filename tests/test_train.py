"""One run as its user meets it: flags, batches, evaluation, steps, divergence, half precision,
compilation, notebooks, signals and pipes.

What needs the real command line shares a few subprocesses; all else runs in this process.
"""
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data.runs
import train
from data.runs import load_checkpoint
from helpers import (
    CPU, FLOAT32, REPO, TINY, PowerCut, assert_same_run, at_step, cells, config, configs,
    cut_at, exit_code, inject, load, log, read, record, refusal, run, same, saved_step, signal_at,
    start, steps, updates)
from helpers import datasets, here      # noqa: F401 (fixtures)
from model import GPT, NORMS, GPTConfig

SMALL = dict(block_size=16, vocab_size=257, n_layer=2, n_head=2, n_embd=16)


def one_line(capsys) -> str:
    """What was printed on stderr, which must be one line; nothing is on stdout."""
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


# ------------------------------------------------------------------------------------------- flags

@pytest.mark.parametrize("flags, says", [
    ("--norm sandwich", "pre, post, peri, geo"), ("--norm pre bad", "geo"),
    ("--learningrate 1e-3", "--learningrate"), ("--learning 1e-3", "--learning"),
    ("--dtype bf16", "bfloat16"), ("--device gpu", "cuda"),
    ("--learning_rate -1", "--learning_rate"), ("--learning_rate nan", "--learning_rate"),
    ("--max_iters 0", "--max_iters"), ("--max_iters 1.5", "--max_iters"),
    ("--eval_interval 0", "--eval_interval"), ("--decay cubic", "harmonic"),
    ("--entry maybe", "none"), ("--norm pre --geo_p 0", "geo_p"), ("--geo_p 1e-300", "geo_p"),
    ("--norm pre --geo_max_angle nan", "geo_max_angle"),
    ("--learning_rate 1e-3 -1", "--learning_rate"), ("--dropout inf", "--dropout"),
    ("--seed -1", "--seed"), ("--preset huge", "baby"), ("stray", "stray")])
def test_wrong_flag(flags, says, capsys):
    """A misspelt flag or value once ended in a traceback, or trained something else; here one line
    and exit 2."""
    assert exit_code(train.parse_args, flags.split()) == 2
    err = one_line(capsys)
    assert says in err.replace("'", "") and "--help" in err


@pytest.mark.parametrize("flags, says", [
    ("--n_embd 130 --n_head 4", "n_head"), ("--n_embd 12 --n_head 4", "rotary"),
    ("--block_size 0", "block_size"), ("--dropout 1", "dropout"), ("--n_layer 0", "n_layer"),
    ("--geo_max_angle 4", "geo_max_angle"), ("--n_layer 2 0", "n_layer")])
def test_impossible_model(flags, says, tmp_path, capsys):
    """A model that cannot be built is one line and exit 2, before anything is written."""
    assert exit_code(run, tmp_path / "out", *flags.split()) == 2
    assert says in one_line(capsys) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [
    "--learning_rate 1e-4 1e-2 --min_lr 1e-3", "--min_lr 1e-4 1 --learning_rate 1e-2"])
def test_min_lr_above_the_rate(flags, capsys):
    """A run called learning_rate=0.0001 once ended, silently, at ten times that rate."""
    assert exit_code(configs, *flags.split()) == 2
    err = one_line(capsys)
    assert "--min_lr" in err and "--learning_rate" in err
    assert config("--learning_rate", 1e-3, "--min_lr", 1e-3).min_lr == 1e-3     # a constant rate


def test_out_dir_that_is_a_file(tmp_path, capsys):
    (tmp_path / "notes").write_text("kept", encoding="utf-8")
    assert exit_code(configs, "--out_dir", tmp_path / "notes") == 2
    assert f"{tmp_path / 'notes'} is a file" in one_line(capsys)
    assert (tmp_path / "notes").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize("flags, largest", [
    ("--warmup_iters 200 --max_iters 5", 0.003 * 5 / 201),
    ("--warmup_iters 4 --lr_decay_iters 4 --max_iters 6", 0.003 * 4 / 5),
    ("--warmup_iters 5 --max_iters 6", None), ("--warmup_iters 0 --max_iters 1", None)])
def test_warm_up_as_long_as_the_run(flags, largest, tmp_path, capsys):
    """The rate asked for was never reached, silently: now one line says so before training."""
    run(tmp_path, *flags.split())
    out = capsys.readouterr().out
    said = [line for line in out[:out.index(" step 1/")].splitlines() if "--warmup_iters" in line]
    rates = [float(row["learning_rate"]) for row in log(tmp_path / folder_of(flags))]
    assert len(said) == (largest is not None)
    if said:
        assert f"{largest:.3g}" in said[0] and "0.003" in said[0]
        assert max(rates) == pytest.approx(largest)


def folder_of(flags: str) -> str:
    folder, = configs(*flags.split())
    return folder.name


def test_no_cuda(tmp_path, monkeypatch):
    """Without CUDA, --device cuda is one line and exit 1, not torch's traceback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cpu" in refusal(run, tmp_path, "--device", "cuda")


def test_flags_override_presets():
    """Defaults once computed before the overrides won over them: a flag wins over its preset, in
    any order."""
    given = ["--n_layer", "3", "--dropout", "0.0"]
    before = train.parse_args(given + ["--preset", "baby"])
    after = train.parse_args(["--preset", "baby"] + given)
    assert before == after
    c, = after.values()
    assert (c.n_layer, c.dropout, c.n_embd) == (3, 0.0, 384)
    c, = train.parse_args(["--preset", "gpt2", "--n_embd", "192"]).values()
    assert (c.n_embd, c.block_size) == (192, 1024)
    order = [c.norm for c in train.parse_args(["--norm", "post", "pre", "post"]).values()]
    assert order == ["post", "pre"]
    assert set(train.PRESETS) == {"tiny", "baby", "gpt2"}
    choices = {f.name: f.metadata["choices"] for f in fields(train.Config)}
    assert set(choices["preset"]) == set(train.PRESETS) and tuple(choices["norm"]) == NORMS


# -------------------------------------------------------------------------------------------- data

def test_refused_before_anything_is_written(tmp_path):
    """No dataset, or one shorter than the longest context of a sweep, leaves no folder behind. A
    name too long for a folder was once blamed on --out_dir."""
    out = tmp_path / "out"
    assert "a" * 300 in refusal(run, out, "--dataset", "a" * 300)
    line = refusal(run, out, "--dataset", "nowhere")
    assert "nowhere" in line and "prepare.py" in line
    line = refusal(run, out, "--block_size", 16, 400)
    assert "--block_size" in line and "401" in line
    assert not out.exists()


def test_get_batch():
    """Batches are a function of (seed, number) only, so resuming needs no hidden state; targets
    are the next ids."""
    ids, c = np.arange(500, dtype=np.uint16), config()
    batches = [train.get_batch(ids, c, i, CPU) for i in range(20)]
    torch.manual_seed(0)
    np.random.seed(0)
    for i in (7, 19, 0):
        assert same(train.get_batch(ids, config("--norm", "pre"), i, CPU), batches[i])
    assert all(x.shape == (4, 16) and torch.equal(y, x + 1) for x, y in batches)
    assert len({tuple(x[:, 0].tolist()) for x, _ in batches}) == 20
    assert not same(train.get_batch(ids, config("--seed", 1), 7, CPU), batches[7])
    starts = {int(i) for k in range(20) for i in train.get_batch(ids[:18], c, k, CPU)[0][:, 0]}
    assert starts == {0, 1}


@pytest.mark.parametrize("length", [2, 17, 18, 65, 66, 100, 161, 333])
def test_val_batches_cover_val_once(length):
    """Each val token after the first is predicted exactly once, also where val is no multiple of a
    window or batch."""
    ids, seen = np.arange(length, dtype=np.uint16), []
    for x, y, n in train.val_batches(ids, config("--eval_iters", 0)):
        counted = y >= 0
        assert x.shape == y.shape == (4, 16) and n == counted.sum() > 0
        assert torch.equal(x[counted] + 1, y[counted])
        seen += y[counted].tolist()
    assert sorted(seen) == list(range(1, length))


def test_val_subset_is_fixed_and_spread():
    """With eval_iters the windows are distinct, the same each time, and spread over all of val, not
    its start."""
    ids, c = np.arange(1601, dtype=np.uint16), config("--eval_iters", 3)
    a, b = ([x for x, _, _ in train.val_batches(ids, c)] for _ in range(2))
    starts = torch.cat(a)[:, 0]
    assert same(a, b) and len(a) == 3 and not (starts % 16).any()
    gaps = starts.diff() // 16
    assert starts[0] == 0 and starts[-1] == 1584 and gaps.min() >= 8 and gaps.max() <= 10
    whole = [x for x, _, _ in train.val_batches(ids, config("--eval_iters", 0))]
    assert same([x for x, _, _ in train.val_batches(ids, config("--eval_iters", 25))], whole)


@pytest.mark.parametrize("norm", NORMS)
def test_evaluate(norm):
    """The mean over tokens, not over batches of unequal size; no dropout; the training's random
    numbers untouched."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 300, 1, 2, 16, 0.5, norm))
    ids = np.random.default_rng(0).integers(300, size=16 * 9 + 6).astype(np.uint16)
    rng = torch.get_rng_state()
    loss = train.evaluate(model, ids, config("--eval_iters", 0), CPU, FLOAT32)
    assert torch.equal(torch.get_rng_state(), rng) and model.training
    model.eval()
    text, total = torch.from_numpy(ids.astype(np.int64)), 0.0
    for i in range(0, len(ids) - 1, 16):
        y = text[i + 1:i + 17]
        logits, _ = model(text[None, i:i + len(y)], y[None])
        total += F.cross_entropy(logits[0], y, reduction="sum").item()
    assert loss == pytest.approx(total / (len(ids) - 1), rel=1e-6)


def test_bits_per_byte():
    """Equal logits read 8 bits/byte over byte ids, and 8*log2(50257)/17 where 8 GPT-2 tokens stand
    for 17 bytes."""
    def bits(ids, tokens, size):
        return train.bits_per_byte(math.log(ids), {"val_tokens": tokens, "val_bytes": size})
    assert bits(256, 17, 17) == pytest.approx(8)
    assert bits(50257, 8, 17) == pytest.approx(7.3492, abs=1e-4)


# ------------------------------------------------------------------------------------------- steps

def test_learning_rate():
    """Warm-up to the peak, a cosine down to min_lr, which stays; a warm-up as long as the decay is
    no 1/0."""
    c = config("--learning_rate", 1.0, "--min_lr", 0.1, "--warmup_iters", 100,
               "--lr_decay_iters", 1000)
    rates = [train.learning_rate(step, c) for step in range(1, 1201)]
    assert rates[:101] == pytest.approx([step / 101 for step in range(1, 102)])
    assert rates[550] == pytest.approx(0.55, abs=1e-3)
    assert all(a > b for a, b in zip(rates[100:999], rates[101:999]))
    assert rates[999] == pytest.approx(0.1, rel=1e-3)
    assert rates[1000:] == [pytest.approx(0.1)] * 200
    c.warmup_iters = 1000
    assert train.learning_rate(1000, c) == pytest.approx(1000 / 1001)
    assert train.learning_rate(1001, c) in (pytest.approx(0.1), 1.0)
    c.warmup_iters, c.min_lr = 0, None
    assert train.learning_rate(1, c) == 1.0
    assert train.learning_rate(2000, c) == pytest.approx(0.1)


def test_same_start_same_batches(tmp_path, monkeypatch, capsys):
    """One command compares only the norms: the same shared weights at the start, the same batches,
    one table."""
    starts, batches, make, get = [], [], train.GPT, train.get_batch

    def recorded(config):
        model = make(config)
        starts.append({k: v.clone() for k, v in model.state_dict().items()})
        batches.append([])
        return model

    def recorded_batch(ids, config, index, device):
        batches[-1].append((index, get(ids, config, index, device)))
        return batches[-1][-1][1]
    monkeypatch.setattr(train, "GPT", recorded)
    monkeypatch.setattr(train, "get_batch", recorded_batch)
    flags = "--max_iters 3 --gradient_accumulation_steps 2".split()
    run(tmp_path, "--norm", *NORMS, *flags)
    shared = set.intersection(*(set(s) for s in starts))
    assert {"wte.weight", "blocks.1.mlp.f.c_proj.weight",
            "blocks.0.attention.f.c_attn.weight"} <= shared
    for weights, seen in zip(starts, batches):
        assert all(torch.equal(weights[k], starts[0][k]) for k in shared)
        assert [i for i, _ in seen] == list(range(6)) and same(seen, batches[0])

    out = capsys.readouterr().out
    assert "\r" not in out
    table = cells(out)
    assert [line["norm"] for line in table] == list(NORMS)
    assert all(line["best (step)"].endswith("(3)") for line in table)
    counts = [sum(p.numel() for p in GPT(GPTConfig(**SMALL, norm=norm)).parameters())
              for norm in NORMS]
    assert [int(line["parameters"].replace(",", "")) for line in table] == counts
    assert all(float(line["tokens/s"].replace(",", "")) > 0 for line in table)


def test_log_and_same_bytes(datasets, tmp_path):
    """log.csv has step 1, the log steps and the evaluations, the last step always; a second run
    writes the same."""
    flags = "--max_iters 11 --log_interval 3 --dropout 0.1".split()
    name = "geo-dropout=0.1"
    for out in ("a", "b"):
        run(tmp_path / out, *flags)
    run(tmp_path / "seed", *flags, "--seed", 1)
    assert_same_run(tmp_path / "a" / name, tmp_path / "b" / name)
    rows = log(tmp_path / "a" / name)
    assert rows != log(tmp_path / "seed" / (name + "-seed=1"))
    assert [int(row["step"]) for row in rows] == [1, 3, 4, 6, 8, 9, 11]

    meta = json.loads((datasets / "mine" / "meta.json").read_text(encoding="utf-8"))
    c = config(*flags)
    for row in rows:
        step = int(row["step"])
        assert bool(row["val_loss"]) == bool(row["val_bits_per_byte"]) == (step in (4, 8, 11))
        assert float(row["learning_rate"]) == pytest.approx(train.learning_rate(step, c))
        assert float(row["train_loss"]) > 0 and float(row["grad_norm"]) > 0
    val_loss = float(rows[-1]["val_loss"])
    bits = val_loss / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
    assert float(rows[-1]["val_bits_per_byte"]) == pytest.approx(bits, rel=1e-12)
    assert float(rows[0]["train_loss"]) == pytest.approx(math.log(257), abs=0.3)
    assert val_loss < float(rows[0]["train_loss"])


def test_n_steps_are_n_steps(tmp_path):
    """--max_iters 5 once made 6 updates and saved none: five are five, and the last is evaluated
    and saved."""
    run(tmp_path, "--max_iters", 5, "--eval_interval", 1000, "--log_interval", 1000)
    folder = tmp_path / "geo"
    state = load(folder)
    assert updates(folder) == {5} and steps(folder) == [1, 5]
    parameters = list(GPT(GPTConfig(**SMALL)).parameters())
    assert len(state["optimizer"]["state"]) == len(parameters)
    assert state["progress"]["step"] == state["progress"]["best_step"] == 5
    assert same(load(folder, "best.pt")["model"], state["model"])


def test_seconds(tmp_path, monkeypatch):
    """train_seconds is the time of the steps, evaluations left out; both clocks only grow, also
    over a cut, and what a killed session did after its checkpoint is not counted twice."""
    clock = [1000.0]

    class Time:
        @staticmethod
        def perf_counter():
            return clock[0]

    def evaluate(*_):
        clock[0] += 100
        return 5.0
    monkeypatch.setattr(train, "time", Time)
    monkeypatch.setattr(data.runs, "time", Time)
    monkeypatch.setattr(train, "evaluate", evaluate)
    at_step(monkeypatch, lambda step, _: clock.__setitem__(0, clock[0] + 1))
    with monkeypatch.context() as m, pytest.raises(PowerCut):
        cut_at(m, 7)
        run(tmp_path)
    clock[0] += 5000
    run(tmp_path)
    rows = read(tmp_path / "geo" / "log.csv")
    assert [(int(row["step"]), float(row["train_seconds"])) for row in rows] == [
        (step, step) for step in (1, 2, 4, 6, 8, 10)]
    assert [float(row["elapsed_seconds"]) for row in rows][-2:] == [108, 210]
    assert [float(row["tokens_per_second"]) for row in rows] == [4 * 16] * 6


def test_accumulation_is_one_larger_batch(tmp_path, monkeypatch):
    """Two batches per step give the loss and gradient of both at once: the mean, not the sum."""
    run(tmp_path, "--max_iters", 1, "--gradient_accumulation_steps", 2)
    get = train.get_batch
    monkeypatch.setattr(train, "get_batch", lambda ids, config, index, device: tuple(
        map(torch.cat, zip(*(get(ids, config, i, device) for i in (0, 1))))))
    run(tmp_path, "--max_iters", 1)
    two = log(tmp_path / "geo-gradient_accumulation_steps=2")[0]
    one = log(tmp_path / "geo")[0]
    for name in ("train_loss", "grad_norm", "val_loss"):
        assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-4)


def test_training_step():
    """One step by hand: the loss, the norm before clipping, and AdamW on the clipped gradient. Both
    come back as tensors: a number would make a GPU wait in every step."""
    torch.manual_seed(0)
    model, twin = (GPT(GPTConfig(**SMALL)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    ids = torch.randint(257, (2, 4, 17))
    batches = [(b[:, :-1], b[:, 1:]) for b in ids]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin)]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss, norm = train.training_step(model, optimizers[0], scaler, batches, FLOAT32, 0.1)
    assert torch.is_tensor(loss) and torch.is_tensor(norm) and loss.shape == norm.shape == ()
    assert not loss.requires_grad

    want = sum(twin(x, y)[1] for x, y in batches) / 2
    want.backward()
    length = torch.stack([p.grad.norm() for p in twin.parameters()]).norm()
    assert loss.item() == pytest.approx(want.item()) and norm.item() == pytest.approx(length.item())
    assert length > 0.2
    for p in twin.parameters():
        p.grad *= 0.1 / length
    optimizers[1].step()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.allclose(p, q, atol=1e-4) and p.grad is None


@pytest.mark.parametrize("norm", NORMS)
def test_weight_decay_by_name(norm, tmp_path):
    """Only matrices are decayed: no gain, no number of the geodesic step; and no parameter is
    missed or taken twice."""
    model = GPT(GPTConfig(**SMALL, norm=norm))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, rest = ([names[id(p)] for p in group["params"]]
                     for group in model.param_groups(0.1))
    matrices = ["c_attn", "c_proj", "c_fc"]
    assert all(name == "wte.weight" or name.split(".")[-2] in matrices for name in decayed)
    assert len(decayed) == 1 + 2 * 4
    gains = ("entry.weight", "exit.weight")
    assert all(name.endswith((".scale", ".bias")) or "norm" in name or name in gains
               for name in rest)
    assert sorted(decayed + rest) == sorted(names.values())
    if norm == "geo":
        assert sum(name.endswith((".scale", ".bias")) for name in rest) == 8
    run(tmp_path, "--norm", norm, "--max_iters", 1, "--weight_decay", 0.3)
    groups = load(tmp_path / f"{norm}-weight_decay=0.3")["optimizer"]["param_groups"]
    assert [(g["weight_decay"], len(g["params"])) for g in groups] == [
        (0.3, len(decayed)), (0.0, len(rest))]


def test_best_survives_overfitting(tmp_path, monkeypatch, capsys):
    """Where val falls, then rises, best.pt keeps the best step and ckpt.pt the last, also when the
    run continues. The table compares the last, and shows the best beside it."""
    weights, losses = [], iter([5.0, 3.0, 4.0, 6.0, 3.5])

    def evaluate(model, *_):
        weights.append({k: v.clone() for k, v in model.state_dict().items()})
        return next(losses)
    monkeypatch.setattr(train, "evaluate", evaluate)
    run(tmp_path, "--max_iters", 8, "--eval_interval", 2)
    folder = tmp_path / "geo"
    best = (folder / "best.pt").read_bytes()
    assert same(load(folder, "best.pt")["model"], weights[1])
    assert same(load(folder)["model"], weights[3])
    line, = cells(capsys.readouterr().out)
    assert (line["val nats/token"], line["best (step)"]) == ("6.0000", "3.0000 (4)")
    run(tmp_path, "--max_iters", 10, "--eval_interval", 2)
    assert (folder / "best.pt").read_bytes() == best and same(load(folder)["model"], weights[4])
    line, = cells(capsys.readouterr().out)
    assert (line["val nats/token"], line["best (step)"]) == ("3.5000", "3.0000 (4)")


# -------------------------------------------------------------------------------------- divergence

@pytest.mark.parametrize("where, dtype", [
    ("loss", "float32"), ("gradient", "float32"), ("loss", "float16")])
def test_divergence(where, dtype, tmp_path, monkeypatch, capsys):
    """A nan once trained on for hours, or ended the other norms too: the run ends by the next log
    line, its checkpoint stays whole, its record names the step, and the others continue."""
    inject(monkeypatch, **{where: lambda c, step: c.norm == "post" and step >= 5})
    ended = {}
    at_step(monkeypatch, lambda step, c: ended.__setitem__(c.norm, step))
    run(tmp_path, "--norm", "post", "geo", "--max_iters", 16, "--log_interval", 3,
        "--dtype", dtype)
    out = capsys.readouterr().out
    assert ended == {"post": 6, "geo": 16}
    assert "post diverged at step 5" in out and "learning_rate" in out and "is of step 4" in out
    post, geo = cells(out)
    assert post[""].endswith("diverged at step 5") and post["val nats/token"] == "-"
    assert "diverged" not in geo[""] and geo["val nats/token"] != "-"
    state = load_checkpoint(tmp_path / "post" / "ckpt.pt")
    assert state["progress"]["step"] == 4
    assert all(v.isfinite().all() for v in state["model"].values())
    assert steps(tmp_path / "post") == [1, 3, 4, 5] and steps(tmp_path / "geo")[-1] == 16
    assert log(tmp_path / "post")[-1]["train_loss"] == "nan"


def test_all_diverged(tmp_path, capsys):
    """Far too high a learning rate: each run says so and the exit code is 1, also when nothing was
    saved yet."""
    flags = "--norm pre post --learning_rate 1e18 --grad_clip 0 --warmup_iters 0 --log_interval 1"
    code = exit_code(run, tmp_path, *flags.split())
    out = capsys.readouterr().out
    assert "every run diverged" in code and out.count(" diverged at step ") == 4
    assert "Nothing was saved yet" in out and not list(tmp_path.rglob("*.pt"))


def test_val_diverged(tmp_path, monkeypatch, capsys):
    """A val loss that is not finite is no best, and its weights are not saved over good ones."""
    values = iter([5.0, math.nan])
    monkeypatch.setattr(train, "evaluate", lambda *_: next(values))
    assert "every run diverged" in refusal(run, tmp_path)
    assert cells(capsys.readouterr().out)[0][""].endswith("diverged at step 8")
    folder = tmp_path / "geo"
    assert saved_step(folder) == saved_step(folder, "best.pt") == 4
    assert steps(folder) == [1, 2, 4, 6, 8]


# ---------------------------------------------------------------------------------- half precision

@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_trains(dtype, tmp_path):
    """All four train under autocast; the gradient is clipped and logged without float16's scale."""
    run(tmp_path / "float32", "--norm", *NORMS, "--max_iters", 3)
    run(tmp_path, "--norm", *NORMS, "--max_iters", 12, "--dtype", dtype)
    for norm in NORMS:
        rows = log(tmp_path / norm)
        assert float(rows[-1]["val_loss"]) < float(rows[0]["train_loss"]) - 0.01
        exact = float(log(tmp_path / "float32" / norm)[0]["grad_norm"])
        assert float(rows[0]["grad_norm"]) == pytest.approx(exact, rel=0.05)
        assert all(v.dtype == torch.float32 for v in load(tmp_path / norm)["model"].values())
        assert record(tmp_path / norm)["dtype"] == dtype


def test_skipped_steps_are_no_divergence(tmp_path, monkeypatch):
    """With float16 the scaler skips inf gradients and lowers its scale; 19 in a row are normal."""
    inject(monkeypatch, gradient=lambda c, step: 3 <= step < 22)
    flags = "--dtype float16 --max_iters 30 --log_interval 1 --eval_interval 30".split()
    run(tmp_path, *flags)
    folder = tmp_path / "geo"
    assert updates(folder) == {11} and steps(folder) == list(range(1, 31))
    assert all(math.isfinite(float(row["train_loss"])) for row in log(folder))
    assert load(folder)["scaler"]["scale"] == 65536 / 2**19


def test_twenty_skips_are_a_divergence(tmp_path, monkeypatch, capsys):
    """A scale that falls without end is a divergence: 20 skips in a row, counted across log lines.
    Its step is the one where they began."""
    now = inject(monkeypatch, gradient=lambda c, step: step >= 3)
    flags = "--dtype float16 --max_iters 40 --log_interval 5 --eval_interval 40".split()
    assert "every run diverged" in refusal(run, tmp_path, *flags)
    out = capsys.readouterr().out
    assert "geo diverged at step 3:" in out and now[0] == 25
    assert cells(out)[0][""].endswith("diverged at step 3")
    logged = steps(tmp_path / "geo")
    assert logged == sorted(set(logged)) and logged[-1] == 3


def test_float16_resumes_bit_for_bit(tmp_path, monkeypatch):
    """The loss scale once started afresh on resume: it is the saved one."""
    inject(monkeypatch, gradient=lambda c, step: step in (2, 3))
    flags = ["--dtype", "float16", "--dropout", 0.1]
    run(tmp_path / "whole", *flags)
    with monkeypatch.context() as m, pytest.raises(PowerCut):
        cut_at(m, 7)
        run(tmp_path / "cut", *flags)
    run(tmp_path / "cut", *flags)
    name = "geo-dropout=0.1"
    assert load(tmp_path / "cut" / name)["scaler"]["scale"] == 65536 / 4
    assert_same_run(tmp_path / "whole" / name, tmp_path / "cut" / name)


def test_float32_to_float16_and_back(tmp_path, capsys):
    """A checkpoint continues in another dtype, with a fresh scale where there was none, and it is
    said."""
    for n, dtype in ((4, "float32"), (8, "float16"), (12, "float32"), (16, "bfloat16")):
        run(tmp_path, "--max_iters", n, "--dtype", dtype)
        assert ("not bit for bit" in capsys.readouterr().out) == (n > 4)
        assert bool(load(tmp_path / "geo")["scaler"]) == (dtype == "float16")
        assert saved_step(tmp_path / "geo") == n


# -------------------------------------------------------------------------------------- the system

def test_in_a_notebook(tmp_path, monkeypatch):
    """A notebook's output has no `reconfigure`, and its cells may run in a thread, which can have
    no signal handlers: main trains in both, and prints to where sys.stdout is."""
    console = io.StringIO()
    with monkeypatch.context() as m:
        m.setattr(sys, "stdout", console)
        run(tmp_path / "cell", "--norm", "pre", "geo", "--max_iters", 3)
        errors = []

        def cell():
            try:
                run(tmp_path / "thread", "--max_iters", 3)
            except BaseException as error:
                errors.append(error)
        thread = threading.Thread(target=cell)
        thread.start()
        thread.join()
    assert errors == [] and console.getvalue().count("\nnorm ") == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == (
        signal.default_int_handler, signal.SIG_DFL)
    assert_same_run(tmp_path / "cell" / "geo", tmp_path / "thread" / "geo")


def test_handlers_are_put_back(tmp_path, monkeypatch):
    """After train.main, also after one that was stopped, Ctrl-C is again what it was before: a
    notebook once could not be interrupted any more."""
    def mine(number, frame):
        pytest.fail("a signal came through")
    with monkeypatch.context() as m:
        signal_at(m, signal.SIGTERM, lambda step, c: step == 3)
        before = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            assert exit_code(run, tmp_path) == 143
            assert all(signal.getsignal(number) is mine for number in before)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def test_memory_without_proc(tmp_path, monkeypatch, capsys):
    """Where the system does not tell, as on macOS and Windows, the peak is an empty cell and a dash
    in the table; it once read 0."""
    original = data.runs.Path

    class NoProc(type(original())):
        def __new__(cls, path, *rest):
            return original("/nowhere" if str(path).startswith("/proc") else path, *rest)
    monkeypatch.setattr(data.runs, "Path", NoProc)
    assert data.runs.peak_memory(CPU) is None and data.runs.peak_memory(CPU, reset=True) is None
    run(tmp_path, "--max_iters", 3)
    assert [row["peak_mb"] for row in read(tmp_path / "geo" / "log.csv")] == [""] * 3
    line, = cells(capsys.readouterr().out)
    assert line["peak MB"] == "-"


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_memory_is_not_the_dataset(tmp_path):
    """The pages of a dataset that were read once counted as the model's memory: 4.7 GB for a tiny
    model. What the process allocates does count, and a reset forgets what came before."""
    size = 300 << 20
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(size)
    start = data.runs.peak_memory(CPU, reset=True)
    ids = np.memmap(tmp_path / "big.bin", np.uint8, "r")
    assert int(ids[::4096].max()) == 0
    assert data.runs.peak_memory(CPU) < start + 30
    block = torch.ones(100 << 18)       # 100 MB
    assert start + 80 < data.runs.peak_memory(CPU) < start + 130
    del block, ids
    assert data.runs.peak_memory(CPU, reset=True) < start + 30


def test_out_of_memory(monkeypatch):
    """A full memory, of the CPU or the GPU, is one line that says what to lower; any other error
    of torch is not taken for one."""
    errors = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
              RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")]

    def fail(runs):
        raise errors[0]
    monkeypatch.setattr(train, "main", fail)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    while errors:
        assert "--batch_size" in refusal(train.run_command)
        errors.pop(0)
        if not errors:
            break
    errors.append(RuntimeError("a shape is wrong"))
    with pytest.raises(RuntimeError, match="shape"):
        train.run_command()


@pytest.mark.skipif(os.name == "nt", reason="POSIX shell")
def test_places_to_print(datasets, tmp_path):
    """The real command line. --help lists every flag, also on a console that is not UTF-8. A
    closed stdout trains silently; a full one is named: once --out_dir was blamed for it."""
    flags = "--n_layer 1 --max_iters 2 --eval_iters 1"
    commands = [
        ("--help", {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}), (f"{flags} >&-", {}),
        (f"{flags} >/dev/full", {})]

    def ended(job):
        number, (line, env) = job
        process = subprocess.run(
            f'"{sys.executable}" "{REPO}/train.py" --dataset mine --device cpu '
            f'--out_dir "{tmp_path}/{number}" {line}', shell=True, capture_output=True, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "NANONORM_DATA": str(datasets)} | env)
        return process.returncode, process.stdout, process.stderr
    with ThreadPoolExecutor(3) as pool:
        helped, closed, full = pool.map(ended, enumerate(commands))
    assert helped[0] == 0 and helped[2] == ""
    assert all(f"--{f.name}" in helped[1] for f in fields(train.Config))
    assert closed[:2] == (0, "") and "Error" not in closed[2]
    assert saved_step(tmp_path / "1" / "geo-n_layer=1") == 2
    assert full[0] == 1 and full[2].count("\n") == 1
    assert "standard output" in full[2] and "out_dir" not in full[2]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_signals_and_pipes(datasets, tmp_path):
    """The real command line: Ctrl-C saves and exits 130 (SIGTERM is in test_sweep.py); kill -9
    leaves a whole checkpoint; the same command finishes both; a log in a file has no carriage
    return; `| head -1` ends quietly."""
    flags = "--max_iters 150 --eval_interval 3 --eval_iters 1 --log_interval 1".split()

    def ended_by(number):
        process = start(datasets, *flags, "--out_dir", tmp_path / str(number))
        out = b""
        while number and b"step 10/" not in out:
            assert (line := process.stdout.readline()), process.stderr.read()
            out += line
        if number:
            process.send_signal(number)
            rest, err = process.communicate(timeout=60)
        else:
            process.stdout.readline()
            process.stdout.close()
            rest, err = b"", process.stderr.read()
        return process.wait(60), (out + rest).decode(), err.decode()
    codes = {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL, 0: 1}
    with ThreadPoolExecutor(3) as pool:
        results = dict(zip(codes, pool.map(ended_by, codes)))
    for number, (code, out, err) in results.items():
        assert (code, err) == (codes[number], ""), (number, err)
        assert "\r" not in out
        if code > 1:
            assert "stopped: step" in out and "the same command" in out
        if number:
            folder, = (tmp_path / str(number)).iterdir()
            assert 9 <= load_checkpoint(folder / "ckpt.pt")["progress"]["step"] < 150
            given = [word for name in ("n_layer", "n_head", "n_embd", "block_size", "batch_size",
                     "warmup_iters") for word in (f"--{name}", TINY[name])]
            run(folder.parent, *given, *flags)
            assert steps(folder) == list(range(1, 151))


# ------------------------------------------------------------------------------------ interruption

def test_terminated_in_process(tmp_path, monkeypatch, capsys):
    """A signal saves, leaves with its exit code and starts no other norm; the same command does
    what is left."""
    with monkeypatch.context() as m:
        signal_at(m, signal.SIGTERM, lambda step, c: step == 3)
        assert exit_code(run, tmp_path, "--norm", "pre", "geo") == 128 + signal.SIGTERM
    assert saved_step(tmp_path / "pre") == 3 and not (tmp_path / "geo").exists()
    run(tmp_path, "--norm", "pre", "geo")
    assert steps(tmp_path / "pre") == steps(tmp_path / "geo") == [1, 2, 4, 6, 8, 10]


def test_second_interrupt(tmp_path, monkeypatch):
    """Ctrl-C twice leaves at once, with the last checkpoint whole."""
    def twice(step, _):
        if step == 6:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        at_step(m, twice)
        run(tmp_path)
    assert load_checkpoint(tmp_path / "geo" / "ckpt.pt")["progress"]["step"] == 4
    run(tmp_path)


# ----------------------------------------------------------------------------------------- compile

def test_compile_without_compiler(datasets, tmp_path):
    """--compile where no C++ compiler works is one line at the start, not a traceback after the
    first step."""
    process = start(datasets, "--compile", "--out_dir", tmp_path / "out", CXX="/nonexistent",
                    TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    out, err = (part.decode() for part in process.communicate(timeout=60))
    assert process.returncode == 1 and err.count("\n") == 1 and "--no-compile" in err
    assert "step 1/" not in out and not list((tmp_path / "out").rglob("*.pt"))


def test_compiled_run(tmp_path, monkeypatch):
    """A compiled run once saved names with _orig_mod.: it continues uncompiled, head and embedding
    still one tensor. The graphs of the loss and of its gradient are captured, but run by torch:
    building C++ from them takes half a minute, and is torch's own part."""
    compiled_calls, compile = [], torch.compile

    def capture(f):
        compiled_calls.append(f)
        return compile(f, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", capture)
    flags = "--n_layer 1 --n_embd 8 --n_head 1 --max_iters 3 --eval_interval 3".split()
    run(tmp_path / "plain", *flags)
    assert compiled_calls == []
    run(tmp_path / "compiled", *flags, "--compile")
    assert len(compiled_calls) == 1
    name = folder_of(" ".join(flags))
    compiled, plain = tmp_path / "compiled" / name, tmp_path / "plain" / name
    assert load(compiled)["model"].keys() == load(plain)["model"].keys()
    assert record(compiled)["parameters"] == record(plain)["parameters"]
    assert (record(compiled)["compiled"], record(plain)["compiled"]) == (True, False)
    assert sum(k.endswith("wte.weight") or "head" in k for k in load(compiled)["model"]) == 1
    losses = [float(log(folder)[-1]["val_loss"]) for folder in (compiled, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    run(tmp_path / "compiled", *flags, "--max_iters", 4, "--no-compile")
    assert saved_step(compiled) == 4
