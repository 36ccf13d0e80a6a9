"""Timings as paired ratios: the things compared run in turn, A B A B, in one process, and the first rounds are dropped.

    python tests/bench.py step --preset baby --batch_size 8         # a training step, each norm, eager and compiled
    python tests/bench.py update                                    # the residual update alone, by width
    python tests/bench.py sample                                    # tokens/s with the cache and without
    python tests/bench.py prepare FILE                              # MB/s against tiktoken on the whole text

Flags of train.py may follow `step` and `sample`, `--norm` among them. `--json FILE` writes the numbers, `--rounds N` sets how many are kept.
"""
import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import nn

import data.prepare
from geonorm import geodesic_update
from model import GPT, NORMS, GPTConfig
from train import get_batch, parse_args, peak_memory


def machine(device: torch.device) -> str:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpu.exists():
        name = next((line.split(": ")[1] for line in cpu.read_text().splitlines() if line.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}"


def paired(functions: dict, rounds: int, device: torch.device, drop: int = 3) -> dict[str, list[float]]:
    """Seconds of each function in each round, all of them in every round; the first `drop` rounds warm up."""
    seconds = {name: [] for name in functions}
    for _ in range(drop + rounds):
        for name, function in functions.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[drop:] for name, times in seconds.items()}


def ratio(seconds: dict, a: str, b: str) -> float:
    """Median over the rounds of a's time by b's."""
    return statistics.median(x / y for x, y in zip(seconds[a], seconds[b]))


