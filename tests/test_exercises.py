"""The exercises: what is laid out fails, solutions pass, wrong answers fail for the right reason.

The checks run in this process, but for two that go through pytest as the command does. Solutions
and wrong answers are texts in this file, so that they do not depend on how the program is written.
"""
import itertools
import re
import shutil
import sys
from pathlib import Path

import pytest

import exercise_checks
import exercises

ROOT = Path(__file__).resolve().parent.parent


def run_checks(number: int, folder: Path):
    """Run an exercise's checks on the folder; yield those that fail, and their first lines."""
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)   # an edit within a second counts
    with exercise_checks.Program(folder) as program:
        for name, check, *case in cases(number):
            try:
                check(program, *case)
            except pytest.skip.Exception:
                pass
            except (Exception, pytest.fail.Exception) as error:
                yield name, str(error).partition("\n")[0]


def cases(number: int):
    """An exercise's checks, as pytest calls them: name, function, and the placement if any."""
    for name, check in vars(exercise_checks).items():
        if name.startswith(f"check_{number}_"):
            marks = getattr(check, "pytestmark", None)
            for case in marks[0].args[1] if marks else ():
                yield f"{name}[{case}]", check, case
            if not marks:
                yield name, check


def failures(number: int, folder: Path) -> dict[str, str]:
    return dict(run_checks(number, folder))


def fill(path: Path, text: str):
    path.write_text(text, encoding="utf-8")


def edit(path: Path, *changes: tuple[str, str]):
    """Replace texts, each of which must be there."""
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def solve(path: Path, *bodies: str):
    """Replace each `raise NotImplementedError` by the lines of a body, but for other exercises'."""
    text = path.read_text(encoding="utf-8")
    part = r"^( *)raise NotImplementedError\(\"(?!exercise ).*\n"
    for body in bodies:
        stub = re.search(part, text, re.M)
        lines = [stub[1] + line if line else "" for line in body.strip("\n").splitlines()]
        text = text[:stub.start()] + "\n".join(lines) + "\n" + text[stub.end():]
    assert not re.search(part, text, re.M)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def started(tmp_path):
    """started(number): an exercise's folder as it is laid out."""
    def started(number: int) -> Path:
        exercises.start(number, tmp_path / str(number))
        return tmp_path / str(number)
    return started


def assert_wrong(number: int, path: Path, wrong: dict[tuple, str]):
    """Each of the changes to a solved exercise's file fails with a message that names the word."""
    right = path.read_text(encoding="utf-8")
    for changes, word in wrong.items():
        path.write_text(right, encoding="utf-8")
        edit(path, *(changes if isinstance(changes[0], tuple) else (changes,)))
        found = []
        for _, message in run_checks(number, path.parent):
            found.append(message)
            if word in message:
                break
        else:
            pytest.fail(f"{changes} does not fail with {word!r}, but with {found}")


# ------------------------------------------------------------------------------------ the command

@pytest.mark.parametrize("number", exercises.EXERCISES)
def test_what_is_laid_out_fails(number, started):
    assert any(run_checks(number, started(number)))


@pytest.mark.parametrize("number", [1, 2, 10])
def test_the_program_itself_passes(number, started):
    """Nothing but the part to write is missing, and the program's own part solves it."""
    folder = started(number)
    for name in {cut[0] for cut in exercises.EXERCISES[number].cut}:
        cut, whole = (place / name for place in (folder, ROOT))
        assert len(cut.read_text(encoding="utf-8")) < len(whole.read_text(encoding="utf-8"))
        shutil.copy(whole, cut)
    assert failures(number, folder) == {}


def test_cut_out():
    """Signature, docstring and the checks of arguments stay; so does everything outside."""
    source = ("class A:\n    def f(self, x):\n        \"\"\"Doc.\"\"\"\n        if x < 0:\n"
              "            raise ValueError\n        y = x\n\n        # why\n        return y\n\n"
              "    def g(self):\n        if self:\n            a = 1\n            b = 2\n"
              "        return 3\n")
    assert exercises.cut_out(source, "A.f", "do") == source.replace(
        "        y = x\n\n        # why\n        return y\n",
        '        raise NotImplementedError("do")\n')
    assert exercises.cut_out(source, "A.g", "do", "self") == source.replace(
        "            a = 1\n            b = 2\n", '            raise NotImplementedError("do")\n')


