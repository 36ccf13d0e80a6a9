"""The folder of one run: what train.py writes, and what it continues from.

    OUT_DIR/RUN/config.json     every setting, the model, the dataset, what it ran on
                log.csv         the curve, one line per log_interval and per evaluation
                depth.csv       what each sublayer does to the stream, before and after training
                ckpt.pt         all that training needs to continue
                best.pt         the weights with the lowest val loss, for sample.py

The interface: `check_run` (may this command continue the run?) and `Run` for train.py, and
`load_checkpoint` for sample.py. data/compare.py reads config.json, log.csv and depth.csv.
"""
import csv
import errno
import io
import json
import math
import os
import platform
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from data import FORMAT, MAY_DIFFER, atomic

HOW_TO_START_OVER = ("choose another --out_dir, delete that folder, "
                     "or --overwrite every run of this command")
# What best.pt and ckpt.pt hold, and what is in their progress.
BEST_KEYS = {"format": str, "model": dict, "model_config": dict, "tokenizer": str, "progress": dict}
KEYS = BEST_KEYS | {"files": dict, "optimizer": dict, "scaler": dict, "rng": torch.Tensor,
                    "cuda_rng": (torch.Tensor, type(None))}
PROGRESS = {"step": int, "best_step": int, "best_val_loss": float, "train_seconds": float,
            "elapsed_seconds": float}
RECORD = ("config.json", "log.csv", "depth.csv")    # a checkpoint holds their text
NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def make_record(config, model, meta: dict, device: torch.device, dtype: str,
                compiled: bool) -> dict:
    """What config.json holds: all settings (train.Config), the GPT, its data, what it runs on."""
    return {"format": FORMAT, "config": plain(asdict(config)), "model": plain(asdict(model.config)),
            "data": meta, "parameters": sum(p.numel() for p in model.parameters()),
            "device": device.type, "dtype": dtype, "compiled": compiled,
            "hardware": hardware(device), "threads": torch.get_num_threads(),
            "torch": torch.__version__, "python": platform.python_version()}


def plain(settings: dict) -> dict:
    """Settings as JSON can hold them: an infinite number is the word inf."""
    return {name: "inf" if value == math.inf else value for name, value in settings.items()}


def hardware(device: torch.device) -> str:
    """The name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = read_text(Path("/proc/cpuinfo")) or ""
    names = [line.partition(": ")[2] for line in cpu.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def peak_memory(device: torch.device, reset: bool = False) -> float | None:
    """Peak memory in MB since the last reset; None where the system does not tell.

    On CUDA what torch allocated. On Linux what the process used, less the pages of files such as
    the dataset's, which the system can drop at any time.
    """
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        kilobytes = {name: int(text.split(name)[1].split()[0]) for name in ("VmHWM:", "RssFile:")}
        return (kilobytes["VmHWM:"] - kilobytes["RssFile:"]) / 1024
    except (OSError, IndexError):
        return None


def where(record: dict) -> str:
    """What a run computes on, in words."""
    words = f"{record['device']}, {record['dtype']}"
    return words + ", compiled" if record["compiled"] else words


def csv_text(columns: list[str], rows: list[dict]) -> str:
    """A table as the text of a CSV file. None is an empty cell; floats read back exactly."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_text(path: Path) -> str | None:
    """The file's text, or None if it is not there or not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def load_checkpoint(path: Path, advice: str = HOW_TO_START_OVER) -> dict:
    """A checkpoint of ours, on the CPU; no code in the file is run.

    Any other file ends the program with one line, which ends with the advice.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # one line is enough for a file of another program
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:      # torch.load raises many types for a damaged file
        sys.exit(f"{path} is not a whole checkpoint of this program ({type(error).__name__}): "
                 f"{advice}")
    found = state.get("format") if isinstance(state, dict) else None
    if isinstance(found, str) and found.startswith("nanonorm") and found != FORMAT:
        sys.exit(f"{path} was written by another version of this program and cannot be used: "
                 f"{advice}")
    if found != FORMAT or not has(state, BEST_KEYS):
        sys.exit(f"{path} is not a whole checkpoint of this program (keys are missing or wrong): "
                 f"{advice}")
    return state


