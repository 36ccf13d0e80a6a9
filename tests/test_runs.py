"""The folder of a run: what is in it, continuing after any cut, repair, locks, full and read-only
disks, and the checkpoints and folders that are refused.

Runs are tiny and in this process. A kill is an exception after which nothing is written any more.
"""
import errno
import json
import math
import os
import pickle
import signal
from dataclasses import fields
from pathlib import Path

import pytest
import tiktoken
import torch

import data
import data.prepare
import data.runs
import train
from data.runs import FORMAT, load_checkpoint
from helpers import (
    TINY, PowerCut, assert_same_run, at_step, cells, config, cut_at, exit_code, files, load, log,
    record, refusal, run, saved_step, signal_at, steps, updates, words)
from helpers import datasets, here      # noqa: F401 (fixtures)
from model import GPT, NORMS, GPTConfig

RECORD = ["best.pt", "ckpt.pt", "config.json", "depth.csv", "log.csv"]


@pytest.fixture
def own_data(tmp_path, monkeypatch) -> Path:
    """A dataset that a test may spoil."""
    monkeypatch.setattr(data.prepare, "DATA_DIR", tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "mine.txt").write_text(words(4000), encoding="utf-8")
    data.prepare.prepare([str(tmp_path / "mine.txt")])
    return tmp_path / "data" / "mine"


def kill_at_rename(monkeypatch, k: int | None = None, name: str = "") -> list[str]:
    """Kill the process before its k-th rename of a file, counted from 0, or the first of that name.

    Returns the names of the files renamed before. What a kill leaves is left here, too: the file
    that was not yet renamed.
    """
    names, killed, replace, unlink = [], [], os.replace, Path.unlink

    def replace_or_die(source, target):
        if len(names) == k or Path(target).name == name:
            killed.append(True)
            raise PowerCut
        names.append(Path(target).name)
        replace(source, target)

    def unlink_if_alive(path, *args, **kwargs):
        if not killed:
            unlink(path, *args, **kwargs)
    monkeypatch.setattr(os, "replace", replace_or_die)
    monkeypatch.setattr(Path, "unlink", unlink_if_alive)
    return names


# ----------------------------------------------------------------------------- what is in a folder

def test_record(datasets, tmp_path):
    """config.json is strict JSON (an infinite p once was not) and has every flag and what ran;
    depth.csv and log.csv are the files that the checkpoint holds; nothing else is left."""
    run(tmp_path, "--geo_p", "inf", "--seed", 3)
    folder = tmp_path / "geo-seed=3-geo_p=inf"
    found = record(folder)
    assert set(found["config"]) == {f.name for f in fields(train.Config)}
    assert found["config"]["geo_p"] == found["model"]["geo_p"] == "inf"
    assert (found["config"]["seed"], found["config"]["out_dir"]) == (3, str(tmp_path))
    meta = json.loads((datasets / "mine" / "meta.json").read_text(encoding="utf-8"))
    assert found["format"] == FORMAT and found["data"] == meta
    model = GPT(GPTConfig(16, 257, 2, 2, 16))
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert (found["device"], found["dtype"], found["compiled"]) == ("cpu", "float32", False)
    assert found["threads"] == torch.get_num_threads() and found["torch"] == torch.__version__
    assert found["hardware"] and found["python"].startswith("3.")
    texts = load(folder)["files"]
    assert texts == {name: (folder / name).read_text(encoding="utf-8") for name in RECORD[2:]}
    assert sorted(f.name for f in folder.iterdir()) == RECORD


