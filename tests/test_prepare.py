"""data/prepare.py: what comes out is what went in, whatever the bytes, the block size or the network.
Nothing here needs a network; without a stored GPT-2 vocabulary the tests that use it are skipped."""
import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tiktoken_ext import openai_public

from data import prepare as module
from data.prepare import download, encode, find_files, get_tokenizer, library_files, prepare, prepare_text, safe_cut

EXPRESSIONS = "r50k_base", "cl100k_base", "o200k_base"     # gpt2 has that of r50k_base
FRAGMENTS = [
    " ", "  ", "     ", "\n", "\n\n", "\n \n", "\r\n", "\r\n\r\n", "\t", "\t\t", " \n", "  \t\n", "\u00a0", " \u00a0",
    "\u2003", "\x85", "\x0b", "\x1c", "\u2028", "}\n/", "}\n", "//\n\n/", ");\r\n", "a\n", "Z \n", "7\n", "_\n",
    "the", " the", "The", " don't", "I'LL", "we've", "'s", " '", "''re", "\n    return x", "\n\tif (a[i]):\n",
    "def f(self):\n", "  # note", "0", " 12345678", "3.14", "1\u00b2", "\u0664\u0662",
    "antidisestablishmentarianism" * 3, "camelCaseHTTPWord", "日本語", "。\n", "한국어 ", "ไทย", "e\u0301", "\u0301",
    "\u0301\n", " \u0301", "n\u0303\n", "é", "İ", "ǅ", "🌊", " 🧊\n", "👩\u200d🚀", "\u200b", "\ufeff", "\ufffd", "\x00",
    "…", " — ", "<|endoftext|>", "!!!", "?\n\n\n", "$ x^2 $", "\\n", "\U0010ffff", "，海。",
    ",b", ".\r\n", "1,000", "a.B", "\rx"]
ENGLISH = "The sea keeps what it's given, and the ice gives back what the sea has kept for 1000 years.\n" * 30


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
    """One of tiktoken's regular expressions over a made-up vocabulary that shows each wrong cut: a byte and the white
    space around it, or a comma or full stop behind it, merge before all else, so that tokens differ as soon as one
    piece holds both. Ids pass 65,536."""
    space, other = b" \n\r\t", [b for b in range(256) if b not in b" \n\r\t"]
    pairs = [bytes([b, s]) for b in other for s in space] + [bytes([s, b]) for b in other for s in space]
    pairs += [bytes([b, mark]) for b in other for mark in b",.\xef\xe3"]
    pairs += [bytes([s, t]) for s in space for t in space] + [bytes([s]) * 4 for s in space]
    words = [bytes([a, b]) for a in b"etaoinsh'0/}\xe3\xcc" for b in b"etaoinshr'1/\x81"] + [b"the", b" the", b"thes"]
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
    monkeypatch.setattr(module, "HERE", folder)
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
    """Run a copy of the script, for its datasets lie beside it."""
    (tmp_path / "data").mkdir(exist_ok=True)
    shutil.copy(module.__file__, tmp_path / "data" / "prepare.py")
    return subprocess.run([sys.executable, "data/prepare.py", *map(str, args)], cwd=tmp_path, env=os.environ | env,
                          capture_output=True, timeout=120)


def one_line(text: str | bytes, *parts: str):
    text = text.decode("ascii", "replace") if isinstance(text, bytes) else text
    assert len(text.strip().splitlines()) == 1 and "Traceback" not in text, text
    assert all(part in text for part in parts), text


def refused(*parts: str):
    """The program ends with exit code 1 and one line that holds `parts`."""
    class Refused:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, _):
            assert kind is SystemExit, "not refused" if kind is None else error
            one_line(error.code, *parts)
            return True
    return Refused()


# ------------------------------------------------------------------------------------------------------ tokenizers

@pytest.mark.parametrize("raw", [b"\xef\xbb\xbfa\r\nb\r\n", b"\xef\xbb\xbfa\0\nb\r\n", bytes(range(256)) * 2,
                                 b"\xff\xfe\xc3"])