def command(monkeypatch, *words) -> int:
    """The exit code of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["exercises.py", *map(str, words)])
    try:
        exercises.main()
    except SystemExit as error:
        return error.code
    return 0


def tree() -> dict:
    """The files of the working tree and their times, but for what other processes may write."""
    places = ("", "data", "data/results", "tests")
    paths = itertools.chain(*((ROOT / place).glob("*.*") for place in places))
    return {path: path.stat().st_mtime_ns for path in paths}


def test_list_and_refusals(tmp_path, monkeypatch, capsys):
    assert command(monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert command(monkeypatch, "list") == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert [line.split()[0] for line in lines[1:]] == [str(n) for n in exercises.EXERCISES]
    assert all(len(line) <= 100 for line in lines)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for words, says in ((("start", 1, tmp_path), "is not empty"), (("start", 11, tmp_path), "11"),
                        (("check", 1, tmp_path), "does not hold"), (("check", 1), "FOLDER"),
                        (("start", 1, tmp_path / "notes.txt"), "is not empty")):
        assert command(monkeypatch, *words) == 2
        line, = capsys.readouterr().err.splitlines()
        assert says in line
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_start_and_check_as_commands(tmp_path, monkeypatch, capsys):
    """Through pytest, in a process of its own: fail in short lines, pass, and leave the tree be."""
    before, folder = tree(), tmp_path / "new" / "spheres"
    assert command(monkeypatch, "start", 3, folder) == 0
    assert "one_sphere.py" in capsys.readouterr().out
    solve(folder / "one_sphere.py", ONE_SPHERE[0], ONE_SPHERE[1], "return math.atan(math.sqrt(k))")
    edit(folder / "one_sphere.py", ("return turned, *step", "return turned, *stride"))
    assert command(monkeypatch, "check", 3, folder) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "exercise 3: fail" and len(lines) == 2
    assert re.fullmatch(r"- one_sphere.py, line \d+: NameError: name 'stride' is not defined",
                        lines[0])
    assert lines[1].startswith("- fixed_angle: at k = 2 the turn must be appendix B's step")

    edit(folder / "one_sphere.py", ("*stride", "*step"),
         ("atan(math.sqrt(k))", "atan(1 / math.sqrt(k))"))
    assert command(monkeypatch, "check", 2, folder) == 2
    assert "does not hold exercise 2" in capsys.readouterr().err
    assert command(monkeypatch, "check", 3, folder) == 0
    assert capsys.readouterr().out == "exercise 3: pass\n"
    assert tree() == before


def test_a_file_that_is_no_python(started):
    """The student reads the line of their own file."""
    folder = started(4)
    (folder / "faulty.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    assert set(failures(4, folder).values()) == {"faulty.py, line 2: invalid syntax"}


# ----------------------------------------------------------------------------------- 1. the turn

TURN = '''
xx = (x * x).sum(-1, keepdim=True)
v = g - (x * g).sum(-1, keepdim=True) / xx * x
r, n = xx.sqrt(), ((v * v).sum(-1, keepdim=True) + 1e-30).sqrt()
theta = (scale * (n / r).clamp(max=max_angle) + bias * (n > 1e-14)) * decay
theta = theta if p == math.inf else p * torch.atan(theta / p)
theta = theta.clamp(-max_angle, max_angle)
return theta.cos() * x + theta.sin() * r * v / n
'''


def test_1_turn(started):
    folder = started(1)
    solve(folder / "geonorm.py", TURN)
    assert failures(1, folder) == {}
    assert_wrong(1, folder / "geonorm.py", {
        (" + 1e-30).sqrt()", ").sqrt()"): "no move at g = 0: with bias 0.0, x' is nan away from x",
        ((" + 1e-30).sqrt()", ").sqrt()"), ("r * v / n", "r * torch.where(n > 0, v / n, 0)")):
            "finite gradient at g = 0: with bias 0.0, 16 of the 48",
        ("return theta.cos()", "theta = theta * 180 / math.pi\nreturn theta.cos()".replace(
            "\n", "\n    ")): "the angle between x and x' must be theta",
        ("theta.cos() * x + theta.sin()", "theta.sin() * x + theta.cos()"): "no move at g = 0",
        (" * x\n    r, n", "\n    r, n"): "v must be orthogonal to x",
        ("theta.sin() * r * v / n", "theta.sin() * v / n"): "the length must stay",
        ("bias * (n > 1e-14)", "bias"): "no move at g = 0: with bias 0.1",
        ("scale * (n / r)", "scale * (v.norm(dim=-1, keepdim=True) / r)"):
            "the gradient of x'.sum() in g has the length 0;",
        ("clamp(max=max_angle)", "clamp(max=1.5)"): "theta",
        ("+ theta.sin()", "- theta.sin()"): "on v's side",
        ("theta.clamp(-max_angle, max_angle)", "theta"):
            "scale 2, bias 0.5, max_angle 0.2, a long g must turn x by 0.2000 radians; here it "
            "turns it by 0.9000",
        ("theta.clamp(-max_angle, max_angle)", "theta.clamp(max=max_angle)"):
            "bias -2, a long g must turn x by -0.7854 radians; here it turns it by -1.2146",
        ("clamp(-max_angle, max_angle)", "clamp(-math.pi / 4, math.pi / 4)"):
            "a long g must turn x by 0.2000 radians; here it turns it by 0.7854",
        ("clamp(-max_angle, max_angle)", "clamp(-max_angle, min(max_angle, math.pi / 4))"):
            "scale 2, max_angle 1.2, a long g must turn x by 1.2000 radians; here it turns it by "
            "0.7854",
        ("bias * (n > 1e-14)) * decay", "bias * (n > 1e-14)).clamp(-max_angle, max_angle) * decay"):
            "scale 2, decay 0.5, a long g must turn x by 0.7854"})


def test_1_numbers(started):
    """The edges by numbers; and the default p first, since all the others would be nan with it."""
    folder = started(1)
    solve(folder / "geonorm.py", TURN)
    right = (folder / "geonorm.py").read_text(encoding="utf-8")
    edit(folder / "geonorm.py", (" + 1e-30).sqrt()", ").sqrt()"))
    assert failures(1, folder)["check_1_edges"] == (
        "where |g| is 0 and the bias is 0.0, |x'| must be |x| and the gradients finite; here "
        "|x'|/|x| is nan and 3074 of 3074 gradients are nan or inf")
    fill(folder / "geonorm.py", right)
    edit(folder / "geonorm.py", ("theta if p == math.inf else p * torch", "p * torch"))
    assert failures(1, folder) == {
        "check_1_default_p": "with the default p = inf, x' is nan: inf * atan(theta / inf) is "
                             "inf * 0"}


# --------------------------------------------------------------------------------- 2. four lines

EDGES = '''
made = {"pre": ("", "N"), "post": ("N", ""), "peri": ("N", "N"), "geo": ("S", "N")}[config.norm]
first = {"own": made[0], "none": "", "norm": "S"}[config.entry]
return tuple({"": nn.Identity, "N": lambda: rms_norm(config), "S": lambda: rms_norm(config, False)}
             [word]() for word in (first, made[1]))
'''
FORWARD = '''
d, f = self.decay, self.f
if self.norm == "pre": return x + d * f(self.norm_in(x), *context)
if self.norm == "post": return self.norm_out(x + d * f(x, *context))
if self.norm == "peri": return x + d * self.norm_out(f(self.norm_in(x), *context))
return self.step(x, f(x, *context))
'''


def test_2_four_lines(started):
    folder = started(2)
    solve(folder / "model.py", EDGES, FORWARD)
    assert failures(2, folder) == {}
    before = "{}: before the first block the table has {}, here it is: {}".format
    assert_wrong(2, folder / "model.py", {
        ("self.norm_out(f(self.norm_in(x), *context))", "f(self.norm_in(x), *context)"):
            "peri: one sublayer must be its line of the table; at d = 0.5 it turns a stream of RMS",
        ('"post": ("N", "")', '"post": ("", "")'): before("post with entry=own", "N", "nothing"),
        ('"geo": ("S", "N")', '"geo": ("N", "N")'):
            before("geo with entry=own", "N without gain", "N"),
        ('"none": ""', '"none": made[0]'): before("post with entry=none", "nothing", "N"),
        ("f(self.norm_in(x), *context)\n", "f(x, *context)\n"): "pre: one sublayer",
        ("self.norm_out(x + d * f(x, *context))", "x + self.norm_out(d * f(x, *context))"):
            "post: one sublayer",
        ("self.step(x, f(x, *context))", "self.step(x, f(x))"): "geo: f must receive"})


def test_2_each_placement(started):
    """Each wrong placement has its lines, with what must be so and by how much it is not."""
    folder = started(2)
    solve(folder / "model.py", EDGES, FORWARD)
    edit(folder / "model.py", ("self.norm_out(x + d *", "x + self.norm_out(d *"),
         ("self.norm_out(f(self.norm_in(x), *context))", "f(self.norm_in(x), *context)"))
    found, number = failures(2, folder), r"\d\.\d+"
    assert list(found) == [f"check_2_{part}[{norm}]" for part in ("sublayer", "whole_model")
                           for norm in ("post", "peri")]
    assert re.fullmatch(
        "post: one sublayer must be its line of the table; at d = 0.5 it turns a stream of RMS "
        f"{number} into one of RMS {number}, and the table into one of RMS {number}; the two "
        f"streams are up to {number} apart", found["check_2_sublayer[post]"])
    assert re.fullmatch(
        "peri: the whole model must be what its line of the table says; its output is "
        f"{number} away, and 1e-05 is allowed", found["check_2_whole_model[peri]"])


# --------------------------------------------------------------------------------- 3. one sphere

ONE_SPHERE = ('''
a = (x * g).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True)
v = g - a * x
return v, torch.atan2(length(v), (1 + a) * length(x))
''', '''
turned = x * math.sqrt(x.size(-1)) / length(x)
step = post_step(turned, g * length(turned) / length(x))
return turned, *step
''', "return math.atan(1 / math.sqrt(k))")


def test_3_one_sphere(started):
    folder = started(3)
    solve(folder / "one_sphere.py", *ONE_SPHERE)
    assert failures(3, folder) == {}
    assert_wrong(3, folder / "one_sphere.py", {
        ("torch.atan2(length(v), (1 + a) * length(x))",
         "torch.atan(length(v) / ((1 + a) * length(x)))"): "so that x + g points back",
        ("(1 + a) * length(x)", "length(x)"): "post_step: the turn must lead to N(x + g)",
        ("v = g - a * x", "v = g"): "post_step: v must be orthogonal to x",
        ("g * length(turned) / length(x)", "g"): "For rms(x) = 0.5, theta is",
        ("x * math.sqrt(x.size(-1)) / length(x)", "x / length(x)"): "pre_step: u must be on the",
        ("atan(1 / math.sqrt(k))", "atan(1 / k)"): "fixed_angle: at k = 2"})


# -------------------------------------------------------------------------------- 4. five faults

MENDED = {
    "parameters": (("torch.tensor([1])", "torch.ones(1)"), ("torch.tensor([0])", "torch.zeros(1)")),
    "max_angle": (("self.max_angle = math.pi / 4", "self.max_angle = max_angle"),),
    "default_decay": (('"square-root"', '"sqrt"'),),
    "harmonic": (("angle = theta / (self", "theta = theta / (self"),),
    "no_move": (("+ self.bias\n", "+ self.bias * (size > 0)\n"),)}


def test_4_five_faults(started):
    """Mended, it passes; each fault that is left in fails its own check and no other."""
    folder = started(4)
    laid_out = (folder / "faulty.py").read_text(encoding="utf-8")
    for left in (None, *MENDED):
        (folder / "faulty.py").write_text(laid_out, encoding="utf-8")
        edit(folder / "faulty.py", *itertools.chain(*(
            changes for name, changes in MENDED.items() if name != left)))
        assert list(failures(4, folder)) == [f"check_4_{left}"] * (left is not None)


def test_4_numbers(started):
    """The messages say by how much, and half a repair is none."""
    folder = started(4)
    edit(folder / "faulty.py", *itertools.chain(*MENDED.values()))
    assert_wrong(4, folder / "faulty.py", {
        ("= max_angle", "= math.pi / 4"): "max_angle=0.2 must limit the turn to 0.2 radians, but a "
                                          "long proposal turns x by 0.7854",
        ('"sqrt",', '"harmonic",'): "at layer 3 is 0.5 of layer 0's turn; here it is 0.25",
        ("theta = theta / (self.layer + 1)", "pass"): "0.25 of layer 0's turn; here it is 1",
        (" * (size > 0)", ""): "with g = 0 and a bias of 0.3, |x'|/|x| is 0.9553",
        ("self.bias = nn.Parameter(torch.zeros(1))", "self.bias = torch.zeros(1)"):
            "bias must be a parameter"})


# ------------------------------------------------------------------- 5 to 8. numbers and guesses

def test_5_predictions(started, monkeypatch):
    known, profile = {}, exercise_checks.profile

    def once(program, *case):       # what is measured does not depend on the guesses
        if case not in known:
            known[case] = profile(program, *case)
        return known[case]
    monkeypatch.setattr(exercise_checks, "profile", once)
    folder = started(5)
    path, lines = folder / "predictions.txt", "{}: {}\n".format
    names = [*exercise_checks.QUESTIONS.values(), *exercise_checks.KEEPS.values()]

    def says(*guesses):
        fill(path, "".join(map(lines, names, guesses)))
        return " ".join(failures(5, folder).values())
    assert says("Post", "pre", "post and geo", "geo") == ""
    assert "4 layers: geo's largest is" in says("geo", "pre", "post, geo", "geo")
    worst = says("post", "post", "post, geo", "geo")
    assert "least even gradients, 16 layers: post's largest is" in worst
    assert worst.endswith("another placement's are less even")
    assert "not pre, whose RMS is between" in says("post", "pre", "post geo pre", "geo")
    assert "1 named, but there is one more" in says("post", "pre", "geo", "geo")
    assert "gain is 1.5: not post, whose RMS is" in says("post", "pre", "post geo", "post geo")
    assert "not 'nobody'" in says("post", "nobody", "post geo", "geo")


def test_6_verdict():
    """Losses that were measured with the settings of the check, over a text's own 3.311."""
    exercise_checks.verdict(3.250, 2.457, 3.311, "--decay sqrt")
    with pytest.raises(AssertionError, match="with --dropout 0.1 the val loss is 3.251"):
        exercise_checks.verdict(3.250, 3.251, 3.311, "--dropout 0.1")
    with pytest.raises(AssertionError, match="must learn"):
        exercise_checks.verdict(3.250, float("nan"), 3.311, "--learning_rate 9")
    with pytest.raises(AssertionError, match="tell your teacher"):
        exercise_checks.verdict(2.9, 2.5, 3.311, "--decay sqrt")


