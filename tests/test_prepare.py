"""data/prepare.py: what comes out is what went in, whatever the bytes, the block size or the
network. Nothing here needs a network; without a stored GPT-2 vocabulary the tests that use it are
skipped."""
import json
import math
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
from tiktoken_ext import openai_public

from data import prepare as module
from data.prepare import (download, encode, find_files, get_tokenizer, library_files, load, prepare,
                          prepare_text, safe_cut)

REPO = Path(module.__file__).resolve().parent.parent
EXPRESSIONS = "r50k_base", "cl100k_base", "o200k_base"     # gpt2 has that of r50k_base
FRAGMENTS = [
    " ", "  ", "     ", "\n", "\n\n", "\n \n", "\r\n", "\r\n\r\n", "\t", "\t\t", " \n", "  \t\n",
    "\u00a0", " \u00a0", "\u2003", "\x85", "\x0b", "\x1c", "\u2028", "}\n/", "}\n", "//\n\n/",
    ");\r\n", "a\n", "Z \n", "7\n", "_\n", "the", " the", "The", " don't", "I'LL", "we've", "'s",
    " '", "''re", "\n    return x", "\n\tif (a[i]):\n", "def f(self):\n", "  # note", "0",
    " 12345678", "3.14", "1\u00b2", "\u0664\u0662", "antidisestablishmentarianism" * 3,
    "camelCaseHTTPWord", "日本語", "。\n", "한국어 ", "ไทย", "e\u0301", "\u0301", "\u0301\n", " \u0301",
    "n\u0303\n", "é", "İ", "ǅ", "🌊", " 🧊\n", "👩\u200d🚀", "\u200b", "\ufeff", "\ufffd", "\x00", "…",
    " — ", "<|endoftext|>", "!!!", "?\n\n\n", "$ x^2 $", "\\n", "\U0010ffff", "，海。", ",b", ".\r\n",
    "1,000", "a.B", "\rx"]
ENGLISH = ("The sea keeps what it's given, and the ice gives back what the sea has kept for 1000 "
           "years.\n") * 30


def nasty_text(seed: int, n: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choices(FRAGMENTS, k=n))


@pytest.fixture(scope="session")
def gpt2():
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        pytest.skip(f"no GPT-2 vocabulary: {type(error).__name__}")


@pytest.fixture(params=EXPRESSIONS)
def unfetched(request, monkeypatch):
    """One of tiktoken's regular expressions over a made-up vocabulary that shows each wrong cut: a
    byte and the white space around it, or a comma or full stop behind it, merge before all else, so
    that tokens differ as soon as one piece holds both. Ids pass 65,536."""
    space, other = b" \n\r\t", [b for b in range(256) if b not in b" \n\r\t"]
    pairs = [bytes([b, s]) for b in other for s in space]
    pairs += [bytes([s, b]) for b in other for s in space]
    pairs += [bytes([b, mark]) for b in other for mark in b",.\xef\xe3"]
    pairs += [bytes([s, t]) for s in space for t in space] + [bytes([s]) * 4 for s in space]
    words = [bytes([a, b]) for a in b"etaoinsh'0/}\xe3\xcc" for b in b"etaoinshr'1/\x81"]
    words += [b"the", b" the", b"thes"]
    ranks = {bytes([b]): 70_000 + b for b in range(256)}
    for token in pairs + words:
        ranks.setdefault(token, 71_000 + len(ranks))
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    return tiktoken.Encoding(**getattr(openai_public, request.param)() | {"explicit_n_vocab": None})


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder that takes the place of data/, and is also the working folder."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(module, "DATA_DIR", folder)
    monkeypatch.chdir(tmp_path)
    return folder


