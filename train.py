"""Train one GPT per norm placement on the same batches, and compare them in one table.

    python train.py --norm pre post peri geo                # four tiny models on Python's own source, on a CPU
    python train.py --norm pre geo --learning_rate 1e-3 3e-3 --seed 1 2 3       # every combination: 12 runs
    python train.py --norm geo --dataset mine --preset baby # your text (data/prepare.py), one GPU
    python train.py --norm geo --dataset fineweb --preset gpt2

A run is a folder in OUT_DIR, named by its norm and what else varies, with ckpt.pt, best.pt (lowest val loss), log.csv,
depth.csv and config.json; the same command goes on where it was cut off. One Ctrl-C saves and leaves. Several runs are
also compared in OUT_DIR/compare.csv and, with matplotlib, compare.png. Losses are nats/token.
"""
import argparse
import csv
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent


def flag(default, help, low=-1e18, high=1e18, choices=None):
    """A field of `Config` with what its command-line flag needs besides; numbers are checked to be in low..high."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices})


@dataclass
class Config:
    """One run. Each field is a flag of the same name; the defaults are the preset `tiny`.

    `folder` is where the run writes, and what the same command goes on from; a sweep adds to its name what varies."""
    norm: str = flag("geo", "norm placement", choices=("pre", "post", "peri", "geo"))
    dataset: str = flag("stdlib", "the folder data/DATASET, made by data/prepare.py")
    out_dir: str = flag("out", "where the runs' folders are")
    preset: str = flag("tiny", "defaults of the other flags: tiny (CPU), baby (any GPU), gpt2 (124M, 24 GB)", choices=("tiny", "baby", "gpt2"))
    overwrite: bool = flag(False, "start anew, and throw away what is in the run's folder")
    eval_interval: int = flag(250, "steps between evaluations, each with a checkpoint", 1)
    eval_iters: int = flag(100, "batches of val evaluated, the same each time, evenly spread; 0 is all of val", 0)
    log_interval: int = flag(20, "steps between lines of log.csv", 1)
    batch_size: int = flag(12, "sequences a batch", 1, 1e5)
    gradient_accumulation_steps: int = flag(1, "batches a step", 1, 1e5)
    block_size: int = flag(64, "context, tokens", 1, 1e6)
    n_layer: int = flag(4, "blocks", 1, 1e4)
    n_head: int = flag(4, "attention heads", 1, 1e4)
    n_embd: int = flag(128, "channels of the residual stream", 1, 1e5)
    dropout: float = flag(0.0, "in attention, after each sublayer and after the embedding")
    learning_rate: float = flag(3e-3, "peak, after the warm-up", 0)
    min_lr: float | None = flag(None, "at the end of the cosine (default: learning_rate/10)", 0)
    warmup_iters: int = flag(100, "steps of linear warm-up", 0)
    lr_decay_iters: int | None = flag(None, "steps until min_lr (default: max_iters)", 1)
    max_iters: int = flag(1000, "steps in all", 1)
    weight_decay: float = flag(0.1, "AdamW's, on matrices only", 0)
    beta1: float = flag(0.9, "AdamW's", 0, 0.999999)
    beta2: float = flag(0.99, "AdamW's", 0, 0.999999)
    grad_clip: float = flag(1.0, "largest gradient norm; 0 is no clipping", 0)
    seed: int = flag(1337, "of weights, batches and dropout", 0, 2**63 - 1)
    device: str = flag("auto", "auto is cuda if there is one", choices=("auto", "cpu", "cuda"))
    dtype: str = flag("auto", "autocast to it; auto is bfloat16 on CUDA, float16 where the GPU lacks it, float32 on a CPU",
                      choices=("auto", "float32", "bfloat16", "float16"))
    compile: bool | None = flag(None, "torch.compile (default: on CUDA)")
    geo_decay: str = flag("sqrt", "geo: how the steps shrink with depth", choices=("none", "harmonic", "sqrt", "linear"))
    geo_max_angle: float = flag(math.pi / 4, "geo: largest turn of one sublayer, radians")
    geo_p: float = flag(math.inf, "geo: the retraction p*atan(t/p); inf is the exponential map", 1e-9, math.inf)

    def __post_init__(self):
        self.folder = Path(self.out_dir) / self.norm


PRESETS = {
    "tiny": {},     # the size of nanoGPT's CPU settings
    "baby": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2, learning_rate=1e-3,
                 max_iters=5000, eval_iters=0),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=8, gradient_accumulation_steps=60,
                 learning_rate=6e-4, warmup_iters=700, max_iters=19000, beta2=0.95, eval_interval=500, eval_iters=200),
}
SWEPT = ("seed", "norm", "geo_decay", "geo_p", "learning_rate")     # take several values; the first changes last
# What only observes, or says where it runs, may differ when a run goes on.
MAY_CHANGE = {"out_dir", "preset", "overwrite", "eval_interval", "log_interval", "device", "dtype", "compile"}


def parse_args(args: list[str] | None = None) -> list[Config]:
    """One Config a run: every combination of the values given, where those of geo_* vary `geo` alone. A wrong flag or
    value ends the program with one line and exit code 2."""
    parser = argparse.ArgumentParser(description="Train GPTs that differ in the placement of their norms alone. "
                                     f"Of {', '.join(SWEPT)}, several values make a sweep.",
                                     allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}; see --help\n")
    for f in fields(Config):
        kind = f.type if isinstance(f.type, type) else f.type.__args__[0]       # of `float | None`, float
        text = f.metadata["help"] + ("" if f.default in (None, False) else f" (default: {f.default})")
        if kind is bool:
            parser.add_argument(f"--{f.name}", action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(f"--{f.name}", type=kind, choices=f.metadata["choices"], help=text,
                                **({"nargs": "+", "action": "extend"} if f.name in SWEPT else {}))
    given = vars(parser.parse_args(args))
    for f in fields(Config):
        low, high = f.metadata["low"], f.metadata["high"]
        for value in given.get(f.name, []) if f.name in SWEPT else [given.get(f.name)]:
            if isinstance(value, (int, float)) and not low <= value <= high:
                parser.error(f"--{f.name} must be in {low:g}..{high:g}, not {value}")
    axes = {name: given.pop(name) for name in SWEPT if name in given}
    configs = {}
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values))
        if chosen.get("norm", "geo") != "geo":
            chosen = {name: value for name, value in chosen.items() if not name.startswith("geo_")}
        config = Config(**(PRESETS[given.get("preset", "tiny")] | given | chosen))
        varies = [f"{name}={value}" for name, value in chosen.items() if name != "norm" and len(set(axes[name])) > 1]
        config.folder = Path(config.out_dir, "-".join([config.norm, *varies]))
        configs.setdefault(config.folder, config)
    return list(configs.values())


if __name__ == "__main__":      # before torch is imported, so that --help and a wrong flag answer at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    CONFIGS = parse_args()

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from data.prepare import prepare
from model import GPT, NORMS, GPTConfig

DEPTH_COLUMNS = "step,layer,sublayer,stream_rms,update_rms,angle,grad_norm".split(",")
LOG_COLUMNS = "step,train_loss,val_loss,val_bits_per_byte,learning_rate,grad_norm,tokens_per_second,elapsed_seconds".split(",")
FORMAT = "nanonorm 2"
ANEW = "choose another --out_dir, delete that folder, or --overwrite every run of this command"
BEST = ("format", "model", "model_config", "config", "tokenizer", "sha256", "row")      # of ckpt.pt, what best.pt holds


# ---------------------------------------------------------------------------------------------------------- data

def load_data(config: Config) -> tuple[dict, dict[str, np.ndarray]]:
    """meta.json of data/DATASET, and its token ids by split. stdlib is prepared if it is missing; anything else
    that is missing, damaged or too short ends the program with one line."""
    folder = HERE / "data" / config.dataset
    if not folder.is_dir():
        if config.dataset != "stdlib":
            source = config.dataset if config.dataset in ("shakespeare", "fineweb") else f"FILES --name {config.dataset}"
            sys.exit(f"there is no dataset data/{config.dataset}: make it with `python data/prepare.py {source}`")
        print("preparing data/stdlib, the source text of this Python's standard library", flush=True)
        prepare(["stdlib"])
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        sizes = {split: meta[f"{split}_tokens"] for split in ("train", "val")}
        if min(sizes.values()) <= config.block_size:
            sys.exit(f"data/{config.dataset} is too short: train has {sizes['train']} tokens and val {sizes['val']}, but "
                     f"one window takes {config.block_size + 1}; prepare more text or lower --block_size")
        data = {split: np.memmap(folder / f"{split}.bin", np.dtype(meta["dtype"]).newbyteorder("<"), "r") for split in sizes}
        if any(len(data[split]) != sizes[split] for split in sizes):
            raise ValueError("its files and its meta.json differ in length")
        if max(ids.max() for ids in data.values()) >= meta["vocab_size"] or not {"tokenizer", "sha256"} < meta.keys() or meta["val_bytes"] < 1:
            raise ValueError("its meta.json does not fit its files")
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"data/{config.dataset} is damaged ({error}): make it again with data/prepare.py")
    return meta, data


def get_batch(data: np.ndarray, config: Config, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Batch number `index` of this seed, the same for every norm: inputs and targets, (B, T) each.

    A function of its number, so that a resumed run needs no memory of what it has seen."""
    rng = np.random.default_rng((config.seed, index))
    starts = rng.integers(len(data) - config.block_size, size=config.batch_size)
    ids = torch.from_numpy(np.stack([data[i:i + config.block_size + 1] for i in starts]).astype(np.int64))
    if device.type == "cuda":
        ids = ids.pin_memory().to(device, non_blocking=True)
    return ids[:, :-1], ids[:, 1:]


