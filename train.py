"""Train one GPT per norm placement on the same batches, and compare them in one table.

    python train.py --norm pre post peri geo    # four tiny models on Python's own source, on a CPU
    python train.py --norm pre geo --learning_rate 1e-3 3e-3 --seed 1 2 3       # 12 runs
    python train.py --norm geo --dataset mine --preset baby     # your text, one GPU
    python train.py --norm geo --dataset fineweb --preset gpt2

Each combination of the values given is one run, in the folder OUT_DIR/RUN, whose name lists the
norm and the given flags that can take several values. The same command resumes an interrupted run;
Ctrl-C saves and exits. data/compare.py makes the table. Losses are nats/token.
"""
import math
import sys
import time
from argparse import SUPPRESS
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data import Interrupt, Parser, command, flag
from data.compare import compare
from data.prepare import load
from data.runs import Run, check_run, locked, make_record, peak_memory
from geonorm import DECAYS
from model import ENTRIES, GPT, NORMS, GPTConfig, depth_profile

LOG_COLUMNS = ["step", "train_loss", "val_loss", "val_bits_per_byte", "learning_rate", "grad_norm",
               "tokens_per_second", "peak_mb", "train_seconds", "elapsed_seconds"]


# ---------------------------------------------------------------------------------------- settings

@dataclass
class Config:
    """One run. Each field is a flag of the same name; the defaults are the preset `tiny`."""
    norm: str = flag("geo", "norm placement", choices=NORMS)
    decay: str = flag("own", "factor of each layer's update: own is sqrt for geo, none for the "
                      "others", choices=("own", *DECAYS))
    entry: str = flag("own", "norm before the first block: own, none, or norm (without gain)",
                      choices=ENTRIES)
    dataset: str = flag("stdlib", "the folder data/DATASET, made by data/prepare.py", single=True)
    out_dir: str = flag("out", "where the runs' folders are", single=True)
    preset: str = flag("tiny", "defaults of the other flags: tiny (CPU), baby (most GPUs), gpt2 "
                       "(124M, 24 GB)", choices=("tiny", "baby", "gpt2"), single=True)
    overwrite: bool = flag(False, "discard the runs' folders and start over", single=True)
    eval_interval: int = flag(250, "steps between evaluations, each with a checkpoint", low=1,
                              single=True)
    eval_iters: int = flag(100, "validation batches, fixed and evenly spaced; 0 is all of val",
                           low=0, single=True)
    log_interval: int = flag(20, "steps between lines of log.csv", low=1, single=True)
    batch_size: int = flag(12, "sequences per batch", low=1, high=100_000)
    gradient_accumulation_steps: int = flag(1, "batches per step", low=1, high=100_000)
    block_size: int = flag(64, "context, tokens", low=1, high=1_000_000)
    n_layer: int = flag(4, "blocks", low=1, high=10_000)
    n_head: int = flag(4, "attention heads", low=1, high=10_000)
    n_embd: int = flag(128, "channels of the residual stream", low=1, high=100_000)
    dropout: float = flag(0.0, "in attention, after each sublayer and after the embedding")
    learning_rate: float = flag(3e-3, "peak, after the warm-up", low=0)
    min_lr: float | None = flag(None, "at the end of the cosine (default: learning_rate/10)",
                                kind=float, low=0)
    warmup_iters: int = flag(100, "steps of linear warm-up", low=0, high=1_000_000_000)
    lr_decay_iters: int | None = flag(None, "steps until min_lr (default: max_iters)", kind=int,
                                      low=1)
    max_iters: int = flag(1000, "total steps; a larger number continues a run", low=1,
                          high=1_000_000_000, single=True)
    weight_decay: float = flag(0.1, "AdamW's, on matrices only", low=0)
    beta1: float = flag(0.9, "AdamW's", low=0, high=0.999999)
    beta2: float = flag(0.99, "AdamW's", low=0, high=0.999999)
    grad_clip: float = flag(1.0, "largest gradient norm; 0 is no clipping", low=0)
    seed: int = flag(1337, "of weights, batches and dropout", low=0, high=2**63 - 1)
    device: str = flag("auto", "auto is cuda if there is one", choices=("auto", "cpu", "cuda"),
                       single=True)
    dtype: str = flag("auto", "of autocast; auto is bfloat16 on CUDA (float16 where the GPU lacks "
                      "it), float32 on a CPU", choices=("auto", "float32", "bfloat16", "float16"),
                      single=True)
    compile: bool | None = flag(None, "torch.compile (default: on CUDA)", kind=bool, single=True)
    geo_max_angle: float = flag(math.pi / 4, "geo: largest turn of one sublayer, radians")
    geo_p: float = flag(math.inf, "geo: the retraction p*atan(theta/p); inf is the exponential "
                        "map")


