"""Models and data sets by the names that scripts ask for, laid as the caches of their libraries lay them.

Of a model there is its config and its tokenizer, of the published sizes; of a data set, columns of the published names
and kinds.
"""

import json
import random
import string
from collections.abc import Callable
from pathlib import Path

from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    DatasetInfo,
    Features,
    Image,
    List,
    SplitDict,
    SplitInfo,
    Value,
    Version,
)
from datasets.arrow_writer import ArrowWriter
from datasets.naming import camelcase_to_snakecase
from PIL import Image as Pictures
from stranger_inputs import RANDOM, WORDS, sentence, sparse_weights
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

REVISION = "0" * 39 + "1"

QWEN_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def bert(vocab=30522, hidden=768, layers=12, heads=12, kind="bert", **more):
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    named = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}[kind]
    base = {
        "model_type": kind,
        "architectures": [named],
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    return base | sizes | more


def roberta(layers=12, hidden=768, heads=12):
    return bert(
        50265,
        hidden,
        layers,
        heads,
        "roberta",
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )


def gpt2(layers=12, hidden=768, heads=12):
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": 1024,
        "n_ctx": 1024,
        "vocab_size": 50257,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }


def llama(kind, named, vocab, hidden, inner, layers, heads, groups, **more):
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    rest = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    ends = {"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    return {"model_type": kind, "architectures": [named]} | sizes | rest | ends | more


def qwen2(hidden, inner, layers, heads, groups, tied=True, vocab=151936, **more):
    ends = {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }
    return llama("qwen2", "Qwen2ForCausalLM", vocab, hidden, inner, layers, heads, groups, **(ends | more))


def neox(hidden, layers, heads, **more):
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }
    return (
        {
            "model_type": "gpt_neox",
            "architectures": ["GPTNeoXForCausalLM"],
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
            "dtype": "float16",
        }
        | sizes
        | more
    )


QWEN3_4B = llama(
    *("qwen3", "Qwen3ForCausalLM", 151936, 2560, 9728, 36, 32, 8),
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=262144,
)
LLAMA2 = llama("llama", "LlamaForCausalLM", 32000, 4096, 11008, 32, 32, 32, dtype="float16")
MISTRAL = llama("mistral", "MistralForCausalLM", 32000, 4096, 14336, 32, 32, 8, max_position_embeddings=32768)
BERT_CASED = bert(28996)
MINILM = bert(30522, 384, 6, 12)
DISTILBERT = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForMaskedLM"],
    "vocab_size": 30522,
    "dim": 768,
    "hidden_dim": 3072,
    "n_layers": 6,
    "n_heads": 12,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
