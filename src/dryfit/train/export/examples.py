"""Programs that open a saved model's folder without dryfit, written into the folder and its model card."""

from torch import nn

from dryfit.core.settings.task_facts import facts_of
from dryfit.core.settings.trial import TrialConfig
from dryfit.tasks.base import TaskModel
from dryfit.tasks.heads import AttentionPooling, EncoderWithHead
from dryfit.tasks.lm.causal_lm import CausalLm
from dryfit.tasks.saved.model_input import ModelInput
from dryfit.train.export.templates import render

_POOLING = {
    "cls": "hidden_BLD[:, 0]",
    "cls_last": "hidden_BLD[torch.arange(len(mask_BL)), mask_BL.sum(dim=1) - 1]",
    "mean": "(hidden_BLD * mask_BL[:, :, None]).sum(dim=1) / mask_BL.sum(dim=1, keepdim=True)",
    "attention": "(hidden_BLD, mask_BL)",
    "max": "hidden_BLD.masked_fill(mask_BL[:, :, None] == 0, torch.finfo(hidden_BLD.dtype).min).amax(dim=1)",
}
_ACTIVATIONS = {
    "gelu": "torch.nn.GELU()",
    "relu": "torch.nn.ReLU()",
    "tanh": "torch.nn.Tanh()",
    "silu": "torch.nn.SiLU()",
}
_PROMPTS = {"criteria": "criteria_prompt", "both": "criteria_prompt", "evidence": "evidence_prompt"}


def example(config: TrialConfig, read: ModelInput, model: TaskModel) -> str | None:
    """Return a program that opens the folder without dryfit and predicts one row; it is run inside the folder.

    None for models that have more than one encoder or head, and for tasks of the user's own.

    Args:
        config: What was learned.
        read: What the model reads.
        model: The model itself.
    """
    trust = ", trust_remote_code=True" if config.settings.model.trust_remote_code else ""
    if isinstance(model, CausalLm):
        return _lm_example(read, model, trust)
    if not isinstance(model, EncoderWithHead) or facts_of(config.task).own:
        return None
    spec = model.spec
    pooling = "cls_last" if spec.settings.pooling == "cls" and spec.cls_last else spec.settings.pooling
    facts = {
        "trust": trust,
        "read": read,
        "spec": spec,
        "names": ["input_ids", "attention_mask", *(["token_type_ids"] if model.takes_types else [])],
        "layers": [_layer(layer, spec.settings.activation) for layer in model.head],
        "pooled": _POOLING[pooling],
    }
    return render("encoder_example.py", facts)


def _layer(layer: nn.Module, activation: str) -> str:
    """Return one of the head's layers as code; dropout does nothing outside training, but takes a place."""
    match layer:
        case nn.Linear():
            return f"torch.nn.Linear({layer.in_features}, {layer.out_features})"
        case nn.Dropout():
            return "torch.nn.Identity()"
        case AttentionPooling():
            return f"AttentionPooling({layer.project.in_features})"
        case _:
            return _ACTIVATIONS[activation]


def _lm_example(read: ModelInput, model: CausalLm, trust: str) -> str:
    lm = read.settings.lm
    if lm.format in _PROMPTS:
        prompt = f"{getattr(lm, _PROMPTS[lm.format])!r}.format(criterion='a criterion', text='A text.')"
    else:
        prompt = repr("An instruction." if lm.format == "instruction" else "A text")
    chats = lm.chat != "off" and lm.format != "text"
    adapted = model.adapted() is not None
    return render("lm_example.py", {"trust": trust, "lm": lm, "prompt": prompt, "chats": chats, "adapted": adapted})
