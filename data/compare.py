"""Finished runs to a table, compare.csv and compare.png. train.py makes the same at its end.

    python data/compare.py out/sweep other/run      # runs, or folders of runs

It reads config.json, log.csv and depth.csv of each run and nothing else, so the runs may be of
several commands, of a fork, or of another machine. What cannot be compared is left out, with a
line that says why.

Columns are what differs among the runs. Seeds are averaged; learning rates compete within each
setting, and * marks the best: the fewest failed runs, then the lowest mean of the last val loss.
Each setting is compared, seed by seed, with the first one at its best rate. The one rule: two
settings are "not told apart" (~) when the 95% interval of their difference holds 0.
The first setting is that of the first run: to choose it, name one of its runs before the others.
"""
import csv
import json
import math
import os
import statistics
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

# Run as a file, a script sees only its own folder: add the project's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data import FORMAT, MAY_DIFFER, Parser, atomic, command

# What config.json must hold, "" being its top level, and where runs must agree to be compared.
NUMBER = (int, float)
NEEDED = {
    "": {"config": dict, "data": dict, "parameters": int, "hardware": str, "device": str,
         "dtype": str, "compiled": bool, "torch": str, "threads": int},
    "config": {"norm": str, "seed": int, "learning_rate": NUMBER, "max_iters": int,
               "eval_iters": int, "block_size": int, "batch_size": int,
               "gradient_accumulation_steps": int},
    "data": {"tokenizer": str, "sha256": str, "train_tokens": int, "unigram_loss": NUMBER}}
AGREE = {"tokenizer": "data", "sha256": "data", "train_tokens": "data", "eval_iters": "config",
         "block_size": "config"}
WHY = {"sha256": "it is of another text than", "train_tokens": "its text is split unlike that of",
       "batch_size": "its batch_size, and so (without --eval_iters 0) its val windows differ from"}
WINDOWS = "batch_size"      # a batch of windows is evaluated per eval_iters, unless that is 0

# Of log.csv and depth.csv, the columns that must be there and those that may be missing.
LOG = (("step", "train_loss", "val_loss"),
       ("val_bits_per_byte", "peak_mb", "train_seconds", "elapsed_seconds"))
DEPTH = ("step", "layer", "stream_rms", "angle", "grad_norm"), ("clamped",)

# Flags that are no column of the table. What ran is shown instead of what was asked for.
HIDDEN = {*MAY_DIFFER, "dataset", "norm", "seed", "learning_rate"}
WHAT_RAN = ("device", "dtype", "compiled", "torch", "threads")
TOKENS_PER_STEP = ("batch_size", "block_size", "gradient_accumulation_steps")

# A run whose last val loss is at least this share of what the token frequencies give has learned
# nothing: 16-layer runs that failed read 3.23 to 3.36 where the byte frequencies read 3.35.
LEARNED_NOTHING = 0.95

# The middle 95% of Student's t is within these, for 1 to 30 degrees of freedom; beyond, 1.96.
STUDENT_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423)

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
FIGURE = {"font.size": 9, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3}
FAINT = {"alpha": 0.45, "linewidth": 0.8, "marker": ""}


# --------------------------------------------------------------------------------- a run's folder

