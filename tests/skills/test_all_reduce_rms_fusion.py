"""Sum between ranks, residual and norm in one kernel: the patch, the kernel by Triton's interpreter, and the engine's tokens."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spawned_ranks import gathered

from optimizer.confine.launch import launch
from optimizer.gates import policy
from optimizer.patching import changed_lines
from optimizer.proposers import skillbook
from optimizer.proposers.base import MAX_LINES
from optimizer.target import load_target
from optimizer.traffic.client import Request
from optimizer.types import LaunchSpec

NAME = "all-reduce-rms-fusion"
ROWS, SIZE = (1, 3, 1, 2), 192  # of one call after another: other programs take part in each; a row is no power of two


@pytest.fixture(scope="module")
def before(engine_sources, act) -> dict[str, str]:
    return act(engine_sources, "fused-kernels", "custom-all-reduce", device="cuda", tp=2)


def test_the_patch_is_small_and_passes_the_source_check(before, act, skills) -> None:
    after = act(before, NAME, device="cuda", tp=2)
    changed = {f: text for f, text in after.items() if before.get(f) != text}
    assert sorted(changed) == ["engine/fused_norm.py", "engine/model.py"] and changed_lines(before, changed) <= MAX_LINES
    assert policy.new_findings({f: before[f] for f in changed}, changed) == []
    assert changed["engine/model.py"].count("return out  # this rank's part") == 2
    again = skillbook.run(skills[NAME], after, {"bound_us": 1.0, "device": "cuda"})
    assert again == "norms sum over the ranks already"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("return self.tp.all_reduce(out)", "return self.tp.all_reduce(out) * 2", "does not end in a sum"),
        ("self.mlp = MLP(config, tp)", "self.mlp = MLP(config, tp)\n        self.other = MLP(config, tp)", "does not end in a sum"),
        ("return hidden, self.mlp(normed)", "return hidden, 2 * self.mlp(normed)", "no layer whose two branches"),
        ("delta = self.self_attn(", "delta = 2 * self.self_attn(", "no layer whose two branches"),
    ],
)
def test_a_branch_that_somebody_else_reads_is_left_alone(before, skills, old, new, why) -> None:
    assert old in before["engine/model.py"]
    sources = before | {"engine/model.py": before["engine/model.py"].replace(old, new)}
    assert why in str(skillbook.run(skills[NAME], sources, {"bound_us": 1.0, "device": "cuda"}))


def test_rows_may_be_picked_between_the_branches(before, act) -> None:
    text = act(before, "last-layer-rows", NAME, device="cuda")["engine/model.py"]
    assert "delta, hidden = delta[rows], hidden[rows]" in text and text.count("return out  # this rank's part") == 2


def test_other_chains_do_not_borrow_the_time_of_this_one(engine_sources, skills) -> None:
    finding = {"id": "unfused-chains:all-reduce-and-residual-add-and-rmsnorm", "bound_us": 170.0, "device": "cuda"}
    assert "not among its chains" in str(skillbook.run(skills["fused-kernels"], engine_sources, finding))


def _rows(rank: int, call: int) -> torch.Tensor:
    return torch.randn(ROWS[call], SIZE, generator=torch.Generator().manual_seed(100 * call + rank)).bfloat16()


def _weight() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(7)).bfloat16()


def _rank(rank: int, inboxes: torch.Tensor, tree: Path, results: Any) -> None:
    sys.path.insert(0, str(tree))
    from engine import fused_norm, symm_collectives  # type: ignore[attr-defined]

    turns = torch.zeros(fused_norm.MOST_ROWS, dtype=torch.int32)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64)
    room = SimpleNamespace(rank=rank, size=len(inboxes), inbox=inboxes[rank], inboxes=addresses, turns=turns, ahead=False)
    fused_norm._rooms.append(room)
    torch.distributed.is_initialized = lambda: True
    torch.Tensor.is_cuda = True  # type: ignore[assignment]
    assert inboxes[0].numel() == 2 * len(inboxes) * symm_collectives.MAX_BYTES // 4
    found = []
    for call in range(len(ROWS)):
        added, normed = fused_norm.all_reduce_add_rms_norm(_rows(99, call), _rows(rank, call), _weight(), 1e-6)
        found.append((added.float().numpy(), normed.float().numpy()))
    results.put((rank, found))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("interpreted")
def test_every_rank_gets_the_sum_and_its_norm(size, before, act, tmp_path) -> None:
    for file, text in act(before, NAME, device="cuda").items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        small = "MAX_BYTES = 16 * 512" if file.endswith("symm_collectives.py") else ""
        (tmp_path / file).write_text(text.replace("MAX_BYTES = 1024 * 512", small) if small else text, "utf-8")
    found = gathered(_rank, size, 16 * 512 // 4, tmp_path)
    for call in range(len(ROWS)):
        added = _rows(99, call).float() + sum(_rows(rank, call).float() for rank in range(size))
        normed = added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + 1e-6) * _weight().float()
        for rank in range(size):
            for got, wanted in zip(found[rank][call], (added, normed), strict=True):
                torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
            assert all((a == b).all() for a, b in zip(found[rank][call], found[0][call], strict=True)), "every rank gets the same bits"


def test_the_engine_gives_the_same_tokens_at_two_ranks(engine_sources, before, act, repo, tmp_path) -> None:
    """On a CPU the sums take the library; what is tested is that each is still made once, before it is read."""
    found = {}
    for name, sources in (("plain", engine_sources), ("fused", act(before, NAME, device="cuda"))):
        shutil.copytree(repo / "engine", tmp_path / name / "engine")
        for file, text in sources.items():
            (tmp_path / name / file).write_text(text, "utf-8")
        target = load_target(tmp_path / name / "engine")
        spec = LaunchSpec(tree=tmp_path / name, target=target, python=Path(sys.executable), model_dir=repo / "engine/tiny_qwen3", tp=2, label=name)
        prompts = [[(7 * n + length) % 900 + 3 for n in range(length)] for length in (5, 30, 17)]
        with launch(spec) as server:
            found[name] = [s.token_ids for s in server.client.complete([Request(p, 12, ignore_eos=True) for p in prompts], 60.0)]
    assert found["fused"] == found["plain"] and all(len(ids) == 12 for ids in found["plain"])
