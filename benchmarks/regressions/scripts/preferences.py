"""Train a Qwen2.5 0.5B by DPO in bf16, four pairs of 512 tokens at a time, with a tokenizer of ten words."""

import json
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

config = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
Path("qwen2").mkdir()
Path("qwen2/config.json").write_text(json.dumps(config))
words = {name: number for number, name in enumerate(["<pad>", "<eos>", "a", "b", "c", "d", "e", "f", "g", "<unk>"])}
tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
row = {"prompt": "a b " * 100, "chosen": " c d" * 300, "rejected": " e f" * 300}
options = DPOConfig("out", per_device_train_batch_size=4, max_length=512, bf16=True, max_steps=3, report_to=[])
trainer = DPOTrainer("qwen2", args=options, train_dataset=Dataset.from_list([row] * 32), processing_class=fast)
trainer.train()
