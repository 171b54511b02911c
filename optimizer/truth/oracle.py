"""What the right tokens are: transformers' model in a process of its own, and the bands that judge by it.

Bands of one emitted token, by how far its logit lies below the top one (float32 unless said otherwise):
equal 0; reorder <= 1e-3 (another order of summation: counts as equal, is recorded); tolerance (a person
decides); wrong. Measured on the tiny model: reorderings move logits by 2e-5, the mildest planted fault by 1.1.

Not for: deciding what happens to a candidate (`gates/`). Never imports an engine.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from optimizer.confine import procfs
from optimizer.types import Stream

BAND_NAMES = ("equal", "reorder", "tolerance", "wrong")


class OracleError(RuntimeError):
    """The oracle itself failed: no verdict about any candidate follows from it."""


@dataclass(frozen=True, slots=True)
class Bands:
    """Upper ends, in logits. `reorder` counts as equal; up to `tolerance` a person decides; above is wrong.

    kl: largest mean divergence of a 16-bit server's log-probabilities (bf16 measures 7e-4 on the tiny model, the
    mildest fault 6e-3; a deep model in bf16 needs more, see `bands.py`).
    """

    reorder: float
    tolerance: float
    kl: float = 2e-3

    def name(self, gap: float) -> str:
        if gap <= 0:
            return "equal"
        if gap <= self.reorder:
            return "reorder"
        return "tolerance" if gap <= self.tolerance else "wrong"


# float32: see the module text. 16-bit engines: logits themselves are rounded; the tiny model in bf16 moves by up to
# 0.45. `calibrated` replaces these by what benign variants show on the model and machine at hand.
BANDS = {"float32": Bands(1e-3, 1e-2), "float16": Bands(0.1, 0.2), "bfloat16": Bands(0.5, 1.0)}


def calibrated(benign_gaps: Sequence[float], floor: Bands, kl: float = 0.0) -> Bands:
    """Bands from what variants known to be benign show: twice the largest gap, three times the divergence `kl`; never
    below `floor`."""
    reorder = max(floor.reorder, 2.0 * max(benign_gaps, default=0.0))
    return Bands(reorder, max(floor.tolerance, 2.0 * reorder), max(floor.kl, 3.0 * kl))


@dataclass(frozen=True, slots=True)
class Score:
    """How one greedy stream compares. `first_bad`: index of the first token above the reorder band."""

    ok: bool
    first_bad: int | None
    max_gap: float
    band: str
    expected: int | None = None  # the oracle's token at first_bad
    reordered: int = 0  # tokens in the reorder band


class Oracle:
    """One subprocess for a whole run; models of several directories (`at`) share it.

    Starts at once and loads while the caller does other things: the first question waits for it. On GPUs it takes the
    first of `devices`, where the engine runs. A context manager; `close` ends the process.
    """

    def __init__(
        self,
        model_dir: Path,
        device: str = "cpu",
        dtype: str = "auto",
        *,
        engine_dtype: str = "float32",
        bands: Bands | None = None,
        devices: Sequence[int] = (),
        timeout_s: float = 300.0,
    ) -> None:
        self.model_dir = Path(model_dir).resolve()
        self.bands = bands or BANDS[engine_dtype]
        self._link = _Link(device, dtype, devices, timeout_s)
        self._link.ask_later("load", self.model_dir)

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._link.close()

    def at(self, model_dir: Path, bands: Bands | None = None) -> Oracle:
        """The same process with the weights of another directory. Closing either closes both."""
        view = object.__new__(Oracle)
        view.model_dir, view.bands, view._link = Path(model_dir).resolve(), bands or self.bands, self._link
        return view

    @property
    def dtype(self) -> str:
        """What the oracle computes in, for reports: float32, or bfloat16 where that does not fit."""
        self._link.settle()
        return self._link.dtype

    def score(self, streams: Sequence[Stream]) -> list[Score]:
        """Teacher-forced verdict on greedy streams, in order. An empty stream is wrong at 0."""
        outputs = [list(s.token_ids) for s in streams]
        answer = self._ask("score", prompts=[list(s.prompt_ids) for s in streams], outputs=outputs)
        return [self._one(g, b) for g, b in zip(answer["gaps"], answer["best"], strict=True)]

    def _one(self, gaps: list[float], best: list[int]) -> Score:
        if not gaps:
            return Score(False, 0, float("inf"), "wrong")
        worst = max(gaps)
        bad = next((i for i, gap in enumerate(gaps) if not gap <= self.bands.reorder), None)
        return Score(
            ok=bad is None,
            first_bad=bad,
            max_gap=worst,
            band=self.bands.name(worst),
            expected=None if bad is None else best[bad],
            reordered=sum(0 < gap <= self.bands.reorder for gap in gaps),
        )

    def logprobs(
        self, streams: Sequence[Stream], wanted: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[list[float]]]:
        """Log-probabilities of the `wanted` ids at each output position of each stream."""
        return self._ask(
            "logprobs",
            prompts=[list(s.prompt_ids) for s in streams],
            outputs=[list(s.token_ids) for s in streams],
            wanted=[[list(ids) for ids in stream] for stream in wanted],
        )["values"]

    def mass(self, streams: Sequence[Stream], temperature: float) -> list[list[tuple[float, float]]]:
        """At each output position: (mass of all tokens likelier than the emitted one, its own mass)."""
        outputs = [list(s.token_ids) for s in streams]
        answer = self._ask(
            "mass", prompts=[list(s.prompt_ids) for s in streams], outputs=outputs, temperature=temperature
        )
        return [[(above, own) for above, own in stream] for stream in answer["values"]]

    def logits(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [prompts, vocabulary]: logits of the token after each prompt."""
        answer = self._ask("distribution", prompts=[list(p) for p in prompts])
        return np.frombuffer(answer["logits"], dtype=np.float32).reshape(-1, answer["vocabulary"])

    def generate(self, prompts: Sequence[Sequence[int]], n: int) -> list[tuple[int, ...]]:
        """`n` greedy tokens after each prompt; end-of-text does not stop."""
        return [tuple(t) for t in self._ask("generate", prompts=[list(p) for p in prompts], n=n)["tokens"]]

    def cpu_s(self) -> float:
        """CPU seconds of the oracle's process so far: what verification costs."""
        return self._link.cpu_s()

    def machine(self, bytes_read: int) -> tuple[float, float]:
        """(bytes/s, FLOP/s) that one rank of this machine reaches at best, measured in the oracle's process."""
        answer = self._ask("machine", bytes_read=bytes_read)
        return answer["bytes_s"], answer["flops_s"]

    def _ask(self, ask: str, **arguments: Any) -> dict[str, Any]:
        return self._link.ask(ask, self.model_dir, **arguments)


