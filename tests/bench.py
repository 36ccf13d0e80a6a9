"""Timings as paired ratios: what is compared runs in turn, A B A B, in one process.

    python tests/bench.py step --preset baby --batch_size 8     # a training step, all four norms
    python tests/bench.py update                                # the residual update, by width
    python tests/bench.py sample --preset baby                  # tokens/s with and without cache
    python tests/bench.py prepare FILE                          # MB/s beside tiktoken's own

Flags of train.py may follow `step` and `sample`; each of their runs is timed. A row is printed when
it is measured, and `--json FILE` writes the rows. A ratio is the median over the rounds.
"""
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from argparse import BooleanOptionalAction
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))     # where train.py is

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data.prepare
from data import Parser, atomic, command
from data.runs import hardware, peak_memory
from geonorm import geodesic_update
from model import GPT
from sample import generate
from train import Config, backend, get_batch, gpt_config, parse_args, training_step

WIDTHS = (256, 384, 768, 1024, 2048, 4096)      # of `update`
NUMBERS = {"cpu": 2**21, "cuda": 2**25}         # of `update`, in each of x and g
TOKENIZERS = ("bytes", "gpt2")                  # of `prepare`
CHILD_SECONDS = 1800    # the memory of a step on a CPU is measured in a child, at most this long


# ------------------------------------------------------------------------------------ measuring

def paired(functions: dict, rounds: int, device: torch.device, drop: int) -> dict[str, list]:
    """Seconds of each function in each round. All run in every round; the first `drop` warm up."""
    seconds = {name: [] for name in functions}
    for _ in range(drop + rounds):
        for name, function in functions.items():
            seconds[name].append(timed(function, device))
    return {name: times[drop:] for name, times in seconds.items()}


