"""Train one GPT on several GPUs, or on several CPU processes, with torch's own engine.

    python -m torch.distributed.run --nproc_per_node 2 tests/ddp_example.py

Copy it and change it: `train.py` stays on one GPU. Each of the N processes takes every N-th batch,
so N processes are `--gradient_accumulation_steps N` of one. It saves the weights as ddp.pt.
"""
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parent.parent))    # where train.py is
from data.prepare import load
from model import GPT
from train import Config, get_batch, gpt_config


class Loss(torch.nn.Module):
    """model.loss as a module: DistributedDataParallel, like torch.compile, needs only the loss."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.loss(idx, targets)


def main():
    # torchrun says which process this is: `rank` of `world` in all, `local` on this machine.
    local, device = int(os.environ["LOCAL_RANK"]), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)       # else every process would also use GPU 0
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    # One process prepares the dataset if it is missing; the others wait, and then read it.
    config = Config(norm="geo", dataset="stdlib", learning_rate=1e-3)
    if rank > 0:
        dist.barrier()
    meta, data = load(config.dataset, config.block_size)
    if rank == 0:
        dist.barrier()

    # The same seed everywhere: all processes start with the same weights.
    torch.manual_seed(config.seed)
    model = GPT(gpt_config(config, meta["vocab_size"])).to(device)
    ddp = DistributedDataParallel(Loss(model))
    optimizer = torch.optim.AdamW(model.param_groups(config.weight_decay), lr=config.learning_rate)

    # The backward pass averages the gradients over the processes.
    for step in range(10):
        loss = ddp(*get_batch(data["train"], config, step * world + rank, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if rank == 0:
        print(f"loss of the last batch: {loss.item():.4f} nats/token")
        torch.save(model.state_dict(), "ddp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
