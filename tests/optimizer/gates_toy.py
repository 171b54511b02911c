"""A toy server of the standard library: what launch, client and sandbox tests start. Modes by its first argument."""

from __future__ import annotations

import sys
from pathlib import Path

from optimizer.types import LaunchSpec, Target

SERVER = r'''
import http.server, json, os, socketserver, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
mode = args.get("--mode", "good")
if mode == "exit":
    print("no such model", flush=True)
    sys.exit(3)
if mode == "deaf":
    time.sleep(60)
if mode == "daemon" and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass
    def address_string(self): return ""
    def send(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/v1/models":
            self.send({"data": [{"id": "toy", "metadata": {"tp": 1, "mode": mode}}]})
        else:
            self.send({})
    def chunk(self, text):
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        n = body["max_tokens"]
        for i in range(n):
            choice = {"index": 0, "text": f"t{i} ", "finish_reason": "length" if i == n - 1 else None}
            if mode != "text_only":
                choice["token_ids"] = [(sum(body["prompt"]) + i) % 1000]
            if mode == "slow":
                time.sleep(0.05)
            self.chunk("data: " + json.dumps({"choices": [choice]}) + "\n\n")
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}
        self.chunk("data: " + json.dumps({"choices": [], "usage": usage}) + "\n\ndata: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

print("env", sorted(os.environ), flush=True)
Server(args["--uds"], Handler).serve_forever()
'''


def toy(folder: Path, mode: str = "good", source: str = SERVER, sandbox: str = "auto", timeout_s: float = 15.0) -> LaunchSpec:
    """A launch specification of the toy in `folder`."""
    package = folder / "toy"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "serve.py").write_text(source)
    (folder / "weights").mkdir(exist_ok=True)
    serve = ("{python}", "-I", "-B", "{launcher}", "toy.serve", "--uds", "{socket}", "--mode", mode)
    target = Target(folder, package, "toy", serve, ("toy/**",), (), ("cpu",), (1,), {"cpu": "float32"}, timeout_s)
    return LaunchSpec(folder, target, Path(sys.executable), folder / "weights", 1, sandbox=sandbox)
