"""A stand-in for vLLM in tests: the interface that `tune` uses, on top of transformers, in fp32 on the CPU."""

from types import SimpleNamespace

import torch
import transformers


class SamplingParams(SimpleNamespace):
    pass


ENGINES = []


class LLM:
    def __init__(self, model, **settings):
        self.settings, self.sampling_params, self.is_fresh, self.is_packed = settings, [], False, False
        config = transformers.AutoConfig.from_pretrained(model)
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()  # load_format="dummy"
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(_finalizer=SimpleNamespace(atexit=True)))
        ENGINES.append(self)

    @torch.no_grad()
    def collective_rpc(self, method, *, kwargs):
        """Reload all weights. Loading into the model directly would fail where vLLM packs them, as on a CPU."""
        assert method == "reload_weights" and [*kwargs] == ["weights_iterator"]
        missing = {*dict(self.model.named_parameters())}
        for name, tensor in kwargs["weights_iterator"]:
            self.model.get_parameter(name).copy_(tensor)
            missing.remove(name)  # tied weights are sent once
        assert not missing
        self.is_fresh, self.is_packed = False, False

    def apply_model(self, function):
        """Call `function`, which must pack the weights again; this sets `is_packed`."""
        head = self.model.get_output_embeddings()
        head.cpu_linear, head.quant_method = True, SimpleNamespace(process_weights_after_loading=self.pack)
        return [function(self.model)]

    def pack(self, module):
        self.is_packed = True

    def reset_prefix_cache(self):
        self.is_fresh = True

    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert self.is_fresh and self.is_packed and not use_tqdm
        self.sampling_params.append(sampling_params)
        return [self.complete(*request) for request in zip(prompts, sampling_params, strict=True)]

    @torch.no_grad()
    def complete(self, prompt, params):
        draw = torch.Generator().manual_seed(params.seed)
        ids, log_probs, finish = [*prompt["prompt_token_ids"]], [], "length"
        for _ in range(params.max_tokens):
            log_p = (self.model(torch.tensor([ids])).logits[0, -1] / (params.temperature or 1)).log_softmax(-1)
            token = int(log_p.exp().multinomial(1, generator=draw) if params.temperature else log_p.argmax())
            ids.append(token)
            log_probs.append({token: SimpleNamespace(logprob=float(log_p[token]), rank=1)})
            if token in params.stop_token_ids:
                finish = "stop"
                break
        tokens = ids[-len(log_probs) :]
        output = SimpleNamespace(token_ids=tokens, logprobs=log_probs, finish_reason=finish)
        return SimpleNamespace(outputs=[output])
