"""Predictions in Ray Data: a class for `map_batches` that adds a model's answers to the rows of a dataset.

dataset = ray.data.read_parquet("questions.parquet")
answered = dataset.map_batches(
    BatchPredictor,
    fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B", "task": "chat", "sampling": {"max_tokens": 128}},
    compute=ray.data.ActorPoolStrategy(size=2),
    num_gpus=1,
    batch_size=512,
)
answered.write_parquet("answers")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from chairlift.core.sampling.params import SamplingParams
    from chairlift.engine_keywords import EngineKeywords
    from chairlift.outputs import RequestOutput


TASKS = ("generate", "chat", "embed")
ANSWER_COLUMNS: Mapping[str, Callable[[RequestOutput], Any]] = {
    "generated_text": lambda result: result.outputs[0].text,
    "finish_reason": lambda result: result.outputs[0].finish_reason,
    "num_prompt_tokens": lambda result: len(result.prompt_token_ids),
    "num_output_tokens": lambda result: len(result.outputs[0].token_ids),
}
EMBEDDING_COLUMNS: Mapping[str, Callable[[RequestOutput], Any]] = {"embedding": lambda result: result.require_vector()}


class BatchPredictor:
    """Holds an engine, and answers a column of prompts in each batch of rows.

    `task` is what the column has: texts or token ids to continue (generate), messages or a user's text to answer
    (chat), or texts to embed (embed). `sampling` are parameters of `SamplingParams`, where what is left out is what the
    model recommends; other options are those of `LLM`.

    Added are the columns `generated_text`, `finish_reason`, `num_prompt_tokens` and `num_output_tokens`, or
    `embedding`, and `error`, which is null except in rows that cannot be answered, such as too long prompts.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        task: str = "generate",
        column: str = "prompt",
        sampling: Mapping[str, Any] | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        from chairlift.core.sampling.params import SamplingParams
        from chairlift.llm import LLM, embedding_params

        if task not in TASKS:
            raise InvalidParameter("task", f"must be one of {', '.join(TASKS)}, got {task!r:.40}")
        if task == "embed" and sampling:
            raise InvalidParameter("sampling", "is not for embeddings")
        params = SamplingParams(**sampling or {})
        if params.n != 1:
            raise InvalidParameter("n", f"must be 1, got {params.n}: a row has one answer")
        self._llm = LLM(model, progress=False, **options)
        self._column = column
        self._is_chat = task == "chat"
        self._added = ANSWER_COLUMNS
        self._params = SamplingParams.with_defaults(self._llm.default_sampling, **sampling or {})
        if task == "embed":
            self._llm.embedding.require()
            self._added = EMBEDDING_COLUMNS
            self._params = embedding_params(self._llm.embedding.kind, None, None, normalize=True)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows with the answers."""
        if not isinstance(batch, Mapping):
            raise InvalidParameter("batch_format", f"must be numpy, but batches are of type {type(batch).__name__}")
        if self._column not in batch:
            raise InvalidParameter("column", f"{self._column!r} is not among the columns {', '.join(batch)}")
        prompts: list[dict[str, Any]] = []
        params: list[SamplingParams] = []
        problems: list[str | None] = []
        for value in batch[self._column]:
            try:
                prompt, own_params = self._prepare(_plain(value))
            except InvalidParameter as error:
                problems.append(str(error))
            else:
                problems.append(None)
                prompts.append(prompt)
                params.append(own_params)
        results = iter(self._llm.generate(prompts, params, use_tqdm=False) if prompts else ())
        answers = [next(results) if problem is None else None for problem in problems]
        added = {
            name: [None if answer is None else read(answer) for answer in answers] for name, read in self._added.items()
        }
        return {**batch, **added, "error": problems}

    def _prepare(self, value: Any) -> tuple[dict[str, Any], SamplingParams]:
        """The prompt of a row, as tokens, with its parameters; raises if the engine cannot answer it."""
        from chairlift.outputs import PromptInput

        engine, tokenizer, params = self._llm.engine, self._llm.get_tokenizer(), self._params
        if self._is_chat:
            messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
            format_ = self._llm.chat_format
            prompt = format_.prompt(messages)
            params = format_.after_reasoning(prompt, params)
        else:
            parsed = PromptInput.parse(value, tokenizer)
            prompt = {"prompt": parsed.text, "prompt_token_ids": parsed.token_ids}
        engine.check(prompt["prompt_token_ids"], params)
        return prompt, params


def _plain(value: Any) -> Any:
    """Convert what Arrow and numpy make of lists, and drop the fields that only other rows have."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
