"""Training as its user meets it: flags, data, the log, checkpoints, going on after a cut, divergence, signals, pipes.

Runs are tiny and in this process, but for what needs the real command line."""
import csv
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F

import data.prepare
import geonorm
import sample
import train
from model import GPT, NORMS, GPTConfig

REPO = Path(__file__).resolve().parents[1]
TINY = ("--dataset mine --device cpu --n_layer 2 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --max_iters 10 "
        "--warmup_iters 2 --eval_interval 4 --log_interval 2").split()
CPU = torch.device("cpu")
FLOAT32 = torch.autocast("cpu", torch.bfloat16, enabled=False)


def words(n: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(("sea ", "ice ", "of ", "the\n", "sphere ")) for _ in range(n))[:n]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A copy of the program with the datasets `mine` and `short`."""
    root = tmp_path_factory.mktemp("root")
    for path in (*REPO.glob("*.py"), REPO / "data" / "prepare.py"):
        (root / path.relative_to(REPO)).parent.mkdir(exist_ok=True)
        shutil.copy(path, root / path.relative_to(REPO))
    with pytest.MonkeyPatch.context() as m:
        m.setattr(data.prepare, "HERE", root / "data")
        for name, n in (("mine", 4000), ("short", 100)):
            (root / f"{name}.txt").write_text(words(n), encoding="utf-8")
            data.prepare.prepare([str(root / f"{name}.txt")])
    return root


@pytest.fixture(autouse=True)
def here(root, monkeypatch):
    monkeypatch.setattr(train, "HERE", root)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def own_data(root, tmp_path, monkeypatch):
    """A copy of the datasets that a test may spoil."""
    shutil.copytree(root / "data", tmp_path / "data")
    monkeypatch.setattr(train, "HERE", tmp_path)
    monkeypatch.setattr(data.prepare, "HERE", tmp_path / "data")
    return tmp_path / "data" / "mine"


def configs(*flags) -> list[train.Config]:
    return train.parse_args([*TINY, *map(str, flags)])


def run(out: Path, *flags):
    train.main(configs("--out_dir", out, *flags))


def refusal(call, *args) -> str:
    """The one line with which call ends the program, exit code 1."""
    with pytest.raises(SystemExit) as info:
        call(*args)
    assert isinstance(info.value.code, str) and "\n" not in info.value.code
    return info.value.code


def exit_code(call, *args):
    with pytest.raises(SystemExit) as info:
        call(*args)
    return info.value.code


def cli(*args, **env) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, REPO / "train.py", *args], env=os.environ | env, text=True,
                          capture_output=True)


def start(root: Path, *flags, **env) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "train.py", *TINY, *map(str, flags)], cwd=root, env=os.environ | env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def log(folder: Path) -> list[dict]:
    """log.csv without its time columns; the header must be the first line and no other."""
    with open(folder / "log.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0] == train.LOG_COLUMNS and all(len(line) == len(lines[0]) for line in lines)
    times = ("tokens_per_second", "elapsed_seconds")
    return [{k: v for k, v in zip(lines[0], line) if k not in times} for line in lines[1:]]


def steps(folder: Path) -> list[int]:
    return [int(row["step"]) for row in log(folder)]


def files(folder: Path) -> dict:
    return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in sorted(folder.rglob("*")) if f.is_file()}


def load(folder: Path, name: str = "ckpt.pt") -> dict:
    return torch.load(folder / name, weights_only=True)


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def same_run(a: Path, b: Path) -> bool:
    whole = all(same(load(a)[k], load(b)[k]) for k in ("model", "optimizer", "scaler", "rng"))
    return whole and log(a) == log(b) and same(load(a, "best.pt")["model"], load(b, "best.pt")["model"])


def at_step(monkeypatch, action):
    """Call action(step, config) before each step."""
    original = train.learning_rate

    def learning_rate(step, config):
        action(step, config)
        return original(step, config)
    monkeypatch.setattr(train, "learning_rate", learning_rate)


def inject(monkeypatch, loss=None, gradient=None):
    """Where loss(norm, step) the training loss is nan; where gradient(norm, step) the embedding's gradient is inf."""
    now = [0]
    at_step(monkeypatch, lambda step, config: now.__setitem__(0, step))

    class Faulty(GPT):
        def __init__(self, config):
            super().__init__(config)
            if gradient:
                self.wte.weight.register_hook(lambda g: g * math.inf if gradient(config.norm, now[0]) else g)

        def forward(self, *args, **kwargs):
            logits, value = super().forward(*args, **kwargs)
            return logits, value * math.nan if loss and self.training and loss(self.config.norm, now[0]) else value
    monkeypatch.setattr(train, "GPT", Faulty)
    return now


class PowerCut(Exception):
    pass


def cut_at(monkeypatch, k: int):
    def action(step, config):
        if step == k:
            raise PowerCut
    at_step(monkeypatch, action)


# --------------------------------------------------------------------------------------------------------- flags

