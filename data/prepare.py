"""Turn text into token files that train.py reads: data/NAME/{train.bin,val.bin,meta.json}.

    python data/prepare.py stdlib                           # Python's own source text, no network
    python data/prepare.py book.txt notes/ --name mine      # your files and folders
    python data/prepare.py notes/ --val notes/last.txt      # validation text from its own file
    python data/prepare.py shakespeare                      # 1 MB, downloaded
    python data/prepare.py fineweb --shards 10              # 1B GPT-2 tokens, 2 GB, downloaded

The .bin files are raw token ids, little-endian, in the smallest unsigned type that holds the
vocabulary. The environment variable NANONORM_DATA names a folder to use instead of data/.
"""
import codecs
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import urllib.request
from array import array
from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))     # for `python data/prepare.py`
from data import Parser, command

DATA_DIR = Path(os.environ.get("NANONORM_DATA") or Path(__file__).parent).resolve()
BAR = {"unit": "B", "unit_scale": True, "disable": None if sys.stderr else True}   # on terminals
META = {"tokenizer": str, "vocab_size": int, "dtype": str, "source": str, "train_tokens": int,
        "val_tokens": int, "train_bytes": int, "val_bytes": int, "largest_id": int,
        "unigram_loss": float, "sha256": str}       # sha256: of train.bin followed by val.bin
TEXT = ".c .cpp .csv .go .h .html .java .js .json .md .py .rs .rst .sh .tex .ts .txt".split()
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
               "input.txt")
SHAKESPEARE_SIZE = 1_115_394
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
CHUNK = 1 << 18     # bytes read and encoded at a time


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """"bytes" (256 bytes and an end-of-text token, nothing to fetch) or one of tiktoken's, which
    ends the program with one line if it cannot be fetched."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        sys.exit(f"the vocabulary of tokenizer {name} could not be fetched "
                 f"({type(error).__name__}): set TIKTOKEN_CACHE_DIR to a folder that holds it, or "
                 "use --tokenizer bytes with stdlib or your own text, which needs no download")


def encode(tokenizer: tiktoken.Encoding, raw: bytes) -> list[int]:
    """Token ids of a prompt. "bytes" keeps invalid UTF-8; the others read it as U+FFFD."""
    if tokenizer.name == "bytes":
        return list(raw)
    return tokenizer.encode_ordinary(raw.decode("utf-8", "replace"))


SAFE = re.compile(r"\S(?= )|[^\W_](?=[\r\n,.，。])")  # the punctuation is for text without spaces


def safe_cut(text: str, start: int = 0) -> int:
    """The last place after `start` where cutting the text changes no token, or 0 if there is none.

    That is before a space that follows a non-space, and before a line's end, comma or full stop
    that follows a letter or digit. BPE never merges across the pieces that a tokenizer's regular
    expression finds, and in all of tiktoken's a piece ends there: within a piece these may be
    followed by letters but never preceded by them, and punctuation is followed by newlines only.
    They look ahead only in white space, and never behind. A cut after the space would be wrong:
    in "a  b" the pieces are "a", " ", " b", but "a  " by itself has the piece "  ".
    """
    # Most text has a cut near its end, where it is found quickly.
    for begin in (max(start, len(text) - 512), start):
        ends = [match.end() for match in SAFE.finditer(text, begin)]
        if ends:
            return ends[-1]
    return 0


def place_for(name: str) -> Path:
    """The folder to write dataset `name` to. If data/NAME is a link, it is the link's target."""
    if not re.fullmatch(r"[\w-][\w.-]{,99}", name) or name.lower() == "downloads":
        sys.exit(f"{name!r} cannot name a dataset: give a --name of up to 100 letters, digits, "
                 "'_', '-' and '.'")
    link = DATA_DIR / name
    folder = Path(os.path.realpath(link))   # Path.resolve would raise on a link to itself
    if link.is_symlink() and not folder.exists():
        sys.exit(f"{link} is a link to {folder}, which is missing: make it, or remove the link")

    # Anything else in the folder would be lost.
    known = {"train.bin", "val.bin", "meta.json"}
    if os.path.ismount(folder) or folder.exists() and (
            not folder.is_dir() or {file.name for file in folder.iterdir()} - known):
        sys.exit(f"{folder} is a mount point or holds more than a dataset: choose a folder in it, "
                 "or another --name")
    return folder