@dataclass(eq=False)
class Run:
    """What a finished run's folder says. Lines are dicts of numbers; None is an empty cell."""
    folder: Path
    record: dict            # config.json
    log: list[dict]         # log.csv
    start: list[dict]       # depth.csv at step 0, one line per sublayer; empty without a profile
    end: list[dict]         # the same at the last step
    status: str             # "ok", "learned nothing" or "diverged at step K"

    def __post_init__(self):
        self.config = self.record["config"]
        self.norm, self.seed = self.config["norm"], self.config["seed"]
        self.rate = float(self.config["learning_rate"])
        self.step, self.val_loss = self.log[-1]["step"], self.log[-1]["val_loss"]

        # The finite val losses by step, and the lowest.
        self.curve = {line["step"]: line["val_loss"] for line in self.log
                      if line["val_loss"] is not None and math.isfinite(line["val_loss"])}
        self.best_step = min(self.curve, key=self.curve.get, default=None)
        self.best_loss = self.curve.get(self.best_step)

    def last(self, column: str) -> float | None:
        """The last number in a column of log.csv."""
        return next((x[column] for x in reversed(self.log) if x[column] is not None), None)

    def depth_summary(self) -> dict[str, float | None]:
        """The profile of the last step in four numbers; None where there is nothing to compute."""
        rms = [x for x in per_layer(self.end, "stream_rms") if x]
        grads = [x for x in per_layer(self.end, "grad_norm") if x]
        return {"rms_last_first": rms[-1] / rms[0] if rms else None,
                "grad_max_min": max(grads) / min(grads) if grads else None,
                "mean_angle": average(line["angle"] for line in self.end),
                "clamped": average(line["clamped"] for line in self.end)}


def per_layer(lines: list[dict], column: str) -> list:
    """A column of depth.csv after each layer, which is after its last sublayer."""
    return list({line["layer"]: line[column] for line in lines}.values())


