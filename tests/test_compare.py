"""data/compare.py: what may be compared, the table and its statistics, compare.csv, the figure.

The runs are made up by writing their three files: nothing is trained here, and torch is not used.
"""
import csv
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from data import compare

MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
SCRIPT, DRAW = Path(compare.__file__), compare.draw
FLAGS = {
    "norm": "pre", "dataset": "mine", "out_dir": "out", "preset": "tiny", "overwrite": False,
    "eval_interval": 5, "eval_iters": 4, "log_interval": 5, "batch_size": 4, "block_size": 16,
    "gradient_accumulation_steps": 1, "n_layer": 2, "learning_rate": 0.001, "max_iters": 10,
    "min_lr": None, "seed": 1, "device": "auto", "dtype": "auto", "compile": None,
    "decay": "own", "geo_p": "inf"}
RECORD = {
    "format": "nanonorm 3", "model": {}, "parameters": 1234, "device": "cpu", "dtype": "float32",
    "compiled": False, "hardware": "a CPU", "threads": 1, "torch": "2.13.0", "python": "3.11.7"}
DATA = {"tokenizer": "bytes", "sha256": "ab" * 32, "train_tokens": 9000, "unigram_loss": 3.35}
LOG = ("step,train_loss,val_loss,val_bits_per_byte,learning_rate,grad_norm,tokens_per_second,"
       "peak_mb,train_seconds,elapsed_seconds")
DEPTH = "step,layer,sublayer,stream_rms,update_rms,angle,clamped,grad_norm"
DIVERGED = math.nan


def depth_lines(layers: int = 2, clamped: str = "") -> list[list]:
    """A profile with other numbers in each line: RMS 1.5 after the first layer, 2.5 after both."""
    return [[step, layer, sublayer, 1 + (2 * layer + i) / 2, 0.1, 0.2 + 0.1 * layer + step / 100,
             clamped, (layer + 1) * (step + 1)]
            for step, layer in product((0, 10), range(layers))
            for i, sublayer in enumerate(("attention", "mlp"))]


def write(path: Path, header: str, lines: list[list]):
    text = [header, *(",".join("" if x is None else str(x) for x in line) for line in lines)]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Drawing takes a second: only the tests that ask for `figures` draw."""
    monkeypatch.setattr(compare, "draw", lambda runs, path: None)


@pytest.fixture
def figures(undrawn, monkeypatch) -> list:
    """What is drawn from now on, as matplotlib's figures; saved small, to be quick."""
    monkeypatch.setattr(compare, "draw", DRAW)
    Figure, saved = pytest.importorskip("matplotlib.figure").Figure, []
    save = Figure.savefig

    def savefig(self, path, dpi):
        saved.append(self)
        save(self, path, dpi=20)
    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def make(folder: Path, losses=(1.6, 1.5), record=(), data=(), depth=None, seconds=1.0, **flags):
    """A run's folder: losses at steps 5 and 10, where DIVERGED ends the run."""
    config = FLAGS | flags
    folder.mkdir(parents=True)
    about = RECORD | dict(record) | {"config": config, "data": DATA | dict(data)}
    (folder / "config.json").write_text(json.dumps(about, allow_nan=False), encoding="utf-8")
    lines = []
    for step, loss in zip((5, 10), losses):
        lines.append([step, loss, loss, loss / 2, 1e-3, 1.0, 640.0, 3.0, seconds * step / 10,
                      2 * seconds])
    write(folder / "log.csv", LOG, lines)
    write(folder / "depth.csv", DEPTH, depth_lines() if depth is None else depth)
    return folder


def sweep(out: Path, runs: dict[str, dict]) -> list[Path]:
    return [make(out / name, **flags) for name, flags in runs.items()]


def good(folders) -> list:
    return compare.comparable(compare.find_runs(folders))


def cells(text: str) -> list[dict[str, str]]:
    """The lines of a table by its header; the notes are under ""."""
    names, *lines = (re.split(" {2,}", line.strip()) for line in text.splitlines())
    return [dict(zip([*names, ""], [*line, ""])) for line in lines if line[0][0] != "~"]


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", cell)]


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# --------------------------------------------------------------------------------- what compares

