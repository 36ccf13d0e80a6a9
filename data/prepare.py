"""Turn text into token files that train.py reads: data/NAME/{train.bin,val.bin,meta.json}.

    python data/prepare.py stdlib                           # Python's own source text, no network
    python data/prepare.py book.txt notes/ --name mine      # your files and folders
    python data/prepare.py shakespeare                      # 1 MB, downloaded
    python data/prepare.py fineweb --shards 10              # 1B GPT-2 tokens, 2 GB, downloaded

The .bin files are raw token ids in the smallest unsigned type that holds the vocabulary; meta.json tells the tokenizer,
that type, the counts of tokens and bytes, the source and a sha256 of train.bin followed by val.bin.
"""
import argparse
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
import urllib.error
import urllib.request
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
TEXT_ENDINGS = {".txt", ".md", ".rst", ".tex", ".html", ".csv", ".json", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".ts", ".java", ".sh"}
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SIZE = 1_115_394
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
CHUNK = 1 << 18     # bytes read and encoded at a time


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """The tokenizer `name`: "bytes" (the 256 bytes and an end-of-text token, nothing to fetch) or one of tiktoken's.
    A vocabulary that tiktoken cannot fetch ends the program with one line."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        sys.exit(f"the vocabulary of tokenizer {name} could not be fetched ({type(error).__name__}): set TIKTOKEN_CACHE_DIR "
                 "to a folder that holds it, or use --tokenizer bytes with stdlib or your own text, which needs no download")


def encode(tokenizer: tiktoken.Encoding, raw: bytes) -> list[int]:
    """Token ids of a prompt. Bytes that are no UTF-8 are kept by "bytes" and replaced by U+FFFD for the others."""
    return list(raw) if tokenizer.name == "bytes" else tokenizer.encode_ordinary(raw.decode("utf-8", "replace"))


SAFE = re.compile(r"\S(?= )|[^\W_](?=[\r\n,.，。])")     # the marks are for scripts without spaces


def safe_cut(text: str, start: int = 0) -> int:
    """The last place from `start` on where text may be cut and its parts encoded apart without changing a token, or 0.

    That is before a space that follows a non-space, and before a line's end, comma or full stop that follows a letter or
    digit. BPE never merges across the pieces that a tokenizer's regular expression finds, and in all of tiktoken's a piece
    ends there: within a piece these may be followed by letters but never preceded by them, and punctuation is followed by
    newlines only. They look ahead in white space alone, and the left part ends in something else; they never look behind.
    After the space would be wrong: in "a  b" the pieces are "a", " ", " b", but "a  " alone has the piece "  ".
    """
    for begin in (max(start, len(text) - 512), start):
        ends = [match.end() for match in SAFE.finditer(text, begin)]
        if ends:
            return ends[-1]
    return 0


class Writer:
    """Writes a dataset beside its place and puts it there whole: `put` the train split's ids, then the val split's."""

    def __init__(self, name: str, tokenizer: tiktoken.Encoding, source: str):
        self.path, self.beside = HERE / name, HERE / f".{name}.{os.getpid()}.part"
        self.dtype = np.min_scalar_type(tokenizer.n_vocab - 1)
        self.meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.n_vocab, "dtype": self.dtype.name,
                     "source": source} | {f"{s}_{unit}": 0 for s in ("train", "val") for unit in ("tokens", "bytes")}
        self.sha256 = hashlib.sha256()

    def __enter__(self):
        shutil.rmtree(self.beside, ignore_errors=True)      # of a killed run of the same process id
        self.beside.mkdir(parents=True)
        self.files = {split: open(self.beside / f"{split}.bin", "wb") for split in ("train", "val")}
        return self

    def put(self, split: str, ids, n_bytes: int):
        """Append ids that stand for n_bytes bytes of text."""
        raw = np.asarray(ids, dtype=self.dtype).astype(self.dtype.newbyteorder("<")).tobytes()
        self.files[split].write(raw)
        self.sha256.update(raw)
        self.meta[f"{split}_tokens"] += len(ids)
        self.meta[f"{split}_bytes"] += n_bytes

    def __exit__(self, error, *_):
        try:
            for file in self.files.values():
                file.close()
            if error is None:
                text = json.dumps(self.meta | {"sha256": self.sha256.hexdigest()}, indent=1)
                (self.beside / "meta.json").write_text(text, encoding="utf-8")
                old = self.beside.with_suffix(".old")
                if self.path.exists():
                    os.rename(self.path, old)
                os.rename(self.beside, self.path)
                shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(self.beside, ignore_errors=True)


def find_files(sources: list[str]) -> list[Path]:
    """Your files as they are named, and in your folders all that end like text (TEXT_ENDINGS), hidden ones left out."""
    files = []
    for source in map(Path, sources):
        if source.is_dir():
            found = (f for f in source.rglob("*") if f.suffix.lower() in TEXT_ENDINGS and f.is_file()
                     and not any(part.startswith(".") for part in f.relative_to(source).parts))
            files += sorted(found, key=lambda f: f.as_posix())
        elif source.is_file():
            files.append(source)
        else:
            sys.exit(f"{source}: no such file or folder; give text files, folders, stdlib, shakespeare or fineweb")
    return files


def library_files(val_fraction: float) -> tuple[list[Path], int]:
    """Python's standard library without its tests: every file in a fixed order, train first, and how many train."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((f for f in root.rglob("*.py") if not NOT_LIBRARY & set(f.relative_to(root).parts)),
                   key=lambda f: f.relative_to(root).as_posix())
    val = {i for i in range(len(files)) if int((i + 1) * val_fraction) > int(i * val_fraction)}     # evenly spread
    train = [f for i, f in enumerate(files) if i not in val]
    return train + [f for i, f in enumerate(files) if i in val], len(train)


