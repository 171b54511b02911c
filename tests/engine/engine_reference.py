"""transformers' Qwen3, by which the engine's tokens and logits are judged."""

from __future__ import annotations

from pathlib import Path

import torch


class Reference:
    """transformers' Qwen3. Judges tokens teacher-forced: by induction the same as free-running."""

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        self.model = model.to(torch.device(device))  # pyright: ignore[reportArgumentType]

    def logits(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """[len(output), vocab]: the logits from which each token of `output` is chosen."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + output], device=self.model.device)).logits[0]
        return logits[len(prompt) - 1 : -1]

    def accepts(self, prompt: list[int], output: list[int]) -> bool:
        """Whether greedy decoding of `prompt` gives `output`."""
        return self.logits(prompt, output).argmax(-1).tolist() == output