def damage(folder: Path, name: str, text: str | None):
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name, text, why", [
    ("config.json", None, "no run"),
    ("config.json", "{", "config.json cannot be read"),
    ("config.json", "[]", "nanonorm 3"),
    ("config.json", '{"config": {}}', "older version"),
    ("config.json", '{"format": "nanonorm 2", "config": {}}', "older version"),
    ("config.json", '{"format": "nanonorm 3", "config": []}', "no valid config"),
    ("config.json", '{"format": "nanonorm 3", "config": {}, "data": {}}', "no valid parameters"),
    ("log.csv", None, "log.csv cannot be read"),
    ("log.csv", "", "no column step"),
    ("log.csv", "step,val_loss\n5,1\n", "no column train_loss"),
    ("log.csv", LOG + "\n", "unfinished"),
    ("log.csv", "step,train_loss,val_loss\n5,1.0,1.0\n", "unfinished"),
    ("log.csv", "step,train_loss,val_loss\n5,1.0,1.0\n10,1.0,\n", "unfinished"),
    ("log.csv", "step,train_loss,val_loss\n5,1.0,one\n10,1.0,1.0\n", "line 2 of log.csv"),
    ("log.csv", "step,train_loss,val_loss\n5,1.0\n10,1.0,1.0\n", "line 2 of log.csv"),
    ("log.csv", "step,train_loss,val_loss\n5,1.0,110,1.0,1.0\n10,1.0,1.0\n", "line 2 of log.csv"),
])
def test_what_is_no_finished_run(tmp_path, capsys, name, text, why):
    """One line on stderr names the folder and the reason; the others are compared without it."""
    folders = sweep(tmp_path, {"bad": {}, "good": {"norm": "geo"}})
    damage(folders[0], name, text)
    compare.compare(folders, tmp_path)
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and str(folders[0]) in err and why in err
    assert [line["norm"] for line in cells(out)] == ["geo"]
    with pytest.raises(SystemExit) as end:
        compare.compare(folders[:1], tmp_path)
    assert "\n" not in str(end.value.code) and not (tmp_path / "compare.csv").exists()


@pytest.mark.parametrize("flags, what", [
    ({"data": {"sha256": "cd" * 32}}, "another text"), ({"data": {"tokenizer": "gpt2"}}, "gpt2"),
    ({"data": {"train_tokens": 8000}}, "split"), ({"eval_iters": 8}, "eval_iters"),
    ({"block_size": 32}, "block_size"), ({"batch_size": 8}, "--eval_iters 0")])
def test_other_text_or_evaluation(tmp_path, capsys, flags, what):
    """Losses of another text or evaluation are no losses to compare: once averaged silently."""
    folders = sweep(tmp_path, {"a": {"seed": 1}, "b": {"seed": 2} | flags, "c": {"seed": 3}})
    assert [run.folder.name for run in good(folders)] == ["a", "c"]
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(folders[1]) in err and what in err and "left out" in err


def test_same_text_under_another_name(tmp_path, capsys):
    """The text counts, not its folder's name; nor does it count where a run was written."""
    folders = sweep(tmp_path, {"a": {"dataset": "x", "out_dir": "here"}, "b": {"seed": 2}})
    line, = cells(compare.table(good(folders)))
    assert line["val nats/token"] == "1.5000 (0.0000)" and capsys.readouterr().err == ""


def test_killed_in_mid_line(tmp_path):
    """kill -9 while a line is written: the line that was cut counts as not written."""
    folder = make(tmp_path / "a")
    whole = (folder / "log.csv").read_text(encoding="utf-8")
    with open(folder / "log.csv", "a", encoding="utf-8") as file:
        file.write("15,1.4")
    assert compare.read_run(folder).step == 10
    for cut in range(len(whole) - 1, len(whole) - 20, -1):
        damage(folder, "log.csv", whole[:cut])
        with pytest.raises(ValueError, match="step 5 of 10"):
            compare.read_run(folder)


def test_folders(tmp_path, capsys):
    """A folder of runs is its runs, a folder given twice counts once, and the first is first."""
    folders = sweep(tmp_path, {"geo": {"norm": "geo"}, "pre": {}, "post": {"norm": "post"}})
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert [run.norm for run in good([tmp_path])] == ["geo", "post", "pre"]
    assert [run.norm for run in good([folders[1], tmp_path, folders[1] / ".." / "pre"])] == [
        "pre", "geo", "post"]
    assert capsys.readouterr().err == ""
    (tmp_path / "notes").mkdir()
    assert len(good([tmp_path])) == 3
    assert str(tmp_path / "notes") in capsys.readouterr().err