@pytest.mark.parametrize("flags, says", [
    ("--norm sandwich", "pre, post, peri, geo"), ("--norm pre bad", "geo"), ("--learningrate 1e-3", "--learningrate"),
    ("--learning 1e-3", "--learning"), ("--dtype bf16", "bfloat16"), ("--device gpu", "cuda"),
    ("--learning_rate -1", "--learning_rate"), ("--learning_rate nan", "--learning_rate"),
    ("--max_iters 0", "--max_iters"), ("--max_iters 1.5", "--max_iters"), ("--eval_interval 0", "--eval_interval"),
    ("--geo_decay cubic", "harmonic"), ("--norm pre --geo_p 0", "--geo_p"), ("--learning_rate 1e-3 -1", "--learning_rate"), ("--seed -1", "--seed"), ("--preset huge", "baby"), ("stray", "stray")])
def test_wrong_flag(flags, says):
    """A misspelt flag or value once ended in a traceback, or trained something else; here one line and exit 2."""
    done = cli(*flags.split())
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and says in done.stderr.replace("'", "") and "--help" in done.stderr


@pytest.mark.parametrize("flags, says", [
    ("--n_embd 130 --n_head 4", "n_head"), ("--n_embd 12 --n_head 4", "rotary"), ("--block_size 0", "block_size"),
    ("--dropout 1", "dropout"), ("--n_layer 0", "n_layer"), 
    ("--geo_max_angle 4", "max_angle")])