def val_batches(data: np.ndarray, config: Config):
    """Yield (inputs, targets, count) of windows that follow one another through val, so that each token is predicted
    once; all of them, or eval_iters batches evenly spread. Targets are -1 where the last window or batch is not full."""
    B, T = config.batch_size, config.block_size
    starts = np.arange(0, len(data) - 1, T)
    if 0 < config.eval_iters * B < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, config.eval_iters * B).astype(int)]
    for i in range(0, len(starts), B):
        x, y = torch.zeros(B, T, dtype=torch.int64), torch.full((B, T), -1)
        for row, start in enumerate(starts[i:i + B]):
            ids = torch.from_numpy(data[start:start + T + 1].astype(np.int64))
            x[row, :len(ids) - 1], y[row, :len(ids) - 1] = ids[:-1], ids[1:]
        yield x, y, int((y >= 0).sum())


@torch.no_grad()
def evaluate(model, data: np.ndarray, config: Config, device: torch.device, autocast) -> float:
    """Mean loss on val in nats/token, over the same tokens each time. Leaves the model in training mode."""
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for x, y, n in val_batches(data, config):
        with autocast:
            _, loss = model(x.to(device), y.to(device))
        total += loss.double() * n
        count += n
    model.train()
    return total.item() / count


def bits_per_byte(nats_per_token: float, tokens: int, n_bytes: int) -> float:
    """nats/token on a text of that many tokens and bytes, as bits/byte: it does not depend on the tokenizer."""
    return nats_per_token / math.log(2) * tokens / n_bytes


