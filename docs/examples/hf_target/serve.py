"""HTTP on a Unix socket around `generate.Engine`, whatever engine that is: the part of vLLM's surface that `optimize` uses.

GET /health, /v1/models, /metrics; POST /v1/completions (streamed or not), /start_profile, /stop_profile.
Not for: anything about tokens (generate.py).
"""

import argparse
import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

import torch
from generate import Engine
from loop import Job, Refused


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine = None

    def log_message(self, *_):
        pass

    def address_string(self):
        return "client"  # a Unix socket has no address

    def answer(self, status, value):
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(value, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, why):
        self.answer(status, {"error": {"message": str(why), "code": status}})

    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, {})
        if self.path == "/v1/models":
            model = {"id": "model", "object": "model", "metadata": self.engine.metadata}
            return self.answer(200, {"object": "list", "data": [model]})
        if self.path == "/metrics":
            return self.answer(200, f"num_requests_waiting {self.engine.jobs.qsize()}\n")
        return self.refuse(404, "no such page")

    def do_POST(self):
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        except ValueError:
            return self.refuse(400, "the body is not JSON")
        if not isinstance(body, dict):
            return self.refuse(400, "the body is not a JSON object")
        if self.path == "/v1/completions":
            return self.complete(body)
        if self.path in ("/start_profile", "/stop_profile"):
            return self.control(Job(self.path[1:], body))
        return self.refuse(404, "no such page")

    def control(self, job):
        self.engine.jobs.put(job)
        failed = job.events.get()
        return self.answer(200, {}) if failed is None else self.refuse(400, failed)

    def complete(self, body):
        try:
            prompt = self.engine.check(body)
        except Refused as error:
            return self.refuse(400, error)
        job = Job("complete", body)
        self.engine.jobs.put(job)
        try:
            return self.stream(job, len(prompt)) if body.get("stream") else self.whole(job, len(prompt))
        except OSError:
            job.gone = True  # the client hung up: the engine stops at the next token
            self.close_connection = True
            return None

    def choices(self, job):
        """Yields one choice per token as it comes. Raises what the engine raised."""
        while (event := job.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def stream(self, job, prompt_tokens):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = 0
        for choice in self.choices(job):
            count += 1
            self.event({"choices": [choice]})
        if (job.body.get("stream_options") or {}).get("include_usage"):
            self.event({"choices": [], "usage": usage(prompt_tokens, count)})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value):
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def whole(self, job, prompt_tokens):
        got = list(self.choices(job))
        ids = [i for choice in got for i in choice["token_ids"]]
        choice = {"index": 0, "text": "".join(c["text"] for c in got), "token_ids": ids, "finish_reason": got[-1]["finish_reason"]}
        self.answer(200, {"object": "text_completion", "choices": [choice], "usage": usage(prompt_tokens, len(ids))})


def usage(prompt, completion):
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True, help="packages of engines that generate.py uses; the sandbox reads them here")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--trace-dir", required=True)
    parser.add_argument("--max-model-len", type=int, default=4096)
    options = parser.parse_args()
    torch.set_num_threads(1)
    Handler.engine = Engine(options.model, options.device, options.max_model_len, options.trace_dir)
    server = Server(options.uds, Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Handler.engine.run()


if __name__ == "__main__":
    main()
