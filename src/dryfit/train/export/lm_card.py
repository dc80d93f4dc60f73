"""What a saved language model says of itself: how to open its folder with plain transformers and PEFT."""

from dryfit.tasks.lm.causal_lm import CausalLm
from dryfit.tasks.rows.prompts import parts_of
from dryfit.tasks.saved.model_input import ModelInput

_PROMPTS = {"criteria": "criteria_prompt", "both": "criteria_prompt", "evidence": "evidence_prompt"}


def lm_example(read: ModelInput, model: CausalLm, *, trust: bool) -> str:
    """A program that opens the folder without dryfit and writes an answer; run it inside the folder."""
    lm, code = read.settings.lm, ", trust_remote_code=True" if trust else ""
    if lm.format in _PROMPTS:
        template = getattr(lm, _PROMPTS[lm.format])
        prompt = f"{template!r}.format(criterion='a criterion', text='A text.')"
    else:
        prompt = repr("An instruction." if lm.format == "instruction" else "A text")
    chats = lm.chat != "off" and lm.format != "text"
    lines = [
        "import torch",
        *_opening(model, code),
        f'tokenizer = AutoTokenizer.from_pretrained("."{code})',
        "",
        f"prompt = {prompt}",
    ]
    if chats:
        lines += [
            "if tokenizer.chat_template is not None:",
            '    asked = [{"role": "user", "content": prompt}]',
            "    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)",
            "special = tokenizer.chat_template is None",
        ]
    lines += [
        f'tokens = tokenizer(prompt, add_special_tokens={"special" if chats else "True"}, return_tensors="pt")',
        'tokens = {name: tokens[name] for name in ("input_ids", "attention_mask")}',
        "with torch.no_grad():",
        f"    found = model.generate(**tokens, do_sample=False, max_new_tokens={lm.max_new_tokens},",
        "                           eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id)",
        'print(tokenizer.decode(found[0, tokens["input_ids"].shape[1]:], skip_special_tokens=True))',
    ]
    return "\n".join(lines) + "\n"


def _opening(model: CausalLm, code: str) -> list[str]:
    if model.adapted() is not None:
        return [
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer",
            "",
            "# The base is read from where adapter_config.json says that it lies.",
            f'model = AutoPeftModelForCausalLM.from_pretrained("."{code}).eval()',
        ]
    return [
        "from safetensors.torch import load_file",
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("."{code}){code}).eval()',
        'weights = {name.removeprefix("decoder."): value for name, value in load_file("model.safetensors").items()}',
        "model.load_state_dict(weights, strict=False)",
        "model.tie_weights()",
    ]


def lm_story(read: ModelInput, model: CausalLm, base: str | None) -> list[str]:
    """What it is and what it is asked, in sentences."""
    lora, lm = read.settings.lora, read.settings.lm
    how = f"with LoRA adapters of rank {lora.r} (this folder has these alone)" if model.adapted() is not None else ""
    asked = " and ".join(part.name.lower() for part in parts_of(lm))
    return [
        f"{base or 'A language model'} fine-tuned by dryfit {how}".rstrip() + ".",
        f"Format `{lm.format}`; it is asked for: {asked}. Prompts and answers have at most {read.max_length} tokens.",
    ]