# --------------------------------------------------------------------------------------------------- checkpoints

@contextmanager
def whole(path: Path):
    """A path beside `path` to write to, which is then put there whole; if it cannot be, what was there stays."""
    beside = path.with_name("part." + path.name)
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def save(state: dict, path: Path):
    """Write a checkpoint; if it cannot be written, the program ends with one line, and what was there stays."""
    try:
        with whole(path) as beside:
            torch.save(state, beside)
    except (OSError, RuntimeError) as error:
        sys.exit(f"could not save {path} ({error}): what was saved before is intact; make room and run again")


def load_checkpoint(path: Path) -> dict:
    """A checkpoint of ours, on the CPU; no code in the file is run. Any other file ends the program with one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # one line is enough for a file of another program
            state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError("it holds something else")
        return state
    except Exception as error:      # torch.load meets a damaged file with errors of many types
        sys.exit(f"{path} is not a whole checkpoint of this program ({type(error).__name__}): {ANEW}")


def open_run(config: Config, meta: dict) -> dict | None:
    """The checkpoint that this run goes on from, or None to start; a run with other settings is refused in one line."""
    path = config.folder / "ckpt.pt"
    if config.overwrite:
        return None
    if not path.exists():
        if path.with_name("best.pt").exists():
            sys.exit(f"{path.parent} holds best.pt but no ckpt.pt to go on from: {ANEW}")
        return None
    state, now = load_checkpoint(path), asdict(config)
    if state["tokenizer"] != meta["tokenizer"]:
        sys.exit(f"{path.parent} was trained with tokenizer {state['tokenizer']}, but data/{config.dataset} has "
                 f"{meta['tokenizer']}: {ANEW}")
    if "optimizer" not in state:
        sys.exit(f"{path} holds weights alone, as best.pt does, and cannot be trained on: {ANEW}")
    for name, was in state["config"].items():
        longer = name == "max_iters" and now[name] > was
        if name not in MAY_CHANGE and now.get(name) != was and not longer:
            sys.exit(f"{path.parent} was trained with --{name} {was}, not {now.get(name)}: {ANEW}")
    if state["sha256"] != meta["sha256"]:
        sys.exit(f"{path.parent} was trained on another text than data/{config.dataset} holds now: {ANEW}")
    return state


# ------------------------------------------------------------------------------------------------------ training

def gpt_config(config: Config, vocab_size: int) -> GPTConfig:
    """The run's model on a vocabulary of that size; raises ValueError for what GPTConfig refuses."""
    shared = {f.name: getattr(config, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
    return GPTConfig(vocab_size=vocab_size, **shared)


def learning_rate(step: int, config: Config) -> float:
    """nanoGPT's: linear warm-up, then a cosine from learning_rate to min_lr, which the step after lr_decay_iters meets.
    Steps count from 1."""
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    if step <= config.warmup_iters:
        return config.learning_rate * step / (config.warmup_iters + 1)
    length = (config.lr_decay_iters or config.max_iters) - config.warmup_iters
    done = min(1.0, (step - 1 - config.warmup_iters) / length) if length > 0 else 1.0
    return low + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - low)


@contextmanager
def locked(folder: Path):
    """Make the run's folder, and keep other processes out of it meanwhile, where the system can."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.name != "posix":
        yield
        return
    import fcntl
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        sys.exit(f"another process is training in {folder}: wait for it, or choose another --out_dir")
    finally:
        os.close(descriptor)


def depth_profile(model: GPT, data: np.ndarray, config: Config, step: int, device: torch.device) -> list[list]:
    """What each sublayer does to the stream: a line of depth.csv each, in order of depth, at `step` steps of training.

    stream_rms: root mean square of the stream it hands on. update_rms: that of the change it made, in units of the
    stream it met. angle: mean turn of a token's stream, radians. grad_norm: of all weights of its layer.
    Measured in float32 without dropout, on the first batch of val, at most 4,096 tokens: the same each time."""
    x, y, _ = next(val_batches(data, config))
    full = (y >= 0).all(dim=1).nonzero()[:max(1, 4096 // config.block_size), 0]    # no padding
    changes = []

    def watch(residual, inputs, after):
        before, after = inputs[0].detach(), after.detach()
        u, v = F.normalize(before, dim=-1), F.normalize(after, dim=-1)
        turn = 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))      # exact at small angles, as acos is not
        rms = [t.square().mean().sqrt() for t in (before, after, after - before)]
        changes.append(torch.stack((rms[1], rms[2] / rms[0], turn.mean())))

    sublayers = [(layer, name, f) for layer, block in enumerate(model.blocks) for name, f in block.named_children()]
    hooks = [f.register_forward_hook(watch) for _, _, f in sublayers]
    model.eval()
    _, loss = model(x[full].to(device), y[full].to(device))
    model.train()
    for hook in hooks:
        hook.remove()
    weights = [list(block.parameters()) for block in model.blocks]
    grads = iter(torch.autograd.grad(loss, [p for layer in weights for p in layer], allow_unused=True, materialize_grads=True))
    grad_norms = [torch.nn.utils.get_total_norm([next(grads) for _ in layer]).item() for layer in weights]
    return [[step, layer, name, *change.tolist(), grad_norms[layer]]
            for (layer, name, _), change in zip(sublayers, changes)]


def peak_memory(device: torch.device, reset: bool = False) -> float:
    """Peak memory in MB since the last reset: CUDA's allocations, or on Linux the process; elsewhere nan."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return math.nan


def train(config: Config, meta: dict, data: dict, device: torch.device, stop: list) -> dict:
    """Train, or go on training, one run; returns its row of the table, with the settings it was trained with as `config`.
    A signal in `stop` saves and leaves.

    A loss or gradient that is not finite ends the run with `diverged` in the row; its last checkpoint stays. With
    float16 the scaler skips such gradients, and only 20 skips in a row count."""
    folder = config.folder
    state = open_run(config, meta)
    torch.manual_seed(config.seed)
    model_config = gpt_config(config, meta["vocab_size"])
    raw_model = GPT(model_config).to(device)    # state dicts are of this one, whether or not it is compiled
    row = {"parameters": sum(p.numel() for p in raw_model.parameters()), "step": 0, "diverged": None, "val_curve": [],
           "val_loss": math.inf, "val_bits_per_byte": math.inf, "best_step": 0, "depth_start": [], "depth_end": [],
           "train_seconds": 0.0, "elapsed": 0.0, "peak_memory": 0.0}
    if state:
        row = state["row"]
        if row["step"] >= config.max_iters:
            print(f"{folder} is finished: val {row['val_loss']:.4f} nats/token at step {row['best_step']}; nothing to do", flush=True)
            return row | {"config": state["config"]}
        row["depth_end"] = []       # a larger max_iters moves the end
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    autocast = torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
    optimizer = torch.optim.AdamW(raw_model.param_groups(config.weight_decay), betas=(config.beta1, config.beta2), fused=True)
    use_compile = device.type == "cuda" if config.compile is None else config.compile
    where = f"{device.type}, {dtype}{', compiled' if use_compile else ''}"

    if state:
        try:
            raw_model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            sys.exit(f"{folder}/ckpt.pt does not fit this model.py ({type(error).__name__}): {ANEW}")
        if scaler.is_enabled() and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if row["best_step"] == row["step"]:     # a cut between the two saves may have lost this one
            save({name: state[name] for name in BEST}, folder / "best.pt")
        if device.type == "cuda" and state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], device)
        print(f"{folder} goes on from step {row['step']}" + (
            f", with the schedule of {config.max_iters} steps instead of {state['config']['max_iters']}"
            if config.max_iters != state["config"]["max_iters"] else "") + (
            f"; on {where} after {state['where']}, so not bit for bit" if where != state["where"] else ""), flush=True)
    else:
        row["depth_start"] = depth_profile(raw_model, data["val"], config, 0, device)
    peak_memory(device, reset=True)
    model = raw_model
    if use_compile:     # the first call compiles: fail now, not after the first log line
        try:
            torch.compiler.reset()      # else the runs of a sweep share one limit of compilations, and the fifth is eager
            model = torch.compile(raw_model)
            evaluate(model, data["val"][:config.block_size + 1], config, device, autocast)
        except Exception as error:
            sys.exit(f"torch.compile does not work here ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}): "
                     "install a C++ compiler, or run with --no-compile")

    accumulate = config.gradient_accumulation_steps
    x, y = get_batch(data["train"], config, row["step"] * accumulate, device)
    if not state:       # all that can fail early has not failed
        for name in ("ckpt.pt", "best.pt", "log.csv", "config.json"):
            (folder / name).unlink(missing_ok=True)
        write_csv(folder / "depth.csv", DEPTH_COLUMNS, row["depth_start"])
    about = {"config": asdict(config), "model": asdict(model_config), "data": meta, "where": where,
             "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version()}
    with whole(folder / "config.json") as beside:
        beside.write_text(json.dumps(about, indent=1), encoding="utf-8")
    saved = row["step"]
    log_file = open_log(folder / "log.csv", saved)
    log = csv.writer(log_file, lineterminator="\n")

    interactive = sys.stdout.isatty() and sys.stderr.isatty()
    bar = tqdm(total=config.max_iters, initial=row["step"], desc=folder.name, unit="step", disable=not interactive)
    say = bar.write if interactive else lambda line: print(line, flush=True)
    tokens_per_step = config.batch_size * config.block_size * accumulate
    bad_streak = torch.zeros((), device=device)     # steps in a row without a finite loss and gradient
    start, first = time.perf_counter() - row["elapsed"], row["step"] + 1
    clock, clock_step = time.perf_counter(), row["step"]

    for step in range(first, config.max_iters + 1):
        lr = learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        train_loss = torch.zeros((), device=device)
        for micro in range(accumulate):
            with autocast:
                _, loss = model(x, y)
            # The next batch is on its way while the GPU still works on this one.
            x, y = get_batch(data["train"], config, (step - 1) * accumulate + micro + 1, device)
            scaler.scale(loss / accumulate).backward()
            train_loss += loss.detach() / accumulate
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        bad_streak = (bad_streak + 1) * ~(train_loss.isfinite() & grad_norm.isfinite())

        bar.update()
        last = step == config.max_iters
        evaluating = last or step % config.eval_interval == 0
        if step == first and device.type == "cuda":     # compiling is over: start the clock
            torch.cuda.synchronize(device)
            clock, clock_step = time.perf_counter(), step
        if not (evaluating or stop or step == 1 or step % config.log_interval == 0):
            continue

        # The only place where the host waits for the device.
        train_loss, grad_norm, bad = torch.stack((train_loss, grad_norm, bad_streak)).tolist()
        now = time.perf_counter()
        speed = tokens_per_step * (step - clock_step) / (now - clock) if step > clock_step else math.nan
        row["train_seconds"] += now - clock
        diverged = not math.isfinite(train_loss) or bad >= (20 if scaler.is_enabled() else 1)
        val_loss = evaluate(model, data["val"], config, device, autocast) if evaluating and not diverged else None
        if diverged or val_loss is not None and not math.isfinite(val_loss):
            row["diverged"] = step - max(int(bad), 1) + 1
            say(f"{folder.name} diverged at step {row['diverged']}: its loss or gradient is not finite, most likely from too "
                "high a learning rate; lower --learning_rate or lengthen --warmup_iters. " + (
                f"The checkpoint in {folder} is of step {saved}." if saved else "Nothing was saved yet."))
            break
        row["step"], row["elapsed"] = step, now - start
        row["peak_memory"] = max(row["peak_memory"], peak_memory(device))
        if evaluating or step == 1 or step % config.log_interval == 0:
            bpb = val_loss and bits_per_byte(val_loss, meta["val_tokens"], meta["val_bytes"])
            log.writerow([step] + ["" if v is None else f"{v:.9g}" for v in (
                train_loss, val_loss, bpb, lr, grad_norm, speed, row["elapsed"])])
            bar.set_postfix_str(f"loss {train_loss:.3f}, lr {lr:.1e}, {speed:,.0f} tokens/s")
            if val_loss is not None:
                row["val_curve"].append([step, val_loss])
                say(f"{folder.name} step {step}: train {train_loss:.4f}, val {val_loss:.4f} nats/token, {bpb:.4f} bits/byte")
            elif not interactive:
                say(f"{folder.name} step {step}: train {train_loss:.4f}, lr {lr:.2e}, {speed:,.0f} tokens/s")
        if last:
            row["depth_end"] = depth_profile(raw_model, data["val"], config, step, device)
            write_csv(folder / "depth.csv", DEPTH_COLUMNS, row["depth_start"] + row["depth_end"])
        if evaluating or stop:
            best = val_loss is not None and val_loss < row["val_loss"]
            if best:
                row |= {"val_loss": val_loss, "val_bits_per_byte": bpb, "best_step": step}
            state = {"format": FORMAT, "model": raw_model.state_dict(), "model_config": asdict(model_config),
                     "config": asdict(config), "tokenizer": meta["tokenizer"], "sha256": meta["sha256"], "row": row,
                     "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "where": where,
                     "rng": torch.get_rng_state(),
                     "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None}
            save(state, folder / "ckpt.pt")
            if best:
                save({name: state[name] for name in BEST}, folder / "best.pt")
            saved = step
        if stop and not last:
            say(f"stopped: step {step} is saved in {folder}, and the same command{' without --overwrite' * config.overwrite} "
                "goes on from there")
            break
        clock, clock_step = time.perf_counter(), step
    bar.close()
    log_file.close()
    return row | {"config": asdict(config)}


def write_csv(path: Path, columns: list[str], rows: list[list]):
    """Write a whole table."""
    with whole(path) as beside, open(beside, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def open_log(path: Path, step: int):
    """log.csv, open to go on after `step`; later lines, of steps that will be trained again, are dropped."""
    rows = []
    if step and path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        rows = [r for r in (line.split(",") for line in lines)
                if len(r) == len(LOG_COLUMNS) and r[0].isdecimal() and int(r[0]) <= step]
    write_csv(path, LOG_COLUMNS, rows)
    return open(path, "a", encoding="utf-8", newline="", buffering=1)


# ---------------------------------------------------------------------------------------------------- comparison

def group(rows: list[dict], configs: list[Config]) -> dict[tuple, dict[float, dict[int, dict]]]:
    """The rows by setting, which is (norm, geo_decay, geo_p), then by learning rate, then by seed."""
    groups = {}
    for row, c in zip(rows, configs):
        groups.setdefault((c.norm, c.geo_decay, c.geo_p), {}).setdefault(c.learning_rate, {})[c.seed] = row
    return groups


def val_losses(seeds: dict[int, dict]) -> dict[int, float]:
    """Val loss by seed, nats/token, of the runs that did not diverge."""
    return {seed: row["val_loss"] for seed, row in seeds.items() if row["best_step"] and not row["diverged"]}


def best_rate(rates: dict[float, dict[int, dict]]) -> float:
    """The learning rate with the fewest diverged runs, and among these with the lowest mean val loss."""
    def rank(rate):
        losses = val_losses(rates[rate])
        return len(rates[rate]) - len(losses), statistics.mean(losses.values() or [math.inf])
    return min(rates, key=rank)


def depth_summary(row: dict) -> dict[str, float]:
    """Of the last step's profile: RMS of the stream after the last layer by that after the first, largest by smallest
    gradient norm of a layer, and mean angle, radians. nan for a run that did not come so far."""
    _, _, _, rms, _, angle, grad = zip(*row["depth_end"] or [[math.nan] * len(DEPTH_COLUMNS)] * 2)
    return {"rms_last_first": rms[-1] / rms[1], "grad_max_min": max(grad) / (min(grad) or math.nan), "mean_angle": statistics.mean(angle)}


def values_of(name: str, configs: list[Config]) -> list:
    """What the runs have for a flag, each value once; geo_* counts for `geo` alone."""
    return list(dict.fromkeys(getattr(c, name) for c in configs if c.norm == "geo" or not name.startswith("geo_")))


def label(setting: tuple, groups: dict) -> str:
    """The norm, and of its geo_* what varies among the settings."""
    norm, geo_decay, geo_p = setting
    decays, ps = ({other[i] for other in groups if other[0] == norm} for i in (1, 2))
    return norm + f" {geo_decay}" * (len(decays) > 1) + f" p={geo_p:g}" * (len(ps) > 1)


def table(rows: list[dict], configs: list[Config]) -> str:
    """The comparison, one line a setting and learning rate, with means over the seeds.

    Val loss has its standard deviation in brackets, and the best of several rates a star. `minus` is the difference
    from the first setting at its best rate, seed by seed, on the same batches: mean and standard error."""
    groups, lines, c = group(rows, configs), [], configs[0]
    first = next(iter(groups))
    base = val_losses(groups[first][best_rate(groups[first])])
    mean = lambda values, form: format(statistics.mean(values), form) if values else "-"
    deviation = lambda values, form: form.format(statistics.stdev(values)) if len(values) > 1 else ""
    for (norm, geo_decay, geo_p), rates in groups.items():
        best = best_rate(rates)
        for rate, seeds in rates.items():
            runs, losses = list(seeds.values()), val_losses(seeds)
            finished = [seeds[seed] for seed in losses]
            depths = [depth_summary(row) for row in finished]
            minus = [loss - base[seed] for seed, loss in losses.items() if seed in base]
            tokens = c.batch_size * c.block_size * c.gradient_accumulation_steps * sum(row["step"] for row in runs)
            lines.append({
                "norm": norm,
                "geo_decay": geo_decay if norm == "geo" else "-",
                "geo_p": f"{geo_p:g}" if norm == "geo" else "-",
                "learning_rate": f"{rate:g}" + "*" * (len(rates) > 1 and len(losses) > 0 and rate == best),
                "parameters": f"{runs[0]['parameters']:,}",
                "val nats/token": mean(losses.values(), ".4f") + deviation(losses.values(), " ({:.4f})"),
                "val bits/byte": mean([row["val_bits_per_byte"] for row in finished], ".4f"),
                f"minus {label(first, groups)}": "-" if losses == base else (   # a standard error is a deviation by sqrt(n)
                    mean(minus, "+.4f") + deviation([m / len(minus) ** 0.5 for m in minus], " ± {:.4f}")),
                "best step": mean([row["best_step"] for row in finished], ".0f"),
                "tokens/s": f"{tokens / max(sum(row['train_seconds'] for row in runs), 1e-9):,.0f}",
                "peak MB": f"{max(row['peak_memory'] for row in runs):,.0f}",
            } | {name: mean([depth[name] for depth in depths], ".4g") for name in depth_summary(runs[0])} | {
                "": ", ".join(f"seed {seed} " * (len(seeds) > 1) + f"diverged at step {row['diverged']}"
                              for seed, row in seeds.items() if row["diverged"])})
    silent = {name for name in ("geo_decay", "geo_p", "learning_rate") if len(values_of(name, configs)) < 2}
    columns = [name for name in lines[0] if name not in silent and not (len(lines) == 1 and name.startswith("minus"))]
    lines.insert(0, {name: name for name in columns})
    width = {name: max(len(line[name]) for line in lines) for name in columns}
    return "\n".join("  ".join(f"{line[name]:{'<' if name in ('norm', '') else '>'}{width[name]}}" for name in columns).rstrip()
                     for line in lines)


def write_comparison(rows: list[dict], configs: list[Config]):
    """OUT_DIR/compare.csv, one line a run: its folder, every setting it was trained with, every result, and last its
    times, seconds. Peak memory, which no two runs repeat either, stands in the table alone."""
    settings = [f.name for f in fields(Config) if f.name not in ("out_dir", "overwrite")]
    results = ["parameters", "val_loss", "val_bits_per_byte", "best_step", "step", "diverged"]
    lines = [{"run": c.folder.name} | {name: row["config"].get(name) for name in settings} | {name: row[name] for name in results}
             | depth_summary(row) | {"train_seconds": row["train_seconds"], "elapsed_seconds": row["elapsed"]}
             for row, c in zip(rows, configs)]
    write_csv(Path(configs[0].out_dir, "compare.csv"), list(lines[0]), [list(line.values()) for line in lines])


def draw_comparison(rows: list[dict], configs: list[Config]):
    """OUT_DIR/compare.png: val loss by step and by learning rate, stream RMS and gradient norm by depth. A norm has one
    colour, and each of its settings a line style. Means over the seeds that did not diverge, at the best rate but in the
    second panel, whose bars are standard deviations."""
    path = Path(configs[0].out_dir, "compare.png")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} was not drawn: `pip install matplotlib`, and run the same command again", file=sys.stderr)
        return
    figure = Figure(figsize=(11, 8), constrained_layout=True)
    by_step, by_rate, stream, gradient = axes = figure.subplots(2, 2).ravel()
    groups = group(rows, configs)
    for setting, rates in groups.items():
        i = NORMS.index(setting[0])
        j = [other for other in groups if other[0] == setting[0]].index(setting)
        style = {"color": f"C{i}", "marker": "os^DvPX"[i % 7], "markersize": 4, "linestyle": ("-", "--", ":", "-.")[j % 4]}
        losses = {rate: list(val_losses(seeds).values()) for rate, seeds in sorted(rates.items())}
        shown = {rate: values for rate, values in losses.items() if values}
        by_rate.errorbar(list(shown), [statistics.mean(values) for values in shown.values()], capsize=3,
                         yerr=[statistics.stdev(values) if len(values) > 1 else 0 for values in shown.values()], **style)
        for rate in [rate for rate in losses if len(losses[rate]) < len(rates[rate])]:
            by_rate.plot(rate, 0.97 - 0.04 * i, **style | {"marker": "x"}, transform=by_rate.get_xaxis_transform())

        best = rates[best_rate(rates)]
        finished = [best[seed] for seed in val_losses(best)]
        curves = [dict(row["val_curve"]) for row in finished]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        by_step.plot(steps, [statistics.mean(curve[step] for curve in curves) for step in steps], label=label(setting, groups), **style)
        for when, weight in (("depth_start", {"alpha": 0.35, "linewidth": 1}), ("depth_end", {})):
            profiles = [row[when] for row in finished if row[when]]
            depth = np.array([[line[3:] for line in profile] for profile in profiles]).mean(0) if profiles else np.empty((0, 4))
            stream.plot(np.arange(1, len(depth) + 1) / 2, depth[:, 0], **style, **weight)
            gradient.plot(np.arange(1, len(depth) // 2 + 1), depth[1::2, 3], **style, **weight)
    by_step.set(title="Validation loss", xlabel="step", ylabel="nats/token")
    by_rate.set(title="Validation loss" + " (x: diverged)" * any(row["diverged"] for row in rows), xlabel="peak learning rate",
                ylabel="nats/token", xscale="log")
    stream.set(title="Residual stream after each sublayer (faint: at the start)", xlabel="layer", ylabel="RMS")
    gradient.set(title="Gradient of a layer's weights (faint: at the start)", xlabel="layer", ylabel="norm")
    ticks = sorted(values_of("learning_rate", configs))
    by_rate.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    by_rate.minorticks_off()
    by_step.legend()
    for ax in (stream, gradient):
        ax.set_yscale("log", base=2)
        low, high = np.log2(ax.get_ylim())
        ax.set_ylim(2 ** np.floor(low), 2 ** np.ceil(high))     # ticks stand at powers of 2: at least two of them
        ax.yaxis.set_major_formatter("{x:g}")
        ax.locator_params(axis="x", integer=True)
    for ax in axes:
        ax.grid(alpha=0.3)
    with whole(path) as beside:
        figure.savefig(beside, dpi=150)


def main(configs: list[Config]):
    """Train every config in turn and print the table. All are checked before the first starts."""
    for console in filter(None, (sys.stdout, sys.stderr)):
        console.reconfigure(errors="replace")   # what a console cannot show is no reason to stop
    if configs[0].device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: this torch sees no CUDA GPU; run with --device cpu")
    device = torch.device("cuda" if configs[0].device != "cpu" and torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for config in configs:
        try:
            gpt_config(config, vocab_size=1)    # the dataset, which may have to be made first, tells the real one
        except ValueError as error:
            print(f"train.py: {error}; see --help", file=sys.stderr)
            sys.exit(2)
    meta, data = load_data(configs[0])
    for config in configs:
        open_run(config, meta)
    swept = {name: values_of(name, configs) for name in SWEPT}
    print(json.dumps(asdict(configs[0]) | {name: v for name, v in swept.items() if len(v) > 1}, ensure_ascii=False), flush=True)

    stop = []
    def on_signal(number, _):
        stop.append(number)     # a second one, of either kind, does not wait for the step
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    for config in configs[1:] if configs[0].overwrite else []:      # else a sweep cut off would go on with the old ones
        with locked(config.folder):
            for name in ("ckpt.pt", "best.pt"):
                (config.folder / name).unlink(missing_ok=True)
    rows = []
    for config in configs:
        with locked(config.folder):
            rows.append(train(config, meta, data, device, stop))
        if stop:
            break
    if len(configs) > 1 and stop and rows[-1]["step"] < config.max_iters and not rows[-1]["diverged"]:
        rows.pop()      # half a run compares with none
    if rows:
        print(table(rows, configs), flush=True)
    if stop:
        sys.exit(128 + stop[0])
    if len(configs) > 1:
        write_comparison(rows, configs)
        draw_comparison(rows, configs)
    if all(row["diverged"] for row in rows):
        sys.exit("every run diverged: lower --learning_rate or lengthen --warmup_iters")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(CONFIGS)
    except KeyboardInterrupt:
        print("interrupted; what was saved before is intact", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:     # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (RuntimeError, MemoryError) as error:    # torch's CPU allocator has no error of its own
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate" not in str(error):
            raise
        sys.exit("out of memory: halve --batch_size and double --gradient_accumulation_steps for the same steps")
    except OSError as error:
        sys.exit(f"--out_dir {CONFIGS[0].out_dir}: {error}; what was saved before is intact")