def test_checkpoints_hold_plain_data(tmp_path):
    """After an evaluation and a resume both checkpoints load with weights_only: no numpy, no Path,
    no class in them."""
    run(tmp_path, "--max_iters", 4)
    run(tmp_path, "--max_iters", 6)
    folder = tmp_path / "geo"
    for name in ("ckpt.pt", "best.pt"):
        state = load_checkpoint(folder / name)
        assert state["format"] == FORMAT and state["tokenizer"] == "bytes"
        assert state["progress"]["step"] == 6
        json.dumps({k: state[k] for k in ("model_config", "progress")}, allow_nan=True)
        GPT(GPTConfig(**state["model_config"])).load_state_dict(state["model"])
    assert "optimizer" not in load(folder, "best.pt")
    assert sorted(f.name for f in folder.iterdir()) == RECORD


def test_floats_read_back_exactly(tmp_path, monkeypatch):
    """A table made from log.csv once differed in the last digits from what was trained."""
    losses = iter([0.1 + 0.2, 1 / 3, 2 / 7])
    seen = [0.1 + 0.2, 1 / 3, 2 / 7]
    monkeypatch.setattr(train, "evaluate", lambda *_: next(losses))
    run(tmp_path)
    found = [float(row["val_loss"]) for row in log(tmp_path / "geo") if row["val_loss"]]
    assert found == seen


# -------------------------------------------------------------------------------------- continuing

@pytest.mark.parametrize("norm", NORMS)
def test_resume_bit_for_bit(norm, tmp_path, monkeypatch, capsys):
    """Stopped by Ctrl-C and continued, a run ends in the same bits and the same log: batches,
    dropout, optimizer and schedule continue."""
    flags = ["--norm", norm, "--dropout", 0.1, "--gradient_accumulation_steps", 2]
    name = f"{norm}-gradient_accumulation_steps=2-dropout=0.1"
    run(tmp_path / "whole", *flags)
    with monkeypatch.context() as m:
        signal_at(m, signal.SIGINT, lambda step, c: step == 5)
        assert exit_code(run, tmp_path / "cut", *flags) == 130
    assert saved_step(tmp_path / "cut" / name) == 5
    assert "stopped: step 5 is saved" in capsys.readouterr().out
    run(tmp_path / "cut", *flags)
    assert "continues from step 5\n" in capsys.readouterr().out
    assert_same_run(tmp_path / "whole" / name, tmp_path / "cut" / name)


def test_killed_twice(tmp_path, monkeypatch):
    """Killed past its checkpoint, twice, the log once had steps twice; it equals the undisturbed
    run's."""
    flags = ["--log_interval", 1, "--dropout", 0.1]
    whole, folder = (tmp_path / name / "geo-dropout=0.1" for name in ("whole", "cut"))
    run(tmp_path / "whole", *flags)
    for k, logged in ((3, [1, 2]), (7, [1, 2, 3, 4, 5, 6]), (10, list(range(1, 10)))):
        with monkeypatch.context() as m, pytest.raises(PowerCut):
            cut_at(m, k)
            run(tmp_path / "cut", *flags)
        assert steps(folder) == logged
    with open(folder / "log.csv", "a", encoding="utf-8") as file:
        file.write("1")     # of a line for step 10
    run(tmp_path / "cut", *flags)
    assert steps(folder) == list(range(1, 11))
    assert_same_run(whole, folder)


@pytest.mark.parametrize("first_cut", [None, 6])
def test_killed_before_each_rename(first_cut, tmp_path, monkeypatch):
    """A kill between the two saves of the last step once left an old best.pt for good, since the
    run was then taken for finished. Here a run, and one that continues after a cut, is killed
    before each of its renames in turn: the same command ends with the undisturbed run's files."""
    flags = ["--dropout", 0.1]
    run(tmp_path / "whole", *flags)
    killed, k = True, 0
    while killed:
        out = tmp_path / str(k)
        if first_cut:
            with monkeypatch.context() as m, pytest.raises(PowerCut):
                cut_at(m, first_cut)
                run(out, *flags)
        with monkeypatch.context() as m:
            renamed = kill_at_rename(m, k)
            try:
                run(out, *flags)
                killed = False
            except PowerCut:
                k += 1
        run(out, *flags)
        assert_same_run(tmp_path / "whole" / "geo-dropout=0.1", out / "geo-dropout=0.1")

    # Of all those renames, the last are of the last step.
    assert renamed[-3:] == ["depth.csv", "ckpt.pt", "best.pt"]
    assert k == len(renamed) >= 8


