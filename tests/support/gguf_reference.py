"""A GGUF file as a transformers model: the reference for our own reader. (Its `from_pretrained` wants
accelerate.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def load_gguf_reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in `dtype`, in evaluation mode."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model, torch_dtype=dtype)[
        "tensors"
    ]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    return model.eval()
