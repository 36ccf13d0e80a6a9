"""Sampling as its user meets it: prompts of any bytes, any sampling setting, and text that is never half a character.

One tiny run is trained for all tests; most call sample.main in this process."""
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
import torch

import data.prepare
import sample
import train
from model import GPT, NORMS, GPTConfig

REPO = Path(__file__).resolve().parents[1]
TINY = ("--dataset mine --device cpu --n_layer 2 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --max_iters 20 "
        "--warmup_iters 2 --eval_interval 10").split()
TEXT = "sea 🌊 ice 🧊, 日本 é"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Runs of all four norms, whose dataset is gone."""
    root = tmp_path_factory.mktemp("root")
    rng = random.Random(0)
    words = "".join(rng.choice(("sea ", "ice ", "of ", "the\n")) for _ in range(1000))
    (root / "mine.txt").write_text(words, encoding="utf-8")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as m:
        m.setattr(data.prepare, "HERE", root / "data")
        m.setattr(train, "HERE", root)
        data.prepare.prepare([str(root / "mine.txt")])
        train.main(train.parse_args([*TINY, "--norm", *NORMS, "--out_dir", str(root / "out")]))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    shutil.rmtree(root / "data")
    return root / "out"


@pytest.fixture
def text(out, monkeypatch, capsys):
    """text(*flags): what sample.py prints on a CPU, without the last newline."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def text(*flags, norm="geo"):
        argv = ["sample.py", "--out_dir", out / norm, "--max_new_tokens", 40, *flags]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        sample.main()
        printed = capsys.readouterr()
        assert printed.err == "" and printed.out.endswith("\n")
        return printed.out[:-1]
    return text


def refusal(text, *flags) -> str:
    """The one line with which sample.py ends, exit code 1."""
    with pytest.raises(SystemExit) as info:
        text(*flags)
    assert isinstance(info.value.code, str) and "\n" not in info.value.code
    return info.value.code


def start(out: Path, *flags, **env) -> subprocess.Popen:
    command = [sys.executable, REPO / "sample.py", "--out_dir", out / "geo", *flags]
    return subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


# --------------------------------------------------------------------------------------------------------- prompts

@pytest.mark.parametrize("norm", NORMS)
def test_samples_without_the_dataset(norm, text, out):
    """A deleted or re-prepared dataset once broke sampling, or garbled it: the checkpoint carries its tokenizer."""
    got = text("--start", "sea ", "--temperature", 0, norm=norm)
    state = torch.load(out / norm / "best.pt", weights_only=True)
    model = GPT(GPTConfig(**state["model_config"])).eval()
    model.load_state_dict(state["model"])
    ids = model.generate(torch.tensor([list(b"sea ")]), 40, 0)[0].tolist()
    assert got.startswith("sea ") and got == data.prepare.get_tokenizer("bytes").decode(ids)


@pytest.mark.parametrize("prompt", ["é", "日本", "🧊", TEXT, "<|endoftext|>", " two  spaces\r\n", "x" * 100])
def test_any_prompt_is_echoed(prompt, text):
    """A character the training text never had was once a KeyError; any prompt is printed as it was given."""
    assert text("--start", prompt).startswith(prompt)
    assert text("--start", prompt, "--max_new_tokens", 0) == prompt


def test_empty_prompt(text):
    """An empty prompt starts from the end-of-text token, which is not printed; the default is a newline."""
    assert text("--start", "", "--max_new_tokens", 0) == ""
    assert len(text("--start", "", "--temperature", 0, "--max_new_tokens", 5)) == 5
    assert text("--max_new_tokens", 0) == "\n"