def test_impossible_model(flags, says, tmp_path, capsys):
    """A model that cannot be built is one line and exit 2, before anything is written."""
    assert exit_code(run, tmp_path / "out", *flags.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and says in err and not (tmp_path / "out").exists()


def test_no_cuda(tmp_path, monkeypatch):
    """Without CUDA, --device cuda is one line and exit 1, not torch's traceback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cpu" in refusal(run, tmp_path, "--device", "cuda")


def test_help_lists_every_flag():
    """--help answers without torch and on a console that is not UTF-8, and leaves no field of Config out."""
    done = cli("--help", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0 and done.stderr == ""
    assert all(f"--{f.name}" in done.stdout for f in fields(train.Config))


def test_choices_are_the_models_own():
    """The choices written out in train.py, which must not import torch for them, are those of model and geonorm."""
    choices = {f.name: f.metadata["choices"] for f in fields(train.Config)}
    assert choices["norm"] == NORMS and choices["geo_decay"] == geonorm.DECAYS
    assert choices["preset"] == tuple(train.PRESETS)


def test_flags_override_presets():
    """Defaults once computed before the overrides won over them: a flag wins over its preset, in any order."""
    given = ["--n_layer", "3", "--dropout", "0.0"]
    before, after = train.parse_args(given + ["--preset", "baby"]), train.parse_args(["--preset", "baby"] + given)
    assert before == after and (after[0].n_layer, after[0].dropout, after[0].n_embd) == (3, 0.0, 384)
    assert train.parse_args(["--preset", "gpt2", "--n_embd", "128"])[0].n_embd == 128
    assert [c.norm for c in train.parse_args(["--norm", "post", "pre", "post"])] == ["post", "pre"]


# ---------------------------------------------------------------------------------------------------------- data

def test_missing_or_short_data(tmp_path):
    """No dataset, or one shorter than a window, is one line that says what to do, and the sizes."""
    assert "data/nowhere" in (line := refusal(run, tmp_path / "out", "--dataset", "nowhere")) and "prepare.py" in line
    line = refusal(run, tmp_path / "out", "--dataset", "short")
    assert all(part in line for part in ("train has 90 tokens", "val 10", "17", "--block_size"))
    assert "11;" in refusal(run, tmp_path / "out", "--dataset", "short", "--block_size", 10)
    assert not (tmp_path / "out").exists()
    run(tmp_path / "out", "--dataset", "short", "--block_size", 9, "--max_iters", 1)


@pytest.mark.parametrize("name, content", [
    ("train.bin", 100), ("val.bin", 0), ("val.bin", None), ("meta.json", None), ("meta.json", 20), ("meta.json", "{}"),
    ("meta.json", "[]")])
def test_damaged_data(name, content, own_data, tmp_path):
    """A dataset that was half copied is one line, not an IndexError after an hour."""
    path = own_data / name
    path.write_text(content) if isinstance(content, str) else path.write_bytes(path.read_bytes()[:content])
    if content is None:
        path.unlink()
    assert "data/mine is damaged" in refusal(run, tmp_path / "out")


def test_get_batch():
    """Batches are a function of (seed, number) alone, so resume needs no hidden state; targets are the next ids."""
    ids, config = np.arange(500, dtype=np.uint16), configs()[0]
    batches = [train.get_batch(ids, config, i, CPU) for i in range(20)]
    torch.manual_seed(0), np.random.seed(0)
    for i in (7, 19, 0):
        assert same(train.get_batch(ids, configs("--norm", "pre")[0], i, CPU), batches[i])
    assert all(x.shape == (4, 16) and torch.equal(y, x + 1) for x, y in batches)
    assert len({tuple(x[:, 0].tolist()) for x, _ in batches}) == 20
    assert not same(train.get_batch(ids, configs("--seed", 1)[0], 7, CPU), batches[7])
    starts = {int(i) for k in range(20) for i in train.get_batch(ids[:18], config, k, CPU)[0][:, 0]}
    assert starts == {0, 1}


@pytest.mark.parametrize("length", [2, 17, 18, 65, 66, 100, 161, 333])
def test_val_batches_cover_val_once(length):
    """Each val token after the first is predicted exactly once, also where val is no multiple of a window or batch."""
    ids, seen = np.arange(length, dtype=np.uint16), []
    for x, y, n in train.val_batches(ids, configs("--eval_iters", 0)[0]):
        counted = y >= 0
        assert x.shape == y.shape == (4, 16) and n == counted.sum() > 0 and torch.equal(x[counted] + 1, y[counted])
        seen += y[counted].tolist()
    assert sorted(seen) == list(range(1, length))


def test_val_subset_is_fixed_and_spread():
    """With eval_iters the windows are distinct, the same each time, and spread over all of val, not its start."""
    ids, config = np.arange(1601, dtype=np.uint16), configs("--eval_iters", 3)[0]
    a, b = ([x for x, _, _ in train.val_batches(ids, config)] for _ in range(2))
    starts = torch.cat(a)[:, 0]
    assert same(a, b) and len(a) == 3 and not (starts % 16).any()
    gaps = starts.diff() // 16
    assert starts[0] == 0 and starts[-1] == 1584 and gaps.min() >= 8 and gaps.max() <= 10
    whole = [x for x, _, _ in train.val_batches(ids, configs("--eval_iters", 0)[0])]
    assert same([x for x, _, _ in train.val_batches(ids, configs("--eval_iters", 25)[0])], whole)


@pytest.mark.parametrize("norm", NORMS)
def test_evaluate(norm):
    """The mean over tokens, not over batches of unequal size; no dropout; the training's random numbers untouched."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 300, 1, 2, 16, 0.5, norm))
    ids = np.random.default_rng(0).integers(300, size=16 * 9 + 6).astype(np.uint16)
    rng = torch.get_rng_state()
    loss = train.evaluate(model, ids, configs("--eval_iters", 0)[0], CPU, FLOAT32)
    assert torch.equal(torch.get_rng_state(), rng) and model.training
    model.eval()
    text, total = torch.from_numpy(ids.astype(np.int64)), 0.0
    for i in range(0, len(ids) - 1, 16):
        y = text[i + 1:i + 17]
        logits, _ = model(text[None, i:i + len(y)], y[None])
        total += F.cross_entropy(logits[0], y, reduction="sum").item()
    assert loss == pytest.approx(total / (len(ids) - 1), rel=1e-6)


def test_bits_per_byte():
    """Equal logits read 8 bits/byte over byte ids, and 8*log2(50257)/17 where 8 GPT-2 tokens stand for 17 bytes."""
    assert train.bits_per_byte(math.log(256), 17, 17) == pytest.approx(8)
    assert train.bits_per_byte(math.log(50257), 8, 17) == pytest.approx(7.3492, abs=1e-4)


# ---------------------------------------------------------------------------------------------------------- runs

def test_learning_rate():
    """Warm-up to the peak, a cosine down to min_lr, which stays; a warm-up as long as the decay is no 1/0."""
    config = configs("--learning_rate", 1.0, "--min_lr", 0.1, "--warmup_iters", 100, "--lr_decay_iters", 1000)[0]
    rates = [train.learning_rate(step, config) for step in range(1, 1201)]
    assert rates[:101] == pytest.approx([step / 101 for step in range(1, 102)])
    assert rates[550] == pytest.approx(0.55, abs=1e-3)
    assert all(a > b for a, b in zip(rates[100:999], rates[101:999]))
    assert rates[999] == pytest.approx(0.1, rel=1e-3) and rates[1000:] == [pytest.approx(0.1)] * 200
    config.warmup_iters = 1000
    assert train.learning_rate(1000, config) == pytest.approx(1000 / 1001)
    assert train.learning_rate(1001, config) in (pytest.approx(0.1), 1.0)
    config.warmup_iters, config.min_lr = 0, None
    assert train.learning_rate(1, config) == 1.0 and train.learning_rate(2000, config) == pytest.approx(0.1)


def test_same_start_same_batches(tmp_path, monkeypatch, capsys):
    """One command compares the norms alone: the same shared weights at the start, the same batches, one table."""
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
    run(tmp_path, "--norm", *NORMS, "--max_iters", 3, "--gradient_accumulation_steps", 2)
    shared = set.intersection(*(set(s) for s in starts))
    assert {"wte.weight", "blocks.1.mlp.f.c_proj.weight", "blocks.0.attention.f.c_attn.weight"} <= shared
    for weights, seen in zip(starts, batches):
        assert all(torch.equal(weights[k], starts[0][k]) for k in shared)
        assert [i for i, _ in seen][:6] == list(range(6)) and same(seen, batches[0])
    out = capsys.readouterr().out
    assert "\r" not in out
    table = out.splitlines()[-5:]
    assert [line.split()[0] for line in table] == ["norm", *NORMS]
    assert [line.split()[5] for line in table[1:]] == ["3"] * 4
    counts = [sum(p.numel() for p in GPT(GPTConfig(16, 257, 2, 2, 16, norm=norm)).parameters()) for norm in NORMS]
    assert [int(line.split()[1].replace(",", "")) for line in table[1:]] == counts


def test_log_and_same_bytes(own_data, tmp_path):
    """log.csv has step 1, the log steps and the evaluations, the last step always; a second run writes the same."""
    flags = "--max_iters 11 --log_interval 3 --dropout 0.1".split()
    for name in ("a", "b"):
        run(tmp_path / name, *flags)
    run(tmp_path / "seed", *flags, "--seed", 1)
    rows, meta = log(tmp_path / "a" / "geo"), json.loads((own_data / "meta.json").read_text())
    assert rows == log(tmp_path / "b" / "geo") != log(tmp_path / "seed" / "geo")
    assert [int(row["step"]) for row in rows] == [1, 3, 4, 6, 8, 9, 11]
    config = configs(*flags)[0]
    for row in rows:
        step = int(row["step"])
        assert bool(row["val_loss"]) == bool(row["val_bits_per_byte"]) == (step in (4, 8, 11))
        assert float(row["learning_rate"]) == pytest.approx(train.learning_rate(step, config))
        assert float(row["train_loss"]) > 0 and float(row["grad_norm"]) > 0
    assert float(rows[-1]["val_bits_per_byte"]) == pytest.approx(
        float(rows[-1]["val_loss"]) / math.log(2) * meta["val_tokens"] / meta["val_bytes"], rel=1e-6)
    assert float(rows[0]["train_loss"]) == pytest.approx(math.log(257), abs=0.3)
    assert float(rows[-1]["val_loss"]) < float(rows[0]["train_loss"])


def test_n_steps_are_n_steps(tmp_path):
    """--max_iters 5 once made 6 updates and saved none: five are five, and the last is evaluated and saved."""
    run(tmp_path, "--max_iters", 5, "--eval_interval", 1000, "--log_interval", 1000, "--gradient_accumulation_steps", 3)
    state = load(tmp_path / "geo")
    assert {int(s["step"]) for s in state["optimizer"]["state"].values()} == {5} and steps(tmp_path / "geo") == [1, 5]
    assert len(state["optimizer"]["state"]) == len(list(GPT(GPTConfig(16, 257, 2, 2, 16)).parameters()))
    assert state["row"]["step"] == state["row"]["best_step"] == 5
    assert same(load(tmp_path / "geo", "best.pt")["model"], state["model"])


def test_accumulation_is_one_larger_batch(tmp_path, monkeypatch):
    """Two batches a step give the loss and gradient of both at once: their mean, not their sum."""
    run(tmp_path / "two", "--max_iters", 1, "--gradient_accumulation_steps", 2)
    get = train.get_batch
    monkeypatch.setattr(train, "get_batch", lambda ids, config, index, device: tuple(
        map(torch.cat, zip(*(get(ids, config, i, device) for i in (0, 1))))))
    run(tmp_path / "one", "--max_iters", 1)
    two, one = log(tmp_path / "two" / "geo")[0], log(tmp_path / "one" / "geo")[0]
    assert all(float(two[k]) == pytest.approx(float(one[k]), rel=1e-4) for k in ("train_loss", "grad_norm", "val_loss"))


@pytest.mark.parametrize("norm", NORMS)
def test_weight_decay_by_name(norm, tmp_path):
    """Only matrices are decayed: no gain, no scalar of the geodesic step; and no parameter is missed or taken twice."""
    model = GPT(GPTConfig(16, 257, 2, 2, 16, norm=norm))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, rest = ([names[id(p)] for p in group["params"]] for group in model.param_groups(0.1))
    matrices = ["c_attn", "c_proj", "c_fc"]
    assert all(name == "wte.weight" or name.split(".")[-2] in matrices for name in decayed)
    assert len(decayed) == 1 + 2 * 4
    gains = ("entry.weight", "exit.weight")
    assert all(name.endswith((".scale", ".bias")) or "norm" in name or name in gains for name in rest)
    assert sorted(decayed + rest) == sorted(names.values())
    if norm == "geo":
        assert sum(name.endswith((".scale", ".bias")) for name in rest) == 8
    run(tmp_path, "--norm", norm, "--max_iters", 1, "--weight_decay", 0.3)
    groups = load(tmp_path / norm)["optimizer"]["param_groups"]
    assert [(g["weight_decay"], len(g["params"])) for g in groups] == [(0.3, len(decayed)), (0.0, len(rest))]


def test_best_survives_overfitting(tmp_path, monkeypatch, capsys):
    """Where val falls, then rises, best.pt keeps the best step and ckpt.pt the last, also when the run goes on."""
    weights, losses = [], iter([5.0, 3.0, 4.0, 6.0, 3.5])

    def evaluate(model, *_):
        weights.append({k: v.clone() for k, v in model.state_dict().items()})
        return next(losses)
    monkeypatch.setattr(train, "evaluate", evaluate)
    run(tmp_path, "--max_iters", 8, "--eval_interval", 2)
    folder = tmp_path / "geo"
    best = (folder / "best.pt").read_bytes()
    assert same(load(folder, "best.pt")["model"], weights[1]) and same(load(folder)["model"], weights[3])
    assert "3.0000" in (line := capsys.readouterr().out.splitlines()[-1]) and line.split()[4] == "4"
    run(tmp_path, "--max_iters", 10, "--eval_interval", 2)
    assert (folder / "best.pt").read_bytes() == best and same(load(folder)["model"], weights[4])
    assert "3.0000" in (line := capsys.readouterr().out.splitlines()[-1]) and line.split()[4] == "4"


# --------------------------------------------------------------------------------------------------------- going on

@pytest.mark.parametrize("norm", NORMS)
def test_resume_bit_for_bit(norm, tmp_path, monkeypatch, capsys):
    """Stopped by Ctrl-C and continued, a run ends in the same bits: batches, dropout, optimizer and schedule go on."""
    flags = ["--norm", norm, "--dropout", 0.1, "--gradient_accumulation_steps", 2]
    run(tmp_path / "whole", *flags)
    with monkeypatch.context() as m:
        at_step(m, lambda step, _: step == 5 and signal.raise_signal(signal.SIGINT))
        assert exit_code(run, tmp_path / "cut", *flags) == 130
    assert load(tmp_path / "cut" / norm)["row"]["step"] == 5
    assert "stopped: step 5 is saved" in capsys.readouterr().out
    run(tmp_path / "cut", *flags)
    assert "goes on from step 5\n" in capsys.readouterr().out
    assert same_run(tmp_path / "whole" / norm, tmp_path / "cut" / norm)


def test_killed_twice(tmp_path, monkeypatch):
    """Killed past its checkpoint, twice, the log once had steps twice; it equals the undisturbed run's."""
    flags = ["--log_interval", 1, "--dropout", 0.1]
    run(tmp_path / "whole", *flags)
    folder = tmp_path / "cut" / "geo"
    for k, logged in ((3, [1, 2]), (7, [1, 2, 3, 4, 5, 6]), (10, list(range(1, 10)))):
        with monkeypatch.context() as m, pytest.raises(PowerCut):
            cut_at(m, k)
            run(tmp_path / "cut", *flags)
        assert steps(folder) == logged
    with open(folder / "log.csv", "a", encoding="utf-8") as file:
        file.write("1")     # of a line for step 10
    run(tmp_path / "cut", *flags)
    assert steps(folder) == list(range(1, 11)) and same_run(tmp_path / "whole" / "geo", folder)


def test_same_command_again(tmp_path, capsys):
    """A finished run says so and stays as it is, byte for byte; other logging is no other run."""
    run(tmp_path, "--norm", "pre", "geo")
    before, first = (files(tmp_path / "pre"), files(tmp_path / "geo")), capsys.readouterr().out.splitlines()
    for flags in ([], ["--eval_interval", 3, "--log_interval", 1, "--no-compile"]):
        run(tmp_path, "--norm", "pre", "geo", *flags)
        out = capsys.readouterr().out.splitlines()
        assert (files(tmp_path / "pre"), files(tmp_path / "geo")) == before and sum("is finished" in line for line in out) == 2
        assert [line.split()[:5] for line in out[-2:]] == [line.split()[:5] for line in first[-2:]]


def test_larger_max_iters_goes_on(tmp_path, capsys):
    """A larger --max_iters goes on, with the schedule of the new length, and says so; other logging may join it."""
    run(tmp_path)
    capsys.readouterr()
    run(tmp_path, "--max_iters", 14, "--log_interval", 1, "--eval_interval", 6)
    out, folder = capsys.readouterr().out, tmp_path / "geo"
    assert "goes on from step 10, with the schedule of 14 steps instead of 10" in out
    assert steps(folder) == [1, 2, 4, 6, 8, 10, 11, 12, 13, 14] and load(folder)["row"]["step"] == 14
    config = configs("--max_iters", 14)[0]
    assert float(log(folder)[6]["learning_rate"]) == pytest.approx(train.learning_rate(11, config))
    assert {int(s["step"]) for s in load(folder)["optimizer"]["state"].values()} == {14}
    assert json.loads((folder / "config.json").read_text())["config"]["max_iters"] == 14


@pytest.mark.parametrize("flags, says", [
    ("--learning_rate 0.5", ("--learning_rate 0.003", "0.5")), ("--max_iters 6", ("--max_iters 10", "6")),
    ("--n_layer 3", ("--n_layer 2", "3")), ("--seed 1 --norm pre geo", ("--seed 1337", "1"))])
def test_other_settings_are_refused(flags, says, tmp_path):
    """Going on with another setting once mixed two runs; it is one line that names both values, and nothing changes."""
    run(tmp_path)
    before = files(tmp_path)
    line = refusal(run, tmp_path, *flags.split())
    assert all(part in line for part in (*says, "--overwrite", "--out_dir")) and files(tmp_path) == before


def test_overwrite(tmp_path, monkeypatch, capsys):
    """--overwrite throws the old run away and starts anew; once stopped, the same command must not be advised."""
    run(tmp_path, "--max_iters", 12)
    flags = ["--learning_rate", 0.01, "--max_iters", 6]
    with monkeypatch.context() as m:
        at_step(m, lambda step, _: step == 3 and signal.raise_signal(signal.SIGINT))
        assert exit_code(run, tmp_path, *flags, "--overwrite") == 130
    assert "without --overwrite" in capsys.readouterr().out
    run(tmp_path, *flags)
    state = load(tmp_path / "geo")
    assert steps(tmp_path / "geo") == [1, 2, 4, 6] and state["config"]["learning_rate"] == 0.01
    assert {int(s["step"]) for s in state["optimizer"]["state"].values()} == {6}


def test_best_without_ckpt_is_not_deleted(tmp_path):
    """With ckpt.pt gone the run would start anew over the best model: it is refused until --overwrite says so."""
    run(tmp_path)
    (tmp_path / "geo" / "ckpt.pt").unlink()
    before = files(tmp_path)
    assert "--overwrite" in refusal(run, tmp_path) and files(tmp_path) == before
    run(tmp_path, "--overwrite")


def test_cut_between_the_two_saves(tmp_path, monkeypatch):
    """ckpt.pt is saved before best.pt; a kill between them must not lose the best model."""
    run(tmp_path / "whole")
    save = train.save

    def cut(state, path):
        if path.name == "best.pt":
            raise PowerCut
        save(state, path)
    with monkeypatch.context() as m, pytest.raises(PowerCut):
        m.setattr(train, "save", cut)
        run(tmp_path / "cut")
    assert not (tmp_path / "cut" / "geo" / "best.pt").exists()
    monkeypatch.setattr(train, "evaluate", lambda *_: 9.0)      # no later one is better
    run(tmp_path / "cut")
    best = load(tmp_path / "cut" / "geo", "best.pt")
    assert best["row"]["best_step"] == 4 and "optimizer" not in best


def test_ids_past_the_vocabulary(own_data, tmp_path):
    """They ended in an IndexError of the embedding, in the middle of a run."""
    with open(own_data / "train.bin", "r+b") as file:
        file.write(b"\xff\xff")
    assert "damaged" in refusal(run, tmp_path / "out")


def test_two_processes_do_not_share_a_folder(tmp_path):
    """They once wrote the same checkpoint at once."""
    with train.locked(tmp_path / "geo"):
        assert "another process" in refusal(run, tmp_path)
    run(tmp_path)


def test_checkpoint_of_another_model_py(tmp_path):
    """A fork's checkpoint, after its placement was taken out again, is refused in one line by train.py and sample.py."""
    run(tmp_path, "--max_iters", 4)
    state = load(tmp_path / "geo")
    weights = state["model"] | {"blocks.0.mlp.a": torch.zeros(())}
    for changes in ({"model": weights}, {"optimizer": {"state": {}, "param_groups": []}}):
        torch.save(state | changes, tmp_path / "geo" / "ckpt.pt")
        assert "does not fit" in refusal(run, tmp_path, "--max_iters", 6)
    torch.save(state | {"model_config": state["model_config"] | {"norm": "rezero"}}, tmp_path / "geo" / "best.pt")
    assert "does not fit" in refusal(sample.load_model, tmp_path / "geo")


def test_dataset_prepared_anew(own_data, tmp_path, monkeypatch):
    """Ids of another tokenizer once ran past the vocabulary: one line names both; another text is refused as well."""
    out = tmp_path / "out"
    run(out)
    before, text = files(out), tmp_path / "mine.txt"
    text.write_text(words(4000, seed=1), encoding="utf-8")
    data.prepare.prepare([str(text)])
    assert "another text" in refusal(run, out) and files(out) == before
    ranks = {bytes([i]): i for i in range(256)} | {b"se": 256, b"ic": 257}
    other = tiktoken.Encoding("other", pat_str=r"\w+|\s", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 400})
    monkeypatch.setattr(data.prepare, "get_tokenizer", lambda name: other)
    data.prepare.prepare([str(text)], "other")
    line = refusal(run, out)
    assert "bytes" in line and "other" in line and "--out_dir" in line and files(out) == before
    run(out, "--overwrite", "--max_iters", 2)
    assert load(out / "geo")["model_config"]["vocab_size"] == 401 and load(out / "geo")["tokenizer"] == "other"


