"""A stand-in for `vllm.entrypoints.openai.api_server`: its flags, its HTTP surface, its log line; tokens of the fake model.

Flags that it does not know are errors, as with vLLM. A step takes MS of the first setting that is named on the command
line. --tensor-parallel-size changes nothing but what its KV cache takes. FAKE_VLLM (words) makes it cheat or fail: `hits`,
`float16`, `short`, `dies`, `other-tokens`.
"""

import argparse
import json
import os
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
import model
import tracing

MS = {"--enforce-eager": 9.0, "--disable-custom-all-reduce": 4.0, "--no-async-scheduling": 6.0, "FULL_DECODE_ONLY": 4.0, "": 6.0}
FAULTS = os.environ.get("FAKE_VLLM", "").split()
INFO = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="False",extra="{}",num_gpu_blocks="%d"} 1.0'


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options = None
    weights = b""
    vocabulary = 0
    blocks = 0
    step_s = 0.0
    profiled = None
    hits = 0

    def log_message(self, *_):
        pass

    def address_string(self):
        return "client"

    def answer(self, status, text, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, "")
        if self.path == "/v1/models":
            card = {"id": self.options.served_model_name, "object": "model", "root": self.options.model, "max_model_len": self.options.max_model_len}
            return self.answer(200, json.dumps({"object": "list", "data": [card]}))
        if self.path == "/metrics":
            lines = ["# TYPE vllm:prefix_cache_hits counter", f'vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {float(Handler.hits)}',
                     'vllm:num_preemptions_total{engine="0"} 0.0', INFO % self.blocks]  # fmt: skip
            return self.answer(200, "\n".join(lines) + "\n", "text/plain")
        return self.answer(404, '{"detail": "Not Found"}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/v1/completions":
            return self.complete(body)
        config = json.loads(self.options.profiler_config)
        if self.path in ("/start_profile", "/stop_profile") and config.get("profiler"):
            if self.path == "/start_profile":
                Handler.profiled = 0
            else:
                tracing.write(config["torch_profiler_dir"], 0, 1, Handler.profiled or 0)
                Handler.profiled = None
            return self.answer(200, "")
        return self.answer(404, '{"detail": "Not Found"}')

    def complete(self, body):
        prompt, count = body["prompt"], body["max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        Handler.hits += "hits" in FAULTS
        weights = b"other" if "other-tokens" in FAULTS else self.weights
        sent = count - 1 if "short" in FAULTS else count
        for index, token in enumerate(model.generate(weights, prompt, sent, self.vocabulary)):
            time.sleep(self.step_s)
            if Handler.profiled is not None:
                Handler.profiled += 1
            choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length" if index == sent - 1 else None, "stop_reason": None,
                      "token_ids": [token]}  # fmt: skip
            self.event({"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]})
        self.event({"choices": [], "usage": {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + sent, "completion_tokens": sent}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value):
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def parse(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model", "--uds", "--served-model-name", "--generation-config", "--seed", "--load-format", "--dtype", "--kv-cache-dtype",
                 "--gpu-memory-utilization", "--max-num-seqs", "--attention-backend", "--max-num-batched-tokens", "--block-size",
                 "--performance-mode"):  # fmt: skip
        parser.add_argument(name)
    parser.add_argument("--compilation-config", default="{}")
    parser.add_argument("--profiler-config", default="{}")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--cudagraph-capture-sizes", nargs="+", type=int)
    for name in ("--enable-prefix-caching", "--async-scheduling"):
        parser.add_argument(name, action=argparse.BooleanOptionalAction)
    for name in ("--skip-tokenizer-init", "--disable-uvicorn-access-log", "--enforce-eager", "--disable-custom-all-reduce"):
        parser.add_argument(name, action="store_true")
    return parser.parse_args(argv)


def main():
    options = Handler.options = parse(sys.argv[1:])
    if options.attention_backend == "FLASHINFER" or "dies" in FAULTS:
        raise SystemExit("ModuleNotFoundError: No module named 'flashinfer'")
    config = json.loads(Path(options.model, "config.json").read_text())
    size = {"float32": 4, "bfloat16": 2}[options.dtype]
    heads = max(1, config["num_key_value_heads"] // options.tensor_parallel_size)
    per_token = 2 * config["num_hidden_layers"] * heads * config["head_dim"] * size
    Handler.weights = Path(options.model, "model.safetensors").read_bytes()
    Handler.vocabulary, Handler.blocks = config["vocab_size"], options.kv_cache_memory_bytes // per_token // 16
    words = " ".join(sys.argv)
    Handler.step_s = next(ms for name, ms in MS.items() if name in words) / 1000
    dtype = "float16" if "float16" in FAULTS else options.dtype
    sys.stderr.write(f"INFO Initializing a V1 LLM engine (v0.25.1) with config: model='m', dtype=torch.{dtype}, max_seq_len=1, "
                     f"kv_cache_dtype={options.kv_cache_dtype}, enable_prefix_caching={options.enable_prefix_caching}, seed=0\n")  # fmt: skip
    sys.stderr.write("INFO Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].\n")
    sys.stderr.flush()
    with Server(options.uds, Handler) as server:
        server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