def test_copy_of_a_run(tmp_path, capsys):
    """A copied folder is no second seed: it once narrowed the interval."""
    folders = sweep(tmp_path, {"a": {"geo_p": 2.0}, "copy": {}, "geo": {"norm": "geo"}})
    assert len(good(folders)) == 2      # geo_p is nothing to `pre`
    assert "copy" in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_two_commands(tmp_path, monkeypatch):
    """Runs of two commands make one table; the files go beside the first run, or to --out."""
    make(tmp_path / "one" / "pre", eval_interval=10, losses=(1.2, 1.5))
    make(tmp_path / "two" / "sweep" / "geo", norm="geo", losses=(1.6, 1.4))
    new = tmp_path / "new"
    for flags, out in (([], tmp_path / "one"), (["--out", str(new)], new)):
        monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path / "one"),
                                          str(tmp_path / "two" / "sweep"), *flags])
        compare.main()
        assert [line["run"] for line in read(out / "compare.csv")] == ["one/pre", "two/sweep/geo"]


# -------------------------------------------------------------------------------------- the table

def test_last_evaluation_is_compared(tmp_path):
    """A run that is evaluated more often finds a lower minimum: the last losses are compared, and
    the best ones are shown beside them (issue 9, row 1)."""
    folders = sweep(tmp_path, {"rare": {"norm": "geo", "eval_interval": 10},
                               "often": {"eval_interval": 5, "losses": (1.2, 1.5038)}})
    write(folders[0] / "log.csv", LOG.replace(",peak_mb", ""),
          [[10, 1.5, 1.5, 0.75, 0, 0, None, None, None]])
    rare, often = cells(compare.table(good(folders)))
    assert often["minus geo"] == "+0.0038" and often["val nats/token"] == "1.5038"
    assert often["best (step)"] == "1.2000 (5)" and rare["best (step)"] == "1.5000 (10)"
    assert (rare["tokens/s"], rare["peak MB"], often["peak MB"]) == ("-", "-", "3")
    assert "eval_interval" not in often


def test_table_statistics(tmp_path):
    """Mean and sample deviation over seeds; a star at the lowest mean of the rates that lost no
    seed; differences seed by seed from the first norm at its best rate, with their interval."""
    rng, seeds, rates = np.random.default_rng(0), (1, 2, 3, 4), (1e-3, 3e-3, 1e-2)
    luck = np.array([-0.1, 0.05, 0.15, -0.08])      # of a seed in all settings: pairing removes it
    level = dict(zip(product(("pre", "geo"), rates), (1.70, 1.60, 1.30, 1.57, 1.65, 1.20)))
    loss = {key: value + luck + rng.normal(0, 0.004, 4) for key, value in level.items()}
    folders = []
    for (norm, rate), seed in product(loss, seeds):
        last = DIVERGED if (rate, seed) == (1e-2, 3) else loss[norm, rate][seed - 1]
        folders.append(make(tmp_path / f"{norm}-{rate}-{seed}", (2, last), norm=norm, seed=seed,
                            learning_rate=rate, seconds=seed))
    lines = cells(compare.table(good(folders)))
    assert [(line["norm"], line["learning_rate"]) for line in lines] == [
        ("pre", "0.001"), ("pre", "0.003*"), ("pre", "0.01"),
        ("geo", "0.001*"), ("geo", "0.003"), ("geo", "0.01")]
    for line, ((norm, rate), values) in zip(lines, loss.items()):
        whole = [i for i in range(4) if rate < 1e-2 or i != 2]
        values, d = values[whole], (values - loss["pre", 3e-3])[whole]
        mean_sd = [values.mean(), values.std(ddof=1)]
        assert numbers(line["val nats/token"]) == pytest.approx(mean_sd, abs=6e-5)
        t = {3: 4.3027, 4: 3.1824}[len(d)]
        minus = [d.mean(), t * d.std(ddof=1) / len(d) ** 0.5]
        is_base = (norm, rate) == ("pre", 3e-3)
        assert numbers(line["minus pre"]) == pytest.approx([] if is_base else minus, abs=6e-5)
        assert numbers(line["val bits/byte"]) == pytest.approx([values.mean() / 2], abs=6e-5)
        assert line["tokens/s"] == f"{4 * 10 * 4 * 16 / (1 + 2 + 3 + 4):,.0f}"
        assert line["best (step)"] == f"{values.mean():.4f} (10)" and line["parameters"] == "1,234"
        note = {("geo", 1e-3): "best at the smallest rate tried"}.get((norm, rate), "")
        assert line[""] == ("seed 3 diverged at step 10" if rate == 1e-2 else note)
    assert numbers(lines[3]["minus pre"])[1] < 0.02 < numbers(lines[3]["val nats/token"])[1] / 2