def is_dead(pid: int) -> bool:
    """Whether no other process has this id."""
    try:
        if os.name != "nt":     # Windows cannot tell, and would interrupt it
            os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return pid == os.getpid()


class Writer:
    """Writes a dataset beside its folder, then replaces the folder: all of it, or nothing.

    In `with Writer(...) as writer`, `put` the train split's ids and then the val split's.
    """

    def __init__(self, folder: Path, tokenizer: tiktoken.Encoding, source: str):
        self.folder = folder
        self.unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        self.dtype = np.min_scalar_type(tokenizer.n_vocab - 1)
        self.counts = {s: np.zeros(tokenizer.n_vocab, np.int64) for s in ("train", "val")}
        self.sha256 = hashlib.sha256()
        self.meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.n_vocab,
                     "dtype": self.dtype.name, "train_bytes": 0, "val_bytes": 0,
                     # A file's name may be no UTF-8, but JSON is.
                     "source": source.encode("utf-8", "replace").decode("utf-8")}

    def __enter__(self):
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.clear_leftovers()
        self.unfinished.mkdir()
        self.files = {s: open(self.unfinished / f"{s}.bin", "wb") for s in ("train", "val")}
        return self

    def clear_leftovers(self):
        """Remove the .part and .old folders that dead processes left beside the folder."""
        pattern = re.compile(rf"\.{re.escape(self.folder.name)}\.(\d{{1,9}})\.(old|part)")
        for path in list(self.folder.parent.iterdir()):
            match = pattern.fullmatch(path.name)
            if match and is_dead(int(match[1])):
                shutil.rmtree(path, ignore_errors=True)

    def put(self, split: str, ids, n_bytes: int):
        """Append ids that stand for n_bytes bytes of text."""
        ids = np.asarray(ids, dtype=self.dtype)
        raw = ids.astype(self.dtype.newbyteorder("<")).tobytes()
        self.files[split].write(raw)
        self.sha256.update(raw)
        self.counts[split] += np.bincount(ids, minlength=len(self.counts[split]))
        self.meta[f"{split}_bytes"] += n_bytes

    def finish(self):
        """Write meta.json, and move the dataset to its place.

        unigram_loss is the cross-entropy, in nats/token, of val's tokens under train's token
        frequencies, with each id of the vocabulary counted once more. It is 0 if val is empty.
        """
        train, val = self.counts["train"], self.counts["val"]
        frequency = (train + 1) / (train + 1).sum()
        self.meta |= {"train_tokens": int(train.sum()), "val_tokens": int(val.sum()),
                      "largest_id": int(np.flatnonzero(train + val).max(initial=0)),
                      "unigram_loss": float((val * -np.log(frequency)).sum() / max(val.sum(), 1)),
                      "sha256": self.sha256.hexdigest()}
        text = json.dumps(self.meta, indent=1, allow_nan=False)
        (self.unfinished / "meta.json").write_text(text, encoding="utf-8")

        # A folder that holds files cannot be replaced in one step.
        old = self.unfinished.with_suffix(".old")
        if self.folder.exists():
            os.rename(self.folder, old)
        os.rename(self.unfinished, self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def __exit__(self, error, *_):
        try:
            for file in self.files.values():
                file.close()
            if error is None:
                self.finish()
        finally:
            shutil.rmtree(self.unfinished, ignore_errors=True)


def load(dataset: str, block_size: int) -> tuple[dict, dict[str, np.ndarray]]:
    """meta.json of data/DATASET, and the ids of "train" and "val", which stay on disk until used.

    stdlib is prepared if it is missing. Anything else that is missing, damaged, or too short for
    a window of block_size + 1 tokens ends the program with one line.
    """
    folder, data = DATA_DIR / dataset, {}
    known = dataset in ("stdlib", "shakespeare", "fineweb")
    remedy = f"python data/prepare.py {dataset if known else 'FILES --name ' + dataset}"
    if not os.path.isdir(folder):   # Path.is_dir raises if the name is too long
        if dataset != "stdlib":
            sys.exit(f"there is no dataset {folder}: make it with `{remedy}`")
        print(f"preparing {folder}, the source text of this Python's library", flush=True)
        prepare(["stdlib"])

    # Each value is checked. Neither True nor 257.0 is an int here.
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for key, kind in META.items():
            value = meta.get(key)
            if type(value) is not kind or kind is not str and not 0 <= value < float("inf"):
                raise ValueError(f"meta.json has {key} {value!r:.40}")
        dtype = np.min_scalar_type(meta["vocab_size"] - 1).newbyteorder("<")
        if (dtype.name != meta["dtype"] or meta["largest_id"] >= meta["vocab_size"]
                or meta["val_bytes"] == 0):
            raise ValueError("meta.json contradicts itself")

        train, val = meta["train_tokens"], meta["val_tokens"]
        if min(train, val) <= block_size:
            sys.exit(f"{folder} is too short: train has {train} tokens and val {val}, but one "
                     f"window takes {block_size + 1}; prepare more text or lower --block_size")

        # The ids are not read here: they may be gigabytes.
        for split, size in ("train", train), ("val", val):
            path = folder / f"{split}.bin"
            if path.stat().st_size != size * dtype.itemsize:
                raise ValueError(f"{path.name} does not hold {size} tokens")
            data[split] = np.memmap(path, dtype, "r")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        sys.exit(f"{folder} is damaged or of an older version ({error}): make it again with "
                 f"`{remedy}`")
    return meta, data


def find_files(sources: list[str]) -> list[Path]:
    """The files you name, and the text files in the folders you name, without hidden ones."""
    files = []
    for source in map(Path, sources):
        if source.is_dir():
            found = [f for f in source.rglob("*") if f.suffix.lower() in TEXT and f.is_file()
                     and not any(part.startswith(".") for part in f.relative_to(source).parts)]
            files += sorted(found, key=Path.as_posix)
        elif source.is_file():
            files.append(source)
        else:
            sys.exit(f"{source}: no such file or folder, or a pipe; give text files and folders, "
                     "or one of stdlib, shakespeare and fineweb")
    return files


def library_files(val_fraction: float) -> tuple[list[Path], list[Path]]:
    """The train and val files of Python's standard library without its tests, both in order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if not NOT_LIBRARY & set(f.relative_to(root).parts)]
    train, val = [], []
    for count, file in enumerate(sorted(files, key=Path.as_posix), 1):
        # Val receives a file when its share grows by one: it is evenly spread.
        if len(val) < int(count * val_fraction):
            val.append(file)
        else:
            train.append(file)
    return train, val


def size_of(path: Path) -> int:
    """A text file's size in bytes. UTF-16 and UTF-32, known by their mark, end the program."""
    with open(path, "rb") as file:
        start, size = file.read(64), os.fstat(file.fileno()).st_size
    marks = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE   # UTF-32-LE's as well
    if start.startswith(marks) and (size % 2 == 0 or b"\0" in start):
        sys.exit(f"{path} is UTF-16 or UTF-32: convert it, as `iconv -f utf-16 -t utf-8` does")
    return size


def read_chunks(files: list[tuple[Path, int]], boundary: int, as_text: bool, meta: dict):
    """Yield (split, chunk) through files of (path, size); the first `boundary` bytes are train's.

    A chunk is bytes, or str if as_text; an empty one separates two files of a split. Text is cut
    at safe places, so memory is a chunk's unless there is none for longer than that. Invalid UTF-8
    becomes U+FFFD and is counted in meta.
    """
    position, last = 0, None
    for path, size in files:
        if last == ("train" if position < boundary else "val"):
            yield last, "" if as_text else b""
        decoder, pending, tail = codecs.getincrementaldecoder("utf-8")("replace"), "", b""
        end = position + size
        with open(path, "rb") as file:
            while position < end:
                # A block ends at the boundary, and is long there: it should hold a safe cut.
                left = (boundary if position < boundary < end else end) - position
                block = file.read(left if left < 2 * CHUNK else CHUNK)
                position += len(block)
                if not block:
                    sys.exit(f"{path} became shorter while it was read: run again")
                last = "train" if position <= boundary else "val"
                if not as_text:
                    yield last, block
                    continue

                # A U+FFFD that is in the file itself is no invalid sequence.
                text = decoder.decode(block, final=position == end)
                tail += block
                meta["invalid_sequences"] += text.count("\ufffd") - tail.count(b"\xef\xbf\xbd")
                tail = tail[-2:]

                # What was pending has no safe cut before its last character.
                searched = max(len(pending) - 1, 0)
                pending += text
                cut = safe_cut(pending, searched)
                if position == end or position == boundary and not cut:
                    cut = len(pending)
                if cut:
                    yield last, pending[:cut]
                    pending = pending[cut:]


def prepare_text(folder: Path, source: str, train: list[Path], val: list[Path] | None,
                 tokenizer: tiktoken.Encoding, val_fraction: float = 0.1) -> dict:
    """Encode files into a dataset, and return its meta. No val: the last val_fraction of train."""
    files = [(path, size_of(path)) for path in train + (val or [])]
    total = sum(size for _, size in files)
    boundary = sum(size for _, size in files[:len(train)])
    if val is None:
        boundary = int(total * (1 - val_fraction))
    if boundary in (0, total):
        sys.exit(f"{source}: no text to {'validate' if boundary else 'train'} on; in a folder, "
                 f"files that end in {' '.join(TEXT)} are read")

    # Text is encoded on all cores, a batch at a time.
    as_text, workers = tokenizer.name != "bytes", os.cpu_count() or 1
    with (Writer(folder, tokenizer, source) as writer,
          tqdm(total=total, desc=folder.name, **BAR) as bar):
        writer.meta["invalid_sequences"] = 0
        chunks = read_chunks([f for f in files if f[1]], boundary, as_text, writer.meta)
        while batch := list(islice(chunks, 4 * workers if as_text else 1)):
            texts = [chunk for _, chunk in batch]
            if as_text:     # numpy reads an array twice as fast as a list
                encoded = tokenizer.encode_ordinary_batch(texts, num_threads=workers)
                encoded = (array("I", ids) for ids in encoded)
            else:
                encoded = (np.frombuffer(chunk, np.uint8) for chunk in texts)
            for (split, chunk), ids in zip(batch, encoded):
                n_bytes = len(chunk.encode("utf-8") if as_text else chunk)
                writer.put(split, ids if chunk else [tokenizer.eot_token], n_bytes)
                bar.update(n_bytes)
    return writer.meta


def download(url: str, path: Path, size: int | None = None) -> Path:
    """Fetch url to path, continuing an earlier try. The server's size and `size` are checked."""
    if path.exists():
        return path
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if part.exists() else 0

    # Only an answer of status 206 continues; else the server sends all of it again.
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=30) as response:
            have = have if response.status == 206 else 0
            length = response.headers.get("Content-Length")
            announced = have + int(length) if length else size
            with (open(part, "ab" if have else "wb") as file,
                  tqdm(total=announced, initial=have, desc=path.name, **BAR) as bar):
                while block := response.read(1 << 16):
                    bar.update(file.write(block))
    except (OSError, ValueError, http.client.HTTPException) as error:
        if getattr(error, "code", None) != 416:
            sys.exit(f"could not fetch {url} ({error}): run again to continue, set HTTPS_PROXY, or "
                     f"put the file at {path}; without a network, use the source stdlib")
        announced = have    # 416: the server has nothing more to send

    # The server knows whether this is all of it, and `size` whether it is the right file.
    got, expected = part.stat().st_size, announced if size is None else size
    if announced is not None and got < announced:
        sys.exit(f"{url} broke off after {got} of {announced} bytes: run again to continue")
    if expected not in (None, got):
        part.unlink()
        sys.exit(f"{url} sent {got} bytes, not {expected}: thrown away; put the file at {path}")
    os.replace(part, path)
    return path


