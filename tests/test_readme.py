"""The README's code, run as it stands there."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data.prepare
import train
from model import GPT, NORMS, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, re.S)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The program in a folder of its own, with a small text where stdlib would be."""
    for name in ("train.py", "model.py", "geonorm.py", "sample.py", "data/prepare.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 110, 5000, dtype=np.uint8).tobytes())
    monkeypatch.setattr(data.prepare, "HERE", tmp_path / "data")
    data.prepare.prepare([str(text)], name="stdlib")
    return tmp_path


def test_train_commands_run_at_toy_size(copy, monkeypatch, capsys):
    """Every training command of the README, sweeps and all, with its own flags but for the size of model, text and run."""
    monkeypatch.setattr(train, "HERE", copy)
    toy = dict(dataset="stdlib", device="cpu", compile=False, n_layer=2, n_head=2, n_embd=8, block_size=8, batch_size=2,
               gradient_accumulation_steps=1, max_iters=2, warmup_iters=1, eval_interval=2, eval_iters=1)
    commands = [line for block in blocks("sh") for line in block.splitlines() if "train.py" in line]
    assert len(commands) >= 10
    for command in commands:
        configs = train.parse_args(shlex.split(command.split("train.py")[1]))
        for config in configs:
            vars(config).update(toy, folder=copy / config.folder, out_dir=str(copy / config.out_dir))
        train.main(configs)
        table = capsys.readouterr().out.partition("\nnorm ")[2].splitlines()[1:]
        settings = {(c.norm, c.geo_decay, c.geo_p, c.learning_rate) for c in configs}
        assert [line.split(" ")[0] in NORMS for line in table] == [True] * len(settings)
        lines = (copy / config.out_dir / "compare.csv").read_text().splitlines() if len(configs) > 1 else ["", ""]
        assert len(lines) == 1 + len(configs)


def test_ddp_example_is_one_process_on_the_joined_batch(copy, monkeypatch):
    """Two gloo processes under torchrun, for 20 steps, against one that sees both batches at once."""
    (copy / "ddp.py").write_text(blocks("python")[0], encoding="utf-8")
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29517",
                          "ddp.py"], cwd=copy, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    monkeypatch.setattr(train, "HERE", copy)
    config = train.Config(norm="geo", dataset="stdlib", learning_rate=1e-3)
    meta, ids = train.load_data(config)
    torch.manual_seed(config.seed)
    model = GPT(GPTConfig(config.block_size, meta["vocab_size"], config.n_layer, config.n_head, config.n_embd, norm="geo"))
    optimizer = torch.optim.AdamW(model.param_groups(config.weight_decay), lr=config.learning_rate)
    for step in range(20):
        batches = [train.get_batch(ids["train"], config, 2 * step + i, torch.device("cpu")) for i in range(2)]
        model(*(torch.cat(part) for part in zip(*batches)))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.load(copy / "ddp.pt", weights_only=True)
    for name, p in model.state_dict().items():
        assert (weights[name] - p).abs().max() < 2e-4, name


def test_fifth_placement(copy):
    """The README's few lines, applied, train a model that the four do not have."""
    for file in re.split(r"^--- ", blocks("diff")[0], flags=re.M)[1:]:
        name, changes = file.split("\n", 1)
        source = (copy / name).read_text(encoding="utf-8")
        for hunk in changes.split("@@\n"):
            lines = hunk.splitlines()
            old = "\n".join(line[1:] for line in lines if line[0] != "+")
            new = "\n".join(line[1:] for line in lines if line[0] != "-")
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        (copy / name).write_text(source, encoding="utf-8")
    run = subprocess.run([sys.executable, "train.py", "--norm", "rezero", "--max_iters", "3", "--n_embd", "32", "--eval_iters", "2"],
                         cwd=copy, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "rezero" in run.stdout.splitlines()[-1]
    names = torch.load(copy / "out/rezero/ckpt.pt", weights_only=True)["model"]
    assert "blocks.0.mlp.a" in names and "blocks.0.mlp.norm_in.weight" not in names


def test_bench(tmp_path):
    """The timing script runs, and writes what it prints."""
    out = tmp_path / "out.json"
    flags = "step --rounds 1 --no-compiled --norm pre geo --n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --batch_size 2 --device cpu"
    run = subprocess.run([sys.executable, ROOT / "tests/bench.py", *flags.split(), "--json", out], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["norm"] for row in rows] == ["pre", "geo", "plain nanoGPT"] and rows[0]["ratio"] == 1
    assert all(row["ms"] > 0 and row["peak MB"] > 10 for row in rows)