def test_bytes_come_back(here, raw):
    """A BOM, CRLF, NUL and bytes that are no UTF-8 were translated or dropped on some systems (reports 14, 41)."""
    Path("raw.txt").write_bytes(raw)
    meta = prepare(["raw.txt"])
    train, val = ids_of(here / "raw")
    assert train + val == list(raw)
    assert meta["train_bytes"] + meta["val_bytes"] == len(raw) == meta["train_tokens"] + meta["val_tokens"]
    assert (meta["invalid_sequences"], meta["tokenizer"], meta["vocab_size"]) == (0, "bytes", 257)


@pytest.mark.parametrize("text", ["", "é日🌊 👩\u200d🚀", "<|endoftext|>", "\ufeff\r\n\0", "".join(FRAGMENTS)])
def test_bytes_tokenizer_round_trips(text):
    """A prompt with a character that the training text never had raised a KeyError (report 3)."""
    tokenizer, raw = get_tokenizer("bytes"), text.encode()
    assert encode(tokenizer, raw) == tokenizer.encode_ordinary(text) == list(raw)
    assert tokenizer.decode(list(raw)) == text and tokenizer.eot_token == 256
    assert encode(tokenizer, b"\xff\xc3") == [255, 195]


def test_gpt2_prompt(gpt2):
    """The literal <|endoftext|> in a text raised, or became the special token (report 11)."""
    ids = encode(gpt2, b"\xef\xbb\xbfa<|endoftext|>\r\nb\xff")
    assert gpt2.eot_token not in ids and gpt2.decode_bytes(ids) == b"\xef\xbb\xbfa<|endoftext|>\r\nb\xef\xbf\xbd"


