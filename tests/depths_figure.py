"""The settings in order: one figure from two tables of finished runs, at two depths.

    python tests/depths_figure.py data/results/forks4.csv data/results/forks16.csv forks.png

Each file is a compare.csv of data/compare.py. A setting is a norm, a decay and an entry; its
learning rate is the one with the most seeds, and of several such rates the best. The figure shows
the mean and the standard deviation of the seeds at that rate, each seed as a small dot, and counts
the runs that failed: that diverged or learned nothing. Needs matplotlib.
"""
import csv
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))     # where data/ is

from data import Parser, atomic, command
from data.compare import COLOURS, load_matplotlib
from model import NORMS

# What is read of each line.
COLUMNS = ("norm", "decay", "entry", "n_layer", "learning_rate", "seed", "status", "val_loss")

# How each depth is drawn.
SHALLOW = {"color": COLOURS[0], "marker": "s", "shift": 0.16}
DEEP = {"color": COLOURS[3], "marker": "o", "shift": -0.16}


def read(path: Path) -> dict[tuple, list[dict]]:
    """The runs of a compare.csv by (norm, decay, entry), each setting at its best rate.

    Raises ValueError for other text, for no run at all, and for runs that differ in other flags.
    """
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    if not lines:
        raise ValueError("it has no runs")
    found, seen = {}, set()
    for line in lines:
        if None in line.values() or not set(COLUMNS) <= set(line):
            raise ValueError(f"each line needs {', '.join(COLUMNS)}")
        run = tuple(line[name] for name in ("norm", "decay", "entry", "learning_rate", "seed"))
        if run in seen or line["n_layer"] != lines[0]["n_layer"]:
            raise ValueError("its runs differ in more than norm, decay, entry, rate and seed")
        seen.add(run)
        found.setdefault(run[:3], []).append(line)
    return {setting: at_best_rate(runs) for setting, runs in found.items()}


def at_best_rate(runs: list[dict]) -> list[dict]:
    """Those of the rate with the most seeds; then with the fewest failures, and the lowest mean."""
    rates = {}
    for line in runs:
        rates.setdefault(line["learning_rate"], []).append(line)
    return min(rates.values(), key=lambda own: (-len(own), -len(losses(own)), mean(own)))


def losses(runs: list[dict]) -> list[float]:
    """The last val loss of each run that learned something, nats/token."""
    return [float(line["val_loss"]) for line in runs if line["status"] == "ok"]


def mean(runs: list[dict]) -> float:
    """Of those that learned something; infinite if none did."""
    return statistics.fmean(losses(runs)) if losses(runs) else float("inf")


def names(settings: list[tuple]) -> list[str]:
    """The norm of each setting, with its decay and entry where the norm has several settings."""
    norms = [norm for norm, _, _ in settings]
    return [norm if norms.count(norm) == 1 else f"{norm}, decay {decay}, entry {entry}"
            for norm, decay, entry in settings]


def draw(shallow: dict, deep: dict, path: Path):
    """Write the figure: one line per setting, the lowest mean at the larger depth on top."""
    settings = sorted(deep, key=lambda setting: mean(deep[setting]), reverse=True)
    size = (8, 0.34 * len(settings) + 1.2)
    figure = load_matplotlib().figure.Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for table, style in ((shallow, SHALLOW), (deep, DEEP)):
        layers = next(iter(table.values()))[0]["n_layer"]
        axes.plot([], [], style["marker"], color=style["color"], label=f"{layers} layers")
        for y, setting in enumerate(settings):
            draw_line(axes, y + style["shift"], table.get(setting, []), style)

    # The four of the program are in bold.
    axes.set_yticks(range(len(settings)), names(settings))
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in NORMS else "normal")
    axes.set_xlabel("val loss, nats/token: mean and standard deviation over seeds")
    axes.grid(axis="x", alpha=0.3)
    axes.set_ylim(-0.7, len(settings) - 0.3)
    axes.legend(loc="upper right")
    with atomic(path) as part:
        figure.savefig(part, dpi=150, format="png")


def draw_line(axes, y: float, runs: list[dict], style: dict):
    """The runs of one setting at one depth: mean, deviation, seeds, and how many failed."""
    colour, values = style["color"], losses(runs)
    if values:
        spread = statistics.stdev(values) if len(values) > 1 else 0
        axes.plot(values, [y] * len(values), ".", color=colour, alpha=0.45)
        axes.errorbar(mean(runs), y, xerr=spread, color=colour, capsize=3, marker=style["marker"])
    if len(values) < len(runs):
        axes.text(0.99, y, f"{len(runs) - len(values)} of {len(runs)} failed", color=colour,
                  fontsize=8, ha="right", va="center", transform=axes.get_yaxis_transform())


def main():
    parser = Parser(description="The settings in order: one figure from two compare.csv.")
    parser.add_argument("shallow", type=Path, help="a compare.csv, for example of 4 layers")
    parser.add_argument("deep", type=Path, help="another, which gives the order")
    parser.add_argument("figure", type=Path, help="the PNG file to write")
    args = parser.parse_args()
    if args.figure.suffix != ".png" or not args.figure.parent.is_dir():
        parser.error(f"{args.figure} must end in .png, in a folder that exists")
    tables = []
    for path in (args.shallow, args.deep):
        try:
            tables.append(read(path))
        except (ValueError, csv.Error) as error:
            sys.exit(f"{path} is no compare.csv of one depth: {error}")
    for setting in sorted(tables[0].keys() ^ tables[1].keys()):
        print(f"{', '.join(setting)}: only at one of the depths", file=sys.stderr)
    try:
        draw(*tables, args.figure)
    except ImportError:
        sys.exit("the figure needs matplotlib: pip install matplotlib")


if __name__ == "__main__":
    command(main)
