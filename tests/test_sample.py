"""Sampling as its user meets it: prompts of any bytes, any sampling setting, and text that is never
half a character; and the functions that choose tokens.

The checkpoints are built here from seeded weights; most tests call sample.main in this process."""
import io
import math
import os
import random
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import tiktoken
import torch
import torch.nn.functional as F

import data.prepare
import sample
from data.runs import BEST_KEYS, FORMAT
from model import GPT, NORMS, GPTConfig

REPO = Path(__file__).resolve().parents[1]
TEXT = "sea 🌊 ice 🧊, 日本 é"
TINY = dict(block_size=16, vocab_size=257, n_layer=2, n_head=2, n_embd=16)
LETTERS = b"abcdefghijklmnopqrstuvwxyz,.\n "


def writer_of_letters(norm="geo", seed=0) -> GPT:
    """A model with decided answers to which every token seen counts. They are letters, but for a
    rare exception at a high temperature, so that a character is a token."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**TINY, norm=norm)).eval()
    letters = torch.zeros(model.wte.num_embeddings, 1)
    letters[list(LETTERS)] = 1
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_()
        model.wte.weight.mul_(0.1 + 0.9 * letters)
    return model


def save(path: Path, gpt: GPT, /, **changes):
    """best.pt as train.py writes it; a change of None leaves that key out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {key: {} for key in BEST_KEYS}
    state |= {"format": FORMAT, "model": gpt.state_dict(), "model_config": asdict(gpt.config),
              "tokenizer": "bytes"} | changes
    torch.save({key: value for key, value in state.items() if value is not None}, path)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Runs of all four norms, without a dataset."""
    root = tmp_path_factory.mktemp("root") / "out"
    for norm in NORMS:
        for name in ("best.pt", "ckpt.pt"):
            save(root / norm / name, writer_of_letters(norm))
    return root


@pytest.fixture
def text(out, monkeypatch, capsys):
    """text(*flags): what sample.py prints on a CPU, without the last newline."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def text(*flags, norm="geo"):
        argv = ["--out_dir", out / norm, "--max_new_tokens", 40, *flags]
        sample.main(list(map(str, argv)))
        printed = capsys.readouterr()
        assert printed.err == "" and printed.out.endswith("\n")
        return printed.out[:-1]
    return text


@pytest.fixture
def produce(monkeypatch):
    """produce(raw, ...): from now on the model's new tokens are these bytes; returns a list that
    receives each id when it is asked for. A list of ids may be given instead of bytes."""
    def produce(*continuations):
        asked, waiting = [], [list(ids) for ids in continuations]

        def generate_tokens(model, idx, max_new_tokens, temperature, top_k, generator):
            for i in waiting.pop(0)[:max_new_tokens]:
                asked.append(i)
                yield torch.tensor([[i]])
        monkeypatch.setattr(sample, "generate_tokens", generate_tokens)
        return asked
    return produce


def refusal(text, *flags) -> str:
    """The one line with which sample.py ends, exit code 1."""
    with pytest.raises(SystemExit) as info:
        text(*flags)
    assert isinstance(info.value.code, str) and "\n" not in info.value.code
    return info.value.code


def start(out: Path, *flags, stdout=subprocess.PIPE, **env) -> subprocess.Popen:
    command = [sys.executable, REPO / "sample.py", "--out_dir", out / "geo", *flags]
    env = os.environ | {"PYTHONUNBUFFERED": ""} | env   # buffered, as it is for most users
    return subprocess.Popen(command, env=env, stdout=stdout, stderr=subprocess.PIPE)


# ------------------------------------------------------------------------------ choosing a token

def make(norm="geo", seed=0, **changes):
    torch.manual_seed(seed)
    settings = TINY | dict(vocab_size=70, n_layer=3, n_embd=32, norm=norm) | changes
    return GPT(GPTConfig(**settings)).eval()


def ids(B, T, seed=0, vocab_size=70):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("block_size, prompt",
                         [(16, 5), (16, 16), (16, 30), (7, 3), (1, 1), (2, 3)])
