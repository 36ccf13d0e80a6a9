"""The README's commands and code, run as they are printed there, and its numbers."""
import csv
import json
import math
import re
import shlex
import statistics
from pathlib import Path

import numpy as np
import pytest

import data.prepare
import depths_figure
import exercises
import train
from model import NORMS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "data" / "results" / "README.md").read_text(encoding="utf-8")


def blocks(kind: str, text: str = README) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, re.S)


def commands(text: str) -> list[str]:
    """The training commands, with their shell variables put in."""
    found = []
    for block in blocks("sh", text):
        variables = dict(re.findall(r'^(\w+)="(.*)"$', block, re.M))
        for line in block.replace("\\\n", " ").splitlines():
            if "train.py" in line:
                found.append(re.sub(r"\$(\w+)", lambda match: variables[match[1]], line))
    return found


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The program in a folder of its own, with a small text where stdlib would be."""
    exercises.copy_program(tmp_path)
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 110, 5000, dtype=np.uint8).tobytes())
    monkeypatch.setattr(data.prepare, "DATA_DIR", tmp_path / "data")
    data.prepare.prepare([str(text)], name="stdlib")
    return tmp_path


TOY = dict(dataset="stdlib", device="cpu", compile=False, n_layer=2, n_head=2, n_embd=8,
           block_size=8, batch_size=2, gradient_accumulation_steps=1, max_iters=2, warmup_iters=1,
           eval_interval=2, eval_iters=1)


def toy_runs(command: str, folder: Path) -> dict:
    """The last run of each norm of a command, at toy size, in `folder`."""
    runs = train.parse_args(shlex.split(command.split("train.py")[1]))
    for config in runs.values():
        vars(config).update(TOY, out_dir=str(folder))
    last = {config.norm: path for path, config in runs.items()}
    return {folder / path.name: runs[path] for path in last.values()}


@pytest.mark.parametrize("text", [README, RESULTS], ids=["README", "results"])
def test_train_commands_run_at_toy_size(text, copy, capsys):
    """Every training command, with its own flags but for the size of model, text and run."""
    found = commands(text)
    assert len(found) >= 4
    for number, command in enumerate(found):
        runs = toy_runs(command, copy / str(number))
        train.main(runs)
        table = capsys.readouterr().out.partition("\nnorm ")[2].splitlines()[1:]
        assert table and table[0].split(" ")[0] in NORMS
        if len(runs) > 1:
            lines = (copy / str(number) / "compare.csv").read_text(encoding="utf-8").splitlines()
            assert len(lines) == 1 + len(runs)


def test_other_commands_parse():
    """Each script that a README names is there, and each flag of it is in the script's --help.

    What follows -- in a command of tests/forks.py are flags of train.py.
    """
    for text in (README, RESULTS):
        for line in "\n".join(blocks("sh", text)).splitlines():
            script = re.search(r"python (\S+\.py)", line)
            if not script or "train.py" in line:
                continue
            line, _, flags = line.partition(" -- ")
            source = (ROOT / script[1]).read_text(encoding="utf-8")
            for name in re.findall(r"--(\w+)", line):
                assert f'"--{name}"' in source, line
            if "$" not in flags:
                train.parse_args(shlex.split(flags))


def test_fifth_placement():
    """The README's lines are those that tests/forks/reordered.diff changes."""
    text = (ROOT / "tests" / "forks" / "reordered.diff").read_text(encoding="utf-8")
    wanted = re.findall(r"^[+-](?![+-]).*$", text, re.M)
    shown = [line for line in blocks("diff")[0].splitlines() if line != "@@"]
    assert shown == wanted and len(shown) == 6


def test_frozen_scalars():
    """The results' change of geonorm.py: the lines that it takes out are there, once each."""
    source = (ROOT / "geonorm.py").read_text(encoding="utf-8").splitlines()
    removed = [line[1:] for line in blocks("diff", RESULTS)[0].splitlines() if line[0] == "-"]
    assert len(removed) == 2 and all(source.count(line) == 1 for line in removed)


# ---------------------------------------------------------------------------------------- numbers

T95 = {2: 12.7062, 3: 4.3027, 4: 3.1824, 5: 2.7764}     # Student's t by number of pairs
NOTHING = 0.95 * 3.3475     # of the loss of Tiny Shakespeare's byte frequencies, nats