def test_interval():
    """Student's t: a table of quantiles, and 1.96 beyond it."""
    assert compare.interval([0.25]) == (0.25, None)
    assert compare.interval([1.0, 2.0, 3.0]) == pytest.approx((2, 4.302653 / 3 ** 0.5), rel=1e-4)
    assert compare.interval([0.5] * 4) == (0.5, 0)
    for n in (2, 31, 32, 200):
        values = np.arange(n) / n
        t = {2: 12.7062, 31: 2.0423}.get(n, 1.96)
        want = values.mean(), t * values.std(ddof=1) / n ** 0.5
        assert compare.interval(values.tolist()) == pytest.approx(want)


def test_quantiles():
    """Each number of the table: the density of Student's t, integrated up to it, is 95%."""
    assert len(compare.STUDENT_T) == 30
    for n, t in enumerate(compare.STUDENT_T, 1):
        constant = math.gamma((n + 1) / 2) / math.gamma(n / 2) / math.sqrt(n * math.pi)
        x = np.linspace(0, t, 20001)
        density = constant * (1 + x ** 2 / n) ** (-(n + 1) / 2)
        inside = 2 * (density.sum() - (density[0] + density[-1]) / 2) * (x[1] - x[0])
        assert inside == pytest.approx(0.95, abs=1e-5), n


def test_not_told_apart(tmp_path):
    """~ where the interval holds 0, with a line that says so; one pair has no interval."""
    losses = {"pre": (1.5, 1.6, 1.7), "near": (1.45, 1.59, 1.68), "far": (1.3, 1.39, 1.5)}
    folders = [make(tmp_path / f"{norm}-{seed}", (2, loss), norm=norm, seed=seed)
               for norm, values in losses.items() for seed, loss in enumerate(values)]
    text = compare.table(good(folders))
    near, far = (line["minus pre"] for line in cells(text)[1:])
    assert near == "-0.0267 ± 0.0517 ~" and far == "-0.2033 ± 0.0143"
    assert text.splitlines()[-1].startswith("~ not told apart from pre: ")
    text = compare.table(good([folders[0], *folders[6:]]))
    assert "~" not in text and cells(text)[1]["minus pre"] == "-0.2000"
    text = compare.table(good([folders[0], folders[7]]))        # no pair at all
    assert cells(text)[1]["minus pre"] == "-"


def test_learned_nothing(tmp_path):
    """Counted and left out: a mean of "two trained, one did not" is a loss that no run has."""
    losses = {"pre": (1.5, 1.6, 1.7), "post": (1.4, 3.3, 1.6), "geo": (3.2, 3.35, 3.3)}
    folders = [make(tmp_path / f"{norm}-{seed}", (2, loss), norm=norm, seed=seed)
               for norm, values in losses.items() for seed, loss in enumerate(values)]
    _, post, geo = cells(compare.table(good(folders)))
    assert post["val nats/token"] == "1.5000 (0.1414)" and post[""] == "1 of 3 learned nothing"
    assert numbers(post["minus pre"])[0] == -0.1
    assert geo["val nats/token"] == "3.2833 (0.0764)" and geo[""] == "3 of 3 learned nothing"
    assert geo["minus pre"] == "-"
    line, = cells(compare.table(good(folders[-1:])))
    assert line["val nats/token"] == "3.3000" and line[""] == "learned nothing"
    assert compare.read_run(make(tmp_path / "edge", (3, 0.95 * 3.35))).status == "learned nothing"
    assert compare.read_run(make(tmp_path / "below", (3, 0.9499 * 3.35))).status == "ok"


@pytest.mark.parametrize("failure", [DIVERGED, math.inf, 3.3])
def test_failed_run_is_no_winner(tmp_path, failure):
    """A rate that leads, but lost a seed, is a line and no winner: no star."""
    losses = {0.02: (1.1, failure), 0.01: (1.3, 1.4), 0.005: (1.5, 1.6)}
    folders = [make(tmp_path / f"{rate}-{seed}", (1, loss), seed=seed, learning_rate=rate)
               for rate, values in losses.items() for seed, loss in enumerate(values)]
    lines = cells(compare.table(good(folders)))
    assert [line["learning_rate"] for line in lines] == ["0.005", "0.01*", "0.02"]
    assert lines[2]["val nats/token"] == "1.1000"
    assert lines[2][""] == ("1 of 2 learned nothing" if failure == 3.3 else
                            "seed 1 diverged at step 10")