# ------------------------------------------------------------------------------------------------------- divergence

@pytest.mark.parametrize("where, dtype", [("loss", "float32"), ("gradient", "float32"), ("loss", "float16")])
def test_divergence(where, dtype, tmp_path, monkeypatch, capsys):
    """A nan once trained on for hours, or ended the other norms too: the run ends by the next log line, its checkpoint
    stays whole, its row names the step, and the others go on."""
    inject(monkeypatch, **{where: lambda norm, step: norm == "post" and step >= 5})
    ended = {}
    at_step(monkeypatch, lambda step, config: ended.__setitem__(config.norm, step))
    run(tmp_path, "--norm", "post", "geo", "--max_iters", 16, "--log_interval", 3, "--dtype", dtype)
    out = capsys.readouterr().out
    assert ended == {"post": 6, "geo": 16}
    assert "post diverged at step 5" in out and "learning_rate" in out and "is of step 4" in out
    post, geo = out.splitlines()[-2:]
    assert post.endswith("diverged at step 5") and "diverged" not in geo and geo.split()[2] != "-"
    state = train.load_checkpoint(tmp_path / "post" / "ckpt.pt")
    assert state["row"]["step"] == 4 and all(v.isfinite().all() for v in state["model"].values())
    assert steps(tmp_path / "post") == [1, 3, 4] and steps(tmp_path / "geo")[-1] == 16