def prepare_fineweb(folder: Path, shards: int) -> dict:
    """Download the val shard and the first train shards, 100M GPT-2 tokens each; returns meta."""
    tokenizer = get_tokenizer("gpt2")
    token_bytes = np.array([len(tokenizer.decode_single_token_bytes(i))
                            for i in range(tokenizer.n_vocab)])
    token_bytes[tokenizer.eot_token] = 0
    names = [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]
    names.append("fineweb_val_000000.bin")
    paths = [download(FINEWEB + name, DATA_DIR / "downloads" / name) for name in names]

    # A shard is 256 numbers, the third of which counts its tokens, and two bytes per token.
    with Writer(folder, tokenizer, f"{FINEWEB}, {shards} train shards") as writer:
        for path in paths:
            header = np.fromfile(path, np.dtype("<i4"), 256).tolist()
            if (len(header) < 256 or header[:2] != [20240520, 1] or header[2] < 1
                    or path.stat().st_size != 1024 + 2 * header[2]):
                sys.exit(f"{path} is no whole shard of {FINEWEB}: delete it and run again")
            ids = np.memmap(path, np.dtype("<u2"), "r", offset=1024)
            for start in range(0, len(ids), 1 << 20):
                block = ids[start:start + (1 << 20)]
                if block.max() >= tokenizer.n_vocab:
                    sys.exit(f"{path} holds ids past GPT-2's vocabulary: delete it and run again")
                split = "train" if "train" in path.name else "val"
                writer.put(split, block, int(token_bytes[block].sum()))
    return writer.meta