def test_every_run_diverged(tmp_path, capsys):
    """Also then there is a line for each rate, none with a star, and the CSV."""
    for norm, rate in product(("pre", "geo"), (1.0, 2.0)):
        make(tmp_path / f"{norm}-{rate}", (DIVERGED,), norm=norm, learning_rate=rate)
    compare.compare([tmp_path], tmp_path)
    out, err = capsys.readouterr()
    for line in cells(out):
        assert (line["val nats/token"], line["minus geo"], line["best (step)"]) == ("-", "-", "-")
        assert line[""] == "diverged at step 5" and line["learning_rate"] in ("1", "2")
        assert line["tokens/s"] == f"{5 * 4 * 16 / 0.5:.0f}"
    assert [line["status"] for line in read(tmp_path / "compare.csv")] == ["diverged at step 5"] * 4
    assert err == ""


def test_rate_at_the_end_of_the_grid(tmp_path):
    """The table says where a better rate may lie outside of those tried (issue 9, row 16)."""
    losses = {"pre": (1.5, 1.6, 1.7), "post": (1.6, 1.5, 1.7), "peri": (1.7, 1.6, 1.5)}
    folders = [make(tmp_path / f"{norm}-{rate}", (2, loss), norm=norm, learning_rate=rate)
               for norm, values in losses.items() for rate, loss in zip((0.1, 0.2, 0.4), values)]
    lines = cells(compare.table(good(folders)))
    assert [line[""] for line in lines if "*" in line["learning_rate"]] == [
        "best at the smallest rate tried", "", "best at the largest rate tried"]
    line, = cells(compare.table(good(folders[:1])))
    assert line[""] == "" and "learning_rate" not in line and not any("minus" in k for k in line)


# ---------------------------------------------------------------------------------------- settings

def test_settings_of_one_norm(tmp_path):
    """Each (decay, geo_p) is a setting with lines and a star of its own; a flag named after a norm
    counts only for that norm, and the others show a dash."""
    better = {("geo", "none", 2.0): 1e-2, ("geo", "sqrt", "inf"): 1e-2}     # the others like 1e-3
    folders = []
    grid = product(("pre", "geo"), ("none", "sqrt"), (2.0, "inf"), (1e-3, 1e-2))
    for norm, decay, p, rate in grid:
        if norm == "pre" and (decay, p) != ("none", "inf"):
            continue
        loss = 1.5 if better.get((norm, decay, p), 1e-3) == rate else 1.6
        folders.append(make(tmp_path / f"{norm}{decay}{p}{rate}", (2, loss), norm=norm, geo_p=p,
                            geo_decay=decay, learning_rate=rate))
    text = compare.table(good(folders))
    starred = [line for line in cells(text) if "*" in line["learning_rate"]]
    assert [tuple(line[k] for k in ("norm", "geo_p", "geo_decay", "learning_rate"))
            for line in starred] == [
        ("pre", "-", "-", "0.001*"),
        ("geo", "2", "none", "0.01*"), ("geo", "inf", "none", "0.001*"),
        ("geo", "2", "sqrt", "0.001*"), ("geo", "inf", "sqrt", "0.01*")]
    assert "minus pre" in text.splitlines()[0]
    assert "minus geo p=2 decay=none" in compare.table(good(folders[2:])).splitlines()[0]


def test_only_what_differs_is_a_column(tmp_path):
    """Neither a flag of one value, nor what changes no result, nor one of an absent norm's."""
    folders = sweep(tmp_path, {"pre": {"log_interval": 1, "device": "cpu"}, "geo": {"norm": "geo"}})
    names = list(cells(compare.table(good(folders)))[0])
    assert names[:3] == ["norm", "parameters", "val nats/token"]
    close = sweep(tmp_path, {f"{x}": {"weight_decay": x} for x in (0.1234567, 0.1234568)})
    lines = cells(compare.table(good(close)))
    assert [line["weight_decay"] for line in lines] == ["0.1234567", "0.1234568"]
    other = make(tmp_path / "long", max_iters=5, losses=(1.6,))
    assert list(cells(compare.table(good([*folders, other])))[0])[:2] == ["norm", "max_iters"]