def test_all_diverged(tmp_path, capsys):
    """Far too high a learning rate: each run says so and the exit code is 1, also when nothing was saved yet."""
    flags = "--norm pre post --learning_rate 1e18 --grad_clip 0 --warmup_iters 0 --log_interval 1"
    code = exit_code(run, tmp_path, *flags.split())
    out = capsys.readouterr().out
    assert "every run diverged" in code and out.count(" diverged at step ") == 4 and "Nothing was saved yet" in out
    assert not list(tmp_path.rglob("*.pt"))


def test_val_diverged(tmp_path, monkeypatch, capsys):
    """A val loss that is not finite is no best, and its weights are not saved over good ones."""
    values = iter([5.0, math.nan])
    monkeypatch.setattr(train, "evaluate", lambda *_: next(values))
    assert "every run diverged" in refusal(run, tmp_path)
    assert capsys.readouterr().out.splitlines()[-1].endswith("diverged at step 8")
    assert load(tmp_path / "geo")["row"]["step"] == load(tmp_path / "geo", "best.pt")["row"]["step"] == 4


# --------------------------------------------------------------------------------------------------- half precision

@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_trains(dtype, tmp_path):
    """All four train under autocast; the gradient is clipped and logged without float16's scale."""
    run(tmp_path / "float32", "--norm", *NORMS, "--max_iters", 1)
    run(tmp_path, "--norm", *NORMS, "--max_iters", 12, "--dtype", dtype)
    for norm in NORMS:
        rows = log(tmp_path / norm)
        assert float(rows[-1]["val_loss"]) < float(rows[0]["train_loss"]) - 0.01
        exact = float(log(tmp_path / "float32" / norm)[0]["grad_norm"])
        assert float(rows[0]["grad_norm"]) == pytest.approx(exact, rel=0.05)
        assert all(v.dtype == torch.float32 for v in load(tmp_path / norm)["model"].values())