def test_prompt_longer_than_the_context(text, out, tmp_path):
    """The last block_size tokens are seen, no more and no less, and all of the prompt is printed."""
    state = torch.load(out / "post" / "best.pt", weights_only=True)
    torch.manual_seed(0)
    weights = {k: torch.randn_like(v) if v.dim() > 1 else v for k, v in state["model"].items()}     # each token counts
    train.save(state | {"model": weights}, tmp_path / "best.pt")
    tail = "the\nsea of ice s"
    got = {head: text("--out_dir", tmp_path, "--start", head + tail, "--temperature", 0)[len(head):]
           for head in ("", "ice of " * 9)}
    assert len(tail) == 16 and got[""] == got["ice of " * 9] and got[""].startswith(tail)
    assert text("--out_dir", tmp_path, "--start", "x" + tail[1:], "--temperature", 0)[1:] != got[""][1:]


def test_prompt_from_a_file(text, tmp_path):
    """FILE:path is read as bytes, whatever the locale; a file that is not there is one line."""
    path = tmp_path / "prömpt.txt"
    path.write_bytes(TEXT.encode() + b"\r\n\xff")
    assert text("--start", f"FILE:{path}", "--max_new_tokens", 0) == TEXT + "\r\n\ufffd"
    path.write_bytes(b"sea ")
    assert text("--start", f"FILE:{path}") == text("--start", "sea ")
    for missing in (tmp_path / "nothing.txt", tmp_path):
        assert str(missing) in refusal(text, "--start", f"FILE:{missing}")


# -------------------------------------------------------------------------------------------------------- settings

def test_seeds_and_temperature(text):
    """Same seed, same text; temperature 0, and one too small to divide by, is argmax whatever the seed."""
    a, b, c = (text("--seed", seed) for seed in (1, 1, 2))
    assert a == b != c and text("--seed", 1, "--temperature", 5) != a
    greedy = text("--temperature", 0, "--seed", 1)
    assert greedy == text("--temperature", 0, "--seed", 2) == text("--temperature", "1e-45", "--seed", 3) != a


def test_top_k(text):
    """top_k 1 is greedy; 100000, past the vocabulary, is as if not given, where it once was an exception."""
    assert text("--top_k", 1) == text("--temperature", 0)
    assert text("--top_k", 257) == text("--top_k", 100000) == text() != text("--top_k", 2)


def test_several_samples(text):
    """Each sample starts with the prompt and differs; the first does not depend on how many follow."""
    samples = text("--start", "ice ", "--num_samples", 3, "--temperature", 1).split("\n---------------\n")
    assert len(set(samples)) == 3 and all(s.startswith("ice ") for s in samples)
    assert samples[0] == text("--start", "ice ", "--temperature", 1)


@pytest.mark.parametrize("flags, says", [
    ("--temperature -1", "--temperature"), ("--temperature nan", "--temperature"), ("--top_k 0", "--top_k"),
    ("--top_k -3", "--top_k"), ("--max_new_tokens -1", "--max_new_tokens"), ("--num_samples 0", "--num_samples"),
    ("--seed -1", "--seed"), ("--temp 1", "--temp"), ("--top_k two", "--top_k")])
def test_wrong_flag(flags, says, text, capsys):
    """A wrong value is one line and exit 2, not a traceback from inside torch."""
    with pytest.raises(SystemExit) as info:
        text(*flags.split())
    err = capsys.readouterr().err
    assert info.value.code == 2 and err.count("\n") == 1 and says in err


# ------------------------------------------------------------------------------------------------------------ text

def tokenizer(name: str) -> tiktoken.Encoding:
    """`merged` is a small BPE whose tokens begin and end inside emoji and CJK, with ids that stand for nothing."""
    if name != "merged":
        try:
            return data.prepare.get_tokenizer(name)
        except SystemExit:
            pytest.skip(f"no vocabulary of {name}")
    tokens = [b" \xf0", b"\xf0\x9f", b"\x9f\x8c", b"\x97\xa5", b"\xe6\x97", b" \xf0\x9f\xa7"]
    ranks = {bytes([i]): i for i in range(256)} | {token: 256 + i for i, token in enumerate(tokens)}
    return tiktoken.Encoding("merged", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300})


