"""The CUDA paths of train.py: mixed precision, compilation, resuming, memory, and a loop that never waits for the GPU.
All of it is skipped without a GPU."""
import csv
import random

import pytest
import torch

import data.prepare
import train
from model import NORMS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPE = ("--dataset mine --n_layer 2 --n_head 2 --n_embd 64 --block_size 64 --batch_size 8 --max_iters 30 --warmup_iters 5 "
         "--eval_interval 30 --eval_iters 2 --log_interval 1").split()


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.setattr(data.prepare, "HERE", tmp_path / "data")
    monkeypatch.setattr(train, "HERE", tmp_path)
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    (tmp_path / "text.txt").write_text("".join(rng.choice(("sea ", "ice ", "the\n", "sphere ")) for _ in range(20000)), encoding="utf-8")
    data.prepare.prepare(["text.txt"], name="mine")


def run(*flags, out="out"):
    """Train, and return each norm's train losses."""
    configs = train.parse_args([*SHAPE, *flags, "--out_dir", out])
    train.main(configs)
    losses = {}
    for config in configs:
        with open(f"{out}/{config.norm}/log.csv", encoding="utf-8", newline="") as file:
            losses[config.norm] = [float(row["train_loss"]) for row in csv.DictReader(file)]
    return losses


@pytest.mark.parametrize("dtype, compile", [("bfloat16", "--compile"), ("float16", "--compile"), ("float32", "--no-compile")])
def test_follows_the_cpu(dtype, compile):
    """30 steps of every norm stay within 2% of the float32 CPU run's loss."""
    norms = ("--norm", *NORMS)
    cpu = run(*norms, "--device", "cpu", out="cpu")
    cuda = run(*norms, "--device", "cuda", "--dtype", dtype, compile, out="cuda")
    for norm in NORMS:
        # float16 starts with a loss scale that overflows, so its first steps may be skipped.
        pairs = list(zip(cpu[norm], cuda[norm]))[-1 if dtype == "float16" else 0:]
        assert all(b == pytest.approx(a, rel=0.05 if dtype == "float16" else 0.02) for a, b in pairs), norm


@pytest.mark.parametrize("norm", NORMS)
def test_resume_is_exact_in_the_weights(norm, monkeypatch):
    """Cut off after 12 of 30 steps and gone on with, dropout included: the weights of the undisturbed run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        flags = ("--norm", norm, "--device", "cuda", "--no-compile", "--dropout", "0.1", "--eval_interval", "12")
        run(*flags, out="whole")

        class Cut(Exception):
            pass
        schedule = train.learning_rate

        def cut(step, config):
            if step == 15:
                raise Cut
            return schedule(step, config)
        monkeypatch.setattr(train, "learning_rate", cut)
        with pytest.raises(Cut):
            run(*flags, out="cut")
        monkeypatch.setattr(train, "learning_rate", schedule)
        run(*flags, out="cut")
    finally:
        torch.use_deterministic_algorithms(False)
    whole, resumed = (train.load_checkpoint(train.Path(out) / norm / "ckpt.pt")["model"] for out in ("whole", "cut"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_goes_on_on_the_other_device(capsys):
    """Trained on CUDA, resumed on a CPU, and back; said in one line."""
    for device, steps in (("cuda", "10"), ("cpu", "20"), ("cuda", "30")):
        run("--norm", "geo", "--device", device, "--max_iters", steps)
    assert capsys.readouterr().out.count("not bit for bit") == 2


def test_memory_falls_with_the_batch():
    peaks = []
    for batch in ("64", "16"):
        run("--norm", "geo", "--device", "cuda", "--no-compile", "--batch_size", batch, out=batch)
        peaks.append(train.load_checkpoint(train.Path(batch) / "geo/ckpt.pt")["row"]["peak_memory"])
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_wait_and_no_recompilation(dtype, monkeypatch):
    """Between log steps the host never waits for the GPU, and after step 3 nothing is compiled again."""
    schedule = train.learning_rate

    def watched(step, config):
        torch.cuda.set_sync_debug_mode("error" if 4 < step < 30 else "default")
        torch._dynamo.config.error_on_recompile = step > 3
        return schedule(step, config)
    monkeypatch.setattr(train, "learning_rate", watched)
    try:
        run("--norm", "geo", "--device", "cuda", "--dtype", dtype, "--compile", "--log_interval", "30",
            "--gradient_accumulation_steps", "2")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch._dynamo.config.error_on_recompile = False