def test_skipped_steps_are_no_divergence(tmp_path, monkeypatch):
    """With float16 the scaler skips inf gradients and lowers its scale; 19 in a row are normal."""
    inject(monkeypatch, gradient=lambda norm, step: 3 <= step < 22)
    run(tmp_path, "--dtype", "float16", "--max_iters", 30, "--log_interval", 1, "--eval_interval", 30)
    state = load(tmp_path / "geo")
    assert {int(s["step"]) for s in state["optimizer"]["state"].values()} == {11}
    assert state["row"]["diverged"] is None and state["scaler"]["scale"] == 65536 / 2**19


def test_twenty_skips_are_a_divergence(tmp_path, monkeypatch, capsys):
    """A scale that falls without end is a divergence: 20 skips in a row, counted across log lines."""
    now = inject(monkeypatch, gradient=lambda norm, step: step >= 3)
    flags = "--dtype float16 --max_iters 40 --log_interval 5 --eval_interval 40".split()
    assert "every run diverged" in refusal(run, tmp_path, *flags)
    assert capsys.readouterr().out.splitlines()[-1].endswith("diverged at step 3") and now[0] == 25


def test_float16_resumes_bit_for_bit(tmp_path, monkeypatch):
    """The loss scale once started afresh on resume: it is the saved one."""
    inject(monkeypatch, gradient=lambda norm, step: step in (2, 3))
    flags = ["--dtype", "float16", "--dropout", 0.1]
    run(tmp_path / "whole", *flags)
    with monkeypatch.context() as m, pytest.raises(PowerCut):
        cut_at(m, 7)
        run(tmp_path / "cut", *flags)
    run(tmp_path / "cut", *flags)
    assert load(tmp_path / "cut" / "geo")["scaler"]["scale"] == 65536 / 4
    assert same_run(tmp_path / "whole" / "geo", tmp_path / "cut" / "geo")