PRESETS = {
    "tiny": {},     # the size of nanoGPT's CPU settings
    "baby": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2,
                 learning_rate=1e-3, max_iters=5000, eval_iters=0),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=16,
                 gradient_accumulation_steps=30, learning_rate=6e-4, warmup_iters=700,
                 max_iters=19000, beta2=0.95, eval_interval=500, eval_iters=200),
}


def parse_args(args: list[str] | None = None) -> dict[Path, Config]:
    """Every run of the command by its folder: all combinations of the values given.

    A flag named after a norm, as geo_p is, varies only that norm. A wrong flag or value ends the
    program with one line and exit code 2.
    """
    parser = Parser(description="Train GPTs that differ in the placement of their norms. A flag "
                    "that changes the model or its training takes several values: each combination "
                    "is one run.", argument_default=SUPPRESS)
    for f in fields(Config):
        parser.add_field(f)
    given = parser.parse_fields(fields(Config), args)

    # The axes of the sweep, seeds outermost: cut short, it has finished all norms for some seeds.
    axes = {f.name: given.pop(f.name) for f in fields(Config)
            if f.name in given and not f.metadata["single"]}
    order = sorted(axes, key=lambda name: name != "seed")

    # One run per combination; equal combinations share a folder, and run once.
    runs = {}
    for values in product(*(axes[name] for name in order)):
        chosen = dict(zip(order, values))
        base = PRESETS[given.get("preset", "tiny")] | given
        check_config(parser, Config(**(base | chosen)))     # with the flags of every norm
        norm = chosen.get("norm", Config.norm)
        others = tuple(f"{other}_" for other in NORMS if other != norm)
        chosen = {name: value for name, value in chosen.items() if not name.startswith(others)}
        config = Config(**(base | chosen))
        words = [f"{name}={chosen[name]}" for name in axes if name in chosen and name != "norm"]
        run = "-".join([norm, *words])
        if len(run) > 240:
            parser.error(f"the flags would make the folder's name too long: {run}")
        runs[Path(config.out_dir, run)] = config
    return runs


def check_config(parser: Parser, config: Config):
    """Refuse what cannot be built, a learning rate that would rise, and a file for a folder."""
    try:
        gpt_config(config, vocab_size=1)    # the real one is known once the dataset is read
    except ValueError as error:
        parser.error(str(error))
    if config.min_lr is not None and config.min_lr > config.learning_rate:
        parser.error(f"--min_lr {config.min_lr} is above --learning_rate {config.learning_rate}: "
                     "lower it")
    if Path(config.out_dir).is_file():
        parser.error(f"--out_dir {config.out_dir} is a file: give a folder")


def gpt_config(config: Config, vocab_size: int) -> GPTConfig:
    """The run's model on a vocabulary of that size. Raises ValueError as GPTConfig does."""
    names = [f.name for f in fields(GPTConfig) if f.name != "vocab_size"]
    return GPTConfig(vocab_size=vocab_size, **{name: getattr(config, name) for name in names})


# -------------------------------------------------------------------------------------------- data

def get_batch(ids: np.ndarray, config: Config, index: int,
              device: torch.device) -> tuple[Tensor, Tensor]:
    """Batch number `index` of this seed, the same for every norm: inputs and targets, (B, T) each.

    A function of its number, so that a resumed run needs no memory of what it has seen.
    """
    rng = np.random.default_rng((config.seed, index))
    starts = rng.integers(len(ids) - config.block_size, size=config.batch_size)
    windows = np.stack([ids[i:i + config.block_size + 1] for i in starts]).astype(np.int64)
    both = torch.from_numpy(np.stack((windows[:, :-1], windows[:, 1:])))    # (2, B, T)
    if device.type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
    return both[0], both[1]


