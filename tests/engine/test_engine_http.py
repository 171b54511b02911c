"""The HTTP surface: shapes of responses, errors that name the field, hang-ups, profiling."""

from __future__ import annotations

import gzip
import json
import threading
import time

import pytest
from engine_client import RunningServer

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def test_models_reports_what_the_server_runs_with(server):
    status, answer = server(2).request("GET", "/v1/models")
    metadata = answer["data"][0]["metadata"]
    assert status == 200
    wanted = {
        "engine": "hotloop",
        "dtype": "float32",
        "device": "cpu",
        "tp": 2,
        "attention_backend": "sdpa",
        "all_reduce_backend": "gloo",
        "cuda_graph": False,
        "block_size": 16,
        "max_model_len": 1024,
    }
    assert metadata.items() >= wanted.items()
    assert metadata["num_kv_blocks"] > 0
    assert metadata["model_hash"].startswith("sha256:")
    assert metadata["model"]["num_hidden_layers"] == 4


def test_a_stream_has_one_chunk_a_token_then_usage_then_done(server):
    body = {"prompt": [10, 20, 30], "max_tokens": 5, "stream_options": {"include_usage": True}}
    chunks = server(1).stream("/v1/completions", **GREEDY, **body)
    whole = server(1).complete(**{k: v for k, v in body.items() if k != "stream_options"})["choices"][0]
    assert chunks[0]["prompt_token_ids"] == [10, 20, 30]
    assert [len(c["choices"][0]["token_ids"]) for c in chunks[:-1]] == [1] * 5
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * 4 + ["length"]
    assert [t for c in chunks[:-1] for t in c["choices"][0]["token_ids"]] == whole["token_ids"]
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["text"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def test_a_chat_stream_begins_with_the_role(server):
    chunks = server(1).stream(
        "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, temperature=0
    )
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])


def test_a_stop_string_finishes_with_stop(server):
    messages = [{"role": "user", "content": "Explain lambda in Python."}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 60}
    _, answer = server(1).request("POST", "/v1/chat/completions", body | {"stop": "lambda_expr"})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == "\nLambdas\n*******\n\n   "


def test_a_message_in_text_parts_is_the_text_they_make(server):
    parts = [{"type": "text", "text": "Explain lambda"}, {"type": "text", "text": " in Python."}]
    answers = [
        server(1).request(
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "return_token_ids": True},
        )[1]
        for content in (parts, "Explain lambda in Python.")
    ]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]


def test_logprobs_of_a_chat(server):
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 2}
    _, answer = server(1).request("POST", "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 3})
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0] == {"token": entry["token"], "logprob": entry["logprob"]}


