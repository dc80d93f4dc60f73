"""Libraries that are older than the ranges that were tested: what dryfit changes in them is left as it is."""

from types import SimpleNamespace

from dryfit.gpu.private_apis.transformers_steps import let_flash_attention
from dryfit.gpu.weights import install_from_pretrained


def test_a_transformers_without_the_steps_of_today_stays_as_it_is() -> None:
    class PreTrainedModel:
        """As before 4.56: with a step of the name, and without the others."""

        def _load_pretrained_model(self) -> str:
            return "its own"

    models = SimpleNamespace(PreTrainedModel=PreTrainedModel, get_hf_quantizer=None)
    step = PreTrainedModel._load_pretrained_model
    install_from_pretrained(models, lambda *_: None, lambda *_: None)
    let_flash_attention(models, "flash", lambda *_: None, lambda _: True)
    assert PreTrainedModel._load_pretrained_model is step and models.get_hf_quantizer is None
    assert sorted(vars(models)) == ["PreTrainedModel", "get_hf_quantizer"]
