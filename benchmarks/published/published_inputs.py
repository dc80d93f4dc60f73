"""Stand-ins for what the published scripts ask the hub for: configs of the published sizes, tokenizers and rows.

The parts of the strangers' runner make them; here are only the names that it does not have.
"""

import json
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "strangers"))

import stranger_hub
from datasets import Image, List
from stranger_hub import llama
from stranger_inputs import Makers, sparse_weights
from tokenizers import Tokenizer, models, pre_tokenizers, processors

QWEN3_4B = stranger_hub.QWEN3_4B | {"max_position_embeddings": 40960, "rope_theta": 1000000}
LLAMA_32_3B = llama(
    "llama",
    "LlamaForCausalLM",
    128256,
    3072,
    8192,
    28,
    24,
    8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
    bos_token_id=128000,
    eos_token_id=128001,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
POWER_3B = llama(
    "granite",
    "GraniteForCausalLM",
    49152,
    2304,
    9216,
    40,
    36,
    36,
    tie_word_embeddings=True,
    embedding_multiplier=12.0,
    attention_multiplier=0.015625,
    residual_multiplier=0.22,
    logits_scaling=9.0,
    attention_dropout=0.1,
)
SANTACODER = {
    "model_type": "gpt_bigcode",
    "architectures": ["GPTBigCodeForCausalLM"],
    "vocab_size": 49280,
    "n_positions": 2048,
    "n_embd": 2048,
    "n_layer": 24,
    "n_head": 16,
    "n_inner": 8192,
    "activation_function": "gelu_pytorch_tanh",
    "multi_query": True,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "bos_token_id": 49152,
    "eos_token_id": 49152,
}
DINO = {
    "model_type": "dinov2",
    "architectures": ["Dinov2Model"],
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 518,
    "patch_size": 14,
    "dtype": "float32",
}


def flux2_klein(folder: Path) -> None:
    """FLUX.2-klein-base-4B: 3 875 544 576 weights of the transformer, which the published counts confirm."""
    parts = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    head = {"_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.37.0", "is_distilled": False}
    (folder / "model_index.json").write_text(json.dumps(head | parts))
    write = stranger_hub._part
    write(
        folder,
        "scheduler",
        _class_name="FlowMatchEulerDiscreteScheduler",
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    write(folder, "vae", _class_name="AutoencoderKLFlux2")
    write(
        folder,
        "transformer",
        _class_name="Flux2Transformer2DModel",
        in_channels=128,
        num_layers=5,
        num_single_layers=20,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=7680,
        timestep_guidance_channels=256,
        mlp_ratio=3.0,
        axes_dims_rope=[32, 32, 32, 32],
        rope_theta=2000,
        eps=1e-6,
        guidance_embeds=False,
    )
    write(folder, "text_encoder", **QWEN3_4B)
    (folder / "tokenizer").mkdir(exist_ok=True)
    stranger_hub.tokenizer(folder / "tokenizer", "qwen", QWEN3_4B)
    stranger_hub.absent(folder, "tokenizer/config.json")


def _llama32(config):
    """A byte-level tokenizer that begins each text, and takes each digit for a token."""
    made = stranger_hub._byte_level([], ["<|begin_of_text|>", "<|end_of_text|>"], config["vocab_size"])
    begin = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
    made.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A $B", special_tokens=[begin]
    )
    return made, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


QUERY, TEMPLATE = "How many apples are there?", "Question: {query} Think step by step.\nAnswer:"
BUCKET, ROWS_OF_BATCH = 20, 4
USUAL_TOKENS = 240


def metamath(working: Path, longest: list[int]) -> None:
    """Write the data sets of MetaMathQA's script as folders where it runs.

    A bucket of batches of usual length comes first, so that the optimizer has its state and the cache was emptied; the
    next begins with the batches of the given lengths.
    """
    folder = stranger_hub.model(working, "meta-llama/Llama-3.2-3B")
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = len(words.encode(TEMPLATE.format(query=QUERY)).ids)
    lengths = [USUAL_TOKENS] * BUCKET + [*longest, *[USUAL_TOKENS] * (BUCKET - len(longest))]
    rows = [
        {"type": "made", "query": QUERY, "response": "7" * (length - prompt), "original_question": QUERY}
        for length in lengths
        for _ in range(ROWS_OF_BATCH)
    ]
    assert len(words.encode(TEMPLATE.format(query=QUERY) + rows[0]["response"]).ids) == USUAL_TOKENS
    _lines("meta-math/MetaMathQA", "train", rows)
    math = [{"question": QUERY, "answer": f"{'7' * 60}\n#### {n}"} for n in range(60)]
    for split in ("train", "test"):
        _lines("openai/gsm8k", split, math)
    configs = (
        "- config_name: main\n  data_files:\n  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}"
    )
    Path("openai/gsm8k/README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    _lines("HuggingFaceFW/finewiki", "train", [{"text": "7" * 800} for _ in range(8)])


def weights(folder: Path) -> None:
    """Write zeros beside a model's config, named as this transformers names them: before 4.56 it begins with a file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / "model.safetensors"
    if path.exists():
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    named = {id(tensor): (name, tensor.shape) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    sparse_weights(path, dict(reversed(named.values())), "BF16", 2)  # tied ones once, by their first name


NANOCHAT_VOCABULARY = 65_536


def nanochat(home: Path) -> None:
    """Write a tokenizer of nanochat's vocabulary and two files of random text where its scripts look for them."""
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    import torch

    sys.path.insert(0, str(Path.cwd()))
    from nanochat.tokenizer import SPECIAL_TOKENS

    base = home / ".cache" / "nanochat"
    if (base / "base_data").exists():
        return
    size = NANOCHAT_VOCABULARY - len(SPECIAL_TOKENS)
    words = [bytes([n]) for n in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    ranks = {word: n for n, word in enumerate(words[:size])}
    special = {token: size + n for n, token in enumerate(SPECIAL_TOKENS)}
    (base / "tokenizer").mkdir(parents=True)
    made = tiktoken.Encoding("made", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=special)
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(made))
    torch.save(torch.ones(made.n_vocab, dtype=torch.int32), base / "tokenizer" / "token_bytes.pt")
    chooser = random.Random(0)
    texts = [" ".join("".join(chooser.choices("abcdefgh", k=6)) for _ in range(700)) for _ in range(4096)]
    (base / "base_data").mkdir()
    for n in range(2):  # the last is for validation
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, base / "base_data" / f"shard_{n:05d}.parquet", row_group_size=256)


MODDED_TOKENS = 20_000_000


def modded_nanogpt(log: Path) -> None:
    """Write the script that a log begins with beside the log, and random tokens where modded-nanogpt has its own."""
    text, edge = log.read_text("utf-8", "replace"), 100 * "=" + "\n"
    code, line, _ = text.removeprefix(edge).partition("\n" + edge)
    assert line, f"{log} does not begin with a script"
    Path(f"{log}.py").write_text(code, "utf-8")
    Path("logs").mkdir(exist_ok=True)  # some scripts expect the folder
    makers = Makers(Path.cwd())
    for part in ("train_000001", "train_000002", "val_000000"):
        path = Path("data/fineweb10B") / f"fineweb_{part}.bin"
        if not path.exists():
            makers.tokens(str(path), str(MODDED_TOKENS), "50257", "uint16", "20240520")


SMOL_LM2 = llama(
    "llama",
    "LlamaForCausalLM",
    49152,
    576,
    1536,
    30,
    9,
    3,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000,
    attention_dropout=0.0,
)
SMOL_LM2_NAMES = ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct")
SMOL_TOKENIZERS = ("HuggingFaceTB/cosmo2-tokenizer", "HuggingFaceTB/SmolLM2-360M-Instruct")
SIGLIP_SIZES = {"google/siglip-base-patch16-224": 224, "google/siglip2-base-patch16-256": 256}
CAULDRON_ROWS = 1024


def nanovlm(working: Path) -> None:
    """Write the backbones, the tokenizers and the rows that nanoVLM's script reads; texts are padded to its length."""
    import torch
    from transformers import SiglipVisionConfig, SiglipVisionModel

    for name in (*SMOL_LM2_NAMES, *SMOL_TOKENIZERS):
        stranger_hub.model(working, name)
    for name in SMOL_LM2_NAMES:
        folder = stranger_hub.folder_of(working, name)
        weights(folder)
        stranger_hub.absent(folder, "model.safetensors.index.json")
    for name, size in SIGLIP_SIZES.items():
        folder = stranger_hub.folder_of(working, name)
        sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        vision = {"model_type": "siglip_vision_model", "image_size": size, "patch_size": 16} | sizes
        text = {"model_type": "siglip_text_model"}
        stranger_hub._part(folder, ".", model_type="siglip", vision_config=vision, text_config=text)
        with torch.device("meta"):
            model = SiglipVisionModel(SiglipVisionConfig.from_pretrained(folder))
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        sparse_weights(folder / "model.safetensors", shapes, "F32", 4)
    stranger_hub.data(working, "HuggingFaceM4/the_cauldron", CAULDRON_ROWS)


ALPACA_ROWS, ALPACA_WORDS = 2000, 600
"""Rows of Alpaca2k, and words of each here: more than the 512 tokens that the published settings cut rows at."""


def litgpt(words: list[str]) -> None:
    """Write the checkpoint and the rows that a command of LitGPT names by its settings, where it runs.

    Weights are one zero each, seen as a tensor of the published shape.
    """
    import torch
    import yaml

    sys.path.insert(0, str(Path.cwd()))
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    folder = Path(yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())["checkpoint_dir"])
    if (folder / "lit_model.pth").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = Config.from_name(folder.name)
    save_config(config, folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GPT(config).state_dict().items()}
    zero = torch.zeros(1, dtype=torch.bfloat16)
    torch.save({name: zero.expand(shape) for name, shape in shapes.items()}, folder / "lit_model.pth")
    text = [f"w{n}" for n in range(1000)]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<unk>", "<s>", "</s>", *text])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    row = {"instruction": "w1", "input": "", "output": " ".join((text * 2)[:ALPACA_WORDS])}
    _lines("mhenrichsen/alpaca_2k_test", "train", [row] * ALPACA_ROWS)