def test_swept_flag_of_a_fork(tmp_path):
    """A flag that compare.py has never heard of is a column, and its runs are not averaged: once
    the last value overwrote the others in the table. Runs from before the flag show a dash."""
    folders = [make(tmp_path / f"{value}-{seed}", (2, 1.5 + seed / 10), seed=seed,
                    **({} if value is None else {"beta3": value}))
               for value in (None, 0.9, 0.99) for seed in (1, 2)]
    lines = cells(compare.table(good(folders)))
    assert [line["beta3"] for line in lines] == ["-", "0.9", "0.99"]
    assert all(line["val nats/token"] == "1.6500 (0.0707)" for line in lines)
    folders += [make(tmp_path / f"mine-{x}", norm="mine", mine_x=x) for x in (1, 2)]
    lines = cells(compare.table(good(folders)))
    assert [(line["norm"], line["mine_x"]) for line in lines][-3:] == [
        ("pre", "-"), ("mine", "1"), ("mine", "2")]


def test_new_column_of_a_fork(tmp_path):
    """Columns are read by name: one more, in front and with text in it, changes nothing."""
    folders = sweep(tmp_path, {"pre": {}, "geo": {"norm": "geo"}})
    before = compare.table(good(folders))
    for folder, name in product(folders, ("log.csv", "depth.csv")):
        header, *lines = (folder / name).read_text(encoding="utf-8").splitlines()
        turned = [",".join(reversed(line.split(","))) for line in (header, *lines)]
        text = ["note," + turned[0], *('"a ""b""",' + line for line in turned[1:])]
        damage(folder, name, "\n".join(text) + "\n")
    assert compare.table(good(folders)) == before


@pytest.mark.parametrize("name, value", [
    ("device", "cuda"), ("dtype", "bfloat16"), ("compiled", True), ("torch", "2.14.1"),
    ("threads", 2)])
def test_what_ran_is_a_column(tmp_path, name, value):
    """Seeds are not averaged over devices or number formats; what was asked for is not shown."""
    folders = sweep(tmp_path, {"a": {"seed": 1}, "b": {"seed": 2, "record": {name: value}}})
    want = [str(RECORD[name]), str(value)]
    assert [line[name] for line in cells(compare.table(good(folders)))] == want
    compare.compare(folders, tmp_path)
    assert [line[name] for line in read(tmp_path / "compare.csv")] == want


def test_profile_in_the_table(tmp_path, capsys):
    """The last step's profile in three or four numbers; without one there are dashes."""
    folders = sweep(tmp_path, {
        "pre": {}, "geo": {"norm": "geo", "depth": depth_lines(2, "0.25")},
        "post": {"norm": "post"}, "peri": {"norm": "peri", "depth": [[1, 2]]}})
    (folders[2] / "depth.csv").unlink()
    lines = cells(compare.table(good(folders)))
    names = ("rms_last_first", "grad_max_min", "mean_angle", "clamped")
    found = [tuple(line[name] for name in names) for line in lines]
    assert found == [("1.667", "2", "0.35", "-"), ("1.667", "2", "0.35", "0.25"), *[("-",) * 4] * 2]
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "peri" in err and "depth.csv" in err
    assert "clamped" not in compare.table(good(folders[:1]))


# ------------------------------------------------------------------------------------- compare.csv

def test_compare_csv(tmp_path):
    """One line per run with every flag, what ran and the results; floats read back exactly, and
    the same runs give the same bytes."""
    third = 1 / 3
    folders = sweep(tmp_path, {"pre": {"losses": (1.2, 1 + third)}, "geo": {
        "norm": "geo", "geo_p": 2.0, "record": {"device": "cuda"}, "losses": (1.5, DIVERGED)}})
    (folders[1] / "depth.csv").unlink()
    compare.compare(folders, tmp_path)
    before = (tmp_path / "compare.csv").read_bytes()
    pre, geo = read(tmp_path / "compare.csv")
    assert (pre["run"], geo["run"], geo["geo_p"], pre["min_lr"]) == ("pre", "geo", "2.0", "")
    assert set(FLAGS) - {"out_dir", "overwrite"} < set(pre) and pre["device"] == "cpu"
    assert {"hardware", "torch", "threads", "parameters", "dtype", "compiled"} < set(pre)
    assert float(pre["val_loss"]) == 1 + third
    assert float(pre["val_bits_per_byte"]) == (1 + third) / 2
    assert (pre["status"], pre["step"]) == ("ok", "10")
    assert (pre["best_val_loss"], pre["best_step"]) == ("1.2", "5")
    assert (geo["status"], geo["best_val_loss"]) == ("diverged at step 10", "1.5")
    assert float(pre["rms_last_first"]) == 2.5 / 1.5 and float(pre["grad_max_min"]) == 2
    assert float(pre["mean_angle"]) == pytest.approx(0.35)
    assert geo["mean_angle"] == pre["clamped"] == "" and geo["device"] == "cuda"
    assert list(pre)[-3:] == ["train_seconds", "elapsed_seconds", "peak_mb"]
    compare.compare(folders, tmp_path)
    assert (tmp_path / "compare.csv").read_bytes() == before
    assert "out_dir" not in pre and not list(tmp_path.glob("part.*"))


