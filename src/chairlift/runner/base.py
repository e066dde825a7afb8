"""What the runners of a CPU and a GPU have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.recurrent import StateStorage
from chairlift.attention.storage import KVStorage
from chairlift.core.executor import Executor
from chairlift.core.request import Request
from chairlift.models.base import CausalLM
from chairlift.runner.host_blocks import HostBlocks
from chairlift.runner.prompt_reader import PromptReader
from chairlift.sampling.sampler import Sampler
from chairlift.speculation.draft_network import ModelProposer
from chairlift.structured.output import StructuredOutput


class ModelRunner(Executor):
    """An executor that runs a model: plan -> tensors -> logits -> tokens.

    What lasts longer than a step (the KV tensors, each request's sampling state) is kept here; what belongs to one
    step is built from its plan.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        storage: KVStorage,
        *,
        structured: StructuredOutput | None = None,
        drafter: ModelProposer | None = None,
        host_blocks: HostBlocks | None = None,
        states: StateStorage | None = None,
    ) -> None:
        """`drafter`: a proposer whose network reads what the model computes. `host_blocks`: where preempted requests
        leave their KV blocks. `states`: of recurrent layers, if the model has any."""
        self.model = model
        self.attention = attention
        self.storage = storage
        self.structured = structured
        self.drafter = drafter
        self.host_blocks = host_blocks
        self.states = states
        self.one_by_one = bool(getattr(model, "batch_invariant", False))  # whether rows are sampled one by one
        self.sampler = Sampler(model.vocab_size, model.device, one_by_one=self.one_by_one)
        self.prompt_reader = PromptReader(model, one_by_one=self.one_by_one)

    @abstractmethod
    def warm_up(self) -> None:
        """Compile and load what the first requests would wait for."""

    def capture_decodes(self, sizes: Sequence[int] | None = None) -> None:
        """Capture decode steps of these batch sizes, or of all, where steps are captured; else do nothing."""

    def capture_missed(self) -> None:
        """Capture the steps that occurred and that a server would capture when it is idle, where steps are captured."""

    def _warm_up_drafter(self, request: Request) -> None:
        """Compile the draft network's part, with a request that the model has just computed."""
        if self.drafter is not None:
            self.drafter.warm_up(request)
            self.drafter.forget(request.id)

    def forget(self, request_id: str) -> None:
        self.sampler.forget(request_id)
        self.prompt_reader.forget(request_id)