def test_6_flag(started):
    folder = started(6)
    fill(folder / "flag.txt", "# mine\n--decay=sqrt  # or another\n")
    assert exercise_checks.one_flag(folder / "flag.txt") == {"--decay": "sqrt"}
    holds = "flag.txt must hold one flag, which starts with --, and its value; it holds: "
    for text, word in (("--decay sqrt --seed 2", holds + "--decay sqrt --seed 2"),
                       ("decay sqrt", holds + "decay sqrt"), ("", holds + "nothing"),
                       ("--n_layer 4", "--n_layer must stay 16")):
        fill(folder / "flag.txt", text)
        assert word in failures(6, folder)["check_6_learns"]


def test_6_trains(started, monkeypatch):
    """The runs themselves, at toy size: the flag replaces the setting, and losses come back."""
    monkeypatch.delenv("NANONORM_DATA", raising=False)
    folder = started(6)
    fill(folder / "text.txt", "some letters, again and again\n" * 60)
    toy = exercise_checks.SIXTEEN | {"--n_layer": "2", "--n_embd": "8", "--max_iters": "2",
                                     "--dataset": "mine"}
    with exercise_checks.Program(folder) as program:
        program("data.prepare").prepare([str(folder / "text.txt")], name="mine")
        loss, frequencies = exercise_checks.trained(program, toy, {"--decay": "sqrt"})
        assert 0 < frequencies < loss < 6
        for flag, word in ((("--device", "gpu"), "refuses --device gpu: argument --device: inval"),
                           (("--min_lr", "1"), "refuses --min_lr 1: --min_lr 1.0 is above"),
                           (("--dataset", "other"), "stopped with --dataset other: there is no "),
                           (("--block_size", "999"), "stopped with --block_size 999: ")):
            with pytest.raises(pytest.fail.Exception, match=f"^train.py {word}"):
                exercise_checks.trained(program, toy, dict([flag]))


