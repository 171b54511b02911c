"""The client keeps the clock, parses strictly, and turns every oddity into an error on the stream."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from optimizer.traffic import wire
from optimizer.traffic.client import Client, ClientError, Request


def event(ids=(1,), text="a", reason=None, **more) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": list(ids), "finish_reason": reason} | more
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*events: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"


def parse(data: bytes) -> wire.Completion:
    return wire.completion([data], [5])


def test_a_good_stream_gives_tokens_text_reason_and_usage():
    got = parse(chunked(event([7]), event([8], "b", "length"), USAGE, DONE))
    assert (got.token_ids, got.text, got.finish_reason, got.error) == ((7, 8), "ab", "length", None)
    assert got.usage == {"prompt_tokens": 2, "completion_tokens": 2} and got.arrivals_ns == (5, 5)


def test_a_token_arrives_with_the_piece_that_completes_its_event():
    data = chunked(event([1]), event([2, 3]), event([4], reason="length"), DONE)
    first = data.index(b'"token_ids": [1]')  # the first event is complete only with the second piece
    second = data.index(b'"token_ids": [4]')
    pieces = [data[:first], data[first:second], data[second:]]
    got = wire.completion(pieces, [10, 20, 30])
    assert got.arrivals_ns == (20, 20, 20, 30) and got.error is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (chunked(event([1], reason="length"), event([2]), DONE), "after the finish reason"),
        (chunked(event([1], reason="length")), "without [DONE]"),
        (chunked(event([1]), DONE), "no finish reason"),
        (chunked(event([1], reason="length"), DONE, event([2])), "after [DONE]"),
        (chunked(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n', DONE), "return_token_ids"),
        (chunked(event(["x"])), "list of token ids"),
        (chunked(event([-1])), "list of token ids"),
        (chunked(event([True])), "list of token ids"),
        (chunked(event([10**30])), "list of token ids"),
        (chunked(b"data: " + b"[" * 200_000 + b"\n\n"), "not JSON"),
        (HEAD + b"5\r\nabcde\r\n-6\r\n" + b"x" * 99, "bad chunk size"),  # a size that leads back: no end otherwise
        (HEAD + b"1_0\r\n", "bad chunk size"),
        ("HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n".encode("latin-1"), "bad Content-Length"),
        ("HTTP/1.1 2\xb20 OK\r\n\r\n".encode("latin-1"), "status line"),
        (chunked(b"data: {nonsense\n\n"), "not JSON"),
        (chunked(b"event: x\n\n"), "not a data event"),
        (chunked(b'data: {"error": {"message": "boom"}}\n\n'), "boom"),
        (chunked(event([1], reason="length"), DONE) + b"x", "after the last chunk"),
        (HEAD + b"zz\r\nabc\r\n", "chunk size"),
        (HEAD + b"3\r\nabcd\r\n", "where its size says"),
        (chunked(event([1]))[:-40], "ended early"),
        (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "header line"),
        (b"SSH-2.0\r\n\r\n", "not an HTTP"),
        (b"HTTP/1.1 20", "inside the HTTP head"),
        (b"", "no answer"),
    ],
)
def test_whatever_breaks_the_protocol_is_named(data, words):
    assert words in (parse(data).error or "")


def test_an_http_error_keeps_its_status_and_words():
    got = parse(b'HTTP/1.1 400 Bad\r\nContent-Length: 9\r\n\r\n{"no": 1}')
    assert got.status == 400 and '{"no": 1}' in (got.error or "")


class Served:
    """A Unix socket whose connections each get `answer(request bytes, connection)`."""

    def __init__(self, folder: Path, answer) -> None:
        self.path = folder / "s.sock"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self._socket.listen(64)
        self._answer = answer
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                piece = connection.recv(65536)
                if not piece:
                    return
                data += piece
            try:
                self._answer(data, connection)
            except OSError:
                return

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def serve(tmp_path):
    made = []

    def start(answer) -> Client:
        made.append(Served(tmp_path, answer))
        client = Client(socket_path=made[-1].path)
        client._model = "m"  # these servers answer everything alike: do not ask them for their models
        return client

    yield start
    for served in made:
        served.close()


def test_streams_end_at_the_last_chunk_although_the_connection_stays_open(serve):
    def answer(_, connection):
        connection.sendall(chunked(event([1], reason="length"), USAGE, DONE))
        time.sleep(5)

    began = time.monotonic()
    got = serve(answer).complete([Request((1, 2), 1)], 4.0)[0]
    assert got.error is None and got.token_ids == (1,) and time.monotonic() - began < 2


def test_no_bytes_of_a_server_raise():
    """Every way of breaking an answer ends as an error, whatever is exchanged, cut or doubled in it."""
    rng = random.Random(5)
    whole = chunked(event([7]), event([8], "b", "length", logprobs={"top_logprobs": [{"token_id:1": -1.0}]}), USAGE, DONE)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at, n = rng.randrange(len(data)), rng.randint(0, 9)
            piece = rng.choice([b"", bytes(rng.randrange(256) for _ in range(3)), b"-1", b"1e999", b'"', bytes(data[at : at + 40])])
            data[at : at + n] = piece
        got = parse(bytes(data))
        assert got.error is None or got.error.isprintable() or "\n" in got.error


def test_words_of_a_server_are_shown_as_plain_text():
    answer = b"HTTP/1.1 500 no\r\nContent-Length: 12\r\n\r\n\x1b[2Jaccepted"
    assert parse(answer).error == "HTTP 500: \ufffd[2Jaccepted"
    assert wire.plain("x" * 9, 4) == "xxxx ..."


def test_a_full_backlog_is_waited_for(tmp_path):
    """A Unix socket whose queue is full refuses at once: connections come as soon as the server takes some."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        client = Client(socket_path=tmp_path / "s")
        taken: list[socket.socket] = []

        def take() -> None:
            time.sleep(0.1)
            taken.extend(listener.accept()[0] for _ in range(4))

        thread = threading.Thread(target=take)
        thread.start()
        made = [client._connect(5.0) for _ in range(4)]
        thread.join()
        for sock in (*made, *taken):
            sock.close()
    assert len(made) == len(taken) == 4


