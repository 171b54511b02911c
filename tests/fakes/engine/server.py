"""The fake engine's HTTP server on a Unix socket: the subset of vLLM's surface that the optimiser uses."""

import argparse
import json
import socketserver
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import model
import tracing

MAX_LEN = 4096


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options = None
    weights = b""
    vocabulary = 0
    profiled = None

    def log_message(self, *_):
        pass

    def address_string(self):
        return "client"

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health":
            self.answer(200, {})
        elif self.path == "/v1/models":
            about = {"engine": "fake", "dtype": "float32", "device": "cpu", "tp": self.options.tp, "max_model_len": MAX_LEN}
            self.answer(200, {"object": "list", "data": [{"id": "fake", "object": "model", "metadata": about}]})
        else:
            self.answer(404, {"error": {"message": "no such page"}})

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        try:
            body = json.loads(self.rfile.read(length) or b"{}")
        except ValueError:
            return self.answer(400, {"error": {"message": "not JSON"}})
        if self.path == "/v1/completions":
            return self.complete(body)
        if self.path == "/start_profile":
            Handler.profiled = 0
            return self.answer(200, {})
        if self.path == "/stop_profile":
            for rank in range(self.options.tp):
                tracing.write(self.options.trace_dir, rank, self.options.tp, Handler.profiled or 0)
            Handler.profiled = None
            return self.answer(200, {})
        return self.answer(404, {"error": {"message": "no such page"}})

    def complete(self, body):
        prompt, count = body["prompt"], body.get("max_tokens", 16)
        if len(prompt) + count > MAX_LEN:
            return self.answer(400, {"error": {"message": f"prompt too long: at most {MAX_LEN} tokens"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index, token in enumerate(model.generate(self.weights, prompt, count, self.vocabulary)):
            if Handler.profiled is not None:
                Handler.profiled += 1
            last = index == count - 1
            choice = {"index": 0, "text": f" {token}", "token_ids": [token], "finish_reason": "length" if last else None}
            self.chunk({"choices": [choice]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
        self.chunk({"choices": [], "usage": usage})
        self.raw(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        return None

    def chunk(self, value):
        self.raw(b"data: " + json.dumps(value).encode() + b"\n\n")

    def raw(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--trace-dir", required=True)
    options = parser.parse_args()
    Handler.options = options
    Handler.weights = Path(options.model, "model.safetensors").read_bytes()
    Handler.vocabulary = json.loads(Path(options.model, "config.json").read_text())["vocab_size"]
    with Server(options.uds, Handler) as server:
        server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
