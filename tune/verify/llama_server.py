"""Serve a GGUF file with llama.cpp: a JSON line per request on standard input, and a JSON line per answer on standard
output, between llama.cpp's own output. This runs as a script and imports nothing from tune."""

import json
import sys


def serve(file: str, context: str, threads: str, *lora: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.warmup = int(context), 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.use_jinja = True
    params.swa_full = True  # else a text can continue from what an earlier one left in the cache of the windows
    if lora:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(lora[0], 1.0)]
    server = xllamacpp.Server(params)
    print('answer "ready"', flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        handle = server.handle_chat_completions if "messages" in request else server.handle_completions
        print("answer", json.dumps(handle(request)), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