def test_cut_between_the_two_saves(tmp_path, monkeypatch):
    """ckpt.pt is saved before best.pt; a kill between them must not lose the best model, also if
    no later one is better."""
    folder = tmp_path / "geo"
    with monkeypatch.context() as m, pytest.raises(PowerCut):
        renamed = kill_at_rename(m, name="best.pt")
        run(tmp_path)
    assert renamed[-1] == "ckpt.pt" and not (folder / "best.pt").exists()
    monkeypatch.setattr(train, "evaluate", lambda *_: 9.0)
    run(tmp_path)
    best = load(folder, "best.pt")
    assert best["progress"]["best_step"] == 4 and "optimizer" not in best
    assert saved_step(folder) == 10


def test_finished_run_is_repaired(tmp_path):
    """What a kill can leave of a finished run, or a person can spoil, is put right from its
    checkpoint: the record, best.pt, and files that were not yet renamed."""
    run(tmp_path)
    folder = tmp_path / "geo"
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    for name in ("config.json", "log.csv", "depth.csv"):
        (folder / name).write_bytes(b"\xff")
    (folder / "best.pt").unlink()
    (folder / "part.ckpt.pt").write_bytes(b"half")
    run(tmp_path)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


def test_same_command_again(tmp_path, capsys):
    """A finished run says so and stays as it is, byte for byte; other logging is no other run."""
    run(tmp_path, "--norm", "pre", "geo")
    folders = [tmp_path / "pre", tmp_path / "geo"]
    before = [files(folder) for folder in folders]
    first = cells(capsys.readouterr().out)
    for flags in ([], ["--eval_interval", 3, "--log_interval", 1, "--no-compile"]):
        run(tmp_path, "--norm", "pre", "geo", *flags)
        out = capsys.readouterr().out
        assert [files(folder) for folder in folders] == before
        assert sum("is finished" in line for line in out.splitlines()) == 2
        assert cells(out) == first


def test_larger_max_iters_continues(tmp_path, capsys):
    """A larger --max_iters continues, with the schedule of the new length, and says so; other
    logging may join it."""
    run(tmp_path)
    capsys.readouterr()
    run(tmp_path, "--max_iters", 14, "--log_interval", 1, "--eval_interval", 6)
    out, folder = capsys.readouterr().out, tmp_path / "geo"
    assert "continues from step 10, with the schedule of 14 steps instead of 10" in out
    assert steps(folder) == [1, 2, 4, 6, 8, 10, 11, 12, 13, 14] and saved_step(folder) == 14
    rate = train.learning_rate(11, config("--max_iters", 14))
    assert float(log(folder)[6]["learning_rate"]) == pytest.approx(rate)
    assert updates(folder) == {14} and record(folder)["config"]["max_iters"] == 14


def test_saves_every_ten_minutes(tmp_path, monkeypatch):
    """Between evaluations that are hours apart, a kill once cost all since the last."""
    clock = [0.0]

    class Time:
        @staticmethod
        def perf_counter():
            return clock[0]
    monkeypatch.setattr(train, "time", Time)
    at_step(monkeypatch, lambda step, _: clock.__setitem__(0, clock[0] + 130))
    saved, save = [], data.runs.Run.save

    def watched(self, row, *rest):
        saved.append(row["step"])
        save(self, row, *rest)
    monkeypatch.setattr(data.runs.Run, "save", watched)
    run(tmp_path, "--max_iters", 16, "--eval_interval", 100, "--log_interval", 1)
    assert saved == [4, 8, 12, 16]      # a fifth step would be 650 s after the last save
    assert load(tmp_path / "geo", "best.pt")["progress"]["best_step"] == 16


