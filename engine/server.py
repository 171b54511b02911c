"""The HTTP surface, on a thread beside the step loop: DESIGN's subset of vLLM's, over a Unix socket or TCP.

Not for: what a body may hold (`protocol.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from engine import protocol
from engine.config import EngineConfig
from engine.core import Abort, Add, EngineCore, Profile, Stop
from engine.profiling import ProfileOptions
from engine.protocol import BadRequest, GenerationRequest
from engine.request import Output, Sequence
from engine.scheduler import RequestTooLarge
from engine.tokenizer import TemplateError

_GOODBYE_S = 3  # for clients to take the end of their streams when the server stops


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that passed every check: its sequence, and how its response begins."""

    request: GenerationRequest
    sequence: Sequence
    head: dict[str, Any]
    outputs: asyncio.Queue[Output]


class HttpServer:
    def __init__(self, core: EngineCore, options: EngineConfig) -> None:
        self.core = core
        self.options = options
        self.model_name = options.served_model_name or str(options.model)
        self.created = int(time.time())
        self._ids = itertools.count()
        self._queues: dict[int, asyncio.Queue[Output]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._profiling = False
        self._profile_lock = asyncio.Lock()
        self._server = uvicorn.Server(self._uvicorn_config())
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    # --- life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.core.deliver = self._deliver
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_GOODBYE_S + 1.0)
        if self.options.uds is not None:
            self.options.uds.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except (OSError, SystemExit) as error:  # the address is taken, for one
            self.core.inbox.put(Stop(f"HTTP server: {error or 'could not start'}"))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve()

    def _uvicorn_config(self) -> uvicorn.Config:
        where: dict[str, Any] = {"host": self.options.host, "port": self.options.port}
        if self.options.uds is not None:
            where = {"uds": str(self.options.uds)}
        return uvicorn.Config(
            self._app(),
            **where,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=_GOODBYE_S,
        )

    def _app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/start_profile", self.start_profile, methods=["POST"]),
            Route("/stop_profile", self.stop_profile, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            BadRequest: _bad_request,
            HTTPException: _http_error,
            Exception: _server_error,  # uvicorn logs the traceback
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    # --- plain endpoints --------------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def models(self, _: Request) -> Response:
        card = {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "hotloop",
            "max_model_len": self.core.worker.limits.max_model_len,
            "metadata": self.core.worker.metadata,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(_prometheus(self.core), media_type="text/plain; version=0.0.4")

    async def start_profile(self, http: Request) -> Response:
        body = await http.body()
        options = protocol.parse_profile(protocol.parse_json(body) if body else {})
        if self.options.trace_dir is None:
            raise BadRequest("profiling is off: start the server with --trace-dir")
        async with self._profile_lock:
            if self._profiling:
                raise BadRequest("profiling has been started already", status=409)
            await self._profile(options)
            self._profiling = True
        return JSONResponse({"status": "profiling"})

    async def stop_profile(self, _: Request) -> Response:
        """Answers when every rank has written its trace."""
        async with self._profile_lock:
            if not self._profiling:
                raise BadRequest("profiling has not been started", status=409)
            traces = await self._profile(None)
            self._profiling = False
        return JSONResponse({"status": "written", "traces": traces})

    async def _profile(self, options: ProfileOptions | None) -> list[str]:
        done: Future[list[str]] = Future()
        self.core.inbox.put(Profile(options, done))
        return await asyncio.wrap_future(done)

    # --- generation -------------------------------------------------------------------------------------

    async def completions(self, http: Request) -> Response:
        return await self._generate(http, chat=False)

    async def chat_completions(self, http: Request) -> Response:
        return await self._generate(http, chat=True)

    async def _generate(self, http: Request, *, chat: bool) -> Response:
        accepted = self._accept(await http.body(), chat=chat)
        if accepted.request.stream:
            return StreamingResponse(self._stream(accepted), media_type="text/event-stream")
        return await self._collect(http, accepted)

    def _accept(self, body: bytes, *, chat: bool) -> Accepted:
        """Check everything that can be wrong with a request before the step loop sees it."""
        config = self.core.worker.model_config
        request = protocol.parse_generation(
            protocol.parse_json(body), chat=chat, vocab_size=config.vocab_size
        )
        names = (self.model_name, self.options.model.name)
        if request.model is not None and request.model not in names:
            raise BadRequest(f"no model named {request.model!r}; this server has {names[0]!r}", "model", 404)
        field = "messages" if chat else "prompt"
        prompt_ids = self._prompt_ids(request)
        params = request.params
        if chat and not request.max_tokens_given:  # as long as it can get
            params = replace(
                params, max_tokens=max(1, self.core.worker.limits.max_model_len - len(prompt_ids))
            )
        try:
            self.core.scheduler.check(len(prompt_ids), params.max_tokens)
        except RequestTooLarge as error:
            raise BadRequest(str(error), field) from None
        sequence = Sequence(next(self._ids), prompt_ids, params)
        prefix = "chatcmpl" if chat else "cmpl"
        head = protocol.head(request, f"{prefix}-{sequence.id}", int(time.time()), self.model_name)
        return Accepted(request, sequence, head, asyncio.Queue())

    def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        field = "messages" if request.chat else "prompt"
        tokenizer = self.core.tokenizer
        if tokenizer is None:
            raise BadRequest("this model directory has no tokenizer.json; send token ids", field)
        try:
            if request.messages is not None:
                return tokenizer.render_chat(request.messages)
            return tokenizer.encode(request.prompt or "")
        except TemplateError as error:
            raise BadRequest(str(error), field) from None

    async def _stream(self, accepted: Accepted) -> AsyncIterator[str]:
        """One chunk a step, then (when asked for) one with the usage, then [DONE]."""
        request, sequence = accepted.request, accepted.sequence
        name_token = self._token_namer(request)
        first = True
        async for output in self._outputs(accepted):
            choice = protocol.choice(request, output, name_token, first=first)
            chunk = accepted.head | {"choices": [choice]}
            if first and request.return_token_ids:
                chunk["prompt_token_ids"] = sequence.prompt_ids
            first = False
            yield _event(chunk)
        if request.include_usage:
            usage = protocol.usage(len(sequence.prompt_ids), len(sequence.output_ids))
            yield _event(accepted.head | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    async def _collect(self, http: Request, accepted: Accepted) -> Response:
        """The whole response in one body; given up when the client hangs up."""
        work = asyncio.ensure_future(self._gather(accepted))
        gone = asyncio.ensure_future(_disconnected(http))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, gone):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if work.cancelled():
            return Response(status_code=499)
        request, sequence = accepted.request, accepted.sequence
        body = accepted.head | {
            "choices": [protocol.choice(request, work.result(), self._token_namer(request))],
            "usage": protocol.usage(len(sequence.prompt_ids), len(sequence.output_ids)),
        }
        if request.return_token_ids:
            body["prompt_token_ids"] = sequence.prompt_ids
        return JSONResponse(body)

    async def _gather(self, accepted: Accepted) -> Output:
        parts = [output async for output in self._outputs(accepted)]
        logprobs = None
        if accepted.request.params.logprobs is not None:
            logprobs = [entry for part in parts for entry in part.logprobs or ()]
        return Output(
            accepted.sequence.id,
            [token for part in parts for token in part.token_ids],
            "".join(part.text for part in parts),
            parts[-1].finish_reason,
            logprobs,
        )

    async def _outputs(self, accepted: Accepted) -> AsyncIterator[Output]:
        """Submit the request; its outputs until it ends. Left early (client gone), the request is aborted."""
        finished = False
        self._queues[accepted.sequence.id] = accepted.outputs
        self.core.inbox.put(Add(accepted.sequence))
        try:
            while not finished:
                output = await accepted.outputs.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._queues[accepted.sequence.id]
            if not finished:
                self.core.inbox.put(Abort(accepted.sequence.id))

    def _deliver(self, outputs: list[Output]) -> None:
        """Called by the step loop: one hand-over a step, whatever the batch."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._distribute, outputs)

    def _distribute(self, outputs: list[Output]) -> None:
        for output in outputs:
            waiting = self._queues.get(output.seq_id)
            if waiting is not None:
                waiting.put_nowait(output)

    def _token_namer(self, request: GenerationRequest) -> Callable[[int], str]:
        tokenizer = self.core.tokenizer
        if request.tokens_as_ids or tokenizer is None:
            return lambda token: f"token_id:{token}"
        return tokenizer.token_text


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _bad_request(_: Request, error: BadRequest) -> Response:
    return JSONResponse(protocol.error_body(str(error), error.param, error.status), error.status)


async def _http_error(_: Request, error: HTTPException) -> Response:
    return JSONResponse(
        protocol.error_body(error.detail, None, error.status_code), error.status_code, headers=error.headers
    )


async def _server_error(_: Request, error: Exception) -> Response:
    return JSONResponse(protocol.error_body(f"{type(error).__name__}: {error}", None, 500), 500)


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


def _prometheus(core: EngineCore) -> str:
    """vLLM's names, so that one reader serves both."""
    scheduler, counters = core.scheduler, core.counters
    blocks = scheduler.blocks
    used = 1 - blocks.num_free / blocks.num_blocks
    rows: list[tuple[str, str, float]] = [
        ("vllm:num_requests_running", "gauge", len(scheduler.running)),
        ("vllm:num_requests_waiting", "gauge", len(scheduler.waiting)),
        ("vllm:kv_cache_usage_perc", "gauge", used),
        ("vllm:num_preemptions_total", "counter", scheduler.preemptions),
        ("vllm:prompt_tokens_total", "counter", counters.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", counters.generation_tokens),
        ("hotloop:steps_total", "counter", counters.steps),
        ("hotloop:kv_blocks", "gauge", blocks.num_blocks),
        ("hotloop:kv_blocks_free", "gauge", blocks.num_free),
    ]
    lines = []
    for name, kind, value in rows:
        lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
    lines.append("# TYPE vllm:request_success_total counter")
    for reason, count in counters.finished.items():
        lines.append(f'vllm:request_success_total{{finished_reason="{reason}"}} {count}')
    return "\n".join(lines) + "\n"
