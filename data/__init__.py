"""What the commands share: flags, one-line errors, exits without a traceback, atomic writes."""
import argparse
import math
import os
import signal
import sys
import threading
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path


FORMAT = "nanonorm 3"       # of a run's folder: what an older version wrote is not read

# Flags of train.py that only observe, or say where and in what format a run computes: they may
# differ when a run continues, and are no settings to compare.
MAY_DIFFER = {"out_dir", "preset", "overwrite", "eval_interval", "log_interval", "device", "dtype",
              "compile"}


def flag(default, help: str, kind=None, low=None, high=None, choices=None, single=False):
    """A field of a dataclass and its command-line flag, see `Parser.add_field`.

    low and high are the bounds of a number; `single` flags do not take several values.
    """
    return field(default=default, metadata={
        "help": help, "kind": kind or type(default), "low": low, "high": high, "choices": choices,
        "single": single})


class Parser(argparse.ArgumentParser):
    """argparse with one line on stderr for a wrong flag (exit code 2), and no abbreviated flags."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see --help\n")

    def add_field(self, f):
        """Add the flag of a dataclass field made by `flag`; one that is not single takes a list."""
        text, kind = f.metadata["help"], f.metadata["kind"]
        if f.default is not None and f.default is not False:
            text += f" (default: {f.default})"
        if kind is bool:
            self.add_argument(f"--{f.name}", action=argparse.BooleanOptionalAction, help=text)
        elif f.metadata["single"]:
            self.add_argument(f"--{f.name}", type=kind, choices=f.metadata["choices"], help=text)
        else:
            self.add_argument(f"--{f.name}", type=kind, choices=f.metadata["choices"], help=text,
                              nargs="+", action="extend")

    def parse_fields(self, fields, args: list[str] | None) -> dict:
        """The flags that were given, as a dict; a number outside its bounds is an error."""
        given = vars(self.parse_args(args))
        for f in fields:
            values = given.get(f.name)
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, (int, float)):
                    self.check_bounds(f, value)
        return given

    def check_bounds(self, f, value: float):
        low, high = f.metadata["low"], f.metadata["high"]
        if low is not None and not value >= low:
            self.error(f"--{f.name} must be at least {low}, not {value}")
        if high is not None and not value <= high:
            self.error(f"--{f.name} must be at most {high}, not {value}")
        if math.isinf(value) and f.default != math.inf:
            self.error(f"--{f.name} must be finite, not {value}")


def show_any_text():
    """Print "?" for what the console cannot show, instead of stopping. Notebooks show all."""
    for console in (sys.stdout, sys.stderr):
        if hasattr(console, "reconfigure"):
            console.reconfigure(errors="replace")


def command(main, closed_pipe: int = 0):
    """Run main() as a command that ends without a traceback.

    The exit code is 130 after Ctrl-C, `closed_pipe` if the reader of our output has gone (as in
    `| head`), and 1 for a file that cannot be read or written, with one line that names it.
    """
    show_any_text()
    try:
        try:
            main()
        finally:
            flush_consoles()
    except KeyboardInterrupt:
        print("interrupted; what was saved before is intact", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(closed_pipe)
    except OSError as error:
        name = error.filename or "standard output"
        sys.exit(f"{name}: {error.strerror or error}; what was saved before is intact")


def flush_consoles():
    """Write what stdout and stderr still hold. Raises an OSError that names the one that failed.

    That one is then redirected to os.devnull: Python flushes once more when it exits, and would
    end with a traceback and exit code 120. A console that was closed, as by `>&-`, is None.
    """
    failure = None
    for console, name in ((sys.stderr, "standard error"), (sys.stdout, "standard output")):
        try:
            if console is not None:
                console.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), console.fileno())
            error.filename = name
            failure = error
    if failure is not None:
        raise failure


class Interrupt:
    """Remembers a first SIGINT or SIGTERM in `number`, so that the current step can be saved.

    A second one acts at once. A context manager, which puts the old handlers back; only the main
    thread can have handlers.
    """
    number = 0

    def __enter__(self):
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number, frame):
        self.number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)


@contextmanager
def atomic(path: Path):
    """Yield a path to write to, which replaces `path` once that has succeeded, and never before."""
    temporary = path.with_name("part." + path.name)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