RUNS = """norm,decay,entry,learning_rate,seed,status,val_loss
pre,own,own,0.001,1,ok,2.00
pre,own,own,0.001,2,ok,2.02
pre,own,own,0.001,3,ok,2.01
pre,own,own,0.002,1,ok,1.950
pre,own,own,0.002,2,ok,1.960
pre,own,own,0.002,3,ok,1.955
pre,sqrt,own,0.002,1,ok,1.5
post,own,own,0.001,1,ok,1.90
post,none,own,0.001,2,ok,1.92
post,own,own,0.002,1,ok,1.87
post,own,own,0.002,2,learned nothing,3.35
peri,own,own,0.001,1,ok,1.94
peri,own,own,0.002,1,ok,1.898
geo,own,own,0.001,1,ok,1.93
geo,own,own,0.002,1,ok,1.846
geo,own,norm,0.002,2,ok,1.841
geo,sqrt,own,0.002,3,ok,1.853
geo,none,own,0.002,1,ok,1.2
deepnorm,own,own,0.002,1,ok,1.1
post,own,own,0.004,1,diverged at step 9,nan
"""


def started_with_runs(started, number: int) -> Path:
    """The exercise, with runs of which the right answers are known; and the real file is of use."""
    folder = started(number)
    real = exercise_checks.runs_of(folder)
    assert set(real) == set(exercise_checks.NAMES)
    assert len(set.intersection(*(set(rates) for rates in real.values()))) > 1
    assert len(exercise_checks.differences(folder)) > 2
    fill(folder / "data/results/earlier-layers16.csv", RUNS)
    return folder


