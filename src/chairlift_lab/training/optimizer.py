"""The optimizer of a draft head, and the files from which an interrupted training resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from chairlift_lab.training.trainable_head import TrainableHead

WEIGHT_DECAY = 0.01
MAX_GRADIENT_NORM = 1.0


class HeadOptimizer:
    """Muon for the matrices, which needs fewer steps than Adam; Adam for the rest."""

    def __init__(self, head: nn.Module, learning_rate: float) -> None:
        self._head = head
        self._learning_rate = learning_rate
        parameters = list(head.parameters())
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        others = [parameter for parameter in parameters if parameter.ndim != 2]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            # Scale steps like Adam's, so that one learning rate fits both.
            torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, loss: Tensor, done: float) -> None:
        """`done`: the share of the training that is done, from 0 to 1."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate * schedule(done)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state, for a checkpoint."""
        kept = ((name, state[parameter]) for name, parameter, state in self._states() if parameter in state)
        return {f"{name}/{kind}": torch.as_tensor(value) for name, some in kept for kind, value in some.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter, state in self._states():
            own = {path.partition("/")[2]: value for path, value in tensors.items() if path.startswith(f"{name}/")}
            # Adam keeps its step count on the CPU.
            state[parameter] = {kind: value if kind == "step" else value.to(parameter) for kind, value in own.items()}

    def _states(self) -> Iterator[tuple[str, nn.Parameter, dict[nn.Parameter, dict[str, Tensor]]]]:
        for name, parameter in self._head.named_parameters():
            yield name, parameter, self._optimizers[0 if parameter.ndim == 2 else 1].state  # type: ignore[misc]


def schedule(done: float) -> float:
    """The factor of the learning rate: a short warm-up, then a cosine down to 0.01."""
    return min(1.0, done / 0.05 + 0.01) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


class TrainingProgress:
    """`progress.json`, the texts, and checkpoints of the weights and the optimizer."""

    def __init__(self, folder: Path, fingerprint: str, steps_done: int, resumed: bool) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.steps_done = steps_done
        self.resumed = resumed

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> TrainingProgress:
        file = folder / "progress.json"
        saved = json.loads(file.read_text()) if file.exists() else {}
        same = saved.get("settings") == fingerprint
        if not same:  # files of other settings must not be resumed from
            for name in ("texts.safetensors", "checkpoint.safetensors"):
                (folder / name).unlink(missing_ok=True)
        progress = cls(folder, fingerprint, saved.get("steps_done", 0) if same else 0, same)
        progress._write()
        return progress

    def _write(self) -> None:
        progress = {"settings": self.fingerprint, "steps_done": self.steps_done}
        (self.folder / "progress.json").write_text(json.dumps(progress))

    def restore(self, head: TrainableHead, optimizer: HeadOptimizer) -> None:
        if not self.steps_done:
            return
        saved = load_file(self.folder / "checkpoint.safetensors")
        for name, parameter in head.named_parameters():
            parameter.data.copy_(saved[name])
        optimizer.restore(saved)

    def save(self, head: TrainableHead, optimizer: HeadOptimizer, steps_done: int) -> None:
        tensors = {name: parameter.data for name, parameter in head.named_parameters()} | optimizer.tensors()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.folder / "checkpoint.new")
        (self.folder / "checkpoint.new").replace(self.folder / "checkpoint.safetensors")
        self.steps_done = steps_done
        self._write()