class PlainBlock(nn.Module):
    """nanoGPT's block: LayerNorm without bias, fused qkv, no rotary positions."""

    def __init__(self, C: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.attn, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Plain(nn.Module):
    """A stack of plain blocks with learned positions, to see what RoPE and RMSNorm cost `pre`."""

    def __init__(self, c: GPTConfig):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64 * math.ceil(c.vocab_size / 64), c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.blocks = nn.Sequential(*(PlainBlock(c.n_embd, c.n_head) for _ in range(c.n_layer)))
        self.ln_f = nn.LayerNorm(c.n_embd, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        logits = F.linear(self.ln_f(self.blocks(x)), self.wte.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_step(name: str, config, device, compiled: bool):
    """A closure that does one training step of norm `name`, and the parameter count."""
    torch.manual_seed(0)
    shape = GPTConfig(config.block_size, 50257 if config.preset == "gpt2" else 257, config.n_layer, config.n_head,
                      config.n_embd, 0.0, name if name in NORMS else "pre")
    model = (GPT(shape) if name in NORMS else Plain(shape)).to(device)
    groups = model.param_groups(0.1) if name in NORMS else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    ids = torch.randint(shape.vocab_size, (config.batch_size, config.block_size + 1), device=device)
    run = torch.compile(model) if compiled else model

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = run(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step, sum(p.numel() for p in model.parameters())


def answer_with(function, args, answer):
    answer.put(function(*args))


def in_own_process(function, *args):
    """What function(*args) returns in a fresh process, where nothing else has used memory."""
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.Queue()
    process = spawn.Process(target=answer_with, args=(function, args, answer))
    process.start()
    value = answer.get()
    process.join()
    return value


def step_memory(name, config, device, compiled) -> float:
    """The peak MB of two training steps of one norm, after a first one."""
    step, _ = make_step(name, config, device, compiled)
    step()
    peak_memory(device, reset=True)
    for _ in range(2):
        step()
    return peak_memory(device)


def bench_step(args, config, device):
    """Forward, backward and optimizer; ratios are to the first norm. TFLOP/s counts 6 flops per parameter and 12 n_layer C T
    for attention, per token."""
    names, rows = [*args.norms, *(["plain nanoGPT"] if "pre" in args.norms else [])], []
    tokens = config.batch_size * config.block_size
    for compiled in (False, True)[:2 if args.compiled else 1]:
        made = {name: make_step(name, config, device, compiled) for name in names}
        seconds = paired({name: step for name, (step, _) in made.items()}, args.rounds, device)
        for name, (_, count) in made.items():
            memory = in_own_process(step_memory, name, config, device, compiled)
            t = statistics.median(seconds[name])
            flops = tokens * (6 * count + 12 * config.n_layer * config.n_embd * config.block_size)
            rows.append({"norm": name, "mode": "compiled" if compiled else "eager", "ms": 1e3 * t, "ratio": ratio(seconds, name, names[0]),
                         "tokens/s": tokens / t, "TFLOP/s": flops / t / 1e12, "peak MB": memory})
            rows[-1]["MB ratio"] = memory / next(r["peak MB"] for r in rows if (r["norm"], r["mode"]) == (names[0], rows[-1]["mode"]))
    draws = itertools.count()
    ids = torch.randint(250, (1_000_000,), dtype=torch.int16).numpy().view("uint16")
    wait = statistics.median(paired({"batch": lambda: get_batch(ids, config, next(draws), device)}, args.rounds, device)["batch"])
    print(f"a batch of {config.batch_size} x {config.block_size}: {1e3 * wait:.3f} ms, {1e5 * wait / rows[0]['ms']:.3f}% of a step of {names[0]}")
    return rows


def bench_update(args, config, device):
    """`x + RMSNorm(g)` against the geodesic update, forward and backward; bandwidth counts x, g, x' and three gradients."""
    rows = []
    for width in (256, 384, 768, 1024, 2048, 4096):
        shape = (2**21 // width, width) if device.type == "cpu" else (2**25 // width, width)
        x, g, h = (torch.randn(shape, device=device, requires_grad=i < 2) for i in range(3))
        norm, scale = nn.RMSNorm(width, eps=1e-6, device=device), torch.ones((), device=device, requires_grad=True)
        bias = torch.zeros((), device=device, requires_grad=True)
        target = torch.empty_like(h)
        updates = {"x + N(g)": lambda x, g: x + norm(g), "geodesic": lambda x, g: geodesic_update(x, g, scale, bias, 0.5)}
        if args.compiled:
            updates |= {f"{name}, compiled": torch.compile(f, dynamic=False) for name, f in updates.items()}

        def run(f):
            f(x, g).backward(h)
            x.grad = g.grad = None
        seconds = paired({name: lambda f=f: run(f) for name, f in updates.items()} | {"copy": lambda: target.copy_(h)}, args.rounds, device)
        limit = 8 * h.numel() / statistics.median(seconds["copy"])      # a copy reads and writes 4 bytes an element
        for name in updates:
            t = statistics.median(seconds[name])
            base = "x + N(g), compiled" if "compiled" in name else "x + N(g)"
            rows.append({"width": width, "update": name, "ms": 1e3 * t, "to x + N(g)": ratio(seconds, name, base),
                         "GB/s": 24 * h.numel() / t / 1e9, "of copy's": 24 * h.numel() / t / limit})
    return rows


@torch.no_grad()
def bench_sample(args, config, device):
    """Greedy tokens after a prompt of one; without the cache every step runs the whole visible text."""
    rows = []
    for context in (64, 256, 1024):
        torch.manual_seed(0)
        model = GPT(GPTConfig(context, 257, config.n_layer, config.n_head, config.n_embd, norm=config.norm)).to(device).eval()
        start = torch.zeros(1, 1, dtype=torch.int64, device=device)

        def uncached():
            visible = start
            for _ in range(args.tokens):
                if visible.size(1) > context:
                    visible = visible[:, -(context // 2):]
                visible = torch.cat((visible, model(visible)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
        seconds = paired({"cached": lambda: model.generate(start, args.tokens, 0), "uncached": uncached}, args.rounds, device, drop=1)
        for name in seconds:
            rows.append({"context": context, "loop": name, "tokens/s": args.tokens / statistics.median(seconds[name]),
                         "speed-up": 1 / ratio(seconds, name, "uncached")})
    return rows


def bench_prepare(args, config, device):
    """data/prepare.py from file to .bin, against tiktoken's encode_ordinary_batch on the text already in memory."""
    rows, text = [], Path(args.file).read_text(encoding="utf-8", errors="replace")
    with tempfile.TemporaryDirectory() as folder:
        data.prepare.HERE = Path(folder)
        for name in ("bytes", "gpt2"):
            tokenizer = data.prepare.get_tokenizer(name)
            pieces = [text[i:i + 2**20] for i in range(0, len(text), 2**20)]
            functions = {"prepare": lambda: data.prepare.prepare([args.file], name, "bench")}
            if name != "bytes":
                functions["tiktoken"] = lambda: tokenizer.encode_ordinary_batch(pieces, num_threads=os.cpu_count())
            seconds = paired(functions, args.rounds, device, drop=1)
            size = os.path.getsize(args.file)
            for what in functions:
                rows.append({"tokenizer": name, "program": what, "MB/s": size / statistics.median(seconds[what]) / 1e6,
                             "rate to tiktoken": ratio(seconds, "tiktoken", what) if name != "bytes" else math.nan})
            rows[-len(functions)]["peak MB"] = in_own_process(prepare_memory, args.file, name, folder)
    return rows


def prepare_memory(file, tokenizer, folder) -> float:
    """The peak MB of preparing a file. The imports, torch's among them, are counted."""
    data.prepare.HERE = Path(folder)
    peak_memory(torch.device("cpu"), reset=True)
    data.prepare.prepare([file], tokenizer, "memory")
    return peak_memory(torch.device("cpu"))


def show(rows: list[dict]):
    """Print rows as a table."""
    names = list(rows[0])
    cells = [names] + [[f"{v:,.3f}" if isinstance(v, float) and abs(v) < 100 else f"{v:,.0f}" if isinstance(v, float) else str(v)
                        for v in (row.get(name, "") for name in names)] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("what", choices=("step", "update", "sample", "prepare"))
    parser.add_argument("file", nargs="?", help="prepare: a text file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1000, help="sample: how many to make")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", metavar="FILE")
    args, rest = parser.parse_known_args()
    if args.what == "prepare" and not args.file:
        parser.error("prepare needs a text file")
    configs = parse_args(rest if "--norm" in rest else ["--norm", *NORMS, *rest])
    config, args.norms = configs[0], [c.norm for c in configs]
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    print(machine(device))
    rows = {"step": bench_step, "update": bench_update, "sample": bench_sample, "prepare": bench_prepare}[args.what](args, config, device)
    show(rows)
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
