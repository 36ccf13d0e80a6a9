"""Train published placements beside the four. Each is a diff of model.py: tests/forks/NAME.diff.

    python tests/forks.py                               # the list
    python tests/forks.py mix deepnorm -- --n_layer 16 --learning_rate 1e-3 2e-3 --seed 1 2 3
    python tests/forks.py pre geo mix -- --out_dir out/three

What follows -- are flags of train.py, the same for each, but for --norm. Each placement trains in a
temporary copy of the program, so the working tree stays as it is. All runs share one --out_dir; at
the end data/compare.py makes one table of all that is there, the first placement named on top.
The same command continues what was interrupted. To fork the program itself:
git apply tests/forks/NAME.diff
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORKS = ROOT / "tests" / "forks"
sys.path.insert(0, str(ROOT))       # where data/, train.py and model.py are

import exercises
from data import Interrupt, Parser, command
from data.prepare import DATA_DIR


def names() -> list[str]:
    """The placements that have a diff, in order."""
    return sorted(path.stem for path in FORKS.glob("*.diff"))


def head(name: str) -> list[str]:
    """The lines above the diff: what it is, its equation, its source, what differs here."""
    text = (FORKS / f"{name}.diff").read_text(encoding="utf-8")
    return text.partition("--- ")[0].splitlines()


def copy_program(name: str, folder: Path):
    """The program in a new folder, with the diff of that name applied.

    Raises ValueError if the diff does not apply, or if there is no git to apply it.
    """
    if shutil.which("git") is None:
        raise ValueError("git is needed to apply a diff: install it")
    exercises.copy_program(folder)

    # Outside a repository git applies a diff as patch does; GIT_DIR keeps it from finding one.
    diff = FORKS / f"{name}.diff"
    run = subprocess.run(["git", "apply", diff], cwd=folder, capture_output=True, text=True,
                         env=os.environ | {"GIT_DIR": str(folder / "no repository")})
    if run.returncode:
        reason = (run.stderr.strip() or "git said nothing").splitlines()[0]
        raise ValueError(f"{diff} does not apply: {reason}; if you changed model.py, run this in a "
                         "clean clone")


def train(program: Path, name: str, flags: list[str], interrupt: Interrupt) -> int:
    """Run that program's train.py from here, on this program's datasets; returns its exit code.

    Ctrl-C reaches both processes; a SIGTERM only the one it is sent to, so that it is passed on.
    """
    words = [sys.executable, str(program / "train.py"), "--norm", name, *flags]
    process = subprocess.Popen(words, env=os.environ | {"NANONORM_DATA": str(DATA_DIR)})
    told = False
    while True:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            if interrupt.number == signal.SIGTERM and not told:
                process.terminate()
                told = True


def main():
    parser = Parser(description="Train published placements beside the four; without arguments, "
                    "the list.", usage="%(prog)s [NAME ...] [-- FLAGS OF train.py]")
    parser.add_argument("names", nargs="*", metavar="NAME", help="pre, post, peri, geo or a diff")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    chosen, flags = parser.parse_args(words[:end]).names, words[end + 1:]
    if not chosen:
        if words:
            parser.error("name a placement before the --")
        for name in names():
            print(f"{name:12} {head(name)[0]}")
        return

    # What cannot work is refused before anything is trained. torch is imported only now.
    from model import NORMS
    from train import load, parse_args
    for name in chosen:
        if name not in (*NORMS, *names()):
            parser.error(f"no placement {name!r}: choose from {', '.join((*NORMS, *names()))}")
    if any(word.partition("=")[0] == "--norm" for word in flags):
        parser.error("--norm: name the placements before the --")
    norm = chosen[0] if chosen[0] in NORMS else "pre"       # whose folders are named alike
    runs = parse_args(["--norm", norm, *flags])
    first, config = next(iter(runs.items()))
    load(config.dataset, max(run.block_size for run in runs.values()))

    # One after another. train.py itself saves and exits on an interrupt; then the rest is not run.
    failed = []
    with tempfile.TemporaryDirectory() as folder, Interrupt() as interrupt:
        programs = {name: ROOT if name in NORMS else Path(folder, name) for name in chosen}
        for name, program in programs.items():
            if name not in NORMS:
                copy_program(name, program)
        for name, program in programs.items():
            code = train(program, name, flags, interrupt)
            if interrupt.number or code == 2 or code > 128:
                sys.exit(128 + interrupt.number if interrupt.number else code)
            if code:
                failed.append(name if code > 0 else f"{name} (killed by signal {-code})")

    # The first placement named is the first row of the table, with which the others are compared.
    from data.compare import compare
    first = first.with_name(chosen[0] + first.name.removeprefix(norm))
    print("\nall runs:")
    compare([path for path in (first, first.parent) if path.exists()], first.parent)
    if failed:
        sys.exit(f"these ended with an error: {', '.join(failed)}")


def run_command():
    """The command line; what `copy_program` raises is printed as one line."""
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    command(run_command)