def test_a_deadline_ends_a_stream_that_does_not(serve):
    def answer(_, connection):
        connection.sendall(HEAD)
        time.sleep(3)

    got = serve(answer).complete([Request((1,), 4)], 0.3)[0]
    assert "not finished within" in (got.error or "")


def test_an_endless_answer_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(wire, "stream_limit", lambda tokens: 100_000)

    def answer(_, connection):
        connection.sendall(HEAD)
        while True:
            connection.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")

    assert "answer over" in (serve(answer).complete([Request((1,), 4)], 5.0)[0].error or "")


def test_requests_are_sent_at_their_delay_and_aborted_ones_hang_up(serve):
    def answer(_, connection):
        connection.sendall(HEAD)
        for i in range(50):
            data = event([i])
            connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))
            time.sleep(0.01)

    late, leaving = serve(answer).complete([Request((1,), 4, delay_s=0.2), Request((2,), 64, abort_after=3)], 0.6)
    assert late.sent_ns - leaving.sent_ns > 0.15e9
    assert leaving.error == "aborted by the client" and 3 <= len(leaving.token_ids) < 20


def test_a_socket_that_was_replaced_by_a_link_is_not_followed(serve, tmp_path):
    client = serve(lambda _, connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
    assert client.health()
    link = tmp_path / "link.sock"
    link.symlink_to(tmp_path / "s.sock")
    assert not Client(socket_path=link).health()
    with pytest.raises(ClientError, match="cannot connect"):
        Client(socket_path=link).complete([Request((1,), 1)], 1.0)


def test_gates_and_benchmark_send_the_same_fields():
    greedy, sampled = Request((1, 2), 3), Request((1, 2), 3, temperature=1.0, seed=5)
    fields = [set(json.loads(r.body("m"))) for r in (greedy, sampled)]
    assert fields[1] - fields[0] == {"seed"} and "return_token_ids" in fields[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[]", "protocol"),
        (b'{"choices": []}', "protocol"),
        (b'{"choices": [{"message": {}}]}', "protocol"),
        (b'{"choices": [{"text": "a", "token_ids": ["x"], "finish_reason": "length"}]}', "list of token ids"),
        (b'{"choices": [{"text": "a", "token_ids": [1]}]}', "no finish reason"),
        (b"[" * 100_000, "protocol"),
    ],
)
def test_a_broken_answer_in_one_piece_is_an_error(body, words):
    got, prompt = wire.whole(wire.Answer(200, {}, body), 5)
    assert words in (got.error or "") and prompt == ()


def test_a_chat_in_one_piece_gives_tokens_text_and_the_prompt_as_the_server_has_it():
    choice = {"index": 0, "message": {"role": "assistant", "content": "ab"}, "token_ids": [7, 8], "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    body = json.dumps({"choices": [choice], "usage": usage, "prompt_token_ids": [1, 5, 6]}).encode()
    got, prompt = wire.whole(wire.Answer(200, {}, body), 5)
    assert (got.token_ids, got.text, got.finish_reason, got.usage, got.error) == ((7, 8), "ab", "length", usage, None)
    assert prompt == (1, 5, 6) and got.arrivals_ns == (5, 5)