def worst(scores: Sequence[Score]) -> Score:
    """The score that decides: the one with the largest gap."""
    return max(scores, key=lambda score: score.max_gap, default=Score(True, None, 0.0, "equal"))


def without_ids(score: Score) -> Score:
    """A score that may be shown to a proposer: the expected token stays secret."""
    return replace(score, expected=None)


class _Link:
    """The pipe to the worker: one question at a time, deadlines, a clear error when it dies."""

    def __init__(self, device: str, dtype: str, devices: Sequence[int], timeout_s: float) -> None:
        self._device, self._asked_dtype, self._timeout_s = device, dtype, timeout_s
        self._lock = threading.Lock()
        self._pending = False
        self.dtype = ""
        env = {
            k: v
            for k, v in os.environ.items()
            if k in ("PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
        }
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = str(devices[0])
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "optimizer.truth.oracle_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=env | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            process_group=0,  # Ctrl-C is for the loop, which ends after its present step
        )

    def ask_later(self, ask: str, model_dir: Path) -> None:
        self._send(ask, model_dir, {})
        self._pending = True

    def settle(self) -> None:
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        if self._pending:
            self._pending = False
            self._receive("load")

    def ask(self, ask: str, model_dir: Path, **arguments: Any) -> dict[str, Any]:
        with self._lock:
            self._settle()
            self._send(ask, model_dir, arguments)
            return self._receive(ask)

    def _send(self, ask: str, model_dir: Path, arguments: dict[str, Any]) -> None:
        request = {
            "ask": ask,
            "model_dir": str(model_dir),
            "device": self._device,
            "dtype": self._asked_dtype,
        }
        data = msgspec.msgpack.encode(request | arguments)
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise OracleError("the oracle was closed")
        try:
            self._process.stdin.write(len(data).to_bytes(4, "big") + data)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise OracleError(f"the oracle is gone: {error}") from None

    def _receive(self, ask: str) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        size = int.from_bytes(self._exactly(4, deadline, ask), "big")
        answer = msgspec.msgpack.decode(self._exactly(size, deadline, ask))
        if "error" in answer:
            raise OracleError(f"oracle, {ask}: {answer['error']}")
        self.dtype = answer.get("dtype", self.dtype)
        return answer

    def _exactly(self, size: int, deadline: float, ask: str) -> bytes:
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            raise OracleError("the oracle was closed")
        fd = self._process.stdout.fileno()
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                self.close()
                raise OracleError(f"oracle, {ask}: no answer within {self._timeout_s:g} s")
            piece = os.read(fd, size - len(data))
            if not piece:
                raise OracleError(f"oracle, {ask}: the process ended\n{self._last_words()}")
            data += piece
        return bytes(data)

    def cpu_s(self) -> float:
        return procfs.cpu_s(self._process.pid)

    def _last_words(self) -> str:
        self._stderr.seek(0)
        return "\n".join(self._stderr.read()[-4000:].decode("utf-8", "replace").splitlines()[-8:])

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        self._stderr.close()
