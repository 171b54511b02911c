"""Start changed sources briefly on a CPU-sized request and say what went wrong: for proposers, before they submit.

In the sandbox, at one rank, with a prompt that is no secret; nothing is timed and no token is judged. Not for: the
gates (gates/), which alone decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from optimizer.run import Run

PROMPT = tuple(range(3, 20))
SHAPES = ((1, 5), (3, 4))  # (requests at once, new tokens)


def try_out(run: Run, sources: Mapping[str, str]) -> str | None:
    """None when the engine starts and answers, else one line. Never raises for a faulty candidate."""
    from optimizer.confine.launch import LaunchError, launch
    from optimizer.traffic.client import ClientError, Request

    base = run.repo.sources(run.repo.incumbent(), run.target.editable)
    changed: dict[str, str | None] = {f: t for f, t in sources.items() if base.get(f) != t}
    commit = run.repo.commit_sources(run.repo.incumbent(), changed, "try out", "", {})
    name = f"tryout-{commit[:12]}"
    spec = replace(run.spec(commit, name, "tryout", tp=min(run.target.tp)), label="tryout")
    try:
        with launch(spec) as server:
            for at_once, tokens in SHAPES:
                requests = [Request(PROMPT + (n,) * n, tokens) for n in range(at_once)]
                for stream in server.client.complete(requests, deadline_s=60.0):
                    if stream.error:
                        return f"{stream.error}: {' | '.join(server.log_tail(4).splitlines())}"
                    if len(stream.token_ids) != tokens:
                        return f"{len(stream.token_ids)} tokens instead of {tokens} for {at_once} request(s) at once"
    except (LaunchError, ClientError, OSError) as error:
        return str(error)[-1500:]
    finally:
        run.repo.drop_tree(name)
    return None
