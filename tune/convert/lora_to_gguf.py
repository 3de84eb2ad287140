"""Write an adapter as a separate GGUF file, which llama.cpp loads next to its base."""

from pathlib import Path
from typing import Any

from tune.convert.to_gguf import architecture_of, llama_cpp_tensors
from tune.errors import TuneError
from tune.files import written_aside
from tune.peft import LoRALinear, adapted_modules


def export_gguf_lora(model: Any, file: Path, model_type: str) -> None:
    """Write the adapter of `model`, of the family `model_type`, in fp32. Raises TuneError if llama.cpp does not support
    it: it trains more than low-rank matrices of linear layers, or there is no adapter."""
    import gguf

    architecture = architecture_of(model.config, model_type)
    layers: dict[str, Any] = dict(adapted_modules(model))
    parts = {id(part) for layer in layers.values() for part in (layer.lora_a, layer.lora_b)}
    others = [name for name, part in model.named_parameters() if part.requires_grad and id(part) not in parts]
    others += [name for name, layer in layers.items() if not isinstance(layer, LoRALinear)]
    if others or not layers:
        what = f"{others[0]} is trained, which is not a low-rank matrix of a linear layer" if others else "none found"
        raise TuneError(f"the adapter cannot be a separate GGUF file: {what}. Use --to gguf to merge it into the model")
    with written_aside(file) as unfinished:
        writer = gguf.GGUFWriter(unfinished, architecture.name)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 1.0)  # llama.cpp divides it by the rank
        for name, layer in layers.items():
            a, b = (factor.detach().float() for factor in layer.factors())
            if not (a.isfinite().all() and b.isfinite().all()):
                raise TuneError(f"the adapter of {name} has values that are not finite: training failed")
            b = b * layer.scaling * len(a)
            for new, part in llama_cpp_tensors(f"{name}.weight", b, model.config, architecture):
                writer.add_tensor(f"{new}.lora_a", a.contiguous().numpy())
                writer.add_tensor(f"{new}.lora_b", part.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
