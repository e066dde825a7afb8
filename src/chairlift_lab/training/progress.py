"""The files from which an interrupted training resumes."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from chairlift_lab.training.optimizer import HeadOptimizer
from chairlift_lab.training.trainable_head import TrainableHead


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
        found = json.loads(file.read_text()) if file.exists() else {}
        same = found.get("settings") == fingerprint
        if not same:  # files of other settings must not be resumed from
            for name in ("texts.safetensors", "checkpoint.safetensors"):
                (folder / name).unlink(missing_ok=True)
        progress = cls(folder, fingerprint, found.get("steps_done", 0) if same else 0, same)
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