def test_7_ranking(started):
    folder = started_with_runs(started, 7)

    def says(*lines):
        fill(folder / "ranking.txt", "\n".join(lines))
        return " ".join(failures(7, folder).values())
    low, high = "1e-3: post geo peri pre", "0.002: geo peri pre post"
    best = "own best: geo peri post pre"
    assert says(low, high, best) == ""
    assert "2: post is before geo, but its mean val loss is 0.763 higher" in says(
        low, "0.002: post geo peri pre", best)
    assert "own best: post is before peri, but its mean val loss is 0.012 higher" in says(
        low, high, "own best: geo post peri pre")
    assert "1 of the 2 learning rates are ranked" in says(low, best)
    assert "each of pre, post, peri, geo once" in says(low, high, "own best: geo")
    assert says("0.001: post peri geo pre", high, best) == ""       # 0.01 apart: either order


def test_8_seeds(started):
    folder = started_with_runs(started, 8)
    names = [line.rstrip(":") for line in exercise_checks.FILES[8]["seeds.txt"].splitlines()
             if line.endswith(":") and line[0] != "#"]

    def says(*numbers):
        fill(folder / "seeds.txt", "".join(map("{}: {}\n".format, names, numbers)))
        return " ".join(failures(8, folder).values())

    # geo minus pre is -0.104, -0.119, -0.102: deviation 0.0093, times 4.303 / sqrt(3).
    assert says(-0.1083, 0.00929, 0.02308, 6, 2.195) == ""
    assert "mean difference: 0.1083 is -1.00 times" in says(0.1083, 0.00929, 0.02308, 6, 2.195)
    assert "differences: 0.00758 is 0.82 times" in says(-0.1083, 0.00758, 0.02308, 6, 2.195)
    assert "file: 0.0105 is 0.45 times" in says(-0.1083, 0.00929, 0.0105, 6, 2.195)
    assert "with 4 the half width is 0.0148" in says(-0.1083, 0.00929, 0.02308, 4, 2.195)
    assert "fewer than 9" in says(-0.1083, 0.00929, 0.02308, 9, 2.195)
    assert "1.96: 4.303 is 1.96 times" in says(-0.1083, 0.00929, 0.02308, 6, 4.303)
    assert "must be a number" in says(-0.1083, "small", 0.02308, 6, 2.195)


