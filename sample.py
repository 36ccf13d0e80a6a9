"""Sample text from a trained run, printed as it is made.

    python sample.py --out_dir out/geo --start "def " --num_samples 3
    python sample.py --out_dir out/post --start FILE:prompt.txt --temperature 0
    python sample.py --out_dir out/pre --start "def " --stop return

The model is best.pt of the run's folder, else ckpt.pt. The checkpoint names its tokenizer, so the
dataset is not needed. `sample_next` chooses one token, and `generate_tokens` repeats that.

Shapes: B batch, T tokens, V = vocab_size.
"""
import codecs
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice, takewhile
from pathlib import Path

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor

from data import Parser, command
from data.prepare import encode, get_tokenizer
from data.runs import load_checkpoint
from model import GPT, GPTConfig


def sample_next(logits: Tensor, temperature: float, top_k: int | None,
                generator: torch.Generator | None) -> Tensor:
    """One token id per row, drawn from softmax(logits / temperature): (B, V) -> (B, 1).

    temperature: 0, like anything below 1e-6, takes the likeliest id whatever the generator.
    top_k: draw from the k likeliest ids only; None, like more than V, draws from all of them.
    generator: the only source of randomness. Without one a draw raises ValueError: torch's global
    random state is left alone, so that sampling during a training run does not change that run.
    """
    V = logits.size(-1)
    k = V if top_k is None else min(top_k, V)
    if temperature < 1e-6 or k == 1:
        return logits.argmax(dim=-1, keepdim=True)
    if generator is None:
        raise ValueError("drawing a token needs a torch.Generator; only temperature 0 does not")

    largest, ids = logits.topk(k)                                       # (B, k) each
    probabilities = F.softmax(largest / temperature, dim=-1)
    choice = torch.multinomial(probabilities, 1, generator=generator)   # (B, 1), in 0..k-1
    return ids.gather(1, choice)