def test_full_disk(tmp_path, monkeypatch, capsys):
    """A compare.csv that cannot be finished leaves the old one whole."""
    folders = sweep(tmp_path, {"pre": {}, "geo": {"norm": "geo"}})
    (tmp_path / "compare.csv").write_text("old", encoding="utf-8")

    def full(self, lines):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(csv.DictWriter, "writerows", full)
    compare.compare(folders, tmp_path)
    assert capsys.readouterr().err.count("compare.csv") == 1
    assert (tmp_path / "compare.csv").read_text(encoding="utf-8") == "old"


def test_single_run(tmp_path, capsys):
    """One run is a table of one line and no file."""
    compare.compare([make(tmp_path / "pre")], tmp_path)
    assert len(cells(capsys.readouterr().out)) == 1
    assert [f.name for f in tmp_path.iterdir()] == ["pre"]


def test_place_that_cannot_be_written(tmp_path, figures, capsys):
    """A finished sweep compared on a read-only disk: its table, a line per file, and no error."""
    folders = sweep(tmp_path, {"pre": {}, "geo": {"norm": "geo"}})
    for name in ("compare.csv", "compare.png"):
        (tmp_path / name / "in the way").mkdir(parents=True)
    compare.compare(folders, tmp_path)
    out, err = capsys.readouterr()
    assert len(cells(out)) == 2 and err.count("\n") == 2
    assert all(str(tmp_path / name) in err for name in ("compare.csv", "compare.png"))
    compare.compare(folders, tmp_path / "pre" / "log.csv")      # not even a folder
    assert capsys.readouterr().err.count("\n") == 2


# ------------------------------------------------------------------------------ figure and command

def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    """Only the figure needs matplotlib: without it one line says how to get it."""
    monkeypatch.setattr(compare, "draw", DRAW)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    compare.compare(sweep(tmp_path, {"pre": {}, "geo": {"norm": "geo"}}), tmp_path)
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "pip install matplotlib" in err and len(cells(out)) == 2
    assert sorted(f.name for f in tmp_path.iterdir()) == ["compare.csv", "geo", "pre"]


