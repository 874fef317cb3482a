"""Verify versions and edges in a child process: a model that never ends or takes all memory only ends the child.

Run as `python -m index.isolated` this module is the child: it reads the request as a line of JSON from standard input
and writes the outcome as a line of JSON. It ends when its input closes, because its parent is gone. Modules that open
models are imported where they are used, so that the limits are set before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from index import errors
from index.errors import InvalidVersionFolder, RegraftError
from index.version import EDGE_ARRAYS, EDGE_MODEL, Card, Edge, Version
from index.version_folder.card import parse_card, parse_edge
from index.version_folder.folder import load_version

MAX_MESSAGE = 2000
"""Characters of an error that are passed on: they must fit a pipe that is read only after the process ended."""
GRACE_SECONDS = 5
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Limits:
    """Limits for verifying one folder: wall-clock seconds, and bytes of memory."""

    seconds: float = 300.0
    memory_bytes: int = 4 << 30


def verify_isolated(folder: Path, known: Mapping[str, Card] | None, limits: Limits) -> Version:
    """`index.encoders.encoder.verify_version` with `batches`; models and arrays are opened in a child process.

    Raises:
        InvalidVersionFolder: as there, or the limits are exceeded.
    """
    version = load_version(folder)
    if not any(path.endswith((".onnx", ".npz")) for path in version.card.files):
        from index.encoders.encoder import verify_version

        return verify_version(folder, known)
    cards = None if known is None else {name: card.as_json() for name, card in known.items()}
    _ask({"folder": str(folder), "known": cards}, limits)
    return version


def check_edge_isolated(edge: Edge, new: Card, old: Card, limits: Limits) -> None:
    """Check an edge against the cards of its two versions; its files are opened in a child process.

    Raises:
        InvalidVersionFolder: it does not fit the cards, or the limits are exceeded.
    """
    if edge.kind not in {*EDGE_MODEL, *EDGE_ARRAYS}:
        from index.encoders.encoder import check_edge

        check_edge(edge, new, old)
        return
    given = {"edge": str(edge.folder), "hashes": dict(edge.hashes), "new": new.as_json(), "old": old.as_json()}
    _ask({**given, "evidence": edge.as_json()}, limits)


def _ask(asked: Mapping[str, Any], limits: Limits) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("REGRAFT_")}
    command = [sys.executable, "-P", "-m", "index.isolated"]  # -P: nothing is imported from the working directory
    process = subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**settings, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            process.stdin.write(json.dumps({**asked, "limits": vars(limits)}).encode() + b"\n")
            process.stdin.flush()
            process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            raise InvalidVersionFolder(f"its models could not be verified within {limits.seconds:g} seconds") from None
        except BrokenPipeError:
            process.wait()
        finally:
            process.kill()
            process.wait()
        outcome = process.stdout.read()
    if not outcome:
        raise InvalidVersionFolder(
            f"its models ended the process that verifies them (code {process.returncode}):"
            f" they need more than {limits.memory_bytes >> 20} MiB of memory or crash onnxruntime"
        )
    _raise(json.loads(outcome))


def _raise(outcome: Mapping[str, str]) -> None:
    if "kind" in outcome:
        kind: type[RegraftError] = getattr(errors, outcome["kind"])
        raise kind(outcome["message"], pointer=outcome["pointer"])


def _main() -> None:
    asked = json.loads(sys.stdin.readline())
    limits = Limits(**asked.pop("limits"))
    _limit(limits)
    threading.Thread(target=_end_with_input, daemon=True).start()
    outcome: dict[str, str] = {}
    try:
        _verify(asked)
    except RegraftError as error:
        outcome = {"kind": type(error).__name__, "message": error.message[:MAX_MESSAGE], "pointer": error.pointer}
    except MemoryError:
        message = f"its models need more than {limits.memory_bytes >> 20} MiB of memory for verification"
        outcome = {"kind": InvalidVersionFolder.__name__, "message": message, "pointer": ""}
    sys.stdout.write(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads that a model left running


def _verify(asked: Mapping[str, Any]) -> None:
    from index.encoders.encoder import check_edge, verify_version

    if "folder" in asked:
        known = asked["known"]
        cards = None if known is None else {name: parse_card(card) for name, card in known.items()}
        verify_version(Path(asked["folder"]), cards, batches=True)
        return
    new, old = parse_card(asked["new"]), parse_card(asked["old"])
    folder = Path(asked["edge"])
    files = {path.name for path in folder.iterdir()}
    edge = parse_edge(asked["evidence"], new.name, old.name, folder, files)
    check_edge(replace(edge, hashes=asked["hashes"]), new, old)


def _limit(limits: Limits) -> None:
    """Set the limits for this process itself, in case its parent is gone."""
    try:
        import resource
        import signal
    except ImportError:  # not POSIX: only the timeout of the parent limits it
        return
    # Data, not address space: onnxruntime maps memory that it does not use.
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, limits.seconds + GRACE_SECONDS)


def _end_with_input() -> None:
    # Not through `sys.stdin`, which the main thread reads with a buffer.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    _main()
