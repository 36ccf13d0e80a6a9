"""What one GPU says, as three commands of at most 8 minutes each:

    python tests/gpu_report.py step FOLDER          # timings and memory of gpt2 and baby
    python tests/gpu_report.py train FOLDER TEXT    # baby trained on the text, all four norms
    python tests/gpu_report.py tests FOLDER         # the CUDA tests

Each part's output is printed as it comes and kept in FOLDER, and a part that takes too long is
ended, so a report that is cut still says something. `--device cpu` runs the same at toy sizes, to
see that it works.
"""
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))       # where data/ is

from data import Parser, command

LIMIT = 470         # seconds of one command
GRACE = 15          # of these, for a part to save what it has when it is told to end
TOY = "--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --batch_size 4".split()
TOY_RUN = [*TOY, *"--max_iters 20 --warmup_iters 5 --eval_iters 2".split()]


def parts_of(args) -> list[tuple[str, int, list]]:
    """The parts of one command, what matters most first: name, most seconds, command line."""
    folder, device = args.folder, ["--device", args.device]
    shape, run = (TOY, TOY_RUN) if args.device == "cpu" else ([], [])
    if args.what == "step":
        bench = ["tests/bench.py", "step", "--rounds", "10", *device, *shape]
        gpt2 = [*bench, "--preset", "gpt2", "--norm", "pre", "geo"]
        baby = [*bench, "--preset", "baby", "--norm", "pre", "post", "peri", "geo"]
        return [("step-gpt2", 280, [*gpt2, "--json", folder / "step-gpt2.json"]),
                ("step-baby", 180, [*baby, "--json", folder / "step-baby.json"])]
    if args.what == "train":
        # If time runs out, pre and geo are there to compare.
        train = ["train.py", *device, *run, "--preset", "baby", "--norm", "pre", "geo", "post",
                 "peri", "--dataset", "gpu_report", "--out_dir", folder / "baby"]
        return [("prepare", 30, ["data/prepare.py", args.text, "--name", "gpu_report"]),
                ("train", 400, train),
                ("compare", 20, ["data/compare.py", folder / "baby"])]
    return [("tests", LIMIT, ["-m", "pytest", "-v", "--durations=8", "tests/test_cuda.py"])]


def run_part(name: str, seconds: float, words: list, folder: Path) -> str:
    """Run one part for at most that long, printing its output as it comes; returns how it ended."""
    begin = time.monotonic()
    environment = os.environ | {"NANONORM_DATA": str(folder / "data"), "PYTHONUNBUFFERED": "1"}
    log = folder / f"{name}.txt"
    print(f"\n--- {name}, at most {seconds:.0f} s: {' '.join(map(str, words))}", flush=True)
    with open(log, "wb") as out, open(log, encoding="utf-8", errors="replace") as shown:
        # A file, not a pipe: whatever is left of a killed part cannot keep us waiting.
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment,
                                   stdout=out, stderr=subprocess.STDOUT)
        ended = None
        while process.poll() is None:
            time.sleep(0.2)
            print(shown.read(), end="", flush=True)
            spent = time.monotonic() - begin
            if spent > seconds - GRACE and ended is None:
                ended = "ended for lack of time"
                process.terminate()
            elif spent > seconds:
                process.kill()
        print(shown.read(), end="", flush=True)
    return f"{name}: {ended or f'exit {process.returncode}'}, {time.monotonic() - begin:.0f} s"


def machine(folder: Path):
    """Keep what the driver says of the GPU."""
    try:
        run = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20)
        (folder / "machine.txt").write_text(run.stdout, encoding="utf-8")
        print(run.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"nvidia-smi does not answer: {error}")


def main():
    begin = time.monotonic()
    parser = Parser(description="What one GPU says, in three commands of at most 8 minutes each.")
    parser.add_argument("what", choices=("step", "train", "tests"))
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the report goes")
    parser.add_argument("text", nargs="?", type=Path, metavar="TEXT", help="for train: a text file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.what == "train":
        if args.text is None:
            parser.error("train needs a TEXT file")
        args.text = args.text.resolve()     # the parts run in another folder
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.device == "cuda":
        machine(args.folder)

    # Each part has its own cap, and all of them together have LIMIT.
    endings = []
    for name, seconds, words in parts_of(args):
        left = LIMIT - (time.monotonic() - begin)
        endings.append(run_part(name, max(GRACE + 1, min(seconds, left)), words, args.folder))
    summary = "\n".join(endings)
    (args.folder / f"summary-{args.what}.txt").write_text(summary + "\n", encoding="utf-8")
    print(f"\n{summary}")
    if not all("exit 0" in ending for ending in endings):
        sys.exit(1)


if __name__ == "__main__":
    command(main)