def ids_of(folder: Path) -> tuple[list[int], list[int]]:
    """The train and val ids as meta.json says they are stored, after checking its counts."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    splits = [np.fromfile(folder / f"{split}.bin", dtype).tolist() for split in ("train", "val")]
    assert [len(ids) for ids in splits] == [meta["train_tokens"], meta["val_tokens"]]
    return tuple(splits)


def command(tmp_path: Path, *args, **env) -> subprocess.CompletedProcess:
    """Run the script in tmp_path, with the datasets in its folder data/."""
    (tmp_path / "data").mkdir(exist_ok=True)
    env = os.environ | {"NANONORM_DATA": str(tmp_path / "data")} | env
    return subprocess.run([sys.executable, module.__file__, *map(str, args)], cwd=tmp_path,
                          env=env, capture_output=True, timeout=120)


def one_line(text: str | bytes, *parts: str):
    text = text.decode("ascii", "replace") if isinstance(text, bytes) else text
    assert len(text.strip().splitlines()) == 1 and "Traceback" not in text, text
    assert all(part in text for part in parts), text


@contextmanager
def refused(*parts: str):
    """The program ends with exit code 1 and one line that holds `parts`."""
    try:
        yield
    except SystemExit as stop:
        one_line(stop.code, *parts)
    else:
        pytest.fail("not refused")


# --------------------------------------------------------------------------------------- tokenizers

@pytest.mark.parametrize("raw", [b"\xef\xbb\xbfa\r\nb\r\n", b"\xef\xbb\xbfa\0\nb\r\n",
                                 bytes(range(256)) * 2, b"\xff\xfe\xc3"])
def test_bytes_come_back(here, raw):
    """A BOM, CRLF, NUL and bytes that are no UTF-8 were translated or dropped on some systems
    (reports 14, 41)."""
    Path("raw.txt").write_bytes(raw)
    meta = prepare(["raw.txt"])
    train, val = ids_of(here / "raw")
    assert train + val == list(raw)
    for unit in "bytes", "tokens":
        assert meta[f"train_{unit}"] + meta[f"val_{unit}"] == len(raw)
    assert (meta["invalid_sequences"], meta["tokenizer"], meta["vocab_size"]) == (0, "bytes", 257)


@pytest.mark.parametrize("text", ["", "é日🌊 👩\u200d🚀", "<|endoftext|>", "\ufeff\r\n\0",
                                  "".join(FRAGMENTS)])
def test_bytes_tokenizer_round_trips(text):
    """A prompt with a character that the training text never had raised a KeyError (report 3)."""
    tokenizer, raw = get_tokenizer("bytes"), text.encode()
    assert encode(tokenizer, raw) == tokenizer.encode_ordinary(text) == list(raw)
    assert tokenizer.decode(list(raw)) == text and tokenizer.eot_token == 256
    assert encode(tokenizer, b"\xff\xc3") == [255, 195]


def test_gpt2_prompt(gpt2):
    """The literal <|endoftext|> in a text raised, or became the special token (report 11)."""
    raw = b"\xef\xbb\xbfa<|endoftext|>\r\nb"
    ids = encode(gpt2, raw + b"\xff")
    assert gpt2.eot_token not in ids and gpt2.decode_bytes(ids) == raw + b"\xef\xbf\xbd"


@pytest.mark.parametrize("chunk", [3, 64, 1000])
def test_gpt2_ids_do_not_depend_on_chunks(here, monkeypatch, gpt2, chunk):
    """Text encoded piece by piece has to give the ids of the text encoded whole, characters cut by
    a block too."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    Path("val.txt").write_text("x")
    for seed in range(6):
        text = "\ufeff" + nasty_text(seed, 150 if chunk == 3 else 800)
        Path("nasty.txt").write_bytes(text.encode())
        meta = prepare_text(here / "nasty", "", [Path("nasty.txt")], [Path("val.txt")], gpt2)
        assert ids_of(here / "nasty") == (gpt2.encode_ordinary(text), [87]), seed
        assert (meta["train_bytes"], meta["invalid_sequences"]) == (len(text.encode()), 0), seed
        assert gpt2.eot_token not in ids_of(here / "nasty")[0]