def rows_of(selector: str) -> list[dict]:
    """The lines of data/results/FILE.csv that `FILE: name=value name=value` selects.

    `FILE: ` selects all of them.
    """
    name, wanted = selector.split(": ")
    with open(ROOT / "data" / "results" / f"{name}.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    pairs = [word.split("=") for word in wanted.split()]
    return [line for line in lines if all(line[key] == value for key, value in pairs)]


def learned(selector: str) -> dict[int, float]:
    """Loss by seed of the runs that learned something."""
    losses = {int(line["seed"]): float(line["val_loss"] or "inf") for line in rows_of(selector)}
    return {seed: loss for seed, loss in losses.items() if loss < NOTHING}


def loss_cell(selector: str) -> str:
    """`1.846 (0.002), 3 seeds`, and how many diverged (they have no loss) or learned nothing."""
    losses, rows = list(learned(selector).values()), rows_of(selector)
    diverged = sum(not line["val_loss"] for line in rows)
    counts = {"learned nothing": len(rows) - len(losses) - diverged, "diverged": diverged}
    failures = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if not losses:
        return f"all {failures}"
    text = f"{statistics.mean(losses):.3f}"
    if len(losses) > 1:
        text += f" ({statistics.stdev(losses):.3f})"
    text += f", {len(losses)} seed" + ("s" if len(losses) > 1 else "")
    return f"{text}; {failures}" if failures else text


def difference_cell(selector: str, base: str) -> str:
    """`+0.054 ± 0.021`, the mean over pairs of seeds and its 95% interval; ~ if that holds 0."""
    ours, theirs = learned(selector), learned(base)
    pairs = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if selector == base or not pairs:
        return ""
    mean = statistics.mean(pairs)
    if len(pairs) == 1:
        return f"{mean:+.3f}"
    half = T95[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.3f} ± {half:.3f}" + (" ~" if abs(mean) <= half else "")


def tables(text: str) -> list[list[list[str]]]:
    """The Markdown tables, as rows of cells; the line of dashes is left out."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = [[cell.strip() for cell in line.strip("|\n").split(" | ")]
                for line in block.splitlines()]
        found.append([[cell.strip("| ") for cell in row] for row in rows if "---" not in row[0]])
    return found


def test_numbers_are_those_of_the_files():
    """A digit in the text once outlived its file: each loss, difference and interval is recomputed.

    A table of results has the selector of its rows in the second column, and in the header of each
    column after the third that of the row it compares with. A table of effects has both selectors
    in each row.
    """
    checked = 0
    for header, *rows in tables(RESULTS):
        if header[1:] == ["rows", "minus rows", "difference"]:
            for what, selector, base, difference in rows:
                assert difference == difference_cell(selector.strip("`"), base.strip("`")), what
                checked += 1
        bases = re.findall(r"minus `(\w+-?\w*: [^`]*)`", " | ".join(header))
        if not bases:
            continue
        assert len(header) == 3 + len(bases)
        for setting, selector, loss, *differences in rows:
            selector = selector.strip("`")
            assert loss == loss_cell(selector), setting
            assert differences == [difference_cell(selector, base) for base in bases], setting
            checked += 1
    assert checked >= 20


def test_rates_are_those_of_the_files():
    """One run per cell: the row's selector at the column's learning rate; - if there is none."""
    checked = 0
    for header, *rows in tables(RESULTS):
        if header[1:2] != ["rows"] or not header[2].startswith("0.0"):
            continue
        for what, selector, *cells in rows:
            for rate, cell in zip(header[2:], cells, strict=True):
                selected = f"{selector.strip('`')} learning_rate={rate}"
                assert len(rows_of(selected)) == (cell != "-"), (what, rate)
                if cell != "-":
                    wanted = loss_cell(selected).removeprefix("all 1 ").removesuffix(", 1 seed")
                    assert cell == wanted, (what, rate)
                    checked += 1
    assert checked >= 40


def test_matrices_are_those_of_the_files():
    """The README's tables of each placement with and without a decay and an entry norm."""
    columns = [("none", "none"), ("sqrt", "none"), ("none", "norm"), ("sqrt", "norm")]
    found = [table for table in tables(README) if table[0][1:2] == ["neither"]]
    assert len(found) == 2
    for header, *rows in found:
        name = header[0].replace(" layers", "")
        best = depths_figure.read(ROOT / "data" / "results" / f"layers{name}.csv")
        assert [row[0].strip("`") for row in rows] == list(NORMS)
        for norm, *cells in rows:
            for (decay, entry), cell in zip(columns, cells, strict=True):
                runs = best[norm.strip("`"), decay, entry]
                failed = len(runs) - len(depths_figure.losses(runs))
                wanted = f"{depths_figure.mean(runs):.3f}"
                wanted += f" ({failed} of {len(runs)} failed)" if failed else ""
                assert cell == wanted, (name, norm, decay, entry)


def mean_cell(lines: list[dict], column: str) -> str:
    """The mean of a column, with as many digits as the tables of depth have."""
    values = [float(line[column]) for line in lines if line[column]]
    digits = {"rms_last_first": 2, "grad_max_min": 1, "mean_angle": 2, "clamped": 3}[column]
    return f"{statistics.mean(values):.{digits}f}" if values else "-"


def power(lines: list[dict], first: int) -> str:
    """The power of the layer with which the turn changes: a line through its logarithms."""
    layers = sorted({int(line["layer"]) for line in lines if int(line["layer"]) + 1 >= first})
    turns = [statistics.mean(float(line["angle"]) for line in lines if int(line["layer"]) == layer)
             for layer in layers]
    return f"{np.polyfit(np.log(np.array(layers) + 1), np.log(turns), 1)[0]:+.2f}"


def test_depth_is_that_of_the_files():
    """What a sublayer does: means over the runs that learned, and how the turn changes by layer."""
    checked = 0
    for header, *rows in tables(RESULTS):
        for what, selector, *numbers in rows:
            lines = rows_of(selector.strip("`")) if header[1] == "rows" else []
            if header[-1] == "clamped":
                lines = [line for line in lines if line["status"] == "ok"]
                columns = ("rms_last_first", "grad_max_min", "mean_angle", "clamped")
                assert numbers == [mean_cell(lines, column) for column in columns], what
                checked += 1
            elif header[-1] == "MLP, trained":
                parts = [[line for line in lines
                          if (line["step"], line["sublayer"]) == (step, sublayer)]
                         for step in ("0", "600") for sublayer in ("attention", "mlp")]
                assert numbers == [power(part, first) for part, first in zip(parts, (1, 1, 2, 2))]
                checked += 1
    assert checked >= 10


def test_costs_are_those_of_the_file():
    """Time and memory of every placement, divided by those of `pre`."""
    costs = {line["norm"]: line for line in rows_of("forks-cost: ")}
    found, = [rows for header, *rows in tables(RESULTS) if header[-2:] == ["time", "memory"]]
    assert {row[0].strip("`") for row in found} == set(costs)
    for norm, *_, time, memory in found:
        line = costs[norm.strip("`")]
        assert [time, memory] == [f"{float(line[name]):.2f}" for name in ("time", "memory")], norm


def test_speed_is_that_of_the_files():
    """What tests/bench.py wrote at two widths: ratios of time and of memory, in this order."""
    header, *found = next(table for table in tables(RESULTS) if "384 channels" in table[0][1])
    files = [json.loads((ROOT / "data" / "results" / f"{name}.json").read_text(encoding="utf-8"))
             for name in ("speed-baby", "speed-tiny")]
    measured = zip(*([row for row in file["rows"] if "run" in row] for file in files))
    for (run, *numbers), rows in zip(found, measured, strict=True):
        assert rows[0]["run"] == run.strip("`") or "nanoGPT" in run
        assert numbers == [f"{row[name]:.2f}" for row in rows for name in ("ratio", "MB ratio")]


def test_findings_repeat_the_results():
    """Every loss and difference among the README's findings is in a table of data/results."""
    findings = README.partition("## What we measured")[2].partition("\n## ")[0]
    found = re.findall(r"\d\.\d{3}", findings)
    printed = set(re.findall(r"\d\.\d{3}", RESULTS))
    assert len(found) >= 10 and set(found) <= printed


def test_first_table_is_that_of_the_file():
    """The opening table, from the compare.csv of the README's first command."""
    lines = {line["norm"]: line for line in rows_of("first: ")}
    base, checked = float(lines["pre"]["val_loss"]), 0
    for line in README.splitlines():
        words = line.split()
        if len(words) == 6 and words[0] in lines and words[1][0].isdigit():
            row = lines[words[0]]
            assert words[1] == f"{float(row['val_loss']):.4f}"
            assert words[2] in ("-", f"{float(row['val_loss']) - base:+.4f}")
            assert words[3] == f"{float(row['val_bits_per_byte']):.4f}"
            assert words[5] == f"{float(row['rms_last_first']):.4g}"
            checked += 1
    assert checked == 4
