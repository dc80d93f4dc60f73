"""How many parameters the models of the catalogue have, as published.

A row says the number of the model itself and the total of the published files, which the hub shows beside a model
(from the headers of the safetensors files) or which is widely quoted, and what those files hold besides. Where a model
has no such total, that of a well-known fine-tuned copy stands for it, with its head as what it holds besides.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One model. ``parameters + besides == files``."""

    parameters: int
    files: int
    besides: int = 0


def _mlm(width: int, vocab: int) -> int:
    """BERT's head of masked language modelling: a layer, its norm, a bias for each token; the matrix is tied."""
    return width * width + width + 2 * width + vocab


def _next_sentence(width: int) -> int:
    return 2 * width + 2


def _classes(width: int, labels: int, *, layer: bool = True) -> int:
    """A classifier: a layer of its own (or none) and one row for each label."""
    return layer * (width * width + width) + labels * (width + 1)


def _exactly(parameters: int) -> Published:
    return Published(parameters, parameters)


PUBLISHED = {
    # Encoders, poolers counted where they have them. The files hold the pretraining head; older ones position ids.
    "google-bert/bert-base-uncased": Published(109_482_240, 110_106_428, _mlm(768, 30522) + _next_sentence(768)),
    "google-bert/bert-large-uncased": Published(335_141_888, 336_226_108, _mlm(1024, 30522) + _next_sentence(1024)),
    "google-bert/bert-base-cased": Published(108_310_272, 108_932_934, _mlm(768, 28996) + _next_sentence(768)),
    "google-bert/bert-base-multilingual-cased": Published(
        177_853_440, 178_566_653, _mlm(768, 119547) + _next_sentence(768)
    ),
    # Without pooler: a pooler is width * (width + 1).
    "FacebookAI/roberta-base": Published(124_645_632, 124_697_947, _mlm(768, 50265) + 514 - 768 * 769),
    "FacebookAI/roberta-large": Published(355_359_744, 355_412_571, _mlm(1024, 50265) + 514 - 1024 * 1025),
    "FacebookAI/xlm-roberta-base": Published(278_043_648, 278_295_186, _mlm(768, 250002) - 768 * 769),
    "FacebookAI/xlm-roberta-large": Published(559_890_432, 560_142_482, _mlm(1024, 250002) - 1024 * 1025),
    "distilbert/distilroberta-base": Published(82_118_400, 82_760_793, _mlm(768, 50265)),
    "distilbert/distilbert-base-uncased": Published(66_362_880, 66_985_530, _mlm(768, 30522)),
    "answerdotai/ModernBERT-base": Published(149_014_272, 149_655_232, 768 * 768 + 768 + 50368),
    "answerdotai/ModernBERT-large": Published(394_781_696, 395_881_664, 1024 * 1024 + 1024 + 50368),
    "microsoft/mpnet-base": Published(109_486_464, 109_486_978, 514),  # all-mpnet-base-v2
    "sentence-transformers/all-MiniLM-L6-v2": Published(22_713_216, 22_713_728, 512),
    # Copies with two or three labels.
    "albert/albert-base-v2": Published(11_683_584, 11_685_122, _classes(768, 2, layer=False)),
    "google/electra-small-discriminator": Published(13_483_008, 13_549_314, _classes(256, 2)),
    "google/electra-base-discriminator": Published(108_891_648, 109_483_778, _classes(768, 2)),
    "google/electra-large-discriminator": Published(334_092_288, 335_143_938, _classes(1024, 2)),
    "microsoft/deberta-v3-xsmall": Published(70_682_112, 70_831_107, _classes(384, 3)),
    "microsoft/deberta-v3-small": Published(141_304_320, 141_897_219, _classes(768, 3)),
    "microsoft/deberta-v3-base": Published(183_831_552, 184_424_451, _classes(768, 3)),
    "microsoft/deberta-v3-large": Published(434_012_160, 435_064_835, _classes(1024, 3)),
    "microsoft/mdeberta-v3-base": Published(278_218_752, 278_811_651, _classes(768, 3)),
    # Decoders with their language model head.
    "Qwen/Qwen2.5-0.5B": _exactly(494_032_768),
    "Qwen/Qwen2.5-0.5B-Instruct": _exactly(494_032_768),
    "Qwen/Qwen2.5-1.5B": _exactly(1_543_714_304),
    "Qwen/Qwen2.5-1.5B-Instruct": _exactly(1_543_714_304),
    "Qwen/Qwen2.5-3B": _exactly(3_085_938_688),
    "Qwen/Qwen2.5-3B-Instruct": _exactly(3_085_938_688),
    "Qwen/Qwen2.5-7B": _exactly(7_615_616_512),
    "Qwen/Qwen2.5-7B-Instruct": _exactly(7_615_616_512),
    "Qwen/Qwen2.5-14B": _exactly(14_770_033_664),
    "Qwen/Qwen2.5-14B-Instruct": _exactly(14_770_033_664),
    "Qwen/Qwen2.5-32B": _exactly(32_763_876_352),
    "Qwen/Qwen2.5-32B-Instruct": _exactly(32_763_876_352),
    "Qwen/Qwen2.5-72B": _exactly(72_706_203_648),
    "Qwen/Qwen2.5-72B-Instruct": _exactly(72_706_203_648),
    "Qwen/Qwen3-0.6B": Published(596_049_920, 751_632_384, 151936 * 1024),  # the tied head is stored twice
    "Qwen/Qwen3-1.7B": Published(1_720_574_976, 2_031_739_904, 151936 * 2048),  # so is this one's
    "Qwen/Qwen3-4B": _exactly(4_022_468_096),
    "Qwen/Qwen3-8B": _exactly(8_190_735_360),
    "Qwen/Qwen3-14B": _exactly(14_768_307_200),
    "Qwen/Qwen3-32B": _exactly(32_762_123_264),
    "meta-llama/Llama-2-7b-hf": _exactly(6_738_415_616),
    "meta-llama/Llama-2-13b-hf": _exactly(13_015_864_320),
    "meta-llama/Meta-Llama-3-8B": _exactly(8_030_261_248),
    "meta-llama/Llama-3.1-8B": _exactly(8_030_261_248),
    "meta-llama/Meta-Llama-3-70B": _exactly(70_553_706_496),
    "meta-llama/Llama-3.1-70B": _exactly(70_553_706_496),
    "meta-llama/Llama-3.2-1B": _exactly(1_235_814_400),
    "meta-llama/Llama-3.2-3B": _exactly(3_212_749_824),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _exactly(1_100_048_384),
    "mistralai/Mistral-7B-v0.1": _exactly(7_241_732_096),
    "mistralai/Mistral-7B-v0.3": _exactly(7_248_023_552),
    "microsoft/phi-2": _exactly(2_779_683_840),
    "microsoft/Phi-3-mini-4k-instruct": _exactly(3_821_079_552),
    "google/gemma-2b": _exactly(2_506_172_416),
    "google/gemma-2-2b": _exactly(2_614_341_888),
    "google/gemma-2-9b": _exactly(9_241_705_984),
    "google/gemma-2-27b": _exactly(27_227_128_320),
    "google/gemma-3-1b-it": _exactly(999_885_952),
    "facebook/opt-1.3b": _exactly(1_315_758_080),
    "EleutherAI/pythia-410m": _exactly(405_334_016),
    "EleutherAI/pythia-1b": _exactly(1_011_781_632),
    "tiiuae/falcon-7b": Published(6_921_720_704, 7_217_189_760, 65024 * 4544),  # the tied head is stored twice
    # The files of GPT-2 hold its causal masks.
    "openai-community/gpt2": Published(124_439_808, 137_022_720, 12 * 1024 * 1024),
    "openai-community/gpt2-medium": Published(354_823_168, 379_988_992, 24 * 1024 * 1024),
    "openai-community/gpt2-large": Published(774_030_080, 811_778_816, 36 * 1024 * 1024),
    # Encoder-decoders. The first T5 files hold a bias that the model has no place for.
    "google-t5/t5-small": Published(60_506_624, 60_506_880, 32 * 8),
    "google-t5/t5-base": Published(222_903_552, 222_903_936, 32 * 12),
    # Since version 5, transformers ties the head of every T5; these files hold one of its own.
    "google/flan-t5-base": Published(222_903_552, 247_577_856, 32128 * 768),
    "google/t5-v1_1-large": Published(750_251_008, 783_150_080, 32128 * 1024),
    "facebook/bart-base": _exactly(139_420_416),
    "facebook/bart-large": _exactly(406_291_456),
}
