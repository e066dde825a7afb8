"""An executor without a model: every request gets its own prompt back, token by token."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from chairlift import SamplingParams
from chairlift.core.budgets.base import FixedBudget
from chairlift.core.events import TextProduced
from chairlift.core.executor import Executor, FinishedStep
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.plan import StepPlan, StepResult
from chairlift.core.policies.base import ContinuousPolicy
from chairlift.core.request import Request
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.engine import Engine
from chairlift.text.tokenizer import Tokenizer


class EchoExecutor(Executor):
    """Needs no tensors: a plan's chunks carry their requests, and those know their tokens."""

    def launch(self, plan: StepPlan) -> FinishedStep:
        tokens = [next_token(chunk.request) for chunk in plan.chunks if chunk.samples]
        return FinishedStep(StepResult(plan, tokens, logprobs=[None] * len(tokens)))


def next_token(request: Request) -> int:
    return request.tokens[request.num_output % request.num_prompt]


def make_engine(text: str) -> Engine:
    """A real engine around it: 64 KV blocks of 4 tokens, at most 8 requests and 16 tokens in a step."""
    backend = Backend(WordLevel({word: index for index, word in enumerate(["?", *text.split()])}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    scheduler = Scheduler(KVCache(64, block_size=4), FixedBudget.of(16), ContinuousPolicy(), max_batch_requests=8)
    vocab_size = backend.get_vocab_size()
    return Engine(scheduler, EchoExecutor(), Tokenizer(backend), vocab_size=vocab_size, max_model_len=100)


if __name__ == "__main__":
    text = "a chairlift never stops"
    engine = make_engine(text)
    engine.submit(engine.tokenizer.encode(text), SamplingParams(max_tokens=8))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TextProduced):
                print(event.text, end="", flush=True)