def timed(function, device: torch.device) -> float:
    """Seconds of one call, the GPU's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def ratio(seconds: dict, a: str, b: str) -> float:
    """Median over the rounds of a's time divided by b's."""
    return statistics.median(x / y for x, y in zip(seconds[a], seconds[b]))


class Report:
    """Prints each row at once, and writes all of them as JSON if a path is given."""

    def __init__(self, path: str | None, device: torch.device):
        self.path, self.rows, self.columns = path, [], None
        self.machine = (f"{hardware(device)}, {torch.get_num_threads()} threads, "
                        f"torch {torch.__version__}")
        print(self.machine, flush=True)

    def add(self, row: dict):
        """One measurement: numbers by their names. A header is printed where the names change."""
        if list(row) != self.columns:
            self.columns = list(row)
            print("\n" + "  ".join(f"{name:>12}" for name in row))
        print("  ".join(f"{show(value):>12}" for value in row.values()), flush=True)

        # The file is whole after each row, so that a run that is cut leaves what it measured.
        self.rows.append(row)
        if self.path:
            text = json.dumps({"machine": self.machine, "rows": self.rows}, indent=1,
                              allow_nan=False)
            with atomic(Path(self.path)) as part:
                part.write_text(text + "\n", encoding="utf-8")


def show(value) -> str:
    """A cell of the printed table."""
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


# ---------------------------------------------------------------------------------- a training step

class PlainBlock(nn.Module):
    """nanoGPT's block: LayerNorm without bias, fused qkv, no rotary positions."""

    def __init__(self, C: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.attn, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Plain(nn.Module):
    """Plain blocks with learned positions: what RoPE and RMSNorm cost `pre` is the difference."""

    def __init__(self, c):
        super().__init__()
        padded = (c.vocab_size + 63) // 64 * 64
        self.wte, self.wpe = nn.Embedding(padded, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.blocks = nn.Sequential(*(PlainBlock(c.n_embd, c.n_head) for _ in range(c.n_layer)))
        self.ln_f = nn.LayerNorm(c.n_embd, bias=False)

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        logits = F.linear(self.ln_f(self.blocks(x)), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_step(plain: bool, config: Config, device: torch.device, compiled: bool):
    """A function that does one of train.py's steps on one batch of random ids, without dropout."""
    torch.manual_seed(0)
    shape = gpt_config(config, 50257 if config.preset == "gpt2" else 257)
    shape.dropout = 0.0
    model = (Plain(shape) if plain else GPT(shape)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    # As train.py does it: dtype, scaler, and only the loss is compiled.
    dtype, _ = backend(config, device)
    autocast = torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
    if compiled:
        model.loss = torch.compile(model.loss)
    size = (2, config.batch_size, config.block_size)
    batch = torch.randint(shape.vocab_size, size, device=device).unbind(0)

    def step():
        training_step(model, optimizer, scaler, [batch], autocast, config.grad_clip)
    return step


def first_steps(plain: bool, config: Config, device: torch.device, compiled: bool):
    """Build a model. Returns its step, the milliseconds and the peak MB of two steps after a first.

    What other models hold on the GPU is not counted. None is a memory that cannot be measured.
    """
    held = torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0
    step = make_step(plain, config, device, compiled)
    step()
    peak_memory(device, reset=True)
    seconds = min(timed(step, device) for _ in range(2))
    peak = peak_memory(device)
    return step, 1e3 * seconds, None if peak is None else peak - held


def send_memory(pipe, *args):
    """What the child of `memory_in_a_child` does."""
    pipe.send(first_steps(*args)[2])


def memory_in_a_child(*args) -> float | None:
    """The peak MB of `first_steps(*args)` in a fresh process, where nothing else used memory.

    A child that dies or hangs ends the program with one line.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    child = spawn.Process(target=send_memory, args=(sender, *args), daemon=True)
    child.start()
    child.join(CHILD_SECONDS)
    if child.exitcode != 0:
        child.kill()
        sys.exit("the process that measures the memory of a step ended with exit code "
                 f"{child.exitcode} (None: it took over {CHILD_SECONDS} s); try a smaller model")
    return receiver.recv()


def bench_step(args, runs: dict[str, Config], device: torch.device, report: Report):
    """Forward, backward and optimizer of each run; ratios are to the first one."""
    first = next(iter(runs))
    models = {name: (False, config) for name, config in runs.items()}
    if runs[first].norm == "pre":
        models["plain nanoGPT"] = (True, runs[first])

    modes = (False, True) if args.compiled else (False,)
    for compiled in modes:
        # Memory first, one model at a time: if the timing is cut, this is left.
        steps, memory, mode = {}, {}, "compiled" if compiled else "eager"
        for name, (plain, config) in models.items():
            steps[name], ms, memory[name] = first_steps(plain, config, device, compiled)
            if device.type == "cpu":
                memory[name] = memory_in_a_child(plain, config, device, compiled)
            size = "unknown" if memory[name] is None else f"{memory[name]:,.0f}"
            print(f"{name}, {mode}: {ms:,.1f} ms, {size} MB", flush=True)

        seconds = paired(steps, args.rounds, device, drop=3)
        for name, (_, config) in models.items():
            median = statistics.median(seconds[name])
            row = {"run": name, "mode": mode, "ms": 1e3 * median,
                   "ratio": ratio(seconds, name, first),
                   "tokens/s": config.batch_size * config.block_size / median}
            if memory[name] and memory[first]:
                row |= {"peak MB": memory[name], "MB ratio": memory[name] / memory[first]}
            report.add(row)
        del steps

    # The next batch is made while the GPU computes; on a CPU this is added to the step.
    config, ids = runs[first], torch.randint(250, (1_000_000,), dtype=torch.uint8).numpy()
    batch = partial(get_batch, ids, config, 0, device)
    median = statistics.median(paired({"batch": batch}, args.rounds, device, drop=3)["batch"])
    report.add({"batch": f"{config.batch_size} x {config.block_size}", "ms": 1e3 * median})


# ------------------------------------------------------------------------------- the other subjects

def bench_update(args, runs: dict[str, Config], device: torch.device, report: Report):
    """`x + RMSNorm(g)` beside the geodesic update, forward and backward, by width."""
    for width in WIDTHS:
        shape = NUMBERS[device.type] // width, width
        x, g, gradient = (torch.randn(shape, device=device) for _ in range(3))
        x.requires_grad_()
        g.requires_grad_()
        norm = nn.RMSNorm(width, eps=1e-6, device=device)
        scale = torch.ones(1, device=device, requires_grad=True)
        bias = torch.zeros(1, device=device, requires_grad=True)

        def add(x, g):
            return x + norm(g)

        def turn(x, g):
            return geodesic_update(x, g, scale, bias, 0.5)

        def both_ways(function):
            function(x, g).backward(gradient)
            x.grad = g.grad = None

        updates = {"x + N(g)": add, "geodesic": turn}
        if args.compiled:
            for name in list(updates):
                updates[f"{name}, compiled"] = torch.compile(updates[name], dynamic=False)
        functions = {name: partial(both_ways, update) for name, update in updates.items()}
        seconds = paired(functions, args.rounds, device, drop=3)
        for name in functions:
            base = "x + N(g), compiled" if "compiled" in name else "x + N(g)"
            report.add({"width": width, "update": name,
                        "ms": 1e3 * statistics.median(seconds[name]),
                        "ratio": ratio(seconds, name, base)})


@torch.no_grad()
def bench_sample(args, runs: dict[str, Config], device: torch.device, report: Report):
    """Greedy tokens after a prompt of one; without the cache each step runs all visible text."""
    for name, config in runs.items():
        torch.manual_seed(0)
        context = config.block_size
        model = GPT(gpt_config(config, 257)).to(device).eval()
        start = torch.zeros(1, 1, dtype=torch.int64, device=device)

        def uncached():
            visible = start
            for _ in range(args.tokens):
                if visible.size(1) > context:
                    visible = visible[:, -(context // 2):]
                token = model(visible)[0][:, -1].argmax(-1, keepdim=True)
                visible = torch.cat((visible, token), dim=1)

        functions = {"cached": partial(generate, model, start, args.tokens, temperature=0),
                     "uncached": uncached}
        seconds = paired(functions, args.rounds, device, drop=1)
        for loop in functions:
            report.add({"run": name, "context": context, "loop": loop,
                        "tokens/s": args.tokens / statistics.median(seconds[loop]),
                        "speed-up": ratio(seconds, "uncached", loop)})


def bench_prepare(args, runs: dict[str, Config], device: torch.device, report: Report):
    """data/prepare.py from file to .bin; tiktoken's batch has the text in memory already."""
    text, size = Path(args.file).read_bytes().decode("utf-8", "replace"), os.path.getsize(args.file)
    pieces = [text[i:i + 2**20] for i in range(0, len(text), 2**20)]
    with tempfile.TemporaryDirectory() as folder:
        data.prepare.DATA_DIR = Path(folder)
        for name in TOKENIZERS:
            functions = {"prepare": partial(data.prepare.prepare, [args.file], name, "bench")}
            if name != "bytes":
                encode = data.prepare.get_tokenizer(name).encode_ordinary_batch
                functions["tiktoken"] = partial(encode, pieces, num_threads=os.cpu_count())
            seconds = paired(functions, args.rounds, device, drop=1)
            for program in functions:
                row = {"tokenizer": name, "program": program,
                       "MB/s": size / statistics.median(seconds[program]) / 1e6}
                if name != "bytes":
                    row["rate ratio"] = ratio(seconds, "tiktoken", program)
                report.add(row)


def main(argv: list[str] | None = None):
    """argv: the command line's, or a list of flags."""
    subjects = {"step": bench_step, "update": bench_update, "sample": bench_sample,
                "prepare": bench_prepare}
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("subject", choices=subjects)
    parser.add_argument("file", nargs="?", help="prepare: a text file")
    parser.add_argument("--rounds", type=int, default=15, help="kept, after a few that warm up")
    parser.add_argument("--tokens", type=int, default=1000, help="sample: how many to make")
    parser.add_argument("--compiled", action=BooleanOptionalAction, default=True)
    parser.add_argument("--json", metavar="FILE")
    args, rest = parser.parse_known_args(argv)
    if args.subject == "prepare" and not args.file:
        parser.error("prepare needs a text file")

    # The other flags are train.py's, and so are their errors.
    if args.subject == "step" and "--norm" not in rest:
        rest = ["--norm", "pre", "post", "peri", "geo", *rest]
    runs = {folder.name: config for folder, config in parse_args(rest).items()}
    norms = {config.norm: config for config in runs.values()}
    if len(norms) == len(runs):
        runs = norms        # short names, where only the norm differs
    cuda = next(iter(runs.values())).device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True        # as train.py does
    subjects[args.subject](args, runs, device, Report(args.json, device))


if __name__ == "__main__":
    command(main)