def test_gpt2_seam_between_the_splits(here, monkeypatch, gpt2):
    """The val split begins at a safe cut, wherever blocks end: train and val together are the whole
    text's ids."""
    for chunk in range(60, 120):
        monkeypatch.setattr(module, "CHUNK", chunk)
        # The seam is 1 to 3 bytes into a block.
        text = ENGLISH[:(7 * chunk + 1) * 10 // 9 + chunk % 3]
        Path("sea.txt").write_bytes(text.encode())
        prepare(["sea.txt"], "gpt2")
        train, val = ids_of(here / "sea")
        assert train + val == gpt2.encode_ordinary(text), chunk
        assert 0 <= int(len(text) * 0.9) - len(gpt2.decode_bytes(train)) < 20, chunk


def test_safe_cut(unfetched):
    """Cut text has to give the tokens of whole text for every regular expression of tiktoken's."""
    found = Counter()
    for seed in range(1500):
        text = nasty_text(seed, 1 + seed % 12)
        cut = safe_cut(text)
        left, right, whole = map(unfetched.encode_ordinary, (text[:cut], text[cut:], text))
        found[cut > 0] += 1
        assert left + right == whole, text
    assert found[True] > 500
    assert safe_cut("a b" + "\n" * 5000) == 3 and safe_cut("\n" * 5000 + "a b") == 5001
    assert not any(map(safe_cut, ("", "abc", "}\n/\n", "  a")))


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_text_without_spaces(end):
    """Chinese lines hold no space and end in a full stop: a whole book of them became one chunk, in
    quadratic time."""
    text = f"海里有冰，冰里有海。{end}" * 999
    assert 0 < safe_cut(text) and len(text) - safe_cut(text) < 20


def test_long_line_of_one_mark(gpt2):
    """tiktoken 0.12 took 5 s for this line, and four times as long for one of twice its length."""
    start = time.perf_counter()
    gpt2.encode_ordinary("=" * 100_000)
    assert time.perf_counter() - start < 2


def test_wide_ids_come_back(here, monkeypatch, unfetched):
    """Ids past 65,535 were cut to 16 bits: the type follows the vocabulary and is recorded (report
    10)."""
    monkeypatch.setattr(module, "CHUNK", 100)
    texts = [nasty_text(seed, 300) for seed in (1, 2)]
    for name, text in zip("abc", texts + ["x"]):
        Path(name).write_bytes(text.encode())
    meta = prepare_text(here / "wide", "", [Path("a"), Path("b")], [Path("c")], unfetched)
    a, b, c = map(unfetched.encode_ordinary, texts + ["x"])
    assert ids_of(here / "wide") == (a + [unfetched.eot_token] + b, c) and min(a) >= 70_000
    assert (meta["dtype"], meta["vocab_size"]) == ("uint32", unfetched.n_vocab)


def test_dtype_follows_the_vocabulary(here):
    """The smallest type that holds every id, the end-of-text token's included."""
    for n, dtype in (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32"):
        tokenizer = tiktoken.Encoding("t", pat_str="(?s:.)",
                                      mergeable_ranks={bytes([i]): i for i in range(255)},
                                      special_tokens={"<|endoftext|>": n - 1})
        with module.Writer(here / "t", tokenizer, "") as writer:
            writer.put("train", [n - 1], 1)
        assert writer.meta["dtype"] == dtype and ids_of(here / "t") == ([n - 1], []), n


# ---------------------------------------------------------------------------------- splits, sources

def test_val_is_the_end_of_own_text(here):
    """The last val_fraction of bytes."""
    raw = bytes(random.Random(0).choices(range(256), k=1000))
    Path("own.txt").write_bytes(raw)
    for fraction in 0.1, 0.5:
        prepare(["own.txt"], val_fraction=fraction)
        n_train = int(1000 * (1 - fraction))
        assert ids_of(here / "own") == (list(raw[:n_train]), list(raw[n_train:]))


@pytest.mark.parametrize("tokenizer", ["bytes", "unfetched"])
@pytest.mark.parametrize("unfetched", ["r50k_base"], indirect=True)
def test_end_of_text_between_files(here, monkeypatch, tokenizer, unfetched):
    """Two files of a split have an end-of-text token between them on any number of cores; the file
    that straddles the seam has none there, and neither has a seam between two files."""
    encoding = unfetched if tokenizer == "unfetched" else get_tokenizer("bytes")
    texts = [f"{i} " + "sea ice " * 12 + "." * 2 for i in range(6)]      # 100 bytes each
    files = [Path(f"{i}.txt") for i in range(6)]
    for file, text in zip(files, texts):
        file.write_text(text)
    Path("2.txt").write_text("")
    kept = texts[:2] + texts[3:]

    def split_at_end_of_text(ids):
        parts = [[]]
        for i in ids:
            parts.append([]) if i == encoding.eot_token else parts[-1].append(i)
        return [encoding.decode(part) for part in parts]

    for cores in 1, 2, 16:
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        prepare_text(here / "many", "", files, None, encoding, 0.5)
        train, val = map(split_at_end_of_text, ids_of(here / "many"))
        assert train[:2] + [train[2] + val[0]] + val[1:] == kept, cores
        assert len(train) == len(val) == 3, cores
        meta = prepare_text(here / "many", "", files[:4], files[4:], encoding)
        assert list(map(split_at_end_of_text, ids_of(here / "many"))) == [kept[:3], kept[3:]], cores
        assert (meta["train_bytes"], meta["val_bytes"]) == (300, 200)


def test_folder(here):
    """Text files only, none hidden, in an order that no file system decides."""
    for name in "b.txt", "a/z.MD", "a/b/c.py", ".git/x.txt", "a/.x.txt", "d.png", "e", "Z.rst":
        file = Path("notes") / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    Path("notes/folder.txt").mkdir()
    assert [f.as_posix() for f in find_files(["notes", "notes/e"])] == [
        f"notes/{name}" for name in ("Z.rst", "a/b/c.py", "a/z.MD", "b.txt", "e")]
    assert [f.name for f in find_files([str(Path("notes/.git").resolve())])] == ["x.txt"]
    prepare(["notes"])
    train, val = ids_of(here / "notes")
    assert bytes(i for i in train + val if i < 256) == b"Z.rsta/b/c.pya/z.MDb.txt"


def test_stdlib(here, monkeypatch):
    """The dataset that needs no network: the same files in the same order each time, val spread
    evenly among them."""
    root = Path("lib").resolve()
    for i in range(40):
        for name in (f"{i:02d}.py", f"pkg/{i:02d}.py", f"test/{i}.py", f"pkg/tests/{i}.py",
                     f"site-packages/{i}.py", f"{i}.txt"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"# {name}\n")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(root))
    for fraction in 0.1, 0.25:
        train, val = ([f.relative_to(root).as_posix() for f in part]
                      for part in library_files(fraction))
        assert sorted(train + val) == sorted(f"{folder}{i:02d}.py" for folder in ("", "pkg/")
                                             for i in range(40))
        assert train == sorted(train) and val == sorted(val)
        assert len(val) == 80 * fraction and {"pkg" in name for name in val} == {True, False}
    prepare(["stdlib"])
    for ids, part in zip(ids_of(here / "stdlib"), library_files(0.1)):
        assert ids == [i for f in part for i in [*f.read_bytes(), 256]][:-1]


def test_real_stdlib():
    """This Python's library is found, and is not mostly its tests."""
    train, val = library_files(0.1)
    names = {f.name for f in train + val}
    assert len(train + val) > 200 and abs(len(val) - len(train + val) / 10) <= 1
    assert "argparse.py" in names and "test_argparse.py" not in names


def test_val_files(here):
    """Validation text of its own; it is not trained on, even if it lies in the same folder."""
    Path("notes").mkdir()
    for name in "abc":
        Path(f"notes/{name}.txt").write_text(name * 9)
    for val, kept in ("notes/b.txt", "ac"), (str(Path("notes/c.txt").resolve()), "ab"):
        meta = prepare(["notes"], val=[val])
        train, held_out = ids_of(here / "notes")
        assert bytes(held_out) == Path(val).read_bytes() and meta["source"] == f"notes --val {val}"
        assert train == [*kept[0].encode() * 9, 256, *kept[1].encode() * 9]
    Path("empty.txt").write_text("")
    for sources, val, part in ((["notes"], ["empty.txt"], "no text to validate on"),
                               (["notes"], ["none.txt"], "none.txt: no such file"),
                               (["notes/a.txt"], ["notes"], "no text to train on")):
        with refused(part):
            prepare(sources, val=val)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_utf16(here, encoding):
    """Half of the ids were 0, so that bits/byte looked too good, and nobody was told."""
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("plain")
    for text in "\ufeffthe sea", "\ufeff海里有冰":
        raw = text.removeprefix("\ufeff" * (encoding in ("utf-16", "utf-32"))).encode(encoding)
        for raw in raw, raw[:-1]:
            Path("notes/b.txt").write_bytes(raw)
            if len(raw) % 2 and "sea" not in text and "16" in encoding:
                continue    # this might be any bytes
            with refused("notes/b.txt", "iconv"):
                prepare(["notes"])
    assert not list(here.iterdir())


def test_odd_sources(here, monkeypatch):
    """A pipe, which cannot be measured; a link to itself; a file that shrinks while it is read."""
    os.mkfifo("pipe.txt")
    Path("loop.txt").symlink_to("loop.txt")
    for source in "pipe.txt", "loop.txt":
        with refused(source, "no such file or folder, or a pipe"):
            prepare([source], name="x")
    Path("x.txt").write_text("text")
    prepare(["."], name="x")
    assert bytes(sum(ids_of(here / "x"), [])) == b"text"
    monkeypatch.setattr(module, "size_of", lambda path: path.stat().st_size + 3)
    with refused("x.txt", "shorter"):
        prepare(["x.txt"])


def test_name_that_is_no_utf8(here, capsys, monkeypatch):
    """A file's name may hold any bytes: JSON, the console and a dataset's name cannot."""
    file = os.fsdecode(b"caf\xe9.txt")
    try:
        Path(file).write_text("text")
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    with refused("--name"):
        prepare([file])
    monkeypatch.setattr(sys, "argv", ["prepare.py", file, "--name", "x"])
    module.main()
    assert json.loads(capsys.readouterr().out)["source"] == "caf?.txt"


@pytest.mark.parametrize("source, part", [
    ("empty.txt", "no text"), ("missing.txt", "no such file"), ("folder", ".md")])
def test_nothing_to_read(tmp_path, source, part):
    """An empty or missing file ended in a traceback, or in an empty dataset that the next run took
    (report 14)."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(b"png")
    done = command(tmp_path, source)
    assert (done.returncode, done.stdout) == (1, b"")
    one_line(done.stderr, source, part)
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("args", [
    "", "x.txt --val_fraction 1", "x.txt --val_fraction x", "x.txt --tokenizer gpt9",
    "fineweb --shards 0", "x.txt --tok bytes", "x.txt --val y.txt --val_fraction 0.1",
    "stdlib --val y.txt"])
def test_wrong_usage(monkeypatch, capsys, args):
    """Exit code 2 and one line; no abbreviated flags."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *args.split()])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 2
    one_line(capsys.readouterr().err, args.split()[1] if args else "SOURCE", "--help")


def test_names(here):
    """A dataset's name cannot lead out of data/, nor replace a folder that is no dataset."""
    Path("x.txt").write_text("text")
    (here / "downloads").mkdir()
    for name in "../x", "a/b", ".hidden", "..", "downloads", "Downloads", "", "x" * 300:
        with refused(name):
            prepare(["x.txt"], name=name)
    with refused("--tokenizer bytes"):
        prepare(["fineweb"], "bytes")
    assert [f.name for f in here.iterdir()] == ["downloads"]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_ascii_locale(tmp_path, request, tokenizer):
    """A console that knows only ASCII stopped the program, or turned the text into question marks
    (report 9)."""
    encoding = request.getfixturevalue("gpt2") if tokenizer == "gpt2" else get_tokenizer("bytes")
    text = "日本 sea 🌊\r\n" * 20
    (tmp_path / "日本.txt").write_bytes(text.encode())
    ascii_only = {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii"}
    done = command(tmp_path, "日本.txt", "--tokenizer", tokenizer, **ascii_only)
    assert (done.returncode, done.stderr) == (0, b"") and b'"source": "??.txt"' in done.stdout
    folder = tmp_path / "data" / "日本"
    assert json.loads((folder / "meta.json").read_text(encoding="utf-8"))["source"] == "日本.txt"
    assert encoding.decode(sum(ids_of(folder), [])) == text
    done = command(tmp_path, "nicht_日.txt", **ascii_only)
    assert done.returncode == 1
    one_line(done.stderr, "nicht_?.txt")


# ----------------------------------------------------------------------------------------- counting

@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
@pytest.mark.parametrize("raw, count", [
    (b"a \xef\xbf\xbd b", 0), (b"a \xff\xfe b", 2), (b"\xef\xbf\xbd\xff \xef\xbf\xbd\xc3", 2),
    ("sea 🌊 日本\ufffd".encode(), 0), (b"\xef\xef\xbf\xbd \xf0\xef\xbf\xbd", 2)])
@pytest.mark.parametrize("unfetched", ["cl100k_base"], indirect=True)
def test_invalid_sequences(here, monkeypatch, unfetched, raw, count, chunk):
    """Bytes that are no UTF-8 stopped the program; a U+FFFD that is in the text itself is none of
    them (report 14)."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    Path("x.txt").write_bytes(raw)
    meta = prepare_text(here / "x", "", [Path("x.txt")], None, unfetched)
    text = raw.decode("utf-8", "replace")
    assert unfetched.decode(sum(ids_of(here / "x"), [])) == text
    assert meta["invalid_sequences"] == count
    assert meta["train_bytes"] + meta["val_bytes"] == len(text.encode())


def test_unigram_loss_and_largest_id(here):
    """What the best constant guess loses: its frequencies are train's, with one added to each
    id."""
    for train, val in (b"aab", b"abz"), (b"a\xff" * 50, b"a"), (bytes(range(256)) * 3, b"\0\1"):
        Path("a.txt").write_bytes(train), Path("b.txt").write_bytes(val)
        meta, counts = prepare(["a.txt"], name="x", val=["b.txt"]), Counter(train)
        losses = [-math.log((counts[i] + 1) / (len(train) + 257)) for i in val]
        assert meta["unigram_loss"] == pytest.approx(sum(losses) / len(val), rel=1e-12)
        assert meta["largest_id"] == max(train + val)
        assert json.loads((here / "x" / "meta.json").read_text(encoding="utf-8")) == meta
    Path("c.txt").write_bytes(b"a")
    assert prepare(["a.txt", "c.txt"], name="x", val=["b.txt"])["largest_id"] == 256


def test_bits_per_byte(here, gpt2):
    """Bytes of the text are counted, not tokens or characters: a token may be half an emoji (report
    25)."""
    from train import bits_per_byte
    Path("sea.txt").write_text("sea 🌊 ice 🧊", encoding="utf-8")
    meta = prepare(["sea.txt"], "gpt2")
    assert meta["train_tokens"] + meta["val_tokens"] == 8
    assert meta["train_bytes"] + meta["val_bytes"] == 17
    whole = {"val_tokens": 8, "val_bytes": 17}
    assert round(bits_per_byte(math.log(50257), whole), 4) == 7.3492
    whole["val_tokens"] = 17
    assert bits_per_byte(math.log(256), whole) == pytest.approx(8, abs=1e-12)


def test_flat_memory(tmp_path):
    """A text of many gigabytes has to be prepared in the memory of a block."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    with open(tmp_path / "big.txt", "wb") as file:
        for _ in range(32):
            file.write(b"sea and ice\n" * 87_381)      # 1 MiB
    code = """if True:
        import re, data.prepare as p
        peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
        open("small.txt", "w").write("sea and ice" * 99_999)
        p.prepare(["small.txt"])
        before = peak()
        p.prepare(["big.txt"])
        print(peak() - before)"""
    env = {"NANONORM_DATA": str(tmp_path), "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | env,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 << 10      # KiB
    (tmp_path / "big" / "train.bin").unlink()
    (tmp_path / "big.txt").unlink()


# ------------------------------------------------------------------------------ whole or not at all

def test_replaced_whole(here):
    """The same name again: nothing of the former dataset stays, and nothing lies beside it."""
    Path("x.txt").write_text("a long first text, longer than the next")
    first = prepare(["x.txt"])
    (here / f".x.{os.getpid()}.part").mkdir()   # of a killed process with our id, as in containers
    Path("x.txt").write_text("second")
    assert prepare(["x.txt"]) != first
    assert bytes(sum(ids_of(here / "x"), [])) == b"second"
    assert sorted(f.name for f in here.rglob("*")) == ["meta.json", "train.bin", "val.bin", "x"]


def test_link_to_another_disk(here, tmp_path):
    """The link became a folder on the small disk, and what it pointed to stayed on the big one."""
    Path("x.txt").write_text("text")
    (tmp_path / "big" / "mine").mkdir(parents=True)
    (here / "x").symlink_to(tmp_path / "big" / "mine")
    for text in "first", "second":
        Path("x.txt").write_text(text)
        prepare(["x.txt"])
        assert (here / "x").is_symlink() and bytes(sum(ids_of(here / "x"), [])) == text.encode()
    assert load("x", 0)[0]["train_tokens"] == 5
    assert [f.name for f in (tmp_path / "big").iterdir()] == ["mine"]
    for target in tmp_path / "none", here / "x":
        (here / "x").unlink()
        (here / "x").symlink_to(target)
        with refused(f"{here / 'x'} is a link to", "remove the link"):
            prepare(["x.txt"])
        assert (here / "x").is_symlink() and not target.exists()


def test_leftovers(here):
    """What a killed prepare left, as large as the dataset, stayed for good; a live one's is its."""
    Path("x.txt").write_text("text")
    prepare(["x.txt"])
    dead = subprocess.Popen(["true"])
    dead.wait()
    mine = [f".x.{dead.pid}.old", f".x.{dead.pid}.part", f".x.{os.getpid()}.old"]
    others = [f".x.{os.getppid()}.part", f".x.{os.getppid()}.old", ".x.1.part", ".x.9.part.txt",
              f".y.{dead.pid}.part", f".x.y.{dead.pid}.part", ".x.99999999999999999999.part"]
    for name in mine + others:
        (here / name).mkdir()
        (here / name / "train.bin").write_text("")
    for _ in range(2):
        prepare(["x.txt"])
        assert sorted(f.name for f in here.iterdir()) == sorted(others + ["x"])


def test_strangers_in_the_folder(here, monkeypatch):
    """A run's folder or notes put inside a dataset went when it was prepared again."""
    Path("x.txt").write_text("a first text")
    prepare(["x.txt"])
    (here / "x" / "notes.md").write_text("mine")
    with refused("holds more than a dataset", "--name"):
        prepare(["x.txt"])
    with refused("downloads"):
        prepare(["x.txt"], name="downloads")
    assert (here / "x" / "notes.md").exists()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == here / "y")
    with refused("mount point", "--name"):      # else found after hours, when it is to be replaced
        prepare(["x.txt"], name="y")


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_error_in_the_middle(here, monkeypatch, error):
    """A run that fails half way left half a dataset under the good name."""
    Path("x.txt").write_text("a first text")
    prepare(["x.txt"])
    before = {f: f.read_bytes() for f in here.rglob("*") if f.is_file()}
    put, calls = module.Writer.put, []

    def failing(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise error
        put(self, *args)

    monkeypatch.setattr(module.Writer, "put", failing)
    monkeypatch.setattr(module, "CHUNK", 4)
    with pytest.raises(SystemExit if isinstance(error, OSError) else type(error)) as stop:
        prepare(["x.txt"])
    if isinstance(error, OSError):
        one_line(stop.value.code, "No space left")
    assert {f: f.read_bytes() for f in here.rglob("*") if f.is_file()} == before
    assert [f.name for f in here.iterdir()] == ["x"]


@pytest.mark.parametrize("n", [300, 999])
def test_full_disk(tmp_path, n):
    """No room for the files, seen while they are written or only when they are closed: one line,
    and nothing half written stays. A limit on file sizes stands for the full disk."""
    resource = pytest.importorskip("resource")
    (tmp_path / "x.txt").write_text("sea and ice " * n)
    done = subprocess.run(
        [sys.executable, module.__file__, "x.txt"], cwd=tmp_path, capture_output=True, timeout=120,
        env=os.environ | {"NANONORM_DATA": str(tmp_path / "data")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)))
    assert done.returncode == 1
    one_line(done.stderr, "could not prepare x", str(tmp_path / "data"))
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("redirection, parts", [(">/dev/full", ["No space left"]), ("2>&-", None)])
def test_no_place_to_print(tmp_path, redirection, parts):
    """A full disk under the output was silent; a closed stderr was a traceback that nobody saw."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "x.txt").write_text("text")
    command_line = ["sh", "-c", f'"$0" "$@" {redirection}', sys.executable, module.__file__]
    done = subprocess.run([*command_line, "x.txt"], cwd=tmp_path, capture_output=True, timeout=120,
                          env=os.environ | {"NANONORM_DATA": str(tmp_path / "data")})
    assert done.returncode == (1 if parts else 0) and (tmp_path / "data" / "x").is_dir()
    if parts:
        one_line(done.stderr, *parts)


def test_in_a_notebook(here, monkeypatch):
    """`%run data/prepare.py`: a console there cannot be reconfigured. The variable is heeded."""
    printed, handler = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=printed.append, flush=lambda: None))
    monkeypatch.setattr(sys, "argv", ["prepare.py", "x.txt"])
    monkeypatch.setenv("NANONORM_DATA", str(here))
    Path("x.txt").write_text("text")
    runpy.run_path(module.__file__, run_name="__main__")
    signal.signal(signal.SIGTERM, handler)
    assert json.loads("".join(printed))["train_tokens"] == 3 and (here / "x").is_dir()
    monkeypatch.setenv("NANONORM_DATA", "")
    assert runpy.run_path(module.__file__)["DATA_DIR"] == REPO / "data"


# --------------------------------------------------------------------------------------------- load

@pytest.fixture
def mine(here):
    """A dataset of 90 and 10 tokens."""
    Path("mine.txt").write_text("the sea " * 12 + "ice.")
    prepare(["mine.txt"])
    return here / "mine"


def test_load(mine):
    """What was written is read, and stays on disk."""
    meta, data = load("mine", 9)
    assert meta == json.loads((mine / "meta.json").read_text(encoding="utf-8"))
    assert (data["train"].tolist(), data["val"].tolist()) == ids_of(mine)
    assert all(isinstance(ids, np.memmap) and ids.dtype == "<u2" for ids in data.values())


def test_load_prepares_stdlib(here, monkeypatch, capsys):
    """The first command of all needs no other before it."""
    monkeypatch.setattr(module, "library_files", lambda _: ([Path("a.txt")], [Path("b.txt")]))
    Path("a.txt").write_text("train"), Path("b.txt").write_text("val")
    assert load("stdlib", 2)[1]["val"].tolist() == list(b"val")
    one_line(capsys.readouterr().out, str(here / "stdlib"))
    Path("a.txt").unlink()
    load("stdlib", 2)


def test_missing_or_short_data(mine):
    """No dataset, or one shorter than a window, is one line that says what to do, and the sizes."""
    for name, source in (("nowhere", "FILES --name nowhere"), ("fineweb", "fineweb`"),
                         ("x" * 300, "FILES")):
        with refused(f"data/{name}", "python data/prepare.py " + source):
            load(name, 16)
    with refused("train has 90 tokens", "val 10", "17", "--block_size"):
        load("mine", 16)
    with refused("11;"):
        load("mine", 10)


@pytest.mark.parametrize("name, content", [
    ("train.bin", 100), ("val.bin", 0), ("val.bin", None), ("meta.json", None), ("meta.json", 20),
    ("meta.json", "{}"), ("meta.json", "[]"), ("meta.json", "[" * 9999), ("meta.json", "\udcff")])
def test_damaged_data(name, content, mine):
    """A dataset that was half copied is one line, not an IndexError after an hour."""
    path = mine / name
    if isinstance(content, str):
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    else:
        path.write_bytes(path.read_bytes()[:content])
    if content is None:
        path.unlink()
    with refused("data/mine is damaged", "data/prepare.py FILES --name mine"):
        load("mine", 4)


def test_damaged_meta(mine):
    """257.0 for a vocabulary, and values of other types, were tracebacks long after the start."""
    meta = json.loads((mine / "meta.json").read_text(encoding="utf-8"))
    bad = {str: [True, 7, None], int: [True, -1, 257.0, "7", [7], None, math.nan],
           float: [True, -1.5, 3, "3.5", None, math.nan, math.inf]}
    cases = [(key, value) for key, kind in module.META.items() for value in bad[kind]]
    cases += [("largest_id", 257), ("dtype", "uint8"), ("dtype", "O"), ("vocab_size", 256),
              ("vocab_size", 10**30), ("train_tokens", 10**30), ("val_bytes", 0)]
    for key, value in cases:
        (mine / "meta.json").write_text(json.dumps(meta | {key: value}), encoding="utf-8")
        with refused("data/mine is damaged", "make it again"):
            load("mine", 4)
    for key in module.META:
        short = {k: v for k, v in meta.items() if k != key}
        (mine / "meta.json").write_text(json.dumps(short), encoding="utf-8")
        with refused("data/mine is damaged", key, "make it again"):
            load("mine", 4)


def test_older_meta(mine):
    """Datasets made before these two keys existed have to be made again."""
    meta = json.loads((mine / "meta.json").read_text(encoding="utf-8"))
    del meta["largest_id"], meta["unigram_loss"]
    (mine / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with refused("older version", "make it again", "data/prepare.py FILES --name mine"):
        load("mine", 4)


# ---------------------------------------------------------------------------------------- downloads

@pytest.fixture
def server(monkeypatch):
    """A server on this machine: `files` by path, the Range headers it has `seen`, and its
    faults."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.seen.append(self.headers["Range"])
            raw = server.files.get(self.path)
            start = int(re.sub(r"\D", "", self.headers["Range"] or "0"))
            if server.ignore_range:
                start = 0
            status = 206 if start else 200
            if raw is None:
                status = 404
            elif start >= len(raw):
                status = 416
            body = raw[start:] if status in (200, 206) else b""
            self.send_response(status)
            if not server.hide_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:server.break_after])

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("NO_PROXY", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.seen, server.ignore_range, server.break_after = {}, [], False, None
    server.hide_length = False
    server.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


RAW = bytes(random.Random(1).choices(range(256), k=200_000))


@pytest.mark.parametrize("size", [None, len(RAW)])
@pytest.mark.parametrize("ignore_range", [False, True])
def test_download_goes_on(server, tmp_path, size, ignore_range):
    """A download that broke off was taken for whole, or began again; a server without ranges sends
    all of it again."""
    server.files["/x"], server.break_after, server.ignore_range = RAW, 150_000, ignore_range
    path = tmp_path / "new" / "x"
    with refused(server.url + "x", "run again"):
        download(server.url + "x", path, size)
    assert not path.exists()
    server.break_after = None
    assert download(server.url + "x", path, size) == path and path.read_bytes() == RAW
    assert server.seen == [None, "bytes=150000-"]
    assert [f.name for f in path.parent.iterdir()] == ["x"]
    download(server.url + "x", path, size)
    assert len(server.seen) == 2


def test_download_whole_but_not_renamed(server, tmp_path):
    """Killed after the last byte: the server has nothing left to send (416), and the file is
    whole."""
    server.files["/x"] = RAW
    (tmp_path / "x.part").write_bytes(RAW)
    assert download(server.url + "x", tmp_path / "x", len(RAW)).read_bytes() == RAW
    assert server.seen == ["bytes=200000-"]


def test_download_of_unknown_length(server, tmp_path):
    """A server that does not say how long the rest is: all of it was thrown away."""
    server.files["/x"], server.hide_length = RAW, True
    for size in None, len(RAW):
        (tmp_path / "x.part").write_bytes(RAW[:150_000])
        assert download(server.url + "x", tmp_path / "x", size).read_bytes() == RAW
        (tmp_path / "x").unlink()


def test_download_longer_than_the_file(server, tmp_path):
    """What an earlier try left is more than the server has: thrown away, and the next run fetches
    the file."""
    server.files["/x"] = RAW
    (tmp_path / "x.part").write_bytes(RAW + b"more")
    with refused(server.url + "x", "thrown away"):
        download(server.url + "x", tmp_path / "x", len(RAW))
    assert download(server.url + "x", tmp_path / "x", len(RAW)).read_bytes() == RAW
    assert server.seen[1] is None


@pytest.mark.parametrize("size", [len(RAW) - 1, len(RAW) + 1])
def test_download_of_another_size(server, tmp_path, size):
    """What a server sends whole, but of another size (a hotel's log-in page), is thrown away: else
    the next run would go on behind it, or never end."""
    server.files["/x"] = RAW
    with refused(server.url + "x", "200000", str(size)):
        download(server.url + "x", tmp_path / "x", size)
    assert list(tmp_path.iterdir()) == []


def test_download_refused(server, tmp_path):
    """No such file, no such server: one line that names the address and the source that needs no
    network (report 8)."""
    with refused(server.url + "none", "404", "stdlib", str(tmp_path / "x")):
        download(server.url + "none", tmp_path / "x")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
        with refused(url, "refused", "stdlib", str(tmp_path / "x")):
            download(url, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_shakespeare(here, server, monkeypatch):
    """Fetched once, kept in data/downloads, and prepared like any text."""
    raw = ENGLISH.encode()
    server.files["/input.txt"] = raw
    monkeypatch.setattr(module, "SHAKESPEARE", server.url + "input.txt")
    monkeypatch.setattr(module, "SHAKESPEARE_SIZE", len(raw))
    for _ in range(2):
        assert prepare(["shakespeare"])["source"] == server.url + "input.txt"
        train, val = ids_of(here / "shakespeare")
        assert bytes(train + val) == raw
    assert len(server.seen) == 1 and (here / "downloads" / "shakespeare.txt").read_bytes() == raw


def shard(ids, magic=20240520, version=1, n=None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if n is None else n
    return header.tobytes() + np.asarray(ids, "<u2").tobytes()


@pytest.fixture
def fineweb(server, monkeypatch, gpt2):
    """Two train shards and one for val, each of two documents that begin with the end-of-text
    token: ids, bytes."""
    monkeypatch.setattr(module, "FINEWEB", server.url)
    shards = []
    for seed, name in enumerate(("val_000000", "train_000001", "train_000002")):
        text = nasty_text(seed, 200)
        ids = [gpt2.eot_token, *gpt2.encode_ordinary(text)]
        ids += [gpt2.eot_token, *gpt2.encode_ordinary("z")]
        server.files[f"/fineweb_{name}.bin"] = shard(ids)
        shards.append((ids, len(text.encode()) + 1))
    return shards


def test_fineweb(here, server, fineweb):
    """The shards' tokens as they came; bytes are the text's, and an end-of-text token has none."""
    (val, n_val), (one, n_one), (two, n_two) = fineweb
    meta = prepare(["fineweb"], shards=2)
    assert ids_of(here / "fineweb") == (one + two, val)
    assert (meta["train_bytes"], meta["val_bytes"]) == (n_one + n_two, n_val)
    assert (meta["tokenizer"], meta["vocab_size"], meta["dtype"]) == ("gpt2", 50257, "uint16")
    prepare(["fineweb"], shards=1)
    assert ids_of(here / "fineweb") == (one, val) and len(server.seen) == 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [
    b"<html>", shard([1])[:8], shard([1], magic=1), shard([1], version=2), shard([1, 2, 3])[:-2],
    shard([1], n=2**31 - 1), shard([1], n=-1), shard([1, 50257]), shard([])],
    ids=["html", "header", "magic", "version", "truncated", "huge", "negative", "past_ids", "none"])
def test_bad_shard(here, server, fineweb, bad):
    """A shard that is another file, or not whole, was trained on as noise: one line names it,
    nothing is written."""
    server.files["/fineweb_train_000002.bin"] = bad
    with refused("fineweb_train_000002.bin", "delete it"):
        prepare(["fineweb"], shards=2)
    assert [f.name for f in here.iterdir()] == ["downloads"]


@pytest.mark.parametrize("args, parts", [
    (["x.txt", "--tokenizer", "gpt2"], ["gpt2", "TIKTOKEN_CACHE_DIR", "--tokenizer bytes"]),
    (["fineweb"], ["gpt2", "TIKTOKEN_CACHE_DIR"]), (["shakespeare"], ["input.txt", "stdlib"])])
def test_no_network(tmp_path, args, parts):
    """Without a network and a stored vocabulary there was a traceback of a hundred lines (report
    8)."""
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{closed.getsockname()[1]}"
        env = {"no_proxy": "", "NO_PROXY": "", "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty")}
        for name in "http_proxy", "https_proxy", "all_proxy":
            env |= {name: proxy, name.upper(): proxy}
        done = command(tmp_path, *args, **env)
    assert (done.returncode, done.stdout) == (1, b"")
    one_line(done.stderr, *parts)
    assert not list((tmp_path / "data").glob("*/*.bin"))