@pytest.mark.parametrize("name", ["bytes", "merged", "gpt2"])
def test_text_is_whole_characters(name):
    """Emoji and CJK sampled a token at a time once printed as broken bytes: what is printed is whole characters, and
    together what decoding all ids at once gives, also where the text is cut in mid-character."""
    t = tokenizer(name)
    ids = data.prepare.encode(t, TEXT.encode())
    pieces = list(sample.as_text(iter(ids), t))
    assert "".join(pieces) == TEXT and "" in pieces[:-1] and len([piece for piece in pieces if piece]) >= 8
    for end in range(len(ids)):
        *pieces, last = sample.as_text(iter(ids[:end]), t)
        assert "\ufffd" not in "".join(pieces) and last in ("", "\ufffd")
        assert "".join(pieces) + last == t.decode(ids[:end])
    rng, known = random.Random(0), range(262 if name == "merged" else t.n_vocab)
    for _ in range(200):
        ids = rng.choices(known, k=rng.randrange(12))
        assert "".join(sample.as_text(ids, t)) == t.decode(ids)


def test_text_comes_as_it_is_made():
    """A character is printed as soon as its last byte is there, not at the end."""
    t, seen = tokenizer("bytes"), []

    def ids():
        for i in "a🧊b".encode():
            seen.append("".join(pieces))
            yield i
    pieces = []
    for piece in sample.as_text(ids(), t):
        pieces.append(piece)
    assert seen == ["", "a", "a", "a", "a", "a🧊"]


def test_ids_without_a_token():
    """Some vocabularies have gaps, which a young model may choose: they print nothing, and are no KeyError."""
    assert "".join(sample.as_text([115, 280, 101, 290, 97], tokenizer("merged"))) == "sea"


# ------------------------------------------------------------------------------------------------------ checkpoints

def test_best_before_latest(out, tmp_path):
    """The model is best.pt where there is one, else ckpt.pt."""
    latest = torch.load(out / "geo" / "ckpt.pt", weights_only=True)
    best = latest | {"model": {k: v + 1 for k, v in latest["model"].items()}}
    train.save(latest, tmp_path / "ckpt.pt")
    assert all(torch.equal(v, latest["model"][k]) for k, v in sample.load_model(tmp_path)[0].state_dict().items())
    train.save(best, tmp_path / "best.pt")
    model, t = sample.load_model(tmp_path)
    assert all(torch.equal(v, best["model"][k]) for k, v in model.state_dict().items())
    assert not model.training and t.name == "bytes"


def test_no_run_in_the_folder(text, out, tmp_path):
    """A folder without a checkpoint is one line, which names the runs below it if there are any."""
    line = refusal(text, "--out_dir", str(out))
    assert all(str(out / norm) in line for norm in NORMS)
    assert "train.py" in refusal(text, "--out_dir", str(tmp_path / "nowhere"))
    (tmp_path / "ckpt.pt").write_bytes((out / "geo" / "ckpt.pt").read_bytes()[:5000])
    assert str(tmp_path / "ckpt.pt") in refusal(text, "--out_dir", str(tmp_path))


# ---------------------------------------------------------------------------------------------------- command line

@pytest.mark.skipif(os.name == "nt", reason="bytes as arguments and pipes are POSIX")
def test_consoles_and_pipes(out):
    """Prompt bytes that are no UTF-8, a console of ASCII alone, `| head -c 5`: each once ended in a traceback."""
    prompt = ["--start", "é ".encode() + b"\xff!", "--max_new_tokens", "0"]
    utf8 = start(out, *prompt, PYTHONIOENCODING="utf-8")
    ascii_ = start(out, *prompt, PYTHONIOENCODING="ascii", LC_ALL="C")
    closed = start(out, "--start", "sea sea", "--max_new_tokens", "2000")
    assert b"sea sea".startswith(os.read(closed.stdout.fileno(), 5))
    closed.stdout.close()
    assert (closed.stderr.read(), closed.wait(60)) == (b"", 0)
    assert (utf8.communicate(timeout=60), utf8.returncode) == (("é \ufffd!\n".encode(), b""), 0)
    assert (ascii_.communicate(timeout=60), ascii_.returncode) == ((b"? ?!\n", b""), 0)