def average(values) -> float | None:
    """The mean of those values that are known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def read_lines(path: Path, needed: tuple, optional: tuple) -> list[dict]:
    """A CSV file as dicts of numbers, by column name. ValueError says what is wrong with it.

    Further columns are ignored, and so is a last line without its newline: a kill cut it off.
    """
    try:
        text = path.read_text(encoding="utf-8")
        reader = csv.DictReader(text[:text.rfind("\n") + 1].splitlines())
        lines = list(reader)
    except (OSError, ValueError, csv.Error):
        raise ValueError(f"{path.name} cannot be read") from None
    for name in needed:
        if name not in (reader.fieldnames or ()):
            raise ValueError(f"{path.name} has no column {name}")

    numbers = []
    for count, line in enumerate(lines, 2):
        # csv puts None where a line has too many or too few cells.
        try:
            if None in line or None in line.values():
                raise ValueError
            cells = {name: line.get(name) for name in needed + optional}
            numbers.append({name: float(cell) if cell else None for name, cell in cells.items()})
            numbers[-1]["step"] = int(line["step"])
        except ValueError:
            raise ValueError(f"line {count} of {path.name} is damaged") from None
    return numbers


def read_run(folder: Path) -> Run:
    """The finished run in a folder. ValueError says why there is none to compare."""
    if not (folder / "config.json").is_file():
        raise ValueError("no run, it has no config.json")
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError("config.json cannot be read") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"written by an older version (not {FORMAT}), train it again")
    for place, names in NEEDED.items():
        values = record[place] if place else record
        for name, kind in names.items():
            if not isinstance(values.get(name), kind):
                raise ValueError(f"config.json has no valid {name}")

    # The last line tells whether the run is finished, and how it ended.
    log = read_lines(folder / "log.csv", *LOG)
    if not log:
        raise ValueError("unfinished, nothing is logged yet")
    step, train_loss, val_loss = (log[-1][name] for name in LOG[0])
    steps, unigram_loss = record["config"]["max_iters"], record["data"]["unigram_loss"]
    if any(loss is not None and not math.isfinite(loss) for loss in (train_loss, val_loss)):
        status = f"diverged at step {step}"
    elif step != steps or val_loss is None:
        raise ValueError(f"unfinished, its last line is step {step} of {steps}")
    else:
        status = "ok" if val_loss < LEARNED_NOTHING * unigram_loss else "learned nothing"

    # Without a profile, all else can still be compared.
    depth = []
    if (folder / "depth.csv").exists():
        try:
            depth = read_lines(folder / "depth.csv", *DEPTH)
        except ValueError as error:
            print(f"{folder}: {error}; compared without it", file=sys.stderr)
    profiles = [[line for line in depth if line["step"] == when] for when in (0, step)]
    return Run(folder, record, log, *profiles, status)


def find_runs(folders: list[Path]) -> list[Path]:
    """The folders given, each once; instead of one that is no run, the folders inside it."""
    found = {}
    for folder in map(Path, folders):
        inside = []
        if folder.is_dir() and not (folder / "config.json").exists():
            inside = sorted(f for f in folder.iterdir() if f.is_dir() and f.name[0] != ".")
        for run in inside or [folder]:
            found.setdefault(os.path.realpath(run), run)
    return list(found.values())


def comparable(folders: list[Path]) -> list[Run]:
    """The runs that compare with the first good one; for each other folder, a line on stderr."""
    runs = []
    for folder in folders:
        try:
            run = read_run(folder)
            first = runs[0] if runs else run
            agree = AGREE if run.config["eval_iters"] == 0 else AGREE | {WINDOWS: "config"}
            for name, place in agree.items():
                ours, theirs = run.record[place][name], first.record[place][name]
                if ours != theirs:
                    why = WHY.get(name, f"its {name} is {ours}, not {theirs} as in")
                    raise ValueError(f"{why} {first.folder}")
            runs.append(run)
        except ValueError as error:
            print(f"{folder}: {error}; left out", file=sys.stderr)

    # Two runs with the same settings and seed would count as two seeds.
    once = {}
    for setting, rates in settings(runs).items():
        for run in chain(*rates.values()):
            twin = once.setdefault((setting, run.rate, run.seed), run)
            if twin is not run:
                print(f"{run.folder}: repeats {twin.folder}; left out", file=sys.stderr)
    return [run for run in runs if run in once.values()]


# ---------------------------------------------------------------------- settings, rates, intervals

def as_text(value) -> str:
    """A value of a flag, as short as possible without losing a digit."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def settings(runs: list[Run]) -> dict[tuple, dict[float, list[Run]]]:
    """The runs by setting, and within it by learning rate.

    A setting is a tuple of pairs (name, text): the norm, and each flag that differs among the runs,
    and what they ran on if that differs. "-" is a flag that a run does not have, or that belongs to
    another norm: a flag whose name begins with "geo_" counts only for `geo`.
    """
    norms = {run.norm for run in runs}

    def counts(run, name):
        owners = [norm for norm in norms if name.startswith(norm + "_")]
        return not owners or run.norm in owners

    def text(run, name):
        place = run.record if name in WHAT_RAN else run.config
        return as_text(place[name]) if name in place and counts(run, name) else "-"

    names = [name for run in runs for name in run.config if name not in {*HIDDEN, *WHAT_RAN}]
    differ = [name for name in dict.fromkeys([*names, *WHAT_RAN])
              if len({text(run, name) for run in runs if counts(run, name)}) > 1]
    groups = {}
    for run in runs:
        setting = (("norm", run.norm), *((name, text(run, name)) for name in differ))
        groups.setdefault(setting, {}).setdefault(run.rate, []).append(run)
    return {setting: dict(sorted(rates.items())) for setting, rates in groups.items()}


def label(setting: tuple, groups: dict) -> str:
    """A setting's short name: its norm, and what differs among the settings of that norm."""
    norm, alike = setting[0][1], [dict(other) for other in groups if other[0] == setting[0]]
    return " ".join([norm] + [f"{name.removeprefix(norm + '_')}={text}" for name, text in setting
                              if len({other[name] for other in alike}) > 1])


def learned(runs: list[Run]) -> list[Run]:
    """The runs that count: those that neither diverged nor learned nothing."""
    return [run for run in runs if run.status == "ok"]


def shown(runs: list[Run]) -> list[Run]:
    """The runs whose means are shown: only if none learned anything, those that learned nothing."""
    return learned(runs) or [run for run in runs if run.status == "learned nothing"]