@torch.no_grad()
def generate_tokens(model: GPT, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
                    top_k: int | None = None,
                    generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """Yield the tokens that continue idx, (B, T), as they are made: one (B, 1) tensor of ids each.

    Call `model.eval()` first. temperature, top_k: see `sample_next`. generator: on the device of
    idx; None is a new one with seed 0. The same seed gives the same tokens.

    Raises ValueError for an empty prompt, an id outside the vocabulary, a temperature that is
    negative or nan, and a top_k below 1; like any generator, when the first token is asked for.
    """
    block_size, vocab_size = model.config.block_size, model.config.vocab_size
    if idx.size(1) < 1:
        raise ValueError("the prompt must hold at least one token")
    if idx.min() < 0 or idx.max() >= vocab_size:
        raise ValueError(f"the prompt's ids must be in 0..{vocab_size - 1}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or above, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    if generator is None:
        generator = torch.Generator(idx.device).manual_seed(0)

    # The window. The model sees the last block_size tokens of the prompt. What it sees grows with
    # each new token until it is longer than block_size; then only its last half is kept, and it
    # grows again. The cache holds the keys and values of its first `cached` tokens, so almost
    # every step runs one token through the model, however long the text.
    visible, cached = idx[:, -block_size:], 0
    cache = model.new_cache(idx.size(0))
    for _ in range(max_new_tokens):
        if visible.size(1) > block_size:
            visible, cached = visible[:, -max(1, block_size // 2):], 0
        logits, _ = model(visible[:, cached:], cache=cache, start=cached)       # (B, 1, V)
        cached = visible.size(1)
        token = sample_next(logits[:, -1], temperature, top_k, generator)       # (B, 1)
        visible = torch.cat((visible, token), dim=1)
        yield token


def generate(model: GPT, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
             top_k: int | None = None, generator: torch.Generator | None = None) -> Tensor:
    """idx, (B, T), and its continuation: (B, T + max_new_tokens). See `generate_tokens`."""
    tokens = generate_tokens(model, idx, max_new_tokens, temperature, top_k, generator)
    return torch.cat((idx, *tokens), dim=1)


def find_checkpoint(folder: Path) -> Path:
    """best.pt of a run's folder, else its ckpt.pt; ends with one line where there is neither."""
    names = ("best.pt", "ckpt.pt")
    for name in names:
        if (folder / name).exists():
            return folder / name
    above = folder if folder.is_dir() else folder.parent
    runs = {str(path.parent) for name in names for path in above.glob(f"*/{name}")}
    way_out = f"runs are in {', '.join(sorted(runs))}" if runs else "train one with train.py"
    sys.exit(f"--out_dir {folder}: no best.pt or ckpt.pt in it; {way_out}")


def load_model(folder: Path,
               device: torch.device | str = "cpu") -> tuple[GPT, tiktoken.Encoding]:
    """The run's model, ready to sample on the device, and its tokenizer.

    A checkpoint that is missing, damaged, or of no use ends the program with one line.
    """
    path = find_checkpoint(folder)
    state = load_checkpoint(path, "delete it to sample from ckpt.pt, or train again")
    if state["tokenizer"] not in ("bytes", *tiktoken.list_encoding_names()):
        sys.exit(f"{path} needs a tokenizer that tiktoken does not have: {state['tokenizer']!r}")
    tokenizer = get_tokenizer(state["tokenizer"])

    # A checkpoint of a fork, or one that was edited, fails here in many ways.
    try:
        model = GPT(GPTConfig(**state["model_config"]))
        model.load_state_dict(state["model"])
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(f"{path} does not fit this model.py ({type(error).__name__}): "
                 "sample with the program that trained it")

    # A model that loads can still be of no use.
    if not all(weight.isfinite().all() for weight in model.parameters()):
        sys.exit(f"{path} holds weights that are not finite: train again at a lower learning rate")
    if tokenizer.n_vocab > model.config.vocab_size:
        sys.exit(f"{path} holds a model of {model.config.vocab_size} token ids, too few for its "
                 f"tokenizer {tokenizer.name}, which has {tokenizer.n_vocab}")
    return model.to(device).eval(), tokenizer


def as_text(ids: Iterable[int], tokenizer: tiktoken.Encoding) -> Iterator[str]:
    """Decode ids as they come: one piece of text per id, and a last one.

    The bytes of an unfinished character wait for the rest of it. Joined, the pieces are what
    decoding all ids at once gives: bytes that are not UTF-8, such as a character cut short at the
    end, become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        try:
            raw = tokenizer.decode_single_token_bytes(i)
        except KeyError:    # some vocabularies have gaps, and a young model may choose one
            raw = b""
        yield decoder.decode(raw)
    yield decoder.decode(b"", final=True)


def before_stop(pieces: Iterable[str], stop: str) -> Iterator[str]:
    """The text of the pieces until `stop`, without it. No more pieces are read than that takes.

    Text that could be the beginning of `stop` waits until the next pieces decide.
    """
    held = ""
    for piece in pieces:
        held += piece
        if stop in held:
            yield held[:held.index(stop)]
            return
        wait = min(len(held), len(stop) - 1)
        while not stop.startswith(held[len(held) - wait:]):
            wait -= 1
        yield held[:len(held) - wait]
        held = held[len(held) - wait:]
    yield held


def sample_text(model: GPT, tokenizer: tiktoken.Encoding, ids: list[int],
                generator: torch.Generator, args) -> Iterator[str]:
    """One sample, piece by piece: the prompt, whose tokens are ids, and its continuation."""
    # An empty prompt starts from the end-of-text token, which is not printed.
    context = ids if ids else [tokenizer.eot_token]
    idx = torch.tensor([context], device=generator.device)      # (1, T)
    tokens = generate_tokens(model, idx, args.max_new_tokens, args.temperature, args.top_k,
                             generator)

    # Prompt and continuation are decoded together: a character may begin in one and end in the
    # other. But only the continuation can contain the text to stop at.
    new = takewhile(lambda i: i != tokenizer.eot_token, (token.item() for token in tokens))
    pieces = as_text(chain(ids, new), tokenizer)
    yield from islice(pieces, len(ids))
    if args.stop is not None:
        pieces = before_stop(pieces, args.stop)
    yield from pieces


def parse_args(argv: list[str] | None):
    """The flags, checked; a wrong one ends the program with one line and exit code 2."""
    parser = Parser(prog="sample.py", description="Sample text from a trained run.")
    add = parser.add_argument
    add("--out_dir", default="out/geo", help="the run's folder (default: out/geo)")
    add("--start", default="\n",
        help="prompt, or FILE:path; empty starts from the end-of-text token (default: a newline)")
    add("--num_samples", type=int, default=1, help="number of samples (default: 1)")
    add("--max_new_tokens", type=int, default=500,
        help="most new tokens per sample; end-of-text ends it before that (default: 500)")
    add("--stop", metavar="TEXT",
        help="end a sample before TEXT, if it comes after the prompt; TEXT itself is not printed")
    add("--temperature", type=float, default=0.8,
        help="0 is greedy, 1 is the model's own distribution (default: 0.8)")
    add("--top_k", type=int, help="draw from the k likeliest tokens only (default: all)")
    add("--seed", type=int, default=1337, help="same seed, same text (default: 1337)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto is cuda where there is a GPU (default: auto)")
    args = parser.parse_args(argv)

    lowest = {"num_samples": 1, "max_new_tokens": 0, "temperature": 0, "top_k": 1, "seed": 0}
    for name, low in lowest.items():
        value = getattr(args, name)
        if value is not None and not low <= value < 2**63:
            parser.error(f"--{name} must be at least {low} and finite, not {value}")
    if args.stop == "":
        parser.error("--stop must not be empty")
    return args


def read_prompt(start: str) -> bytes:
    """The very bytes of --start, UTF-8 or not, or those of the file that FILE:path names."""
    if not start.startswith("FILE:"):
        return os.fsencode(start)
    try:
        return Path(start.removeprefix("FILE:")).read_bytes()
    except OSError as error:
        sys.exit(f"--start {start}: {error.strerror}")


def main(argv: list[str] | None = None):
    """Print samples as the flags ask; argv is a list of them, or None for the command line's."""
    args = parse_args(argv)
    if args.stop is not None:   # written as the printed text is, also where it is not UTF-8
        args.stop = os.fsencode(args.stop).decode("utf-8", "replace")
    prompt = read_prompt(args.start)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: this torch sees no CUDA GPU; use --device cpu")

    # The generator is on the model's device; samples draw from it one after another.
    use_cuda = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    model, tokenizer = load_model(Path(args.out_dir), device)
    generator = torch.Generator(device).manual_seed(args.seed)

    # Each piece is shown at once, also where the output is a file or a pipe.
    ids = encode(tokenizer, prompt)
    for sample in range(args.num_samples):
        if sample:
            print("\n---------------")
        for text in sample_text(model, tokenizer, ids, generator, args):
            print(text, end="", flush=True)
    print(flush=True)


if __name__ == "__main__":
    command(main)