def test_generate_equals_the_uncached_model(norm, block_size, prompt):
    """Greedy, far past the context: every choice is the uncached model's on the visible tokens."""
    model = make(norm, block_size=block_size)
    with torch.no_grad():
        model.wte.weight.mul_(10)       # decided answers, not ties that rounding breaks
    idx = ids(2, prompt)
    out = sample.generate(model, idx, 45, temperature=0)
    assert out.shape == (2, prompt + 45) and torch.equal(out[:, :prompt], idx)
    begin = max(0, prompt - block_size)
    for end in range(prompt, prompt + 45):
        if end - begin > block_size:
            begin = end - max(1, block_size // 2)
        assert torch.equal(model(out[:, begin:end])[0][:, -1].argmax(-1), out[:, end])


def test_sampling_is_the_models_distribution():
    """Many first tokens at temperature 2 against softmax(logits/2), also of the 5 likeliest."""
    model, idx = make(n_layer=1), ids(1, 3)
    logits = model(idx)[0][0, -1]
    for top_k in (None, 5):
        new = sample.generate(model, idx.expand(20000, -1), 1, 2.0, top_k, seeded(1))[:, -1]
        kept = logits
        if top_k:
            kept = logits.where(logits >= logits.topk(5).values[-1], -math.inf)
        frequency = torch.bincount(new, minlength=70) / 20000
        assert (frequency - F.softmax(kept / 2, -1)).abs().max() < 0.012


def test_padded_ids_cannot_be_sampled():
    model = make(vocab_size=65)     # padded to 128
    out = sample.generate(model, ids(64, 1, vocab_size=65), 30, temperature=5.0, top_k=1000)
    assert out.max() < 65


def test_temperature_and_top_k_at_their_ends():
    model, idx = make(), ids(2, 4)
    greedy = sample.generate(model, idx, 12, 0)
    for temperature, top_k in ((1e-45, None), (0, 3), (1.0, 1), (5.0, 1)):
        assert torch.equal(sample.generate(model, idx, 12, temperature, top_k), greedy)
    plain = sample.generate(model, idx, 12, generator=seeded())
    assert torch.equal(sample.generate(model, idx, 12, 1.0, 100000, seeded()), plain)
    assert torch.equal(sample.generate(model, idx, 0), idx)


@pytest.mark.parametrize("idx, settings, word", [
    (ids(1, 0), {}, "at least one"), (torch.tensor([[70]]), {}, "0..69"),
    (torch.tensor([[-1]]), {}, "0..69"), (ids(1, 3), {"temperature": -1.0}, "-1"),
    (ids(1, 3), {"temperature": math.nan}, "nan"), (ids(1, 3), {"top_k": 0}, "top_k")])
def test_generate_refuses_in_words(idx, settings, word):
    with pytest.raises(ValueError, match=word):
        sample.generate(make(), idx, 3, **settings)


def test_the_global_random_state_is_left_alone():
    """A sample drawn during training once moved the random numbers of dropout after it."""
    model, idx = make(), ids(2, 4)
    before = torch.get_rng_state()
    seed_0 = sample.generate(model, idx, 12)
    seed_1, again = (sample.generate(model, idx, 12, generator=seeded(1)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)    # a draw from the global state would now differ
    assert torch.equal(sample.generate(model, idx, 12), seed_0)
    assert torch.equal(seed_1, again) and not torch.equal(seed_0, seed_1)
    with pytest.raises(ValueError, match="Generator"):
        sample.sample_next(torch.zeros(1, 9), 1.0, None, None)


def test_one_token_per_row():
    """Rows are independent; greedy needs no generator; top_k 2 never leaves the two likeliest."""
    logits = torch.tensor([[0.0, 9.0, 8.9, -1.0], [5.0, 0.0, 1.0, 4.9]])
    greedy = sample.sample_next(logits, 0, None, None)
    assert greedy.tolist() == [[1], [0]] and greedy.dtype == torch.int64
    generator = seeded()
    drawn = [sample.sample_next(logits, 50.0, 2, generator) for _ in range(40)]
    assert {d[0].item() for d in drawn} == {1, 2} and {d[1].item() for d in drawn} == {0, 3}


# --------------------------------------------------------------------------------------- prompts

@pytest.mark.parametrize("norm", NORMS)
def test_samples_without_the_dataset(norm, text, out):
    """A deleted or re-prepared dataset once broke sampling, or garbled it: the checkpoint carries
    its tokenizer."""
    got = text("--start", "sea ", "--temperature", 0, norm=norm)
    state = torch.load(out / norm / "best.pt", weights_only=True)
    model = GPT(GPTConfig(**state["model_config"])).eval()
    model.load_state_dict(state["model"])
    tokens = sample.generate(model, torch.tensor([list(b"sea ")]), 40, 0)[0].tolist()
    assert got.startswith("sea ") and got == data.prepare.get_tokenizer("bytes").decode(tokens)


@pytest.mark.parametrize(
    "prompt", ["é", "日本", "🧊", TEXT, "<|endoftext|>", " two  spaces\r\n", "x" * 100])
def test_any_prompt_is_echoed(prompt, text):
    """A character the training text never had was once a KeyError; any prompt is printed as it was
    given."""
    assert text("--start", prompt).startswith(prompt)
    assert text("--start", prompt, "--max_new_tokens", 0) == prompt


def test_empty_prompt(text):
    """It starts from the end-of-text token, which is not printed; the default is a newline."""
    assert text("--start", "", "--max_new_tokens", 0) == ""
    assert len(text("--start", "", "--temperature", 0, "--max_new_tokens", 5)) == 5
    assert text("--max_new_tokens", 0) == "\n"


def test_prompt_longer_than_the_context(text):
    """The last block_size tokens are seen, no more and no less, and the whole prompt is printed."""
    def greedy(prompt):
        return text("--start", prompt, "--temperature", 0, norm="post")
    head, tail = "ice of " * 9, "the\nsea of ice s"
    got = greedy(tail)
    assert len(tail) == 16 and got.startswith(tail) and greedy(head + tail) == head + got
    assert greedy("x" + tail[1:])[1:] != got[1:]


def test_prompt_from_a_file(text, tmp_path):
    """FILE:path is read as bytes, whatever the locale; a file that is not there is one line."""
    path = tmp_path / "prömpt.txt"
    path.write_bytes(TEXT.encode() + b"\r\n\xff")
    assert text("--start", f"FILE:{path}", "--max_new_tokens", 0) == TEXT + "\r\n\ufffd"
    path.write_bytes(b"sea ")
    assert text("--start", f"FILE:{path}") == text("--start", "sea ")
    for missing in (tmp_path / "nothing.txt", tmp_path):
        assert str(missing) in refusal(text, "--start", f"FILE:{missing}")


# -------------------------------------------------------------------------------------- settings

def test_seeds_and_temperature(text):
    """Same seed, same text; temperature 0, and one too small to divide by, is argmax whatever the
    seed."""
    a, b, c = (text("--seed", seed) for seed in (1, 1, 2))
    assert a == b != c and text("--seed", 1, "--temperature", 5) != a
    greedy = text("--temperature", 0, "--seed", 1)
    assert greedy == text("--temperature", 0, "--seed", 2) != a
    assert greedy == text("--temperature", "1e-45", "--seed", 3)


def test_top_k(text):
    """top_k 1 is greedy; 100000, past the vocabulary, is as if not given, where it once was an
    exception."""
    assert text("--top_k", 1) == text("--temperature", 0)
    assert text("--top_k", 257) == text("--top_k", 100000) == text() != text("--top_k", 2)


def test_several_samples(text):
    """Each sample starts with the prompt and differs; the first does not depend on how many
    follow."""
    samples = text("--start", "ice ", "--num_samples", 3, "--temperature", 1)
    samples = samples.split("\n---------------\n")
    assert len(samples) == len(set(samples)) == 3 and all(s.startswith("ice ") for s in samples)
    assert samples[0] == text("--start", "ice ", "--temperature", 1)


@pytest.mark.parametrize("flags, says", [
    ("--temperature -1", "--temperature"), ("--temperature nan", "--temperature"),
    ("--top_k 0", "--top_k"), ("--top_k -3", "--top_k"), ("--top_k two", "--top_k"),
    ("--max_new_tokens -1", "--max_new_tokens"), ("--num_samples 0", "--num_samples"),
    ("--seed -1", "--seed"), ("--temp 1", "--temp"), ("--stop=", "--stop"),
    ("--device gpu", "cuda")])
def test_wrong_flag(flags, says, text, capsys):
    """A wrong value is one line and exit 2, not a traceback from inside torch."""
    with pytest.raises(SystemExit) as info:
        text(*flags.split())
    err = capsys.readouterr().err
    assert info.value.code == 2 and err.count("\n") == 1 and says in err


def test_device(text):
    """Without a GPU, auto is the CPU, and cuda is one line that says what to do instead."""
    assert text("--device", "cpu") == text("--device", "auto") == text()
    assert "--device cpu" in refusal(text, "--device", "cuda")


# ------------------------------------------------------------------------- where a sample ends

@pytest.mark.parametrize("prompt, made, stop, shown", [
    ("a", "bcSTOPde", "STOP", "abc"),           # across token boundaries
    ("a", "bSTOSTOPd", "STOP", "abSTO"),        # the first "STO" was no beginning after all
    ("a", "aaab!", "aab", "aa"),                # nor was the first "aa", but its end was
    ("a", "bcdST", "STOP", "abcdST"),           # held back, and printed at the end
    ("a", "bcd", "x", "abcd"),
    ("STOP", "OPSTOP", "STOP", "STOPOP"),       # the prompt does not count
    ("ST", "OP.STOP", "STOP", "STOP."),         # not even its end
    ("a", "🌊日🧊b", "🧊", "a🌊日"),              # both begin with the byte f0
    ("a", "é\n\nb", "\n\n", "aé")])
def test_stops_at_a_text(prompt, made, stop, shown, text, produce):
    """--stop ends a sample before the text, and loses nothing that only looked like it. No token is
    made after it."""
    asked = produce(made.encode())
    assert text("--start", prompt, "--stop", stop) == shown
    end = made.find(stop)
    needed = made if end < 0 else made[:end + len(stop)]
    assert asked == list(needed.encode())


def test_stop_of_any_bytes(text, produce):
    """A text to stop at that is not UTF-8 is what such bytes are printed as."""
    produce(b"b\xffc")
    assert text("--start", "a", "--stop", "\udcff") == "ab"     # as Python reads the argument \xff


def test_stops_at_end_of_text(text, produce):
    """The end-of-text token ends one sample, not the next; it once printed as a marker, and what
    followed was another document."""
    asked = produce([*b"bc", 256, *b"no"], [*b"de"], [256], [*"é".encode()[:1], 256, *b"no"])
    got = text("--start", "a", "--num_samples", 4)
    assert got.split("\n---------------\n") == ["abc", "ade", "a", "a\ufffd"]
    assert asked == [*b"bc", 256, *b"de", 256, 0xc3, 256]


def test_stop_does_not_change_the_text(text):
    """With a real model the text until the stop is the text without --stop."""
    whole = text("--start", "ice ", "--seed", 4)
    stop = whole[20:23]
    assert text("--start", "ice ", "--seed", 4, "--stop", stop) == whole[:whole.index(stop, 4)]


def test_only_a_possible_stop_waits():
    """Each piece prints what it can: all but the longest end that `stop` begins with."""
    rng = random.Random(0)
    for _ in range(500):
        whole = "".join(rng.choices("ab", k=rng.randrange(20)))
        stop = "".join(rng.choices("ab", k=rng.randrange(1, 5)))
        cuts = sorted(rng.choices(range(len(whole) + 1), k=4))
        pieces = [whole[i:j] for i, j in zip([0, *cuts], [*cuts, len(whole)])]
        got = list(sample.before_stop(pieces, stop))
        assert "".join(got) == whole.split(stop)[0]
        for n in range(1, len(got)):
            read, shown = "".join(pieces[:n]), "".join(got[:n])
            waits = max(k for k in range(len(stop)) if read.endswith(stop[:k]))
            assert stop in read or len(shown) == len(read) - waits


# ------------------------------------------------------------------------------------------ text

def tokenizer(name: str) -> tiktoken.Encoding:
    """`merged` is a small BPE whose tokens begin and end inside emoji and CJK, with ids that stand
    for nothing."""
    if name != "merged":
        try:
            return data.prepare.get_tokenizer(name)
        except SystemExit:
            pytest.skip(f"no vocabulary of {name}")
    tokens = [b" \xf0", b"\xf0\x9f", b"\x9f\x8c", b"\x97\xa5", b"\xe6\x97", b" \xf0\x9f\xa7"]
    ranks = {bytes([i]): i for i in range(256)} | {t: 256 + i for i, t in enumerate(tokens)}
    return tiktoken.Encoding("merged", pat_str=r"(?s:.+)", mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 300})


@pytest.mark.parametrize("name", ["bytes", "merged", "gpt2"])
def test_text_is_whole_characters(name):
    """Emoji and CJK sampled a token at a time once printed as broken bytes: what is printed is
    whole characters, and together what decoding all ids at once gives, also where the text is cut
    in mid-character."""
    t = tokenizer(name)
    ids = data.prepare.encode(t, TEXT.encode())
    pieces = list(sample.as_text(iter(ids), t))
    assert "".join(pieces) == TEXT and "" in pieces[:-1]
    assert len(pieces) == len(ids) + 1 and len([piece for piece in pieces if piece]) >= 8
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
    """Some vocabularies have gaps, which a young model may choose: they print nothing, and are no
    KeyError."""
    pieces = list(sample.as_text([115, 280, 101, 290, 97], tokenizer("merged")))
    assert pieces == ["s", "", "e", "", "a", ""]


# ----------------------------------------------------------------------------------- checkpoints

CPU = torch.device("cpu")


def test_best_before_latest(tmp_path):
    """The model is best.pt where there is one, else ckpt.pt."""
    latest, best = writer_of_letters(seed=1), writer_of_letters(seed=2)
    for name, saved in (("ckpt.pt", latest), ("best.pt", best)):
        save(tmp_path / name, saved)
        model, t = sample.load_model(tmp_path, CPU)
        weights = model.state_dict()
        assert all(torch.equal(v, weights[k]) for k, v in saved.state_dict().items())
        assert not model.training and t.name == "bytes"


def test_no_run_in_the_folder(text, out, tmp_path):
    """A folder without a checkpoint is one line, which names the runs below it if there are any."""
    line = refusal(text, "--out_dir", str(out))
    assert all(line.count(str(out / norm)) == 1 for norm in NORMS)
    assert "train.py" in refusal(text, "--out_dir", str(tmp_path / "nowhere"))
    (tmp_path / "ckpt.pt").write_bytes((out / "geo" / "ckpt.pt").read_bytes()[:5000])
    assert str(tmp_path / "ckpt.pt") in refusal(text, "--out_dir", str(tmp_path))


@pytest.mark.parametrize("changes, says", [
    ({"model": None}, "keys"), ({"model_config": None}, "keys"), ({"tokenizer": None}, "keys"),
    ({"format": "nanonorm 0"}, "another version"),
    ({"model": [1]}, "keys"), ({"model": {3: 4}}, "fit"),
    ({"model_config": TINY | {"x": 1}}, "fit"),
    ({"model_config": [1]}, "keys"), ({"model_config": TINY | {"n_layer": 3}}, "fit"),
    ({"model_config": TINY | {"block_size": 10**30}}, "fit"),
    ({"tokenizer": "klingon"}, "klingon"), ({"tokenizer": 7}, "keys")])
def test_checkpoint_of_no_use(changes, says, text, tmp_path):
    """One of our checkpoints with a key missing was a traceback; so was one that misfits."""
    save(tmp_path / "best.pt", writer_of_letters(), **changes)
    line = refusal(text, "--out_dir", tmp_path)
    assert str(tmp_path / "best.pt") in line and says in line


def test_model_that_cannot_be_sampled(text, tmp_path):
    """Weights of nan sampled id 0 or raised; a vocabulary smaller than the tokenizer's raised when
    the prompt was long enough to show it."""
    model = writer_of_letters()
    with torch.no_grad():
        list(model.parameters())[-1][-1] = math.nan
    save(tmp_path / "best.pt", model)
    assert "not finite" in refusal(text, "--out_dir", tmp_path)
    save(tmp_path / "best.pt", GPT(GPTConfig(**TINY | {"vocab_size": 200})))
    assert "257" in refusal(text, "--out_dir", tmp_path)


# --------------------------------------------------------------------------------- command line

class Notebook(io.TextIOBase):
    """What a notebook has as stdout: no reconfigure, no file number."""
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)