def read_chunks(files: list[Path], boundary: int, as_text: bool, meta: dict) -> Iterator[tuple[str, str | bytes | None]]:
    """Yield (split, chunk) through all files; the train split is the first `boundary` bytes, up to a safe cut there.

    A chunk is bytes, or str if as_text; None stands between two files of a split. Memory is a chunk's, unless the
    text has no safe cut for longer than that. Invalid UTF-8 becomes U+FFFD and is counted in meta."""
    position, begun = 0, set()
    for path in files:
        split = "train" if position < boundary else "val"
        if split in begun:
            yield split, None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pending, tail, block = "" if as_text else b"", b"", True
        with open(path, "rb") as file:
            while block:
                left = boundary - position
                block = file.read(left if 0 < left < 2 * CHUNK else CHUNK)
                position += len(block)
                if as_text:
                    text = decoder.decode(block, final=not block)
                    meta["invalid_sequences"] += text.count("\ufffd") - (tail + block).count(b"\xef\xbf\xbd")
                    tail = (tail + block)[-2:]
                    searched = max(len(pending) - 1, 0)     # up to there pending has no safe cut
                    pending += text
                    cut = safe_cut(pending, searched) if block else len(pending)
                    if position == boundary:
                        cut = cut or len(pending)
                else:
                    pending, cut = block, len(block)
                if cut:
                    split = "train" if position <= boundary else "val"
                    begun.add(split)
                    yield split, pending[:cut]
                pending = pending[cut:]


def prepare_text(name: str, source: str, files: list[Path], n_train: int | None, tokenizer: tiktoken.Encoding,
                 val_fraction: float = 0.1) -> dict:
    """Encode files into data/name; returns meta. val is the files from n_train on, or the last val_fraction of bytes.
    An end-of-text token stands between two files."""
    files = [(file, file.stat().st_size) for file in files]
    total = sum(size for _, size in files)
    if not total:
        sys.exit(f"{source}: no text in it; in a folder, files that end in {' '.join(sorted(TEXT_ENDINGS))} are read")
    boundary = int(total * (1 - val_fraction)) if n_train is None else sum(size for _, size in files[:n_train])
    as_text, workers = tokenizer.name != "bytes", os.cpu_count() or 1
    with Writer(name, tokenizer, source) as writer, tqdm(
            total=total, desc=f"data/{name}", unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        writer.meta["invalid_sequences"] = 0
        chunks = read_chunks([file for file, size in files if size], boundary, as_text, writer.meta)
        while batch := list(islice(chunks, 4 * workers if as_text else 1)):
            texts = [chunk for _, chunk in batch if chunk is not None]
            if as_text:     # numpy reads an array twice as fast as a list
                encoded = (array("I", ids) for ids in tokenizer.encode_ordinary_batch(texts, num_threads=workers))
            else:
                encoded = (np.frombuffer(chunk, np.uint8) for chunk in texts)
            for split, chunk in batch:
                if chunk is None:
                    writer.put(split, [tokenizer.eot_token], 0)
                else:
                    n_bytes = len(chunk.encode("utf-8") if as_text else chunk)
                    writer.put(split, next(encoded), n_bytes)
                    bar.update(n_bytes)
    return writer.meta


def download(url: str, path: Path, size: int | None = None) -> Path:
    """Fetch url to path, going on where an earlier try stopped, and check its size against the server's and `size`."""
    if path.exists():
        return path
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if part.exists() else 0
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=30) as response:
            have = have if response.status == 206 else 0        # 200: this server sends the whole again
            total = have + int(response.headers.get("Content-Length", 0))
            with open(part, "ab" if have else "wb") as file, tqdm(
                    total=total or None, initial=have, desc=path.name, unit="B", unit_scale=True,
                    disable=not sys.stderr.isatty()) as bar:
                while block := response.read(1 << 16):
                    file.write(block)
                    bar.update(len(block))
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == 416:     # nothing left to send, or all changed
            total = have
        else:
            sys.exit(f"could not fetch {url} ({error}): run again to go on, set HTTPS_PROXY, or put the file at {path}; "
                     "without a network, use the source stdlib")
    got = part.stat().st_size
    if got < (total or size or 0):
        sys.exit(f"{url} broke off after {got} of {total or size} bytes: run again to go on")
    if got != (size or total or got):
        part.unlink()
        sys.exit(f"{url} sent {got} bytes, not {size or total}: thrown away; put the right file at {path}")
    os.replace(part, path)
    return path


