"""What a GPU will meet, tested without one: compilation, waits, dtypes, layouts, several processes,
and the scripts that measure.

A compiled run here uses the backend aot_eager: what torch.compile captures, without a C++ compiler.
"""
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import data.prepare
import gpu_report
import train
from helpers import CPU, REPO, at_step, config, refusal, run, saved_step, steps, words
from helpers import datasets, here      # noqa: F401 (fixtures)
from model import GPT, NORMS, GPTConfig, Residual

BATCH = (4, 16)     # of helpers.TINY


# ------------------------------------------------------------------------------------- compilation

@pytest.fixture
def compiled(monkeypatch) -> list[dict]:
    """Every compilation of the test: `train` (with gradients?), and the graph's `inputs` and
    `outputs`. A graph break is an error."""
    found, real = [], torch.compile
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        outputs = [node.meta["example_value"] for node in graph.graph.output_node().args[0]]
        found.append({"train": torch.is_grad_enabled(), "inputs": inputs, "outputs": outputs})
        return aot_eager(graph, inputs)

    def compile(function):
        return real(function, backend=backend, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compile)
    return found


@pytest.mark.parametrize("norm", NORMS)
def test_two_compilations_of_the_loss(norm, compiled, tmp_path):
    """One graph evaluates and one trains, over a whole run: accumulation, a last batch of val that
    is not full, dropout, and both depth profiles, each of which once might have compiled again.

    Only the loss is returned: as an output, the logits were written, kept for the backward pass and
    given a gradient of zeros, 6.6 GB of traffic per batch of `gpt2`. The inputs are contiguous
    tensors of one shape: other strides for training once made its graph symbolic.
    """
    run(tmp_path, "--norm", norm, "--compile", "--gradient_accumulation_steps", 2, "--dropout", 0.1,
        "--eval_iters", 0, "--max_iters", 5, "--n_layer", 1)
    assert [graph["train"] for graph in compiled] == [False, True]
    for graph in compiled:
        loss, = graph["outputs"]
        assert loss.shape == () and loss.dtype == torch.float32
        assert all(isinstance(value, torch.Tensor) for value in graph["inputs"])
        ids = [value for value in graph["inputs"] if value.dtype == torch.int64]
        assert [tuple(value.shape) for value in ids] == [BATCH, BATCH]
        assert all(value.is_contiguous() for value in ids)
        assert all(type(n) is int for value in graph["inputs"] for n in value.shape)


def test_both_kinds_of_batch_have_one_layout():
    """Training's batches were slices of (B, T+1) windows: with other strides than val's, every
    compiled graph that met both was compiled for any stride."""
    ids, c = torch.arange(500, dtype=torch.int16).numpy().view("uint16"), config("--eval_iters", 0)
    batches = [train.get_batch(ids, c, 0, CPU), *(pair[:2] for pair in train.val_batches(ids, c))]
    for tensor in sum(batches, ()):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (BATCH, (16, 1), torch.int64)


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 20 bytes")])
def test_out_of_memory_in_the_first_compiled_call(error, tmp_path, monkeypatch):
    """It was called a missing compiler: the advice must be a smaller batch."""
    def fail(*args):
        raise error
    monkeypatch.setattr(train, "evaluate", fail)
    monkeypatch.setattr(sys, "argv", ["train.py", "--dataset", "mine", "--device", "cpu",
                                      "--compile", "--out_dir", str(tmp_path)])
    line = refusal(train.run_command)
    assert "--batch_size" in line and "compile" not in line


# -------------------------------------------------------------------------------- the loop's waits

class HostReads(TorchDispatchMode):
    """Counts, for each step of the run, the operations that wait for a GPU to answer."""
    names = ("local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique2")

    def __init__(self):
        super().__init__()
        self.step, self.reads = 0, {}

    def count(self, name: str):
        self.reads.setdefault(self.step, []).append(name)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__.lstrip("_")
        if name in self.names:
            self.count(name)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("norm", NORMS)
def test_nothing_is_read_back_between_log_lines(norm, tmp_path, monkeypatch):
    """One `.item()` in the loop would make every step wait for the GPU. With float16, whose scaler
    and skipped steps are decided on the device, clipping, and accumulation."""
    reads = HostReads()
    at_step(monkeypatch, lambda step, config: setattr(reads, "step", step))

    # On a CPU these copy nothing, so no operation is dispatched. `to` is counted with a name, as
    # in `to("cpu")`: the scaler moves its numbers to each gradient's device.
    for name in ("tolist", "numpy", "cpu", "to"):
        def method(tensor, *args, name=name, real=getattr(torch.Tensor, name), **kwargs):
            if name != "to" or args and isinstance(args[0], str):
                reads.count(name)
            return real(tensor, *args, **kwargs)
        monkeypatch.setattr(torch.Tensor, name, method)
    with reads:
        run(tmp_path, "--norm", norm, "--dtype", "float16", "--gradient_accumulation_steps", 2,
            "--max_iters", 9, "--eval_interval", 100, "--log_interval", 4, "--dropout", 0.1)
    looked = {1, 4, 8, 9}
    assert set(reads.reads) - {0} == looked, reads.reads
    assert reads.reads[4] == ["tolist"]         # all numbers of a log line in one