def has(state: dict, kinds: dict) -> bool:
    """Whether a dict has all these keys, with values of these types."""
    return all(name in state and isinstance(state[name], kind) for name, kind in kinds.items())


def load_to_train(path: Path) -> dict:
    """A checkpoint to continue from. One that holds less than that ends the program."""
    state = load_checkpoint(path)
    if not has(state, KEYS):
        sys.exit(f"{path} holds only weights, as best.pt does, and cannot be trained on: "
                 f"{HOW_TO_START_OVER}")
    files = dict.fromkeys(RECORD, str)
    if not (has(state["progress"], PROGRESS) and has(state["files"], files)
            and parse_record(state["files"]["config.json"])):
        sys.exit(f"{path} is not a whole checkpoint of this program (its record is damaged): "
                 f"{HOW_TO_START_OVER}")
    return state


def parse_record(text: str | None) -> dict | None:
    """The text of a config.json as a dict, or None if it is no record of a run."""
    try:
        record = json.loads(text)
        config, data = record["config"], record["data"]
        if isinstance(config["max_iters"], int) and data["tokenizer"] and data["sha256"]:
            return record
    except (ValueError, KeyError, TypeError):
        pass
    return None


def finished_record(folder: Path) -> dict | None:
    """config.json of a run whose log.csv ends with its last step, or None."""
    record = parse_record(read_text(folder / "config.json"))
    rows = list(csv.DictReader(io.StringIO(read_text(folder / "log.csv") or "")))
    if record and rows and rows[-1].get("step") == str(record["config"]["max_iters"]):
        try:
            return record if math.isfinite(float(rows[-1].get("val_loss"))) else None
        except (TypeError, ValueError):
            pass
    return None


def check_run(folder: Path, config, meta: dict, saved: str | None = None):
    """End the program with one line if the run in `folder` cannot continue with these settings.

    config: a train.Config. meta: the dataset's. saved: the checkpoint's copy of config.json; None
    reads the one in the folder.
    """
    if saved is None and not (folder / "ckpt.pt").exists():
        if (folder / "best.pt").exists():
            sys.exit(f"{folder} holds best.pt but no ckpt.pt to continue from: {HOW_TO_START_OVER}")
        finished = finished_record(folder)
        if finished is None:
            return
        if finished["config"]["max_iters"] < config.max_iters:
            sys.exit(f"{folder} is finished and has no ckpt.pt to continue from: "
                     f"{HOW_TO_START_OVER}")
        saved = json.dumps(finished)
    was = parse_record(saved or read_text(folder / "config.json"))
    if was is None:
        return      # the checkpoint has a copy, which `Run` will read
    if was.get("format") != FORMAT:
        sys.exit(f"{folder} was written by another version of this program: {HOW_TO_START_OVER}")
    trained, tokenizer, sha256 = was["config"], was["data"]["tokenizer"], was["data"]["sha256"]

    # The folder's config.json may be of a longer run that was killed before it saved anything.
    if saved is None and trained["max_iters"] > config.max_iters:
        saved = load_to_train(folder / "ckpt.pt")["files"]["config.json"]
        return check_run(folder, config, meta, saved)

    # Another tokenizer or text, or other settings; only max_iters may grow.
    if tokenizer != meta["tokenizer"]:
        sys.exit(f"{folder} was trained with tokenizer {tokenizer}, but data/{config.dataset} has "
                 f"{meta['tokenizer']}: {HOW_TO_START_OVER}")
    now = plain(asdict(config))
    for name in sorted({*trained, *now} - MAY_DIFFER):
        before, after = trained.get(name), now.get(name)
        longer = name == "max_iters" and after > before
        if before != after and not longer:
            sys.exit(f"{folder} was trained with --{name} {before}, not {after}: "
                     f"{HOW_TO_START_OVER}")
    if (sha256, was["data"].get("train_tokens")) != (meta["sha256"], meta["train_tokens"]):
        sys.exit(f"{folder} was trained on another text, or split, than data/{config.dataset} "
                 f"holds now: {HOW_TO_START_OVER}")