def prepare_fineweb(name: str, shards: int) -> dict:
    """Download the val shard and the first `shards` train shards (100M GPT-2 tokens each) and join them."""
    tokenizer = get_tokenizer("gpt2")
    token_bytes = np.array([0 if i == tokenizer.eot_token else len(tokenizer.decode_single_token_bytes(i))
                            for i in range(tokenizer.n_vocab)])
    paths = {f: download(FINEWEB + f, HERE / "downloads" / f) for f in
             [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)] + ["fineweb_val_000000.bin"]}
    with Writer(name, tokenizer, f"{FINEWEB}, {shards} train shards") as writer:
        for file, path in paths.items():
            header = np.fromfile(path, np.dtype("<i4"), 256).tolist()
            if len(header) < 256 or header[:2] != [20240520, 1] or path.stat().st_size != 1024 + 2 * header[2]:
                sys.exit(f"{path} is no whole shard of {FINEWEB}: delete it and run again")
            ids = np.memmap(path, np.dtype("<u2"), "r", offset=1024)
            for start in range(0, len(ids), 1 << 20):
                block = ids[start:start + (1 << 20)]
                if block.max() >= tokenizer.n_vocab:
                    sys.exit(f"{path} holds ids past GPT-2's vocabulary: delete it and run again")
                writer.put("train" if "train" in file else "val", block, int(token_bytes[block].sum()))
    return writer.meta


def prepare(sources: list[str], tokenizer: str | None = None, name: str | None = None, val_fraction: float = 0.1,
            shards: int = 1) -> dict:
    """What the command does; returns meta. Anything a person can mend ends the program with one line."""
    name = name or Path(sources[0]).resolve().stem
    if not re.fullmatch(r"[\w-][\w.-]{,99}", name) or name == "downloads":
        sys.exit(f"{name!r} cannot name a dataset: give a --name of up to 100 letters, digits, '_', '-' and '.'")
    if (HERE / name).exists() and (not (HERE / name).is_dir() or
                                   {f.name for f in (HERE / name).iterdir()} - {"train.bin", "val.bin", "meta.json"}):
        sys.exit(f"{HERE / name} holds more than a dataset: move that away, or choose another --name")
    try:
        if sources == ["fineweb"]:
            if tokenizer not in (None, "gpt2"):
                sys.exit(f"--tokenizer {tokenizer}: fineweb comes as GPT-2 tokens; leave the tokenizer out")
            return prepare_fineweb(name, shards)
        encoding, source, n_train = get_tokenizer(tokenizer or "bytes"), " ".join(sources), None
        if sources == ["stdlib"]:
            files, n_train = library_files(val_fraction)
            source = f"the standard library of Python {sys.version.split()[0]}"
        elif sources == ["shakespeare"]:
            files, source = [download(SHAKESPEARE, HERE / "downloads" / "shakespeare.txt", SHAKESPEARE_SIZE)], SHAKESPEARE
        else:
            files = find_files(sources)
        return prepare_text(name, source, files, n_train, encoding, val_fraction)
    except OSError as error:
        sys.exit(f"could not prepare {name}: {error}")


def main():
    parser = argparse.ArgumentParser(description="Turn text into data/NAME/{train.bin,val.bin,meta.json}.", allow_abbrev=False)
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="stdlib, shakespeare, fineweb, or your own files and folders")
    parser.add_argument("--tokenizer", choices=("bytes", *tiktoken.list_encoding_names()), help="default: bytes; fineweb is gpt2")
    parser.add_argument("--name", help="the folder under data/ (default: the source's own name)")
    parser.add_argument("--val_fraction", type=float, default=0.1, help="share of the text kept for validation (default: 0.1)")
    parser.add_argument("--shards", type=int, default=1, help="fineweb: how many train shards, of 103 (default: 1)")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}; see --help\n")
    args = parser.parse_args()
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction must be between 0 and 1, not {args.val_fraction}")
    if not 1 <= args.shards <= 103:
        parser.error(f"--shards must be in 1..103, not {args.shards}")
    meta = prepare(args.source, args.tokenizer, args.name, args.val_fraction, args.shards)
    print(json.dumps(meta, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    for console in filter(None, (sys.stdout, sys.stderr)):
        console.reconfigure(errors="replace")   # what a console cannot show is no reason to stop
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing was changed")
    except BrokenPipeError:     # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        sys.exit(f"prepare.py: {error}")