def best_rate(rates: dict[float, list[Run]]) -> float:
    """The rate with the fewest failed runs, and among these with the lowest mean val loss."""
    def rank(rate):
        mean = average(run.val_loss for run in shown(rates[rate]))
        return len(rates[rate]) - len(learned(rates[rate])), math.inf if mean is None else mean
    return min(rates, key=rank)


def interval(differences: list[float]) -> tuple[float, float | None]:
    """Mean and half width of the 95% interval of paired differences; one pair has no width."""
    n = len(differences)
    if n == 1:
        return differences[0], None
    t = STUDENT_T[n - 2] if n - 2 < len(STUDENT_T) else 1.96
    return statistics.fmean(differences), t * statistics.stdev(differences) / math.sqrt(n)


# --------------------------------------------------------------------------- table and compare.csv

def minus(runs: list[Run], base: dict[int, float]) -> str:
    """The difference from the losses by seed in `base`, with its interval; ~ if that holds 0."""
    pairs = [run.val_loss - base[run.seed] for run in learned(runs) if run.seed in base]
    if not pairs:
        return "-"
    mean, half = interval(pairs)
    if half is None:
        return f"{mean:+.4f}"
    return f"{mean:+.4f} ± {half:.4f}" + (" ~" if abs(mean) <= half else "")


def notes(rate: float, rates: dict[float, list[Run]], star: bool) -> str:
    """What failed at this rate, and whether the best rate is the smallest or largest one tried."""
    runs = rates[rate]
    nothing = sum(run.status == "learned nothing" for run in runs)
    share = f"{nothing} of {len(runs)} " if len(runs) > 1 else ""
    found = [share + "learned nothing"] if nothing else []
    for run in runs:
        if run.status.startswith("diverged"):
            found.append(f"seed {run.seed} {run.status}" if len(runs) > 1 else run.status)
    for end, name in ((min(rates), "smallest"), (max(rates), "largest")):
        if star and rate == end:
            found.append(f"best at the {name} rate tried")
    return ", ".join(found)


def measured(runs: list[Run]) -> dict[str, str]:
    """The numbers in one line of the table; its runs differ only in their seeds."""
    def mean(values, form):
        known = average(values)
        return "-" if known is None else format(known, form)

    best = shown(runs)
    losses = [run.val_loss for run in best]
    spread = f" ({statistics.stdev(losses):.4f})" if len(losses) > 1 else ""
    step = f" ({mean([run.best_step for run in best], '.0f')})" if best else ""

    # Failed runs took time and memory, too.
    sizes = [runs[0].config.get(name) for name in TOKENS_PER_STEP]
    timed = [run for run in runs if run.last("train_seconds") and None not in sizes]
    seconds = sum(run.last("train_seconds") for run in timed)
    tokens = sum(run.step * math.prod(sizes) for run in timed)
    peaks = [line["peak_mb"] for run in runs for line in run.log if line["peak_mb"] is not None]
    depth = [run.depth_summary() for run in best]
    return {
        "val nats/token": mean(losses, ".4f") + spread,
        "val bits/byte": mean([run.last("val_bits_per_byte") for run in best], ".4f"),
        "best (step)": mean([run.best_loss for run in best], ".4f") + step,
        "tokens/s": f"{tokens / seconds:,.0f}" if timed else "-",
        "peak MB": f"{max(peaks):,.0f}" if peaks else "-",
    } | {name: mean([d[name] for d in depth], ".4g") for name in runs[0].depth_summary()}