def prepare(sources: list[str], tokenizer: str | None = None, name: str | None = None,
            val_fraction: float = 0.1, shards: int = 1, val: list[str] | None = None) -> dict:
    """What the command does; returns meta. User errors exit with a one-line message."""
    name = Path(os.path.realpath(sources[0])).stem if name is None else name
    try:
        folder = place_for(name)
        if sources == ["fineweb"]:
            if tokenizer not in (None, "gpt2"):
                sys.exit(f"--tokenizer {tokenizer}: fineweb comes as GPT-2 tokens; leave it out")
            return prepare_fineweb(folder, shards)

        encoding, source, val_files = get_tokenizer(tokenizer or "bytes"), " ".join(sources), None
        if sources == ["stdlib"]:
            files, val_files = library_files(val_fraction)
            source = f"the standard library of Python {sys.version.split()[0]}"
        elif sources == ["shakespeare"]:
            path, source = DATA_DIR / "downloads" / "shakespeare.txt", SHAKESPEARE
            files = [download(SHAKESPEARE, path, SHAKESPEARE_SIZE)]
        else:
            files = find_files(sources)

        # Never train on validation text, though it may lie in a folder of the sources.
        if val:
            val_files, source = find_files(val), f"{source} --val {' '.join(val)}"
            held_out = {file.resolve() for file in val_files}
            files = [file for file in files if file.resolve() not in held_out]
        return prepare_text(folder, source, files, val_files, encoding, val_fraction)
    except OSError as error:
        sys.exit(f"could not prepare {name}: {error}; NANONORM_DATA can name another folder "
                 f"than {DATA_DIR}")