def test_figure(tmp_path, figures, capsys):
    """Five labelled panels and a legend with the best rates; a norm has one colour, its settings
    line styles; the lines are means over seeds of log.csv and depth.csv; failures are crosses."""
    folders = []
    for norm, p, rate, seed in product(("pre", "geo"), ("inf", 2.0), (1e-2, 1e-4), (1, 2)):
        if (norm, p) != ("pre", 2.0):
            last = 1.5 + rate + seed / 10 if (norm, rate, seed) != ("pre", 1e-2, 2) else 3.3
            folders.append(make(tmp_path / f"{norm}{p}{rate}{seed}", (2 + seed, last), norm=norm,
                                geo_p=p, learning_rate=rate, seed=seed))
    folders.append(make(tmp_path / "post", (3.4, 3.3), norm="post", learning_rate=1e-2))
    compare.compare(folders, tmp_path)
    assert (tmp_path / "compare.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert capsys.readouterr().err == ""
    *panels, legend = figures[0].axes
    assert len(panels) == 5
    assert all(ax.get_xlabel() and ax.get_ylabel() and ax.get_title() for ax in panels)
    assert [text.get_text() for text in legend.get_legend().get_texts()] == [
        "pre, rate 0.0001", "geo p=inf, rate 0.0001", "geo p=2, rate 0.0001",
        "post, rate 0.01: failed"]

    by_step, by_rate, stream, turn, gradient = panels
    pre, inf, two, post = by_step.lines
    assert pre.get_color() != inf.get_color() == two.get_color()
    assert inf.get_linestyle() != two.get_linestyle() and pre.get_marker() != inf.get_marker()
    assert pre.get_xdata().tolist() == [5, 10]
    assert pre.get_ydata().tolist() == pytest.approx([3.5, 1.6501])
    failed = [line for line in by_rate.lines if line.get_marker() == "x"]
    assert [line.get_color() for line in failed] == [pre.get_color(), post.get_color()]
    assert len(post.get_ydata()) == 0
    low, high = by_rate.get_ylim()
    assert 1.71 < low + failed[0].get_ydata()[0] * (high - low) < high < 2    # above all dots
    assert by_rate.texts[0].get_text() == "diverged or learned nothing"

    lines = depth_lines()
    for ax, column, every, width in ((stream, 3, 1, 2), (turn, 5, 1, 2), (gradient, 7, 2, 1)):
        start, end = (line for line in ax.lines if line.get_color() == pre.get_color())
        assert start.get_alpha() < 1 and end.get_alpha() is None
        assert start.get_ydata().tolist() == pytest.approx([x[column] for x in lines[:4]][::every])
        assert end.get_ydata().tolist() == pytest.approx([x[column] for x in lines[4:]][::every])
        assert end.get_xdata().tolist() == ([0.5, 1, 1.5, 2] if every == 1 else [1, 2])
    first, last = turn.lines[-1].get_ydata() * np.sqrt(turn.lines[-1].get_xdata())
    assert first == pytest.approx(last)     # the line of 1/sqrt(layer)


@pytest.mark.parametrize("runs", [
    {"a": {}, "b": {"seed": 2}},                                            # one rate, one setting
    {"a": {"depth": depth_lines(1)}, "b": {"norm": "geo", "depth": depth_lines(1)}},    # one layer
    {"a": {"depth": []}, "b": {"depth": [], "n_layer": 3}},                 # no profile
    {"a": {"losses": (3.3, 3.3)}, "b": {"losses": (3.3, 3.3), "norm": "geo"}},  # learned nothing
    {"a": {"losses": (DIVERGED,)}, "b": {"losses": (DIVERGED,), "norm": "geo"}},    # failures only
    {"a": {}, "b": {"losses": (DIVERGED,), "norm": "geo"}},
    {f"{i}": {"norm": f"n{i % 9}", "decay": str(i)} for i in range(20)},    # more than the colours
])
def test_figure_of_unusual_runs(tmp_path, figures, capsys, recwarn, runs):
    """Too little to draw, or more than there are colours: a figure all the same, and no warning."""
    compare.compare(sweep(tmp_path, runs), tmp_path)
    assert len(figures) == 1 and capsys.readouterr().err == "" and not recwarn.list


def test_error_of_drawing(tmp_path, figures, monkeypatch, capsys):
    """Whatever goes wrong in matplotlib is one line; the old figure, table and CSV are whole."""
    folders = sweep(tmp_path, {"pre": {}, "geo": {"norm": "geo"}})
    (tmp_path / "compare.png").write_bytes(b"old")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kw: 1 / 0)
    compare.compare(folders, tmp_path)
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "compare.png" in err and len(cells(out)) == 2
    assert len(read(tmp_path / "compare.csv")) == 2
    assert (tmp_path / "compare.png").read_bytes() == b"old"


def test_command(tmp_path):
    """The real command, without torch (here one that cannot be imported), and with a notebook's
    MPLBACKEND or a wrong one, which once ended a whole sweep in a traceback (issue 9, row 5)."""
    sweep(tmp_path / "out", {"pre": {}, "geo": {"norm": "geo"}})
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "MPLBACKEND": "nonsense", "PYTHONUTF8": "1"}
    done = subprocess.run([sys.executable, SCRIPT, "out"], cwd=tmp_path, env=env,
                          capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (0, 0 if MATPLOTLIB else 1), done.stderr
    assert [line["norm"] for line in cells(done.stdout)] == ["geo", "pre"]
    assert (tmp_path / "out" / "compare.csv").exists()
    assert (tmp_path / "out" / "compare.png").exists() == MATPLOTLIB


def test_link_to_itself(tmp_path, capsys):
    """Path.resolve raises on a loop of links: one line, as for any folder that is no run."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    folder, = sweep(tmp_path, {"a": {}})
    assert len(good([tmp_path / "loop", folder])) == 1
    assert capsys.readouterr().err.count("\n") == 1