def test_new_log_column_of_a_fork(tmp_path, monkeypatch):
    """A fork's new column once dropped all earlier lines when a run continued."""
    run(tmp_path)
    before = log(tmp_path / "geo")
    monkeypatch.setattr(train, "LOG_COLUMNS", ["step", "surprise", *train.LOG_COLUMNS[1:]])
    original = data.runs.Run.log
    monkeypatch.setattr(data.runs.Run, "log",
                        lambda self, row: original(self, row | {"surprise": 7.5}))
    run(tmp_path, "--max_iters", 12)
    after = log(tmp_path / "geo")
    assert [row.pop("surprise") for row in after] == [""] * len(before) + ["7.5"]
    assert after[:-1] == before and after[-1]["step"] == "12"


# ---------------------------------------------------------------------------------- other settings

@pytest.mark.parametrize("flags, preset, says", [
    ("--max_iters 6", {}, ("--max_iters 10", "6")),
    ("--eval_iters 3", {}, ("--eval_iters 100", "3")),
    ("", {"learning_rate": 0.5}, ("--learning_rate 0.003", "0.5")),
    ("", {"geo_p": 2.0}, ("--geo_p inf", "2.0")),
    ("--norm pre geo", {"n_layer": 3}, ("--n_layer 2", "3"))])
def test_other_settings_are_refused(flags, preset, says, tmp_path, monkeypatch):
    """Continuing with another setting once mixed two runs; it is one line that names both values,
    and nothing changes."""
    run(tmp_path)
    before = files(tmp_path)
    monkeypatch.setitem(train.PRESETS, "tiny", TINY | preset)
    line = refusal(run, tmp_path, *flags.split())
    assert all(part in line for part in (*says, "--overwrite", "--out_dir"))
    assert files(tmp_path) == before and not (tmp_path / "pre").exists()


@pytest.mark.parametrize("flags", ["--max_iters 6", "--eval_iters 3"])
def test_refused_before_others_train(flags, tmp_path):
    """A sweep whose last run cannot continue is refused at once, not after hours of training the
    runs before it."""
    run(tmp_path, "--norm", "geo")
    before = files(tmp_path)
    refusal(run, tmp_path, "--norm", "pre", "geo", *flags.split())
    assert files(tmp_path) == before and not (tmp_path / "pre").exists()


def test_overwrite(tmp_path, monkeypatch, capsys):
    """--overwrite throws the old run away and starts anew; once stopped, the same command must not
    be advised."""
    run(tmp_path, "--max_iters", 12)
    monkeypatch.setitem(train.PRESETS, "tiny", TINY | {"learning_rate": 0.01, "max_iters": 6})
    with monkeypatch.context() as m:
        signal_at(m, signal.SIGINT, lambda step, c: step == 3)
        assert exit_code(run, tmp_path, "--overwrite") == 130
    assert "without --overwrite" in capsys.readouterr().out
    run(tmp_path)
    folder = tmp_path / "geo"
    assert steps(folder) == [1, 2, 4, 6] and updates(folder) == {6}
    assert record(folder)["config"]["learning_rate"] == 0.01


def test_best_without_ckpt_is_not_deleted(tmp_path):
    """With ckpt.pt gone the run would start anew over the best model: it is refused until
    --overwrite says so."""
    run(tmp_path)
    (tmp_path / "geo" / "ckpt.pt").unlink()
    before = files(tmp_path)
    assert "--overwrite" in refusal(run, tmp_path) and files(tmp_path) == before
    run(tmp_path, "--overwrite")