def table(runs: list[Run]) -> str:
    """The comparison as text, one line per setting and learning rate."""
    groups = settings(runs)
    first = next(iter(groups))
    first_best = best_rate(groups[first])
    base = {run.seed: run.val_loss for run in learned(groups[first][first_best])}
    versus = f"minus {label(first, groups)}"
    lines = []
    for setting, rates in groups.items():
        for rate, seeds in rates.items():
            star = len(rates) > 1 and rate == best_rate(rates) and bool(learned(seeds))
            numbers = measured(seeds)
            lines.append(dict(setting) | {
                "learning_rate": as_text(rate) + ("*" if star else ""),
                "parameters": f"{seeds[0].record['parameters']:,}",
                "val nats/token": numbers["val nats/token"],
                versus: "-" if (setting, rate) == (first, first_best) else minus(seeds, base),
                **numbers,
                "": notes(rate, rates, star)})

    # Leave out columns that say nothing here; align text to the left and numbers to the right.
    silent = {"learning_rate": len({run.rate for run in runs}) == 1, versus: len(lines) == 1,
              "clamped": all(line["clamped"] == "-" for line in lines)}
    names = [name for name in lines[0] if not silent.get(name)]
    rows = [names] + [[line[name] for name in names] for line in lines]
    width = [max(map(len, column)) for column in zip(*rows)]
    text = ["  ".join(cell.ljust(w) if name in ("norm", "") else cell.rjust(w)
                      for name, cell, w in zip(names, row, width)).rstrip() for row in rows]
    if any("~" in line[versus] for line in lines):
        text.append(f"~ not told apart from {label(first, groups)}: the 95% interval holds 0")
    return "\n".join(text)