# -------------------------------------------------------------------------- dtypes and arithmetic

@pytest.mark.parametrize("norm", NORMS)
def test_what_is_half_precision_and_what_is_not(norm):
    """Under autocast every matrix product is bfloat16, what enters a sublayer's join float32, and
    so are gradients and the reported loss: all four alike, or the table compares dtypes."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=70, n_layer=2, n_head=2, n_embd=32, norm=norm))
    products, joined = set(), set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda m, x, out: products.add(out.dtype))
        if isinstance(module, Residual):
            module.f.register_forward_hook(lambda m, x, out: joined.update({x[0].dtype, out.dtype}))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    gradients = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad.dtype for p in model.parameters()))
    autocast = torch.autocast("cpu", torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batch = torch.randint(70, (2, *BATCH)).unbind(0)
    loss, norm = train.training_step(model, optimizer, scaler, [batch, batch], autocast, 1.0)
    assert products == {torch.bfloat16} and joined == {torch.float32}
    assert {*gradients, loss.dtype, norm.dtype} == {torch.float32}


def test_positions_stay_apart_in_bfloat16():
    """A GPT built while bfloat16 was torch's default dtype had 513 distinct positions of 1,024."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = GPT(GPTConfig(block_size=1024, vocab_size=70, n_layer=1, n_head=2, n_embd=128))
        model.loss(*torch.randint(70, (2, 1, 20))).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.wte.weight.dtype == torch.bfloat16
    assert len(model.rotary[:, :, 0].transpose(0, 1).unique(dim=0)) == 1024


def test_no_warnings(datasets, tmp_path):
    """Any warning, of importing train.py or of a run, is an error here: torch 2.9 and 2.10 warn of
    one of the switches for TF32. The switch is for GPUs, and must leave a CPU's float32 alone."""
    program = ("import train, torch; train.main(train.parse_args()); "
               "print('CPU:', torch.backends.mkldnn.matmul.fp32_precision)")
    few = {"OMP_NUM_THREADS": "1", "NANONORM_DATA": str(datasets)}
    flags = ("--dataset mine --device cpu --norm pre geo --n_layer 1 --n_embd 16 --block_size 16 "
             "--max_iters 3 --warmup_iters 1 --log_interval 1 --eval_iters 1")
    done = subprocess.run([sys.executable, "-W", "error", "-c", program, *flags.split(),
                           "--out_dir", tmp_path], cwd=REPO, env=os.environ | few,
                          capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "pip install matplotlib" not in line]
    assert (done.returncode, said) == (0, [])
    assert "CPU: none" in done.stdout and "nan" not in done.stdout


# ----------------------------------------------------------------------------------- a slow machine

def test_log_line_before_there_is_a_speed(tmp_path, capsys):
    """On CUDA the clock starts after step 1, which compiles: its line once read "nan tokens/s"."""
    train.say_progress(tmp_path / "geo", config(), {"step": 1, "train_loss": 4.2,
                                                    "learning_rate": 1e-3})
    line = capsys.readouterr().out
    assert "train 4.2000" in line and "nan" not in line and "tokens/s" not in line


