"""Models without weights on a virtual GPU: each case is a process of its own, as torch is changed for good."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.heavy

BEGIN = """
import gc, json, resource, sys, time
from pathlib import Path
import bitsandbytes
import torch
from torch import nn
from dryfit.gpu.device import virtual_gpu
from dryfit.meta.configs import catalogue_config

folder = Path(sys.argv[1])
said = {}

def host_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def kinds(model):
    return sorted({f"{p.dtype} {p.device}" for p in model.parameters()})

def saved(name, **changes):
    config = catalogue_config(name)
    config.update(changes)
    config.save_pretrained(folder / "model")
    return str(folder / "model")

real_open = open
"""


def rehearsed(code: str, folder: Path) -> dict[str, Any]:
    """Run code on a virtual GPU and return what it puts into ``said``."""
    script = folder / "script.py"
    body = textwrap.indent(textwrap.dedent(code), "    ")
    script.write_text(f"{BEGIN}\nwith virtual_gpu('h100-80'):\n{body}\nprint('SAID', json.dumps(said))\n")
    ran = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("SAID ")]
    assert ran.returncode == 0 and lines, ran.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("SAID "))


def test_a_config_is_enough_for_from_pretrained_and_no_memory_is_taken(tmp_path, cold):
    said = rehearsed(
        """
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
        before = host_mib()
        here = saved("Qwen/Qwen2.5-7B")
        for name, how in {
            "plain": {}, "fp32": {"dtype": torch.float32}, "cuda": {"device_map": "cuda"},
            "auto": {"device_map": "auto"}, "first": {"device_map": {"": 0}, "torch_dtype": torch.float16},
        }.items():
            model = AutoModelForCausalLM.from_pretrained(here, **how)
            said[name] = [kinds(model), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
            table = model.model.rotary_emb.inv_freq
            said[name].append(table[:2].tolist() if table.device.type == "cpu" else None)
            del model, table
            gc.collect()
            said["left"] = torch.cuda.memory_allocated()
            torch.cuda.empty_cache()
        _, info = AutoModelForSequenceClassification.from_pretrained(here, output_loading_info=True)
        said["missing"] = len(info["missing_keys"])
        made = AutoModelForCausalLM.from_config(catalogue_config("Qwen/Qwen2.5-7B"))
        said["config"] = [kinds(made), sum(p.nbytes for p in made.parameters()), made.lm_head.weight.requires_grad]
        said["host"] = host_mib() - before
        """,
        tmp_path,
    )
    size = 2 * 7_615_616_512
    assert said["plain"] == [["torch.bfloat16 cpu"], 0, 0, [1.0, pytest.approx(0.8058, abs=1e-4)]]
    assert said["fp32"][0] == ["torch.float32 cpu"]
    assert said["first"][0] == ["torch.float16 cuda:0"]
    for name in ("cuda", "auto"):
        kinds, allocated, reserved, _ = said[name]
        assert kinds == ["torch.bfloat16 cuda:0"] and size < allocated < size * 1.0001
        assert reserved < size + (32 << 20)  # transformers asks for all of it at once, then fills that
    assert said["left"] == 0 and said["missing"] == 0
    assert said["config"] == [["torch.bfloat16 cpu"], size, True]
    assert said["host"] < 300


def test_tied_weights_stay_tied_wherever_a_model_goes_and_copies_are_counted(tmp_path):
    said = rehearsed(
        """
        import copy
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(saved("Qwen/Qwen2.5-0.5B"), dtype="float32")
        tied = lambda one: one.lm_head.weight is one.model.embed_tokens.weight
        first = model.lm_head.weight
        said["tied"] = [tied(model), tied(model.cuda()), tied(model.cpu()), tied(model.to("cuda", torch.float16))]
        said["same"] = model.lm_head.weight is first
        one = torch.cuda.memory_allocated()
        twin = copy.deepcopy(model)
        said["copy"] = [tied(twin), isinstance(twin.lm_head.weight, nn.Parameter), twin.lm_head.weight is not first]
        said["twice"] = torch.cuda.memory_allocated() / one
        said["loaded"] = str(twin.load_state_dict(model.state_dict()))
        model.resize_token_embeddings(model.config.vocab_size + 1, mean_resizing=False)
        said["resized"] = [tied(model), list(model.lm_head.weight.shape)]
        said["pointers"] = len({p.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
        layer = nn.Linear(8, 8)
        for parameter in layer.parameters():
            parameter.data = parameter.data.to("cuda", torch.bfloat16)
        said["set"] = [str(layer(torch.zeros(2, 8, device="cuda", dtype=torch.bfloat16)).device)]
        layer.weight.data = torch.zeros(8, 8)
        said["set"].append(f"{layer.weight.dtype} {layer.weight.device}")
        said["shared memory"] = layer.cpu().share_memory() is layer
        recurrent = nn.LSTM(64, 64).cuda()
        said["recurrent"] = list(recurrent(torch.zeros(3, 2, 64, device="cuda"))[0].shape)
        """,
        tmp_path,
    )
    assert said["tied"] == [True] * 4 and said["same"]
    assert said["copy"] == [True] * 3 and said["twice"] == pytest.approx(2, abs=0.01)
    assert said["loaded"] == "<All keys matched successfully>"
    assert said["resized"] == [True, [151937, 896]]
    assert said["set"] == ["cuda:0", "torch.float32 cpu"] and said["shared memory"]
    assert said["pointers"] and said["recurrent"] == [3, 2, 64]


def test_quantised_weights_take_what_bitsandbytes_makes_of_them(tmp_path):
    said = rehearsed(
        """
        import copy, peft
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig
        here = saved("Qwen/Qwen2.5-0.5B", num_hidden_layers=2, layer_types=["full_attention"] * 2, vocab_size=64)

        def weights(model):
            sizes, count = {}, 0
            for part in model.modules():
                if isinstance(part, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
                    count += part.in_features * part.out_features
                    state = getattr(part.weight, "quant_state", None)
                    held = [part.weight, getattr(part.weight, "SCB", None)]
                    if state is not None:
                        held += [state.absmax, state.state2.absmax if state.state2 else None]
                    for one in held:
                        if one is not None:
                            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return sum(sizes.values()) / count

        for name, how in {
            "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            "double": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
            "int8": dict(load_in_8bit=True),
        }.items():
            model = AutoModelForCausalLM.from_pretrained(here, quantization_config=BitsAndBytesConfig(**how))
            said[name] = weights(model)
            weight = model.model.layers[0].mlp.up_proj.weight
            said[name + " class"] = [type(weight).__name__, isinstance(weight, nn.Parameter), str(weight.device)]
            twin = copy.deepcopy(weight)
            said[name + " copy"] = [type(twin).__name__, twin.nbytes == weight.nbytes, str(twin.device)]
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
            tokens = torch.zeros(2, 8, dtype=torch.long, device="cuda")
            model(input_ids=tokens, labels=tokens).loss.backward()
            said[name + " trained"] = sum(p.grad is not None for p in model.parameters())
            said[name + " merged"] = type(model.merge_and_unload().model.layers[0].mlp.up_proj).__name__
        config = catalogue_config("Qwen/Qwen2.5-0.5B")
        config.quantization_config = {"quant_method": "gptq", "bits": 4}
        config.save_pretrained(folder / "gptq")
        try:
            AutoModelForCausalLM.from_pretrained(folder / "gptq")
        except Exception as error:
            said["refused"] = str(error)
        """,
        tmp_path,
    )
    assert said["nf4"] == 0.5625
    assert said["double"] == pytest.approx(0.516, abs=5e-4)
    assert said["int8"] == pytest.approx(1.0034, abs=1e-3)
    for name, kind, layer in (("nf4", "Params4bit", "Linear4bit"), ("int8", "Int8Params", "Linear8bitLt")):
        assert said[f"{name} class"] == [kind, True, "cuda:0"] and said[f"{name} copy"] == [kind, True, "cuda:0"]
        assert said[f"{name} trained"] == 28 and said[f"{name} merged"] == layer
    assert "quantization_config of 'gptq'" in said["refused"] and "BitsAndBytesConfig" in said["refused"]


def test_files_of_weights_are_read_as_fakes_and_small_tensors_as_they_are(tmp_path):
    import torch
    from safetensors.torch import save_file

    large, small = torch.randn(512, 512), torch.arange(10.0)
    save_file({"large": large, "small": small}, tmp_path / "a.safetensors")
    torch.save(
        {"weights": {"one": large, "tied": large, "part": large[3:5].t(), "small": small}, "step": 7}, tmp_path / "a.pt"
    )
    torch.save({"large": large}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(512, 512), tmp_path / "module.pt")
    said = rehearsed(
        """
        from safetensors import safe_open
        from safetensors.torch import load_file
        fake = lambda one: [type(one).__name__, str(one.device), list(one.shape)]
        read = load_file(folder / "a.safetensors")
        said["file"] = [fake(read["large"]), read["small"].tolist()]
        with safe_open(folder / "a.safetensors", "pt", device="cuda") as file:
            said["open"] = [sorted(file.keys()), fake(file.get_tensor("large")), file.get_slice("large").get_shape()]
            said["slice"] = fake(file.get_slice("large")[:3])
        read = torch.load(folder / "a.pt")
        weights = read["weights"]
        said["load"] = [fake(weights["one"]), weights["small"].tolist(), read["step"]]
        said["tied"] = weights["one"] is weights["tied"]
        said["shared"] = weights["part"].untyped_storage().data_ptr() == weights["one"].untyped_storage().data_ptr()
        before = torch.cuda.memory_allocated()
        weights = torch.load(folder / "a.pt", map_location="cuda")["weights"]
        said["on cuda"] = [fake(weights["one"]), torch.cuda.memory_allocated() - before]
        said["old"] = fake(torch.load(folder / "old.pt", map_location="cuda:0")["large"])
        module = torch.load(folder / "module.pt", map_location="cuda", weights_only=False)
        said["module"] = fake(module.weight)
        from accelerate import init_empty_weights
        from accelerate.utils import set_module_tensor_to_device
        with init_empty_weights():
            module = torch.nn.Linear(10, 512, bias=True)
        set_module_tensor_to_device(module, "weight", "cpu", value=torch.ones(512, 10))
        set_module_tensor_to_device(module, "bias", "cuda", value=torch.ones(512))
        kept = [isinstance(one, torch.nn.Parameter) for one in module.parameters()]
        said["set"] = [*kept, str(module.bias.device), module.cuda().weight.device.type]
        """,
        tmp_path,
    )
    fake = ["FakeTensor", "cpu", [512, 512]]
    on_cuda = ["FakeTensor", "cuda:0", [512, 512]]
    assert said["file"] == [fake, small.tolist()]
    assert said["open"] == [["large", "small"], on_cuda, [512, 512]]
    assert said["slice"] == ["FakeTensor", "cuda:0", [3, 512]]
    assert said["load"] == [fake, small.tolist(), 7] and said["tied"] and said["shared"]
    assert said["on cuda"] == [on_cuda, (1 << 20) + 512]
    assert said["old"] == said["module"] == on_cuda
    assert said["set"] == [True, True, "cuda:0", "cuda"]


def test_adapters_need_no_more_than_their_config(tmp_path):
    said = rehearsed(
        """
        import peft
        from transformers import AutoModelForCausalLM
        here = saved("Qwen/Qwen2.5-0.5B", num_hidden_layers=2, layer_types=["full_attention"] * 2, vocab_size=64)
        peft.LoraConfig(
            target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path=here, inference_mode=True
        ).save_pretrained(folder / "adapter")
        adapter = str(folder / "adapter")

        def base():
            return AutoModelForCausalLM.from_pretrained(here, device_map="cuda")

        trained = lambda model: [kinds(model), sum(p.requires_grad for p in model.parameters())]
        said["trainable"] = trained(peft.PeftModel.from_pretrained(base(), adapter, is_trainable=True))
        said["sparing"] = trained(peft.PeftModel.from_pretrained(base(), adapter, low_cpu_mem_usage=True))
        said["auto"] = type(peft.AutoPeftModelForCausalLM.from_pretrained(adapter)).__name__
        model = base()
        model.load_adapter(adapter)
        said["native"] = [kinds(model), model.active_adapters()]
        said["merged"] = type(peft.PeftModel.from_pretrained(base(), adapter).merge_and_unload()).__name__
        """,
        tmp_path,
    )
    both = ["torch.bfloat16 cuda:0", "torch.float32 cuda:0"]
    assert said["trainable"] == [both, 28]
    assert said["sparing"] == [both, 0]
    assert said["auto"] == "PeftModelForCausalLM"
    assert said["native"] == [both, ["default"]] or said["native"] == [["torch.bfloat16 cuda:0"], ["default"]]
    assert said["merged"] == "Qwen2ForCausalLM"
