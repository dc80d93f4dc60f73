"""A trial's model: encoder, head, what is frozen, and what is recomputed in backward."""

from pathlib import Path

from transformers import PreTrainedModel

from dryfit.core.errors import ConfigError
from dryfit.core.jobs import TrainRequest
from dryfit.core.plan import DeviceKind
from dryfit.core.seeds import derive_seed
from dryfit.core.wire import write_text_atomic
from dryfit.meta.construction import build
from dryfit.meta.filling import materialise
from dryfit.meta.pretrained import class_cannot_checkpoint, load_encoder
from dryfit.tasks.heads import EncoderWithHead, HeadSpec, freeze


def build_model(body: TrainRequest, *, cls_last: bool) -> EncoderWithHead:
    """The trial's model: pretrained encoder, seeded head, layers frozen, on its device; its report is written."""
    settings = body.config.settings
    regularization = settings.regularization
    encoder, _ = load_encoder(
        settings.model, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout
    )
    if body.plan.checkpointing:
        enable_checkpointing(encoder, reentrant=body.plan.reentrant)
    data = body.config.data
    spec = HeadSpec(settings.head, num_outputs=data.num_labels, cls_last=cls_last, multi_label=data.multi_label)
    model = build(lambda: EncoderWithHead(encoder, spec), seed=derive_seed(body.config.seed, "head"))
    device = "cuda" if body.plan.device is DeviceKind.CUDA else "cpu"
    report = materialise(model, device=device, missing=["head.*"])
    write_text_atomic(Path(body.load_report), report.model_dump_json(), durable=False)
    freeze(model, regularization.freeze_layers)
    return model


def enable_checkpointing(encoder: PreTrainedModel, *, reentrant: bool) -> None:
    """Recompute each layer's activations in backward instead of keeping them; the random state is the same then.

    Args:
        encoder: Changed in place; may still be without data.
        reentrant: By autograd within autograd, as older code does it: the first layer's input must then require a
            gradient, so the embeddings' output is made to, frozen or not.

    Raises:
        ConfigError: The encoder cannot.
    """
    reason = class_cannot_checkpoint(type(encoder), encoder.config, reentrant=reentrant)
    if reason is not None:
        wish = "reentrant" if reentrant else "checkpointing"
        raise ConfigError(
            f"checking execution.{wish} = true", reason, allowed=f"execution.{wish} = false for this model"
        )
    kwargs = {"use_reentrant": reentrant}
    if hasattr(encoder, "activation_checkpointing_enable"):  # the other name goes with transformers 5.17
        encoder.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    # transformers asks for that gradient in both modes. Where nothing needs it, it keeps frozen layers in the graph.
    encoder.disable_input_require_grads()
    if reentrant:
        encoder.enable_input_require_grads()