def test_checkpoints_are_ten_minutes_apart(tmp_path, monkeypatch):
    """500 steps of `gpt2` take hours on a slow card, and a machine that is lent may go before."""
    clock, saved = [0.0], []

    def later(step, config):
        path = tmp_path / "geo" / "ckpt.pt"
        saved.append(saved_step(path.parent) if path.exists() else 0)
        clock[0] += 250.0
    at_step(monkeypatch, later)
    monkeypatch.setattr(train.time, "perf_counter", lambda: clock[0])
    run(tmp_path, "--eval_interval", 100, "--log_interval", 1)
    assert steps(tmp_path / "geo") == list(range(1, 11))
    assert saved[2:] == [0 if step < 3 else (step - 1) // 2 * 2 for step in range(3, 11)]


# -------------------------------------------------------------------------------- several processes

SHARDED = """
import runpy, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from model import GPT, NORMS, GPTConfig

example, out = sys.argv[1:]
end, dist.destroy_process_group = dist.destroy_process_group, print     # one group serves both
runpy.run_path(example, run_name="__main__")

mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for norm in NORMS:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=32, norm=norm))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-2)
    for step in range(3):
        ids = torch.randint(64, (2, 2, 4, 16), generator=torch.Generator().manual_seed(step))
        model.loss(*ids[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(weights, f"{out}/{norm}.pt")
end()
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The folder in which two gloo processes ran the DDP example, and then sharded all four."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "text.txt").write_text(words(5000), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.prepare, "DATA_DIR", folder / "data")
        data.prepare.prepare([str(folder / "text.txt")], name="stdlib")
    (folder / "sharded.py").write_text(SHARDED, encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NANONORM_DATA": str(folder / "data"),
                                "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           "--nproc_per_node", "2", "sharded.py", REPO / "tests/ddp_example.py",
                           folder], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_ddp_example_is_one_process_on_the_joined_batch(two_processes, monkeypatch):
    """Two processes for 10 steps, against one that sees both batches at once."""
    monkeypatch.undo()      # the example has the real preset
    monkeypatch.setattr(data.prepare, "DATA_DIR", two_processes / "data")
    c = train.Config(norm="geo", dataset="stdlib", learning_rate=1e-3)
    meta, ids = data.prepare.load(c.dataset, c.block_size)
    torch.manual_seed(c.seed)
    model = GPT(train.gpt_config(c, meta["vocab_size"]))
    optimizer = torch.optim.AdamW(model.param_groups(c.weight_decay), lr=c.learning_rate)
    for step in range(10):
        batches = [train.get_batch(ids["train"], c, 2 * step + i, CPU) for i in range(2)]
        model.loss(*(torch.cat(part) for part in zip(*batches))).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.load(two_processes / "ddp.pt", weights_only=True)
    for name, p in model.state_dict().items():
        assert (weights[name] - p).abs().max() < 2e-4, name


@pytest.mark.parametrize("norm", NORMS)
def test_sharded_is_one_process_on_the_joined_batch(norm, two_processes):
    """`fully_shard` refused geo, whose scalars had no dimension to shard."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=32, norm=norm))
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-2)
    for step in range(3):
        ids = torch.randint(64, (2, 2, 4, 16), generator=torch.Generator().manual_seed(step))
        model.loss(*ids.transpose(0, 1).flatten(1, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.load(two_processes / f"{norm}.pt", weights_only=True)
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert (weights[name] - p).abs().max() < 2e-4, name


# --------------------------------------------------------------------------------------- measuring

def strict(path) -> dict:
    """A JSON file in which NaN and Infinity are errors."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=int)


def test_bench(tmp_path, monkeypatch, capsys):
    """Each subject runs, prints its rows, and leaves them in a file after each one."""
    toy = "--n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --batch_size 2 --device cpu"
    monkeypatch.setattr(bench, "WIDTHS", (16,))
    monkeypatch.setattr(bench, "NUMBERS", {"cpu": 1024})
    monkeypatch.setattr(bench, "TOKENIZERS", ("bytes",))
    monkeypatch.setattr(bench, "memory_in_a_child", lambda *args: bench.first_steps(*args)[2])
    (tmp_path / "text.txt").write_text(words(2000), encoding="utf-8")
    rows = {}
    for command in (f"step --norm pre geo {toy}", "update", f"sample --tokens 20 {toy}",
                    f"prepare {tmp_path / 'text.txt'}"):
        out = tmp_path / "out.json"
        bench.main([*command.split(), "--rounds", "1", "--no-compiled", "--json", str(out)])
        rows[command.split()[0]] = strict(out)["rows"]
    step = rows["step"][:3]
    assert [row["run"] for row in step] == ["pre", "geo", "plain nanoGPT"]
    assert step[0]["ratio"] == 1 and all(row["ms"] > 0 for row in step)
    assert [len(rows[name]) for name in ("step", "update", "sample", "prepare")] == [4, 2, 2, 1]
    assert capsys.readouterr().out.count("plain nanoGPT") == 2


@pytest.mark.parametrize("way", ["exit", "hang"])
def test_bench_does_not_wait_for_a_dead_child(way, monkeypatch):
    """It once waited for ever for the answer of a child that had run out of memory."""
    class Process:
        exitcode, killed = 1 if way == "exit" else None, []

        def __init__(self, **kwargs):
            pass

        def start(self):
            pass

        def join(self, seconds):
            assert seconds == bench.CHILD_SECONDS

        def kill(self):
            self.killed.append(self)

    context = bench.multiprocessing.get_context("spawn")
    monkeypatch.setattr(type(context), "Process", Process)
    assert "exit code" in refusal(bench.memory_in_a_child) and Process.killed


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_gpu_report_ends_a_part_that_takes_too_long(tmp_path, monkeypatch, capsys):
    """It is told to end, so that it can save; if it does not, it is killed. What it printed until
    then is shown and kept."""
    monkeypatch.setattr(gpu_report, "GRACE", 0.5)
    patient = ("import signal, sys, time\n"
               "signal.signal(signal.SIGTERM, lambda *args: {})\n"
               "print('a row'); time.sleep(30)")
    begin = time.monotonic()
    for action in ("(print('saved'), sys.exit(1))", "print('deaf')"):
        words = ["-c", patient.format(action)]
        assert "lack of time" in gpu_report.run_part("slow", 1.5, words, tmp_path)
        text = (tmp_path / "slow.txt").read_text(encoding="utf-8")
        assert text.split() == ["a", "row", "saved" if "saved" in action else "deaf"]
    assert time.monotonic() - begin < 20

    # A part that ends by itself says how; its last words are shown, too.
    words = ["-c", "print('last words'); raise SystemExit(3)"]
    assert "exit 3" in gpu_report.run_part("failed", 9, words, tmp_path)
    out = capsys.readouterr().out
    assert "a row\nsaved" in out and "\nlast words" in out
