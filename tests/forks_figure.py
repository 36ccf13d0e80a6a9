"""The placements in order: one figure from two tables of finished runs, at two depths.

    python tests/forks_figure.py data/results/forks4.csv data/results/forks16.csv forks.png

Each file is a compare.csv of data/compare.py. A placement's learning rate is the one at which its
first seed did best; the figure shows the mean and the standard deviation of all seeds at that rate,
each seed as a small dot, and counts the runs that learned nothing. Needs matplotlib.
"""
import csv
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))     # where data/ is

from data import Parser, atomic, command

FOUR = ("pre", "post", "peri", "geo")
COLOURS = {"first": "#0072B2", "last": "#D55E00"}      # of Okabe and Ito, for the colour-blind


def read(path: Path) -> dict[str, list[dict]]:
    """The runs of a compare.csv by norm, each norm at its best rate."""
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    found = {}
    for norm in dict.fromkeys(line["norm"] for line in lines):
        runs = [line for line in lines if line["norm"] == norm]
        seed = min(int(line["seed"]) for line in runs)
        firsts = [line for line in runs if int(line["seed"]) == seed]
        best = min(firsts, key=lambda line: (line["status"] != "ok", float(line["val_loss"])))
        found[norm] = [line for line in runs if line["learning_rate"] == best["learning_rate"]]
    return found


def losses(runs: list[dict]) -> list[float]:
    """The last val loss of each run that learned something, nats/token."""
    return [float(line["val_loss"]) for line in runs if line["status"] == "ok"]


def draw(shallow: dict, deep: dict, path: Path):
    """Write the figure: one line per placement, the lowest mean at the larger depth on top."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def mean(runs):
        return statistics.fmean(losses(runs)) if losses(runs) else float("inf")

    norms = sorted(deep, key=lambda norm: mean(deep[norm]), reverse=True)
    figure, axes = plt.subplots(figsize=(8, 0.34 * len(norms) + 1.2), layout="constrained")
    rows = zip((shallow, deep), COLOURS.values(), (0.16, -0.16), "so")
    for runs, colour, shift, marker in rows:
        layers = next(iter(runs.values()))[0]["n_layer"]
        for y, norm in enumerate(norms):
            values = losses(runs.get(norm, []))
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else 0
                axes.plot(values, [y + shift] * len(values), ".", color=colour, alpha=0.45)
                axes.errorbar(mean(runs[norm]), y + shift, xerr=spread, color=colour, capsize=3,
                              marker=marker, label=f"{layers} layers" if y == 0 else None)

    # How many runs learned nothing, at the right edge.
    for y, norm in enumerate(norms):
        for runs, colour, shift, _ in zip((shallow, deep), COLOURS.values(), (0.16, -0.16), "so"):
            failed = len(runs.get(norm, [])) - len(losses(runs.get(norm, [])))
            if failed:
                axes.text(1.0, y + shift, f"{failed} learned nothing ", color=colour, fontsize=8,
                          ha="right", va="center", transform=axes.get_yaxis_transform())
    labels = axes.set_yticks(range(len(norms)), norms)
    for tick in labels:
        tick.label1.set_fontweight("bold" if tick.label1.get_text() in FOUR else "normal")
    axes.set_xlabel("val loss, nats/token: mean and standard deviation over seeds")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    with atomic(path) as part:
        plt.savefig(part, dpi=150, format="png")
    plt.close(figure)


def main():
    parser = Parser(description="The placements in order: one figure from two compare.csv.")
    parser.add_argument("shallow", type=Path, help="a compare.csv, for example of 4 layers")
    parser.add_argument("deep", type=Path, help="another, which gives the order")
    parser.add_argument("figure", type=Path, help="the PNG file to write")
    args = parser.parse_args()
    try:
        draw(read(args.shallow), read(args.deep), args.figure)
    except ModuleNotFoundError:
        sys.exit("the figure needs matplotlib: pip install matplotlib")
    except (KeyError, ValueError) as error:
        sys.exit(f"not a compare.csv of finished runs: {error}")


if __name__ == "__main__":
    command(main)