MPNET = {
    "model_type": "mpnet",
    "architectures": ["MPNetForMaskedLM"],
    "vocab_size": 30527,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 32128,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
T5_SMALL = T5 | {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "n_positions": 512}
SEGFORMER_B0 = {
    "model_type": "segformer",
    "architectures": ["SegformerForImageClassification"],
    "hidden_sizes": [32, 64, 160, 256],
    "depths": [2, 2, 2, 2],
    "decoder_hidden_size": 256,
    "image_size": 224,
}
DETR_R50 = {
    "model_type": "detr",
    "architectures": ["DetrForObjectDetection"],
    "backbone": "resnet50",
    "use_timm_backbone": True,
    "use_pretrained_backbone": False,
    "d_model": 256,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "num_queries": 100,
    "id2label": {str(n): f"LABEL_{n}" for n in range(91)},
}
VIT = {
    "model_type": "vit",
    "architectures": ["ViTModel"],
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
}

MODELS = {
    "bert-base-cased": (BERT_CASED, "wordpiece"),
    "google-bert/bert-base-cased": (BERT_CASED, "wordpiece"),
    "bert-base-uncased": (bert(), "wordpiece"),
    "google-bert/bert-base-uncased": (bert(), "wordpiece"),
    "bert-base-multilingual-cased": (bert(119547), "wordpiece"),
    "nreimers/MiniLM-L6-H384-uncased": (MINILM, "wordpiece"),
    "microsoft/MiniLM-L12-H384-uncased": (bert(30522, 384, 12, 12), "wordpiece"),
    "distilbert-base-uncased": (DISTILBERT, "wordpiece"),
    "distilbert/distilbert-base-uncased": (DISTILBERT, "wordpiece"),
    "microsoft/mpnet-base": (MPNET, "wordpiece"),
    "distilroberta-base": (roberta(6), "bytes"),
    "distilbert/distilroberta-base": (roberta(6), "bytes"),
    "roberta-base": (roberta(), "bytes"),
    "roberta-large": (roberta(24, 1024, 16), "bytes"),
    "FacebookAI/roberta-base": (roberta(), "bytes"),
    "gpt2": (gpt2(), "bytes"),
    "openai-community/gpt2": (gpt2(), "bytes"),
    "gpt2-xl": (gpt2(48, 1600, 25), "bytes"),
    "Qwen/Qwen2-0.5B": (qwen2(896, 4864, 24, 14, 2), "qwen"),
    "Qwen/Qwen2-0.5B-Instruct": (qwen2(896, 4864, 24, 14, 2), "qwen"),
    "Qwen/Qwen2.5-0.5B-Instruct": (qwen2(896, 4864, 24, 14, 2), "qwen"),
    "Qwen/Qwen2-1.5B-Instruct": (qwen2(1536, 8960, 28, 12, 2), "qwen"),
    "Qwen/Qwen3-4B-Instruct-2507": (QWEN3_4B, "qwen"),
    "open-r1/Qwen2.5-Math-7B-RoPE-300k": (qwen2(3584, 18944, 28, 28, 4, tied=False, vocab=152064), "qwen"),
    "BAAI/bge-large-en-v1.5": (bert(30522, 1024, 24, 16), "wordpiece"),
    "trl-lib/qwen1.5-1.8b-sft": (qwen2(2048, 5504, 24, 16, 16, tied=False), "qwen"),
    "trl-lib/pythia-1b-deduped-tldr-sft": (neox(2048, 16, 8), "bytes"),
    "trl-lib/pythia-1b-deduped-tldr-rm": (
        neox(2048, 16, 8, architectures=["GPTNeoXForSequenceClassification"], id2label={"0": "LABEL_0"}),
        "bytes",
    ),
    "huggyllama/llama-7b": (LLAMA2 | {"max_position_embeddings": 2048}, "llama"),
    "meta-llama/Llama-2-7b-hf": (LLAMA2, "llama"),
    "meta-llama/Llama-2-70b-hf": (
        llama("llama", "LlamaForCausalLM", 32000, 8192, 28672, 80, 64, 8, dtype="float16"),
        "llama",
    ),
    "meta-llama/Meta-Llama-3-8B": (
        llama("llama", "LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, max_position_embeddings=8192),
        "llama",
    ),
    "lmsys/vicuna-7b-v1.5": (LLAMA2, "sentencepiece"),
    "mistralai/Mistral-7B-v0.1": (MISTRAL, "llama"),
    "EleutherAI/pythia-160m": (neox(768, 12, 12), "bytes"),
    "facebook/opt-350m": (
        {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "vocab_size": 50272,
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
            "dtype": "float16",
        },
        "opt",
    ),
    "facebook/opt-1.3b": (
        {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "vocab_size": 50272,
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
            "dtype": "float16",
        },
        "opt",
    ),
    "google-t5/t5-base": (T5, "bytes"),
    "t5-base": (T5, "bytes"),
    "google-t5/t5-small": (T5_SMALL, "bytes"),
    "google/vit-base-patch16-224-in21k": (VIT, "vit"),
    "nvidia/mit-b0": (SEGFORMER_B0, "segformer"),
    "facebook/detr-resnet-50": (DETR_R50, "detr"),
}
"""Names with their configs as published, and the kind of tokenizer."""


def folder_of(working, name, kind="models"):
    """Return the snapshot of a name in the hub's cache, as it would lie there."""
    root = Path(working) / "hf" / "hub" / f"{kind}--{name.replace('/', '--')}"
    folder = root / "snapshots" / REVISION
    folder.mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(REVISION)
    return folder


def absent(folder, *paths):
    """Note that a repository does not have these files, as a download does that asked for them."""
    for path in paths:
        noted = folder.parents[1] / ".no_exist" / folder.name / path
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.touch()


def model(working, name):
    """Write a model's config and tokenizer; return the folder."""
    folder = folder_of(working, name)
    if name in PIPELINES:
        PIPELINES[name](folder)
        for part in (folder, *folder.iterdir()):
            _empty_weights(part)
        return folder
    config, kind = MODELS[name]
    if not (folder / "config.json").exists():
        tokenizer(folder, kind, config)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


_IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PROCESSORS = {
    "vit": ("ViTImageProcessor", {"height": 224, "width": 224}, [0.5] * 3, [0.5] * 3),
    "segformer": ("SegformerImageProcessor", {"height": 512, "width": 512}, *_IMAGENET),
    "detr": ("DetrImageProcessor", {"shortest_edge": 800, "longest_edge": 1333}, *_IMAGENET),
}


def tokenizer(folder, kind, config):
    """Write the files of a tokenizer, whose vocabulary is as large as the published one."""
    if kind in PROCESSORS:
        named, size, mean, deviation = PROCESSORS[kind]
        flags = {"do_resize": True, "do_normalize": True, "do_rescale": True}
        values = {"image_processor_type": named, "size": size, "image_mean": mean, "image_std": deviation}
        (folder / "preprocessor_config.json").write_text(json.dumps(values | flags))
        return
    if kind == "sentencepiece":
        _sentencepiece(folder)
        return
    words, settings = TOKENIZERS[kind](config)
    words.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.get("n_positions", 512 if kind == "wordpiece" else 2048),
    } | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _wordpiece(config):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*string.ascii_letters, *string.digits, *string.punctuation]
    known = list(dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *WORDS]))
    known += [f"filler{n}" for n in range(config["vocab_size"] - len(known))]
    made = Tokenizer(models.WordPiece({word: n for n, word in enumerate(known)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    ends = [(word, made.token_to_id(word)) for word in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return made, {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }


def _byte_level(first, last, size):
    """A byte-level BPE whose special tokens are the first and the last, with fillers between."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    chooser = random.Random(0)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learned.train_from_iterator((sentence(chooser) for _ in range(500)), trainer)
    core = json.loads(learned.to_str())["model"]
    words = [*first, *sorted(core["vocab"], key=core["vocab"].get)]
    words += [f"filler{n}" for n in range(size - len(words) - len(last))] + list(last)
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [tuple(pair) for pair in core["merges"]]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([*first, *last])
    return made


def _bytes(config):
    end = "<|endoftext|>"
    if config["model_type"] == "roberta":
        made = _byte_level(["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"], config["vocab_size"])
        ends = [("<s>", 0), ("</s>", 2)]
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
        )
        return made, {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "cls_token": "<s>",
            "sep_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "mask_token": "<mask>",
        }
    if config["model_type"] == "t5":
        made = _byte_level(["<pad>", "</s>", "<unk>"], [], config["vocab_size"] - 28)
        made.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
        )
        return made, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if config["model_type"] == "gpt_neox":
        return _byte_level([end, "<|padding|>"], ["[PAD]"], 50278), {
            "bos_token": end,
            "eos_token": end,
            "pad_token": "[PAD]",
        }
    return _byte_level([], [end], config["vocab_size"]), {"bos_token": end, "eos_token": end, "unk_token": end}


def _qwen(config):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = _byte_level([], special, 151646)
    return made, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": QWEN_CHAT}


def _llama(config):
    made = _byte_level(["<unk>", "<s>", "</s>"], [], config["vocab_size"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return made, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _sentencepiece(folder):
    """Write Llama's tokenizer as scripts read it that want no fast one; its vocabulary is small."""
    import sentencepiece

    chooser, options = random.Random(0), {"model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False}
    with (folder / "tokenizer.model").open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([sentence(chooser) for _ in range(2000)]),
            model_writer=stream,
            vocab_size=900,
            **options,
        )
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "model_max_length": 4096, **ends}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _opt(config):
    made = _byte_level(["<s>", "<pad>", "</s>", "<unk>"], [], 50265)
    made.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A $B", special_tokens=[("</s>", 2)]
    )
    return made, {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"}


TOKENIZERS = {"wordpiece": _wordpiece, "bytes": _bytes, "qwen": _qwen, "llama": _llama, "opt": _opt}
"""What makes each kind of tokenizer of a config."""

# Pipelines of diffusers


def _part(folder, part, **values):
    (folder / part).mkdir(parents=True, exist_ok=True)
    name = {"scheduler": "scheduler_config.json"}.get(part, "config.json")
    (folder / part / name).write_text(json.dumps(values))


def _clip_tokenizer(folder):
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = list(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"{letter}</w>" for letter in alphabet)]
    words += ["to", "toy</w>"]  # what textual inversion begins with is one token
    words += [f"filler{n}" for n in range(49406 - len(words))] + ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt o\nto y</w>\n")
    ends = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": 77} | ends)
    )


def _empty_weights(folder):
    """Files of weights beside the config of a part of a pipeline, where there is one of diffusers."""
    path, config = folder / "diffusion_pytorch_model.safetensors", folder / "config.json"
    if path.exists() or not config.exists() or "_class_name" not in config.read_text():
        return
    import diffusers
    import torch

    values = json.loads(config.read_text())
    with torch.device("meta"):
        made = getattr(diffusers, values["_class_name"]).from_config(values)
    sparse_weights(path, {name: tensor.shape for name, tensor in made.state_dict().items()}, "F32", 4)


VAE = {
    "_class_name": "AutoencoderKL",
    "_diffusers_version": "0.6.0",
    "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "sample_size": 512,
}


def stable_diffusion(folder):
    """Stable Diffusion 1.4 and 1.5."""
    parts = {
        "feature_extractor": [None, None],
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "PNDMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(
        json.dumps(
            {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.6.0", "requires_safety_checker": False}
            | parts
        )
    )
    _part(
        folder,
        "scheduler",
        _class_name="PNDMScheduler",
        beta_end=0.012,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        num_train_timesteps=1000,
        skip_prk_steps=True,
        steps_offset=1,
        set_alpha_to_one=False,
    )
    _part(folder, "vae", **VAE)
    down, up = ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"], ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3
    _part(
        folder,
        "unet",
        _class_name="UNet2DConditionModel",
        _diffusers_version="0.6.0",
        act_fn="silu",
        attention_head_dim=8,
        block_out_channels=[320, 640, 1280, 1280],
        center_input_sample=False,
        cross_attention_dim=768,
        down_block_types=down,
        up_block_types=up,
        downsample_padding=1,
        flip_sin_to_cos=True,
        freq_shift=0,
        in_channels=4,
        out_channels=4,
        layers_per_block=2,
        mid_block_scale_factor=1,
        norm_eps=1e-5,
        norm_num_groups=32,
        sample_size=64,
    )
    _part(
        folder,
        "text_encoder",
        model_type="clip_text_model",
        architectures=["CLIPTextModel"],
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=77,
        vocab_size=49408,
        hidden_act="quick_gelu",
        projection_dim=768,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
        dtype="float32",
    )
    _clip_tokenizer(folder / "tokenizer")
    absent(folder, "tokenizer/config.json")  # what AutoTokenizer reads first: there is none on the hub


def _vae(folder):
    (folder / "config.json").write_text(json.dumps(VAE | {"sample_size": 256}))


PIPELINES: dict[str, Callable[[Path], None]] = {
    "CompVis/stable-diffusion-v1-4": stable_diffusion,
    "openai/clip-vit-large-patch14": _clip_tokenizer,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": stable_diffusion,
    "stabilityai/sd-vae-ft-ema": _vae,
}

# Data sets


def _said(chooser, role, low=20, high=60):
    return {"role": role, "content": sentence(chooser, low, high)}


def _turns(chooser, n):
    return [_said(chooser, "user"), _said(chooser, "assistant", 60, 200)] * (1 + n % 3)


def _pair(chooser):
    """Two answers to one question."""
    question = _said(chooser, "user")
    return {name: [question, _said(chooser, "assistant", 60, 200)] for name in ("chosen", "rejected")}


def _judged(chooser, n):
    """A prompt with one completion that is liked or not."""
    prompt = [_said(chooser, "user")]
    return {"prompt": prompt, "completion": [_said(chooser, "assistant", 60, 200)], "label": bool(n % 2)}


def _picture(n, width=512, height=512):
    return _blocks((8, 8, 3), 256, width, height)


def _blocks(shape, kinds, width, height):
    """A picture of even blocks, which is soon written."""
    blocks = Pictures.fromarray(RANDOM.integers(0, kinds, shape, dtype="uint8"))
    return blocks.resize((width, height), Pictures.Resampling.NEAREST)


def _context(chooser, low, high):
    return " ".join(sentence(chooser) for _ in range(chooser.randint(low, high)))


def _question(chooser, n):
    context = _context(chooser, 6, 20)
    answer = {"text": [context.split()[3]], "answer_start": [len(" ".join(context.split()[:3])) + 1]}
    return {"id": str(n), "title": "Made", "context": context, "question": sentence(chooser), "answers": answer}


def _choices(chooser, n):
    said = {"video-id": "v", "fold-ind": str(n), "startphrase": sentence(chooser), "sent1": sentence(chooser)}
    ends = {f"ending{k}": sentence(chooser) for k in range(4)}
    return said | {"sent2": "It", "gold-source": "gold"} | ends | {"label": n % 4}


def _boxes(n):
    boxes = [[20.0 + 90 * k, 15.0 + 60 * k, 80.0, 70.0] for k in range(5)]
    return {"id": [5 * n + k for k in range(5)], "area": [5600] * 5, "bbox": boxes, "category": [0, 1, 2, 3, 4]}


ROWS: dict[str, tuple[str, dict[str, str], Callable]] = {
    "opus_books": (
        "en-it",
        {"train": "1"},
        lambda c, n: {"id": str(n), "translation": {"en": sentence(c), "it": sentence(c)}},
    ),
    "HuggingFaceH4/ultrachat_200k": (
        "default",
        {"train_sft": "1", "test_sft": "0.5"},
        lambda c, n: {"prompt": sentence(c), "prompt_id": str(n), "messages": _turns(c, n)},
    ),
    "nyu-mll/glue": (
        "mrpc",
        {"train": "1", "validation": "0.25", "test": "0.25"},
        lambda c, n: {"sentence1": sentence(c), "sentence2": sentence(c), "label": n % 2, "idx": n},
    ),
    "trl-lib/Capybara": (
        "default",
        {"train": "1", "test": "0.25"},
        lambda c, n: {"source": "made", "messages": _turns(c, n), "num_turns": 2},
    ),
    "trl-lib/ultrafeedback_binarized": (
        "default",
        {"train": "1", "test": "0.25"},
        lambda c, n: {**_pair(c), "score_chosen": 8.0, "score_rejected": 4.0},
    ),
    "trl-internal-testing/hh-rlhf-helpful-base-trl-style": (
        "default",
        {"train": "1", "test": "0.25"},
        lambda c, n: {"prompt": sentence(c), **_pair(c)},
    ),
    "trl-lib/kto-mix-14k": (
        "default",
        {"train": "1", "test": "0.25"},
        _judged,
    ),
    "trl-lib/tldr": (
        "default",
        {"train": "1", "validation": "0.25", "test": "0.25"},
        lambda c, n: {"prompt": " ".join(sentence(c) for _ in range(12)) + " TL;DR:", "completion": sentence(c)},
    ),
    "trl-lib/chatbot_arena_completions": (
        "default",
        {"train": "1", "test": "0.25"},
        lambda c, n: {"messages": _turns(c, 0)},
    ),
    "trl-lib/ultrafeedback-gpt-3.5-turbo-helpfulness": (
        "default",
        {"train": "1", "test": "0.25"},
        _judged,
    ),
    "trl-lib/prm800k": (
        "default",
        {"train": "1", "test": "0.25"},
        lambda c, n: {
            "prompt": sentence(c),
            "completions": [sentence(c) for _ in range(6)],
            "labels": [True] * 5 + [False],
        },
    ),
    "trl-lib/DeepMath-103K": (
        "default",
        {"train": "4", "test": "1"},
        lambda c, n: {"prompt": [_said(c, "user")], "solution": f"{n}"},
    ),
    "AI-MO/NuminaMath-TIR": (
        "default",
        {"train": "20", "test": "4"},
        lambda c, n: {"problem": sentence(c), "solution": f"{sentence(c)} \\boxed{{{n}}}", "messages": _turns(c, 0)},
    ),
    "sentence-transformers/stsb": (
        "default",
        {"train": "2", "validation": "0.5", "test": "0.5"},
        lambda c, n: {"sentence1": sentence(c), "sentence2": sentence(c), "score": (n % 6) / 5},
    ),
    "sentence-transformers/all-nli:pair-class": (
        "pair-class",
        {"train": "20", "dev": "0.5", "test": "0.5"},
        lambda c, n: {"premise": sentence(c), "hypothesis": sentence(c), "label": n % 3},
    ),
    "sentence-transformers/all-nli:triplet": (
        "triplet",
        {"train": "20", "dev": "0.5", "test": "0.5"},
        lambda c, n: {"anchor": sentence(c), "positive": sentence(c), "negative": sentence(c)},
    ),
    "sentence-transformers/quora-duplicates:pair-class": (
        "pair-class",
        {"train": "40"},
        lambda c, n: {"sentence1": sentence(c), "sentence2": sentence(c), "label": n % 2},
    ),
    "smangrul/ultrachat-10k-chatml": (
        "default",
        {"train": "1", "test": "0.25"},
        lambda c, n: {"messages": _turns(c, n)},
    ),
    "yahma/alpaca-cleaned": (
        "default",
        {"train": "1"},
        lambda c, n: {"instruction": sentence(c), "input": "", "output": " ".join(sentence(c) for _ in range(4))},
    ),
    "allenai/c4": (
        "en",
        {"train": "1", "validation": "0.25"},
        lambda c, n: {"text": " ".join(sentence(c) for _ in range(20)), "timestamp": "2019-04-25", "url": f"made/{n}"},
    ),
    "timdettmers/openassistant-guanaco": (
        "default",
        {"train": "1", "test": "0.25"},
        lambda c, n: {"text": f"### Human: {sentence(c)}### Assistant: {sentence(c, 60, 200)}"},
    ),
    "lambdalabs/naruto-blip-captions": (
        "default",
        {"train": "0.25"},
        lambda c, n: {"image": _picture(n), "text": sentence(c)},
    ),
    "huggan/flowers-102-categories": ("default", {"train": "0.25"}, lambda c, n: {"image": _picture(n)}),
    "fusing/fill50k": (
        "default",
        {"train": "0.25"},
        lambda c, n: {"image": _picture(n), "conditioning_image": _picture(n), "text": sentence(c)},
    ),
    "ought/raft": (
        "twitter_complaints",
        {"train": "0.1", "test": "1"},
        lambda c, n: {"Tweet text": sentence(c), "ID": n, "Label": n % 3},
    ),
    "wikitext": (
        "wikitext-2-v1",
        {"train": "1", "validation": "0.1", "test": "0.1"},
        lambda c, n: {"text": _context(c, 4, 8) + "\n" if n % 2 else ""},
    ),
    "squad": ("plain_text", {"train": "1", "validation": "0.25"}, _question),
    "squad_v2": ("squad_v2", {"train": "1", "validation": "0.25"}, _question),
    "swag": ("regular", {"train": "1", "validation": "0.25"}, _choices),
    "cnn_dailymail": (
        "3.0.0",
        {"train": "1", "validation": "0.1", "test": "0.1"},
        lambda c, n: {"article": _context(c, 20, 90), "highlights": _context(c, 3, 5), "id": str(n)},
    ),
    "wmt16": (
        "ro-en",
        {"train": "1", "validation": "0.1", "test": "0.1"},
        lambda c, n: {"translation": {"ro": sentence(c, 6, 100), "en": sentence(c, 6, 100)}},
    ),
    "beans": (
        "default",
        {"train": "1", "validation": "0.25", "test": "0.25"},
        lambda c, n: {"image_file_path": f"{n}.jpg", "image": _picture(n, 500, 500), "labels": n % 3},
    ),
    "cifar10": (
        "plain_text",
        {"train": "4", "test": "1"},
        lambda c, n: {"img": _picture(n, 32, 32), "label": n % 10},
    ),
    "segments/sidewalk-semantic": (
        "default",
        {"train": "0.1"},
        lambda c, n: {"pixel_values": _picture(n, 1920, 1080), "label": _blocks((8, 8), 35, 1920, 1080)},
    ),
    "cppe-5": (
        "default",
        {"train": "0.25", "test": "0.05"},
        lambda c, n: {
            "image_id": n,
            "image": _picture(n, 640, 480),
            "width": 640,
            "height": 480,
            "objects": _boxes(n),
        },
    ),
    "food101": ("default", {"train": "2", "validation": "0.5"}, lambda c, n: {"image": _picture(n), "label": n % 101}),
}
"""Names (with a config after a colon where there are several), the config, splits with their share of rows, a row."""


ROWS["c4"] = ROWS["allenai/c4"]
KINDS = {
    "nyu-mll/glue": {"label": ClassLabel(names=["not_equivalent", "equivalent"])},
    "beans": {"labels": ClassLabel(names=["angular_leaf_spot", "bean_rust", "healthy"])},
    "cifar10": {"label": ClassLabel(num_classes=10)},
    "cppe-5": {
        "objects": {
            "id": List(Value("int64")),
            "area": List(Value("int64")),
            "bbox": List(List(Value("float32"))),
            "category": List(ClassLabel(names=["Coverall", "Face_Shield", "Gloves", "Goggles", "Mask"])),
        }
    },
}
"""Columns whose kind their values do not tell."""


def data(working, name, count):
    """Write a data set as the cache of ``datasets`` holds one that was read before."""
    config, splits, row = ROWS[name]
    repository = name.partition(":")[0]
    short = camelcase_to_snakecase(repository.rpartition("/")[2])
    place = "___".join([*repository.split("/")[:-1], short])
    folder = Path(working) / "hf" / "datasets" / place / config / "0.0.0" / REVISION
    if folder.exists():
        return
    chooser = random.Random(0)
    made = DatasetDict(
        {
            split: Dataset.from_list([row(chooser, n) for n in range(int(count * float(share)))])
            for split, share in splits.items()
        }
    )
    features = Features(next(iter(made.values())).features)
    for column, value in row(chooser, 0).items():
        if isinstance(value, Pictures.Image):
            features[column] = Image()
    features.update(KINDS.get(name, {}))
    folder.mkdir(parents=True)
    infos = SplitDict(dataset_name=short)
    for split, rows in made.items():
        with ArrowWriter(path=str(folder / f"{short}-{split}.arrow"), features=features) as writer:
            for one in rows:
                writer.write(one)
            number, size = writer.finalize()
        infos[split] = SplitInfo(split, size, number, dataset_name=short)
    info = DatasetInfo(
        features=features,
        splits=infos,
        builder_name="parquet",
        dataset_name=short,
        config_name=config,
        version=Version("0.0.0"),
    )
    info.write_to_directory(str(folder))