@pytest.mark.parametrize("chunk", [3, 64, 1000])
def test_gpt2_ids_do_not_depend_on_chunks(here, monkeypatch, gpt2, chunk):
    """Text encoded piece by piece has to give the ids of the text encoded whole, characters cut by a block too."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    for seed in range(6):
        text = "\ufeff" + nasty_text(seed, 150 if chunk == 3 else 800)
        Path("nasty.txt").write_bytes(text.encode())
        meta = prepare_text("nasty", "nasty.txt", [Path("nasty.txt")], 1, gpt2)
        assert ids_of(here / "nasty") == (gpt2.encode_ordinary(text), []), seed
        assert (meta["train_bytes"], meta["invalid_sequences"]) == (len(text.encode()), 0), seed
        assert gpt2.eot_token not in ids_of(here / "nasty")[0]


def test_gpt2_seam_between_the_splits(here, monkeypatch, gpt2):
    """The val split begins at a safe cut, wherever blocks end: train and val together are the whole text's ids."""
    for chunk in range(60, 120):
        monkeypatch.setattr(module, "CHUNK", chunk)
        text = ENGLISH[:(7 * chunk + 1) * 10 // 9 + chunk % 3]      # the seam is 1 to 3 bytes into a block
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
    """Chinese lines hold no space and end in a full stop: a whole book of them became one chunk, in quadratic time."""
    text = f"海里有冰，冰里有海。{end}" * 999
    assert 0 < safe_cut(text) and len(text) - safe_cut(text) < 20


def test_wide_ids_come_back(here, monkeypatch, unfetched):
    """Ids past 65,535 were cut to 16 bits: the type follows the vocabulary and is recorded (report 10)."""
    monkeypatch.setattr(module, "CHUNK", 100)
    texts = [nasty_text(seed, 300) for seed in (1, 2)]
    for name, text in zip("ab", texts):
        Path(name).write_bytes(text.encode())
    meta = prepare_text("wide", "a b", [Path("a"), Path("b")], 2, unfetched)
    a, b = map(unfetched.encode_ordinary, texts)
    assert ids_of(here / "wide") == (a + [unfetched.eot_token] + b, []) and min(a) >= 70_000
    assert (meta["dtype"], meta["vocab_size"]) == ("uint32", unfetched.n_vocab)


def test_dtype_follows_the_vocabulary(here):
    """The smallest type that holds every id, the end-of-text token's included."""
    for n, dtype in (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32"):
        tokenizer = tiktoken.Encoding("t", pat_str="(?s:.)", mergeable_ranks={bytes([i]): i for i in range(255)},
                                      special_tokens={"<|endoftext|>": n - 1})
        with module.Writer("t", tokenizer, "") as writer:
            writer.put("train", [n - 1], 1)
        assert writer.meta["dtype"] == dtype and ids_of(here / "t") == ([n - 1], []), n


# ---------------------------------------------------------------------------------------------------- splits, sources

def test_val_is_the_end_of_own_text(here):
    """The last val_fraction of bytes."""
    raw = bytes(random.Random(0).choices(range(256), k=1000))
    Path("own.txt").write_bytes(raw)
    for fraction in 0.1, 0.5:
        prepare(["own.txt"], val_fraction=fraction)
        assert ids_of(here / "own") == (list(raw[:int(1000 * (1 - fraction))]), list(raw[int(1000 * (1 - fraction)):]))


@pytest.mark.parametrize("tokenizer", ["bytes", "unfetched"])
@pytest.mark.parametrize("unfetched", ["r50k_base"], indirect=True)
def test_end_of_text_between_files(here, monkeypatch, tokenizer, unfetched):
    """Two files of a split have an end-of-text token between them on any number of cores; the file that straddles the
    seam has none there, and neither has a seam between two files."""
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
        prepare_text("many", "", files, None, encoding, 0.5)
        train, val = map(split_at_end_of_text, ids_of(here / "many"))
        assert train[:2] + [train[2] + val[0]] + val[1:] == kept and len(train) == len(val) == 3, cores
        meta = prepare_text("many", "", files, 4, encoding)
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
    """The dataset that needs no network: the same files in the same order each time, val spread evenly among them."""
    root = Path("lib").resolve()
    for i in range(40):
        for name in (f"{i:02d}.py", f"pkg/{i:02d}.py", f"test/{i}.py", f"pkg/tests/{i}.py", f"site-packages/{i}.py",
                     f"{i}.txt"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"# {name}\n")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(root))
    for fraction in 0.1, 0.25:
        files, n_train = library_files(fraction)
        names = [f.relative_to(root).as_posix() for f in files]
        assert sorted(names) == [f"{i:02d}.py" for i in range(40)] + [f"pkg/{i:02d}.py" for i in range(40)]
        assert names[:n_train] == sorted(names[:n_train]) and names[n_train:] == sorted(names[n_train:])
        assert len(files) - n_train == 80 * fraction and {"pkg" in name for name in names[n_train:]} == {True, False}
    files, n_train = library_files(0.1)
    prepare(["stdlib"])
    for ids, part in zip(ids_of(here / "stdlib"), (files[:n_train], files[n_train:])):
        assert ids == [i for f in part for i in [*f.read_bytes(), 256]][:-1]


def test_real_stdlib():
    """This Python's library is found, and is not mostly its tests."""
    files, n_train = library_files(0.1)
    assert len(files) > 200 and abs(len(files) - n_train - len(files) / 10) <= 1
    assert any(f.name == "argparse.py" for f in files) and not any(f.name == "test_argparse.py" for f in files)


@pytest.mark.parametrize("source, part", [("empty.txt", "no text"), ("missing.txt", "no such file"), ("folder", ".md")])
def test_nothing_to_read(tmp_path, source, part):
    """An empty or missing file ended in a traceback, or in an empty dataset that the next run took (report 14)."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(b"png")
    done = command(tmp_path, source)
    assert (done.returncode, done.stdout) == (1, b"")
    one_line(done.stderr, source, part)
    assert [f.name for f in (tmp_path / "data").iterdir() if f.name != "__pycache__"] == ["prepare.py"]


@pytest.mark.parametrize("args", ["", "x.txt --val_fraction 1", "x.txt --val_fraction x", "x.txt --tokenizer gpt9",
                                  "fineweb --shards 0", "x.txt --tok bytes"])
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
    for name in "../x", "a/b", ".hidden", "..", "downloads":
        with refused(name):
            prepare(["x.txt"], name=name)
    with refused("--tokenizer bytes"):
        prepare(["fineweb"], "bytes")
    assert [f.name for f in here.iterdir()] == ["downloads"]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_ascii_locale(tmp_path, request, tokenizer):
    """A console that knows only ASCII stopped the program, or turned the text into question marks (report 9)."""
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


# ---------------------------------------------------------------------------------------------------------- counting

@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
@pytest.mark.parametrize("raw, count", [
    (b"a \xef\xbf\xbd b", 0), (b"a \xff\xfe b", 2), (b"\xef\xbf\xbd\xff \xef\xbf\xbd\xc3", 2),
    ("sea 🌊 日本\ufffd".encode(), 0), (b"\xef\xef\xbf\xbd \xf0\xef\xbf\xbd", 2)])
@pytest.mark.parametrize("unfetched", ["cl100k_base"], indirect=True)
def test_invalid_sequences_are_replaced_and_counted(here, monkeypatch, unfetched, raw, count, chunk):
    """Bytes that are no UTF-8 stopped the program; a U+FFFD that is in the text itself is none of them (report 14)."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    Path("x.txt").write_bytes(raw)
    meta = prepare_text("x", "x.txt", [Path("x.txt")], None, unfetched)
    text = raw.decode("utf-8", "replace")
    assert unfetched.decode(sum(ids_of(here / "x"), [])) == text
    assert meta["invalid_sequences"] == count
    assert meta["train_bytes"] + meta["val_bytes"] == len(text.encode())


def test_bits_per_byte(here, gpt2):
    """Bytes of the text are counted, not tokens or characters: a token may be half an emoji (report 25)."""
    from train import bits_per_byte
    Path("sea.txt").write_text("sea 🌊 ice 🧊", encoding="utf-8")
    meta = prepare(["sea.txt"], "gpt2")
    assert (meta["train_tokens"] + meta["val_tokens"], meta["train_bytes"] + meta["val_bytes"]) == (8, 17)
    assert round(bits_per_byte(math.log(50257), 8, 17), 4) == 7.3492
    assert bits_per_byte(math.log(256), 17, 17) == pytest.approx(8, abs=1e-12)


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
    (tmp_path / "data").mkdir()
    shutil.copy(module.__file__, tmp_path / "data")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 << 10      # KiB
    shutil.rmtree(tmp_path / "data" / "big")
    (tmp_path / "big.txt").unlink()


# -------------------------------------------------------------------------------------------------- whole or not at all

def test_replaced_whole(here):
    """The same name again: nothing of the former dataset stays, and nothing lies beside it."""
    Path("x.txt").write_text("a long first text, longer than the next")
    first = prepare(["x.txt"])
    (here / f".x.{os.getpid()}.part").mkdir()      # left by a killed run of the same process id, as containers have
    Path("x.txt").write_text("second")
    assert prepare(["x.txt"]) != first
    assert bytes(sum(ids_of(here / "x"), [])) == b"second"
    assert sorted(f.name for f in here.rglob("*")) == ["meta.json", "train.bin", "val.bin", "x"]


def test_strangers_in_the_folder(here):
    """A run's folder or notes put inside a dataset went when it was prepared again."""
    Path("x.txt").write_text("a first text")
    prepare(["x.txt"])
    (here / "x" / "notes.md").write_text("mine")
    with refused("holds more than a dataset", "--name"):
        prepare(["x.txt"])
    with refused("downloads"):
        prepare(["x.txt"], name="downloads")
    assert (here / "x" / "notes.md").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
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
    """No room for the files, seen while they are written or only when they are closed: one line, and nothing half
    written stays. A limit on file sizes stands for the full disk."""
    resource = pytest.importorskip("resource")
    (tmp_path / "x.txt").write_text("sea and ice " * n)
    (tmp_path / "data").mkdir()
    shutil.copy(module.__file__, tmp_path / "data")
    done = subprocess.run([sys.executable, "data/prepare.py", "x.txt"], cwd=tmp_path, capture_output=True, timeout=120,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)))
    assert done.returncode == 1
    one_line(done.stderr, "could not prepare x")
    assert [f.name for f in (tmp_path / "data").iterdir() if f.name != "__pycache__"] == ["prepare.py"]


