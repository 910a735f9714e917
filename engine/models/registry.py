"""Which class computes which architecture: one line a model."""

from __future__ import annotations

from engine.errors import CheckpointError
from engine.models.base import CausalLM
from engine.models.deepseek import DeepseekForCausalLM
from engine.models.gemma3 import Gemma3ForCausalLM
from engine.models.gemma4 import Gemma4ForCausalLM
from engine.models.glm4_moe import Glm4MoeForCausalLM
from engine.models.llama import LlamaForCausalLM
from engine.models.qwen2 import Qwen2ForCausalLM
from engine.models.qwen3 import Qwen3ForCausalLM
from engine.registry import Registry

_MODELS: tuple[type[CausalLM], ...] = (
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma4ForCausalLM,
    DeepseekForCausalLM,
    Glm4MoeForCausalLM,
)

MODELS: Registry[type[CausalLM]] = Registry(
    "architectures",
    {architecture: model for model in _MODELS for architecture in model.architectures},
    error=CheckpointError,
)
