"""Shapes of the fused loss by name, (N, D, V): tokens, width and vocabulary, most of them of a model's head."""

HEADS = {
    "llama-3-8b-head": (8192, 4096, 128256),
    "gemma-2-2b-head": (8192, 2304, 256000),
    "qwen2-0.5b-head": (4096, 896, 151936),
    "llama-3-70b-head": (16384, 8192, 128256),
}
SHAPES = HEADS | {
    "small": (2048, 2048, 32000),
    "tiny": (128, 64, 1024),  # for trying a program without a GPU
}