# -------------------------------------------------------------------- 9 and 10. changes of model.py

REORDERED = '''

NORMS = (*NORMS, "reordered")
edges_of_four, OfFour = edge_norms, Residual


def edge_norms(config):
    if config.norm != "reordered":
        return edges_of_four(config)
    return nn.Identity(), rms_norm(config)


class Residual(OfFour):
    def __init__(self, config, layer, sublayer):
        super().__init__(config, layer, sublayer)
        if config.norm == "reordered":
            self.norm_out = rms_norm(config)

    def forward(self, x, *context):
        if self.norm == "reordered":
            return x + self.decay * self.norm_out(self.f(x, *context))
        return super().forward(x, *context)
'''


def test_9_reordered(started):
    folder = started(9)
    with open(folder / "model.py", "a", encoding="utf-8") as file:
        file.write(REORDERED)
    assert failures(9, folder) == {}
    assert_wrong(9, folder / "model.py", {
        ("x + self.decay * self.norm_out(self.f", "self.norm_out(x + self.decay * self.f"):
            "x + N(f(x)): with --decay own, d is 1 at layer 1, and the change of a stream of RMS",
        ("self.norm_out(self.f(x, *context))", "self.f(self.norm_out(x), *context)"):
            "x + N(f(x)): with --decay own, d is 1 at layer 1, and the change of a stream of RMS",
        ("self.decay * ", ""): "x + N(f(x)): with --decay harmonic, d is 0.5 at layer 1, and",
        ("return x + d * f(self.norm_in(x)", "return 2 * x + d * f(self.norm_in(x)"):
            "pre: one sublayer must be its line of the table; at d = 0.5",
        ("return nn.Identity(), rms", "return rms_norm(config), rms"): "before the first block",
        ("            self.norm_out = rms_norm(config)",
         "            self.norm_out = rms_norm(config)\n            torch.rand(1)"):
            "no random numbers",
        ("self.f(x, *context))", "self.f(x, *context).cumsum(1).flip(1))"): "causal",
        ('(*NORMS, "reordered")', '(*NORMS, "reordred")'): "pre, post, peri, geo, reordred"})


