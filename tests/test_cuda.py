"""The CUDA paths of train.py: mixed precision, compilation, resuming, memory, no waiting.

All of it is skipped without a GPU. `tests/gpu_report.py tests FOLDER` runs it under a time limit.
"""
import csv
import os
import random
from pathlib import Path

# cuBLAS reads this once, at its first call in the process: a later setting comes too late.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

import data.prepare
import train
from data.runs import load_checkpoint
from model import NORMS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FLAGS = ("--dataset mine --n_layer 2 --n_head 2 --n_embd 64 --block_size 64 --batch_size 8 "
         "--max_iters 30 --warmup_iters 5 --eval_interval 30 --eval_iters 2 --log_interval 1")
DTYPES = ["bfloat16", "float16"]


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    """A dataset `mine` of 20,000 words in a folder of its own."""
    monkeypatch.setattr(data.prepare, "DATA_DIR", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    words = "".join(rng.choice(("sea ", "ice ", "the\n", "sphere ")) for _ in range(20000))
    Path("text.txt").write_text(words, encoding="utf-8")
    data.prepare.prepare(["text.txt"], name="mine")


@pytest.fixture(autouse=True)
def needs_bfloat16(request):
    """Older GPUs lack bfloat16: the program then chooses float16, and compiling would not work."""
    dtype = getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype")
    if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bfloat16")


def run(*flags, out="out") -> dict[str, Path]:
    """Train; returns the folder of each norm's run."""
    runs = train.parse_args([*FLAGS.split(), *flags, "--out_dir", out])
    train.main(runs)
    return {config.norm: folder for folder, config in runs.items()}


def column(folder: Path, name: str) -> list[float]:
    """A column of the run's log."""
    with open(folder / "log.csv", encoding="utf-8", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("dtype, compile", [("bfloat16", "--compile"), ("float16", "--compile"),
                                            ("float32", "--no-compile")])
def test_follows_the_cpu(dtype, compile):
    """30 steps of every norm stay within 2% of the float32 CPU run's loss."""
    norms = ("--norm", *NORMS)
    cpu = run(*norms, "--device", "cpu", out="cpu")
    cuda = run(*norms, "--device", "cuda", "--dtype", dtype, compile, out="cuda")
    for norm in NORMS:
        losses = zip(column(cpu[norm], "train_loss"), column(cuda[norm], "train_loss"))
        if dtype == "float16":
            # Its first loss scale overflows, so that its first steps may be skipped.
            pairs, tolerance = list(losses)[-1:], 0.05
        else:
            pairs, tolerance = list(losses), 0.02
        assert all(b == pytest.approx(a, rel=tolerance) for a, b in pairs), norm


@pytest.mark.parametrize("norm", NORMS)
def test_resume_is_exact_in_the_weights(norm, monkeypatch):
    """Cut after 12 of 30 steps and continued, dropout included: the undisturbed run's weights."""
    flags = ("--norm", norm, "--device", "cuda", "--no-compile", "--dropout", "0.1",
             "--eval_interval", "12")
    schedule = train.learning_rate

    class Cut(Exception):
        pass

    def cut(step, config):
        if step == 15:
            raise Cut
        return schedule(step, config)

    torch.use_deterministic_algorithms(True)
    try:
        whole = run(*flags, out="whole")[norm]
        with monkeypatch.context() as patch, pytest.raises(Cut):
            patch.setattr(train, "learning_rate", cut)
            run(*flags, out="cut")
        resumed = run(*flags, out="cut")[norm]
    finally:
        torch.use_deterministic_algorithms(False)
    whole, resumed = (load_checkpoint(folder / "ckpt.pt")["model"] for folder in (whole, resumed))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_continues_on_the_other_device(capsys):
    """Trained on CUDA, continued on a CPU, and back: said in one line, which names the device.

    Nothing on the console once told that a run was on the CPU after all.
    """
    for device, steps in (("cuda", "10"), ("cpu", "20"), ("cuda", "30")):
        run("--norm", "geo", "--device", device, "--max_iters", steps)
        out = capsys.readouterr().out
        assert f"parameters on {device}, " in out
        assert ("not bit for bit" in out) == (steps != "10")


def test_memory_falls_with_the_batch():
    """An eighth of the batch takes little over an eighth; cuBLAS's workspace is 64 MB of both."""
    peaks = []
    for batch in ("512", "64"):
        folder = run("--norm", "geo", "--device", "cuda", "--no-compile", "--batch_size", batch,
                     out=batch)["geo"]
        peaks.append(column(folder, "peak_mb")[-1])
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_wait_and_no_recompilation(dtype, monkeypatch):
    """Between log steps the host never waits for the GPU, and after step 3 nothing is compiled."""
    schedule = train.learning_rate

    def watched(step, config):
        torch.cuda.set_sync_debug_mode("error" if 4 < step < 30 else "default")
        torch._dynamo.config.error_on_recompile = step > 3
        return schedule(step, config)

    monkeypatch.setattr(train, "learning_rate", watched)
    try:
        run("--norm", "geo", "--device", "cuda", "--dtype", dtype, "--compile", "--log_interval",
            "30", "--gradient_accumulation_steps", "2")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch._dynamo.config.error_on_recompile = False


def test_no_speed_before_there_is_one(capsys):
    """The clock starts after step 1, which compiles: its line once read "nan tokens/s"."""
    folder = run("--norm", "pre", "--device", "cuda", "--no-compile", "--max_iters", "2")["pre"]
    lines = capsys.readouterr().out.splitlines()
    first, second = (next(line for line in lines if f" step {n}/2:" in line) for n in (1, 2))
    assert "tokens/s" not in first and "tokens/s" in second
    assert "nan" not in (folder / "log.csv").read_text(encoding="utf-8")