def test_float32_to_float16_and_back(tmp_path, capsys):
    """A checkpoint goes on in another dtype, with a fresh scale where there was none, and it is said."""
    for n, dtype in ((4, "float32"), (8, "float16"), (12, "float32"), (16, "bfloat16")):
        run(tmp_path, "--max_iters", n, "--dtype", dtype)
        assert ("not bit for bit" in capsys.readouterr().out) == (n > 4)
        state = load(tmp_path / "geo")
        assert bool(state["scaler"]) == (dtype == "float16") and state["row"]["step"] == n


# ------------------------------------------------------------------------------------------------------ checkpoints

class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_checkpoints_hold_plain_data(tmp_path):
    """After an evaluation and a resume both checkpoints load with weights_only: no numpy, no Path, no class in them."""
    run(tmp_path, "--max_iters", 4)
    run(tmp_path, "--max_iters", 6)
    for name in ("ckpt.pt", "best.pt"):
        state = train.load_checkpoint(tmp_path / "geo" / name)
        assert state["format"] == train.FORMAT and state["tokenizer"] == "bytes" and state["row"]["step"] == 6
        json.dumps({k: state[k] for k in ("config", "model_config", "row")})
        GPT(GPTConfig(**state["model_config"])).load_state_dict(state["model"])
    assert sorted(f.name for f in (tmp_path / "geo").iterdir()) == ["best.pt", "ckpt.pt", "config.json", "depth.csv", "log.csv"]


