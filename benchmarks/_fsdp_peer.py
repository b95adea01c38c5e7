"""A Hugging Face model with Liger's kernels under torch's FSDP2, one process for each GPU.

    torchrun --nproc-per-node 2 -m benchmarks._fsdp_peer '{"model": "llama-3.2-1b", "rows": 4, "seq": 2048, …}'

The first process prints a line of JSON. Parameters, computation and AdamW's state are bfloat16, as in `scaling`.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

from benchmarks import _hugging_face

STEPS = 8


def main(values: dict[str, Any], rows: int, seq: int, recomputed: bool) -> None:
    """Prints milliseconds a step and the peak of the first process's GPU.

    `values`: config.json. `rows`: of each GPU. `seq`: tokens in a row. `recomputed`: with gradient checkpointing.
    """
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    fsdp = importlib.import_module("torch.distributed.fsdp")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    _hugging_face.patch_with_liger(values["model_type"])
    config = transformers.AutoConfig.for_model(**values, use_cache=False)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.randint(0, values["vocab_size"], (rows, seq))
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if world > 1:
        for layer in model.model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, fused=True)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    if rank == 0:
        ms = 1e3 * (time.perf_counter() - start) / STEPS
        print(json.dumps(dict(ms=ms, peak=torch.cuda.max_memory_allocated())), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