def run_as_a_program(monkeypatch, stdout, *flags):
    monkeypatch.setattr(sys, "argv", ["sample.py", *flags])
    monkeypatch.setattr(sys, "stdout", stdout)
    runpy.run_path(str(REPO / "sample.py"), run_name="__main__")


def test_in_a_notebook(out, monkeypatch):
    """`%run sample.py ...` once ended with "no attribute 'reconfigure'". A cell that calls main
    with a list of flags prints the same."""
    flags = ["--out_dir", str(out / "geo"), "--start", "sea ", "--max_new_tokens", "9"]
    run, cell = Notebook(), Notebook()
    run_as_a_program(monkeypatch, run, *flags)
    monkeypatch.setattr(sys, "argv", ["a notebook's own flags", "-f", "kernel.json"])
    monkeypatch.setattr(sys, "stdout", cell)
    sample.main(flags)
    assert run.text == cell.text and cell.text.startswith("sea ") and len(cell.text) == 14


def test_without_stdout(out, monkeypatch, capfd):
    """`>&-` makes Python's stdout None: nothing is printed, and nothing goes wrong."""
    run_as_a_program(monkeypatch, None, "--out_dir", str(out / "geo"), "--max_new_tokens", "9")
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(os.name == "nt", reason="bytes as arguments and pipes are POSIX")
def test_consoles_and_pipes(out):
    """Prompt bytes that are not UTF-8, a console of only ASCII, `| head -c 5`: each once ended in a
    traceback."""
    prompt = ["--start", "é ".encode() + b"\xff!", "--max_new_tokens", "0"]
    utf8 = start(out, *prompt, PYTHONIOENCODING="utf-8")
    ascii_ = start(out, *prompt, PYTHONIOENCODING="ascii", LC_ALL="C")
    closed = start(out, "--start", "sea sea", "--max_new_tokens", "2000")
    assert b"sea sea".startswith(os.read(closed.stdout.fileno(), 5))
    closed.stdout.close()
    assert (closed.stderr.read(), closed.wait(60)) == (b"", 0)
    assert (utf8.communicate(timeout=60), utf8.returncode) == (("é \ufffd!\n".encode(), b""), 0)
    assert (ascii_.communicate(timeout=60), ascii_.returncode) == ((b"? ?!\n", b""), 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_disk(out):
    """Output that cannot be written is one line and exit code 1. What was still in Python's buffer
    at the end, as the text of --help is, gave a traceback and exit code 120."""
    with open("/dev/full", "w") as full:
        ends = [start(out, *flags, stdout=full) for flags in (("--start", "sea"), ("--help",))]
        errors = [end.communicate(timeout=60)[1] for end in ends]
    for end, err in zip(ends, errors):
        assert end.returncode == 1 and err.count(b"\n") == 1 and b"space" in err