def main():
    parser = Parser(description="Turn text into data/NAME/{train.bin,val.bin,meta.json}.")
    parser.add_argument("source", nargs="+", metavar="SOURCE",
                        help="stdlib, shakespeare, fineweb, or your own files and folders")
    parser.add_argument("--tokenizer", choices=("bytes", *tiktoken.list_encoding_names()),
                        help="default: bytes; fineweb is gpt2")
    parser.add_argument("--name", help="the folder under data/ (default: the source's own name)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--val", nargs="+", metavar="FILE", help="text to validate on")
    group.add_argument("--val_fraction", type=float, default=0.1,
                       help="or the share of the text to validate on (default: 0.1)")
    parser.add_argument("--shards", type=int, default=1,
                        help="fineweb: how many train shards, of 103 (default: 1)")
    args = parser.parse_args()

    # What argparse cannot see.
    if args.val and args.source in (["stdlib"], ["fineweb"]):
        parser.error(f"--val: {args.source[0]} has its own text to validate on")
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction must be between 0 and 1, not {args.val_fraction}")
    if not 1 <= args.shards <= 103:
        parser.error(f"--shards must be in 1..103, not {args.shards}")
    meta = prepare(args.source, args.tokenizer, args.name, args.val_fraction, args.shards, args.val)
    print(json.dumps(meta, indent=1, ensure_ascii=False, allow_nan=False))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)     # so that `kill` leaves nothing
    command(main)