def write_csv(runs: list[Run], path: Path):
    """compare.csv, one line per run: flags, what it ran on, results, and last times and memory.

    The same runs give the same bytes. A run is named by its path from the folder above them all.
    """
    # Where a run was written is no result, and what ran replaces what was asked for.
    flags = dict.fromkeys(name for run in runs for name in run.config
                          if name not in ("out_dir", "overwrite", *WHAT_RAN))
    folders = [Path(os.path.abspath(run.folder)) for run in runs]
    above = os.path.commonpath([folder.parent for folder in folders])
    lines = [{
        "run": folder.relative_to(above).as_posix(),
        **{name: run.config.get(name) for name in flags},
        **{name: run.record[name] for name in (*WHAT_RAN, "hardware", "parameters")},
        "status": run.status, "step": run.step, "val_loss": run.val_loss,
        "val_bits_per_byte": run.log[-1]["val_bits_per_byte"],
        "best_val_loss": run.best_loss, "best_step": run.best_step, **run.depth_summary(),
        **{name: run.last(name) for name in ("train_seconds", "elapsed_seconds", "peak_mb")},
    } for run, folder in zip(runs, folders)]
    with atomic(path) as part, open(part, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


# ------------------------------------------------------------------------------------- compare.png

def looks(groups: dict) -> list[dict]:
    """How each setting is drawn: colour and marker by norm (if there are several), then line."""
    norms = [setting[0] for setting in groups]
    families = norms if len(set(norms)) > 1 else list(groups)
    order = list(dict.fromkeys(families))
    found = []
    for i, family in enumerate(families):
        colour, line = order.index(family) % 7, families[:i].count(family) % 4
        found.append({"color": COLOURS[colour], "marker": "os^DvPX"[colour], "markersize": 4,
                      "linestyle": ("-", "--", ":", "-.")[line], "linewidth": 1.3})
    return found


def log_axis(ax):
    """A logarithmic y axis with plain numbers, at least a factor of 4 high."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    middle = math.sqrt(low * high)
    ax.set_ylim(min(low, middle / 2), max(high, middle * 2))
    low, high = ax.get_ylim()
    ticks = [digit * 10.0 ** power for power in range(-9, 10) for digit in (1, 2, 5)]
    ax.set_yticks([tick for tick in ticks if low <= tick <= high])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()


def draw_rates(ax, groups: dict, styles: list[dict]):
    """Last val loss by learning rate: a dot per seed, means as lines, crosses for failures."""
    every = sorted({rate for rates in groups.values() for rate in rates})
    gap = min((math.log(b / a) for a, b in pairwise(every)), default=0.7)
    losses, failed = [], False
    for i, (rates, style) in enumerate(zip(groups.values(), styles)):
        # Move each setting a little aside, so that none hides another.
        aside = math.exp(gap * 0.3 * ((i + 0.5) / len(groups) - 0.5))
        means = {rate: average(run.val_loss for run in learned(runs))
                 for rate, runs in rates.items() if learned(runs)}
        ax.plot([rate * aside for rate in means], list(means.values()), **style | {"marker": ""})
        for rate, runs in rates.items():
            found = [run.val_loss for run in learned(runs)]
            losses += found
            ax.plot([rate * aside] * len(found), found, **style | {"linestyle": ""})
            if len(found) < len(runs):
                failed = True
                ax.plot(rate * aside, 0.9, **style | {"marker": "x", "markersize": 6},
                        transform=ax.get_xaxis_transform())

    # The axis is for the runs that learned; those that failed have a line above it.
    ax.set_xscale("log")
    ax.set_xlim(every[0] / 1.4, every[-1] * 1.4)
    ax.set_xticks(every, [as_text(rate) for rate in every], rotation=45 if len(every) > 5 else 0)
    ax.minorticks_off()
    if losses:
        height = max(max(losses) - min(losses), 0.01)
        above = 0.25 if failed else 0.05
        ax.set_ylim(min(losses) - 0.05 * height, max(losses) + above * height)
    else:
        ax.set_yticks([])
    if failed:
        line = {"color": "0.3", "linewidth": 0.8, "linestyle": "--", "zorder": 1}
        ax.plot([0, 1], [0.9, 0.9], transform=ax.transAxes, **line)
        ax.text(0.02, 0.93, "diverged or learned nothing", transform=ax.transAxes)


def draw_depth(ax, runs: list[Run], style: dict, column: str, turn: int):
    """A column of depth.csv by layer, mean of the runs: faint at the start, solid at the end."""
    for when, weight in (("start", FAINT), ("end", {})):
        profiles = [getattr(run, when) for run in runs if getattr(run, when)]
        if column == "grad_norm":
            values = [per_layer(lines, column) for lines in profiles]
        else:
            values = [[line[column] for line in lines] for lines in profiles]
        means = [average(at_one_place) for at_one_place in zip(*values)]
        layers = max((len(per_layer(lines, column)) for lines in profiles), default=0)

        # Of many points every fourth has a marker, another one for each setting.
        every = {"markevery": (turn % 4, 4)} if len(means) > 8 else {}
        ax.plot([(i + 1) * layers / len(means) for i in range(len(means))], means,
                **style | every | weight)


def draw_root(ax):
    """A line proportional to 1/sqrt(layer) through the middle of what is drawn; a log x axis."""
    points = [(x, y) for line in ax.lines for x, y in zip(*line.get_data()) if y > 0]
    if points:
        level = math.exp(statistics.fmean(math.log(y) + math.log(x) / 2 for x, y in points))
        ends = [min(x for x, _ in points), max(x for x, _ in points)]
        ax.plot(ends, [level / math.sqrt(x) for x in ends], color="0.3", linewidth=0.8, zorder=1)
        ax.set_xscale("log")
        ax.set_xticks([2 ** k for k in range(12) if 2 ** k <= ends[1]])
        ax.xaxis.set_major_formatter("{x:g}")


def draw_panels(figure, groups: dict):
    """The six panels. In all but the second, each setting is at its best rate."""
    by_step, by_rate, stream, turn, gradient, legend = figure.subplots(3, 2).flat
    styles = looks(groups)
    best = [best_rate(rates) for rates in groups.values()]
    runs_at_best = [rates[rate] for rates, rate in zip(groups.values(), best)]

    # Failed runs are drawn only where there are no others.
    pick = learned if learned(chain(*runs_at_best)) else shown
    for i, (runs, style) in enumerate(zip(map(pick, runs_at_best), styles)):
        curves = [run.curve for run in runs]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        by_step.plot(steps, [average(c[step] for c in curves) for step in steps], **style)
        for ax, column in ((stream, "stream_rms"), (turn, "angle"), (gradient, "grad_norm")):
            draw_depth(ax, runs, style, column, i)
    draw_rates(by_rate, groups, styles)
    draw_root(turn)

    # The letters of the legend shrink with the number and the length of its lines.
    names = [f"{label(setting, groups)}, rate {as_text(rate)}"
             for setting, rate in zip(groups, best)]
    for name, runs, style in zip(names, runs_at_best, styles):
        legend.plot([], [], label=name if learned(runs) else f"{name}: failed", **style)
    size = min(9, 380 / max(map(len, names)), 112 / len(names))
    legend.legend(title="faint: at the start; solid: at the end", alignment="left", fontsize=size,
                  labelspacing=0.25, handlelength=4, loc="upper left",
                  frameon=False).set_in_layout(False)
    legend.axis("off")

    for ax in (stream, turn, gradient):
        log_axis(ax)
    for ax in (stream, gradient):
        ax.locator_params(axis="x", integer=True)
    nats = "val loss, nats per token"
    by_step.set(title="Validation loss at the best rate", xlabel="step", ylabel=nats)
    by_rate.set(title="Validation loss at the last step", xlabel="learning rate", ylabel=nats)
    stream.set(title="Stream after each sublayer", xlabel="layer", ylabel="RMS")
    turn.set(title="Turn per sublayer; thin line: 1/√layer", xlabel="layer", ylabel="radians")
    gradient.set(title="Gradient of each layer", xlabel="layer", ylabel="norm")


def load_matplotlib():
    """matplotlib with its `figure`. Raises ImportError if it is not installed.

    A figure for a file needs no backend, and MPLBACKEND may name one that does not exist.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib.figure
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend

    # In a notebook, it names what shows the notebook's own figures.
    with suppress(ValueError):
        matplotlib.rcParams.update({} if backend is None else {"backend": backend})
    return matplotlib


def draw(runs: list[Run], path: Path):
    """compare.png. Whatever goes wrong is one line on stderr: table and compare.csv are done."""
    try:
        matplotlib = load_matplotlib()
        with matplotlib.rc_context(FIGURE), atomic(path) as part:
            figure = matplotlib.figure.Figure(figsize=(8, 9), layout="constrained")
            draw_panels(figure, settings(runs))
            figure.savefig(part, dpi=150)
    except ImportError:
        print(f"{path} was not drawn: `pip install matplotlib` and repeat", file=sys.stderr)
    except Exception as error:      # matplotlib's own are of many types
        print(f"{path} was not drawn: {' '.join(str(error).split())}", file=sys.stderr)


# ------------------------------------------------------------------------------------- the command

def compare(folders: list[Path], out_dir: Path | None = None):
    """Print the table of the runs; with two or more, write compare.csv and compare.png as well.

    They go to out_dir, or else to the folder that holds the first run. If no run is left, the
    program ends with exit code 1. A file that cannot be written is only a line on stderr.
    """
    runs = comparable(find_runs(folders))
    if not runs:
        sys.exit("no finished run to compare")
    print(table(runs), flush=True)
    if len(runs) == 1:
        return
    out_dir = Path(out_dir or Path(os.path.abspath(runs[0].folder)).parent)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        write_csv(runs, out_dir / "compare.csv")
    except (OSError, ValueError) as error:      # ValueError: two drives have no common folder
        print(f"{out_dir / 'compare.csv'} was not written: {error}", file=sys.stderr)
    draw(runs, out_dir / "compare.png")


def main():
    parser = Parser(description="Finished runs to a table, compare.csv and compare.png.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER",
                        help="a run, or a folder of runs; the others are compared with the first")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where the files go (default: the folder that holds the first run)")
    args = parser.parse_args()
    compare(args.folders, args.out)


if __name__ == "__main__":
    command(main)
