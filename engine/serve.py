"""Command line of the engine: `python -m engine.serve --model DIR --tp N ...`; serves until SIGTERM or SIGINT.

Exit codes: 0 after a signal, 1 when the server failed while running, 2 for options or a model that cannot be
used (the message on stderr names them).
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

import torch

from engine import config
from engine.config import ConfigError, EngineConfig, ModelConfig
from engine.core import EngineCore, Stop
from engine.ranks import Ranks
from engine.tokenizer import Tokenizer
from engine.worker import Worker


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    try:
        config.check_tp(ModelConfig.from_dir(options.model), options.tp)
        return serve(options)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def serve(options: EngineConfig) -> int:
    """Start the ranks, then run the step loop on this thread and HTTP on another."""
    if options.device == "cpu":
        torch.set_num_threads(1)  # one thread per rank: the ranks are the parallelism
    if options.trace_dir is not None:
        options.trace_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engine-") as scratch:
        rendezvous = Path(scratch, "rendezvous")
        ranks = Ranks(options, rendezvous)
        try:
            from engine.server import HttpServer  # imported here, while the other ranks load

            worker = Worker(options, 0, rendezvous)
            ranks.gather()  # every rank is ready
            core = EngineCore(worker, ranks, _tokenizer(options.model))
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: core.inbox.put(Stop()))
            http = HttpServer(core, options)
            http.start()
            core.run()
            http.stop()
            ranks.stop()
        except (RuntimeError, OSError):  # a collective or a pipe that broke: perhaps because a rank died
            ranks.name_the_dead()
            raise
        finally:
            ranks.kill()
    if core.failure:
        sys.stderr.write(f"error: {core.failure}\n")
    return 1 if core.failure else 0


def parse_options(argv: list[str] | None) -> EngineConfig:
    """Options from the command line; defaults are EngineConfig's."""
    parser = argparse.ArgumentParser(prog="engine.serve", description=__doc__)
    defaults = EngineConfig(model=Path())
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face model directory")
    add("--tp", type=_positive, default=defaults.tp, help="tensor-parallel ranks")
    add("--device", choices=config.DEVICES, default=defaults.device)
    add("--dtype", choices=("auto", *config.DTYPES), default=defaults.dtype)
    add("--load-format", choices=config.LOAD_FORMATS, default=defaults.load_format)
    add("--seed", type=int, default=defaults.seed, help="of dummy weights")
    add("--max-model-len", type=_positive, default=None, help="prompt and output (the model's, at most 8192)")
    add("--block-size", type=_positive, default=None, help="tokens in a KV page (16, or the backend's)")
    add("--num-kv-blocks", type=_positive, default=None, help="pages of the KV cache (from free memory)")
    add("--max-num-seqs", type=_positive, default=defaults.max_num_seqs, help="sequences in a step")
    add("--max-num-batched-tokens", type=_positive, default=None, help="tokens in a step")
    add("--attention-backend", choices=config.ATTENTION_BACKENDS, default=defaults.attention_backend)
    add("--gpu-memory-utilization", type=float, default=defaults.gpu_memory_utilization)
    add("--trace-dir", type=Path, default=None, help="where /stop_profile writes; without it profiling is off")
    add("--served-model-name", default=None, help="the model's id over HTTP (the --model path)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--uds", type=Path, default=None, help="Unix socket to serve on")
    where.add_argument("--host", default=defaults.host)
    add("--port", type=int, default=defaults.port)
    return EngineConfig(**vars(parser.parse_args(argv)))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _tokenizer(model_dir: Path) -> Tokenizer | None:
    """None without tokenizer.json: such a server takes and returns token ids only."""
    return Tokenizer(model_dir) if (model_dir / "tokenizer.json").exists() else None


if __name__ == "__main__":
    sys.exit(main())