def val_batches(ids: np.ndarray, config: Config):
    """Yield (inputs, targets, count) of consecutive windows of val: each token is predicted once.

    All windows, or eval_iters batches of them, evenly spaced. inputs and targets are (B, T);
    targets are -1 where the last window or batch is not full, and count is the number of others.
    """
    B, T = config.batch_size, config.block_size
    starts = np.arange(0, len(ids) - 1, T)
    if 0 < config.eval_iters * B < len(starts):
        chosen = np.linspace(0, len(starts) - 1, config.eval_iters * B).astype(int)
        starts = starts[chosen]
    for i in range(0, len(starts), B):
        x = torch.zeros(B, T, dtype=torch.int64)
        y = torch.full((B, T), -1)
        for row, start in enumerate(starts[i:i + B]):
            window = torch.from_numpy(ids[start:start + T + 1].astype(np.int64))
            x[row, :len(window) - 1] = window[:-1]
            y[row, :len(window) - 1] = window[1:]
        yield x, y, int((y >= 0).sum())


@torch.no_grad()
def evaluate(model: GPT, ids: np.ndarray, config: Config, device: torch.device,
             autocast) -> float:
    """Mean loss on val, nats/token, over the same tokens each time. Leaves the model training."""
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for x, y, n in val_batches(ids, config):
        with autocast:
            loss = model.loss(x.to(device), y.to(device))
        total += loss.double() * n
        count += n
    model.train()
    return total.item() / count