@contextmanager
def locked(folder: Path):
    """Make the folder and lock it against other processes. Yields False if one has it already.

    Only POSIX can lock, and not on every file system: elsewhere training works without.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl        # Windows has none
    except ImportError:
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY)
    free = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"{folder} cannot be locked here ({error.strerror}): make sure that only one process "
              "trains in it", file=sys.stderr)
    try:
        yield free
    finally:
        os.close(descriptor)


class Run:
    """A run's folder, opened for training.

    step is the last step saved, best_step and best_val_loss (nats/token) the best evaluation,
    train_seconds the time spent in steps, and depth the rows of depth.csv. A run with other
    settings, a damaged one, and a file that cannot be written end the program with one line.

    Call `restore` if there is a `state`, the checkpoint; `start` after everything that can fail
    early, since it deletes the files of an older run; then `log` and `save`.
    """

    def __init__(self, folder: Path, config, meta: dict):
        self.folder, self.state, self.depth = folder, None, []
        self.step, self.best_step, self.best_val_loss = 0, 0, math.inf
        self.train_seconds, self.begin, self.log_rows = 0.0, time.perf_counter(), []
        path = folder / "ckpt.pt"
        if config.overwrite:
            return
        if not path.exists():
            check_run(folder, config, meta)
            finished = finished_record(folder)
            self.step = finished["config"]["max_iters"] if finished else 0
            return

        # The checkpoint decides; the other files follow it.
        state = load_to_train(path)
        check_run(folder, config, meta, state["files"]["config.json"])
        self.state = state

    def repair(self):
        """Make every file agree with the checkpoint: a kill may have come between two of them."""
        for part in self.folder.glob("part.*"):
            part.unlink()
        for name, text in self.state["files"].items():
            if read_text(self.folder / name) != text:
                self.write(name, text)

        # best.pt is saved after ckpt.pt: if this step is the best, it must hold this step.
        progress, whole = self.state["progress"], False
        if progress["best_step"] == progress["step"]:
            try:
                best = torch.load(self.folder / "best.pt", map_location="cpu", weights_only=True)
                whole = best["progress"] == progress
            except Exception:       # missing, or damaged in one of many ways
                pass
            if not whole:
                self.save_as("best.pt", {name: self.state[name] for name in BEST_KEYS})

    def restore(self, model, optimizer, scaler):
        """Put the checkpoint into model, optimizer, scaler and the random states."""
        state, files = self.state, self.state["files"]
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if scaler.is_enabled() and state["scaler"]:
                scaler.load_state_dict(state["scaler"])
            torch.set_rng_state(state["rng"])
            if state["cuda_rng"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_rng"])
            self.step, self.best_step = state["progress"]["step"], state["progress"]["best_step"]
            self.best_val_loss = state["progress"]["best_val_loss"]
            self.train_seconds = state["progress"]["train_seconds"]
            self.begin -= state["progress"]["elapsed_seconds"]
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            sys.exit(f"{self.folder}/ckpt.pt does not fit this model.py ({type(error).__name__}): "
                     f"{HOW_TO_START_OVER}")
        if not all(weight.isfinite().all() for weight in model.parameters()):
            sys.exit(f"{self.folder}/ckpt.pt holds weights that are not finite: "
                     f"{HOW_TO_START_OVER}")
        self.repair()
        self.log_rows = list(csv.DictReader(io.StringIO(files["log.csv"])))
        # The last profile belongs to the old last step; the new one will have its own.
        depth = csv.DictReader(io.StringIO(files["depth.csv"]))
        self.depth = [row for row in depth if row["step"] == "0"]

    def start(self, record: dict, log_columns: list[str]):
        """Delete what a new run replaces, write the record, and say in one line what begins."""
        line = f"{self.folder}: {record['parameters']:,} parameters on {where(record)}"
        if self.state is None:
            for name in ("best.pt", "ckpt.pt", *RECORD):
                (self.folder / name).unlink(missing_ok=True)
        else:
            was, now = json.loads(self.state["files"]["config.json"]), record
            line += f"; continues from step {self.step}"
            if was["config"]["max_iters"] != now["config"]["max_iters"]:
                line += (f", with the schedule of {now['config']['max_iters']} steps instead of "
                         f"{was['config']['max_iters']}")
            if where(was) != where(now):
                line += f", on {where(now)} after {where(was)}, so not bit for bit"
        print(line, flush=True)

        self.columns = log_columns
        self.record = json.dumps(record, indent=1, allow_nan=False) + "\n"
        for name, text in self.texts().items():
            self.write(name, text)
        self.state = None       # it is as large as the model and the optimizer together

    def texts(self) -> dict[str, str]:
        """The files of the record by name, as they should be now."""
        return {"config.json": self.record, "log.csv": csv_text(self.columns, self.log_rows),
                "depth.csv": csv_text(list(self.depth[0]), self.depth)}

    def elapsed(self) -> float:
        """Seconds since the run began, earlier sessions included."""
        return time.perf_counter() - self.begin

    def log(self, row: dict):
        """Append one line to log.csv; a column without a value is an empty cell."""
        self.log_rows.append(row)
        line = csv_text(self.columns, [row]).split("\n", 1)[1]
        try:
            with open(self.folder / "log.csv", "a", encoding="utf-8", newline="") as file:
                file.write(line)
        except OSError as error:
            self.fail("log.csv", error)

    def diverged(self, row: dict, bad: float):
        """Log and print the end of a run whose last `bad` steps were not finite."""
        began = row["step"] - max(int(bad), 1) + 1
        # With float16, skipped steps may have been logged: the record ends where they began.
        self.log_rows = [line for line in self.log_rows if int(line["step"]) < began]
        self.write("log.csv", csv_text(self.columns, self.log_rows))
        self.log(row | {"step": began, "train_loss": math.nan})
        saved = f"The checkpoint is of step {self.step}." if self.step else "Nothing was saved yet."
        print(f"{self.folder.name} diverged at step {began}: its loss or gradient is not finite, "
              "most likely from too high a learning rate; lower --learning_rate or lengthen "
              f"--warmup_iters. {saved}", flush=True)

    def save(self, row: dict, model, optimizer, scaler, tokenizer: str):
        """Save ckpt.pt, and best.pt if row, the line of this step, has the lowest val loss.

        Both hold only plain data and tensors, which load with weights_only.
        """
        self.step = row["step"]
        best = row.get("val_loss", math.inf) < self.best_val_loss
        if best:
            self.best_val_loss, self.best_step = row["val_loss"], row["step"]
        progress = {"step": self.step, "best_step": self.best_step,
                    "best_val_loss": self.best_val_loss, "train_seconds": self.train_seconds,
                    "elapsed_seconds": self.elapsed()}
        files = self.texts()
        self.write("depth.csv", files["depth.csv"])     # it grows at the last step
        cuda = next(model.parameters()).is_cuda
        state = {"format": FORMAT, "model": model.state_dict(), "files": files,
                 "model_config": asdict(model.config), "tokenizer": tokenizer,
                 "progress": progress, "optimizer": optimizer.state_dict(),
                 "scaler": scaler.state_dict(), "rng": torch.get_rng_state(),
                 "cuda_rng": torch.cuda.get_rng_state() if cuda else None}
        self.save_as("ckpt.pt", state)
        if best:
            self.save_as("best.pt", {name: state[name] for name in BEST_KEYS})

    def save_as(self, name: str, state: dict):
        """Write a checkpoint, whole."""
        try:
            with atomic(self.folder / name) as part:
                torch.save(state, part)
        except (OSError, RuntimeError) as error:
            self.fail(name, error)

    def write(self, name: str, text: str):
        """Write a text file of the record, whole."""
        try:
            with atomic(self.folder / name) as part:
                part.write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            self.fail(name, error)

    def fail(self, name: str, error: Exception):
        sys.exit(f"could not save {self.folder / name} ({error}): what was saved before is intact; "
                 "make room and run again")
