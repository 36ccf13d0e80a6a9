"""What test_train, test_runs and test_sweep share: tiny runs in this process, and their folders.

The preset `tiny` is made smaller still, so that a run takes a tenth of a second and its folder has
a short name. Subprocesses get the same settings as flags.
"""
import csv
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import data.compare
import data.prepare
import train
from model import GPT

REPO = Path(__file__).resolve().parents[1]
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=10,
            warmup_iters=2, eval_interval=4, log_interval=2)
SMALL = ["--dataset", "mine", "--device", "cpu",
         *(word for name, value in TINY.items() for word in (f"--{name}", str(value)))]
CPU = torch.device("cpu")
FLOAT32 = torch.autocast("cpu", torch.bfloat16, enabled=False)
TIMES = ("tokens_per_second", "peak_mb", "train_seconds", "elapsed_seconds")


# ----------------------------------------------------------------------------------------- set-up

def words(n: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(("sea ", "ice ", "of ", "the\n", "sphere ")) for _ in range(n))[:n]


@pytest.fixture(scope="session")
def datasets(tmp_path_factory) -> Path:
    """A folder with the dataset `mine`."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(data.prepare, "DATA_DIR", folder)
        (folder / "mine.txt").write_text(words(4000), encoding="utf-8")
        data.prepare.prepare([str(folder / "mine.txt")])
    return folder


@pytest.fixture(autouse=True)
def here(datasets, monkeypatch):
    """The small preset and dataset; no figure; and every test leaves the signals as they were."""
    monkeypatch.setattr(data.prepare, "DATA_DIR", datasets)
    monkeypatch.setitem(train.PRESETS, "tiny", TINY)
    monkeypatch.setattr(data.compare, "draw", lambda runs, path: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


# -------------------------------------------------------------------------------------------- runs

def configs(*flags) -> dict[Path, train.Config]:
    return train.parse_args(["--dataset", "mine", "--device", "cpu", *map(str, flags)])


def config(*flags) -> train.Config:
    """The settings of a command with one run."""
    one, = configs(*flags).values()
    return one


def run(out: Path, *flags):
    train.main(configs("--out_dir", out, *flags))


def exit_code(call, *args):
    with pytest.raises(SystemExit) as info:
        call(*args)
    return info.value.code


def refusal(call, *args) -> str:
    """The one line with which call ends the program, exit code 1."""
    line = exit_code(call, *args)
    assert isinstance(line, str) and "\n" not in line
    return line


def start(datasets: Path, *flags, **env) -> subprocess.Popen:
    """The real command, with the settings of TINY; a later flag wins."""
    return subprocess.Popen([sys.executable, REPO / "train.py", *SMALL, *map(str, flags)],
                            env=environment(datasets) | env, cwd=datasets,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def environment(datasets: Path) -> dict[str, str]:
    """Of a process that finds the datasets and computes on one thread."""
    return os.environ | {"OMP_NUM_THREADS": "1", "NANONORM_DATA": str(datasets)}


def at_step(monkeypatch, action):
    """Call action(step, config) before each step."""
    original = train.get_batch

    def get_batch(ids, config, index, device):
        if index % config.gradient_accumulation_steps == 0:
            action(index // config.gradient_accumulation_steps + 1, config)
        return original(ids, config, index, device)
    monkeypatch.setattr(train, "get_batch", get_batch)


def signal_at(monkeypatch, number: int, when):
    """Send this process a signal in each step for which when(step, config)."""
    at_step(monkeypatch, lambda step, c: when(step, c) and signal.raise_signal(number))


class PowerCut(Exception):
    """Ends the program at once: nothing after it runs."""


def cut_at(monkeypatch, k: int):
    def action(step, config):
        if step == k:
            raise PowerCut
    at_step(monkeypatch, action)


def inject(monkeypatch, loss=None, gradient=None):
    """Where loss(config, step), the training loss is nan; where gradient(config, step), the
    embedding's gradient is inf. Returns a list of the step that is now and its config."""
    now = [0, None]
    at_step(monkeypatch, lambda *step_and_config: now.__setitem__(slice(2), step_and_config))

    class Faulty(GPT):
        def __init__(self, config):
            super().__init__(config)
            if gradient:
                self.wte.weight.register_hook(
                    lambda g: g * math.inf if now[0] and gradient(now[1], now[0]) else g)

        def forward(self, *args, **kwargs):
            logits, value = super().forward(*args, **kwargs)
            if loss and self.training and loss(now[1], now[0]):
                value = value * math.nan
            return logits, value
    monkeypatch.setattr(train, "GPT", Faulty)
    return now


# ----------------------------------------------------------------------------------------- folders

def read(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file; none may be longer or shorter than its header."""
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    assert all(len(line) == len(lines[0]) for line in lines)
    return [dict(zip(lines[0], line)) for line in lines[1:]]


def log(folder: Path) -> list[dict]:
    """log.csv without its time columns."""
    rows = read(folder / "log.csv")
    assert all(list(row) == train.LOG_COLUMNS for row in rows)
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def steps(folder: Path) -> list[int]:
    return [int(row["step"]) for row in log(folder)]


def record(folder: Path) -> dict:
    """config.json, which must be strict JSON."""
    def refuse(name):
        raise ValueError(f"{name} is not JSON")
    return json.loads((folder / "config.json").read_text(encoding="utf-8"), parse_constant=refuse)


def load(folder: Path, name: str = "ckpt.pt") -> dict:
    return torch.load(folder / name, weights_only=True)


def saved_step(folder: Path, name: str = "ckpt.pt") -> int:
    return load(folder, name)["progress"]["step"]


def updates(folder: Path) -> set[int]:
    """How often the optimizer has updated the weights, by its own count of each."""
    return {int(s["step"]) for s in load(folder)["optimizer"]["state"].values()}


def files(folder: Path) -> dict:
    """The bytes and the time of every file."""
    return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in sorted(folder.rglob("*"))
            if f.is_file()}


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def without_times(state: dict) -> dict:
    """A checkpoint less what no two runs repeat: the seconds, and the log in which they are."""
    progress = {k: v for k, v in state["progress"].items() if "seconds" not in k}
    texts = {k: v for k, v in state.get("files", {}).items() if k != "log.csv"}
    return state | {"progress": progress, "files": texts}


def assert_same_run(a: Path, b: Path):
    """Every file of two runs' folders is equal, but for times and the name of the folder."""
    assert sorted(f.name for f in a.iterdir()) == sorted(f.name for f in b.iterdir())
    assert log(a) == log(b)
    assert (a / "depth.csv").read_bytes() == (b / "depth.csv").read_bytes()
    one, other = (record(folder) for folder in (a, b))
    assert one.pop("config") | {"out_dir": ""} == other.pop("config") | {"out_dir": ""}
    assert one == other
    for name in ("ckpt.pt", "best.pt"):
        one, other = (without_times(load(folder, name)) for folder in (a, b))
        for state in (one, other):
            state["files"].pop("config.json", None)     # compared above; it names the folder
        assert same(one, other), name


# ---------------------------------------------------------------------------------------- printing

def cells(out: str) -> list[dict[str, str]]:
    """The lines of the last table in out by its header; the notes are under ""."""
    table = out[out.rindex("norm  "):].splitlines()
    names, *lines = (re.split(" {2,}", line.strip()) for line in table if line[0] != "~")
    return [dict(zip([*names, ""], [*line, ""])) for line in lines]