BAD = [
    ({"prompt": "x", "max_tokns": 5}, "max_tokns", "valid fields: "),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", "positive integer"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "positive integer"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", "positive integer"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "positive integer"),
    ({"prompt": "x", "max_completion_tokens": 1.5}, "max_completion_tokens", "positive integer"),
    ({"prompt": "x", "max_tokens": 2000}, "prompt", "maximum length is 1024"),
    ({"prompt": [5] * 1024, "max_tokens": 1}, "prompt", "maximum length is 1024"),
    ({"prompt": "x", "min_tokens": 6, "max_tokens": 5}, "min_tokens", "must not exceed max_tokens"),
    ({"prompt": "x", "temperature": -0.1}, "temperature", "from 0 to 100"),
    ({"prompt": "x", "temperature": float("nan")}, "temperature", "from 0 to 100"),
    ({"prompt": "x", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "x", "top_k": -2}, "top_k", "0 or -1"),
    ({"prompt": "x", "seed": "a"}, "seed", "64-bit integer"),
    ({"prompt": "x", "stop": [""]}, "stop", "non-empty"),
    ({"prompt": "x", "n": 2}, "n", "n must be 1"),
    ({"prompt": "x", "stream": 1}, "stream", "true or false"),
    ({"prompt": "x", "stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "0 to 20"),
    ({"prompt": ""}, "prompt", "non-empty"),
    ({"prompt": []}, "prompt", "non-empty"),
    ({"prompt": [2048]}, "prompt", "0 to 2047"),
    ({"prompt": [1, "a"]}, "prompt", "0 to 2047"),
    ({"prompt": "\ud800"}, "prompt", "not valid Unicode"),
    ({"max_tokens": 4}, "prompt", "non-empty"),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD)
def test_a_bad_field_is_named_with_its_valid_values(body, param, says, server):
    status, answer = server(1).request("POST", "/v1/completions", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert says in answer["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "says"),
    [(b"{", "valid JSON"), (b'{"prompt": "\xff"}', "valid UTF-8"), (b"[1]", "JSON object"), (b"[" * 50_000, "JSON")],
)
def test_a_body_that_is_no_json_object_is_refused(raw, says, server):
    status, answer = server(1).request("POST", "/v1/completions", raw)
    assert status == 400
    assert says in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_bad_chats_are_refused(body, param, server):
    status, answer = server(1).request("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_unknown_models_paths_and_methods(server):
    status, answer = server(1).request("POST", "/v1/completions", {"prompt": "x", "model": "other"})
    assert (status, answer["error"]["param"]) == (404, "model")
    assert server(1).request("GET", "/v2/models")[0] == 404
    assert server(1).request("GET", "/v1/completions")[0] == 405


def test_after_all_that_the_server_still_serves(server, reference):
    output = server(1).tokens_of([[10, 20, 30]], 4)[0]
    assert reference.accepts([10, 20, 30], output)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_pages(stream, server):
    one: RunningServer = server(1)
    before = one.metric("hotloop:kv_blocks_free")
    body = GREEDY | {"prompt": [9] * 100, "max_tokens": 900, "stream": stream}
    connection, _ = one.open_stream("/v1/completions", body) if stream else (None, None)
    if connection is None:
        from engine_client import _UnixConnection

        connection = _UnixConnection(one.socket)
        connection.request("POST", "/v1/completions", json.dumps(body))
    _wait_for(lambda: one.metric("vllm:num_requests_running") == 1)
    connection.close()
    _wait_for(lambda: one.metric("vllm:num_requests_running") == 0)
    assert one.metric("hotloop:kv_blocks_free") == before


def test_profiling_writes_one_trace_a_rank_with_named_steps(server):
    one: RunningServer = server(2)
    assert one.request("POST", "/stop_profile")[0] == 409
    assert one.request("POST", "/start_profile", {"steps": 3})[1]["error"]["param"] == "steps"
    assert one.request("POST", "/start_profile", {"max_steps": 3})[0] == 200
    assert one.request("POST", "/start_profile")[0] == 409
    one.complete(prompt=[5, 6, 7, 8], max_tokens=6)
    status, answer = one.request("POST", "/stop_profile")
    assert status == 200
    assert [name.rpartition("/")[2] for name in answer["traces"]] == [
        f"rank{rank}.0.pt.trace.json.gz" for rank in (0, 1)
    ]
    for rank, path in enumerate(answer["traces"]):
        with gzip.open(path) as handle:
            trace = json.load(handle)
        assert trace["distributedInfo"]["rank"] == rank
        assert trace["engine"]["all_reduce_backend"] == "gloo"
        names = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
        steps = [name for name in names if name.startswith("execute_")]
        assert steps == ["execute_context_1(4)_generation_0(0)"] + ["execute_context_0(0)_generation_1(1)"] * 2
        assert names.count("gloo:all_reduce") == 3 * 9  # the embedding, and twice a layer


def test_metrics_count_tokens(server):
    one = server(1)
    before = one.metric("vllm:generation_tokens_total"), one.metric("vllm:prompt_tokens_total")
    one.complete(prompt=[5, 6, 7], max_tokens=4)
    assert one.metric("vllm:generation_tokens_total") - before[0] == 4
    assert one.metric("vllm:prompt_tokens_total") - before[1] == 3


def test_an_idle_server_uses_no_processor_time(server):
    one: RunningServer = server(2)
    one.complete(prompt=[5, 6, 7], max_tokens=2)
    pids = [one.process.pid, *one.ranks()]
    before = _cpu_ticks(pids)
    time.sleep(0.5)
    assert _cpu_ticks(pids) - before <= 3  # of 50: the HTTP thread's clock


def test_requests_sent_together_are_decoded_together(server):
    one: RunningServer = server(1)
    before = one.metric("hotloop:steps_total")
    threads = [
        threading.Thread(target=one.complete, kwargs={"prompt": [n + 5], "max_tokens": 120}) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.metric("hotloop:steps_total") - before < 400  # one by one it would be 480


def _cpu_ticks(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as handle:  # noqa: PTH123
            fields = handle.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


def _wait_for(condition, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