CACHED = '''
end = start + T
cache[0, :, :, start:end], cache[1, :, :, start:end] = k, v
k, v = cache[0, :, :, :end], cache[1, :, :, :end]
mask = torch.arange(end) <= torch.arange(start, end)[:, None]
'''


def test_10_memory(started):
    folder = started(10)
    solve(folder / "model.py", CACHED)
    assert failures(10, folder) == {}
    right = (folder / "model.py").read_text(encoding="utf-8")
    edit(folder / "model.py", ("torch.arange(start, end)", "torch.arange(T)"))
    seen = next(text for name, text in run_checks(10, folder) if "placements" in name)
    assert re.fullmatch(r"pre: cached and uncached logits must agree; they are \d\.\d+ apart, and "
                        "1e-05 is allowed", seen)
    fill(folder / "model.py", right)
    assert_wrong(10, folder / "model.py", {
        ("mask = torch.arange(end) <= torch.arange(start, end)[:, None]", "mask = None"):
            "one token, then one at a time: the logits must be those of the uncached model; at "
            "position 1 of 0 to 11",
        ("torch.arange(end) <= torch.arange(start, end)[:, None]",
         "torch.ones(T, end, dtype=torch.bool)"): "chunks of 3, 2 and 7 tokens: the logits must",
        ("torch.arange(start, end)[:, None]", "torch.arange(T)[:, None]"): "one at a time",
        ("torch.arange(end) <= ", "torch.arange(end) < "):
            "a prompt of 12 tokens into an empty cache: the logits must be those of the uncached "
            "model; at position 0 of 0 to 11",
        ("start:end], cache[1, :, :, start:end]", ":T], cache[1, :, :, :T]"): "one at a time"})