# ---------------------------------------------------------------------------------------------------------- downloads

@pytest.fixture
def server(monkeypatch):
    """A server on this machine: `files` by path, the Range headers it has `seen`, and its faults."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.seen.append(self.headers["Range"])
            raw = server.files.get(self.path)
            start = 0 if server.ignore_range else int(re.sub(r"\D", "", self.headers["Range"] or "0"))
            status = 404 if raw is None else 416 if start and start >= len(raw) else 206 if start else 200
            body = raw[start:] if status in (200, 206) else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:server.break_after])

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("NO_PROXY", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.seen, server.ignore_range, server.break_after = {}, [], False, None
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
    """A download that broke off was taken for whole, or began again; a server without ranges sends all of it again."""
    server.files["/x"], server.break_after, server.ignore_range = RAW, 150_000, ignore_range
    path = tmp_path / "new" / "x"
    with refused(server.url + "x", "run again"):
        download(server.url + "x", path, size)
    assert not path.exists()
    server.break_after = None
    assert download(server.url + "x", path, size) == path and path.read_bytes() == RAW
    assert server.seen == [None, "bytes=150000-"] and [f.name for f in path.parent.iterdir()] == ["x"]
    download(server.url + "x", path, size)
    assert len(server.seen) == 2


def test_download_whole_but_not_renamed(server, tmp_path):
    """Killed after the last byte: the server has nothing left to send (416), and the file is whole."""
    server.files["/x"] = RAW
    (tmp_path / "x.part").write_bytes(RAW)
    assert download(server.url + "x", tmp_path / "x", len(RAW)).read_bytes() == RAW and server.seen == ["bytes=200000-"]


def test_download_longer_than_the_file(server, tmp_path):
    """What an earlier try left is more than the server has: thrown away, and the next run fetches the file."""
    server.files["/x"] = RAW
    (tmp_path / "x.part").write_bytes(RAW + b"more")
    with refused(server.url + "x", "thrown away"):
        download(server.url + "x", tmp_path / "x", len(RAW))
    assert download(server.url + "x", tmp_path / "x", len(RAW)).read_bytes() == RAW and server.seen[1] is None


@pytest.mark.parametrize("size", [len(RAW) - 1, len(RAW) + 1])
def test_download_of_another_size(server, tmp_path, size):
    """What a server sends whole, but of another size (a hotel's log-in page), is thrown away: else the next run would
    go on behind it, or never end."""
    server.files["/x"] = RAW
    with refused(server.url + "x", "200000", str(size)):
        download(server.url + "x", tmp_path / "x", size)
    assert list(tmp_path.iterdir()) == []


def test_download_refused(server, tmp_path):
    """No such file, no such server: one line that names the address and the source that needs no network (report 8)."""
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
    """Two train shards and one for val, each of two documents that begin with the end-of-text token: ids, bytes."""
    monkeypatch.setattr(module, "FINEWEB", server.url)
    shards = []
    for seed, name in enumerate(("val_000000", "train_000001", "train_000002")):
        text = nasty_text(seed, 200)
        ids = [gpt2.eot_token, *gpt2.encode_ordinary(text), gpt2.eot_token, *gpt2.encode_ordinary("z")]
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
    shard([1], n=2**31 - 1), shard([1], n=-1), shard([1, 50257])],
    ids=["html", "header", "magic", "version", "truncated", "huge", "negative", "past_ids"])
def test_bad_shard(here, server, fineweb, bad):
    """A shard that is another file, or not whole, was trained on as noise: one line names it, nothing is written."""
    server.files["/fineweb_train_000002.bin"] = bad
    with refused("fineweb_train_000002.bin", "delete it"):
        prepare(["fineweb"], shards=2)
    assert [f.name for f in here.iterdir()] == ["downloads"]


@pytest.mark.parametrize("args, parts", [
    (["x.txt", "--tokenizer", "gpt2"], ["gpt2", "TIKTOKEN_CACHE_DIR", "--tokenizer bytes"]),
    (["fineweb"], ["gpt2", "TIKTOKEN_CACHE_DIR"]), (["shakespeare"], ["input.txt", "stdlib"])])
def test_no_network(tmp_path, args, parts):
    """Without a network and a stored vocabulary there was a traceback of a hundred lines (report 8)."""
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{closed.getsockname()[1]}"
        env = {name: proxy for kind in ("http_proxy", "https_proxy", "all_proxy") for name in (kind, kind.upper())}
        done = command(tmp_path, *args, **env, no_proxy="", NO_PROXY="", TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"))
    assert (done.returncode, done.stdout) == (1, b"")
    one_line(done.stderr, *parts)
    assert not list((tmp_path / "data").glob("*/*.bin"))
