"""The components of the HTTP front end, built once and shared by all routes."""

from __future__ import annotations

from typing import Any

import chairlift
from chairlift.server.access.rate_limits import RateLimiter, RateLimits
from chairlift.server.dashboard.request_texts import RequestTexts
from chairlift.server.generation.admission import Admission, AdmissionControl
from chairlift.server.generation.handler import GenerationHandler
from chairlift.server.generation.tokenizer_pool import TokenizerPool
from chairlift.server.http.subscribers import Subscribers
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient, EnginePort
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.limits import Limits


class Service:
    def __init__(
        self,
        model: ServedModel,
        engine: EnginePort,
        metrics: Metrics,
        limits: Limits,
        *,
        admission: Admission,
        rate_limits: RateLimits,
        isolate_keys: bool = False,
        policy_switch: bool = False,
    ) -> None:
        self.model = model
        self.engine = engine
        self.metrics = metrics
        self.limits = limits
        self.isolate_keys = isolate_keys  # whether only administrators see what concerns all keys
        self.policy_switch = policy_switch  # whether clients may change the policy of the running engine
        self.admission = admission
        self.rate_limits = rate_limits
        self.tokenizer_pool = TokenizerPool(limits.tenant_weights)
        texts = RequestTexts(model.tokenizer)
        self.subscribers = Subscribers(engine, metrics, texts, greeting=self._greeting)
        self.generation = GenerationHandler(
            model,
            engine,
            self.admission,
            self.tokenizer_pool,
            metrics,
            texts,
            default_timeout=limits.default_timeout,
            isolate_keys=isolate_keys,
        )

    @classmethod
    def local(
        cls, model: ServedModel, engine: EngineClient, metrics: Metrics, limits: Limits, **options: Any
    ) -> Service:
        """Build a front end that alone decides what its engine gets."""
        metrics.watch_engine(engine)
        admission, rate_limits = AdmissionControl(engine, metrics, limits), RateLimiter(metrics)
        return cls(model, engine, metrics, limits, admission=admission, rate_limits=rate_limits, **options)

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence of the loaded model; None until it is loaded."""
        return self.engine.loaded.limits.max_model_len if self.engine.loaded else None

    def _greeting(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "version": chairlift.__version__,
            "has_chat": self.model.tokenizer.chat_template is not None,
            "policy_switch": self.policy_switch,
            "max_model_len": self.max_model_len,
        }