def profile(model: GPT, ids: np.ndarray, config: Config, step: int,
            device: torch.device) -> list[dict]:
    """The lines of depth.csv for this step: `depth_profile` on the first batch of val.

    Whole windows without padding, at most 4,096 tokens or one window, the same each time. In
    float32, whose products are TF32 on CUDA, so exact to about 1e-3 there.
    """
    x, y, _ = next(val_batches(ids, config))
    full = (y >= 0).all(dim=1).nonzero()[:max(1, 4096 // config.block_size), 0]
    rows = depth_profile(model, x[full].to(device), y[full].to(device))
    return [{"step": step} | row for row in rows]


def bits_per_byte(nats_per_token: float, meta: dict) -> float:
    """nats/token on val as bits/byte, which does not depend on the tokenizer."""
    return nats_per_token / math.log(2) * meta["val_tokens"] / meta["val_bytes"]


# ---------------------------------------------------------------------------------------- training

def learning_rate(step: int, config: Config) -> float:
    """nanoGPT's schedule: linear warm-up, then a cosine from learning_rate down to min_lr.

    Steps count from 1; min_lr is reached at step lr_decay_iters + 1.
    """
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    if step <= config.warmup_iters:
        return config.learning_rate * step / (config.warmup_iters + 1)
    length = (config.lr_decay_iters or config.max_iters) - config.warmup_iters
    done = min(1.0, (step - 1 - config.warmup_iters) / length) if length > 0 else 1.0
    return low + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - low)


def training_step(model: GPT, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
                  batches: list[tuple[Tensor, Tensor]], autocast,
                  grad_clip: float) -> tuple[Tensor, Tensor]:
    """One step of the optimizer on the mean loss of the batches, (B, T) ids and targets each.

    Returns that loss, nats/token, and the gradient's norm before clipping, as tensors: on CUDA
    nothing here waits for the device.
    """
    mean_loss = torch.zeros((), device=batches[0][0].device)
    for x, y in batches:
        with autocast:
            loss = model.loss(x, y)
        scaler.scale(loss / len(batches)).backward()
        mean_loss += loss.detach() / len(batches)

    # With float16 the gradients are scaled; they are clipped and measured at their true size.
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return mean_loss, grad_norm


def backend(config: Config, device: torch.device) -> tuple[str, bool]:
    """The dtype of autocast, and whether to compile: what `auto` and the defaults mean here."""
    dtype = config.dtype
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    if dtype == "auto":
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if bfloat16 else "float16"
    compiled = device.type == "cuda" if config.compile is None else config.compile
    return dtype, compiled


def compile_loss(model: GPT, ids: np.ndarray, config: Config, device: torch.device, autocast):
    """Compile model.loss and call it once, since only the first call compiles.

    Where that does not work, the program ends now, with one line.
    """
    torch.compiler.reset()      # torch's limit of compilations is per process, not per run
    model.loss = torch.compile(model.loss)
    try:
        evaluate(model, ids[:config.block_size + 1], config, device, autocast)
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = str(error).strip().split("\n")[0][:200]
        sys.exit(f"torch.compile does not work here ({type(error).__name__}: {reason}): install a "
                 "C++ compiler (on a GPU: a C compiler and Triton), or run with --no-compile")


def train(folder: Path, config: Config, meta: dict, data: dict, device: torch.device,
          interrupt: Interrupt) -> bool:
    """Train one run, or continue it, in its folder; returns whether it diverged.

    meta, data: what `data.prepare.load` returns. A loss or gradient that is not finite ends the run
    and leaves its checkpoint; float16's scaler may skip 19 such gradients in a row.
    """
    run = Run(folder, config, meta)
    torch.manual_seed(config.seed)      # it gives every placement the same weights
    model = GPT(gpt_config(config, meta["vocab_size"])).to(device)
    optimizer = torch.optim.AdamW(model.param_groups(config.weight_decay),
                                  betas=(config.beta1, config.beta2), fused=True)
    dtype, compiled = backend(config, device)
    autocast = torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")

    # The run starts, continues from its checkpoint, or is finished.
    if run.state:
        run.restore(model, optimizer, scaler)
    if run.step >= config.max_iters:
        print(f"{folder} is finished at step {run.step}; nothing to do", flush=True)
        return False
    if run.state is None:
        run.depth = profile(model, data["val"], config, 0, device)
    peak_memory(device, reset=True)
    if compiled:
        compile_loss(model, data["val"], config, device, autocast)
    run.start(make_record(config, model, meta, device, dtype, compiled), LOG_COLUMNS)

    accumulate, first = config.gradient_accumulation_steps, run.step + 1
    tokens_per_step = config.batch_size * config.block_size * accumulate
    bad_streak = torch.zeros((), device=device)     # steps in a row that were not finite
    mark, mark_step, saved = time.perf_counter(), run.step, time.perf_counter()
    for step in range(first, config.max_iters + 1):
        rate = learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        numbers = range((step - 1) * accumulate, step * accumulate)
        batches = [get_batch(data["train"], config, number, device) for number in numbers]
        loss, grad_norm = training_step(model, optimizer, scaler, batches, autocast,
                                        config.grad_clip)
        bad_streak = torch.where(loss.isfinite() & grad_norm.isfinite(), 0.0, bad_streak + 1)

        # The first step includes compiling, and on CUDA warming up: it is not timed.
        if step == first and (compiled or device.type == "cuda"):
            loss.item()
            mark, mark_step = time.perf_counter(), step

        # Only steps that log, evaluate or stop wait for the device.
        last, stop = step == config.max_iters, interrupt.number
        evaluating = last or step % config.eval_interval == 0
        logging = evaluating or step == 1 or step % config.log_interval == 0
        if not (logging or stop):
            continue

        # Measure.
        loss, grad_norm, bad = torch.stack((loss, grad_norm, bad_streak)).tolist()
        now = time.perf_counter()
        run.train_seconds += now - mark
        row = {"step": step, "train_loss": loss, "learning_rate": rate, "grad_norm": grad_norm,
               "peak_mb": peak_memory(device), "train_seconds": run.train_seconds,
               "elapsed_seconds": run.elapsed()}
        if step > mark_step:
            row["tokens_per_second"] = (step - mark_step) * tokens_per_step / (now - mark)

        # Evaluate, unless the run has diverged.
        diverged = not math.isfinite(loss) or bad >= (20 if scaler.is_enabled() else 1)
        if evaluating and not diverged:
            row["val_loss"] = evaluate(model, data["val"], config, device, autocast)
            row["val_bits_per_byte"] = bits_per_byte(row["val_loss"], meta)
            diverged = not math.isfinite(row["val_loss"])
        if diverged:
            run.diverged(row, bad)
            return True

        # Log; save at an evaluation, on an interrupt, and before ten minutes have passed.
        if logging:
            run.log(row)
            say_progress(folder, config, row)
        if last:
            run.depth += profile(model, data["val"], config, step, device)
        if evaluating or stop or now - saved + (now - mark) > 600:
            run.save(row, model, optimizer, scaler, meta["tokenizer"])
            saved = time.perf_counter()
        if stop and not last:
            print(f"stopped: step {step} is saved in {folder}, and the same command (without "
                  "--overwrite) continues from there", flush=True)
            return False
        mark, mark_step = time.perf_counter(), step
    return False


def say_progress(folder: Path, config: Config, row: dict):
    """Print one line of the log."""
    line = f"{folder.name} step {row['step']}/{config.max_iters}: train {row['train_loss']:.4f}"
    if "val_loss" in row:
        line += (f", val {row['val_loss']:.4f} nats/token, "
                 f"{row['val_bits_per_byte']:.4f} bits/byte")
    else:
        line += f", lr {row['learning_rate']:.2e}"
    if "tokens_per_second" in row:
        line += f", {row['tokens_per_second']:,.0f} tokens/s"
    print(line, flush=True)


def main(runs: dict[Path, Config]):
    """Train every run in turn, then print the table. All are checked before the first starts."""
    config = next(iter(runs.values()))      # single flags are the same in every run
    if config.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: this torch sees no CUDA GPU; run with --device cpu")
    cuda = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True    # where the GPU has it; a CPU stays exact

    # What can be refused is refused now, not after hours of training.
    meta, data = load(config.dataset, max(config.block_size for config in runs.values()))
    for folder, config in runs.items():
        if not config.overwrite:
            check_run(folder, config, meta)
    announce(runs)

    results = []
    with Interrupt() as interrupt:
        if config.overwrite:
            discard(runs)
        for folder, config in runs.items():
            with locked(folder) as free:
                if free:
                    results.append(train(folder, config, meta, data, device, interrupt))
                else:
                    print(f"{folder} is skipped: another process is training in it", flush=True)
            if interrupt.number:
                sys.exit(128 + interrupt.number)
    if not results:
        sys.exit("nothing to do: other processes are training every run of this command")
    compare(list(runs), Path(config.out_dir))
    if all(results):
        sys.exit("every run diverged: lower --learning_rate or lengthen --warmup_iters")


def announce(runs: dict[Path, Config]):
    """Say what will be trained, and warn if a warm-up lasts to the end of its run."""
    config = next(iter(runs.values()))
    norms = ", ".join(dict.fromkeys(config.norm for config in runs.values()))
    print(f"{norms}: {len(runs)} run(s) of {config.max_iters} steps on {config.dataset}, in "
          f"{config.out_dir}; each run's settings are in its config.json", flush=True)
    for config in runs.values():
        end = min(config.max_iters, config.lr_decay_iters or config.max_iters)
        highest = learning_rate(min(config.warmup_iters, config.max_iters), config)
        if config.warmup_iters >= end and highest < 0.99 * config.learning_rate:
            print(f"--warmup_iters {config.warmup_iters} never reaches --learning_rate "
                  f"{config.learning_rate}: the highest of this run is {highest:.3g}", flush=True)
            break


def discard(runs: dict[Path, Config]):
    """Remove checkpoints and records of all runs but the first, whose own start removes them.

    Without that, an overwritten sweep that is cut short would continue the old runs.
    """
    for folder in list(runs)[1:]:
        with locked(folder) as free:
            for name in ("best.pt", "ckpt.pt", "config.json", "log.csv"):
                if free:
                    (folder / name).unlink(missing_ok=True)


def out_of_memory(error: Exception) -> bool:
    """Whether that is what an error means: on a CPU it is a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate" in str(error)


def run_command():
    """The command line: parse and train; running out of memory prints one line."""
    try:
        main(parse_args())
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        sys.exit("out of memory: halve --batch_size and double --gradient_accumulation_steps for "
                 "the same steps")


if __name__ == "__main__":
    command(run_command, closed_pipe=1)