def test_bad_checkpoints(tmp_path, recwarn):
    """Truncated, foreign or malicious files are refused in one line, without torch's own warnings; no code in them
    runs, and they stay as they are."""
    run(tmp_path, "--max_iters", 2)
    path, touched = tmp_path / "geo" / "ckpt.pt", tmp_path / "touched"
    whole = path.read_bytes()
    good = torch.load(path, weights_only=True)

    def saved(value):
        torch.save(value, path)
        return path.read_bytes()
    bad = [b"", b"not a checkpoint", whole[:len(whole) // 2], whole[:-10], pickle.dumps({"model": 1}),
           pickle.dumps(Evil(touched)), saved({"format": train.FORMAT, "model": Evil(touched)}), saved({"model": {}}),
           saved(torch.zeros(3)), saved([1]), saved(good | {"format": "nanoGPT"})]
    for content in bad:
        path.write_bytes(content)
        line = refusal(train.load_checkpoint, path)
        assert str(path) in line and "--out_dir" in line
        assert refusal(run, tmp_path, "--max_iters", 2) == line and path.read_bytes() == content
    assert not touched.exists() and [str(w.message) for w in recwarn] == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_full_disk_keeps_the_old_checkpoint(error, tmp_path, monkeypatch):
    """A disk that fills up while saving once left half a checkpoint: the old one stays, and nothing beside it."""
    path = tmp_path / "ckpt.pt"
    train.save({"format": train.FORMAT, "step": 1}, path)

    def half(state, target):
        Path(target).write_bytes(b"PK half")
        raise error
    monkeypatch.setattr(torch, "save", half)
    assert str(path) in refusal(train.save, {"step": 2}, path)
    assert train.load_checkpoint(path)["step"] == 1 and list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------------------- signals and pipes

def test_terminated_in_process(tmp_path, monkeypatch, capsys):
    """A signal saves, leaves with its exit code and starts no other norm; the same command does what is left."""
    with monkeypatch.context() as m:
        at_step(m, lambda step, _: step == 3 and signal.raise_signal(signal.SIGTERM))
        assert exit_code(run, tmp_path, "--norm", "pre", "geo") == 128 + signal.SIGTERM
    assert load(tmp_path / "pre")["row"]["step"] == 3 and not (tmp_path / "geo").exists()
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
    assert train.load_checkpoint(tmp_path / "geo" / "ckpt.pt")["row"]["step"] == 4
    run(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_signals_and_pipes(root, tmp_path):
    """The real command line: Ctrl-C and a terminated job save and exit 130 and 143, kill -9 while saving leaves a whole
    checkpoint, the same command finishes all; a log in a file has no carriage return; `| head -1` ends quietly."""
    flags = "--max_iters 150 --eval_interval 3 --eval_iters 1 --log_interval 1".split()

    def ended_by(number):
        process = start(root, *flags, "--out_dir", tmp_path / str(number))
        out = b""
        while number and b"step 10:" not in out:
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
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL, 0: 1}
    with ThreadPoolExecutor(4) as pool:
        for (number, code), (got, out, err) in zip(codes.items(), pool.map(ended_by, codes)):
            assert (got, err) == (code, ""), (number, err)
            assert "\r" not in out
            if code > 1:
                assert "stopped: step" in out and "the same command goes on" in out
            if number:
                folder = tmp_path / str(number) / "geo"
                assert 9 <= train.load_checkpoint(folder / "ckpt.pt")["row"]["step"] < 150
                run(folder.parent, *flags)
                assert steps(folder) == list(range(1, 151))


# ---------------------------------------------------------------------------------------------------------- compile

def test_compile_without_compiler(root, tmp_path):
    """--compile where no C++ compiler works is one line at the start, not a traceback after the first step."""
    process = start(root, "--compile", "--out_dir", tmp_path / "out", CXX="/nonexistent",
                    TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    out, err = (part.decode() for part in process.communicate(timeout=60))
    assert process.returncode == 1 and err.count("\n") == 1 and "--no-compile" in err and "step 1" not in out
    assert not list((tmp_path / "out").rglob("*.pt"))


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
def test_compiled_run(tmp_path):
    """A compiled run once saved names with _orig_mod.: it goes on uncompiled, head and embedding still one tensor."""
    flags = "--n_layer 1 --max_iters 3 --eval_interval 3".split()
    run(tmp_path / "plain", *flags)
    run(tmp_path / "compiled", *flags, "--compile")
    state, plain = load(tmp_path / "compiled" / "geo"), load(tmp_path / "plain" / "geo")
    assert state["model"].keys() == plain["model"].keys()
    assert state["row"]["parameters"] == plain["row"]["parameters"]
    assert sum(k.endswith("wte.weight") or "head" in k for k in state["model"]) == 1
    losses = [float(log(tmp_path / name / "geo")[-1]["val_loss"]) for name in ("compiled", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    run(tmp_path / "compiled", *flags, "--max_iters", 4, "--no-compile")
    assert load(tmp_path / "compiled" / "geo")["row"]["step"] == 4