def _lines(name: str, split: str, rows: list[dict[str, str]]) -> None:
    Path(name).mkdir(parents=True, exist_ok=True)
    (Path(name) / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


stranger_hub.PIPELINES["black-forest-labs/FLUX.2-klein-base-4B"] = flux2_klein
stranger_hub.MODELS["facebook/dinov2-base"] = (DINO, "dino")
stranger_hub.MODELS["meta-llama/Llama-3.2-3B"] = (LLAMA_32_3B, "llama32")
stranger_hub.MODELS["ibm/PowerLM-3b"] = (POWER_3B, "llama")
stranger_hub.MODELS["bigcode/gpt_bigcode-santacoder"] = (SANTACODER, "llama")
for smol in (*SMOL_LM2_NAMES, *SMOL_TOKENIZERS):
    stranger_hub.MODELS[smol] = (SMOL_LM2, "smol")
stranger_hub.TOKENIZERS["smol"] = lambda config: (
    stranger_hub._byte_level(["<|endoftext|>"], [], config["vocab_size"]),
    {"eos_token": "<|endoftext|>", "chat_template": stranger_hub.QWEN_CHAT},
)
stranger_hub.TOKENIZERS["llama32"] = _llama32
stranger_hub.PROCESSORS["dino"] = (
    "BitImageProcessor",
    {"shortest_edge": 256},
    [0.485, 0.456, 0.406],
    [0.229, 0.224, 0.225],
)
stranger_hub.ROWS["peft-internal-testing/cat-image-dataset"] = (
    "default",
    {"train": "1"},
    lambda c, n: {"image": stranger_hub._picture(n)},
)
stranger_hub.KINDS["HuggingFaceM4/the_cauldron"] = {"images": List(Image())}
stranger_hub.ROWS["HuggingFaceM4/the_cauldron"] = (
    "ai2d",
    {"train": "1"},
    lambda c, n: {
        "images": [stranger_hub._picture(n, 256, 256)],
        "texts": [{"user": "What is this?", "assistant": "A thing.", "source": "made"}],
    },
)


def make(working: Path, spec: str) -> None:
    """Make one input: ``model NAME``, ``weights NAME``, ``data NAME COUNT``, or that of a script by its name."""
    kind, *words = spec.split()
    makers: dict[str, Callable[[], object]] = {
        "model": lambda: stranger_hub.model(working, words[0]),
        "data": lambda: stranger_hub.data(working, words[0], int(words[1])),
        "weights": lambda: weights(stranger_hub.folder_of(working, words[0])),
        "nanochat": lambda: nanochat(working / "home"),
        "modded_nanogpt": lambda: modded_nanogpt(Path(words[0])),
        "nanovlm": lambda: nanovlm(working),
        "litgpt": lambda: litgpt(words),
        "metamath": lambda: metamath(working, [int(length) for length in words[0].split(",")]),
    }
    makers[kind]()


if __name__ == "__main__":
    make(Path(sys.argv[1]), " ".join(sys.argv[2:]))