def test_dataset_prepared_anew(own_data, tmp_path, monkeypatch):
    """Ids of another tokenizer once ran past the vocabulary: one line names both; another text is
    refused as well."""
    out = tmp_path / "out"
    run(out)
    before, text = files(out), tmp_path / "mine.txt"
    text.write_text(words(4000, seed=1), encoding="utf-8")
    data.prepare.prepare([str(text)])
    assert "another text" in refusal(run, out) and files(out) == before
    ranks = {bytes([i]): i for i in range(256)} | {b"se": 256, b"ic": 257}
    other = tiktoken.Encoding("other", pat_str=r"\w+|\s", mergeable_ranks=ranks,
                              special_tokens={"<|endoftext|>": 400})
    monkeypatch.setattr(data.prepare, "get_tokenizer", lambda name: other)
    data.prepare.prepare([str(text)], "other")
    line = refusal(run, out)
    assert "bytes" in line and "other" in line and "--out_dir" in line and files(out) == before
    run(out, "--overwrite", "--max_iters", 3)
    state = load(out / "geo")
    assert state["model_config"]["vocab_size"] == 401 and state["tokenizer"] == "other"


# -------------------------------------------------------------------------- checkpoints and folders

class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_bad_checkpoints(tmp_path, recwarn):
    """Truncated, foreign or malicious files are refused in one line, without torch's own warnings;
    no code in them runs, and they stay as they are."""
    run(tmp_path, "--max_iters", 3)
    path, touched = tmp_path / "geo" / "ckpt.pt", tmp_path / "touched"
    whole = path.read_bytes()
    good = torch.load(path, weights_only=True)

    def saved(value):
        torch.save(value, path)
        return path.read_bytes()
    bad = [b"", b"not a checkpoint", whole[:len(whole) // 2], whole[:-10],
           pickle.dumps({"model": 1}), pickle.dumps(Evil(touched)),
           saved({"format": FORMAT, "model": Evil(touched)}), saved({"model": {}}),
           saved(torch.zeros(3)), saved([1]), saved(good | {"format": "nanoGPT"}),
           saved(good | {"format": 3})]
    for content in bad:
        path.write_bytes(content)
        line = refusal(load_checkpoint, path)
        assert str(path) in line and "--out_dir" in line
        assert refusal(run, tmp_path, "--max_iters", 3) == line and path.read_bytes() == content
    assert not touched.exists() and [str(w.message) for w in recwarn] == []


def damaged(good: dict):
    """Copies of a checkpoint in which a key is missing or holds something else, outside or inside,
    each with a word for it. The weights of other GPUs and the fork's own are not read here."""
    wrong = {None: "None", 3: "3", "text": "text", (): "nothing"}
    for name in good:
        yield f"no {name}", {k: v for k, v in good.items() if k != name}
        for value, word in wrong.items():
            if (name, value) != ("cuda_rng", None) and (name, value) != ("tokenizer", "text"):
                yield f"{name} is {word}", good | {name: value}
    for name in ("progress", "files"):
        for key in good[name]:
            yield f"no {key}", good | {name: {k: v for k, v in good[name].items() if k != key}}
            for value in (None, "text", ()):
                if (key, value) not in (("log.csv", "text"), ("depth.csv", "text")):
                    yield f"{key} is {value}", good | {name: good[name] | {key: value}}
    for name in ("model", "optimizer"):
        yield f"{name} is empty", good | {name: {}}
    yield "no moments", good | {"optimizer": good["optimizer"] | {"state": 3}}
    yield "half of the optimizer", good | {"optimizer": good["optimizer"] | {"param_groups": [3]}}
    yield "a short state of random numbers", good | {"rng": good["rng"][:7]}


def test_checkpoint_with_a_key_missing_or_of_a_wrong_type(tmp_path):
    """Each of these was a traceback: one line names the file, and nothing in the folder changes.
    best.pt was once replaced by the weights of a checkpoint that did not fit."""
    run(tmp_path, "--max_iters", 3)
    folder = tmp_path / "geo"
    good = load(folder)
    for word, state in damaged(good):
        torch.save(state, folder / "ckpt.pt")
        before = files(folder)
        try:
            line = refusal(run, tmp_path, "--max_iters", 5)
        except (Exception, pytest.fail.Exception) as error:
            pytest.fail(f"{word}: {type(error).__name__} {error}")
        assert "ckpt.pt" in line and "--out_dir" in line, word
        assert files(folder) == before, word
    torch.save(good, folder / "ckpt.pt")
    run(tmp_path, "--max_iters", 3)


def test_checkpoint_of_nan_weights(tmp_path, monkeypatch):
    """They cannot be trained on: one line says so, instead of blaming the learning rate."""
    run(tmp_path, "--max_iters", 4)
    folder = tmp_path / "geo"
    state = load(folder)
    state["model"]["wte.weight"][3] = math.nan
    torch.save(state, folder / "ckpt.pt")
    before = files(folder)
    line = refusal(run, tmp_path, "--max_iters", 6)
    assert "ckpt.pt" in line and "finite" in line and files(folder) == before


def test_checkpoint_of_another_model_py(tmp_path):
    """A fork's checkpoint, after its placement was taken out again, is refused in one line."""
    run(tmp_path, "--max_iters", 4)
    state = load(tmp_path / "geo")
    weights = state["model"] | {"blocks.0.mlp.a": torch.zeros(())}
    for changes in ({"model": weights}, {"optimizer": {"state": {}, "param_groups": []}}):
        torch.save(state | changes, tmp_path / "geo" / "ckpt.pt")
        assert "does not fit" in refusal(run, tmp_path, "--max_iters", 6)


def old_checkpoint(folder: Path, with_config: bool):
    """A folder as the version of format "nanonorm 2" left it."""
    folder.mkdir(parents=True)
    model = GPT(GPTConfig(16, 257, 2, 2, 16))
    flags = {"norm": "geo", "dataset": "mine", "max_iters": 10, "geo_decay": "sqrt", "seed": 1337,
             "geo_p": math.inf}
    row = {"parameters": 1, "step": 10, "diverged": None, "val_loss": 1.5, "best_step": 10}
    best = {"format": "nanonorm 2", "model": model.state_dict(), "model_config": {"n_layer": 2},
            "config": flags, "tokenizer": "bytes", "sha256": "ab" * 32, "row": row}
    torch.save(best | {"optimizer": {}, "scaler": {}, "where": "cpu, float32",
                       "rng": torch.get_rng_state(), "cuda_rng": None}, folder / "ckpt.pt")
    torch.save(best, folder / "best.pt")
    if with_config:
        about = {"config": flags, "model": {}, "data": {"tokenizer": "bytes", "sha256": "ab" * 32},
                 "where": "cpu, float32", "threads": 1, "torch": "2.13.0", "python": "3.11.7"}
        (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
        (folder / "log.csv").write_text("step,train_loss\n1,5.0\n", encoding="utf-8")


@pytest.mark.parametrize("with_config", [True, False])
def test_folder_of_an_older_version(with_config, tmp_path):
    """It cannot be continued: one line says so, before another run is trained, and it stays."""
    old_checkpoint(tmp_path / "geo", with_config)
    before = files(tmp_path)
    for flags in ([], ["--norm", "pre", "geo"]):
        line = refusal(run, tmp_path, *flags)
        assert "version" in line and "geo" in line and "--overwrite" in line
        assert files(tmp_path) == before or flags and not with_config
    run(tmp_path, "--overwrite", "--max_iters", 3)
    assert record(tmp_path / "geo")["format"] == FORMAT


@pytest.mark.parametrize("text", ["", "3", "null", "[]", "{}", '{"config": [], "data": {}}',
                                  '{"format": "nanonorm 3", "config": [1], "data": '
                                  '{"tokenizer": "bytes", "sha256": 2}}'])
def test_spoilt_config_json(text, tmp_path):
    """The checkpoint has a copy: a config.json that is none is written anew, not a traceback."""
    run(tmp_path, "--max_iters", 3)
    before = (tmp_path / "geo" / "config.json").read_bytes()
    (tmp_path / "geo" / "config.json").write_text(text, encoding="utf-8")
    run(tmp_path, "--max_iters", 3)
    assert (tmp_path / "geo" / "config.json").read_bytes() == before


# --------------------------------------------------------------------------------- locks and disks

@pytest.mark.skipif(os.name == "nt", reason="POSIX locks")
def test_two_processes_do_not_share_a_folder(tmp_path, capsys):
    """They once wrote the same checkpoint at once. The lock ends with the run, also one that
    fails."""
    with data.runs.locked(tmp_path / "geo") as free:
        assert free
        code = exit_code(run, tmp_path)
        assert "other process" in code and list((tmp_path / "geo").iterdir()) == []
        assert f"{tmp_path / 'geo'} is skipped: another process" in capsys.readouterr().out
        assert "other process" in exit_code(run, tmp_path, "--overwrite")
    with pytest.raises(RuntimeError), data.runs.locked(tmp_path / "geo"):
        raise RuntimeError
    run(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="POSIX locks")
@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks(number, tmp_path, monkeypatch, capsys):
    """Nothing trained there: the lock is a help, and without one a line says so."""
    import fcntl

    def flock(*_):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(fcntl, "flock", flock)
    run(tmp_path, "--max_iters", 3)
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and str(tmp_path / "geo") in err and "lock" in err
    assert saved_step(tmp_path / "geo") == 3 and "skipped" not in out


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"), RuntimeError("file write failed")])
@pytest.mark.parametrize("name", ["ckpt.pt", "best.pt"])
def test_full_disk_keeps_the_old_checkpoint(error, name, tmp_path, monkeypatch):
    """A disk that fills up while saving once left half a checkpoint: the old one stays whole, with
    nothing beside it, and the same command continues once there is room."""
    run(tmp_path / "whole")
    save, folder, full = torch.save, tmp_path / "cut" / "geo", []

    def half(state, target):
        full.append(Path(target).name.endswith(name))
        if sum(full) == 2:
            Path(target).write_bytes(b"PK half")
            raise error
        save(state, target)
    with monkeypatch.context() as m:
        m.setattr(torch, "save", half)
        line = refusal(run, tmp_path / "cut")
    assert str(folder / name) in line and "make room" in line
    assert load_checkpoint(folder / name)["progress"]["step"] == 4
    assert sorted(f.name for f in folder.iterdir()) == RECORD
    run(tmp_path / "cut")
    assert_same_run(tmp_path / "whole" / "geo", folder)


@pytest.mark.parametrize("name", ["log.csv", "config.json", "depth.csv"])
def test_full_disk_while_logging(name, tmp_path, monkeypatch):
    """The file that could not be written is named, it once was --out_dir that was blamed; and half
    a line is no harm."""
    run(tmp_path / "whole")
    folder, write, opened = tmp_path / "cut" / "geo", Path.write_text, open

    def full(*_):
        raise OSError(28, "No space left on device")

    def write_text(path, text, **kwargs):
        if path.name.endswith(name) and (name != "depth.csv" or "\n10," in text):
            full()
        return write(path, text, **kwargs)

    def open_full(path, mode="r", **kwargs):
        file = opened(path, mode, **kwargs)
        if Path(path).name == name and "a" in mode and os.path.getsize(path) > 450:
            file.write("6,5.")
            file.flush()
            file.write = full
        return file
    with monkeypatch.context() as m:
        if name == "log.csv":
            m.setattr(data.runs, "open", open_full, raising=False)
        else:
            m.setattr(Path, "write_text", write_text)
        line = refusal(run, tmp_path / "cut")
    assert str(folder / name) in line and "No space left" in line
    assert (folder / "ckpt.pt").exists() == (name != "config.json")
    run(tmp_path / "cut")
    assert_same_run(tmp_path / "whole" / "geo", folder)


def test_finished_sweep_on_a_read_only_disk(tmp_path, monkeypatch, capsys):
    """It only has to be read: the table is printed and the exit code is 0."""
    flags = "--norm pre geo --max_iters 4".split()
    run(tmp_path, *flags)
    table, before = cells(capsys.readouterr().out), files(tmp_path)
    opened = open

    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def open_to_read(path, mode="r", *rest, **kwargs):
        if set(mode) & set("wax+") and str(path).startswith(str(tmp_path)):
            refuse(path)
        return opened(path, mode, *rest, **kwargs)
    with monkeypatch.context() as m:
        for name in ("replace", "rename", "unlink", "remove"):
            m.setattr(os, name, refuse)
        for name in ("builtins.open", "io.open"):
            m.setattr(name, open_to_read)
        m.setattr(Path, "touch", refuse)
        run(tmp_path, *flags)
    out, err = capsys.readouterr()
    assert cells(out) == table and "Read-only" in err and "compare.csv" in err
    assert files(tmp_path) == before


def test_folder_that_is_a_file(tmp_path):
    """A file where a run's folder should be is named."""
    (tmp_path / "geo").write_text("mine", encoding="utf-8")
    with pytest.raises(OSError) as info:
        run(tmp_path)
    assert info.value.filename and "geo" in str(info.value.filename)


# ------------------------------------------------------------------------- what a stranger met

def test_other_split_of_the_same_text(tmp_path, own_data):
    """The same text split elsewhere has the same sha256: a run once trained on its old val text."""
    out = tmp_path / "out"
    run(out)
    meta = json.loads((own_data / "meta.json").read_text(encoding="utf-8"))
    ids = b"".join((own_data / f"{name}.bin").read_bytes() for name in ("train", "val"))
    half = len(ids) // 4 * 2
    (own_data / "train.bin").write_bytes(ids[:half])
    (own_data / "val.bin").write_bytes(ids[half:])
    meta |= {"train_tokens": half // 2, "val_tokens": (len(ids) - half) // 2}
    (own_data / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert "split" in refusal(run, out, "--max_iters", 12)


def test_finished_run_without_checkpoints(tmp_path, capsys):
    """Deleting *.pt to save disk once let the same command destroy the record, silently."""
    run(tmp_path)
    for name in ("ckpt.pt", "best.pt"):
        (tmp_path / "geo" / name).unlink()
    before = files(tmp_path / "geo")
    run(tmp_path)
    assert "is finished" in capsys.readouterr().out
    assert "no ckpt.pt" in refusal(run, tmp_path, "--max_iters", 12)
    assert "--eval_iters" in refusal(run, tmp_path, "--eval_iters", 3)
    assert files(tmp_path / "geo") == before
    run(tmp_path, "--overwrite", "--max_iters", 4)
    assert steps(tmp_path / "geo")[-1] == 4


@pytest.mark.parametrize("size", [0, 100])
def test_truncated_best(tmp_path, size):
    """A best.pt cut short, as by a copy, stayed so for good; ckpt.pt has the same weights."""
    run(tmp_path)
    best = tmp_path / "geo" / "best.pt"
    whole = best.read_bytes()
    best.write_bytes(whole[:size])
    run(tmp_path)
    repaired, latest = load(tmp_path / "geo", "best.pt")["model"], load(tmp_path / "geo")["model"]
    assert all(torch.equal(repaired[name], latest[name]) for name in latest)


def test_folder_that_is_not_utf8(tmp_path):
    """A Latin-1 name on a UTF-8 system once ended in a UnicodeEncodeError after the set-up."""
    out = tmp_path / os.fsdecode(b"\xe9t\xe9")
    run(out)
    run(out, "--max_iters", 12)
    assert steps(out / "geo")[-1] == 12
