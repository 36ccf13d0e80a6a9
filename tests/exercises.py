"""Ten exercises that check themselves, for a class or for one reader. They need pytest.

    python tests/exercises.py list                      # the list, as without an argument
    python tests/exercises.py start 1 out/exercise1     # the program, less the part to write
    python tests/exercises.py check 1 out/exercise1     # pass, or which property fails, by numbers

FOLDER is yours to edit; nothing else is changed. `check` runs the code in it, as you would. What
`start` lays out and the checks themselves are in exercise_checks.py, and so is how to add one.
"""
import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = Path(__file__).resolve().with_name("exercise_checks.py")
sys.path.insert(0, str(ROOT))       # where data/ is

from data import Parser, command


@dataclass
class Exercise:
    """One line of the list."""
    title: str
    minutes: int            # of work, for somebody who has read nanoGPT
    seconds: int            # of computing for one check, on a laptop
    cut: tuple = ()         # (file, function, what to do there), see `cut_out`
    copy: tuple = ()        # further files that it needs


CSV = "data/results/earlier-layers16.csv"
EXERCISES = {
    1: Exercise("Turn a vector: tangent, angle, exponential map", 30, 8, (
        ("geonorm.py", "geodesic_update", "the three steps at the top of this file"),)),
    2: Exercise("Four lines: the placements from their table", 20, 8, (
        ("model.py", "edge_norms", "two columns of the table in Residual"),
        ("model.py", "Residual.forward", "one line per placement, as in the table"),
        ("model.py", "Attention.forward", "exercise 10; nothing here needs it",
         "cache is not None"))),
    3: Exercise("One sphere: Post and Pre as turns", 35, 6),
    4: Exercise("Five faults: find and mend them", 25, 6),
    5: Exercise("Predict, then measure: gradients and RMS at the start", 15, 10),
    6: Exercise("Save it with one flag: 16 layers that learn nothing", 20, 60),
    7: Exercise("One rate is no comparison: rank the placements", 25, 6, copy=(CSV,)),
    8: Exercise("How many seeds tell 0.01 nats apart?", 25, 6, copy=(CSV,)),
    9: Exercise("A placement of your own: OLMo 2's x + N(f(x))", 25, 10),
    10: Exercise("Sampling with a memory: the cached attention", 20, 10, (
        ("model.py", "Attention.forward", "store k and v; read all; mask", "cache is not None"),)),
}


def cut_out(source: str, name: str, todo: str, within: str | None = None) -> str:
    """The source with the body of function `name`, or Class.method, replaced by one line.

    The docstring stays, and so do checks of the arguments: an `if` that only raises. within: the
    condition of an `if` in the function; then only what that `if` does is replaced.
    """
    node = ast.parse(source)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    body = node.body[1:] if ast.get_docstring(node) else node.body
    while isinstance(body[0], ast.If) and isinstance(body[0].body[0], ast.Raise):
        body = body[1:]
    if within:
        body = next(child.body for child in ast.walk(node)
                    if isinstance(child, ast.If) and ast.unparse(child.test) == within)

    lines, first, last = source.splitlines(), body[0].lineno - 1, body[-1].end_lineno
    indent = " " * body[0].col_offset
    lines[first:last] = [f'{indent}raise NotImplementedError("{todo}")']
    return "\n".join(lines) + "\n"


def copy_program(folder: Path, more: tuple = ()):
    """Copy the program, less its tests, into the folder; more: further files, by their paths."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), *(ROOT / name for name in more)):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def title(number: int) -> str:
    """The first line of EXERCISE.txt."""
    return f"Exercise {number}. {EXERCISES[number].title}"


def start(number: int, folder: Path) -> str:
    """Lay out an exercise in the folder, which is new or empty. Returns the task's text."""
    import exercise_checks      # it needs torch, which the list does not

    # The program, less what is cut out, and the files to fill in.
    exercise = EXERCISES[number]
    copy_program(folder, exercise.copy)
    for name, *part in exercise.cut:
        source = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(cut_out(source, *part), encoding="utf-8")
    for name, text in exercise_checks.FILES.get(number, {}).items():
        (folder / name).write_text(text.lstrip("\n"), encoding="utf-8")
    task = f"{title(number)}\n{exercise_checks.TASKS[number]}"
    (folder / "EXERCISE.txt").write_text(task, encoding="utf-8")
    return task


def check(number: int, folder: Path) -> list[str]:
    """What fails, one line per property: nothing if the exercise is solved.

    pytest runs the exercise's checks in a process of its own, which writes nothing into the tree.
    """
    words = [sys.executable, "-B", "-m", "pytest", "-q", "--tb=line", "--noconftest", "--color=no",
             "-p", "no:cacheprovider", "-o", f"python_functions=check_{number}_*", CHECKS]
    run = subprocess.run(words, cwd=folder, capture_output=True, text=True, encoding="utf-8",
                         errors="replace")
    if run.returncode == 0:
        return []

    # Of pytest's lines, those of failures. The place matters only in the student's files.
    lines = []
    for path, line, message in re.findall(r"^(.*?\.py):(\d+): (.+)$", run.stdout, re.M):
        if Path(path).resolve().is_relative_to(folder.resolve()):
            message = f"{Path(path).name}, line {line}: {message}"
        lines.append(message.removeprefix("AssertionError: ").removeprefix("Failed: "))
    return list(dict.fromkeys(lines)) or [run.stdout + run.stderr]


def main():
    parser = Parser(description="Ten exercises that check themselves; without arguments, the list.")
    parser.add_argument("action", nargs="?", choices=("list", "start", "check"))
    parser.add_argument("number", nargs="?", type=int, choices=EXERCISES, metavar="NUMBER")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.action in (None, "list"):
        print(f"    {'':56}minutes of work   seconds of one check")
        for number, exercise in EXERCISES.items():
            print(f"{number:2}  {exercise.title:56}{exercise.minutes:7}{exercise.seconds:23}")
        return

    # What cannot work is refused before anything is written.
    if args.folder is None:
        parser.error(f"say which: {args.action} NUMBER FOLDER")
    if importlib.util.find_spec("pytest") is None:
        parser.error("the exercises need pytest: pip install pytest")
    if args.action == "start":
        if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
            parser.error(f"{args.folder} is not empty: name a new folder")
        print(start(args.number, args.folder))
        print(f"Then: python tests/exercises.py check {args.number} {args.folder}")
        return

    # The other exercises' parts are whole in this folder: their checks would pass.
    task = args.folder / "EXERCISE.txt"
    if not (task.exists() and task.read_text(encoding="utf-8").startswith(title(args.number))):
        parser.error(f"{args.folder} does not hold exercise {args.number}: start it first")
    failed = check(args.number, args.folder)
    print(f"exercise {args.number}: {'fail' if failed else 'pass'}")
    for line in failed:
        print(f"- {line}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    command(main)
