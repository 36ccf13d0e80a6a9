"""Sample text from a trained run, printed as it is made.

    python sample.py --out_dir out/geo --start "def " --num_samples 3
    python sample.py --out_dir out/post --start FILE:prompt.txt --temperature 0

The model is best.pt of the run's folder, else ckpt.pt; the checkpoint names its tokenizer, so the dataset is not needed.
"""
import argparse
import codecs
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken
import torch

from data.prepare import encode, get_tokenizer
from model import GPT, GPTConfig
from train import load_checkpoint


def load_model(folder: Path) -> tuple[GPT, tiktoken.Encoding]:
    """The run's model, ready to sample, and its tokenizer; what is missing or damaged ends the program with one line."""
    path = next((folder / name for name in ("best.pt", "ckpt.pt") if (folder / name).exists()), None)
    if path is None:
        runs = ", ".join(sorted(str(run.parent) for run in folder.glob("*/ckpt.pt")))
        sys.exit(f"--out_dir {folder}: no best.pt or ckpt.pt in it; " + (f"runs are in {runs}" if runs else "train one with train.py"))
    state = load_checkpoint(path)
    try:
        model = GPT(GPTConfig(**state["model_config"]))
        model.load_state_dict(state["model"])
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        sys.exit(f"{path} does not fit this model.py ({type(error).__name__}): sample with the program that trained it")
    return model.eval(), get_tokenizer(state["tokenizer"])


def as_text(ids: Iterable[int], tokenizer: tiktoken.Encoding) -> Iterator[str]:
    """Decode ids as they come, holding back the bytes of an unfinished character. Joined, it is what decoding all at
    once gives; bytes that are no UTF-8, a last character cut short among them, become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        try:
            yield decoder.decode(tokenizer.decode_single_token_bytes(i))
        except KeyError:    # some vocabularies have ids without a token, and a young model may choose one
            continue
    yield decoder.decode(b"", final=True)


def main():
    parser = argparse.ArgumentParser(description="Sample text from a trained run.", allow_abbrev=False)
    parser.add_argument("--out_dir", default="out/geo", help="the run's folder (default: out/geo)")
    parser.add_argument("--start", default="\n", help="the prompt, or FILE:path to read it from a file; empty starts from the end-of-text token (default: a newline)")
    parser.add_argument("--num_samples", type=int, default=1, help="how many texts (default: 1)")
    parser.add_argument("--max_new_tokens", type=int, default=500, help="tokens made for each (default: 500)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy, 1 the model's own distribution (default: 0.8)")
    parser.add_argument("--top_k", type=int, help="choose among the k likeliest tokens only (default: all)")
    parser.add_argument("--seed", type=int, default=1337, help="same seed, same text (default: 1337)")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}; see --help\n")
    args = parser.parse_args()
    for name, low in (("num_samples", 1), ("max_new_tokens", 0), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and not low <= value < 2**63:
            parser.error(f"--{name} must be at least {low} and finite, not {value}")
    prompt = os.fsencode(args.start)        # the very bytes of the command line, UTF-8 or not
    if args.start.startswith("FILE:"):
        try:
            prompt = Path(args.start.removeprefix("FILE:")).read_bytes()
        except OSError as error:
            sys.exit(f"--start {args.start}: {error.strerror}")

    model, tokenizer = load_model(Path(args.out_dir))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    torch.manual_seed(args.seed)
    ids = encode(tokenizer, prompt)
    idx = torch.tensor([ids or [tokenizer.eot_token]], device=device)       # (1, T)
    for sample in range(args.num_samples):
        if sample:
            print("\n---------------")
        new = (token.item() for token in model.stream(idx, args.max_new_tokens, args.temperature, args.top_k))
        for text in as_text((i for part in (ids, new) for i in part), tokenizer):
            print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    for console in filter(None, (sys.stdout, sys.stderr)):
        console.reconfigure(errors="replace")   # what a console cannot show is no reason to stop
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:     # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        sys.exit(f"sample.py: {error}")
